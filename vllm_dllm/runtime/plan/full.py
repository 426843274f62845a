"""The row plan of models with full attention: what every row of a step is.

===========  ================================================================  =======================================
request      groups                                                            sees K/V of
===========  ================================================================  =======================================
enters       its rows, one as a rule; nothing comes of them                    themselves
decodes      the text as it stands, all of it in a refresh; then the text of   the whole text; drafts see their own
             each draft, as far as ``Extent`` says that it is computed         scratch pages where theirs differs
is guided    the text as it stands; then its twin, as much of it: the prompt   the whole text; the whole twin, which
             masked, the rest the same                                         has pages behind those of the text
===========  ================================================================  =======================================

All rows of a group see each other. Scheduling is synchronous for these models, so the host knows where each request is,
and lays the rows out; which tokens stand in them only the device knows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.runtime.logits.guidance import Guidance
from vllm_dllm.runtime.plan.block import Branches, RowPlan
from vllm_dllm.runtime.plan.extent import Extent, Span
from vllm_dllm.runtime.plan.scratch import ScratchPages
from vllm_dllm.runtime.states import BlockState, Field


@dataclass(frozen=True)
class FullLayout:
    """What never changes while the engine lives."""

    extent: Extent
    page_size: int
    """K/V slots per page."""
    limit: int
    """No position is beyond: the end of the last block that may hold a token."""
    shifted: bool
    """The family's logits predict the next position."""
    mask_token_id: int
    scratch: ScratchPages | None


@dataclass(frozen=True)
class Places:
    """Where the D decoding requests of a step are, as the host knows it. Each [D]."""

    block_start: np.ndarray
    window_end: np.ndarray
    refresh: np.ndarray
    """bool: everything is computed in this step."""
    num_rows: np.ndarray
    prompt_length: np.ndarray
    cfg_scale: np.ndarray
    """float64; 0: the request has no twin."""
    twin_page: np.ndarray
    """Where the twin's pages begin in the request's row of the block table."""

    @property
    def guided(self) -> np.ndarray:
        """bool: the request has a twin."""
        return self.cfg_scale > 0

    @classmethod
    def of(
        cls,
        batch: InputBatch,
        num_decodes: int,
        extent: Extent,
        *,
        page_size: int,
        text_end: np.ndarray,
        prompt_length: np.ndarray,
        cfg_scale: np.ndarray,
    ) -> "Places":
        """The places of the first ``num_decodes`` requests, whose texts end at ``text_end``; each array [D]."""
        assert batch.num_draft_tokens_per_req is not None or not num_decodes
        computed = batch.num_computed_tokens_np[:num_decodes].astype(np.int64)
        num_rows = batch.num_scheduled_tokens[:num_decodes].astype(np.int64)
        drafts = 0 if batch.num_draft_tokens_per_req is None else batch.num_draft_tokens_per_req[:num_decodes]
        # Rows in front of vLLM's draft rows are those of the text that is known.
        block_start = computed + num_rows - drafts
        return cls(
            block_start=block_start,
            window_end=extent.window_end(block_start, text_end),
            refresh=computed == 0,
            num_rows=num_rows,
            prompt_length=prompt_length,
            cfg_scale=cfg_scale,
            twin_page=extent.twin_page(text_end, page_size),
        )


def plan_full_attention(
    batch: InputBatch,
    state: BlockState,
    layout: FullLayout,
    places: Places,
    *,
    slots: torch.Tensor,
    text: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> RowPlan:
    """Plan a step, and write ids, positions and K/V slots of its decoding rows into the batch's buffers.

    Args:
        batch: vLLM's batch, its first D requests decoding. Its ``input_ids`` and ``positions`` change.
        state: state of the decoding requests.
        slots: [D] int64: the worker's indices of those requests.
        text: [max_num_reqs, max_model_len] int32: prompt and emitted tokens of every index.
        block_table: [R, pages] int32: page ids of each request.
        slot_mapping: [rows] int64: K/V slot of each row; changes.
    """
    extent, length, device = layout.extent, layout.extent.block_length, slot_mapping.device
    num_decodes = len(places.block_start)
    groups = _groups(batch, places, extent, state.levels.shape[1])
    num_rows = int(groups.num_rows[: groups.num_decode_groups].sum())

    # Rows of decoding requests.
    decode_groups = slice(groups.num_decode_groups)
    group_of_row = np.repeat(np.arange(groups.num_decode_groups), groups.num_rows[decode_groups])
    offset = np.arange(num_rows) - groups.first_row[group_of_row]
    positions_np = np.minimum(groups.start[group_of_row] + offset, layout.limit - 1)
    requests_np = groups.request[group_of_row]
    branch_np = groups.branch[group_of_row]
    in_block_np = positions_np - places.block_start[requests_np]
    branch_start = extent.branch(places.block_start, places.window_end).start
    page_np = positions_np // layout.page_size
    page_of_branch_np = page_np - (branch_start // layout.page_size)[requests_np]
    is_twin_np = groups.twin[group_of_row]
    column_np = page_np + is_twin_np * places.twin_page[requests_np]
    hidden_np = is_twin_np & (positions_np < places.prompt_length[requests_np])
    rows = np.stack((requests_np, branch_np, positions_np, in_block_np, page_of_branch_np, column_np, hidden_np))
    requests, branch, positions, in_block, page_of_branch, column, hidden = async_tensor_h2d(
        rows.astype(np.int64), device=device
    ).unbind()
    is_real = branch >= 0

    blocks = state.branches.view(num_decodes, 1 + state.levels.shape[1], length)
    tokens = blocks[requests, branch.clamp(min=0), in_block.clamp(0, length - 1)]
    tokens = torch.where(in_block < length, tokens, layout.mask_token_id)
    known = text[slots[requests], positions.clamp(max=text.shape[1] - 1)].long()
    tokens = torch.where(in_block < 0, known, tokens)
    tokens = torch.where(hidden.bool(), layout.mask_token_id, tokens)
    page = block_table[requests, column.clamp(max=block_table.shape[1] - 1)].long()
    if layout.scratch is not None:
        own = layout.scratch.page(slots[requests], branch - 1, page_of_branch)
        page = torch.where(branch > 0, own, page)
    kv_slots = page * layout.page_size + positions % layout.page_size
    batch.input_ids[:num_rows] = tokens.int()
    batch.positions[:num_rows] = torch.where(is_real, positions, 0)
    slot_mapping[:num_rows] = torch.where(is_real, kv_slots, PAD_SLOT_ID)

    # Attention views.
    host = np.stack((groups.request, groups.branch, groups.end)).astype(np.int64)
    group_request, group_branch, seq_lens = async_tensor_h2d(host, device=device).unbind()
    table = block_table[group_request]
    columns = torch.arange(table.shape[1], device=device)
    if groups.twin.any():
        twin_page = np.zeros(len(groups.request), dtype=np.int64)
        twin_page[groups.twin] = places.twin_page[groups.request[groups.twin]]
        moved = columns + async_tensor_h2d(twin_page, device=device).unsqueeze(1)
        table = table.gather(1, moved.clamp(max=table.shape[1] - 1))
    if layout.scratch is not None and (groups.branch > 0).any():
        span = _pages_of(extent.branch(places.block_start, places.window_end), layout.page_size)
        bounds = np.zeros((2, batch.num_reqs), dtype=np.int64)
        bounds[:, :num_decodes] = span
        first, end = async_tensor_h2d(bounds[:, groups.request], device=device).unsqueeze(2).unbind()
        own = layout.scratch.page(
            slots[group_request.clamp(max=num_decodes - 1)].unsqueeze(1), group_branch.unsqueeze(1) - 1, columns - first
        )
        theirs = (group_branch.unsqueeze(1) > 0) & (columns >= first) & (columns < end)
        table = torch.where(theirs, own.int(), table)

    # Logits, those of twins last.
    of_branch = np.flatnonzero((groups.branch[decode_groups] >= 0) & ~groups.twin[decode_groups])
    of_twin = np.flatnonzero(groups.twin)
    logits_rows = _logits_rows(np.concatenate((of_branch, of_twin)), groups, places, layout, num_rows)
    refresh = async_tensor_h2d(places.refresh, device=device)
    first_masked = state.branches[:, 0] == layout.mask_token_id
    # Only a refresh computes the row before the block.
    first_only = refresh & first_masked if layout.shifted and extent.cache != "none" else torch.zeros_like(refresh)
    return RowPlan(
        num_decodes=num_decodes,
        num_groups=len(groups.request),
        max_query_len=int(groups.num_rows.max()),
        max_seq_len=int(groups.end.max()),
        query_start_loc=np.append(groups.first_row, groups.first_row[-1] + groups.num_rows[-1]).astype(np.int32),
        block_table=table,
        seq_lens=seq_lens.int(),
        commit_only=torch.zeros_like(refresh),
        first_only=first_only,
        state=state,
        branches=_branches(state, of_branch, groups, num_decodes, device=device),
        logits_rows=async_tensor_h2d(logits_rows, device=device),
        first_token_requests=np.empty(0, dtype=np.int64),
        guidance=_guidance(of_branch, of_twin, groups, places, length, device=device) if len(of_twin) else None,
    )


@dataclass(frozen=True)
class _Groups:
    """Groups of a step, those of decoding requests first. Each array [G]."""

    num_decode_groups: int
    request: np.ndarray
    branch: np.ndarray
    """0: the text as it stands; -1: padding, which writes nowhere."""
    twin: np.ndarray
    """bool: the text as it stands with its prompt masked."""
    first_row: np.ndarray
    num_rows: np.ndarray
    start: np.ndarray
    """Position of the first row."""
    end: np.ndarray
    """Length of the K/V that the group sees."""


def _groups(batch: InputBatch, places: Places, extent: Extent, max_drafts: int) -> _Groups:
    num_decodes = len(places.block_start)
    root = extent.root(places.block_start, places.window_end, places.refresh)
    branch = extent.branch(places.block_start, places.window_end)
    # vLLM's warm-up gives a request any number of rows, anywhere.
    guided = places.guided.astype(np.int64)
    root_rows = np.clip(root.length, 0, places.num_rows // (1 + guided))
    branch_rows = np.maximum(branch.length, 1)
    rest = places.num_rows - (1 + guided) * root_rows
    # A guided request has no drafts.
    num_drafts = np.minimum(rest // branch_rows, max_drafts) * (1 - guided)
    padding = rest - num_drafts * branch_rows

    count = 1 + guided + num_drafts + (padding > 0)
    request = np.repeat(np.arange(num_decodes), count)
    index = np.arange(len(request)) - np.repeat(np.cumsum(count) - count, count)
    twin = places.guided[request] & (index == 1)
    index = np.where(index > (guided + num_drafts)[request], -1, np.where(twin, 0, index))
    rows = np.where(index == 0, root_rows[request], np.where(index > 0, branch_rows[request], padding[request]))
    start = np.where(index == 0, root.start[request], np.where(index > 0, branch.start[request], 0))
    end = np.where(index >= 0, np.maximum(places.window_end[request], 1), 1)

    entering = np.arange(num_decodes, batch.num_reqs)
    entering_rows = batch.num_scheduled_tokens[entering]
    computed = batch.num_computed_tokens_np[entering]
    num_rows = np.concatenate((rows, entering_rows)).astype(np.int64)
    return _Groups(
        num_decode_groups=len(request),
        request=np.concatenate((request, entering)),
        branch=np.concatenate((index, np.zeros_like(entering))),
        twin=np.concatenate((twin, np.zeros(len(entering), dtype=bool))),
        first_row=np.cumsum(num_rows) - num_rows,
        num_rows=num_rows,
        start=np.concatenate((start, computed)),
        end=np.concatenate((end, computed + entering_rows)),
    )


def _pages_of(span: Span, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """First page that a span touches, and the one behind the last."""
    return span.start // page_size, -(-span.end // page_size)


def _logits_rows(of: np.ndarray, groups: _Groups, places: Places, layout: FullLayout, num_rows: int) -> np.ndarray:
    """[len(of) * L] int64: rows that predict the positions of the block in the groups ``of``."""
    block_row = places.block_start[groups.request[of]] - groups.start[of]
    # The row before predicts a position in shifted families. A step that does not compute the row before the block has
    # no need of it: the block's first position is unmasked by then.
    rows = np.maximum(block_row[:, None] + np.arange(layout.extent.block_length) - layout.shifted, 0)
    return np.minimum(groups.first_row[of][:, None] + rows, max(num_rows - 1, 0)).flatten()


def _branches(
    state: BlockState, of_branch: np.ndarray, groups: _Groups, num_decodes: int, *, device: torch.device
) -> Branches:
    """Where each branch finds its rows among the logits, which are those of the groups ``of_branch``."""
    requests_np, branch_np = groups.request[of_branch], groups.branch[of_branch]
    num_branches = int(branch_np.max(initial=0)) + 1
    place = np.zeros((num_decodes, num_branches), dtype=np.int64)
    place += np.flatnonzero(branch_np == 0)[:, None]
    place[requests_np, branch_np] = np.arange(len(of_branch))
    forwarded = np.zeros((num_decodes, num_branches), dtype=bool)
    forwarded[requests_np, branch_np] = True
    index = async_tensor_h2d(np.stack((requests_np, branch_np)).astype(np.int64), device=device)
    drafted = torch.arange(num_branches, device=device) <= state.fields[:, Field.NUM_DRAFTS].unsqueeze(1)
    return Branches(
        num_branches=num_branches,
        requests_np=requests_np,
        requests=index[0],
        branch=index[1],
        block=torch.zeros_like(index[0]),
        groups=async_tensor_h2d(place, device=device).unsqueeze(2),
        present=async_tensor_h2d(forwarded, device=device) & drafted,
    )


def _guidance(
    of_branch: np.ndarray, of_twin: np.ndarray, groups: _Groups, places: Places, length: int, *, device: torch.device
) -> Guidance:
    """Which logits rows have a twin; rows are those of the groups ``of_branch``, then those of ``of_twin``."""
    # A twin stands behind its text.
    rows = np.searchsorted(of_branch, of_twin - 1)[:, None] * length + np.arange(length)
    weight = np.repeat(places.cfg_scale[groups.request[of_twin]] + 1, length).astype(np.float32)
    return Guidance(
        async_tensor_h2d(rows.flatten().astype(np.int64), device=device),
        async_tensor_h2d(weight, device=device).unsqueeze(1),
    )
