"""The Triton implementation of :func:`vllm_dllm.kernels.confidence.row_stats`.

Every row of logits is cut into parts of ``PART_COLUMNS`` columns. One program reduces one part to a record of a few
numbers, and then one program per row merges the records of the row. A few rows are thus work for a whole GPU: 32 rows
of 151936 columns are 1216 programs.

The statistics of a row are the same to the last bit whatever other rows the batch has:

- The parts depend on the vocabulary alone, and no kernel is told the number of rows.
- The width of the loads decides the order in which threads add up. The width is the same for all batches of a model.
- Other requests of the batch may want draws, entropies or margins, and so choose the variant of the kernels. All
  variants add up in the same order and round every product before they add it (``enable_fp_fusion=False``).
"""

import torch
import triton
import triton.language as tl

from vllm_dllm.kernels.confidence import SPLITMIX_INCREMENT, SPLITMIX_MULTIPLIERS, Draws, RowStats

# A thread of a part's program holds 32 columns in registers. In bfloat16 they are four loads of 16 bytes, which do not
# wait for each other.
PART_COLUMNS = 4096
_PART_WARPS = 4

_INCREMENT = tl.constexpr(SPLITMIX_INCREMENT)
_MULTIPLIER_1 = tl.constexpr(SPLITMIX_MULTIPLIERS[0])
_MULTIPLIER_2 = tl.constexpr(SPLITMIX_MULTIPLIERS[1])

# Replaces -inf where differences have to be numbers; less than every logit that matters.
_LOWEST = tl.constexpr(-1e30)
_NO_TOKEN = tl.constexpr(2**31 - 1)

# Fields of the record of a part. A record is 32 bytes, one sector of the GPU's memory.
_MAXIMUM = tl.constexpr(0)
_MASS = tl.constexpr(1)  # sum of exp(x - maximum)
_MOMENT = tl.constexpr(2)  # sum of exp(x - maximum) * (x - maximum)
_BEST_SCORE = tl.constexpr(3)
_TOKEN = tl.constexpr(4)  # the smallest token id with the best score, the bits of an int32
_LARGEST = tl.constexpr(5)  # largest x, the forbidden token left out
_SECOND = tl.constexpr(6)  # second largest x, the forbidden token left out
_FIELDS = tl.constexpr(8)


def row_stats_triton(
    logits: torch.Tensor, draws: Draws | None, forbidden_token: int, with_entropy: bool, with_margin: bool
) -> RowStats:
    """:func:`vllm_dllm.kernels.confidence.row_stats` as two kernels.

    Temporary memory: 32 bytes per part of a row.
    """
    rows, vocab = logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    confidence = torch.empty(rows, dtype=torch.float32, device=logits.device)
    entropy = torch.empty_like(confidence) if with_entropy else None
    margin = torch.empty_like(confidence) if with_margin else None
    if rows:
        parts = triton.cdiv(vocab, PART_COLUMNS)
        records = torch.empty(rows, parts, _FIELDS.value, dtype=torch.float32, device=logits.device)
        of_logits = (logits, logits.stride(0), logits.stride(1), vocab, forbidden_token)
        keys = [None] * 4 if draws is None else [values.contiguous() for values in draws[:4]]
        variant = {
            "WITH_ENTROPY": with_entropy,
            "WITH_MARGIN": with_margin,
            "SAMPLING": draws is not None,
            "TEMPERATURE_APPLIED": draws is not None and draws.temperature_applied,
            "PART_COLUMNS": PART_COLUMNS,
            "enable_fp_fusion": False,
        }
        # Loads of 16 bytes need both. The stride alone must not decide: a single row may have any stride.
        is_aligned = vocab % 16 == 0 and logits.stride(0) % 16 == 0
        _part_kernel[(rows * parts,)](
            *of_logits, *keys, records, **variant, IS_ALIGNED=is_aligned, num_warps=_PART_WARPS
        )
        _merge_kernel[(rows,)](
            *of_logits,
            keys[0],
            records,
            token,
            confidence,
            entropy,
            margin,
            **variant,
            MAX_PARTS=triton.next_power_of_2(parts),
            num_warps=1,
        )
    return RowStats(token, confidence, entropy, margin)


@triton.jit
def _mix64(z: tl.tensor) -> tl.tensor:
    z = (z ^ (z >> 30)) * _MULTIPLIER_1
    return (z ^ (z >> 27)) * _MULTIPLIER_2


@triton.jit
def _log_exponential(key: tl.tensor, cols: tl.tensor) -> tl.tensor:
    """The same variables as ``confidence.log_exponential_``, to the last bit before the logarithms."""
    bits = _mix64(key + (cols.to(tl.uint64) + 1) * _INCREMENT) >> 32
    w = tl.minimum((bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # -log(1 - w); the series takes over where 1 - w would lose the digits of w.
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    return tl.log(tl.where(w < 2.0**-4, series, -tl.log(1 - w)))


@triton.jit
def _scale(temperature_ptr: tl.tensor, row: tl.tensor, TEMPERATURE_APPLIED: tl.constexpr) -> tl.tensor:
    """What logits of the row are multiplied by."""
    scale = 1.0
    if not TEMPERATURE_APPLIED:
        temperature = tl.load(temperature_ptr + row)
        sampled = temperature > 0
        scale = tl.where(sampled, 1.0 / tl.where(sampled, temperature, 1.0), 1.0)
    return scale


@triton.jit(do_not_specialize=["row_stride"])
def _part_kernel(
    logits_ptr: tl.tensor,  # [rows, vocab]
    row_stride: tl.tensor,
    col_stride: tl.tensor,
    vocab: tl.tensor,
    forbidden_token: tl.tensor,
    temperature_ptr: tl.tensor,  # [rows] float32
    seed_ptr: tl.tensor,  # [rows] int64
    position_ptr: tl.tensor,  # [rows] int64
    round_ptr: tl.tensor,  # [rows] int64
    records_ptr: tl.tensor,  # [rows, parts, fields] float32
    WITH_ENTROPY: tl.constexpr,
    WITH_MARGIN: tl.constexpr,
    SAMPLING: tl.constexpr,
    TEMPERATURE_APPLIED: tl.constexpr,
    PART_COLUMNS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    parts = tl.cdiv(vocab, PART_COLUMNS)
    row = (program // parts).to(tl.int64)
    record_ptr = records_ptr + program.to(tl.int64) * _FIELDS
    cols = program % parts * PART_COLUMNS + tl.arange(0, PART_COLUMNS)
    begin = row * row_stride
    if IS_ALIGNED:
        begin = tl.multiple_of(begin, 16)
    column_ptrs = logits_ptr + begin + cols.to(tl.int64) * col_stride
    x = tl.load(column_ptrs, mask=cols < vocab, other=float("-inf")).to(tl.float32)
    if SAMPLING:
        x *= _scale(temperature_ptr, row, TEMPERATURE_APPLIED)

    logit = tl.maximum(x, _LOWEST)
    maximum = tl.max(logit, axis=0)
    difference = logit - maximum
    weight = tl.exp(difference)
    tl.store(record_ptr + _MAXIMUM, maximum)
    tl.store(record_ptr + _MASS, tl.sum(weight, axis=0))
    if WITH_ENTROPY:
        tl.store(record_ptr + _MOMENT, tl.sum(weight * difference, axis=0))

    x = tl.where(cols != forbidden_token, x, float("-inf"))
    largest = tl.max(x, axis=0)
    largest_token = tl.min(tl.where(x == largest, cols, _NO_TOKEN), axis=0)
    best_score = largest
    token = largest_token
    if SAMPLING:
        key = _mix64(tl.load(seed_ptr + row).to(tl.uint64))
        key = _mix64(key + tl.load(position_ptr + row).to(tl.uint64))
        key = _mix64(key + tl.load(round_ptr + row).to(tl.uint64))
        noise_factor = tl.where(tl.load(temperature_ptr + row) > 0, -1.0, 0.0)
        score = x + noise_factor * _log_exponential(key, cols)
        best_score = tl.max(score, axis=0)
        token = tl.min(tl.where(score == best_score, cols, _NO_TOKEN), axis=0)
    tl.store(record_ptr + _BEST_SCORE, best_score)
    tl.store(record_ptr + _TOKEN, token.to(tl.float32, bitcast=True))
    if WITH_MARGIN:
        tl.store(record_ptr + _LARGEST, largest)
        tl.store(record_ptr + _SECOND, tl.max(tl.where(cols == largest_token, float("-inf"), x), axis=0))


@triton.jit
def _merge_kernel(
    logits_ptr: tl.tensor,  # [rows, vocab]
    row_stride: tl.tensor,
    col_stride: tl.tensor,
    vocab: tl.tensor,
    forbidden_token: tl.tensor,
    temperature_ptr: tl.tensor,  # [rows] float32
    records_ptr: tl.tensor,  # [rows, parts, fields] float32
    token_ptr: tl.tensor,  # [rows] int64
    confidence_ptr: tl.tensor,  # [rows] float32
    entropy_ptr: tl.tensor,  # [rows] float32
    margin_ptr: tl.tensor,  # [rows] float32
    WITH_ENTROPY: tl.constexpr,
    WITH_MARGIN: tl.constexpr,
    SAMPLING: tl.constexpr,
    TEMPERATURE_APPLIED: tl.constexpr,
    PART_COLUMNS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    parts = tl.cdiv(vocab, PART_COLUMNS)
    part = tl.arange(0, MAX_PARTS)
    there = part < parts
    record_ptrs = records_ptr + (row * parts + part) * _FIELDS

    part_maximum = tl.load(record_ptrs + _MAXIMUM, mask=there, other=_LOWEST)
    maximum = tl.max(part_maximum, axis=0)
    shift = part_maximum - maximum
    rescale = tl.exp(shift)
    part_mass = tl.load(record_ptrs + _MASS, mask=there, other=0.0)
    mass = tl.sum(part_mass * rescale, axis=0)
    if WITH_ENTROPY:
        part_moment = tl.load(record_ptrs + _MOMENT, mask=there, other=0.0)
        moment = tl.sum((part_moment + part_mass * shift) * rescale, axis=0)
        tl.store(entropy_ptr + row, tl.log(mass) - moment / mass)

    part_score = tl.load(record_ptrs + _BEST_SCORE, mask=there, other=float("-inf"))
    best_score = tl.max(part_score, axis=0)
    part_token = tl.load(record_ptrs + _TOKEN, mask=there, other=0.0).to(tl.int32, bitcast=True)
    token = tl.min(tl.where(part_score == best_score, part_token, _NO_TOKEN), axis=0)
    # The first token that is not forbidden, where all scores are -inf or not a number.
    token = tl.where(best_score > float("-inf"), token, tl.where(forbidden_token == 0, 1, 0)).to(tl.int64)
    x = tl.load(logits_ptr + row * row_stride + token * col_stride).to(tl.float32)
    if SAMPLING:
        x *= _scale(temperature_ptr, row, TEMPERATURE_APPLIED)
    tl.store(token_ptr + row, token)
    tl.store(confidence_ptr + row, tl.exp(tl.maximum(x, _LOWEST) - maximum) / mass)

    if WITH_MARGIN:
        part_largest = tl.load(record_ptrs + _LARGEST, mask=there, other=float("-inf"))
        part_second = tl.load(record_ptrs + _SECOND, mask=there, other=float("-inf"))
        largest = tl.max(part_largest, axis=0)
        # The second of the row is the second of a part that has the largest, or the largest of another part.
        winner = tl.min(tl.where(part_largest == largest, part, MAX_PARTS), axis=0)
        second = tl.max(tl.where(part == winner, part_second, part_largest), axis=0)
        largest = tl.exp(tl.maximum(largest, _LOWEST) - maximum)
        tl.store(margin_ptr + row, (largest - tl.exp(tl.maximum(second, _LOWEST) - maximum)) / mass)
