"""Sampling on CPU is that of vLLM's Triton kernels."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from vllm.v1.worker.gpu.sample import gumbel

from tests.engine.cpu.launches import LAUNCHES, assert_same, run_both
from vllm_dllm.cpu import sampling as ours

MAX_REQS, VOCAB = 5, 300
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=range(4))
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)


def random_rows(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (slot, place in the request, input token) of each logits row; some requests bring drafts."""
    slots = rng.permutation(MAX_REQS)[: rng.integers(1, MAX_REQS + 1)]
    lengths = rng.integers(1, 5, len(slots))
    return (
        torch.from_numpy(np.repeat(slots, lengths)),
        torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)),
        torch.from_numpy(rng.integers(0, VOCAB, lengths.sum(), dtype=np.int32)),
    )


def random_logits(rng: np.random.Generator, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, 3, (rows, VOCAB))).to(dtype)


def choose(rng: np.random.Generator, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(rng.choice(values, MAX_REQS)).to(dtype)


def test_temperature_divides_as_by_triton(monkeypatch, rng):
    slots, _, _ = random_rows(rng)
    assert_same(
        *run_both(
            monkeypatch,
            "_temperature_kernel",
            "apply_temperature",
            random_logits(rng, len(slots)),
            slots,
            choose(rng, 0.0, 0.3, 1.0, 1.7),
        )
    )


def test_temperature_divides_bfloat16_logits_in_float32(rng):
    # Triton's interpreter rounds bfloat16 in another way than the device.
    logits = random_logits(rng, 3, torch.bfloat16)
    expected = (logits.float() / 0.3).bfloat16()
    ours.apply_temperature(logits, torch.zeros(3, dtype=torch.int64), torch.tensor([0.3]))
    assert_same(expected, logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_min_p_removes_the_tokens_that_triton_removes(monkeypatch, rng, dtype):
    slots, _, _ = random_rows(rng)
    assert_same(
        *run_both(
            monkeypatch,
            "_min_p_kernel",
            "apply_min_p",
            random_logits(rng, len(slots), dtype),
            slots,
            choose(rng, 0.0, 0.05, 0.5, 1.0),
        )
    )


def test_penalties_change_logits_as_by_triton(monkeypatch, rng):
    slots, local_pos, input_ids = random_rows(rng)
    # Drafts that are none, and tokens of a vocabulary that is larger.
    input_ids[::4], input_ids[1::5] = -1, VOCAB + 2
    words = math.ceil(VOCAB / 32)
    assert_same(
        *run_both(
            monkeypatch,
            "_penalties_kernel",
            "apply_penalties",
            random_logits(rng, len(slots)),
            slots,
            input_ids,
            local_pos,
            choose(rng, 1.0, 1.5, 0.7),
            choose(rng, 0.0, 0.4, -0.3),
            choose(rng, 0.0, 0.2),
            torch.from_numpy(rng.integers(-(2**31), 2**31, (MAX_REQS, words), dtype=np.int32)),
            torch.from_numpy(rng.integers(-4, 4, (MAX_REQS, VOCAB), dtype=np.int32).clip(0)),
        ),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("restores", [False, True])
def test_allowed_tokens_biases_and_minimum_lengths_change_logits_as_by_triton(monkeypatch, rng, restores):
    slots, local_pos, _ = random_rows(rng)
    columns = 16

    def token_table() -> torch.Tensor:
        return torch.from_numpy(np.stack([rng.permutation(VOCAB)[:columns] for _ in range(MAX_REQS)]).astype(np.int32))

    logits = random_logits(rng, len(slots))
    stop_token_ids = token_table()
    if restores:  # a grammar that leaves the stop tokens alone
        kept = logits[0, stop_token_ids[slots[0]].long()].clone()
        logits[0] = -torch.inf
        logits[0, stop_token_ids[slots[0]].long()] = kept
    assert_same(
        *run_both(
            monkeypatch,
            "_bias_kernel",
            "apply_logit_bias",
            logits,
            slots,
            local_pos.long() + 10,
            choose(rng, 0, 0, columns // 2, dtype=torch.int32),
            token_table(),
            choose(rng, 0, 5, dtype=torch.int32),
            token_table(),
            torch.from_numpy(rng.normal(size=(MAX_REQS, columns)).astype(np.float32)),
            choose(rng, 0, 12, 99, dtype=torch.int32),
            choose(rng, 0, columns, dtype=torch.int32),
            choose(rng, 0, 1, dtype=torch.int32),
            stop_token_ids,
            restores,
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_grammar_keeps_the_tokens_whose_bits_are_set(rng, dtype):
    # Triton's interpreter cannot run the kernel.
    bounds = torch.from_numpy(np.cumsum([0, *rng.integers(1, 5, MAX_REQS)]).astype(np.int32))
    logits = random_logits(rng, int(bounds[-1]), dtype)
    words = math.ceil(VOCAB / 32)
    places = rng.permutation(MAX_REQS * 4)[:8]
    bits = rng.integers(-(2**31), 2**31, (8, words), dtype=np.int32)
    expected, outside = logits.clone(), 0
    for mask, (request, position) in zip(bits.tolist(), (divmod(int(place), 4) for place in places), strict=True):
        row = int(bounds[request]) + position
        if row >= bounds[request + 1]:  # a mask of a draft that was not scheduled
            outside += 1
            continue
        for token in range(VOCAB):
            if not mask[token // 32] >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    assert 0 < outside < 8
    ours.apply_grammar_bitmask(
        logits,
        logits_indices=places.astype(np.int32),
        cu_num_logits=bounds.numpy(),
        bitmask=bits,
        vocab_size=VOCAB,
        mask_stride=4,
    )
    assert_same(expected, logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities_are_those_of_triton(monkeypatch, rng, dtype):
    logits = random_logits(rng, 6, dtype)
    token_ids = torch.from_numpy(rng.integers(0, VOCAB, (6, 5)))
    triton, mine = run_both(monkeypatch, "_topk_log_softmax_kernel", "compute_token_logprobs", logits, token_ids)
    assert_same(triton, mine, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_logprobs", [0, 4])
def test_ranks_are_those_of_triton(monkeypatch, rng, num_logprobs):
    logits = random_logits(rng, 6)
    token_ids = torch.from_numpy(rng.integers(0, VOCAB, 6))
    (triton, _), (mine, _) = run_both(
        monkeypatch, "_ranks_kernel", "compute_topk_scores", logits, num_logprobs, token_ids
    )
    assert_same(triton[:3], mine[:3], rtol=1e-5, atol=1e-5)


def test_ranks_of_bfloat16_logits_count_ties(rng):
    # Triton's interpreter compares bfloat16 by its bits.
    logits = random_logits(rng, 4, torch.bfloat16)
    token_ids = torch.from_numpy(rng.integers(0, VOCAB, 4))
    output = torch.zeros(4, dtype=torch.int64)
    ours.ranks(output, logits, token_ids)
    chosen = logits[torch.arange(4), token_ids]
    assert output.tolist() == [
        sum(value >= limit for value in row) for row, limit in zip(logits.tolist(), chosen.tolist(), strict=True)
    ]


def sample(monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, heat: float, **options) -> torch.Tensor:
    """One draw per row, at positions 0, 1, 2, ..., of the one request there is."""
    monkeypatch.setattr(gumbel, "_gumbel_sample_kernel", LAUNCHES["_gumbel_sample_kernel"].fallback)
    rows = len(logits)
    arguments = {
        "expanded_idx_mapping": torch.zeros(rows, dtype=torch.int64),
        "temperature": torch.tensor([heat]),
        "seed": torch.tensor([1234567890123]),
        "pos": torch.arange(rows),
        "apply_temperature": True,
        "is_drafting": False,
    }
    return gumbel.gumbel_sample(logits, **(arguments | options))


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("is_drafting", [False, True])
def test_draws_are_those_of_triton(monkeypatch, rng, use_fp64, is_drafting):
    slots, local_pos, _ = random_rows(rng)
    (triton, _), (mine, _) = run_both(
        monkeypatch,
        "_gumbel_sample_kernel",
        "gumbel_sample",
        random_logits(rng, len(slots)),
        slots,
        choose(rng, 0.0, 0.5, 1.0, 1.7),
        torch.from_numpy(rng.integers(-(2**63), 2**63, MAX_REQS)),
        local_pos.long() + 20,
        True,
        is_drafting,
        use_fp64=use_fp64,
    )
    assert_same(triton, mine)


def murmur3(key: bytes, seed: int) -> int:
    """MurmurHash3_x86_32 of whole 32 bit words, by its definition."""

    def rotate(value: int, shift: int) -> int:
        return ((value << shift) | (value >> (32 - shift))) & 0xFFFFFFFF

    hashed = seed
    for start in range(0, len(key), 4):
        word = int.from_bytes(key[start : start + 4], "little")
        word = rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        hashed = (rotate(hashed ^ word, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    hashed ^= len(key)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return hashed ^ hashed >> 16


@pytest.mark.parametrize("seed", [0, 7, -3, 2**40 + 5, -(2**63)])
@pytest.mark.parametrize("pos", [0, 1, 5000, 2**30 + 2])
def test_noise_is_the_gumbel_transform_of_murmur3_of_seed_position_and_token(seed, pos):
    def words(token: int) -> bytes:
        return (seed & 2**64 - 1).to_bytes(8, "little") + pos.to_bytes(4, "little") + token.to_bytes(4, "little")

    low = [murmur3(words(token), 0) for token in range(64)]
    high = [murmur3(words(token), 0x9E3779B9) for token in range(64)]
    uniform32 = [min(float(np.float32((draw + 0.5) * 2**-32)), 1 - 2**-24) for draw in low]
    expected32 = [-math.log(-math.log1p(-uniform)) for uniform in uniform32]
    expected64 = [
        -math.log(-math.log(((up << 32 | down) // 2**11 + 0.5) * 2**-53)) for up, down in zip(high, low, strict=True)
    ]
    np.testing.assert_allclose(ours.gumbel_noise(seed, pos, 64), expected32, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(ours.gumbel_noise(seed, pos, 64, use_fp64=True), expected64, rtol=1e-12)


@pytest.mark.parametrize("use_fp64", [False, True])
def test_draws_follow_the_softmax_of_the_logits(monkeypatch, use_fp64):
    draws, temperature = 4000, 0.8
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).expand(draws, 5).contiguous()
    counts = sample(monkeypatch, logits, temperature, use_fp64=use_fp64).bincount(minlength=5)
    expected = draws * (logits[0] / temperature).softmax(-1).double().numpy()
    assert stats.chisquare(counts.numpy(), expected / expected.sum() * draws).pvalue > 1e-3


def test_temperature_zero_takes_the_likeliest_token_of_any_vocabulary_block(monkeypatch):
    logits = torch.zeros(3, 2500)
    logits[[0, 1, 2], [7, 1500, 2499]] = 1.0
    assert sample(monkeypatch, logits, 0.0).tolist() == [7, 1500, 2499]


def test_greedy_and_sampled_rows_share_a_batch_without_a_change_to_either(monkeypatch):
    logits = random_logits(np.random.default_rng(0), 6)
    slots = torch.tensor([0, 1, 0, 1, -1, 0])
    mixed = sample(
        monkeypatch,
        logits,
        0.0,
        expanded_idx_mapping=slots,
        temperature=torch.tensor([0.0, 1.3]),
        seed=torch.tensor([1, 2]),
    )
    greedy = sample(monkeypatch, logits, 0.0)
    alone = sample(monkeypatch, logits, 1.3, seed=torch.tensor([2]))
    assert mixed.tolist() == torch.where(slots == 1, alone, greedy).tolist()


def test_a_draft_and_its_verification_draw_different_noise(monkeypatch):
    logits = torch.zeros(50, VOCAB)
    assert (sample(monkeypatch, logits, 1.0) != sample(monkeypatch, logits, 1.0, is_drafting=True)).any()


@pytest.mark.parametrize("per_row", [False, True])
def test_logits_before_temperature_are_kept_for_the_verification(monkeypatch, per_row):
    logits = random_logits(np.random.default_rng(0), 3)
    cache = torch.zeros(4, 5, VOCAB)
    column = torch.tensor([1, 2, 3]) if per_row else torch.tensor(2)
    sample(
        monkeypatch,
        logits,
        0.0,
        expanded_idx_mapping=torch.tensor([3, -1, 0]),
        temperature=torch.full((4,), 0.5),
        seed=torch.arange(4),
        logits_cache=cache,
        logits_cache_col=column,
    )
    expected = torch.zeros_like(cache)
    expected[3, 1 if per_row else 2] = logits[0]
    expected[0, 3 if per_row else 2] = logits[2]
    assert_same(expected, cache)


def test_draws_of_small_seeds_at_consecutive_positions_are_independent() -> None:
    """The noise of a token and that of the next one share a prefix of the hash."""
    positions, seeds = range(25), range(300)
    drawn = np.array([[ours.gumbel_noise(seed, pos, 6).argmax() for seed in seeds] for pos in positions])
    tables = [np.histogram2d(one, other, bins=6, range=[(0, 6)] * 2)[0] for one, other in itertools.pairwise(drawn)]
    pvalues = [stats.chi2_contingency(table).pvalue for table in tables]
    assert stats.kstest(pvalues, "uniform").pvalue > 1e-3
    assert min(pvalues) > 1e-3 / len(pvalues)
