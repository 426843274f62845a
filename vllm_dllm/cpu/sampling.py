"""Sampling of Model Runner V2 in torch and numpy, instead of its Triton kernels (``vllm/v1/worker/gpu/sample``).

Each function does what the kernel of the same purpose does, and names its arguments like the kernel. What one request
asks for changes its own rows alone, one row of the vocabulary at a time, so that no [rows, vocab] temporary is made.

Shapes: ``logits`` [rows, vocab], changed in place; ``expanded_idx_mapping`` [rows] holds the slot of each row; arrays
by slot are [max_num_reqs, ...].
"""

import functools

import numpy as np
import torch

from vllm_dllm.cpu.launch import Array
from vllm_dllm.versions import draft_step_is_in_seed

NEG_INF = float("-inf")
_DRAFT_NOISE_SALT = 1 << 30  # vllm/v1/worker/gpu/sample/gumbel.py
_SECOND_WORD = 0x9E3779B9  # hash domain of the upper half of a 64 bit draw, same file


def apply_temperature(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor) -> None:
    """Divide each row by its temperature; 0 stands for greedy and changes nothing."""
    heat = temperature[expanded_idx_mapping]
    logits.div_(heat.masked_fill(heat == 0, 1.0).unsqueeze(1))


def apply_min_p(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, min_p: torch.Tensor) -> None:
    """Remove the tokens whose probability is below ``min_p`` times that of the likeliest one."""
    log_min_p = min_p[expanded_idx_mapping].log()  # -inf, which removes nothing, where min_p is 0
    threshold = logits.amax(dim=-1).float() + log_min_p
    logits.masked_fill_(logits < threshold.unsqueeze(1), NEG_INF)


def apply_penalties(
    logits: torch.Tensor,
    expanded_idx_mapping: Array,
    token_ids: Array,
    expanded_local_pos: Array,
    repetition_penalty: Array,
    frequency_penalty: Array,
    presence_penalty: Array,
    prompt_bin_mask: Array,
    output_bin_counts: Array,
    vocab_size: int,
) -> None:
    """Apply repetition, frequency and presence penalties.

    A row counts the request's output and the drafts that precede the row. ``token_ids`` [rows] are the input
    tokens of the rows, ``prompt_bin_mask`` int32 [max_num_reqs, ceil(vocab / 32)] has a bit per prompt token.
    """
    slots = expanded_idx_mapping
    repetition, frequency, presence = repetition_penalty[slots], frequency_penalty[slots], presence_penalty[slots]
    for row in np.flatnonzero((repetition != 1) | (frequency != 0) | (presence != 0)):
        counts = output_bin_counts[slots[row]].copy()
        drafts = token_ids[row - expanded_local_pos[row] + 1 : row + 1]
        np.add.at(counts, drafts[(drafts >= 0) & (drafts < vocab_size)], 1)
        in_output = counts > 0
        scores = logits[row].float().numpy()
        if repetition[row] != 1:
            in_prompt = _bits(prompt_bin_mask[slots[row]], vocab_size)
            scale = np.where(in_output | in_prompt, repetition[row], np.float32(1))
            scores *= np.where(scores > 0, 1 / scale, scale)
        scores -= frequency[row] * counts.astype(np.float32)
        scores -= presence[row] * in_output
        logits[row] = torch.from_numpy(scores)


def _bits(words: Array, count: int) -> Array:
    """The first ``count`` bits of int32 words, bool [count]."""
    return np.unpackbits(words.view(np.uint8), count=count, bitorder="little").astype(bool)


def apply_logit_bias(
    logits: torch.Tensor,
    expanded_idx_mapping: Array,
    num_allowed_token_ids: Array,
    allowed_token_ids: torch.Tensor,
    num_logit_bias: Array,
    bias_token_ids: torch.Tensor,
    bias: torch.Tensor,
    pos: Array,
    min_lens: Array,
    num_stop_token_ids: Array,
    restore_when_all_masked: Array,
    stop_token_ids: torch.Tensor,
    check_all_masked_rows: bool,
) -> None:
    """Keep the allowed tokens, add the biases, and remove the stop tokens below the minimum length.

    Where a grammar leaves nothing but stop tokens, they stay (``restore_when_all_masked``).
    """
    slots = expanded_idx_mapping
    num_allowed, num_bias = num_allowed_token_ids[slots], num_logit_bias[slots]
    num_stop = num_stop_token_ids[slots] * (pos + 1 < min_lens[slots])
    for row in np.flatnonzero((num_allowed > 0) | (num_bias > 0) | (num_stop > 0)):
        slot, scores = slots[row], logits[row]
        if num_allowed[row] > 0:
            allowed = allowed_token_ids[slot, : num_allowed[row]]
            kept = scores[allowed]
            scores.fill_(NEG_INF)
            scores[allowed] = kept
        if num_bias[row] > 0:
            scores[bias_token_ids[slot, : num_bias[row]]] += bias[slot, : num_bias[row]]
        if num_stop[row] > 0:
            stop = stop_token_ids[slot, : num_stop[row]]
            stop = stop[stop < len(scores)]  # a tokenizer may have more tokens than the model
            kept = scores[stop]
            scores[stop] = NEG_INF
            if check_all_masked_rows and restore_when_all_masked[slot] and scores.max() == NEG_INF:
                scores[stop] = kept.masked_fill(~kept.isfinite(), NEG_INF)


def apply_grammar_bitmask(
    logits: torch.Tensor,
    logits_indices: Array,
    cu_num_logits: Array,
    bitmask: Array,
    vocab_size: int,
    mask_stride: int,
) -> None:
    """Keep the tokens whose bit is set; ``bitmask`` int32 [masks, ceil(vocab / 32)].

    ``logits_indices`` [masks] holds request * mask_stride + row of the request; rows that it does not have, after
    its drafts were cut short, are passed over. ``cu_num_logits`` [num_reqs + 1] delimits the rows of each request.
    """
    requests, positions = np.divmod(logits_indices, mask_stride)
    rows = cu_num_logits[requests] + positions
    for mask in np.flatnonzero(rows < cu_num_logits[requests + 1]):
        logits[rows[mask]].masked_fill_(torch.from_numpy(~_bits(bitmask[mask], vocab_size)), NEG_INF)


def topk_log_softmax(output: torch.Tensor, logits: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Write the log-probabilities of the tokens ``topk_ids`` [rows, topk] into ``output`` [rows, topk]."""
    for logprobs, row, token_ids in zip(output, logits.unbind(), topk_ids, strict=True):
        scores = row.float()
        torch.sub(scores[token_ids], scores.logsumexp(dim=-1), out=logprobs)


def ranks(output: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Write the rank of ``token_ids`` [rows] into ``output`` [rows]: 1 for the likeliest token of the row."""
    output.copy_((logits >= logits.gather(1, token_ids.long().unsqueeze(1))).sum(dim=-1))


def _rotate_left(value: Array, shift: int) -> Array:
    return (value << shift) | (value >> (32 - shift))


def _scramble(key: Array) -> Array:
    """The part of a MurmurHash3 round that depends on the key alone, uint32."""
    return _rotate_left(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _mix(hashed: Array, scrambled_key: Array) -> Array:
    return _rotate_left(hashed ^ scrambled_key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


@functools.lru_cache(maxsize=4)
def _scrambled_tokens(vocab_size: int) -> Array:
    """``_scramble`` of every token id, uint32 [vocab_size]: the same for every draw."""
    return _scramble(np.arange(vocab_size, dtype=np.uint32))


def _hash(seed: int, pos: int, vocab_size: int, domain: int = 0) -> Array:
    """MurmurHash3 of (seed, position, token) for every token of the vocabulary, uint32 [vocab_size]."""
    hashed = np.array([domain], dtype=np.uint32)
    for word in np.array([[seed], [seed >> 32], [pos]], dtype=np.int64).astype(np.uint32):
        hashed = _mix(hashed, _scramble(word))
    hashed = _mix(hashed, _scrambled_tokens(vocab_size))
    hashed ^= np.uint32(16)
    hashed ^= hashed >> 16
    hashed *= np.uint32(0x85EBCA6B)
    hashed ^= hashed >> 13
    hashed *= np.uint32(0xC2B2AE35)
    hashed ^= hashed >> 16
    return hashed


def gumbel_noise(seed: int, pos: int, vocab_size: int, use_fp64: bool = False) -> Array:
    """Gumbel noise of one row, float32 (or float64) [vocab_size], keyed by (seed, position, token).

    The draw of vLLM (``murmur3_uniform32`` and ``murmur3_uniform64``, ``gumbel.py``) up to the rounding of
    the two logarithms, so a token gets the same noise wherever it is drawn.
    """
    low = _hash(seed, pos, vocab_size)
    if use_fp64:
        high = _hash(seed, pos, vocab_size, _SECOND_WORD)
        random53 = ((high.astype(np.uint64) << 32) | low) >> 11
        # Half a unit in, to stay off 0; the last midpoint rounds to 1 and has to be kept off that.
        uniform = np.minimum((random53 + 0.5) * 2.0**-53, 1 - 2.0**-53)
        return -np.log(-np.log(uniform))
    uniform = (low >> 16).astype(np.float32) * np.float32(2.0**-16)
    uniform += ((low & 0xFFFF).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    # The tail that wins the argmax is at 0, where float32 is finest; 1 itself has to be kept off.
    np.minimum(uniform, np.float32(1 - 2.0**-24), out=uniform)
    return -np.log(-np.log1p(-uniform))


def gumbel_sample(
    local_argmax: torch.Tensor,
    local_max: torch.Tensor,
    logits_cache: torch.Tensor | None,
    logits_cache_col: torch.Tensor | None,
    logits_cache_source: torch.Tensor | None,
    logits: torch.Tensor,
    expanded_idx_mapping: Array,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    temp: Array,
    vocab_size: int,
    is_drafting: bool,
    apply_temperature: bool,
    use_fp64: bool,
    per_token_col: bool,
) -> None:
    """Sample each row by the Gumbel-max trick; temperature 0, and rows of negative slots, take the argmax.

    The kernel leaves one candidate per vocabulary block (``local_max``, ``local_argmax`` [rows, blocks]) and
    the caller picks the best; here the winner of the row is the only candidate, in the first column.
    ``logits_cache`` [max_num_reqs, columns, vocab] keeps the logits before temperature.
    """
    slots = expanded_idx_mapping
    real = slots >= 0
    steps = None
    if logits_cache is not None:
        assert logits_cache_col is not None
        assert logits_cache_source is not None
        rows = torch.from_numpy(np.flatnonzero(real))
        column = logits_cache_col[rows] if per_token_col else logits_cache_col
        logits_cache[torch.from_numpy(slots)[rows], column, :vocab_size] = logits_cache_source[rows]
        if draft_step_is_in_seed():
            steps = logits_cache_col.expand(len(slots)).tolist()

    best, token_ids = logits.max(dim=-1)
    local_max.fill_(NEG_INF)
    local_max[:, 0] = best
    local_argmax[:, 0] = token_ids

    temperature = np.where(real, temp[slots], 0)
    for row in np.flatnonzero(temperature):
        scores = logits[row].float().numpy()
        if apply_temperature:
            scores = scores / temperature[row]
        place = int(pos[row]) + (_DRAFT_NOISE_SALT if is_drafting else 0)
        seed = int(seeds[slots[row]]) ^ (0 if steps is None else steps[row] << 32)
        scores = scores + gumbel_noise(seed, place, vocab_size, use_fp64)
        winner = int(scores.argmax())
        local_argmax[row, 0] = winner
        local_max[row, 0] = float(scores[winner])
