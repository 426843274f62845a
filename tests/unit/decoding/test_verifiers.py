"""Verification of drafts against walks and searches in plain Python."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import examples
from vllm_dllm.decoding.verifiers import Verdict, Verifier, sources, verify

MASK = 9
OF_THEIR_OWN = (Verifier.FEF, Verifier.LINEAR_SPEC, Verifier.S2D2, Verifier.ISD)
"""Verifiers that accept drafts in modules of their own."""
M = MASK
State = tuple[int, ...]


class Found(NamedTuple):
    accepted: int
    skipped: int
    reached: set[int]


@dataclass(frozen=True)
class Request:
    """Branches of a request, as many as its neighbours have; some may be absent."""

    verifier: Verifier
    branches: list[State]
    targets: list[State]
    present: list[bool]
    levels: list[int]
    timed: bool

    def walk(self) -> Found:
        """FreeDave and Spiffy, and FreeDave's subset rule: step by step, to the largest branch that is accepted."""
        at, path = 0, [0]
        while True:
            following = [k for k in range(1, len(self.branches)) if k != at and self.accepts(at, k)]
            if not following:
                return Found(at, len(path) - 1, set(path))
            at = following[-1]
            path.append(at)

    def accepts(self, p: int, k: int) -> bool:
        if not self.present[k]:
            return False
        if self.verifier == Verifier.EXACT:
            in_time = not self.timed or self.levels[k] == self.levels[p] + 1
            return self.targets[p] == self.branches[k] and in_time
        return part_of(self.branches[p], self.branches[k]) and part_of(self.branches[k], self.targets[p])

    def search(self) -> Found:
        """PSD: everything that any path of accepted branches leads to; the deepest, the first among equals."""
        reached, new = {0}, [0]
        while new:
            p = new.pop()
            for k in range(1, len(self.branches)):
                if k not in reached and self.accepts(p, k):
                    reached.add(k)
                    new.append(k)
        deepest = max(sorted(reached), key=lambda k: -self.branches[k].count(MASK))
        return Found(deepest, self.levels[deepest], reached)

    def expected(self) -> Found:
        if self.verifier == Verifier.NONE:
            return Found(0, 0, {0})
        return self.search() if self.verifier == Verifier.PSD else self.walk()


def part_of(part: State, whole: State) -> bool:
    return all(a in (MASK, b) for a, b in zip(part, whole, strict=True))


@st.composite
def later_states(draw: st.DrawFn, state: State) -> State:
    """At least one mask less, unless there is none."""
    masks = [i for i, token in enumerate(state) if token == MASK]
    if not masks:
        return state
    chosen = draw(st.sets(st.sampled_from(masks), min_size=1))
    # Mostly the same token, so that states meet.
    return tuple(draw(st.sampled_from([0, 0, 0, 1])) if i in chosen else token for i, token in enumerate(state))


@st.composite
def requests(draw: st.DrawFn, num_branches: int, width: int) -> Request:
    verifier = draw(st.sampled_from([kind for kind in Verifier if kind not in OF_THEIR_OWN]))
    branches: list[State] = [tuple(draw(st.lists(st.sampled_from([MASK, MASK, 0]), min_size=width, max_size=width)))]
    for _ in range(num_branches - 1):
        state = draw(later_states(draw(st.sampled_from(branches))))
        if state in branches:
            break
        branches.append(state)
    present = [True, *(draw(st.sampled_from([True, True, True, False])) for _ in branches[1:])]
    if verifier == Verifier.NONE:
        present[1:] = [False] * (len(branches) - 1)
    absent = num_branches - len(branches)
    branches += [(MASK,) * width] * absent
    present += [False] * absent
    # Next states: those of other branches, now and then.
    targets = []
    for branch in branches:
        later = [other for other in branches if other != branch and part_of(branch, other)]
        aims = [st.sampled_from(later)] * 3 if later else []
        targets.append(draw(st.one_of(*aims, later_states(branch))))
    levels = [0, *(draw(st.integers(1, 4)) for _ in branches[1:])]
    return Request(verifier, branches, targets, present, levels, draw(st.booleans()))


def verdict_of(batch: list[Request], verifiers: set[Verifier] | None = None) -> Verdict:
    return verify(
        torch.tensor([r.branches for r in batch]),
        torch.tensor([r.targets for r in batch]),
        torch.tensor([r.present for r in batch]),
        torch.tensor([r.levels for r in batch]),
        torch.tensor([r.timed for r in batch]),
        torch.tensor([int(r.verifier) for r in batch]),
        mask_id=MASK,
        verifiers={r.verifier for r in batch} - {Verifier.NONE} if verifiers is None else verifiers,
        most_branches=max(len(r.branches) for r in batch),
    )


def found(verdict: Verdict, row: int) -> Found:
    reached = set(verdict.reached[row].nonzero().flatten().tolist())
    return Found(int(verdict.accepted[row]), int(verdict.skipped[row]), reached)


shapes = st.tuples(st.integers(2, 9), st.integers(1, 6))
batches = shapes.flatmap(lambda shape: st.lists(requests(*shape), min_size=1, max_size=6))


@given(batches)
@examples(300)
def test_every_request_of_a_mixed_batch_goes_where_its_verifier_leads(batch: list[Request]) -> None:
    verdict = verdict_of(batch)
    for row, request in enumerate(batch):
        assert found(verdict, row) == request.expected()
        assert request.present[int(verdict.accepted[row])]


@given(batches)
def test_verifiers_that_nobody_asked_for_change_nothing(batch: list[Request]) -> None:
    every = verdict_of(batch, {Verifier.EXACT, Verifier.SUBSET, Verifier.PSD})
    for ours, theirs in zip(every, verdict_of(batch), strict=True):
        assert torch.equal(ours, theirs)


@given(batches)
@examples(300)
def test_tokens_come_from_the_fullest_branch_that_masked_them_and_went_on_to_them(batch: list[Request]) -> None:
    verdict = verdict_of(batch)
    branches, targets = (torch.tensor([getattr(r, name) for r in batch]) for name in ("branches", "targets"))
    source = sources(branches, targets, verdict.accepted, verdict.reached, mask_id=MASK)
    for row, request in enumerate(batch):
        accepted, _, reached = request.expected()
        block = request.branches[accepted]
        parts = [k for k in sorted(reached) if part_of(request.branches[k], block)]
        for position, token in enumerate(block):
            masked_there = [k for k in parts if request.branches[k][position] == MASK]
            if token == MASK:
                assert int(source[row, position]) == accepted
            elif masked_there:  # tokens that the root has have no source
                given = [k for k in masked_there if request.targets[k][position] == token]
                assert int(source[row, position]) == max(given, key=lambda k: -request.branches[k].count(MASK))


def test_a_branch_beside_the_path_that_wants_another_token_gave_none() -> None:
    """PSD reaches a draft from the root, past a smaller draft that would have another token at its second position."""
    branches = torch.tensor([[[M, M, M], [1, M, M], [1, 2, M]]])
    targets = torch.tensor([[[1, 2, M], [1, 7, M], [1, 2, 3]]])
    accepted, reached = torch.tensor([2]), torch.ones(1, 3, dtype=torch.bool)
    assert sources(branches, targets, accepted, reached, mask_id=M).tolist() == [[0, 0, 2]]


@pytest.mark.parametrize(
    ("verifier", "accepted", "skipped"), [(Verifier.EXACT, 0, 0), (Verifier.SUBSET, 2, 2), (Verifier.PSD, 2, 2)]
)
def test_a_next_state_with_more_tokens_confirms_a_draft_by_the_inexact_rules_only(
    verifier: Verifier, accepted: int, skipped: int
) -> None:
    branches = [(0, M, M, M), (0, 1, M, M), (0, 1, 2, M)]
    targets = [(0, 1, M, 3), (0, 1, 2, 3), (0, 1, 2, 3)]
    request = Request(verifier, branches, targets, [True] * 3, [0, 1, 2], timed=False)
    assert found(verdict_of([request]), 0)[:2] == (accepted, skipped)


def test_psd_joins_paths_and_prefers_the_first_of_equal_depth() -> None:
    branches = [(M, M, M), (0, M, M), (M, 1, M), (0, 1, M), (0, M, 2)]
    targets = [(0, 1, M), (0, M, 2), (0, 1, M), (0, 1, 2), (0, 1, 2)]
    request = Request(Verifier.PSD, branches, targets, [True] * 5, [0, 1, 1, 2, 2], timed=False)
    assert found(verdict_of([request]), 0) == Found(3, 2, {0, 1, 2, 3, 4})


def test_where_the_schedule_counts_steps_a_draft_that_skips_one_is_not_followed() -> None:
    """The next state of what comes after two steps at once would be that of another quota."""
    branches = [(M, M, M, M), (0, M, M, M), (0, 1, M, M)]
    targets = [(0, 1, M, M), (0, 1, M, M), (0, 1, 2, M)]
    for timed, accepted in ((False, 2), (True, 0)):
        request = Request(Verifier.EXACT, branches, targets, [True] * 3, [0, 1, 2], timed)
        assert found(verdict_of([request]), 0).accepted == accepted
