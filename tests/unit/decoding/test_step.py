"""The stages of a denoising step, without an engine: a model here is a table of logits by the tokens that it sees."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_dllm.decoding.drafters import chain_drafts, chain_lengths
from vllm_dllm.decoding.policies import Policy, PolicyParams
from vllm_dllm.decoding.records import UNREACHED, Measured, Progress, RequestOptions, Rules, Window
from vllm_dllm.decoding.schedules import quota_of_step
from vllm_dllm.decoding.step import (
    Accepted,
    Finished,
    choose,
    drafting_order,
    finish,
    origin_of,
    verify_drafts,
)
from vllm_dllm.decoding.verifiers import Verifier

MASK, VOCAB, LENGTH = 99, 50, 8
ROOM = torch.tensor([1000])


def rules_of(*, window_blocks: int = 1, **more: Any) -> Rules:
    given: dict[str, Any] = {
        "mask_id": MASK,
        "block_length": LENGTH,
        "columns": torch.arange(window_blocks * LENGTH),
        "group_length": LENGTH if window_blocks > 1 else None,
        "first_apart": False,
        "commit_emits": False,
        "threshold_inclusive": False,
    }
    return Rules(**{**given, **more})


def options_of(policy: Policy = Policy.STATIC, quota: int = 1, **more: Any) -> RequestOptions:
    given: dict[str, Any] = {
        "policies": {policy},
        "verifiers": {Verifier.EXACT},
        "policy": torch.tensor([policy]),
        "quota": torch.tensor([quota]),
        "quota_remainder": torch.tensor([0]),
        "verifier": torch.tensor([Verifier.EXACT]),
        "timed": torch.tensor([False]),
        "edit_threshold": None,
        "max_post_steps": torch.tensor([0]),
        "add_level": torch.tensor([100_000]),
        "full_level": torch.tensor([950_000]),
        "last_position": torch.tensor([UNREACHED]),
        "stop_token_ids": None,
    }
    return RequestOptions(**{**given, **more})


def params_of(options: RequestOptions, steps: Tensor, threshold: float = 0.5) -> PolicyParams:
    """Of ``steps`` [1, B]."""
    ones = torch.ones(steps.numel())
    return PolicyParams(
        policy=options.policy.expand(steps.numel()),
        quota=quota_of_step(options.quota, options.quota_remainder, steps.flatten()),
        threshold=ones * threshold,
        entropy_bound=ones,
        relaxed_threshold=ones,
        radius=ones.long(),
        factor=ones,
    )


def progress_of(**fields: int) -> Progress:
    names = [field.name for field in dataclasses.fields(Progress)]
    return Progress(**{name: torch.tensor([fields.get(name, 0)]) for name in names})


def window_of(branches: Sequence[Sequence[int]], progress: Progress | None = None, **more: Any) -> Window:
    """One request's branches, all forwarded."""
    progress = progress or progress_of()
    given: dict[str, Any] = {
        "progress": progress,
        "branches": torch.tensor([branches]),
        "present": torch.ones(1, len(branches), dtype=torch.bool),
        "levels": torch.arange(len(branches)).unsqueeze(0),
        "commit_only": torch.tensor([False]),
        "first_only": torch.tensor([False]),
        "before": torch.zeros(1, LENGTH, dtype=torch.int64),
        "generated": torch.arange(len(branches[0])) >= progress.first.unsqueeze(1),
    }
    given = {**given, **more}
    nothing = torch.zeros_like(given["generated"])
    return Window(denoises=~given["commit_only"], given=nothing, **given)


def measured_of(window: Window, model: int = 0, text: Sequence[int] = ()) -> Measured:
    """A token and a confidence of every position, by all that its block sees: the text and the window, to its end."""

    def of_block(seen: list[int]) -> tuple[Tensor, Tensor]:
        key = hashlib.sha256(repr((model, seen)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:6], "big"))
        # Most tokens are the same whatever the rest of the block holds, or no draft would ever be right.
        steady = ((torch.arange(LENGTH) + len(seen)) * 7 + model) % VOCAB
        other = torch.randint(VOCAB, (LENGTH,), generator=generator)
        token = torch.where(torch.rand(LENGTH, generator=generator) < 0.8, steady, other)
        confidence = torch.linspace(0.2, 0.9, LENGTH) + 0.05 * torch.rand(LENGTH, generator=generator)
        return token, confidence

    def of_branch(tokens: list[int]) -> tuple[Tensor, Tensor]:
        parts = [of_block([*text, *tokens[:end]]) for end in range(LENGTH, len(tokens) + 1, LENGTH)]
        return torch.cat([token for token, _ in parts]), torch.cat([confidence for _, confidence in parts])

    tokens, confidences = zip(*(of_branch(branch.tolist()) for branch in window.branches[0]), strict=True)
    return Measured(torch.stack(tokens).unsqueeze(0), torch.stack(confidences).unsqueeze(0))


def step(
    window: Window,
    measured: Measured,
    options: RequestOptions,
    rules: Rules,
    room: Tensor = ROOM,
    threshold: float = 0.5,
) -> tuple[Accepted, Finished]:
    params = params_of(options, window.progress.step.unsqueeze(1) + window.levels, threshold)
    accepted = verify_drafts(window, choose(window, measured, options, params, rules), options, rules)
    return accepted, finish(window, accepted, options, room, rules)


def masked(*tokens: int, length: int = LENGTH) -> list[int]:
    return [*tokens, *[MASK] * (length - len(tokens))]


def decode(options: RequestOptions, rules: Rules, *, drafts: int, model: int, num_tokens: int) -> tuple[list[int], int]:
    """Tokens of the first ``num_tokens`` positions, and the forwards that they took."""
    width = len(rules.columns)
    window = window_of([masked(length=width)])
    text: list[int] = []
    forwards = 0
    while len(text) < num_tokens:
        measured = measured_of(window, model, text[: int(window.progress.block_start)])
        accepted, finished = step(window, measured, options, rules)
        forwards += 1
        text += finished.emitted[0, : int(finished.num_emitted)].tolist()
        branches, levels = finished.tokens.unsqueeze(1), torch.zeros(1, 1, dtype=torch.int64)
        if drafts:
            steps = finished.progress.step.unsqueeze(1)
            order = drafting_order(finished, accepted, measured, options, params_of(options, steps), rules)
            lengths = chain_lengths(options.quota.expand(drafts).unsqueeze(0))
            made = chain_drafts(finished.tokens, order.available, order.rank, order.measured.token, lengths)
            count = int(made.present.sum())
            branches = torch.cat((branches, made.tokens[:, :count]), dim=1)
            levels = torch.cat((levels, made.levels[:, :count]), dim=1)
        window = window_of(branches[0].tolist(), finished.progress, levels=levels, before=finished.before)
    return text[:num_tokens], forwards


@pytest.mark.parametrize("window_blocks", [1, 3])
@pytest.mark.parametrize(("policy", "quota"), [(Policy.STATIC, 1), (Policy.STATIC, 3), (Policy.SEQUENTIAL, 1)])
def test_exact_drafts_change_no_token_and_save_forwards(policy: Policy, quota: int, window_blocks: int) -> None:
    options, saved = options_of(policy, quota), 0
    for model in range(10):
        plain, forwards = decode(options, rules_of(), drafts=0, model=model, num_tokens=32)
        rules = rules_of(window_blocks=window_blocks)
        drafted, fewer = decode(options, rules, drafts=4, model=model, num_tokens=32)
        assert drafted == plain
        saved += forwards - fewer
    assert saved > 0


def test_a_step_unmasks_the_most_confident_positions_and_keeps_the_rest() -> None:
    measured = Measured(torch.arange(8).view(1, 1, 8), torch.tensor([[[0.1, 0.9, 0.2, 0.8, 0.1, 0.3, 0.1, 0.1]]]))
    accepted, finished = step(window_of([masked(5)]), measured, options_of(quota=2), rules_of())
    assert accepted.tokens.tolist() == [[5, 1, MASK, 3, MASK, MASK, MASK, MASK]]
    assert accepted.chosen.nonzero()[:, 1].tolist() == [1, 3]
    assert finished.num_emitted.tolist() == [0]
    assert finished.tokens.equal(accepted.tokens)
    assert finished.progress.step.tolist() == [1]


def test_a_mask_token_of_the_prompt_is_a_token() -> None:
    window = window_of([masked(MASK, 7)], progress_of(first=2))
    for _ in range(LENGTH - 2):
        accepted, finished = step(window, measured_of(window), options_of(), rules_of())
        window = dataclasses.replace(window, branches=accepted.tokens.unsqueeze(1))
    assert accepted.tokens[0, :2].tolist() == [MASK, 7]
    assert finished.num_emitted.tolist() == [LENGTH - 2]
    assert finished.emitted[0, : LENGTH - 2].equal(accepted.tokens[0, 2:])


def test_a_finished_block_makes_way_for_the_next() -> None:
    window = window_of([masked(*range(7))], progress_of(block_start=16, first=2, step=6, prefix_copied=1))
    accepted, finished = step(window, measured_of(window), options_of(), rules_of())
    assert finished.before.equal(accepted.tokens)
    assert finished.tokens.tolist() == [masked()]
    assert not finished.may_draft.any()
    progress = {field.name: int(getattr(finished.progress, field.name)) for field in dataclasses.fields(Progress)}
    assert progress == dict.fromkeys(progress, 0) | {"block_start": 24, "commit": 1}


def test_a_forward_that_only_commits_changes_nothing() -> None:
    window = window_of([masked(4)], progress_of(commit=1, step=0), commit_only=torch.tensor([True]))
    accepted, finished = step(window, measured_of(window), options_of(), rules_of())
    assert accepted.tokens.tolist() == [masked(4)]
    assert not finished.may_draft.any()
    assert (finished.num_emitted.tolist(), finished.progress.step.tolist()) == ([0], [0])
    assert finished.progress.commit.tolist() == [0]


def test_a_commit_of_a_shifted_family_gives_the_first_token_of_the_next_block() -> None:
    rules = rules_of(first_apart=True, commit_emits=True)
    window = window_of([masked()], commit_only=torch.tensor([True]), first_only=torch.tensor([True]))
    measured = measured_of(window)
    accepted, finished = step(window, measured, options_of(), rules)
    first = int(measured.token[0, 0, 0])
    assert accepted.tokens.tolist() == [masked(first)]
    assert finished.emitted[0, :1].tolist() == [first]
    assert (finished.num_emitted.tolist(), finished.progress.first.tolist()) == ([1], [1])


@pytest.mark.parametrize(("block", "emitted"), [(masked(3, 8, 5), 2), (masked(3, MASK, 8), 0), (masked(3, 5), 0)])
def test_a_stop_token_ends_the_text_once_nothing_before_it_is_masked(block: list[int], emitted: int) -> None:
    options = options_of(stop_token_ids=torch.tensor([[8, -1]], dtype=torch.int32))
    measured = Measured(torch.full((1, 1, 8), 7), torch.linspace(0.1, 0.8, 8).view(1, 1, 8))
    _, finished = step(window_of([block]), measured, options, rules_of())
    assert finished.num_emitted.tolist() == [emitted]


@pytest.mark.parametrize(
    ("block", "last", "emitted"),
    [
        (masked(3, 4), 1, 2),
        (masked(3, MASK, 5), 1, 0),
        (masked(3, MASK, 5), 2, 0),
        (masked(3), 1, 0),
        (masked(3, 4, 5), -1, 0),
        (masked(3, 4, 5), 8, 0),
    ],
)
def test_a_text_ends_once_nothing_before_its_last_token_is_masked(block: list[int], last: int, emitted: int) -> None:
    window = window_of([block])
    options = options_of(last_position=window.progress.block_start + last)
    # The step unmasks the last position.
    measured = Measured(torch.full((1, 1, 8), 7), torch.linspace(0.1, 0.8, 8).view(1, 1, 8))
    _, finished = step(window, measured, options, rules_of())
    assert finished.num_emitted.tolist() == [emitted]


@pytest.mark.parametrize(
    ("commit_emits", "last", "emitted"), [(False, 0, 0), (False, 1, 0), (True, 0, 1), (True, 1, 1)]
)
def test_a_commit_ends_no_text_behind_its_one_token(commit_emits: bool, last: int, emitted: int) -> None:
    """Though the next block was given more."""
    window = window_of([masked(3, 4)], commit_only=torch.tensor([True]), first_only=torch.tensor([False]))
    options = options_of(last_position=window.progress.block_start + last)
    _, finished = step(window, measured_of(window), options, rules_of(first_apart=True, commit_emits=commit_emits))
    assert finished.num_emitted.tolist() == [emitted]


def test_a_text_whose_tokens_may_still_be_edited_does_not_end_inside_a_block() -> None:
    window = window_of([masked(3, 4)])
    last = window.progress.block_start + 1
    options = options_of(edit_threshold=torch.tensor([0.9]), last_position=last)
    _, finished = step(window, measured_of(window), options, rules_of())
    assert finished.num_emitted.tolist() == [0]


def test_no_request_emits_more_than_it_has_room_for() -> None:
    window = window_of([masked(*range(7))])
    _, finished = step(window, measured_of(window), options_of(), rules_of(), room=torch.tensor([3]))
    assert finished.num_emitted.tolist() == [3]


def test_a_block_is_looked_at_again_until_nothing_is_edited() -> None:
    options = options_of(edit_threshold=torch.tensor([0.6]), max_post_steps=torch.tensor([2]))
    tokens = torch.arange(8).view(1, 1, 8)
    sure, unsure = torch.full((1, 1, 8), 0.7), torch.full((1, 1, 8), 0.5)
    window = window_of([[*range(7), MASK]])
    _, finished = step(window, Measured(tokens, unsure), options, rules_of())
    assert finished.tokens.equal(tokens[0])  # without masks, but nobody has looked at it yet
    looks = window_of([list(range(8))])
    _, again = step(looks, Measured(tokens, sure), options, rules_of())
    assert again.progress.commit.tolist() == [1]  # nothing to edit
    edited, kept = step(looks, Measured(tokens.flip(2), sure), options, rules_of())
    assert edited.tokens.equal(tokens.flip(2)[0])
    assert (kept.progress.commit.tolist(), kept.progress.post_steps.tolist()) == ([0], [1])
    last = window_of([list(range(8))], progress_of(post_steps=1))
    _, settled = step(last, Measured(tokens.flip(2), sure), options, rules_of())
    assert settled.progress.commit.tolist() == [1]  # it has had its post-edit steps


def test_the_step_goes_on_from_the_deepest_accepted_draft() -> None:
    """Branch 1 is the target of the block as it stands, branch 2 is not the target of branch 1."""
    rules, options = rules_of(), options_of(Policy.SEQUENTIAL)
    branches = [masked(1), masked(1, 2), masked(1, 2, 4)]
    token = torch.tensor([[[0, 2, 3, 4, 0, 0, 0, 0]] * 3])
    window = window_of(branches)
    params = params_of(options, window.levels)
    choice = choose(window, Measured(token, torch.full(token.shape, 0.5)), options, params, rules)
    accepted = verify_drafts(window, choice, options, rules)
    assert (accepted.branch.tolist(), accepted.skipped.tolist()) == ([1], [1])
    assert accepted.reached.tolist() == [[True, True, False]]
    assert accepted.tokens.tolist() == [masked(1, 2, 3)]
    origin = origin_of(window, choice, accepted, options, rules)
    assert origin.written.nonzero()[:, 1].tolist() == [1, 2]
    assert origin.branch[0, 1:3].tolist() == [0, 1]
    assert origin.step[0, 1:3].tolist() == [0, 1]
    assert finish(window, accepted, options, ROOM, rules).progress.step.tolist() == [2]


def test_an_edited_token_comes_from_the_accepted_draft() -> None:
    """Branch 1 is the target of the block as it stands, and edits the first token."""
    rules = rules_of()
    options = options_of(Policy.SEQUENTIAL, edit_threshold=torch.tensor([0.4]))
    window = window_of([masked(1), masked(1, 2)])
    token = torch.tensor([[[1, 2, 0, 0, 0, 0, 0, 0], [9, 2, 3, 0, 0, 0, 0, 0]]])
    params = params_of(options, window.levels)
    choice = choose(window, Measured(token, torch.full(token.shape, 0.5)), options, params, rules)
    accepted = verify_drafts(window, choice, options, rules)
    assert accepted.tokens.tolist() == [masked(9, 2, 3)]
    origin = origin_of(window, choice, accepted, options, rules)
    assert origin.written[0, :3].tolist() == [True, True, True]
    assert origin.branch[0, :3].tolist() == [1, 0, 1]
    assert origin.step[0, :3].tolist() == [1, 0, 1]


def test_a_window_of_several_blocks_moves_on_when_its_first_block_was_forwarded_whole() -> None:
    rules, width = rules_of(window_blocks=2), 2 * LENGTH
    window = window_of([masked(*range(7), length=width)])
    accepted, finished = step(window, measured_of(window), options_of(), rules)
    assert (finished.num_emitted.tolist(), finished.shift.tolist()) == ([8], [0])  # type: ignore[union-attr]
    window = window_of([accepted.tokens[0].tolist()], finished.progress)
    accepted, finished = step(window, measured_of(window), options_of(), rules)
    assert finished.shift is not None
    assert finished.shift.tolist() == [8]
    assert finished.num_emitted.tolist() == [0]
    assert finished.tokens[0].tolist() == [*accepted.tokens[0, 8:].tolist(), *masked()]
    assert (finished.progress.block_start.tolist(), finished.progress.first.tolist()) == ([8], [0])


def test_records_are_taken_apart_and_put_together_by_request() -> None:
    count = len(Progress.__dataclass_fields__)
    progress = Progress(*torch.arange(3 * count).view(count, 3).unbind(0))
    first, rest = progress.select(torch.tensor([1])), progress.select(torch.tensor([0, 2]))
    joined = Progress.cat([first, rest]).select(torch.tensor([1, 0, 2]))
    assert joined.step.equal(progress.step)
    assert joined.passes.equal(progress.passes)
