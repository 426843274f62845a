"""Rounds of LinearSpec, by hand."""

from typing import Any

import torch

from tests.unit.decoding.test_step import LENGTH, MASK, rules_of
from vllm_dllm.decoding.linear_spec import Speculated, place_draws, speculate
from vllm_dllm.decoding.records import Measured, Progress, Window
from vllm_dllm.decoding.step import Choice

RULES = rules_of(first_apart=True, commit_emits=True)


def forward(
    block: list[int], written: dict[int, int], *, verifies: bool = False, before: list[int] | None = None, **more: Any
) -> Speculated:
    """A forward over ``block`` that says ``written`` of columns; room for ten tokens, if ``more`` says no other."""
    room = more.pop("room", 10)
    stand = {"block_start": 40, "first": 1, "commit": verifies, **more}
    progress = Progress(*(torch.tensor([int(stand.get(name, 0))]) for name in Progress.__dataclass_fields__))
    tokens, flag = torch.tensor([[block]]), torch.tensor([verifies])
    token = torch.tensor([[[written.get(column, 0) for column in range(LENGTH)]]])
    chosen = torch.tensor([[[column in written and not verifies for column in range(LENGTH)]]])
    window = Window(
        progress=progress,
        branches=tokens,
        present=torch.ones(1, 1, dtype=torch.bool),
        levels=torch.zeros(1, 1, dtype=torch.int64),
        commit_only=flag,
        denoises=~flag,
        first_only=flag,
        before=torch.tensor([before or [0] * LENGTH]),
        generated=RULES.columns >= progress.first.unsqueeze(1),
        given=torch.zeros(1, len(RULES.columns), dtype=torch.bool),
    )
    choice = Choice(tokens == MASK, chosen, None, torch.where(chosen, token, tokens))
    measured = Measured(token, torch.ones(1, 1, LENGTH))
    return speculate(window, measured, choice, torch.tensor([room]), RULES)


def emitted(found: Speculated) -> list[int]:
    return found.finished.emitted[0, : int(found.finished.num_emitted)].tolist()


def test_a_block_is_drafted_until_it_is_whole_and_then_waits_to_be_verified() -> None:
    masked = [7] + [MASK] * (LENGTH - 1)
    found = forward(masked, {2: 12}, first=0)
    # The seed of the prompt is told with the first draft.
    assert emitted(found) == [7]
    assert found.finished.tokens.tolist() == [[7, MASK, 12, *[MASK] * (LENGTH - 3)]]
    assert (int(found.finished.progress.first), int(found.finished.progress.commit)) == (1, 0)
    found = forward(masked, {column: 10 + column for column in range(1, LENGTH)})
    assert emitted(found) == []
    assert found.finished.before.tolist() == [[7, *range(11, 10 + LENGTH)]]
    assert found.finished.tokens.tolist() == [[MASK] * LENGTH]
    assert (int(found.finished.progress.block_start), int(found.finished.progress.commit)) == (40 + LENGTH, 1)
    assert int(found.verified) == 0


def test_the_longest_run_of_agreeing_drafts_stays_and_one_token_more() -> None:
    block = [7, *range(11, 10 + LENGTH)]
    for agreed in range(LENGTH):
        # Column j tells what stands at position j of the block, column 0 what stands behind it.
        says = {column: 10 + column for column in range(1, LENGTH)} | {0: 99}
        if agreed < LENGTH - 1:
            says[agreed + 1] = 50
        found = forward([MASK] * LENGTH, says, verifies=True, before=block, block_start=40 + LENGTH)
        more = 99 if agreed == LENGTH - 1 else 50
        assert emitted(found) == [*block[1 : 1 + agreed], more]
        assert found.finished.tokens.tolist() == [[more, *[MASK] * (LENGTH - 1)]]
        assert int(found.finished.progress.block_start) == 40 + agreed + 1
        assert (int(found.finished.progress.first), int(found.finished.progress.commit)) == (1, 0)
        assert (int(found.verified), int(found.accepted.skipped)) == (LENGTH - 1, agreed)
        assert found.origin.written.sum() == agreed + 1
        assert found.origin.place is not None
        assert found.origin.place[0].tolist() == list(range(1 - LENGTH, 1))


def test_no_more_tokens_are_told_than_there_is_room_for() -> None:
    block = [7, *range(11, 10 + LENGTH)]
    says = {column: 10 + column for column in range(1, LENGTH)} | {0: 99}
    assert emitted(forward([MASK] * LENGTH, says, verifies=True, before=block, room=2)) == [11, 12]


def test_a_position_is_drawn_with_one_noise_whoever_draws_it() -> None:
    columns = torch.arange(LENGTH)
    positions = torch.stack((40 + columns, 40 + LENGTH + columns, 40 + LENGTH + columns, 40 + columns))
    rounds = torch.tensor([3, 0, 0, 3])
    verifies, speculates = torch.tensor([0, 1, 1, 0]).bool(), torch.tensor([1, 1, 0, 0]).bool()
    placed, of = place_draws(positions, rounds, verifies, speculates)
    # A draft; the same block verified, with the position behind it; others, which stay as they are.
    assert placed[0].tolist() == (40 + columns).tolist()
    assert placed[1].tolist() == [40 + LENGTH, *range(41, 40 + LENGTH)]
    assert placed[2:].equal(positions[2:])
    assert of.tolist() == [0, 0, 0, 3]
