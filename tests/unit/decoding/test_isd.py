"""Strides of introspective decoding, by hand: N is 3, so a forward has 5 positions."""

from dataclasses import replace
from typing import Any

import torch

from tests.unit.decoding.test_step import MASK, rules_of
from vllm_dllm.decoding.isd import place_strides, stride, texts_of_rows
from vllm_dllm.decoding.linear_spec import Speculated
from vllm_dllm.decoding.records import Measured, Progress, Window

LENGTH = 5
RULES = replace(rules_of(), block_length=LENGTH, columns=torch.arange(LENGTH), first_apart=True, commit_emits=True)


def forward(
    tokens: list[int], follows: list[int], *, room: int = 10, forced: list[int] | None = None, **more: int
) -> Speculated:
    """A forward over ``tokens`` from position 40 on whose rows say ``follows``; a later one than the first."""
    stand: dict[str, Any] = {"block_start": 40, "step": 7, **more}
    progress = Progress(*(torch.tensor([stand.get(name, 0)]) for name in Progress.__dataclass_fields__))
    flag = torch.tensor([True])
    window = Window(
        progress=progress,
        branches=torch.tensor([[tokens]]),
        present=torch.ones(1, 1, dtype=torch.bool),
        levels=torch.zeros(1, 1, dtype=torch.int64),
        commit_only=~flag,
        denoises=flag,
        first_only=~flag,
        before=torch.zeros(1, LENGTH, dtype=torch.int64),
        generated=torch.ones(1, LENGTH, dtype=torch.bool),
    )
    # Column j is what row j - 1 says, and column 0 what the last row does.
    token = torch.tensor([[[follows[-1], *follows[:-1]]]])
    measured = Measured(token, torch.ones(1, 1, LENGTH))
    must = None if forced is None else torch.tensor([forced])
    return stride(window, measured, torch.tensor([room]), RULES, must)


def emitted(found: Speculated) -> list[int]:
    return found.finished.emitted[0, : int(found.finished.num_emitted)].tolist()


def state(found: Speculated) -> tuple[list[int], int]:
    return found.finished.tokens[0].tolist(), int(found.finished.progress.block_start)


def test_the_first_forward_has_no_drafts_and_tells_the_seed_of_the_prompt_too() -> None:
    found = forward([7, MASK, MASK, MASK, MASK], [11, 12, 13, 14, 15], step=0)
    assert emitted(found) == [7, 11]
    assert state(found) == ([11, 12, 13, MASK, MASK], 41)
    assert (int(found.verified), int(found.accepted.skipped), int(found.finished.progress.step)) == (0, 0, 1)
    assert found.origin.written.tolist() == [[False, True, False, False, False]]
    # Of the seed the row of its prefill is kept.
    assert found.origin.place is not None
    assert found.origin.place[0, 1] == 1


def test_drafts_that_are_all_right_give_the_next_ones() -> None:
    found = forward([11, 12, 13, MASK, MASK], [12, 13, 14, 15, 16])
    assert emitted(found) == [12, 13, 14]
    assert state(found) == ([14, 15, 16, MASK, MASK], 43)
    assert (int(found.verified), int(found.accepted.skipped)) == (2, 2)
    assert found.origin.written.tolist() == [[True, True, True, False, False]]
    assert found.origin.place is not None
    assert found.origin.place[0, :3].tolist() == [1, 2, 3]


def test_behind_a_wrong_draft_nothing_is_drafted() -> None:
    found = forward([11, 12, 98, MASK, MASK], [12, 13, 14, 15, 16])
    assert emitted(found) == [12, 13]
    assert state(found) == ([13, MASK, MASK, MASK, MASK], 42)
    assert (int(found.verified), int(found.accepted.skipped)) == (2, 1)
    # A draft that agrees behind one that does not is not looked at.
    found = forward([11, 98, 13, MASK, MASK], [12, 13, 14, 15, 16])
    assert emitted(found) == [12]
    assert state(found) == ([12, MASK, MASK, MASK, MASK], 41)


def test_no_more_tokens_than_the_request_may_have() -> None:
    found = forward([11, 12, 13, MASK, MASK], [12, 13, 14, 15, 16], room=2)
    assert emitted(found) == [12, 13]


def test_what_must_follow_a_token_replaces_what_the_model_says() -> None:
    found = forward([11, 12, 13, MASK, MASK], [12, 13, 14, 15, 16], forced=[-1, 50, -1, -1, -1])
    assert emitted(found) == [12, 50]
    assert state(found) == ([50, MASK, MASK, MASK, MASK], 42)


def test_a_row_has_the_told_text_and_the_drafts_before_it_as_its_text() -> None:
    window, start = torch.tensor([[7, 11, 12, MASK, MASK]] * 2), torch.tensor([40, 40])
    is_told = torch.tensor([True, False])
    # As the logits come, the last row first, and as log-probabilities want them, in the order of what is told.
    for positions in (
        torch.tensor([[45, 41, 42, 43, 44]] * 2),
        torch.tensor([[41, 42, 43, 44, 45], [40, 41, 42, 43, 44]]),
    ):
        number, tokens = texts_of_rows(positions, window, start, is_told)
        for row, told in enumerate(is_told.tolist()):
            for place, position in enumerate(positions[row].tolist()):
                count = int(number[row, place])
                before = tokens[row, place - count + 1 : place + 1].tolist()
                # The seed is a draft where it was not told.
                assert before == window[row, int(told) : position - 40].tolist() or (place, position) == (0, 45)
    # The first token of a text comes from its prompt alone.
    number, _ = texts_of_rows(torch.tensor([[40]]), window[:1], start[:1], torch.tensor([False]))
    assert number.tolist() == [[0]]


def test_every_row_predicts_the_position_behind_its_own() -> None:
    positions = torch.tensor([[40, 41, 42, 43, 44]])
    assert place_strides(positions).tolist() == [[45, 41, 42, 43, 44]]
