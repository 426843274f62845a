"""Properties of the unmasking policies, and their equality with plain references."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from tests.reference.decode import Options, Prediction, choose
from vllm_dllm.decoding.policies import (
    ALG_TEMP_POLICIES,
    ALL_POLICIES,
    TIMED_POLICIES,
    Policy,
    PolicyParams,
    edits,
    end_length,
    policy_scores,
    sub_block_candidates,
    unmask,
)
from vllm_dllm.decoding.schedules import quota_of_step, timestep_ratios
from vllm_dllm.kernels.confidence import position_noise
from vllm_dllm.methods import POLICY_NAMES

# Multiples of 1/16 are exact in float32, so sums and comparisons agree with Python's; few of them make ties.
sixteenths = st.integers(0, 16).map(lambda n: n / 16)
NOISES = [n / 32 for n in range(1, 32)]
noises = st.sampled_from(NOISES)
alg_temps = st.sampled_from([0.0, 0.5, 1.0, 4.0])
# What a timestep schedule asks for, and plain fractions, of which some products are whole numbers.
ratios = sixteenths | st.integers(1, 40).flatmap(lambda n: st.sampled_from(timestep_ratios(n).tolist()))


@dataclass(frozen=True)
class Row:
    """One request of a batch, in Python values."""

    candidates: list[bool]
    confidence: list[float]
    entropy: list[float]
    margin: list[float]
    noise: list[float]
    policy: Policy
    quota: int = 1
    threshold: float = 0.9375
    entropy_bound: float = 1.0
    relaxed_threshold: float = 0.75
    radius: int = 2
    factor: float = 1.0
    ratio: float = 0.5
    alg_temp: float = 0.0


def rows_of(length: int, policies: tuple[Policy, ...] = tuple(Policy)) -> st.SearchStrategy[Row]:
    def per_position(values: st.SearchStrategy) -> st.SearchStrategy[list]:
        return st.lists(values, min_size=length, max_size=length)

    return st.builds(
        Row,
        candidates=per_position(st.booleans()),
        confidence=per_position(sixteenths),
        entropy=per_position(sixteenths.map(lambda x: 4 * x)),
        margin=per_position(sixteenths),
        noise=per_position(noises),
        policy=st.sampled_from(policies),
        quota=st.integers(0, length + 2),
        threshold=sixteenths,
        entropy_bound=st.integers(1, 12 * 16).map(lambda n: n / 16),
        relaxed_threshold=sixteenths,
        radius=st.integers(0, length) | st.just(2**31 - 1),
        factor=st.integers(1, 64).map(lambda n: n / 16),
        ratio=ratios,
        alg_temp=alg_temps,
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
        factor=torch.tensor([row.factor for row in batch]),
        ratio=torch.tensor([row.ratio for row in batch]),
        alg_temp=torch.tensor([row.alg_temp for row in batch]),
        noise=torch.tensor([row.noise for row in batch]),
    )


def stats_of(batch: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates, confidence and entropy."""
    return (
        torch.tensor([row.candidates for row in batch]),
        torch.tensor([row.confidence for row in batch]),
        torch.tensor([row.entropy for row in batch]),
    )


def margin_of(batch: list[Row]) -> Tensor:
    return torch.tensor([row.margin for row in batch])


def scored(batch: list[Row], *, present: frozenset[Policy] | None = None) -> Tensor:
    present = ALL_POLICIES if present is None else present
    return policy_scores(*stats_of(batch), params_of(batch), present=present, margin=margin_of(batch))


def unmasked(batch: list[Row], *, inclusive: bool = False, present: frozenset[Policy] | None = None) -> Tensor:
    return unmask(
        *stats_of(batch),
        params_of(batch),
        threshold_inclusive=inclusive,
        present=ALL_POLICIES if present is None else present,
        margin=margin_of(batch),
    )


def positions(row: Row, *, inclusive: bool = False) -> set[int]:
    return set(unmasked([row], inclusive=inclusive)[0].nonzero().flatten().tolist())


def expected(row: Row, inclusive: bool) -> set[int]:
    """What the plain references unmask."""
    candidates = [i for i, candidate in enumerate(row.candidates) if candidate]
    if row.policy in REFERENCES:
        return set(REFERENCES[row.policy](row, candidates))
    # In a single block, multi-block decoding is one position at least, and all that pass.
    is_multi_block = row.policy == Policy.MULTI_BLOCK
    options = Options(
        block_length=len(row.candidates),
        mask_id=0,
        policy="threshold" if is_multi_block else row.policy.name.lower(),
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
    return set(choose(candidates, predictions, 1 if is_multi_block else row.quota, options))


def by_confidence(row: Row, candidates: list[int]) -> list[int]:
    return sorted(candidates, key=lambda i: (-row.confidence[i], i))


def factor_reference(row: Row, candidates: list[int]) -> list[int]:
    order = by_confidence(row, candidates)
    for j, i in enumerate(order, start=1):
        bound = np.float32(-1) if j == 1 else np.float32(1) - np.float32(row.factor) / np.float32(j + 1)
        if row.confidence[i] < bound:
            return order if j == len(order) else order[: j - 1]
    return order


def random_reference(row: Row, candidates: list[int]) -> list[int]:
    return sorted(candidates, key=lambda i: (row.noise[i], i))[: row.quota]


def origin_reference(row: Row, candidates: list[int]) -> list[int]:
    return [i for i in candidates if row.noise[i] < row.ratio]


def gumbel(noise: float) -> float:
    return -math.log(-math.log(1 - noise))


def timed_reference(score: Callable[[Row, int], float]) -> Callable[[Row, list[int]], list[int]]:
    def reference(row: Row, candidates: list[int]) -> list[int]:
        def key(i: int) -> float:
            return score(row, i) / row.alg_temp + gumbel(row.noise[i]) if row.alg_temp else score(row, i)

        count = int(np.float32(len(candidates)) * np.float32(row.ratio))
        return sorted(candidates, key=lambda i: (-key(i), i))[:count]

    return reference


def paced_reference(row: Row, candidates: list[int]) -> list[int]:
    due = by_confidence(row, candidates)[: row.quota]
    return due[:1] + [i for i in due[1:] if row.confidence[i] >= row.threshold]


def hierarchy_reference(row: Row, candidates: list[int]) -> list[int]:
    chosen = {*by_confidence(row, candidates)[:1], *(i for i in candidates if row.confidence[i] > row.threshold)}
    # Positions less their ranks among the candidates are the same throughout a run.
    for _, run in itertools.groupby(enumerate(candidates), key=lambda pair: pair[1] - pair[0]):
        best = by_confidence(row, [i for _, i in run])[0]
        if row.confidence[best] > row.relaxed_threshold:
            chosen.add(best)
    return sorted(chosen)


REFERENCES: dict[Policy, Callable[[Row, list[int]], list[int]]] = {
    Policy.FACTOR: factor_reference,
    Policy.RANDOM: random_reference,
    Policy.ORIGIN: origin_reference,
    Policy.MASKGIT_PLUS: timed_reference(lambda row, i: row.confidence[i]),
    Policy.TOPK_MARGIN: timed_reference(lambda row, i: row.margin[i]),
    Policy.TIMED_ENTROPY: timed_reference(lambda row, i: -row.entropy[i]),
    Policy.PACED: paced_reference,
    Policy.HIERARCHY: hierarchy_reference,
}


def test_the_noise_of_these_tests_makes_no_near_ties_with_the_scores() -> None:
    """Scores in sixteenths, over an alg_temp of at most 4, differ by multiples of 1/64; float32 errs by 1e-6."""
    differences = [gumbel(a) - gumbel(b) for a, b in itertools.combinations(NOISES, 2)]
    assert min(abs(64 * d - round(64 * d)) / 64 for d in differences) > 1e-5


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


by_quota = tuple(ALL_POLICIES - TIMED_POLICIES)


@given(lengths.flatmap(lambda length: rows_of(length, by_quota)))
def test_a_step_with_a_quota_makes_progress(row: Row) -> None:
    assume(any(row.candidates) and row.quota >= 1)
    assert positions(row)


@given(lengths.flatmap(lambda length: rows_of(length, (Policy.STATIC, Policy.SEQUENTIAL, Policy.RANDOM))))
def test_static_sequential_and_random_unmask_the_quota_or_all_that_is_left(row: Row) -> None:
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
        margin=[0.0] * 7,
        noise=[0.5] * 7,
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
        if row.policy in (Policy.THRESHOLD, Policy.LOCALLEAP, Policy.HIERARCHY):
            continue
        left = [(score[i], -i) for i, candidate in enumerate(row.candidates) if candidate and not chosen[i]]
        assert all((score[i], -i) > other for i in range(len(chosen)) if chosen[i] for other in left)


@given(lengths.flatmap(lambda length: rows_of(length, (Policy.STATIC, Policy.THRESHOLD, Policy.FACTOR, Policy.PACED))))
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


def _with(row: Row, **changes: Any) -> Row:
    return replace(row, **changes)


def row_with(policy: Policy, confidence: list[float], masked: str | None = None, **options: Any) -> Row:
    """A row whose candidates are the positions with an ``m`` in ``masked``; all of them where it is None."""
    length = len(confidence)
    candidates = [True] * length if masked is None else [c == "m" for c in masked]
    values = {"entropy": [0.0] * length, "margin": [0.0] * length, "noise": [0.5] * length}
    return Row(candidates, confidence, policy=policy, **(values | options))


def test_factor_wants_more_confidence_of_every_further_rank() -> None:
    # With factor 1, rank 2 needs 2/3, rank 3 needs 3/4, rank 4 needs 4/5.
    assert positions(row_with(Policy.FACTOR, [0.1, 0.1, 0.1, 0.1])) == {0}
    assert positions(row_with(Policy.FACTOR, [0.7, 0.1, 0.1, 0.7])) == {0, 3}
    assert positions(row_with(Policy.FACTOR, [0.7, 0.76, 0.77, 0.7])) == {1, 2}, "the third is below 3/4"
    assert positions(row_with(Policy.FACTOR, [0.85, 0.85, 0.85, 0.85])) == {0, 1, 2, 3}
    assert positions(row_with(Policy.FACTOR, [0.1, 0.1, 0.1, 0.1], factor=2.9)) == {0, 1}, "0.1 is above 1 - 2.9 / 3"


def test_factor_unmasks_the_last_rank_even_where_it_alone_fails_its_bound() -> None:
    assert positions(row_with(Policy.FACTOR, [0.1, 0.7])) == {0, 1}
    assert positions(row_with(Policy.FACTOR, [0.1, 0.7, 0.7, 0.9], "m-mm")) == {0, 2, 3}
    assert positions(row_with(Policy.FACTOR, [0.1, 0.1, 0.7], "mmm")) == {2}, "two fail"


def test_paced_leaves_the_rest_of_what_is_due_below_the_threshold() -> None:
    confidence = [0.2, 0.5, 0.9375, 1.0]
    assert positions(row_with(Policy.PACED, confidence, quota=0)) == set()
    assert positions(row_with(Policy.PACED, confidence, quota=1)) == {3}
    assert positions(row_with(Policy.PACED, confidence, quota=4)) == {2, 3}, "equal to the threshold passes"
    assert positions(row_with(Policy.PACED, confidence, "mm--", quota=2)) == {1}, "the first goes in any case"


def test_hierarchy_takes_one_position_of_every_run_of_candidates() -> None:
    confidence = [0.8, 0.8, 0.3, 0.9, 0.5, 0.6, 0.8]
    assert positions(row_with(Policy.HIERARCHY, confidence)) == {3}, "one run"
    assert positions(row_with(Policy.HIERARCHY, confidence, "mm-mm-m")) == {0, 3, 6}, "ties go to the leftmost"
    assert positions(row_with(Policy.HIERARCHY, confidence, "mm-mm-m", relaxed_threshold=0.8)) == {3}, "none above 0.8"
    assert positions(row_with(Policy.HIERARCHY, confidence, "--m-m--", relaxed_threshold=0.5)) == {4}, "the best goes"
    assert positions(row_with(Policy.HIERARCHY, confidence, threshold=0.7)) == {0, 1, 3, 6}
    assert positions(row_with(Policy.HIERARCHY, confidence, "mm-mm-m", quota=5)) == {0, 3, 6}, "there is no quota"


@pytest.mark.parametrize("policy", sorted(TIMED_POLICIES))
def test_a_ratio_of_one_unmasks_everything_and_of_zero_nothing(policy: Policy) -> None:
    noise = [2.0**-32, 1 - 2.0**-24, 0.5]
    row = row_with(policy, [0.1, 0.2, 0.3, 0.4], "m-mm", noise=[*noise, 0.1], ratio=1.0)
    assert positions(row) == {0, 2, 3}
    assert positions(_with(row, alg_temp=1.0)) == {0, 2, 3}
    assert positions(_with(row, ratio=0.0)) == set()


def test_the_ratios_of_a_schedule_unmask_as_many_as_the_formula() -> None:
    candidates = torch.arange(128) < torch.arange(129).unsqueeze(1)  # of 0, 1, ... 128 positions
    confidence = torch.zeros(candidates.shape)
    # With 37 and 54 steps, some counts depend on the order and precision of the operations.
    for steps, eps in [(1, 1e-3), (2, 1e-3), (7, 1e-3), (37, 1e-3), (54, 1e-3), (64, 1e-2), (256, 1e-3)]:
        t = torch.linspace(1, eps, steps + 1)
        ratios = timestep_ratios(steps, eps)
        assert ratios.dtype == torch.float32
        assert ratios.shape == (steps,)
        assert ratios[-1] == 1
        for i in range(steps - 1) if steps < 100 else range(0, steps - 1, 15):
            params = params_with(129, Policy.MASKGIT_PLUS, ratio=ratios[i].expand(129))
            chosen = unmask(
                candidates, confidence, None, params, threshold_inclusive=False, present={Policy.MASKGIT_PLUS}
            )
            # The literal formula of the schedule, on the tensor elements one by one.
            assert chosen.sum(dim=1).tolist() == [int(n * (1 - t[i + 1] / t[i])) for n in range(129)], (steps, i)


@pytest.mark.parametrize("policy", sorted(ALG_TEMP_POLICIES))
@pytest.mark.parametrize(("length", "steps"), [(32, 32), (64, 16), (50, 7)])
def test_a_whole_schedule_unmasks_what_the_formula_says_at_every_step(policy: Policy, length: int, steps: int) -> None:
    t = torch.linspace(1, 1e-3, steps + 1)
    masked = [True] * length
    values = [((7 * i) % length) / length for i in range(length)]
    for i, ratio in enumerate(timestep_ratios(steps).tolist()):
        row = row_with(policy, values, entropy=values, margin=values, ratio=ratio)
        chosen = positions(_with(row, candidates=masked))
        n = sum(masked)
        assert len(chosen) == (int(n * (1 - t[i + 1] / t[i])) if i < steps - 1 else n)
        masked = [m and j not in chosen for j, m in enumerate(masked)]
    assert not any(masked)


def params_with(count: int, policy: Policy, **fields: Tensor) -> PolicyParams:
    """Parameters of ``count`` requests with one policy."""
    rest = {name: torch.ones(count) for name in ("threshold", "entropy_bound", "relaxed_threshold")}
    whole = torch.ones(count, dtype=torch.int64)
    return PolicyParams(policy=whole * policy, quota=whole, radius=whole, **rest)._replace(**fields)


def noise_of(count: int, length: int) -> Tensor:
    """[count, length]: of as many seeds."""
    return position_noise(torch.arange(count).unsqueeze(1), torch.arange(length), torch.tensor(0))


@pytest.mark.parametrize("alg_temp", [0.1, 0.4, 2.0])
@pytest.mark.parametrize("policy", sorted(ALG_TEMP_POLICIES))
def test_alg_temp_draws_positions_without_replacement_from_the_softmax_of_the_scores(
    policy: Policy, alg_temp: float
) -> None:
    count, length = 40000, 5
    values = torch.tensor([0.3, 0.55, 0.2, 0.9, 0.5])
    candidates = torch.tensor([True, True, True, False, True]).expand(count, -1)
    confidence, entropy, margin = (
        (values if policy == wanted else torch.zeros(length)).expand(count, -1)
        for wanted in (Policy.MASKGIT_PLUS, Policy.TIMED_ENTROPY, Policy.TOPK_MARGIN)
    )
    # Four candidates, half of which are two.
    params = params_with(
        count,
        policy,
        ratio=torch.full((count,), 0.5),
        alg_temp=torch.full((count,), alg_temp),
        noise=noise_of(count, length),
    )
    scores = policy_scores(candidates, confidence, entropy, params, present={policy}, margin=margin)
    chosen = unmask(candidates, confidence, entropy, params, threshold_inclusive=False, present={policy}, margin=margin)
    first, second = scores.argsort(dim=1, descending=True)[:, :2].unbind(1)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter_(1, torch.stack((first, second), dim=1), True))

    sign = -1 if policy == Policy.TIMED_ENTROPY else 1
    weight = (sign * values.double() / alg_temp).exp()
    weight[3] = 0
    p = weight / weight.sum()
    support = p > 0
    observed = torch.bincount(first, minlength=length)
    assert stats.chisquare(observed[support], (p * count)[support]).pvalue > 1e-3
    # The second is drawn from what the first has left.
    pairs = torch.bincount(first * length + second, minlength=length**2).view(length, length)
    joint = p.unsqueeze(1) * p / (1 - p).unsqueeze(1)
    joint.fill_diagonal_(0)
    assert not pairs[joint == 0].any()
    assert stats.chisquare(pairs[joint > 0], (joint * count)[joint > 0]).pvalue > 1e-3


def test_an_alg_temp_of_zero_is_no_draw_beside_others_that_are() -> None:
    confidence = [0.1, 0.9, 0.5, 0.7]
    noise = [0.01, 0.9, 0.9, 0.9]
    drawn = row_with(Policy.MASKGIT_PLUS, confidence, noise=noise, alg_temp=100.0, ratio=0.25)
    got = unmasked([drawn, _with(drawn, alg_temp=0.0)]).int().argmax(dim=1)
    assert got.tolist() == [0, 1]


def test_origin_unmasks_every_candidate_by_a_chance_of_its_own() -> None:
    count, length, ratio = 40000, 4, 0.3
    candidates = torch.tensor([True, True, False, True]).expand(count, -1)
    params = params_with(count, Policy.ORIGIN, ratio=torch.full((count,), ratio), noise=noise_of(count, length))
    chosen = unmask(
        candidates, torch.zeros(count, length), None, params, threshold_inclusive=False, present={Policy.ORIGIN}
    )
    assert not chosen[:, 2].any()
    # All eight subsets of the three candidates.
    subset = (chosen[:, [0, 1, 3]].long() * torch.tensor([4, 2, 1])).sum(dim=1)
    expected_counts = [count * math.prod(ratio if n & bit else 1 - ratio for bit in (4, 2, 1)) for n in range(8)]
    assert stats.chisquare(torch.bincount(subset, minlength=8), expected_counts).pvalue > 1e-3


def test_random_takes_every_set_of_positions_as_often() -> None:
    count, length = 40000, 5
    candidates = torch.tensor([True, True, False, True, True]).expand(count, -1)
    params = params_with(count, Policy.RANDOM, quota=torch.full((count,), 2), noise=noise_of(count, length))
    # Confidence has no say.
    confidence = torch.linspace(0, 1, length).expand(count, -1)
    chosen = unmask(candidates, confidence, None, params, threshold_inclusive=False, present={Policy.RANDOM})
    assert (chosen.sum(dim=1) == 2).all()
    subset = (chosen.long() * 2 ** torch.arange(length)).sum(dim=1)
    observed = subset.unique(return_counts=True)[1]
    assert len(observed) == math.comb(4, 2)
    assert stats.chisquare(observed).pvalue > 1e-3


@pytest.mark.parametrize(
    ("policy", "missing", "named"),
    [
        (Policy.FACTOR, "factor", "FACTOR needs its factor"),
        (Policy.ORIGIN, "ratio", "ORIGIN needs its ratio"),
        (Policy.MASKGIT_PLUS, "ratio", "policy of timesteps needs its ratio"),
        (Policy.RANDOM, "noise", "RANDOM needs noise"),
        (Policy.ORIGIN, "noise", "ORIGIN needs noise"),
    ],
)
def test_what_a_policy_that_is_present_lacks_is_named(policy: Policy, missing: str, named: str) -> None:
    row = row_with(policy, [0.1, 0.2])
    arguments = (*stats_of([row]), params_of([row])._replace(**{missing: None}))
    with pytest.raises(ValueError, match=named):
        unmask(*arguments, threshold_inclusive=False, present={policy}, margin=margin_of([row]))
    # Where it is absent, nothing is missed.
    static = _with(row, policy=Policy.STATIC)
    arguments = (*stats_of([static]), params_of([static])._replace(**{missing: None}))
    assert unmask(*arguments, threshold_inclusive=False, present={Policy.STATIC}).any()


@pytest.mark.parametrize("policy", [Policy.TOPK_MARGIN, Policy.TIMED_ENTROPY])
def test_the_values_that_order_a_timed_policy_are_needed(policy: Policy) -> None:
    row = row_with(policy, [0.1, 0.2])
    candidates, confidence, _ = stats_of([row])
    with pytest.raises(ValueError, match="margin" if policy == Policy.TOPK_MARGIN else "entropy"):
        unmask(candidates, confidence, None, params_of([row]), threshold_inclusive=False, present={policy})


def test_no_alg_temp_needs_no_noise() -> None:
    row = row_with(Policy.MASKGIT_PLUS, [0.1, 0.7, 0.2])
    for alg_temp in (None, torch.zeros(1)):
        params = params_of([row])._replace(alg_temp=alg_temp, noise=None)
        got = unmask(*stats_of([row]), params, threshold_inclusive=False, present={Policy.MASKGIT_PLUS})
        assert got.tolist() == [[False, True, False]]


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
        present={Policy.STATIC, Policy.THRESHOLD, Policy.SEQUENTIAL, Policy.LOCALLEAP},
    )
    assert got.tolist() == [[False, True, False]]
    with pytest.raises(ValueError, match="entropy"):
        unmask(candidates, confidence, None, params, threshold_inclusive=False)


def test_every_policy_that_the_options_name_exists() -> None:
    assert {name.upper() for name in POLICY_NAMES} <= set(Policy.__members__)


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
    got = end_length(block, mask_id, block == stop_id, torch.tensor(starts)).tolist()
    for row, start, length in zip(tokens, starts, got, strict=True):
        generated = row[start:]
        output = generated[: generated.index(stop_id) + 1] if stop_id in generated else [mask_id]
        assert length == (0 if mask_id in output else len(output))
