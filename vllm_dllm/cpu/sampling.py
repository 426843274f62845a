"""Sampling kernels of Model Runner V2 on CPU tensors (``vllm/v1/worker/gpu/sample``).

Each function takes the place of the Triton kernel of the same purpose and carries its parameter names;
``*_stride`` and block sizes belong to the launch and are not needed here. What one request asks for is
applied to its rows alone, one row of the vocabulary at a time, so no [rows, vocab] temporary is made.

Shapes: ``logits`` [rows, vocab], changed in place; ``expanded_idx_mapping`` [rows] holds the slot of each
row; per-slot tensors are [max_num_reqs, ...].
"""

import functools
import itertools
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

_NEG_INF = float("-inf")
_DRAFT_NOISE_SALT = 1 << 30  # vllm/v1/worker/gpu/sample/gumbel.py
_SECOND_WORD = 0x9E3779B9  # hash domain of the upper half of a 64 bit draw, same file


def apply_temperature(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Divide each row by its temperature; 0 stands for greedy and changes nothing."""
    temperature = temperature_ptr[expanded_idx_mapping_ptr]
    logits_ptr.div_(temperature.masked_fill(temperature == 0, 1.0).unsqueeze(1))


def apply_min_p(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Remove the tokens whose probability is below ``min_p`` times that of the likeliest one."""
    log_min_p = min_p_ptr[expanded_idx_mapping_ptr].log()  # -inf, which removes nothing, where min_p is 0
    threshold = logits_ptr.amax(dim=-1).float() + log_min_p
    logits_ptr.masked_fill_(logits_ptr < threshold.unsqueeze(1), _NEG_INF)


def apply_penalties(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Apply repetition, frequency and presence penalties.

    A row counts the request's output and the drafts that precede the row. ``token_ids`` [rows] are the input
    tokens of the rows, ``prompt_bin_mask`` [max_num_reqs, ceil(vocab / 32)] has a bit per prompt token.
    """
    slots = expanded_idx_mapping_ptr.numpy()
    repetition = repetition_penalty_ptr.numpy()[slots]
    frequency = frequency_penalty_ptr.numpy()[slots]
    presence = presence_penalty_ptr.numpy()[slots]
    token_ids = token_ids_ptr.numpy()
    local_pos = expanded_local_pos_ptr.numpy()
    for row in np.flatnonzero((repetition != 1) | (frequency != 0) | (presence != 0)):
        counts = output_bin_counts_ptr.numpy()[slots[row]].copy()
        np.add.at(counts, token_ids[row - local_pos[row] + 1 : row + 1], 1)
        in_output = counts > 0
        logits = logits_ptr[row].float().numpy()
        if repetition[row] != 1:
            bits = np.unpackbits(prompt_bin_mask_ptr.numpy()[slots[row]].view(np.uint8), bitorder="little")
            seen = in_output | bits[:vocab_size].astype(bool)
            scale = np.where(seen, repetition[row], np.float32(1))
            logits *= np.where(logits > 0, 1 / scale, scale)
        logits -= frequency[row] * counts.astype(np.float32)
        logits -= presence[row] * in_output
        logits_ptr[row] = torch.from_numpy(logits)


def bincount(
    expanded_idx_mapping_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Mark the prompt tokens of new requests and count the output tokens that a resumed one brings along."""
    for slot in expanded_idx_mapping_ptr.numpy():
        token_ids = all_token_ids_ptr.numpy()[slot]
        prompt_len, prefill_len = prompt_len_ptr.numpy()[slot], prefill_len_ptr.numpy()[slot]
        mask = prompt_bin_mask_ptr.numpy()[slot]
        present = np.zeros(32 * mask.size, dtype=np.uint8)
        present[token_ids[:prompt_len]] = 1
        mask |= np.packbits(present, bitorder="little").view(np.int32)
        np.add.at(output_bin_counts_ptr.numpy()[slot], token_ids[prompt_len:prefill_len], 1)


def apply_logit_bias(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: torch.Tensor,
    bias_token_ids_ptr: torch.Tensor,
    bias_token_ids_stride: int,
    bias_ptr: torch.Tensor,
    bias_stride: int,
    pos_ptr: torch.Tensor,
    min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor,
    restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Keep the allowed tokens, add the biases, and remove the stop tokens below the minimum length.

    Where a grammar leaves nothing but stop tokens, they stay (``restore_when_all_masked``).
    """
    slots = expanded_idx_mapping_ptr.numpy()
    num_allowed = num_allowed_token_ids_ptr.numpy()[slots]
    num_bias = num_logit_bias_ptr.numpy()[slots]
    num_stop = num_stop_token_ids_ptr.numpy()[slots] * (pos_ptr.numpy() + 1 < min_lens_ptr.numpy()[slots])
    for row in np.flatnonzero((num_allowed > 0) | (num_bias > 0) | (num_stop > 0)):
        slot, logits = slots[row], logits_ptr[row]
        if num_allowed[row] > 0:
            allowed = allowed_token_ids_ptr[slot, : num_allowed[row]]
            kept = logits[allowed]
            logits.fill_(_NEG_INF)
            logits[allowed] = kept
        if num_bias[row] > 0:
            logits[bias_token_ids_ptr[slot, : num_bias[row]]] += bias_ptr[slot, : num_bias[row]]
        if num_stop[row] > 0:
            stop = stop_token_ids_ptr[slot, : num_stop[row]]
            stop_logits = logits[stop]
            logits[stop] = _NEG_INF
            if CHECK_ALL_MASKED_ROWS and restore_when_all_masked_ptr[slot] and logits.max() == _NEG_INF:
                logits[stop] = stop_logits.masked_fill(~stop_logits.isfinite(), _NEG_INF)


def apply_grammar_bitmask(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    logits_indices_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    bitmask_ptr: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Keep the tokens whose bit is set; ``bitmask`` int32 [masks, ceil(vocab / 32)].

    ``logits_indices`` [masks] holds request * MASK_STRIDE + row of the request; rows that it does not have, after
    its drafts were cut short, are passed over. ``cu_num_logits`` [num_reqs + 1] delimits the rows of each request.
    """
    bounds = cu_num_logits_ptr.tolist()
    for mask, place in zip(bitmask_ptr.numpy(), logits_indices_ptr.tolist(), strict=True):
        request, position = divmod(place, MASK_STRIDE)
        row = bounds[request] + position
        if row < bounds[request + 1]:
            bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little")
            logits_ptr[row].masked_fill_(torch.from_numpy(bits == 0), _NEG_INF)


def apply_bad_words(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: torch.Tensor,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
) -> None:
    """Remove the last token of each bad word whose other tokens end the output.

    A row's output is that of its request and the drafts that precede the row; ``input_ids`` [rows] are the
    input tokens of the rows.
    """
    slots = expanded_idx_mapping_ptr.numpy()
    local_pos = expanded_local_pos_ptr.numpy()
    input_ids = input_ids_ptr.numpy()
    num_bad_words = num_bad_words_ptr.numpy()[slots]
    for row in np.flatnonzero(num_bad_words > 0):
        slot = slots[row]
        offsets = bad_word_offsets_ptr.numpy()[slot, : num_bad_words[row] + 1]
        tokens = bad_word_token_ids_ptr.numpy()[slot, : offsets[-1]].tolist()
        words = [tokens[start:end] for start, end in itertools.pairwise(offsets)]
        output = all_token_ids_ptr.numpy()[slot, prompt_len_ptr.numpy()[slot] : total_len_ptr.numpy()[slot]]
        drafts = input_ids[row - local_pos[row] + 1 : row + 1]
        longest = max(map(len, words))
        tail = output[-longest:].tolist() + drafts.tolist()
        removed = [word[-1] for word in words if tail[len(tail) - len(word) + 1 :] == word[:-1]]
        if removed:
            logits_ptr[row, removed] = _NEG_INF


def topk_log_softmax(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Write the log-probabilities of the tokens ``topk_ids`` [rows, topk] into ``output`` [rows, topk]."""
    for logprobs, logits, token_ids in zip(output_ptr, logits_ptr, topk_ids_ptr, strict=True):
        row = logits.float()
        torch.sub(row[token_ids], row.logsumexp(dim=-1), out=logprobs)


def ranks(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    token_ids_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the rank of ``token_ids`` [rows] into ``output`` [rows]: 1 for the likeliest token of the row."""
    chosen = logits_ptr.gather(1, token_ids_ptr.long().unsqueeze(1))
    output_ptr.copy_((logits_ptr >= chosen).sum(dim=-1))


def fill_logprob_token_ids(
    out_token_ids_ptr: torch.Tensor,
    out_token_ids_stride: int,
    out_valid_mask_ptr: torch.Tensor,
    out_valid_mask_stride: int,
    sampled_token_ids_ptr: torch.Tensor,
    topk_indices_ptr: torch.Tensor,
    topk_indices_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """Fill [rows, 1 + columns]: the sampled token, then the request's own token ids, or else the top ones."""
    out_token_ids_ptr[:, 0] = sampled_token_ids_ptr
    out_valid_mask_ptr[:, 0] = True
    slots = expanded_idx_mapping_ptr.numpy()
    for row, own in enumerate(num_per_req_token_ids_ptr.numpy()[slots]):
        columns = slice(1, 1 + (own if own > 0 else NUM_TOPK))
        if own > 0:
            out_token_ids_ptr[row, columns] = per_req_token_ids_ptr[slots[row], :own]
        elif NUM_TOPK > 0:  # without, topk_indices is any tensor
            out_token_ids_ptr[row, columns] = topk_indices_ptr[row, :NUM_TOPK]
        out_valid_mask_ptr[row, columns] = True


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


def _hash_prefix(seed: Array, pos: Array, domain: int = 0) -> Array:
    """MurmurHash3 state after seed and position (int64 [n]), before the token, uint32 [n]."""
    hashed = np.full(len(seed), domain, dtype=np.uint32)
    for word in (seed, seed >> 32, pos):
        hashed = _mix(hashed, _scramble(word.astype(np.uint32)))
    return hashed


def _hash_tokens(prefix: Array, vocab_size: int) -> Array:
    """Finish the hash for every token of the vocabulary, uint32 [vocab_size]; ``prefix`` is [1]."""
    hashed = _mix(prefix, _scrambled_tokens(vocab_size))
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
    seeds, positions = np.array([seed], dtype=np.int64), np.array([pos], dtype=np.int64)
    low = _hash_tokens(_hash_prefix(seeds, positions), vocab_size)
    if use_fp64:
        high = _hash_tokens(_hash_prefix(seeds, positions, _SECOND_WORD), vocab_size)
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
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Sample each row by the Gumbel-max trick; temperature 0, and rows of negative slots, take the argmax.

    The kernel leaves one candidate per vocabulary block (``local_max``, ``local_argmax`` [rows, blocks]) and
    the caller picks the best; here the winner of the row is the only candidate, in the first column.
    ``logits_cache`` [max_num_reqs, columns, vocab] keeps the logits before temperature.
    """
    slots = expanded_idx_mapping_ptr.numpy()
    real = slots >= 0
    if logits_cache_ptr is not None:
        assert logits_cache_col_ptr is not None
        assert logits_cache_source_ptr is not None
        rows = torch.from_numpy(np.flatnonzero(real))
        column = logits_cache_col_ptr[rows] if PER_TOKEN_COL else logits_cache_col_ptr
        logits_cache_ptr[expanded_idx_mapping_ptr[rows], column, :vocab_size] = logits_cache_source_ptr[rows]

    best, token_ids = logits_ptr.max(dim=-1)
    local_max_ptr.fill_(_NEG_INF)
    local_max_ptr[:, 0] = best
    local_argmax_ptr[:, 0] = token_ids

    temperature = np.where(real, temp_ptr.numpy()[slots], 0)
    for row in np.flatnonzero(temperature):
        scores = logits_ptr[row].float().numpy()
        if APPLY_TEMPERATURE:
            scores = scores / temperature[row]
        pos = int(pos_ptr[row]) + (_DRAFT_NOISE_SALT if IS_DRAFTING else 0)
        scores = scores + gumbel_noise(int(seeds_ptr[slots[row]]), pos, vocab_size, USE_FP64)
        winner = int(scores.argmax())
        local_argmax_ptr[row, 0] = winner
        local_max_ptr[row, 0] = float(scores[winner])
