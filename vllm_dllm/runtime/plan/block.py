"""Groups of a step of models whose blocks do not see what is after them.

===========  ========================================================  ==============================================
request      groups, in this order                                     sees K/V up to
===========  ========================================================  ==============================================
prefill      one per diffusion block of the chunk                      end of the block
decode       L rows each: the finished block where its commit is due;  end of the block; drafts see their own scratch
             the blocks of the window; the blocks of each draft        pages in the place of the request's pages
===========  ========================================================  ==============================================

In families with a causal context a chunk of a prompt is one group, and the rows of a prompt or of a finished block see
only what is before them. Only the device knows which groups of a decoding request are real; the others are padding.
"""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_dllm.runtime.plan.arrays import iota, runs, to_device
from vllm_dllm.runtime.plan.rows import BlockState, Branches, Layout, RowPlan, Rows, Scheduled, Views, see_own_pages


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The groups of a step as the host knows them: N of the D decoding requests, then those of the prompts."""

    num_groups: np.ndarray  # [D] int64: of each decoding request
    drafting: np.ndarray  # [D] bool: the request may have drafts, and rows for them
    one_each: bool  # nearly all steps without drafts: every decoding request has one group, its block or the commit
    requests: np.ndarray  # [G] int64: batch index of each group's request
    index: np.ndarray  # [N] int64: place of each group among its request's
    prefill_end: np.ndarray  # [G - N] int64: K/V length that each group of a prompt sees
    query_start_loc: np.ndarray  # [G + 1] int32: first row of each group
    first_tokens: np.ndarray  # [P] int64: as RowPlan.first_token_requests


@dataclass(frozen=True)
class _Groups:
    """The groups of the decoding requests on the device, N of L rows each."""

    requests: torch.Tensor  # [N] int64
    branch: torch.Tensor  # [N] int64: 0: the window as it stands; above: a draft; negative: the finished block
    window_start: torch.Tensor  # [N] int64: position of the window of the group's request
    start: torch.Tensor  # [N] int64: position of the first row; 0 for padding
    tokens: torch.Tensor  # [N, L] int64
    is_padding: torch.Tensor  # [N] bool


def plan_blocks(
    scheduled: Scheduled,
    state: BlockState,
    layout: Layout,
    *,
    drafting: np.ndarray,
    grid_start: np.ndarray,
    slots: torch.Tensor,
    block_table: torch.Tensor,
) -> RowPlan:
    """Plan a step. Rows of prompts stay as vLLM laid them out; only what they see is planned here.

    Args:
        state: state of the D decoding requests.
        drafting: [D] bool: requests that may have drafts.
        grid_start: [R] int64: position that each request's blocks are counted from.
        slots: [D] int64: the worker's indices of the decoding requests.
        block_table: [R, pages] int32: page ids of each request.
    """
    length, device = layout.block_length, block_table.device
    table = _table(scheduled, layout, drafting, grid_start)
    commit_due = state.progress.commit.bool()
    sent: dict[str, torch.Tensor] = {}
    if not table.one_each or scheduled.num_decodes < len(scheduled.num_rows):
        sent = _send(table, scheduled, layout, device)
    if table.one_each:
        commit_only = commit_due
        fused = None
        groups = _one_group_each(state, layout, commit_due)
    else:
        # Shifted families need the commit before they know the next block's first token, however many rows there are.
        commit_only = commit_due & sent["alone"].bool()
        fused = commit_due & ~commit_only
        groups = _many_groups(state, layout, commit_only, sent["requests"][: len(table.index)], sent["index"])

    offsets = iota(length, device)
    rows = Rows(
        tokens=groups.tokens,
        positions=groups.start.unsqueeze(1) + offsets,
        is_padding=groups.is_padding.unsqueeze(1),
        one_page=not layout.causal_context,
    )
    branches, logits_runs = _branches(table, sent, state, fused, layout)
    # In shifted families the row before predicts a position. The first position of a block has its prediction from the
    # commit of the block before, whose last row stands where its own would.
    predicting = (offsets - 1) % length if layout.shifted else offsets
    logits_rows = torch.add(predicting, logits_runs.unsqueeze(1), alpha=length).flatten()
    if len(table.first_tokens):
        logits_rows = torch.cat((logits_rows, sent["first_token_rows"]))
    return RowPlan(
        num_decodes=scheduled.num_decodes,
        rows=rows,
        views=_views(table, sent, groups, scheduled, layout, slots=slots, block_table=block_table),
        state=state,
        commit_only=commit_only,
        first_only=commit_only if layout.shifted else torch.zeros_like(commit_only),
        branches=branches,
        logits_rows=logits_rows,
        first_token_requests=table.first_tokens,
    )


def _table(scheduled: Scheduled, layout: Layout, drafting: np.ndarray, grid_start: np.ndarray) -> _Table:
    """What the numbers of rows say of the groups."""
    length, width, num_decodes = layout.block_length, layout.window_blocks, scheduled.num_decodes
    num_groups = scheduled.num_rows[:num_decodes] // length
    decoding, index = runs(num_groups)

    # Prompts: a group ends where a block ends, or where the chunk does.
    start, num_rows = scheduled.computed[num_decodes:], scheduled.num_rows[num_decodes:]
    first_row, end = scheduled.query_start_loc[num_decodes:-1].astype(np.int64), start + num_rows
    prefilling = np.arange(len(start))
    if not layout.causal_context:
        first_block = start // length
        prefilling, block = runs(-(-end // length) - first_block)
        block_start = (first_block[prefilling] + block) * length
        first_row = first_row[prefilling] + np.maximum(block_start - start[prefilling], 0)
        end = np.minimum(block_start + length, end[prefilling])
    first_rows = (np.arange(len(decoding)) * length, first_row, scheduled.query_start_loc[-1:])
    return _Table(
        num_groups=num_groups,
        drafting=drafting & (num_groups > width),
        one_each=num_decodes == 0 or (width == 1 and bool((num_groups == 1).all())),
        requests=np.concatenate((decoding, prefilling + num_decodes)),
        index=index,
        prefill_end=end,
        query_start_loc=np.concatenate(first_rows).astype(np.int32),
        first_tokens=_finished_prefills(scheduled, layout, grid_start),
    )


def _finished_prefills(scheduled: Scheduled, layout: Layout, grid_start: np.ndarray) -> np.ndarray:
    """[P] int64: shifted families: requests that finish their prefill in this step on the border of a block."""
    if not layout.shifted:
        return np.empty(0, dtype=np.int64)
    length = scheduled.prefill_length
    done = (scheduled.computed + scheduled.num_rows >= length) & (length > 0)
    done &= (length - grid_start) % layout.block_length == 0
    done[: scheduled.num_decodes] = False
    return np.flatnonzero(done)


def _send(table: _Table, scheduled: Scheduled, layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    """The table on the device, and the table of runs of logits rows (see ``Branches``) where requests have several."""
    num_groups, width = table.num_groups, layout.window_blocks
    first_group = np.cumsum(num_groups) - num_groups
    arrays = {
        "requests": table.requests,
        "index": table.index,
        "alone": (num_groups == 1) | layout.shifted,
        "first_group": first_group,
        "prefill_end": table.prefill_end,
        "query_start_loc": table.query_start_loc,
        "first_token_rows": scheduled.query_start_loc[table.first_tokens + 1] - 1,
    }
    if not table.one_each and (width > 1 or table.drafting.any()):
        # A request without drafts needs the logits of its window alone; one with drafts those of all its groups.
        count = np.where(table.drafting, num_groups, width)
        request, index = runs(count)
        arrays |= {
            "run_request": request,
            "run_index": index,
            "run_first_group": first_group[request],
            "run_drafting": table.drafting[request],
            "count": count,
            "first_run": np.cumsum(count) - count,
            "drafting": table.drafting,
        }
    return to_device(device, **arrays)


def _one_group_each(state: BlockState, layout: Layout, commit_due: torch.Tensor) -> _Groups:
    """Every request has one group: the finished block where its commit is due, else the block."""
    length, device = layout.block_length, commit_due.device
    commit, window_start = state.progress.commit, state.progress.block_start
    start = torch.sub(window_start, commit, alpha=length)
    is_padding = start > layout.limit - length
    return _Groups(
        requests=iota(len(commit), device),
        branch=-commit,
        window_start=window_start,
        start=start.masked_fill_(is_padding, 0),
        tokens=torch.where(commit_due.unsqueeze(1), state.finished, state.branches[:, :length]),
        is_padding=is_padding,
    )


def _many_groups(
    state: BlockState, layout: Layout, commit_only: torch.Tensor, requests: torch.Tensor, index: torch.Tensor
) -> _Groups:
    """Requests have several groups, group ``index`` [N] of request ``requests`` [N]."""
    length, width = layout.block_length, layout.window_blocks
    progress = state.progress
    window_start = progress.block_start[requests]
    # Blocks of the request from its window on; -1: the finished block, which comes first where its commit is due.
    at = index - progress.commit[requests]
    branch = at if width == 1 else torch.div(at, width, rounding_mode="floor")
    last_branch = progress.num_drafts.masked_fill(commit_only, -1)
    block = torch.where(at < 0, at, at % width)
    start = torch.add(window_start, block, alpha=length)
    is_padding = (branch > last_branch[requests]) | (start > layout.limit - length)
    blocks = torch.cat((state.finished, state.branches), dim=1).unflatten(1, (-1, length))
    return _Groups(
        requests=requests,
        branch=branch,
        window_start=window_start,
        start=start.masked_fill_(is_padding, 0),
        tokens=blocks[requests, (at + 1).clamp(max=blocks.shape[1] - 1)],
        is_padding=is_padding,
    )


def _views(
    table: _Table,
    sent: dict[str, torch.Tensor],
    groups: _Groups,
    scheduled: Scheduled,
    layout: Layout,
    *,
    slots: torch.Tensor,
    block_table: torch.Tensor,
) -> Views:
    """What every group sees."""
    num_groups = len(groups.requests)
    seq_lens = groups.start + layout.block_length
    causal: bool | torch.Tensor = False
    if layout.causal_context:
        # Without decoding rows there is nothing to tell apart, and a mask of all is the faster one.
        causal = (groups.branch < 0).int() if num_groups else True
    query_start_loc_on_device = scheduled.query_start_loc_on_device
    if sent:
        query_start_loc_on_device = sent["query_start_loc"].int()
        seq_lens = torch.cat((seq_lens, sent["prefill_end"]))
        block_table = block_table[sent["requests"]]
        if isinstance(causal, torch.Tensor):
            causal = torch.nn.functional.pad(causal, (0, len(table.prefill_end)), value=1)
    if layout.scratch is not None and table.drafting.any():
        see_own_pages(
            block_table[:num_groups],
            layout.scratch,
            slots=slots[groups.requests],
            drafts=(groups.branch - 1).masked_fill_(groups.is_padding, -1),
            first_page=groups.window_start // layout.page_size,
        )
    return Views(
        query_start_loc=table.query_start_loc,
        query_start_loc_on_device=query_start_loc_on_device,
        block_tables=[block_table],
        seq_lens=seq_lens.int(),
        max_seq_len=scheduled.longest + layout.window_blocks * layout.block_length,
        causal=causal,
    )


def _branches(
    table: _Table,
    sent: dict[str, torch.Tensor],
    state: BlockState,
    fused: torch.Tensor | None,
    layout: Layout,
) -> tuple[Branches, torch.Tensor]:
    """Where each branch finds its logits, and the groups [N'] int64 whose logits are needed, in their order.

    Args:
        fused: [D] bool: the request's first group is a commit, and its window follows; ``None``: of no request.
    """
    num_decodes, width, device = len(table.num_groups), layout.window_blocks, state.branches.device
    if "run_request" not in sent:
        # One run of rows per request. Whether a commit stands before the block is known on the device only.
        requests = iota(num_decodes, device)
        zeros = torch.zeros_like(requests)
        branches = Branches(
            num_branches=1,
            requests_np=np.arange(num_decodes),
            requests=requests,
            branch=zeros,
            block=zeros,
            groups=requests.view(-1, 1, 1),
            present=torch.ones(num_decodes, 1, dtype=torch.bool, device=device),
        )
        return branches, requests if fused is None else sent["first_group"] + fused
    assert fused is not None
    requests, drafting = sent["run_request"], sent["drafting"]
    # Drafting requests have a run for the commit too, before those of the window.
    commit_run = fused * drafting
    at = sent["run_index"] - commit_run[requests]
    groups = torch.add(at, sent["run_first_group"]) + fused[requests]
    num_branches = int(np.where(table.drafting, table.num_groups // width, 1).max())
    first, count = sent["first_run"].view(-1, 1, 1), sent["count"].view(-1, 1, 1)
    place = commit_run.view(-1, 1, 1) + iota(num_branches * width, device).view(-1, width)
    branch = iota(num_branches, device)
    computed = (place[:, :, -1] < count[:, :, 0]) & (branch <= state.progress.num_drafts.unsqueeze(1))
    branches = Branches(
        num_branches=num_branches,
        requests_np=np.repeat(np.arange(num_decodes), np.where(table.drafting, table.num_groups, width)),
        requests=requests,
        branch=torch.div(at, width, rounding_mode="floor").clamp_(min=0),
        block=at % width,
        groups=first + torch.minimum(place, count - 1),
        present=computed | (branch == 0),
    )
    return branches, groups
