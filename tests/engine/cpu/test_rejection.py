"""Verification of drafts on a CPU is that of vLLM's Triton kernels, and keeps the target's distribution."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from vllm.v1.worker.gpu.sample import gumbel

from tests.engine.cpu.launches import LAUNCHES, assert_same, run_both
from tests.reference import rejection as reference
from vllm_dllm.cpu import launch as launching
from vllm_dllm.cpu import rejection as ours
from vllm_dllm.cpu import sampling

MAX_REQS, STEPS, VOCAB = 5, 4, 300

rejection_sample = LAUNCHES["rejection_sample"].fallback


def test_uniforms_are_those_of_philox():
    # Known answers of the generator's authors (Random123): counter and key of zeros, and of ones.
    unit = 4.6566127342e-10
    assert ours.uniform(0, 0) == pytest.approx(0x6627E8D5 * unit, rel=1e-6)
    assert 0 < min(ours.uniform(seed, 7) for seed in range(2000)) < 0.01
    assert 0.99 < max(ours.uniform(seed, 7) for seed in range(2000)) < 1


@dataclass
class Case:
    """A random batch of drafted requests."""

    target: torch.Tensor
    """[rows, vocab]"""
    proposal: torch.Tensor | None
    """[max_num_reqs, steps, vocab]"""
    tokens: torch.Tensor
    bounds: torch.Tensor
    pos: torch.Tensor
    slots: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        return self.bounds.diff()

    def arguments(self) -> tuple[Any, ...]:
        places = torch.cat([torch.arange(int(length)) for length in self.lengths]).int()
        return (
            self.target,
            self.proposal,
            self.tokens,
            self.bounds,
            self.pos,
            self.slots,
            self.slots.repeat_interleave(self.lengths),
            places,
            self.temperature,
            self.seed,
            STEPS,
        )


def random_case(seed: int, *, has_proposal: bool, dtype: torch.dtype = torch.float32) -> Case:
    """Drafts are likely under the proposal, which is near the target; some are placeholders."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(MAX_REQS)[: rng.integers(1, MAX_REQS + 1)]
    lengths = rng.integers(1, STEPS + 2, len(slots))
    rows = int(lengths.sum())
    # The target's vocabulary may be padded, and what is not among its top-k has no probability.
    target = rng.normal(0, 3, (rows, VOCAB + 12))
    target[rng.random(target.shape) < 0.3] = -np.inf
    proposal = rng.normal(0, 3, (MAX_REQS, STEPS, VOCAB))
    temperature = rng.choice([0.0, 0.6, 1.0, 1.4], MAX_REQS)
    tokens = rng.integers(0, VOCAB, rows)
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        for step in range(length - 1):
            heat = temperature[slot] or 1.0
            likely = np.where(np.isfinite(target[start + step, :VOCAB]), target[start + step, :VOCAB], -9)
            proposal[slot, step] = heat * (likely + rng.normal(0, 0.3, VOCAB))
            noise = rng.gumbel(size=VOCAB) if temperature[slot] else 0
            draft = int((proposal[slot, step] / heat + noise).argmax())
            tokens[start + step + 1] = -1 if rng.random() < 0.1 else draft
        start += length
    return Case(
        target=torch.from_numpy(target).float(),
        proposal=torch.from_numpy(proposal).to(dtype) if has_proposal else None,
        tokens=torch.from_numpy(tokens.astype(np.int32)),
        bounds=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        pos=torch.from_numpy(np.concatenate([20 + np.arange(length) for length in lengths])),
        slots=torch.from_numpy(slots),
        temperature=torch.from_numpy(temperature).float(),
        seed=torch.from_numpy(rng.integers(-(2**63), 2**63, MAX_REQS)),
    )


def counted(result: tuple[torch.Tensor, torch.Tensor]) -> list[list[int]]:
    """The tokens that count."""
    return [row[:count] for row, count in zip(result[0].tolist(), result[1].tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_proposal", [True, False])
@pytest.mark.parametrize("use_fp64", [False, True])
def test_drafts_are_verified_as_by_triton(monkeypatch, seed, has_proposal, use_fp64):
    case = random_case(seed, has_proposal=has_proposal)
    (triton, _), (mine, _) = run_both(
        monkeypatch,
        "rejection_sample",
        "rejection_sample",
        *case.arguments(),
        use_fp64=use_fp64,
    )
    assert counted(triton) == counted(mine)


def distribution(logits: torch.Tensor) -> list[float]:
    return logits.double().softmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_proposal", [True, False])
def test_drafts_are_verified_as_the_paper_says(has_proposal, dtype):
    num_accepted = 0
    vocab_size = VOCAB if has_proposal else VOCAB + 12
    for seed in range(100, 160):
        case = random_case(seed, has_proposal=has_proposal, dtype=dtype)
        mine = counted(rejection_sample(*case.arguments()))
        bounds = case.bounds.tolist()
        for request, slot in enumerate(case.slots.tolist()):
            start, end = bounds[request : request + 2]
            drafts = case.tokens[start + 1 : end].tolist()
            targets = [distribution(row) for row in case.target[start:end, :vocab_size]]
            temperature, key, pos = float(case.temperature[slot]), int(case.seed[slot]), case.pos[start:end].tolist()

            def draw(step: int, weights: list[float], key: int = key, pos: list[int] = pos) -> int:
                with np.errstate(divide="ignore"):
                    return int((np.log(weights) + sampling.gumbel_noise(key, pos[step], vocab_size)).argmax())

            if temperature == 0:
                expected = reference.verify_greedily(drafts, targets)
            else:
                if case.proposal is None:
                    proposals = [[float(token == draft) for token in range(vocab_size)] for draft in drafts]
                else:
                    proposals = [distribution(row.double() / temperature) for row in case.proposal[slot, : len(drafts)]]
                uniforms = [ours.uniform(key, place) for place in pos[:-1]]
                expected = reference.verify_tokens(drafts, proposals, targets, uniforms, draw)
            assert mine[request] == expected
            num_accepted += len(expected) - 1
    assert num_accepted > 50


def softmax(rng: np.random.Generator, *shape: int) -> np.ndarray:
    weights = rng.gamma(1.0, size=shape)
    return weights / weights.sum(-1, keepdims=True)


TOKENS, DRAWS, HEAT = 4, 4000, 0.7


@dataclass
class Model:
    """Distributions of the first token [tokens] and the second [tokens, tokens] after it; the third is as the first."""

    first: np.ndarray
    second: np.ndarray

    def distribution(self, prefix: np.ndarray) -> np.ndarray:
        """[n, tokens], after prefixes [n, length]."""
        if prefix.shape[1] == 1:
            return self.second[prefix[:, 0]]
        return np.broadcast_to(self.first, (len(prefix), TOKENS))

    def logits(self, prefix: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.distribution(prefix).copy()).log().float()


RNG = np.random.default_rng(7)
TARGET = Model(softmax(RNG, TOKENS), softmax(RNG, TOKENS, TOKENS))
NEAR = Model(0.8 * TARGET.first + 0.2 / TOKENS, 0.8 * TARGET.second + 0.2 / TOKENS)
FAR = Model(TARGET.first[::-1].copy(), softmax(RNG, TOKENS, TOKENS))
ZEROS = Model(np.array([0.5, 0.0, 0.5, 0.0]), np.tile([0.0, 0.0, 0.3, 0.7], (TOKENS, 1)))
LIMITED = Model(np.array([0.0, 0.6, 0.4, 0.0]), np.tile([0.9, 0.0, 0.0, 0.1], (TOKENS, 1)))  # as top-k leaves it


@pytest.fixture
def torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gumbel, "_gumbel_sample_kernel", LAUNCHES["_gumbel_sample_kernel"].fallback)


def speculate(
    target: Model,
    drafter: Model,
    seeds: torch.Tensor,
    text: np.ndarray,
    num_drafts: int,
    is_one_hot: bool,
) -> list[list[int]]:
    """One step of requests of equal length: drafts, drawn by vLLM's keyed noise, and what is kept of them.

    Args:
        text: [n, length] so far.
        is_one_hot: take the likeliest draft and keep no logits, as vLLM does by default.
    """
    n, length = text.shape
    slots, heat = torch.arange(n), torch.full((n,), HEAT)
    proposal = torch.zeros(n, num_drafts, TOKENS)
    prefix, targets = text, []
    for step in range(num_drafts):
        targets.append(target.logits(prefix))
        proposal[:, step] = HEAT * drafter.logits(prefix)
        if is_one_hot:
            drafts = proposal[:, step].argmax(-1)
        else:
            place = torch.full((n,), length + step)
            drafts = gumbel.gumbel_sample(proposal[:, step], slots, heat, seeds, place, True, True)
        prefix = np.concatenate([prefix, drafts.numpy()[:, None]], axis=1)
    targets.append(target.logits(prefix))
    rows = num_drafts + 1
    inputs = np.concatenate([np.zeros((n, 1), dtype=np.int64), prefix[:, length:]], axis=1)
    return counted(
        rejection_sample(
            torch.stack(targets, dim=1).flatten(0, 1),
            None if is_one_hot else proposal,
            torch.from_numpy(inputs.reshape(-1)),
            torch.arange(0, n * rows + 1, rows),
            (length + torch.arange(rows)).repeat(n),
            slots,
            slots.repeat_interleave(rows),
            torch.arange(rows).repeat(n),
            heat,
            seeds,
            num_drafts,
        )
    )


def assert_follows(observed: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square of counts against probabilities; what is impossible must not have happened."""
    observed, expected = observed.reshape(-1), expected.reshape(-1)
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    frequencies = expected[possible] / expected.sum() * observed.sum()
    assert stats.chisquare(observed[possible], frequencies).pvalue > 1e-3


@pytest.mark.parametrize("is_one_hot", [False, True], ids=["drawn", "one-hot"])
@pytest.mark.parametrize(
    ("target", "drafter"),
    [(TARGET, TARGET), (TARGET, NEAR), (TARGET, FAR), (TARGET, ZEROS), (LIMITED, NEAR)],
    ids=["equal", "near", "far", "proposal with zeros", "target with zeros"],
)
def test_the_first_two_tokens_follow_the_target_whatever_the_drafter(torch_draws, target, drafter, is_one_hot):
    seeds = torch.arange(DRAWS) * 7919 + 13
    rounds = speculate(
        target,
        drafter,
        seeds,
        np.zeros((DRAWS, 0), dtype=np.int64),
        2,
        is_one_hot,
    )
    short = [request for request, tokens in enumerate(rounds) if len(tokens) == 1]
    more = speculate(
        target,
        drafter,
        seeds[short],
        np.array([rounds[request] for request in short], dtype=np.int64).reshape(-1, 1),
        1,
        is_one_hot,
    )
    for request, tokens in zip(short, more, strict=True):
        rounds[request] += tokens
    counts = np.zeros((TOKENS, TOKENS))
    for first, second, *_ in rounds:
        counts[first, second] += 1
    assert_follows(counts.sum(1), target.first)
    assert_follows(counts, target.first[:, None] * target.second)


def test_a_draft_is_accepted_as_often_as_the_distributions_overlap(torch_draws):
    rounds = speculate(TARGET, FAR, torch.arange(DRAWS), np.zeros((DRAWS, 0), dtype=np.int64), 1, False)
    accepted = sum(len(tokens) == 2 for tokens in rounds)
    overlap = float(np.minimum(TARGET.first, FAR.first).sum())
    assert 0.05 < overlap < 0.95
    assert_follows(np.array([accepted, DRAWS - accepted]), np.array([overlap, 1 - overlap]))


def test_a_request_is_verified_alike_in_any_batch():
    case = random_case(3, has_proposal=True)
    together = counted(rejection_sample(*case.arguments()))
    bounds = case.bounds.tolist()
    for request in range(len(case.slots)):
        rows = slice(*bounds[request : request + 2])
        alone = Case(
            case.target[rows],
            case.proposal,
            case.tokens[rows],
            case.bounds[request : request + 2] - bounds[request],
            case.pos[rows],
            case.slots[request : request + 1],
            case.temperature,
            case.seed,
        )
        assert counted(rejection_sample(*alone.arguments())) == together[request : request + 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_accepted_from_a_placeholder_on(temperature):
    # Every other draft is certain, and is the target's choice.
    tokens = torch.tensor([0, 2, -1, 2, 2])
    target = torch.full((5, TOKENS), -math.inf)
    target[:, 2] = 0.0
    for proposal in (None, torch.zeros(1, 4, TOKENS)):
        sampled, num_sampled = rejection_sample(
            target,
            proposal,
            tokens,
            torch.tensor([0, 5]),
            torch.arange(5),
            torch.tensor([0]),
            torch.zeros(5, dtype=torch.int64),
            torch.arange(5),
            torch.tensor([temperature]),
            torch.tensor([4]),
            4,
        )
        assert num_sampled.tolist() == [2]
        assert sampled[0, :2].tolist() == [2, 2]


def test_a_draft_rejected_by_rounding_is_drawn_from_the_target_again(monkeypatch):
    # The target is the proposal, and nothing is left of the target.
    row = torch.tensor([-math.inf, 0.0, 1.0, -math.inf])
    monkeypatch.setattr(ours, "uniform", lambda seed, pos: 1.0)
    kept = ours.verify(
        [1], row.expand(2, 4), row.expand(1, 4), temperature=1.0, seed=5, positions=[0, 1], use_fp64=False
    )
    assert kept in ([1], [2])


@pytest.mark.parametrize(
    "way",
    [
        {"synthetic_conditional_rates": torch.ones(2)},
        {"use_block_verification": True},
        {"contexts": torch.zeros(1, 1), "watermark_key": 9},
    ],
    ids=["synthetic", "block", "watermark"],
)
def test_other_ways_to_verify_are_left_to_triton(way):
    seen = []

    def in_triton(
        target_logits,
        draft_logits,
        draft_sampled,
        cu_num_logits,
        pos,
        idx_mapping,
        temperature,
        seed,
        num_speculative_steps,
        synthetic_conditional_rates=None,
        use_fp64=False,
        use_block_verification=False,
        contexts=None,
        watermark_key=None,
    ):
        seen.append((synthetic_conditional_rates, use_block_verification, contexts, watermark_key))

    launching.adapt(in_triton, ours.rejection_sample)(*[None] * 9, **way)
    names = ("synthetic_conditional_rates", "use_block_verification", "contexts", "watermark_key")
    assert seen == [tuple(way.get(name, False if name.startswith("use") else None) for name in names)]


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_gathered_as_by_triton(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, STEPS + 2, MAX_REQS)
    places = np.concatenate([np.arange(length) for length in lengths])
    rows, num_tokens = len(places), 80
    assert_same(
        *run_both(
            monkeypatch,
            "_gather_draft_sampled_kernel",
            "gather_draft_sampled",
            torch.from_numpy(rng.integers(0, VOCAB, num_tokens, dtype=np.int32)),
            torch.from_numpy(rng.integers(0, 40, num_tokens)),
            torch.from_numpy(np.sort(rng.permutation(num_tokens)[:rows])),
            torch.from_numpy(np.repeat(rng.permutation(MAX_REQS), lengths)),
            torch.from_numpy(places.astype(np.int32)),
            torch.from_numpy(rng.integers(1, 40, MAX_REQS, dtype=np.int32)),
        )
    )


def test_sampled_tokens_are_put_at_their_rows_as_by_triton():
    launch = LAUNCHES["_flatten_sampled_kernel"]
    sampled = torch.arange(12).reshape(3, 4) + 5
    outcomes = []
    for launched in (launch.original, launch.fallback):
        flat = torch.zeros(8, dtype=torch.int64)
        launched[(3,)](
            flat, sampled, sampled.stride(0), torch.tensor([1, 3, 0]), torch.tensor([0, 2, 6, 8]), num_warps=1
        )
        outcomes.append(flat)
    assert outcomes[0].tolist() == [5, 0, 9, 10, 11, 0, 0, 0]
    assert_same(*outcomes)
