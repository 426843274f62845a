"""Properties of the unmasking policies, and their equality with the plain reference."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from reference.decode import Options, Prediction, choose
from torch import Tensor

from vllm_dllm.config import POLICY_NAMES
from vllm_dllm.decoding.policies import (
    ALL_POLICIES,
    Policy,
    PolicyParams,
    edits,
    policy_scores,
    quota_of_step,
    stop_length,
    sub_block_candidates,
    unmask,
)

# Multiples of 1/16 are exact in float32, so sums and comparisons agree with Python's; few of them make ties.
sixteenths = st.integers(0, 16).map(lambda n: n / 16)


@dataclass(frozen=True)
class Row:
    """One request of a batch, in Python values."""

    candidates: list[bool]
    confidence: list[float]
    entropy: list[float]
    policy: Policy
    quota: int
    threshold: float
    entropy_bound: float
    relaxed_threshold: float
    radius: int


def rows_of(length: int, policies: tuple[Policy, ...] = tuple(Policy)) -> st.SearchStrategy[Row]:
    def per_position(values: st.SearchStrategy) -> st.SearchStrategy[list]:
        return st.lists(values, min_size=length, max_size=length)

    return st.builds(
        Row,
        candidates=per_position(st.booleans()),
        confidence=per_position(sixteenths),
        entropy=per_position(sixteenths.map(lambda x: 4 * x)),
        policy=st.sampled_from(policies),
        quota=st.integers(0, length + 2),
        threshold=sixteenths,
        entropy_bound=st.integers(1, 12 * 16).map(lambda n: n / 16),
        relaxed_threshold=sixteenths,
        radius=st.integers(0, length) | st.just(2**31 - 1),
    )


lengths = st.integers(1, 9)
batches = lengths.flatmap(lambda length: st.lists(rows_of(length), min_size=1, max_size=5))
rows = lengths.flatmap(rows_of)


def params_of(batch: list[Row]) -> PolicyParams:
    return PolicyParams(
        policy=torch.tensor([row.policy for row in batch], dtype=torch.int32),
        quota=torch.tensor([row.quota for row in batch]),
        threshold=torch.tensor([row.threshold for row in batch]),
        entropy_bound=torch.tensor([row.entropy_bound for row in batch]),
        relaxed_threshold=torch.tensor([row.relaxed_threshold for row in batch]),
        radius=torch.tensor([row.radius for row in batch]),
    )


def stats_of(batch: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates, confidence and entropy."""
    return (
        torch.tensor([row.candidates for row in batch]),
        torch.tensor([row.confidence for row in batch]),
        torch.tensor([row.entropy for row in batch]),
    )


def scored(batch: list[Row], *, present: frozenset[Policy] | None = None) -> Tensor:
    present = ALL_POLICIES if present is None else present
    return policy_scores(*stats_of(batch), params_of(batch), present=present)


def unmasked(batch: list[Row], *, inclusive: bool = False, present: frozenset[Policy] | None = None) -> Tensor:
    return unmask(
        *stats_of(batch),
        params_of(batch),
        threshold_inclusive=inclusive,
        present=ALL_POLICIES if present is None else present,
    )


def positions(row: Row, *, inclusive: bool = False) -> set[int]:
    return set(unmasked([row], inclusive=inclusive)[0].nonzero().flatten().tolist())


def expected(row: Row, inclusive: bool) -> set[int]:
    """What the plain reference unmasks."""
    options = Options(
        block_length=len(row.candidates),
        mask_id=0,
        policy=row.policy.name.lower(),
        threshold=row.threshold,
        threshold_inclusive=inclusive,
        entropy_bound=row.entropy_bound,
        relaxed_threshold=row.relaxed_threshold,
        radius=row.radius,
    )
    predictions = {
        i: Prediction(0, confidence, entropy, torch.empty(0))
        for i, (confidence, entropy) in enumerate(zip(row.confidence, row.entropy, strict=True))
    }
    candidates = [i for i, candidate in enumerate(row.candidates) if candidate]
    return set(choose(candidates, predictions, row.quota, options))


@given(batches, st.booleans())
def test_a_mixed_batch_unmasks_what_the_reference_does(batch: list[Row], inclusive: bool) -> None:
    got = [set(row.nonzero().flatten().tolist()) for row in unmasked(batch, inclusive=inclusive)]
    assert got == [expected(row, inclusive) for row in batch]


@given(batches, st.booleans())
def test_only_candidates_are_unmasked(batch: list[Row], inclusive: bool) -> None:
    candidates = torch.tensor([row.candidates for row in batch])
    assert not (unmasked(batch, inclusive=inclusive) & ~candidates).any()


@given(batches, st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_the_others(batch: list[Row], random) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)
    together = unmasked(batch)
    assert torch.equal(unmasked([batch[i] for i in order]), together[order])
    assert torch.equal(torch.cat([unmasked([row]) for row in batch]), together)


@given(batches, st.booleans())
def test_naming_the_policies_that_are_present_changes_nothing(batch: list[Row], inclusive: bool) -> None:
    present = frozenset(row.policy for row in batch)
    assert torch.equal(unmasked(batch, inclusive=inclusive, present=present), unmasked(batch, inclusive=inclusive))
    assert torch.equal(scored(batch, present=present), scored(batch))


@given(rows)
def test_a_step_with_a_quota_makes_progress(row: Row) -> None:
    assume(any(row.candidates) and row.quota >= 1)
    assert positions(row)


@given(lengths.flatmap(lambda length: rows_of(length, (Policy.STATIC, Policy.SEQUENTIAL))))
def test_static_and_sequential_unmask_the_quota_or_all_that_is_left(row: Row) -> None:
    assert len(positions(row)) == min(row.quota, sum(row.candidates))


@given(lengths.flatmap(lambda length: rows_of(length, (Policy.THRESHOLD,))), st.booleans())
def test_threshold_unmasks_everything_above_it_and_at_least_the_quota(row: Row, inclusive: bool) -> None:
    chosen = positions(row, inclusive=inclusive)
    above = {
        i
        for i, candidate in enumerate(row.candidates)
        if candidate and (row.confidence[i] >= row.threshold if inclusive else row.confidence[i] > row.threshold)
    }
    assert above <= chosen
    assert len(chosen) == max(len(above), min(row.quota, sum(row.candidates)))


localleap_rows = lengths.flatmap(lambda length: rows_of(length, (Policy.LOCALLEAP,)))


def as_threshold(row: Row) -> set[int]:
    """What the threshold policy, inclusive as LocalLeap is, unmasks."""
    return positions(_with(row, policy=Policy.THRESHOLD), inclusive=True)


def test_localleap_unmasks_near_an_anchor_what_it_leaves_masked_elsewhere() -> None:
    row = Row(
        candidates=[True] * 7,
        confidence=[0.75, 0.5, 0.9375, 0.8125, 0.875, 0.875, 0.8125],
        entropy=[0.0] * 7,
        policy=Policy.LOCALLEAP,
        quota=1,
        threshold=0.9375,
        entropy_bound=1.0,
        relaxed_threshold=0.75,
        radius=2,
    )
    assert positions(row) == {0, 2, 3, 4}, "5 and 6 are more confident than 0, but farther from the anchor 2"
    assert positions(_with(row, threshold=1.0)) == {2}, "no anchor, nothing relaxed; one position always goes"
    assert positions(_with(row, candidates=[i != 2 for i in range(7)])) == {4}, "an unmasked position is no anchor"


@given(localleap_rows)
def test_localleap_unmasks_all_that_its_threshold_alone_would(row: Row) -> None:
    assert as_threshold(row) <= positions(row)
    assert positions(_with(row, radius=0)) == as_threshold(row), "near is nothing but the anchors themselves"
    assert positions(_with(row, relaxed_threshold=row.threshold)) == as_threshold(row)


@given(localleap_rows, st.integers(0, 10), sixteenths)
def test_a_larger_radius_or_a_lower_relaxed_threshold_never_unmasks_less(
    row: Row, radius: int, relaxed_threshold: float
) -> None:
    small, large = sorted((row.radius, radius))
    assert positions(_with(row, radius=small)) <= positions(_with(row, radius=large))
    low, high = sorted((row.relaxed_threshold, relaxed_threshold))
    assert positions(_with(row, relaxed_threshold=high)) <= positions(_with(row, relaxed_threshold=low))


@given(batches, st.booleans())
def test_without_a_threshold_the_unmasked_are_the_first_by_score(batch: list[Row], inclusive: bool) -> None:
    scores = scored(batch)
    for row, chosen, score in zip(batch, unmasked(batch, inclusive=inclusive).tolist(), scores.tolist(), strict=True):
        assert [s != -float("inf") for s in score] == row.candidates
        if row.policy in (Policy.THRESHOLD, Policy.LOCALLEAP):
            continue
        left = [(score[i], -i) for i, candidate in enumerate(row.candidates) if candidate and not chosen[i]]
        assert all((score[i], -i) > other for i in range(len(chosen)) if chosen[i] for other in left)


@given(lengths.flatmap(lambda length: rows_of(length, (Policy.STATIC, Policy.THRESHOLD))))
def test_nothing_left_masked_is_more_confident_than_what_was_unmasked(row: Row) -> None:
    chosen = positions(row)
    left = {i for i, candidate in enumerate(row.candidates) if candidate} - chosen
    assert all((row.confidence[i], -i) > (row.confidence[j], -j) for i in chosen for j in left), (
        "ties go to the leftmost"
    )


@given(lengths.flatmap(lambda length: rows_of(length, (Policy.ENTROPY,))))
def test_the_total_entropy_of_a_step_stays_below_the_bound_unless_it_is_a_single_position(row: Row) -> None:
    chosen = positions(row)
    assert len(chosen) <= 1 or sum(row.entropy[i] for i in chosen) < row.entropy_bound


@given(rows, sixteenths, st.booleans())
def test_a_lower_threshold_never_unmasks_less(row: Row, threshold: float, inclusive: bool) -> None:
    low, high = sorted((row.threshold, threshold))
    assert positions(_with(row, threshold=high), inclusive=inclusive) <= positions(
        _with(row, threshold=low), inclusive=inclusive
    )


@given(rows, st.integers(0, 10))
def test_a_larger_quota_never_unmasks_less(row: Row, quota: int) -> None:
    small, large = sorted((row.quota, quota))
    assert positions(_with(row, quota=small)) <= positions(_with(row, quota=large))


@given(rows, st.integers(1, 200).map(lambda n: n / 16))
def test_a_larger_entropy_bound_never_unmasks_less(row: Row, bound: float) -> None:
    small, large = sorted((row.entropy_bound, bound))
    assert positions(_with(row, entropy_bound=small)) <= positions(_with(row, entropy_bound=large))


@given(rows)
def test_an_inclusive_threshold_never_unmasks_less(row: Row) -> None:
    assert positions(row, inclusive=False) <= positions(row, inclusive=True)


def _with(row: Row, **changes: object) -> Row:
    return Row(**{**row.__dict__, **changes})


def test_entropy_is_only_needed_where_it_is_present() -> None:
    candidates = torch.ones(1, 3, dtype=torch.bool)
    confidence = torch.tensor([[0.1, 0.3, 0.2]])
    params = PolicyParams(
        policy=torch.tensor([0]),
        quota=torch.tensor([1]),
        threshold=torch.tensor([0.9]),
        entropy_bound=torch.tensor([0.3]),
        relaxed_threshold=torch.tensor([0.75]),
        radius=torch.tensor([4]),
    )
    got = unmask(
        candidates,
        confidence,
        None,
        params,
        threshold_inclusive=False,
        present=ALL_POLICIES - {Policy.ENTROPY},
    )
    assert got.tolist() == [[False, True, False]]
    with pytest.raises(ValueError, match="entropy"):
        unmask(candidates, confidence, None, params, threshold_inclusive=False)


def test_every_policy_that_the_options_name_exists() -> None:
    assert {name.upper() for name in POLICY_NAMES} == set(Policy.__members__)


@given(st.integers(1, 64), st.integers(1, 80))
def test_the_quotas_of_a_schedule_fill_the_block_and_differ_by_at_most_one(length: int, steps: int) -> None:
    quota, remainder = divmod(length, steps)
    quotas = quota_of_step(torch.full((steps,), quota), torch.full((steps,), remainder), torch.arange(steps)).tolist()
    assert sum(quotas) == length
    assert quotas == sorted(quotas, reverse=True)
    assert quotas[0] - quotas[-1] <= 1


@given(
    st.integers(1, 4).flatmap(
        lambda s: st.tuples(
            st.just(s),
            st.integers(1, 4).flatmap(
                lambda n: st.lists(st.lists(st.booleans(), min_size=n * s, max_size=n * s), min_size=1, max_size=4)
            ),
        )
    )
)
def test_only_the_leftmost_unfinished_sub_block_has_candidates(case: tuple[int, list[list[bool]]]) -> None:
    sub_block_length, masked = case
    got = sub_block_candidates(torch.tensor(masked), sub_block_length).tolist()
    for row, candidates in zip(masked, got, strict=True):
        expected_row = [False] * len(row)
        for start in range(0, len(row), sub_block_length):
            sub_block = slice(start, start + sub_block_length)
            if any(row[sub_block]):
                expected_row[sub_block] = row[sub_block]
                break
        assert candidates == expected_row


token_rows = st.integers(1, 6).flatmap(
    lambda length: st.lists(st.lists(st.integers(0, 3), min_size=length, max_size=length), min_size=1, max_size=4)
)


@given(token_rows, st.data())
def test_editing_replaces_what_the_model_contradicts_with_enough_confidence(tokens, data) -> None:
    def like(values: st.SearchStrategy) -> list[list]:
        return [[data.draw(values) for _ in row] for row in tokens]

    predicted, confidence, editable = like(st.integers(0, 3)), like(sixteenths), like(st.booleans())
    thresholds = [data.draw(sixteenths | st.just(float("inf"))) for _ in tokens]
    got = edits(
        torch.tensor(tokens),
        torch.tensor(predicted),
        torch.tensor(confidence),
        torch.tensor(editable),
        torch.tensor(thresholds),
    )
    assert got.tolist() == [
        [
            editable[b][i] and predicted[b][i] != tokens[b][i] and confidence[b][i] > thresholds[b]
            for i in range(len(tokens[b]))
        ]
        for b in range(len(tokens))
    ]


@given(token_rows, st.data())
def test_a_stop_token_ends_the_block_only_when_nothing_before_it_is_masked(tokens, data) -> None:
    mask_id, stop_id = 0, 1
    starts = [data.draw(st.integers(0, len(row) - 1)) for row in tokens]
    block = torch.tensor(tokens)
    got = stop_length(block, mask_id, block == stop_id, torch.tensor(starts)).tolist()
    for row, start, length in zip(tokens, starts, got, strict=True):
        generated = row[start:]
        output = generated[: generated.index(stop_id) + 1] if stop_id in generated else [mask_id]
        assert length == (0 if mask_id in output else len(output))
