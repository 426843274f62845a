"""The Triton implementation of :func:`vllm_dllm.kernels.confidence.row_stats`."""

import torch
import triton
import triton.language as tl

from vllm_dllm.kernels.confidence import SPLITMIX_INCREMENT, SPLITMIX_MULTIPLIERS, Draws, RowStats

# Eight entries per thread: one 16-byte load of bfloat16, and their running values all stay in registers.
_BLOCK_SIZE = 2048
_NUM_WARPS = 8

_INCREMENT = tl.constexpr(SPLITMIX_INCREMENT)
_MULTIPLIER_1 = tl.constexpr(SPLITMIX_MULTIPLIERS[0])
_MULTIPLIER_2 = tl.constexpr(SPLITMIX_MULTIPLIERS[1])

# Stands for "no maximum yet" and for -inf: below every logit that matters, and differences to it are numbers.
_LOWEST = tl.constexpr(-1e30)
_NO_TOKEN = tl.constexpr(2**31 - 1)


def row_stats_triton(
    logits: torch.Tensor, draws: Draws | None, forbidden_token: int, with_entropy: bool, with_margin: bool
) -> RowStats:
    """:func:`vllm_dllm.kernels.confidence.row_stats` as one kernel, without temporary memory."""
    rows, vocab = logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    confidence = torch.empty(rows, dtype=torch.float32, device=logits.device)
    entropy = torch.empty_like(confidence) if with_entropy else None
    margin = torch.empty_like(confidence) if with_margin else None
    if rows:
        _row_stats_kernel[(rows,)](
            logits,
            logits.stride(0),
            logits.stride(1),
            vocab,
            forbidden_token,
            *([None] * 4 if draws is None else [values.contiguous() for values in draws[:4]]),
            token,
            confidence,
            entropy,
            margin,
            WITH_ENTROPY=with_entropy,
            WITH_MARGIN=with_margin,
            SAMPLING=draws is not None,
            TEMPERATURE_APPLIED=draws is not None and draws.temperature_applied,
            BLOCK_SIZE=_BLOCK_SIZE,
            num_warps=_NUM_WARPS,
        )
    return RowStats(token, confidence, entropy, margin)


@triton.jit
def _mix64(z: tl.tensor) -> tl.tensor:
    z = (z ^ (z >> 30)) * _MULTIPLIER_1
    return (z ^ (z >> 27)) * _MULTIPLIER_2


@triton.jit
def _log_exponential(key: tl.tensor, cols: tl.tensor) -> tl.tensor:
    """The same variables as the torch function of this name, to the last bit before the logarithms."""
    bits = _mix64(key + (cols.to(tl.uint64) + 1) * _INCREMENT) >> 32
    w = tl.minimum((bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # -log(1 - w); the series takes over where 1 - w would lose the digits of w.
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    return tl.log(tl.where(w < 2.0**-4, series, -tl.log(1 - w)))


@triton.jit
def _row_stats_kernel(
    logits_ptr: tl.tensor,  # [rows, vocab]
    row_stride: tl.tensor,
    col_stride: tl.tensor,
    vocab: tl.tensor,
    forbidden_token: tl.tensor,
    temperature_ptr: tl.tensor,  # [rows] float32
    seed_ptr: tl.tensor,  # [rows] int64
    position_ptr: tl.tensor,  # [rows] int64
    round_ptr: tl.tensor,  # [rows] int64
    token_ptr: tl.tensor,  # [rows] int64
    confidence_ptr: tl.tensor,  # [rows] float32
    entropy_ptr: tl.tensor,  # [rows] float32
    margin_ptr: tl.tensor,  # [rows] float32
    WITH_ENTROPY: tl.constexpr,
    WITH_MARGIN: tl.constexpr,
    SAMPLING: tl.constexpr,
    TEMPERATURE_APPLIED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    lanes = tl.arange(0, BLOCK_SIZE)

    scale = 1.0
    if SAMPLING:
        temperature = tl.load(temperature_ptr + row)
        sampled = temperature > 0
        if not TEMPERATURE_APPLIED:
            scale = tl.where(sampled, 1.0 / tl.where(sampled, temperature, 1.0), 1.0)
        noise_factor = tl.where(sampled, -1.0, 0.0)
        key = _mix64(tl.load(seed_ptr + row).to(tl.uint64))
        key = _mix64(key + tl.load(position_ptr + row).to(tl.uint64))
        key = _mix64(key + tl.load(round_ptr + row).to(tl.uint64))

    # Every lane runs over its own columns; lanes meet once, after the loop.
    maximum = tl.full([BLOCK_SIZE], _LOWEST, tl.float32)
    mass = tl.zeros([BLOCK_SIZE], tl.float32)  # sum of exp(x - maximum)
    moment = tl.zeros([BLOCK_SIZE], tl.float32)  # sum of exp(x - maximum) * (x - maximum)
    best_score = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    best_x = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    best_token = tl.where(forbidden_token == 0, 1, 0) + tl.zeros([BLOCK_SIZE], tl.int32)
    if WITH_MARGIN:
        largest = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
        second = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)

    for start in range(0, vocab, BLOCK_SIZE):
        cols = start + lanes
        inside = cols < vocab
        x = tl.load(row_ptr + cols.to(tl.int64) * col_stride, mask=inside, other=float("-inf"))
        x = x.to(tl.float32) * scale

        # One exponential serves both cases: it rescales the sums if x is the new maximum, else is x's term.
        difference = tl.maximum(x, _LOWEST) - maximum
        rises = difference > 0
        factor = tl.exp(-tl.abs(difference))
        if WITH_ENTROPY:
            moment = tl.where(rises, factor * (moment - mass * difference), moment + factor * difference)
        mass = tl.where(rises, mass * factor + 1.0, mass + factor)
        maximum = tl.where(rises, x, maximum)

        score = x
        if SAMPLING:
            score += noise_factor * _log_exponential(key, cols)
        better = (score > best_score) & (cols != forbidden_token)
        best_score = tl.where(better, score, best_score)
        best_x = tl.where(better, x, best_x)
        best_token = tl.where(better, cols, best_token)

        if WITH_MARGIN:
            allowed = tl.where(cols != forbidden_token, x, float("-inf"))
            second = tl.maximum(second, tl.minimum(largest, allowed))
            largest = tl.maximum(largest, allowed)

    row_maximum = tl.max(maximum, axis=0)
    shift = maximum - row_maximum
    rescale = tl.exp(shift)
    row_mass = tl.sum(mass * rescale, axis=0)

    # The smallest token id among the lanes that hold the best score.
    row_best_score = tl.max(best_score, axis=0)
    candidate = tl.where(best_score == row_best_score, best_token, _NO_TOKEN)
    token = tl.min(candidate, axis=0)
    x_of_token = tl.max(tl.where(candidate == token, best_x, float("-inf")), axis=0)

    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(confidence_ptr + row, tl.exp(x_of_token - row_maximum) / row_mass)
    if WITH_ENTROPY:
        row_moment = tl.sum((moment + mass * shift) * rescale, axis=0)
        tl.store(entropy_ptr + row, tl.log(row_mass) - row_moment / row_mass)
    if WITH_MARGIN:
        row_largest = tl.max(largest, axis=0)
        # The second of the row is the second of one lane that holds the largest, or the largest of another lane.
        lane = tl.min(tl.where(largest == row_largest, lanes, BLOCK_SIZE), axis=0)
        row_second = tl.max(tl.where(lanes == lane, second, largest), axis=0)
        difference_of_two = tl.exp(row_largest - row_maximum) - tl.exp(row_second - row_maximum)
        tl.store(margin_ptr + row, difference_of_two / row_mass)
