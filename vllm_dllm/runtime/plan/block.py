"""The row plan: what every row of a step is.

The scheduler decides how many rows each request gets. The plan decides token, position, K/V slot and attention view of
each. Attention views are *groups*: consecutive rows that see all K/V of their request up to a length, without a
causal mask between them. Each group is a request of its own to the attention backend.

In families with a causal context, the rows of a chunk of the prompt are one group and those of the finished block are
one, both with a causal mask; the backend is told of every group whether it has one. Their blocks begin anywhere, so a
block may lie on two pages.

===========  =============================================================  ==========================================
request      groups                                                         sees K/V up to
===========  =============================================================  ==========================================
prefill      one per diffusion block of the chunk                           end of that block
decode       L rows each, in this order: the finished block where its       end of its block; drafts see their own
             commit is due; the blocks of the window as it stands; those    scratch pages where the request's page of
             of each draft                                                  the window would be
===========  =============================================================  ==========================================

All K/V of a layer is written before its attention runs, so the current block sees the block committed beside it.
Which groups of a decoding request are real is known on the device only; the others are padding, which writes nowhere.
"""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.runtime.logits.guidance import Guidance
from vllm_dllm.runtime.plan.scratch import ScratchPages
from vllm_dllm.runtime.states import BlockState, Field


@dataclass(frozen=True)
class Branches:
    """Where the logits of a step's branches are: D requests, up to B branches each, w blocks in a window, N groups
    of L logits rows, one for each position of a block."""

    num_branches: int
    """B."""
    requests_np: np.ndarray
    """[N] request of every group."""
    requests: torch.Tensor
    """[N] int64: the same on the device."""
    branch: torch.Tensor
    """[N] int64: branch of every group. Groups that no branch needs say what they like."""
    block: torch.Tensor
    """[N] int64: block of the window."""
    groups: torch.Tensor
    """[D, B, w] int64: group of every branch's blocks; any for absent branches."""
    present: torch.Tensor
    """[D, B] bool."""


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
    block_table: torch.Tensor
    """[G, pages] int32: pages that every group sees."""
    max_seq_len: int
    """At least the longest of ``seq_lens``."""
    seq_lens: torch.Tensor
    """[G] int32: length of the K/V that every group sees."""
    commit_only: torch.Tensor
    """[D] bool: the request commits its finished block in this step and denoises nothing."""
    first_only: torch.Tensor
    """[D] bool: the step unmasks the first position of the block and nothing else (shifted families)."""
    state: BlockState
    """State of the decoding requests as of this step's forward."""
    branches: Branches
    logits_rows: torch.Tensor
    """[N * L + P + T] int64: rows whose logits are needed, those that predict the positions of branches first; P: see
    ``first_token_requests``, T: ``guidance``."""
    first_token_requests: np.ndarray
    """[P] batch indices of requests whose prefill yields the first token of their first block (shifted families)."""
    causal: bool | torch.Tensor = False
    """Whether rows of a group see only what is before them: of all groups, or of each ([G] int32)."""
    guidance: Guidance | None = None
    """What becomes of the logits before all else, where a request has a ``cfg_scale``."""


@dataclass(frozen=True)
class Layout:
    """What never changes while the engine lives."""

    block_length: int
    window_blocks: int
    """w."""
    page_size: int
    """K/V slots per page."""
    limit: int
    """Positions from here on are never written: the end of the last block that may hold a token."""
    shifted: bool
    """The family's logits predict the next position."""
    causal_context: bool
    """Prompt and finished blocks see only what is before them, and blocks begin at any position."""
    scratch: ScratchPages | None


def plan_rows(
    batch: InputBatch,
    state: BlockState,
    layout: Layout,
    *,
    num_decodes: int,
    drafting_np: np.ndarray,
    grid_start_np: np.ndarray,
    slots: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> RowPlan:
    """Plan a step, and write ids, positions and K/V slots of its decoding rows into the batch's buffers.

    Prefill rows are as vLLM laid them out; only their attention views are ours.

    Args:
        batch: vLLM's batch, its first ``num_decodes`` requests decoding. Its ``input_ids`` and ``positions`` change.
        state: state of the decoding requests.
        drafting_np: [D] bool: requests that may have drafts.
        grid_start_np: [R] int64: position that each request's blocks are counted from.
        slots: [D] int64: the worker's indices of those requests.
        block_table: [R, pages] int32: page ids of each request.
        slot_mapping: [rows] int64: K/V slot of each row; changes.
    """
    length, window_blocks, device = layout.block_length, layout.window_blocks, slot_mapping.device
    commit_due = state.fields[:, Field.COMMIT].bool()
    num_groups_np = batch.num_scheduled_tokens[:num_decodes] // length
    drafting_np = drafting_np & (num_groups_np > window_blocks)
    any_drafts = bool(drafting_np.any())
    # The steps of a lone decoding batch without drafts, nearly all of them: a request's block is its only group.
    plain = num_decodes == batch.num_reqs and window_blocks == 1 and bool((num_groups_np == 1).all())
    if plain:
        requests_np = None
        requests = torch.arange(num_decodes, device=device)
        index = torch.zeros_like(requests)
        commit_only = commit_due
    else:
        requests_np = np.repeat(np.arange(num_decodes), num_groups_np)
        index_np = np.arange(len(requests_np)) - np.repeat(np.cumsum(num_groups_np) - num_groups_np, num_groups_np)
        requests, index = async_tensor_h2d(np.stack((requests_np, index_np)).astype(np.int64), device=device).unbind()
        # Shifted families need the commit before they know the next block's first token, however many rows there are.
        alone = (num_groups_np == 1) | layout.shifted
        commit_only = commit_due & async_tensor_h2d(alone, device=device)

    # Which block of which branch each group is; before those, the finished block (-1).
    at = index - commit_due[requests].long()
    is_commit = at < 0
    branch = torch.div(at, window_blocks, rounding_mode="floor")
    block = torch.where(is_commit, -1, at % window_blocks)
    is_real = (branch <= state.fields[:, Field.NUM_DRAFTS][requests]) & (is_commit | ~commit_only[requests])
    blocks = torch.cat((state.finished, state.branches), dim=1).unflatten(1, (-1, length))
    tokens = blocks[requests, (at + 1).clamp(max=blocks.shape[1] - 1)]
    block_start = state.fields[:, Field.BLOCK_START][requests]
    start = block_start + block * length
    is_real &= start + length <= layout.limit

    # K/V slots: the request's own pages, or a draft's scratch pages. Where a page holds whole blocks, one look-up each.
    # Padding looks at the first positions, whose pages are there.
    offsets = torch.arange(length, device=device)
    positions = torch.where(is_real, start, 0).unsqueeze(1) + offsets
    page_index = (positions if layout.causal_context else positions[:, :1]) // layout.page_size
    page = block_table[requests.unsqueeze(1), page_index].long()
    scratch = layout.scratch
    is_draft = is_real & (branch > 0)
    first_page_index = block_start // layout.page_size
    if scratch is not None and any_drafts:
        own = scratch.page(
            slots[requests].unsqueeze(1), (branch - 1).unsqueeze(1), page_index - first_page_index.unsqueeze(1)
        )
        page = torch.where(is_draft.unsqueeze(1), own, page)
    kv_slots = page * layout.page_size + positions % layout.page_size
    kv_slots = torch.where(is_real.unsqueeze(1), kv_slots, PAD_SLOT_ID)
    num_rows = len(requests) * length
    batch.input_ids[:num_rows] = tokens.flatten().int()
    batch.positions[:num_rows] = positions.flatten()
    slot_mapping[:num_rows] = kv_slots.flatten()
    seq_lens = positions[:, -1] + 1

    # Attention views.
    causal: bool | torch.Tensor = False
    if layout.causal_context:
        # Without decoding rows there is nothing to tell apart, and a mask of all is the faster one.
        causal = is_commit.int() if num_decodes else True
    if plain:
        table = block_table
        query_start_loc = batch.query_start_loc_np[: num_decodes + 1]
        max_query_len = length
    else:
        assert requests_np is not None
        prefill = _prefill_groups(batch, num_decodes, None if layout.causal_context else length)
        if isinstance(causal, torch.Tensor):
            causal = torch.nn.functional.pad(causal, (0, len(prefill.request)), value=1)
        decode_start = np.arange(len(requests_np), dtype=np.int32) * length
        query_start_loc = np.concatenate((decode_start, prefill.query_start_loc))
        max_query_len = int(np.diff(query_start_loc).max())
        group_requests = async_tensor_h2d(np.concatenate((requests_np, prefill.request)), device=device)
        seq_lens = torch.cat((seq_lens, async_tensor_h2d(prefill.end, device=device)))
        table = block_table[group_requests]
        if scratch is not None and any_drafts:
            reach = torch.arange(scratch.pages_per_draft, device=device)
            own = scratch.page(slots[requests].unsqueeze(1), (branch - 1).unsqueeze(1), reach).int()
            columns = first_page_index.unsqueeze(1) + reach
            decodes = table[: len(requests)]
            own = torch.where(is_draft.unsqueeze(1), own, decodes.gather(1, columns))
            decodes.scatter_(1, columns, own)

    # Logits. Of a request without drafts one group is needed: its window, behind a commit or not.
    logits_groups, branches = _branches(
        state, commit_due & ~commit_only, num_groups_np, drafting_np, layout, device=device
    )
    # In shifted families the row before predicts a position. The first position of a block has its prediction from the
    # commit of the block before, whose last row stands where its own would.
    predicting = (offsets - 1) % length if layout.shifted else offsets
    logits_rows = (logits_groups.unsqueeze(1) * length + predicting).flatten()
    first_token_requests = np.empty(0, dtype=np.int64)
    if layout.shifted and num_decodes < batch.num_reqs:
        first_token_requests = _finished_prefills(batch, num_decodes, length, grid_start_np)
        if len(first_token_requests):
            last_rows = batch.query_start_loc_np[first_token_requests + 1].astype(np.int64) - 1
            logits_rows = torch.cat((logits_rows, async_tensor_h2d(last_rows, device=device)))

    return RowPlan(
        num_decodes=num_decodes,
        num_groups=len(query_start_loc) - 1,
        max_query_len=max_query_len,
        max_seq_len=int(batch.seq_lens_cpu_upper_bound.max()) + window_blocks * length,
        query_start_loc=query_start_loc,
        block_table=table,
        seq_lens=seq_lens.int(),
        commit_only=commit_only,
        first_only=commit_only & layout.shifted,
        state=state,
        branches=branches,
        logits_rows=logits_rows,
        first_token_requests=first_token_requests,
        causal=causal,
    )


def _branches(
    state: BlockState,
    fused: torch.Tensor,
    num_groups_np: np.ndarray,
    drafting_np: np.ndarray,
    layout: Layout,
    *,
    device: torch.device,
) -> tuple[torch.Tensor, Branches]:
    """Groups [N] of the step whose logits are needed, and where each branch finds its own among them.

    Args:
        fused: [D] bool: the request's first group is a commit, and its window follows.
    """
    num_decodes, width = len(num_groups_np), layout.window_blocks
    if num_decodes == 0 or (width == 1 and not drafting_np.any()):
        # One branch per request. Whether a commit stands before it is known on the device only.
        requests_np = np.arange(num_decodes)
        requests = torch.arange(num_decodes, device=device)
        first_group = requests
        if int(num_groups_np.sum()) != num_decodes:
            first_group = async_tensor_h2d(np.cumsum(num_groups_np) - num_groups_np, device=device)
        zeros = torch.zeros_like(requests)
        return first_group + fused.long(), Branches(
            num_branches=1,
            requests_np=requests_np,
            requests=requests,
            branch=zeros,
            block=zeros,
            groups=requests.view(-1, 1, 1),
            present=torch.ones(num_decodes, 1, dtype=torch.bool, device=device),
        )
    # A request without drafts needs the logits of its window alone; one with drafts those of all its groups.
    count_np = np.where(drafting_np, num_groups_np, width)
    first_np = np.cumsum(count_np) - count_np
    requests_np = np.repeat(np.arange(num_decodes), count_np)
    host = np.stack(
        (
            requests_np,
            np.arange(len(requests_np)) - first_np[requests_np],
            (np.cumsum(num_groups_np) - num_groups_np)[requests_np],
            drafting_np[requests_np],
        )
    ).astype(np.int64)
    requests, index, first_group, drafting = async_tensor_h2d(host, device=device).unbind()
    behind_commit = fused[requests].long()
    at = index - behind_commit * drafting
    num_branches = int(np.where(drafting_np, num_groups_np // width, 1).max())

    by_request = async_tensor_h2d(np.stack((first_np, count_np, drafting_np)).astype(np.int64), device=device)
    first, count, drafts = (values.view(-1, 1, 1) for values in by_request)
    branch = torch.arange(num_branches, device=device)
    blocks = torch.arange(width, device=device)
    place = fused.view(-1, 1, 1) * drafts + branch.view(-1, 1) * width + blocks
    forwarded = (place[:, :, -1] < count[:, :, 0]) & (branch <= state.fields[:, Field.NUM_DRAFTS].unsqueeze(1))
    return first_group + index + behind_commit * (1 - drafting), Branches(
        num_branches=num_branches,
        requests_np=requests_np,
        requests=requests,
        branch=torch.div(at, width, rounding_mode="floor").clamp(min=0),
        block=at % width,
        groups=first + place.clamp(max=count - 1),
        present=forwarded | (branch == 0),
    )


@dataclass(frozen=True)
class _PrefillGroups:
    """Host part of the plan for requests that prefill."""

    query_start_loc: np.ndarray  # [groups + 1] int32
    request: np.ndarray  # [groups] int64
    end: np.ndarray  # [groups] int32: K/V length


def _prefill_groups(batch: InputBatch, num_decodes: int, block_length: int | None) -> _PrefillGroups:
    """Groups of the prompts, one for each block of ``block_length``; ``None``: one for each request."""
    num_reqs = batch.num_reqs
    row_starts = batch.query_start_loc_np[num_decodes : num_reqs + 1].astype(np.int64)
    num_rows = row_starts[1:] - row_starts[:-1]
    starts = batch.num_computed_prefill_tokens_np[num_decodes:num_reqs].astype(np.int64)
    if block_length is None:
        end = (starts + num_rows).astype(np.int32)
        return _PrefillGroups(row_starts.astype(np.int32), np.arange(num_decodes, num_reqs), end)
    head = starts % block_length
    num_groups = -(-(head + num_rows) // block_length)
    request = np.repeat(np.arange(num_reqs - num_decodes), num_groups)
    index = np.arange(len(request)) - np.repeat(np.cumsum(num_groups) - num_groups, num_groups)
    offset = np.maximum(index * block_length - head[request], 0)
    query_start_loc = np.empty(len(request) + 1, dtype=np.int32)
    query_start_loc[:-1] = row_starts[request] + offset
    query_start_loc[-1] = row_starts[-1]
    block_end = (starts[request] // block_length + index + 1) * block_length
    end = np.minimum(block_end, starts[request] + num_rows[request])
    return _PrefillGroups(query_start_loc, request + num_decodes, end.astype(np.int32))


def _finished_prefills(batch: InputBatch, num_decodes: int, block_length: int, grid_start_np: np.ndarray) -> np.ndarray:
    """Batch indices of requests that finish their prefill in this step on the border of a block."""
    prefills = np.arange(num_decodes, batch.num_reqs)
    computed = batch.num_computed_prefill_tokens_np[prefills] + batch.num_scheduled_tokens[prefills]
    prefill_len = batch.prefill_len_np[prefills]
    # A dummy batch has no prefill length.
    on_border = (prefill_len - grid_start_np[prefills]) % block_length == 0
    done = (computed >= prefill_len) & (prefill_len > 0) & on_border
    return prefills[done]
