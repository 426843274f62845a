"""The row plan: what every row of a step is.

The scheduler decides how many rows each request gets. The plan decides token, position, K/V slot and attention view of
each. Attention views are *groups*: consecutive rows that see all K/V of their request up to a length, without a
causal mask between them. Each group is a request of its own to the attention backend.

======================  =============================================================  ====================
request                 groups                                                         sees K/V up to
======================  =============================================================  ====================
prefill                 one per diffusion block of the chunk                           end of that block
decode, ``2 * L`` rows  the finished block being committed, then the current block     end of each
decode, ``L`` rows      the current block; or, where a commit is due, that alone       end of it
======================  =============================================================  ====================

All K/V of a layer is written before its attention runs, so the current block sees the block committed beside it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.runtime.states import BlockState, Field


@dataclass(frozen=True)
class RowPlan:
    """Plan of one step with R requests, of which the first D decode, in G attention groups. L: block length."""

    num_decodes: int
    """D. vLLM orders a batch by rows: decodes come first."""
    num_groups: int
    """G."""
    max_query_len: int
    """Rows of the largest group."""
    query_start_loc: np.ndarray
    """[G + 1] int32, on the host: first row of every group."""
    group_requests: torch.Tensor | None
    """[G] int64: batch index of every group's request; None where groups and requests are the same."""
    seq_lens: torch.Tensor
    """[G] int32: length of the K/V that every group sees."""
    commit_only: torch.Tensor
    """[D] bool: the request commits its finished block in this step and denoises nothing."""
    state: BlockState
    """State of the decoding requests as of this step's start."""
    logits_rows: torch.Tensor
    """[D * L + P] int64: rows whose logits are needed, current blocks first; P: see ``first_token_requests``."""
    first_token_requests: np.ndarray
    """[P] batch indices of requests whose prefill yields the first token of their first block (shifted families)."""


@dataclass(frozen=True)
class _Groups:
    """Host part of the plan. Arrays over G groups but for ``fused`` [D]."""

    query_start_loc: np.ndarray  # [G + 1] int32
    request: np.ndarray  # int64
    prefill_end: np.ndarray  # int32: K/V length of a prefill group, 0 for a decode group
    commits: np.ndarray  # bool: the group is the finished block of a request with 2 * L rows
    fused: np.ndarray  # [D] bool: the request has 2 * L rows


def _groups(batch: InputBatch, num_decodes: int, block_length: int) -> _Groups:
    num_reqs = batch.num_reqs
    row_starts = batch.query_start_loc_np[: num_reqs + 1].astype(np.int64)
    num_rows = row_starts[1:] - row_starts[:-1]
    # Only a prefill can start inside a block: a decoding request's rows are laid out by its blocks.
    starts = batch.num_computed_prefill_tokens_np[:num_reqs].astype(np.int64)
    starts[:num_decodes] = 0
    head = starts % block_length
    num_groups = -(-(head + num_rows) // block_length)
    fused = num_groups > 1
    fused[num_decodes:] = False

    request = np.repeat(np.arange(num_reqs), num_groups)
    index = np.arange(len(request)) - np.repeat(np.cumsum(num_groups) - num_groups, num_groups)
    offset = np.maximum(index * block_length - head[request], 0)
    query_start_loc = np.empty(len(request) + 1, dtype=np.int32)
    query_start_loc[:-1] = row_starts[request] + offset
    query_start_loc[-1] = row_starts[-1]

    block_end = (starts[request] // block_length + index + 1) * block_length
    prefill_end = np.minimum(block_end, starts[request] + num_rows[request])
    prefill_end[request < num_decodes] = 0
    return _Groups(
        query_start_loc=query_start_loc,
        request=request,
        prefill_end=prefill_end.astype(np.int32),
        commits=fused[request] & (index == 0),
        fused=fused[:num_decodes],
    )


def plan_rows(
    batch: InputBatch,
    state: BlockState,
    *,
    num_decodes: int,
    block_length: int,
    shifted: bool,
    page_size: int,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> RowPlan:
    """Plan a step, and write ids, positions and K/V slots of its decoding rows into the batch's buffers.

    Prefill rows are as vLLM laid them out; only their attention views are ours.

    Args:
        batch: vLLM's batch, its first ``num_decodes`` requests decoding. Its ``input_ids`` and ``positions`` change.
        state: state of the decoding requests.
        shifted: the family's logits predict the next position.
        page_size: K/V slots per page.
        block_table: [R, pages] int32: page ids of each request.
        slot_mapping: [rows] int64: K/V slot of each row; changes.
    """
    length, device = block_length, slot_mapping.device
    offsets = torch.arange(length, device=device)
    block_start = state.fields[:, Field.BLOCK_START]
    commit_due = state.fields[:, Field.COMMIT].bool()
    num_rows = batch.num_scheduled_tokens
    # The steps of a lone decoding batch, nearly all of them: a request's block is its only group.
    plain = num_decodes == batch.num_reqs and bool((num_rows == length).all())
    if plain:
        query_start_loc = batch.query_start_loc_np[: num_decodes + 1]
        max_query_len = length
        groups, any_fused = None, False
    else:
        groups = _groups(batch, num_decodes, length)
        query_start_loc = groups.query_start_loc
        max_query_len = int(np.diff(query_start_loc).max())
        any_fused = bool(groups.fused.any())
    if groups is not None and any_fused:
        commit_only = commit_due & ~async_tensor_h2d(groups.fused, device=device)
    else:
        commit_only = commit_due

    # The current block is the last L rows of a request.
    start = block_start - commit_only * length
    tokens = torch.where(commit_only.unsqueeze(1), state.finished, state.tokens)
    if plain:
        rows = torch.arange(num_decodes * length, device=device).view(-1, length)
    else:
        rows = (batch.query_start_loc[1 : num_decodes + 1] - length).long().unsqueeze(1) + offsets
    positions = start.unsqueeze(1) + offsets
    slots = _slots(positions, block_table[:num_decodes], page_size)
    _write_rows(batch, slot_mapping, rows, tokens, positions, slots)
    seq_lens = start + length

    group_requests = None
    if groups is not None:
        if any_fused:
            # Rows of a commit that is not due are padding: they write nowhere, and any readable K/V will do for them.
            fused = async_tensor_h2d(np.flatnonzero(groups.fused), device=device)
            due = commit_due[fused].unsqueeze(1)
            positions = ((block_start[fused] - length).unsqueeze(1) + offsets).clamp(min=0)
            slots = torch.where(due, _slots(positions, block_table[fused], page_size), PAD_SLOT_ID)
            _write_rows(batch, slot_mapping, rows[fused] - length, state.finished[fused], positions, slots)
            seq_lens = torch.stack((seq_lens, torch.where(commit_due, block_start, length)))
        group_requests = async_tensor_h2d(groups.request, device=device)
        prefill_end = async_tensor_h2d(groups.prefill_end, device=device)
        if num_decodes:
            decode_request = group_requests.clamp(max=num_decodes - 1)
            if any_fused:
                commits = async_tensor_h2d(groups.commits.astype(np.int64), device=device)
                seq_lens = seq_lens[commits, decode_request]
            else:
                seq_lens = seq_lens[decode_request]
            seq_lens = torch.where(prefill_end > 0, prefill_end, seq_lens)
        else:
            seq_lens = prefill_end

    logits_rows = rows.flatten()
    first_token_requests = np.empty(0, dtype=np.int64)
    if shifted and num_decodes < batch.num_reqs:
        first_token_requests = _finished_prefills(batch, num_decodes, length)
        if len(first_token_requests):
            last_rows = batch.query_start_loc_np[first_token_requests + 1].astype(np.int64) - 1
            logits_rows = torch.cat((logits_rows, async_tensor_h2d(last_rows, device=device)))

    return RowPlan(
        num_decodes=num_decodes,
        num_groups=len(query_start_loc) - 1,
        max_query_len=max_query_len,
        query_start_loc=query_start_loc,
        group_requests=group_requests,
        seq_lens=seq_lens.int(),
        commit_only=commit_only,
        state=state,
        logits_rows=logits_rows,
        first_token_requests=first_token_requests,
    )


def _slots(positions: torch.Tensor, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """K/V slots of the blocks at ``positions`` [N, L]."""
    # A page holds whole blocks, so one look-up serves a block.
    page = block_table.gather(1, positions[:, :1] // page_size)
    return page.long() * page_size + positions % page_size


def _write_rows(
    batch: InputBatch,
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Say of rows [N, L] which token, position and K/V slot each is."""
    batch.input_ids[rows] = tokens.int()
    batch.positions[rows] = positions
    slot_mapping[rows] = slots


def _finished_prefills(batch: InputBatch, num_decodes: int, block_length: int) -> np.ndarray:
    """Batch indices of requests that finish their prefill in this step on the border of a block."""
    prefills = np.arange(num_decodes, batch.num_reqs)
    computed = batch.num_computed_prefill_tokens_np[prefills] + batch.num_scheduled_tokens[prefills]
    prefill_len = batch.prefill_len_np[prefills]
    # A dummy batch has no prefill length.
    done = (computed >= prefill_len) & (prefill_len > 0) & (prefill_len % block_length == 0)
    return prefills[done]
