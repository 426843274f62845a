"""FeF-DLLM: exact distributions on a model small enough to enumerate, and equality with the plain reference."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor

from tests.profiles import examples
from tests.reference.fef import (
    Decoded,
    decode,
    decode_sequentially,
    expected_committed,
    expected_committed_first_certain,
)
from vllm_dllm.decoding import distributions as distributions_module
from vllm_dllm.decoding.distributions import DistributionReader, Distributions
from vllm_dllm.decoding.fef import (
    branches_present,
    commit,
    draft_positions,
    fef_branches,
    num_remask,
    places,
    remask,
)
from vllm_dllm.decoding.rejection import RejectionSampler, accept

verify = RejectionSampler().verify
residual, token_probs = DistributionReader().residual, DistributionReader().token_probs

LENGTH, VOCAB = 4, 4
LAST = VOCAB - 1
SEED = 20260521


@dataclass(frozen=True)
class TinyModel:
    """Logits of every position of a block, by table: any block of ``LENGTH`` tokens has distributions of its own."""

    logits: Tensor
    """[VOCAB ** LENGTH, LENGTH, VOCAB] float32"""
    mask_id: int = LAST

    @staticmethod
    def random(seed: int, mask_id: int = LAST, spread: float = 1.5) -> "TinyModel":
        generator = torch.Generator().manual_seed(seed)
        return TinyModel(spread * torch.randn(VOCAB**LENGTH, LENGTH, VOCAB, generator=generator), mask_id)

    def __call__(self, blocks: Tensor) -> Tensor:
        """[..., LENGTH] int64 to [..., LENGTH, VOCAB]."""
        return self.logits[(blocks * VOCAB ** torch.arange(LENGTH)).sum(dim=-1)]

    def distributions(self, temperature: float) -> Callable[[list[int]], list[list[float]]]:
        """For the reference, in double precision."""
        logits = self.logits.double() / (temperature or 1)
        logits[..., self.mask_id] = -torch.inf
        exact = TinyModel(logits.softmax(dim=-1), self.mask_id)
        return lambda block: exact(torch.tensor(block)).tolist()

    @property
    def tokens(self) -> list[int]:
        return [token for token in range(VOCAB) if token != self.mask_id]

    def joint_distribution(self, block: list[int], temperature: float = 1.0) -> dict[tuple[int, ...], float]:
        """Every completion of a block with the product of its prefix-conditioned distributions (Theorem 1)."""
        distributions = self.distributions(temperature)
        states = {tuple(block): 1.0}
        for i in (i for i, token in enumerate(block) if token == self.mask_id):
            states = {
                (*state[:i], token, *state[i + 1 :]): p * distributions(list(state))[i][token]
                for state, p in states.items()
                for token in self.tokens
            }
        return states


class BatchNoise(Protocol):
    """Randomness for R requests, each in a pass ([R]) and a round of it ([R])."""

    def uniform(self, step: Tensor, round_: Tensor) -> Tensor:
        """[R, LENGTH]"""

    def draft(self, step: Tensor, round_: Tensor) -> Tensor:
        """[R, LENGTH, VOCAB]: Exp(1)"""

    def correction(self, step: Tensor, round_: Tensor) -> Tensor:
        """[R, LENGTH, VOCAB]: Exp(1)"""


class FreshNoise:
    """New for every call."""

    def __init__(self, seed: int = SEED):
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, step: Tensor, round_: Tensor) -> Tensor:
        return 1 - torch.rand(len(step), LENGTH, generator=self.generator)

    def draft(self, step: Tensor, round_: Tensor) -> Tensor:
        return torch.empty(len(step), LENGTH, VOCAB).exponential_(generator=self.generator)

    correction = draft


class StoredNoise:
    """The same whenever it is asked for; ``of_request`` gives the reference one request's."""

    def __init__(self, num_requests: int, num_steps: int, seed: int):
        fresh, size = FreshNoise(seed), torch.empty(num_requests * num_steps * LENGTH)
        shape = (num_requests, num_steps, LENGTH, LENGTH)
        self.uniforms = fresh.uniform(size, size).view(shape)
        self.drafts = fresh.draft(size, size).view(*shape, VOCAB)
        self.corrections = fresh.draft(size, size).view(*shape, VOCAB)
        self.request = torch.arange(num_requests)

    def uniform(self, step: Tensor, round_: Tensor) -> Tensor:
        return self.uniforms[self.request, step, round_]

    def draft(self, step: Tensor, round_: Tensor) -> Tensor:
        return self.drafts[self.request, step, round_]

    def correction(self, step: Tensor, round_: Tensor) -> Tensor:
        return self.corrections[self.request, step, round_]

    def of_request(self, request: int) -> "StoredNoiseOfRequest":
        return StoredNoiseOfRequest(self, request)


@dataclass(frozen=True)
class StoredNoiseOfRequest:
    noise: StoredNoise
    request: int

    def uniform(self, step: int, round_: int, position: int) -> float:
        return self.noise.uniforms[self.request, step, round_, position].item()

    def draft(self, step: int, round_: int, position: int) -> list[float]:
        return self.noise.drafts[self.request, step, round_, position].tolist()

    def correction(self, step: int, round_: int, position: int) -> list[float]:
        return self.noise.corrections[self.request, step, round_, position].tolist()


class BatchRound(NamedTuple):
    num_accepted: Tensor
    forwarded: Tensor
    tokens: Tensor
    """Before anything is masked again."""
    confidence: Tensor
    remasked: Tensor
    """[R, LENGTH] int64: the tokens after that."""


class BatchDecoded(NamedTuple):
    tokens: Tensor
    rounds: list[BatchRound]
    forwards: Tensor
    """[R] int64"""


def decode_batch(
    model: TinyModel,
    block: Tensor,
    noise: BatchNoise,
    *,
    window: Tensor,
    max_window: int,
    temperature: Tensor,
    num_steps: Tensor,
    fraction: Tensor,
    keep_confidence: bool = True,
) -> BatchDecoded:
    """The batched functions as a runtime calls them, round by round until no request has a mask."""
    mask = model.mask_id
    request = torch.arange(len(block)).unsqueeze(1)
    generated = candidates = block == mask
    confidence = torch.zeros(block.shape)
    step, round_, forwards = (torch.zeros(len(block), dtype=torch.int64) for _ in range(3))
    known = torch.zeros(len(block), dtype=torch.bool)
    rounds = []
    while (block == mask).any():
        masked = block == mask
        positions, present = draft_positions(masked, window, max_window=max_window)
        num_drafts = positions.shape[1]
        rho_logits = model(block)
        scores = rho_logits / torch.where(temperature > 0, temperature, 1.0).view(-1, 1, 1)
        scores = scores - (temperature > 0).view(-1, 1, 1) * noise.draft(step, round_).log()
        scores[..., mask] = -torch.inf
        tokens = scores.argmax(dim=2).gather(1, positions)
        branches = fef_branches(block, positions, present, tokens)
        wanted = branches_present(masked, present)
        # Branches that no request needs hold garbage, as rows that a runtime leaves out would.
        pi_logits = torch.where(wanted.view(*wanted.shape, 1, 1), model(branches), torch.nan)
        branch = torch.arange(num_drafts - 1)
        noise_of_correction = noise.correction(step, round_).log()
        rho = Distributions(rho_logits.flatten(0, 1), request * LENGTH + positions, temperature, mask)
        first = token_probs(rho._replace(rows=rho.rows[:, :1]), tokens[:, :1]).confidence
        behind, verified = positions[:, 1:], None
        if num_drafts > 1:
            rows = (request * num_drafts + branch) * LENGTH + behind
            verified = verify(
                tokens[:, 1:],
                behind,
                present[:, 1:],
                Distributions(pi_logits.flatten(0, 2), rows, temperature, mask),
                rho._replace(rows=rho.rows[:, 1:]),
                noise.uniform(step, round_).gather(1, behind),
                lambda rows, at, drawn=noise_of_correction: drawn[rows][torch.arange(len(at)), at],
            )
        is_first = places(positions, present, LENGTH)[:, 0]
        confidence = torch.where(is_first, first, confidence)
        after = commit(block, confidence, positions, present, tokens, wanted, verified)
        assert torch.equal(
            branches[request.squeeze(1), present.sum(dim=1) - 1][after.forwarded], after.tokens[after.forwarded]
        )
        forwards += (masked.any(dim=1) & ~known).long() + wanted.any(dim=1)
        known = after.forwarded
        block, confidence = after.tokens, after.confidence

        again = masked.any(dim=1) & (block != mask).all(dim=1) & (step < num_steps - 1)
        count = num_remask(generated, fraction) * again
        remasked = remask(block, confidence, candidates, count, mask)
        if not keep_confidence:
            candidates = torch.where(again.unsqueeze(1), remasked == mask, candidates)
        rounds.append(BatchRound(*after[2:], after.tokens, after.confidence, remasked))
        block = remasked
        round_ = torch.where(again, 0, round_ + masked.any(dim=1))
        # Requests that are done go on with drafts of nothing, for which there is no more noise stored.
        round_ = round_.clamp(max=LENGTH - 1)
        step = step + again
    return BatchDecoded(block, rounds, forwards)


def decode_replicas(model: TinyModel, block: list[int], num_replicas: int, k: int, **options: float) -> BatchDecoded:
    """Many times the same request, under noise of its own each time."""

    def all_of(value: float) -> Tensor:
        return torch.full((num_replicas,), value)

    return decode_batch(
        model,
        torch.tensor(block).expand(num_replicas, -1),
        FreshNoise(),
        window=all_of(k),
        max_window=k,
        temperature=all_of(options.get("temperature", 1.0)),
        num_steps=all_of(options.get("num_steps", 1)),
        fraction=all_of(options.get("fraction", 0.5)),
    )


def chi_square(counts: dict[tuple[int, ...], int], distribution: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """Statistic and degrees of freedom; outcomes that are expected less than 5 times count as one."""
    total = sum(counts.values())
    assert counts.keys() <= distribution.keys()
    observed, expected = [0.0], [0.0]
    for outcome, p in distribution.items():
        if total * p >= 5:
            observed.append(counts.get(outcome, 0))
            expected.append(total * p)
        else:
            observed[0] += counts.get(outcome, 0)
            expected[0] += total * p
    terms = [(o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e > 0]
    return sum(terms), len(terms) - 1


def p_value(counts: dict[tuple[int, ...], int], distribution: dict[tuple[int, ...], float]) -> float:
    return float(chi2.sf(*chi_square(counts, distribution)))


def count(rows: Tensor) -> dict[tuple[int, ...], int]:
    outcomes, counts = rows.unique(dim=0, return_counts=True)
    return dict(zip(map(tuple, outcomes.tolist()), counts.tolist(), strict=True))


# --- Distributions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_id", [0, LAST])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_joint_distribution_is_the_product_of_the_prefix_conditioned_distributions(k: int, mask_id: int) -> None:
    model = TinyModel.random(seed=3, mask_id=mask_id)
    block = [mask_id] * LENGTH
    decoded = decode_replicas(model, block, 20_000, k, temperature=0.8)
    assert p_value(count(decoded.tokens), model.joint_distribution(block, 0.8)) > 1e-3
    # All that may happen in a round did, and often.
    for num_accepted in range(1, k + 1):
        assert (decoded.rounds[0].num_accepted == num_accepted).sum() > 200


def test_prompt_and_finished_positions_are_context() -> None:
    model = TinyModel.random(seed=4)
    block = [1, LAST, 2, LAST]
    decoded = decode_replicas(model, block, 20_000, 4)
    assert p_value(count(decoded.tokens), model.joint_distribution(block)) > 1e-3


def test_the_statistic_tells_unverified_drafts_apart() -> None:
    """What factorization costs, and that the tests above would see it."""
    model = TinyModel.random(seed=3)
    block = [LAST] * LENGTH
    distributions = model.distributions(1.0)(block)
    drafts = torch.stack(
        [
            torch.tensor(distribution).multinomial(20_000, replacement=True, generator=torch.Generator().manual_seed(i))
            for i, distribution in enumerate(distributions)
        ],
        dim=1,
    )
    assert p_value(count(drafts), model.joint_distribution(block)) < 1e-9


def test_a_further_pass_has_the_distribution_of_what_it_masks_given_all_that_was_before() -> None:
    """Corollary 1: for every outcome of the first pass, which also fixes the positions that are masked again."""
    model = TinyModel.random(seed=5)
    decoded = decode_replicas(model, [LAST] * LENGTH, 60_000, 4, num_steps=2, fraction=0.5)
    # The round that finished the first pass is another for each replica: the one that masked again.
    before = torch.zeros_like(decoded.tokens)
    masked_again = torch.zeros_like(decoded.tokens)
    for done in decoded.rounds:
        ends = ((done.tokens != LAST) & (done.remasked == LAST)).any(dim=1)
        before[ends], masked_again[ends] = done.tokens[ends], done.remasked[ends]
    assert ((masked_again == LAST).sum(dim=1) == 2).all()
    statistic, freedom, chosen = 0.0, 0, set()
    for outcome in before.unique(dim=0):
        replicas = (before == outcome).all(dim=1)
        (state,) = masked_again[replicas].unique(dim=0).tolist()
        chosen.add(tuple(i for i, token in enumerate(state) if token == LAST))
        of_outcome = chi_square(count(decoded.tokens[replicas]), model.joint_distribution(state))
        statistic, freedom = statistic + of_outcome[0], freedom + of_outcome[1]
    assert len(chosen) > 3
    assert freedom > 200
    assert chi2.sf(statistic, freedom) > 1e-3


def brute_force_committed(alphas: list[float]) -> float:
    """Mean committed length over all outcomes of the drafts' acceptances."""
    total = 0.0
    for outcome in itertools.product([False, True], repeat=len(alphas)):
        p = math.prod(a if accepted else 1 - a for a, accepted in zip(alphas, outcome, strict=True))
        total += p * min(len(alphas), [*outcome, False].index(False) + 1)
    return total


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_expected_committed_is_the_mean_over_all_outcomes(alpha: float, k: int) -> None:
    assert expected_committed(alpha, k) == pytest.approx(brute_force_committed([alpha] * k))
    assert expected_committed_first_certain(alpha, k) == pytest.approx(brute_force_committed([1.0] + [alpha] * (k - 1)))


@pytest.mark.parametrize("alpha", [0.2, 0.7, 0.95])
def test_rounds_commit_as_many_as_expected_of_independent_acceptances(alpha: float) -> None:
    num_requests, k = 20_000, 8
    generator = torch.Generator().manual_seed(SEED)
    # Drafts are always token 0, which pi wants with probability alpha; else it wants token 1.
    rho = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    pi = torch.tensor([[math.log(alpha), math.log(1 - alpha), -torch.inf]])
    block = torch.full((num_requests, k), 2)
    positions, present = draft_positions(block == 2, torch.full((num_requests,), k), max_window=k)
    tokens, of_use = torch.zeros_like(block), branches_present(block == 2, present)
    verified = verify(
        tokens[:, 1:],
        positions[:, 1:],
        present[:, 1:],
        Distributions(pi, tokens[:, 1:], torch.ones(num_requests), mask_id=2),
        Distributions(rho, tokens[:, 1:], torch.ones(num_requests), mask_id=2),
        1 - torch.rand(num_requests, k - 1, generator=generator),
        lambda rows, at: torch.empty(len(at), 3).exponential_(generator=generator).log(),
    )
    after = commit(block, torch.zeros(num_requests, k), positions, present, tokens, of_use, verified)
    lengths = (after.tokens != 2).sum(dim=1).double()
    error = lengths.std() / num_requests**0.5
    assert (lengths.mean() - expected_committed_first_certain(alpha, k)).abs() < 4 * error
    rejected = after.num_accepted < k
    corrected = after.tokens.gather(1, after.num_accepted.clamp(max=k - 1).unsqueeze(1)).squeeze(1)
    assert (corrected[rejected] == 1).all()
    assert torch.equal(lengths.long(), (after.num_accepted + 1).clamp(max=k))


def test_residual_is_the_normalised_excess_of_pi_over_rho() -> None:
    pi = torch.tensor([[0.1, 0.5, 0.0, 0.4, 0.0]])
    rho = torch.tensor([[0.4, 0.2, 0.1, 0.3, 0.0]])
    num_draws = 50_000
    rows = torch.zeros(num_draws, dtype=torch.int64)
    generator = torch.Generator().manual_seed(SEED)
    exponentials = torch.empty(num_draws, 5).exponential_(generator=generator)
    draw = residual(
        Distributions(pi.log(), rows, torch.ones(num_draws), mask_id=4),
        Distributions(rho.log(), rows, torch.ones(num_draws), mask_id=4),
        lambda chunk: exponentials[chunk].log(),
    )
    assert p_value(count(draw.token.unsqueeze(1)), {(1,): 0.75, (3,): 0.25}) > 1e-3
    torch.testing.assert_close(draw.confidence, pi[0, draw.token])


def test_residual_of_equal_distributions_is_pi() -> None:
    distribution = torch.tensor([[0.25, 0.75, 0.0]])
    num_draws = 20_000
    rows = torch.zeros(num_draws, dtype=torch.int64)
    exponentials = torch.empty(num_draws, 3).exponential_(generator=torch.Generator().manual_seed(SEED))
    distributions = Distributions(distribution.log(), rows, torch.ones(num_draws), mask_id=2)
    draw = residual(distributions, distributions, lambda chunk: exponentials[chunk].log())
    assert p_value(count(draw.token.unsqueeze(1)), {(0,): 0.25, (1,): 0.75}) > 1e-3


# --- Equality with the reference ------------------------------------------------------------------------------------


class Batch(NamedTuple):
    model: TinyModel
    blocks: list[list[int]]
    windows: list[int]
    temperatures: list[float]
    num_steps: list[int]
    fraction: float
    keep_confidence: bool
    seed: int


@st.composite
def batches(draw: st.DrawFn, temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)) -> Batch:
    num_requests = draw(st.integers(1, 5))
    mask_id = draw(st.integers(0, VOCAB - 1))
    model = TinyModel.random(draw(st.integers(0, 2**31 - 1)), mask_id, draw(st.sampled_from([0.2, 1.5, 5.0])))
    if draw(st.booleans()):
        # Logits that tie: at temperature 0 the smallest token id has to win everywhere.
        model = TinyModel(model.logits.round(), mask_id)

    def of_each(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=num_requests, max_size=num_requests))

    token = st.sampled_from([mask_id, mask_id, *range(VOCAB)])
    return Batch(
        model=model,
        blocks=of_each(st.lists(token, min_size=LENGTH, max_size=LENGTH)),
        windows=of_each(st.integers(1, LENGTH + 2)),
        temperatures=of_each(st.sampled_from(temperatures)),
        num_steps=of_each(st.integers(1, 3)),
        fraction=draw(st.sampled_from([0.01, 0.25, 0.5, 1.0])),
        keep_confidence=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


def run(batch: Batch) -> tuple[BatchDecoded, StoredNoise]:
    num_requests = len(batch.blocks)
    noise = StoredNoise(num_requests, max(batch.num_steps), batch.seed)
    decoded = decode_batch(
        batch.model,
        torch.tensor(batch.blocks),
        noise,
        window=torch.tensor(batch.windows),
        max_window=max(batch.windows),
        temperature=torch.tensor(batch.temperatures),
        num_steps=torch.tensor(batch.num_steps),
        fraction=torch.full((num_requests,), batch.fraction),
        keep_confidence=batch.keep_confidence,
    )
    return decoded, noise


def remasks_clearly(decoded: Decoded, size: int, keep_confidence: bool) -> bool:
    """No pass chose between confidences that single precision may order otherwise."""
    confidence: dict[int, float] = {}
    for done in decoded.passes[:-1]:
        confidence = {**(confidence if keep_confidence else {}), **done.confidence}
        ordered = sorted(confidence.values())
        if any(after - before < 1e-6 for before, after in zip(ordered[size - 1 : size], ordered[size:], strict=False)):
            return False
    return True


@examples(200)
@given(batch=batches())
def test_a_batch_decodes_as_the_reference_decodes_each_request_under_the_same_noise(batch: Batch) -> None:
    decoded, noise = run(batch)
    mask = batch.model.mask_id
    for r, block in enumerate(batch.blocks):
        temperature = batch.temperatures[r]
        size = max(1, math.ceil(batch.fraction * block.count(mask)))
        expected = decode(
            block,
            batch.model.distributions(temperature),
            noise.of_request(r),
            mask_id=mask,
            window=batch.windows[r],
            num_steps=batch.num_steps[r],
            num_remask=size,
            keep_confidence=batch.keep_confidence,
            greedy=temperature == 0,
        )
        assume(remasks_clearly(expected, size, batch.keep_confidence))
        assert decoded.tokens[r].tolist() == expected.block
        assert decoded.forwards[r] == expected.forwards
        rounds = [(done, at) for done in expected.passes for at in done.rounds]
        for (_, reference), batched in zip(rounds, decoded.rounds, strict=False):
            assert batched.tokens[r].tolist() == reference.block
            assert batched.num_accepted[r] == reference.num_accepted
            assert batched.forwarded[r] == reference.forwarded
        for batched in decoded.rounds[len(rounds) :]:
            assert batched.num_accepted[r] == 0
            assert not batched.forwarded[r]
        # Every position has the confidence that the last pass to fill it gave it.
        for position, confidence in {i: c for done in expected.passes for i, c in done.confidence.items()}.items():
            assert decoded.rounds[-1].confidence[r, position].item() == pytest.approx(confidence, rel=1e-4)


@examples(100)
@given(batch=batches(temperatures=(0.0,)))
def test_temperature_0_is_left_to_right_greedy_decoding(batch: Batch) -> None:
    decoded, noise = run(batch._replace(num_steps=[1] * len(batch.blocks)))
    for r, block in enumerate(batch.blocks):
        expected = decode_sequentially(
            block, batch.model.distributions(0.0), noise.of_request(r), mask_id=batch.model.mask_id, greedy=True
        )
        assert decoded.tokens[r].tolist() == expected


def test_the_reference_samples_position_by_position_from_the_joint_distribution() -> None:
    """With and without speculation, so that what the batch is compared with is right by itself."""
    model = TinyModel.random(seed=6)
    block, num_replicas = [LAST] * LENGTH, 2000
    noise = StoredNoise(num_replicas, 1, SEED)
    distributions = model.distributions(1.0)
    joint = model.joint_distribution(block)
    of_requests = [noise.of_request(r) for r in range(num_replicas)]
    sequential = [decode_sequentially(block, distributions, one, mask_id=LAST) for one in of_requests]
    speculative = [decode(block, distributions, one, mask_id=LAST, window=3).block for one in of_requests]
    assert p_value(count(torch.tensor(sequential)), joint) > 1e-3
    assert p_value(count(torch.tensor(speculative)), joint) > 1e-3


# --- The single functions -------------------------------------------------------------------------------------------


@given(data=st.data(), length=st.integers(1, 6), max_window=st.integers(1, 8))
def test_drafts_fill_the_leftmost_masks_one_more_in_every_branch(
    data: st.DataObject, length: int, max_window: int
) -> None:
    blocks = data.draw(
        st.lists(st.lists(st.sampled_from([9, 0, 1]), min_size=length, max_size=length), min_size=1, max_size=3)
    )
    windows = data.draw(st.lists(st.integers(0, max_window), min_size=len(blocks), max_size=len(blocks)))
    block = torch.tensor(blocks)
    positions, present = draft_positions(block == 9, torch.tensor(windows), max_window=max_window)
    num_drafts = positions.shape[1]
    tokens = 100 + torch.arange(num_drafts).expand_as(positions)
    branches = fef_branches(block, positions, present, tokens)
    of_use = branches_present(block == 9, present)
    for r, row in enumerate(blocks):
        masked = [i for i, token in enumerate(row) if token == 9]
        window = masked[: windows[r]]
        assert positions[r, present[r]].tolist() == window
        state = list(row)
        for m in range(num_drafts):
            if m < len(window):
                state[window[m]] = 100 + m
            assert branches[r, m].tolist() == state
            assert of_use[r, m] == (m < len(window) and 9 in state)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(1, 4), st.booleans()), min_size=1, max_size=6)
)
def test_drafts_are_accepted_up_to_the_first_that_the_ratio_refuses(drafts: list[tuple[int, int, int, bool]]) -> None:
    num_present = [*(present for *_, present in drafts), False].index(False)
    expected = 0
    for pi, rho, u, _ in drafts[:num_present]:
        # Quarters; a tie is an acceptance, and where it would be one only up to rounding u is moved below it.
        if not (u - 0.01) / 4 * rho / 4 <= pi / 4:
            break
        expected += 1
    pi, rho, u = (torch.tensor([[draft[i] for draft in drafts]]) / 4 for i in range(3))
    present = torch.arange(len(drafts)).unsqueeze(0) < num_present
    assert accept(pi.log(), rho.log(), (u - 0.01 / 4).log(), present).tolist() == [expected]


def test_a_token_that_pi_rules_out_is_never_accepted() -> None:
    never = torch.full((1, 2), -torch.inf)
    smallest = torch.full((1, 2), torch.finfo(torch.float32).tiny)
    present = torch.ones(1, 2, dtype=torch.bool)
    assert accept(never, torch.zeros(1, 2), smallest.log(), present).tolist() == [0]
    assert accept(never, never, smallest.log(), present).tolist() == [0]


def test_equal_distributions_accept_whatever_the_draw() -> None:
    log_prob = torch.tensor([[-0.1, -3.0, -50.0]])
    assert accept(log_prob, log_prob, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)).tolist() == [3]


@pytest.mark.parametrize("mask_id", [0, 2])
def test_distributions_leave_the_mask_token_out_and_follow_the_temperature(mask_id: int) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf], [0.5, 0.5, 4.0, 0.5]], dtype=torch.bfloat16)
    rows, tokens = torch.tensor([0, 1, 0, 1, 0]), torch.tensor([1, 3, 3, 1, 1])
    temperature = torch.tensor([0.5, 2.0, 1.0, 0.0, 0.0])
    exact = logits.double()
    exact[:, mask_id] = -torch.inf
    distribution = [(exact[row] / (t or 1)).softmax(dim=0) for row, t in zip(rows, temperature.tolist(), strict=True)]
    expected = torch.stack([p[token] for p, token in zip(distribution, tokens, strict=True)]).float()
    got = token_probs(Distributions(logits, rows, temperature, mask_id), tokens)
    torch.testing.assert_close(got.confidence, expected)
    torch.testing.assert_close(got.log_prob[:3], expected[:3].log())
    most_likely = [distribution[3].argmax().item() == 1, distribution[4].argmax().item() == 1]
    assert got.log_prob[3:].tolist() == [0.0 if best else -math.inf for best in most_likely]

    scaled = exact[rows].float() / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    applied = token_probs(
        Distributions(scaled, torch.arange(5), temperature, mask_id, temperature_applied=True), tokens
    )
    torch.testing.assert_close(applied.confidence, expected)


def test_a_row_with_nothing_but_the_mask_token_left_draws_the_first_other_token() -> None:
    """As ``row_stats`` draws it, so that the draft has the probability 1 that it was drawn with."""
    row = torch.zeros(1, dtype=torch.int64)
    for mask_id, token in ((2, 0), (0, 1)):
        logits = torch.full((1, 3), -torch.inf)
        logits[0, mask_id] = 0.0
        distributions = Distributions(logits, row, torch.ones(1), mask_id)
        distribution = token_probs(distributions, torch.tensor([token]))
        assert distribution.log_prob.tolist() == [0.0]
        assert distribution.confidence.tolist() == [1.0]
        draw = residual(distributions, distributions, lambda _: torch.zeros(1, 3))
        assert draw.token.tolist() == [token]


@pytest.mark.parametrize("chunk_values", [1, 14, 21])
def test_chunks_do_not_show(chunk_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(SEED)
    pi, rho = torch.randn(2, 5, 7, generator=generator)
    rows = torch.tensor([4, 0, 3, 3, 1])
    tokens = torch.tensor([0, 1, 2, 3, 4])
    temperature = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0])
    noise = torch.empty(5, 7).exponential_(generator=generator).log()

    def both() -> list[Tensor]:
        of_pi = Distributions(pi, rows, temperature, mask_id=6)
        distribution = token_probs(of_pi, tokens)
        draw = residual(of_pi, Distributions(rho, rows.flip(0), temperature, mask_id=6), lambda chunk: noise[chunk])
        return [*distribution, *draw]

    whole = both()
    before = pi.clone(), rho.clone()
    monkeypatch.setattr(distributions_module, "CHUNK_VALUES", chunk_values)
    for chunked, at_once in zip(both(), whole, strict=True):
        assert torch.equal(chunked, at_once)
    assert torch.equal(pi, before[0])
    assert torch.equal(rho, before[1])


def test_the_least_confident_candidates_are_masked_again_the_leftmost_of_equals_first() -> None:
    tokens = torch.arange(10, 15).expand(4, -1)
    confidence = torch.tensor([0.0, 0.5, 0.2, 0.5, 0.9]).expand(4, -1)
    candidates = torch.tensor([False, True, True, True, True]).expand(4, -1)
    masked = remask(tokens, confidence, candidates, torch.tensor([0, 1, 2, 9]), 99)
    assert masked.tolist() == [
        [10, 11, 12, 13, 14],
        [10, 11, 99, 13, 14],
        [10, 99, 99, 13, 14],
        [10, 99, 99, 99, 99],
    ]


@pytest.mark.parametrize(
    ("fraction", "size", "expected"),
    [(0.25, 8, 2), (0.25, 5, 2), (0.1, 10, 1), (0.3, 50, 15), (0.6, 25, 15), (0.01, 4, 1), (1.0, 64, 64)],
)
def test_a_fraction_of_the_block_is_rounded_up(fraction: float, size: int, expected: int) -> None:
    generated = torch.arange(70).unsqueeze(0) < size
    assert num_remask(generated, torch.tensor([fraction])).tolist() == [expected]


def test_nothing_waits_for_the_device() -> None:
    """Meta tensors have no values to wait for: whatever asks for one raises."""
    with torch.device("meta"):
        block = torch.empty(3, 8, dtype=torch.int64)
        masked, confidence, temperature = block == 9, torch.empty(3, 8), torch.empty(3)
        positions, present = draft_positions(masked, torch.empty(3, dtype=torch.int64), max_window=4)
        tokens, uniform = torch.empty(3, 4, dtype=torch.int64), torch.empty(3, 3)
        distributions = Distributions(torch.empty(96, 10), tokens[:, 1:], temperature, mask_id=9)
        verified = verify(
            tokens[:, 1:],
            positions[:, 1:],
            present[:, 1:],
            distributions,
            distributions,
            uniform,
            lambda _, at: torch.empty(len(at), 10),
        )
        of_use = branches_present(masked, present)
        after = commit(block, confidence, positions, present, tokens, of_use, verified)
        assert fef_branches(block, positions, present, tokens).shape == (3, 4, 8)
        assert remask(after.tokens, after.confidence, masked, num_remask(masked, temperature), 9).shape == (3, 8)
