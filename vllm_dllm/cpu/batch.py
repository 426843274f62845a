"""Batch bookkeeping of Model Runner V2 on CPU tensors: what a step does before the forward and after it.

Each function computes what the Triton kernel or method of the same purpose computes (``vllm/v1/worker/gpu``:
``input_batch.py``, ``block_table.py``, ``buffer_utils.py``), on numpy views of the same memory. The batches
are small, so the cost is the number of calls, and numpy's are the cheapest. Functions that replace a
kernel carry its parameter names; ``*_stride`` and block sizes belong to the launch and are not needed here.

Shapes: ``idx_mapping`` [num_reqs] holds the slot of each request of the batch; per-slot tensors are
[max_num_reqs]; ``query_start_loc`` and ``cu_num_logits`` [>= num_reqs + 1] delimit the rows of each request.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.worker.gpu.buffer_utils import FusedStagedWriter, StagedWriteTensor
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

Array = np.ndarray[Any, Any]

_compute_slot_mappings_in_triton = BlockTables.compute_slot_mappings


def _spread(lengths: Array) -> tuple[Array, Array]:
    """Return (row, offset inside the row) of every item of rows of these ``lengths``, each [sum(lengths)]."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return rows, np.arange(len(rows)) - (np.cumsum(lengths) - lengths)[rows]


def prepare_prefill_inputs(
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the scheduled prompt tokens of requests in prefill, and the few that follow them.

    Positions past the token table read its last column.
    """
    slots = idx_mapping_ptr.numpy()
    computed = num_computed_tokens_ptr.numpy()[slots]
    prefill_len = prefill_lens_ptr.numpy()[slots]
    (batch,) = np.nonzero(computed < prefill_len)
    if not batch.size:
        return
    slots, computed, prefill_len = slots[batch], computed[batch], prefill_len[batch]
    starts = query_start_loc_ptr.numpy()[batch]
    lengths = query_start_loc_ptr.numpy()[batch + 1] - starts
    token_ids = all_token_ids_ptr.numpy()
    last = token_ids.shape[1] - 1

    rows, offsets = _spread(lengths)
    input_ids_ptr.numpy()[starts[rows] + offsets] = token_ids[slots[rows], np.minimum(computed[rows] + offsets, last)]
    ahead = computed + lengths + np.arange(num_lookahead)[:, None]  # [num_lookahead, prefills]
    next_prefill_tokens_ptr.numpy()[:, slots] = np.where(
        ahead < prefill_len, token_ids[slots, np.minimum(ahead, last)], 0
    )


def prepare_draft_prefill_inputs(
    input_buffers: "InputBuffers",
    input_batch: "InputBatch",
    last_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    expanded_input_ids: torch.Tensor,
    expanded_positions: torch.Tensor,
    last_token_indices: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
) -> int:
    """Write the rows of a drafter's first forward and return their number.

    A request has a row more than in the target's forward: its accepted rows, the token sampled after them, from
    which it drafts on (``last_token_indices``), and rejected rows, whose tokens do not matter.

    Args:
        input_buffers: the drafter's; gets ``query_start_loc`` and ``seq_lens``.
        input_batch: of the target.
        last_sampled: [max_num_reqs, 1]
        num_rejected: [num_reqs]
        expanded_input_ids: [rows + num_reqs or more]
        expanded_positions: [rows + num_reqs or more]
        last_token_indices: [max_num_reqs]
    """
    num_reqs = input_batch.num_reqs
    starts = input_batch.query_start_loc.numpy()[: num_reqs + 1]
    num_accepted = np.diff(starts) - num_rejected.numpy()[:num_reqs]
    expanded_starts = starts + np.arange(num_reqs + 1, dtype=starts.dtype)
    rows, offsets = _spread(np.diff(expanded_starts))
    written = slice(expanded_starts[0], expanded_starts[-1])

    last = expanded_starts[:-1] + num_accepted
    is_accepted = offsets < num_accepted[rows]
    token_ids = expanded_input_ids.numpy()
    token_ids[written] = 0
    token_ids[written][is_accepted] = input_batch.input_ids.numpy()[(starts[rows] + offsets)[is_accepted]]
    token_ids[last] = last_sampled.numpy().reshape(-1)[input_batch.idx_mapping.numpy()[:num_reqs]]
    first_positions = input_batch.positions.numpy()[starts[:-1]]
    expanded_positions.numpy()[written] = np.minimum(first_positions[rows] + offsets, max_model_len - 1)

    last_token_indices.numpy()[:num_reqs] = last
    last_token_indices.numpy()[num_reqs:max_num_reqs] = 0
    query_start_loc = input_buffers.query_start_loc.numpy()
    query_start_loc[: num_reqs + 1] = expanded_starts
    query_start_loc[num_reqs + 1 : max_num_reqs + 1] = expanded_starts[-1]
    seq_lens = input_buffers.seq_lens.numpy()
    seq_lens[:num_reqs] = np.minimum(input_batch.seq_lens.numpy()[:num_reqs] + 1, max_model_len)
    seq_lens[num_reqs:max_num_reqs] = 0
    return input_batch.num_tokens + num_reqs


def prepare_pos_seq_lens(
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Number the rows of each request from its computed tokens on; sequence lengths of unused rows are 0."""
    slots = idx_mapping_ptr.numpy()
    num_reqs = len(slots)
    starts = query_start_loc_ptr.numpy()[: num_reqs + 1]
    lengths = np.diff(starts)
    computed = num_computed_tokens_ptr.numpy()[slots]
    seq_lens = seq_lens_ptr.numpy()
    np.add(computed, lengths, out=seq_lens[:num_reqs])
    seq_lens[num_reqs:max_num_reqs] = 0
    first, end = starts[0], starts[-1]
    pos_ptr.numpy()[first:end] = np.arange(first, end) + np.repeat(computed - starts[:-1], lengths)


def combine_sampled_and_draft_tokens(
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write the last sampled token and the drafts of decoding requests, and the rows that need logits."""
    slots = idx_mapping_ptr.numpy()
    num_reqs = len(slots)
    cu_num_logits = cu_num_logits_ptr.numpy()[: num_reqs + 1]
    num_logits = np.diff(cu_num_logits)
    query_end = query_start_loc_ptr.numpy()[1 : num_reqs + 1]
    logits_start = query_end - num_logits
    first, end = cu_num_logits[0], cu_num_logits[-1]
    logits_indices_ptr.numpy()[first:end] = np.arange(first, end) + np.repeat(
        logits_start - cu_num_logits[:-1], num_logits
    )

    seq_len = seq_lens_ptr.numpy()[:num_reqs]
    prefill_len = prefill_len_ptr.numpy()[slots]
    input_ids = input_ids_ptr.numpy()
    decodes = seq_len > prefill_len
    if NUM_NEW_SAMPLED_TOKENS > 0:
        # A first logit that still lies in the prompt keeps its prompt token.
        (sampled,) = np.nonzero(decodes & (seq_len - num_logits >= prefill_len))
        input_ids[logits_start[sampled]] = last_sampled_tokens_ptr.numpy().reshape(-1)[slots[sampled]]

    num_drafts = np.where(decodes, num_logits - NUM_NEW_SAMPLED_TOKENS, 0).clip(0)
    rows, offsets = _spread(num_drafts)
    if rows.size:
        input_ids[(query_end - num_drafts)[rows] + offsets] = draft_tokens_ptr.numpy()[slots[rows], offsets]


def expand_idx_mapping(
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Give each logits row the slot of its request and its place inside the request."""
    slots = idx_mapping_ptr.numpy()
    cu_num_logits = cu_num_logits_ptr.numpy()[: len(slots) + 1]
    rows, offsets = _spread(np.diff(cu_num_logits))
    written = slice(cu_num_logits[0], cu_num_logits[-1])
    expanded_idx_mapping_ptr.numpy()[written] = slots[rows]
    expanded_local_pos_ptr.numpy()[written] = offsets


def get_num_sampled_and_rejected(
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
) -> None:
    """Count sampled and rejected rows; a request in the middle of its prompt has none of either."""
    slots = idx_mapping_ptr.numpy()
    num_reqs = len(slots)
    finished = seq_lens_ptr.numpy()[:num_reqs] >= prefill_len_ptr.numpy()[slots]
    num_sampled = num_sampled_ptr.numpy()
    num_sampled[:num_reqs] *= finished
    num_logits = np.diff(cu_num_logits_ptr.numpy()[: num_reqs + 1])
    num_rejected_ptr.numpy()[:num_reqs] = (num_logits - num_sampled[:num_reqs]) * finished


def post_update(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    num_warps: int = 1,
) -> None:
    """Append the sampled tokens of each request and advance its counters; negative slots are skipped.

    Tokens past the token table (a diffusion block that crosses ``max_model_len``) are counted, not stored.
    """
    slots = idx_mapping_ptr.numpy()
    num_reqs = len(slots)
    (batch,) = np.nonzero(slots >= 0)
    slots = slots[batch]
    num_sampled = num_sampled_ptr.numpy()[batch]
    sampled = sampled_tokens_ptr.numpy()
    total_len = total_len_ptr.numpy()

    rows, offsets = _spread(num_sampled)
    if rows.size:
        row_slots = slots[rows]
        tokens = sampled[batch[rows], offsets]
        places = total_len[row_slots] + offsets
        token_ids = all_token_ids_ptr.numpy()
        inside = places < token_ids.shape[1]
        token_ids[row_slots[inside], places[inside]] = tokens[inside]
        if output_bin_counts_ptr is not None:
            np.add.at(output_bin_counts_ptr.numpy(), (row_slots, tokens), 1)
        (emitting,) = np.nonzero(num_sampled)
        last_sampled_tokens_ptr.numpy().reshape(-1)[slots[emitting]] = sampled[
            batch[emitting], num_sampled[emitting] - 1
        ]
        total_len[slots] += num_sampled

    advance = -num_rejected_ptr.numpy()[batch]
    if query_start_loc_ptr is not None:
        advance = advance + np.diff(query_start_loc_ptr.numpy()[: num_reqs + 1])[batch]
    num_computed_tokens_ptr.numpy()[slots] += advance


def post_update_num_computed_tokens(
    idx_mapping_ptr: torch.Tensor, num_computed_tokens_ptr: torch.Tensor, query_start_loc_ptr: torch.Tensor
) -> None:
    """Count all scheduled rows as computed (pooling models)."""
    slots = idx_mapping_ptr.numpy()
    num_computed_tokens_ptr.numpy()[slots] += np.diff(query_start_loc_ptr.numpy()[: len(slots) + 1])


def gather_block_tables(
    self: BlockTables,
    idx_mapping: torch.Tensor,
    num_reqs_padded: int,
    out: tuple[torch.Tensor, ...] | None = None,
    out_ptrs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copy the block table rows of the batch, per KV cache group; rows of padding requests are zero."""
    if self.num_kv_cache_groups == 0:
        return ()
    if out is None:
        out = tuple(self.input_block_tables)
    slots = idx_mapping.numpy()
    num_reqs = len(slots)
    num_blocks = np.where(slots >= 0, self.num_blocks.gpu.numpy()[:, slots], 0)  # [groups, num_reqs]
    for group, (table, target) in enumerate(zip(self.block_tables, out, strict=True)):
        counts = num_blocks[group]
        width = counts.max(initial=0)
        rows = target.numpy()
        np.copyto(
            rows[:num_reqs, :width],
            table.gpu.numpy()[slots, :width],
            where=np.arange(width) < counts[:, None],
        )
        rows[num_reqs:num_reqs_padded] = 0
    return tuple(table[:num_reqs_padded] for table in out)


def compute_slot_mappings(
    self: BlockTables,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    num_tokens_padded: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Map each row's position to its KV slot, per KV cache group.

    Rows of padding requests and everything after the last row get ``PAD_SLOT_ID``. A position past the block
    table gets a slot of the table's last page: the row is one that a diffusion model places elsewhere.
    """
    if self.cp_size != 1:
        return _compute_slot_mappings_in_triton(self, idx_mapping, query_start_loc, positions, num_tokens_padded, out)
    slot_mappings = self.slot_mappings if out is None else out
    if self.num_kv_cache_groups == 0:
        return slot_mappings[:, :num_tokens_padded]
    slots = idx_mapping.numpy()
    starts = query_start_loc.numpy()[: len(slots) + 1]
    row_slots = np.repeat(slots, np.diff(starts))
    row_positions = positions.numpy()[starts[0] : starts[-1]]
    padding = row_slots < 0
    has_padding = padding.any()
    mappings = slot_mappings.numpy()
    mappings[:, starts[-1] :] = PAD_SLOT_ID
    for group, (table, block_size) in enumerate(zip(self.block_tables, self.block_sizes, strict=True)):
        mapping = mappings[group, starts[0] : starts[-1]]
        if not self._slot_mapping_enabled[group]:
            mapping[:] = PAD_SLOT_ID
            continue
        blocks, offsets = np.divmod(row_positions, block_size)
        block_ids = table.gpu.numpy()
        np.multiply(
            block_ids[row_slots, np.minimum(blocks, block_ids.shape[1] - 1)],
            block_size,
            out=mapping,
            dtype=np.int64,
        )
        mapping += offsets
        if has_padding:
            mapping[padding] = PAD_SLOT_ID
    return slot_mappings[:, :num_tokens_padded]


def apply_write(self: "StagedWriteTensor") -> None:
    """Write the staged rows, in the order in which they were staged."""
    if not self._staged_write_indices:
        return
    target = self.gpu.numpy().reshape(-1)
    stride = self.gpu.stride(0)
    contents = np.asarray(self._staged_write_contents, dtype=target.dtype)
    begin = 0
    for index, start, end in zip(
        self._staged_write_indices, self._staged_write_starts, self._staged_write_cu_lens, strict=True
    ):
        place = index * stride + start
        target[place : place + end - begin] = contents[begin:end]
        begin = end
    self.clear_staged_writes()


def apply_fused(
    self: "FusedStagedWriter",
    tensors: "Sequence[StagedWriteTensor]",
    output_ptrs: torch.Tensor,
    output_strides: torch.Tensor,
) -> None:
    """Write the staged rows of several tensors."""
    for tensor in tensors:
        apply_write(tensor)
