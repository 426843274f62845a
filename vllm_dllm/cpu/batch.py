"""Bookkeeping of a step of Model Runner V2 in numpy, instead of its Triton kernels.

Each function does what the kernel or method of the same purpose does (``vllm/v1/worker/gpu``: ``input_batch.py``,
``block_table.py``, ``buffer_utils.py``), on numpy views of the same memory, and names its arguments like the kernel.
A batch on a CPU is small, so that the number of calls is what a step costs, and numpy's calls are the cheapest.

Shapes: ``idx_mapping`` [num_reqs] holds the slot of each request of the batch; arrays by slot are [max_num_reqs];
``query_start_loc`` and ``cu_num_logits`` [>= num_reqs + 1] delimit the rows of each request.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_dllm.cpu.launch import Array, LeftToTriton, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    num_lookahead: int,
    idx_mapping: Array,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_lens: Array,
    num_computed_tokens: Array,
) -> None:
    """Copy the scheduled prompt tokens of requests in prefill, and the ``num_lookahead`` tokens that follow them.

    Positions past the token table read its last column.
    """
    (batch,) = np.nonzero(num_computed_tokens[idx_mapping] < prefill_lens[idx_mapping])
    if not batch.size:
        return
    slots, bounds, token_ids = idx_mapping[batch], query_start_loc.numpy(), all_token_ids.numpy()
    starts, computed = bounds[batch], num_computed_tokens[slots]
    lengths = bounds[batch + 1] - starts
    last = token_ids.shape[1] - 1

    rows, offsets = spread(lengths)
    input_ids.numpy()[starts[rows] + offsets] = token_ids[slots[rows], np.minimum(computed[rows] + offsets, last)]
    ahead = computed + lengths + np.arange(num_lookahead)[:, None]  # [num_lookahead, prefills]
    next_prefill_tokens.numpy()[:, slots] = np.where(
        ahead < prefill_lens[slots], token_ids[slots, np.minimum(ahead, last)], 0
    )


def prepare_pos_seq_lens(
    pos: Array,
    seq_lens: Array,
    idx_mapping: Array,
    query_start_loc: Array,
    num_computed_tokens: Array,
    max_num_reqs: int,
) -> None:
    """Number the rows of each request from its computed tokens on; sequence lengths of unused rows are 0."""
    num_reqs = len(idx_mapping)
    starts = query_start_loc[: num_reqs + 1]
    lengths, computed = np.diff(starts), num_computed_tokens[idx_mapping]
    np.add(computed, lengths, out=seq_lens[:num_reqs])
    seq_lens[num_reqs:max_num_reqs] = 0
    pos[starts[0] : starts[-1]] = np.arange(starts[0], starts[-1]) + np.repeat(computed - starts[:-1], lengths)


def combine_sampled_and_draft_tokens(
    input_ids: Array,
    idx_mapping: Array,
    last_sampled_tokens: Array,
    query_start_loc: Array,
    seq_lens: Array,
    prefill_len: Array,
    draft_tokens: Array,
    cu_num_logits: Array,
    logits_indices: Array,
    num_new_sampled_tokens: int,
) -> None:
    """Write the last sampled token and the drafts of decoding requests, and the rows that need logits."""
    num_reqs = len(idx_mapping)
    bounds = cu_num_logits[: num_reqs + 1]
    num_logits = np.diff(bounds)
    query_end = query_start_loc[1 : num_reqs + 1]
    logits_start = query_end - num_logits
    logits_indices[bounds[0] : bounds[-1]] = np.arange(bounds[0], bounds[-1]) + np.repeat(
        logits_start - bounds[:-1], num_logits
    )

    seq_len, prompt = seq_lens[:num_reqs], prefill_len[idx_mapping]
    decodes = seq_len > prompt
    if num_new_sampled_tokens > 0:
        # A first logit that still lies in the prompt keeps its prompt token.
        (sampled,) = np.nonzero(decodes & (seq_len - num_logits >= prompt))
        input_ids[logits_start[sampled]] = last_sampled_tokens.reshape(-1)[idx_mapping[sampled]]

    num_drafts = np.where(decodes, num_logits - num_new_sampled_tokens, 0).clip(0)
    rows, offsets = spread(num_drafts)
    if rows.size:
        input_ids[(query_end - num_drafts)[rows] + offsets] = draft_tokens[idx_mapping[rows], offsets]


def expand_idx_mapping(
    idx_mapping: Array, expanded_idx_mapping: Array, expanded_local_pos: Array, cu_num_logits: Array
) -> None:
    """Give each logits row the slot of its request and its place inside the request."""
    bounds = cu_num_logits[: len(idx_mapping) + 1]
    rows, offsets = spread(np.diff(bounds))
    expanded_idx_mapping[bounds[0] : bounds[-1]] = idx_mapping[rows]
    expanded_local_pos[bounds[0] : bounds[-1]] = offsets


def get_num_sampled_and_rejected(
    num_sampled: Array,
    num_rejected: Array,
    seq_lens: Array,
    cu_num_logits: Array,
    idx_mapping: Array,
    prefill_len: Array,
) -> None:
    """Count sampled and rejected rows; a request in the middle of its prompt has none of either."""
    num_reqs = len(idx_mapping)
    finished = seq_lens[:num_reqs] >= prefill_len[idx_mapping]
    num_sampled[:num_reqs] *= finished
    num_rejected[:num_reqs] = (np.diff(cu_num_logits[: num_reqs + 1]) - num_sampled[:num_reqs]) * finished


def post_update(
    idx_mapping: Array,
    num_computed_tokens: Array,
    last_sampled_tokens: Array,
    output_bin_counts: Array | None,
    sampled_tokens: Array,
    num_sampled: Array,
    num_rejected: Array,
    query_start_loc: Array | None,
    all_token_ids: Array,
    total_len: Array,
    draft_tokens: Array | None = None,
    draft_tokens_out: Array | None = None,
) -> None:
    """Append the sampled tokens of each request and advance its counters; negative slots are skipped.

    Tokens past the token table (a diffusion block that crosses ``max_model_len``) are counted, not stored. From
    vLLM 0.33 on, drafts [num_reqs, drafts] that another pipeline rank has made are stored by slot.
    """
    (batch,) = np.nonzero(idx_mapping >= 0)
    slots, counts = idx_mapping[batch], num_sampled[batch]
    if draft_tokens is not None and draft_tokens_out is not None:
        draft_tokens_out[slots] = draft_tokens[batch]

    rows, offsets = spread(counts)
    if rows.size:
        row_slots = slots[rows]
        tokens = sampled_tokens[batch[rows], offsets]
        places = total_len[row_slots] + offsets
        inside = places < all_token_ids.shape[1]
        all_token_ids[row_slots[inside], places[inside]] = tokens[inside]
        if output_bin_counts is not None:
            np.add.at(output_bin_counts, (row_slots, tokens), 1)
        (emitting,) = np.nonzero(counts)
        last_sampled_tokens.reshape(-1)[slots[emitting]] = sampled_tokens[batch[emitting], counts[emitting] - 1]
        total_len[slots] += counts

    advance = -num_rejected[batch]
    if query_start_loc is not None:
        advance = advance + np.diff(query_start_loc[: len(idx_mapping) + 1])[batch]
    num_computed_tokens[slots] += advance


def gather_block_tables(
    self: "BlockTables",
    idx_mapping: Array,
    num_reqs_padded: int,
    out: tuple[torch.Tensor, ...] | None = None,
    num_computed_tokens: Array | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copy the block table rows of the batch, per KV cache group; rows of padding requests are zero.

    From vLLM 0.33 on, rows that a larger batch has left are zero, too, and so are pages that lie below what a
    sliding window of the request's first row can reach: they may belong to another request already.
    """
    num_reqs, num_rows = len(idx_mapping), num_reqs_padded
    if out is None:
        out = tuple(self.input_block_tables)
        num_rows = max(num_rows, getattr(self, "_num_dirty_rows", 0))
        self._num_dirty_rows = num_reqs
    reaches = [0] * len(out) if num_computed_tokens is None else self._sliding_window_reach
    num_blocks = np.where(idx_mapping >= 0, self.num_blocks.gpu.numpy()[:, idx_mapping], 0)  # [groups, num_reqs]
    for group, (counts, table, target) in enumerate(zip(num_blocks, self.block_tables, out, strict=True)):
        width = counts.max(initial=0)
        rows = target.numpy()
        blocks = table.gpu.numpy()[idx_mapping, :width]
        if num_computed_tokens is not None and reaches[group] > 0:
            below = np.maximum(num_computed_tokens[idx_mapping] - reaches[group], 0) // self.block_sizes[group]
            blocks[np.arange(width) < below[:, None]] = 0
        np.copyto(rows[:num_reqs, :width], blocks, where=np.arange(width) < counts[:, None])
        rows[num_reqs:num_rows] = 0
    return tuple(table[:num_reqs_padded] for table in out)


def compute_slot_mappings(
    self: "BlockTables",
    idx_mapping: Array,
    query_start_loc: Array,
    positions: Array,
    num_tokens_padded: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Map each row's position to its KV slot, per KV cache group.

    Rows of padding requests and everything after the last row get ``PAD_SLOT_ID``. A position past the block
    table gets a slot of the table's last page: the row is one that a diffusion model places elsewhere.
    """
    if self.cp_size != 1:
        raise LeftToTriton
    slot_mappings = self.slot_mappings if out is None else out
    starts = query_start_loc[: len(idx_mapping) + 1]
    row_slots = np.repeat(idx_mapping, np.diff(starts))
    row_positions = positions[starts[0] : starts[-1]]
    mappings = slot_mappings.numpy()
    mappings[:, starts[-1] :] = PAD_SLOT_ID
    for group, (table, block_size) in enumerate(zip(self.block_tables, self.block_sizes, strict=True)):
        mapping = mappings[group, starts[0] : starts[-1]]
        if not self._slot_mapping_enabled[group]:
            mapping[:] = PAD_SLOT_ID
            continue
        blocks, offsets = np.divmod(row_positions, block_size)
        block_ids = table.gpu.numpy()
        pages = block_ids[row_slots, np.minimum(blocks, block_ids.shape[1] - 1)]
        np.multiply(pages, block_size, out=mapping, dtype=np.int64)
        mapping += offsets
        mapping[row_slots < 0] = PAD_SLOT_ID
    return slot_mappings[:, :num_tokens_padded]


def apply_write(self: "StagedWriteTensor") -> None:
    """Write the staged rows, in the order in which they were staged."""
    if not self._staged_write_indices:
        return
    target, stride = self.gpu.numpy().reshape(-1), self.gpu.stride(0)
    contents = np.asarray(self._staged_write_contents, dtype=target.dtype)
    begin = 0
    staged = zip(self._staged_write_indices, self._staged_write_starts, self._staged_write_cu_lens, strict=True)
    for index, start, end in staged:
        place = index * stride + start
        target[place : place + end - begin] = contents[begin:end]
        begin = end
    self.clear_staged_writes()


def apply_fused(tensors: "Sequence[StagedWriteTensor]") -> None:
    """Write the staged rows of several tensors."""
    for tensor in tensors:
        apply_write(tensor)
