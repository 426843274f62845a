"""Groups of a step of models whose blocks do not see what is after them.

===========  ========================================================  ==============================================
request      groups, in this order                                     sees K/V up to
===========  ========================================================  ==============================================
prefill      one per diffusion block of the chunk                      end of the block
decode       L rows each: the finished block where its commit is due;  end of the block; drafts see their own scratch
             the blocks of the window; the blocks of each draft        pages in the place of the request's pages
===========  ========================================================  ==============================================

Drafts of S2D2 see only what is before them, and so do prompts and finished blocks of an engine with ``causal_cache``,
and with ``causal_drafts`` the rows before the first mask of a block that S2D2 drafts (`causal_prefix`).
In families with a causal context a chunk of a prompt is one group, and the rows of a prompt or of a finished block see
only what is before them; so do all rows in families with causal blocks. Only the device knows which groups of a
decoding request are real; the others are padding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_dllm.decoding.records import Progress, dense
from vllm_dllm.decoding.verifiers import Verifier
from vllm_dllm.runtime.plan.arrays import iota
from vllm_dllm.runtime.plan.causal_prefix import causal_rows, in_two_views, starts_of_two_views
from vllm_dllm.runtime.plan.rows import (
    BlockState,
    Buffers,
    DeviceBranches,
    DeviceViews,
    Layout,
    RowPlan,
    Rows,
    Scheduled,
    Sight,
    Views,
    see_own_pages,
)
from vllm_dllm.runtime.plan.scratch import Copies
from vllm_dllm.runtime.plan.table import Form, Step


@dataclass(frozen=True)
class _Groups:
    """The groups of the decoding requests on the device, N of L rows each."""

    requests: torch.Tensor  # [N] int64
    branch: torch.Tensor  # [N] int64: 0: the window as it stands; above: a draft; negative: the finished block
    window_start: torch.Tensor  # [N] int64: position of the window of the group's request
    start: torch.Tensor  # [N] int64: position of the first row; 0 for padding
    tokens: torch.Tensor  # [N, L] int64
    is_padding: torch.Tensor  # [N] bool


@dataclass(frozen=True)
class LaidOut:
    """What the device knows of a step's groups; see ``RowPlan``, whose fields these are."""

    views: DeviceViews
    in_two_views: bool
    """Each group of a decoding request has two views (`causal_prefix`)."""
    sight: Sight
    branches: DeviceBranches
    logits_rows: torch.Tensor


def lay_out_step(
    gather: Callable[[torch.Tensor], BlockState],
    layout: Layout,
    form: Form,
    sent: dict[str, torch.Tensor],
    branches: torch.Tensor,
    slots: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_drafts: torch.Tensor | None,
    buffers: Buffers,
    verifier: torch.Tensor | None,
) -> tuple[LaidOut, Copies | None]:
    """The device's part of a plan, a stage of ``runtime.compiled``.

    Args:
        gather: where the D decoding requests in ``slots`` stand.
        form, sent, branches: of ``Step``.
        slots: [D] int64: the worker's indices of the decoding requests.
        block_table: [R, pages] int32: page ids of each request.
        query_start_loc: [R + 1] int32: first row of each request.
        max_drafts: [D] int64: drafts that each request may have; None: none shares a page with the text.
        buffers: for the decoding requests' rows; change. Rows of prompts stay as vLLM laid them out.
        verifier: [D] int64: values of ``Verifier``; None: neither LinearSpec nor S2D2 has rows of its own kind.

    Returns:
        What ``plan_of`` takes, and pages to copy before the forward.
    """
    state, length = gather(slots), layout.block_length
    pages = None if max_drafts is None else _pages_to_copy(state.progress, layout, max_drafts, slots, block_table)
    commit_only, fused = state.progress.commit.bool(), None
    if form.one_each:
        groups = _one_group_each(state, layout, commit_only)
    else:
        # A commit that predicts comes before the next block's first token is known, however many rows there are.
        alone = sent["alone"].bool()
        commit_only, fused = commit_only & alone, commit_only & ~alone
        groups = _many_groups(state, layout, commit_only, sent["decoding"], sent["index"])

    adapted = verifies = before_mask = None
    if verifier is not None:
        of_group = verifier[groups.requests]
        adapted = ((of_group == int(Verifier.LINEAR_SPEC)) & (groups.branch >= 0)).unsqueeze(1)
        verifies = (of_group == int(Verifier.S2D2)) & (groups.branch > 0)
        if layout.causal_blocks:
            adapted = groups.tokens == layout.mask_token_id
        if layout.causal_drafts:
            drafts = (of_group == int(Verifier.S2D2)) & (groups.branch == 0)
            before_mask = causal_rows(groups.tokens, drafts, layout.mask_token_id)
    views = _views(form, sent, groups, layout, verifies, slots, block_table, query_start_loc)
    rows = Rows(
        tokens=groups.tokens,
        positions=groups.start.unsqueeze(1) + iota(length, slots.device),
        is_padding=groups.is_padding.unsqueeze(1),
        adapted=adapted,
        one_page=not layout.causal_context,
    )
    rows.write(buffers, views.block_table, layout.page_size)
    of_branches, groups_of_runs, runs, present = _branches(sent, branches, state, fused, layout)
    first_only = commit_only if layout.commit_predicts else torch.zeros_like(commit_only)
    laid_out = LaidOut(
        views=views if before_mask is None else in_two_views(views, before_mask, length),
        in_two_views=before_mask is not None,
        sight=Sight(state.packed, dense(commit_only), dense(first_only), present, runs, slots),
        branches=of_branches,
        logits_rows=_logits_rows(form, sent, layout, commit_only, of_branches.requests, groups_of_runs),
    )
    return laid_out, pages


def _pages_to_copy(
    progress: Progress, layout: Layout, max_drafts: torch.Tensor, slots: torch.Tensor, block_table: torch.Tensor
) -> Copies:
    """What stands before the blocks, for the scratch pages of their drafts; arguments as for ``lay_out_step``."""
    assert layout.scratch is not None
    start = progress.block_start
    # The block before is committed in the forward before the first drafts. Only the first page is shared.
    return layout.scratch.copies_before_drafts(
        progress,
        progress.commit == 0,
        max_drafts=max_drafts,
        slots=slots,
        start=start,
        end=(start // layout.page_size + 1) * layout.page_size,
        block_table=block_table.narrow(0, 0, len(slots)),
    )


def _logits_rows(
    form: Form,
    sent: dict[str, torch.Tensor],
    layout: Layout,
    commit_only: torch.Tensor,
    requests: torch.Tensor,
    groups: torch.Tensor,
) -> torch.Tensor:
    """[N * L + P] int64: rows whose logits are needed, those of N runs first.

    In shifted families the row before predicts a position, and so it is in a commit that predicts: the last row of the
    finished block stands where that of the next block's first position would.

    Args:
        commit_only: [D] bool.
        requests, groups: [N] int64: request and group of every run.
    """
    offsets = iota(layout.block_length, groups.device)
    if layout.shifted or layout.commit_predicts:
        before = (offsets - 1) % layout.block_length
        offsets = before if layout.shifted else torch.where(commit_only[requests].unsqueeze(1), before, offsets)
    rows = torch.add(offsets, groups.unsqueeze(1), alpha=layout.block_length).flatten()
    return torch.cat((rows, sent["first_token_rows"])) if form.first_tokens else rows


def plan_of(scheduled: Scheduled, layout: Layout, step: Step, laid_out: LaidOut) -> RowPlan:
    """The plan that the host's part ``step`` and the device's part ``laid_out`` make."""
    table, views = step.table, laid_out.views
    query_start_loc = table.query_start_loc
    if laid_out.in_two_views:
        query_start_loc = starts_of_two_views(query_start_loc, len(table.index))
    return RowPlan(
        num_decodes=scheduled.num_decodes,
        views=Views(
            query_start_loc=query_start_loc,
            query_start_loc_on_device=views.query_start_loc,
            block_tables=[views.block_table],
            seq_lens=views.seq_lens,
            max_seq_len=scheduled.longest + layout.window_blocks * layout.block_length,
            causal=views.causal,
        ),
        sight=laid_out.sight,
        branches=laid_out.branches,
        run_requests_np=table.run_requests,
        logits_rows=laid_out.logits_rows,
        first_token_requests=table.first_tokens,
    )


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
    form: Form,
    sent: dict[str, torch.Tensor],
    groups: _Groups,
    layout: Layout,
    verifies: torch.Tensor | None,
    slots: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> DeviceViews:
    """What all groups see.

    Args:
        verifies: [N] bool: groups that verify drafts of S2D2; None: there are none.
    """
    num_groups = len(groups.requests)
    seq_lens = groups.start + layout.block_length
    causal: bool | torch.Tensor = layout.causal_blocks
    is_causal_before = layout.causal_context or layout.causal_cache
    if is_causal_before and not layout.causal_blocks:
        # Flags where all are causal, too. FlashAttention 4 compiles one kernel for `True` and for flags, which serves
        # the kind that came first alone.
        causal = (groups.branch < 0).int()
    if verifies is not None and num_groups and layout.verifies_causally:
        causal = causal | verifies.int()
    if sent:
        query_start_loc = sent["query_start_loc"].int()
        seq_lens = torch.cat((seq_lens, sent["prefill_end"]))
        block_table = block_table[sent["requests"]]
        if isinstance(causal, torch.Tensor):
            causal = pad(causal, (0, len(sent["prefill_end"])), value=int(is_causal_before))
    if form.drafting:
        assert layout.scratch is not None
        see_own_pages(
            block_table.narrow(0, 0, num_groups),
            layout.scratch,
            slots=slots[groups.requests],
            drafts=(groups.branch - 1).masked_fill_(groups.is_padding, -1),
            first_page=groups.window_start // layout.page_size,
        )
    return DeviceViews(query_start_loc, seq_lens.int(), block_table, causal)


def _branches(
    sent: dict[str, torch.Tensor],
    branches: torch.Tensor,
    state: BlockState,
    fused: torch.Tensor | None,
    layout: Layout,
) -> tuple[DeviceBranches, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the logits of the branches are, the group [N] int64 of each run, and what ``Sight`` has of them.

    A request that does not draft has a run for each block of its window, a request that drafts one for each group. The
    host does not know whether a request's first group is a commit, and allows for one branch more. In this example a
    window has one block, request 0 does not draft, request 1 has two drafts, and both requests have a commit:

    ===============  ======  ======  ======  ======  =======  =======  =================================================
    group            0       1       2       3       4        5
    ===============  ======  ======  ======  ======  =======  =======  =================================================
    request          0       0       1       1       1        1
    rows             commit  window  commit  window  draft 1  draft 2
    run                      0       1       2       3        4
    ``run_index``            0       0       1       2        3        place among the runs of the request
    ``run_group``            0       2       3       4        5        group, where no commit without a run comes before
    ``from_window``          0       -1      0       1        2        blocks between the window's start and the run
    group of a run           1       2       3       4        5        result
    ===============  ======  ======  ======  ======  =======  =======  =================================================

    ===============  ============  ============  ================================================
    request          0             1
    ===============  ============  ============  ================================================
    ``first_run``    0             1
    ``num_runs``     1             4
    ``commit_runs``  0             1             runs of the commit
    ``index``        [0, 1, 2, 3]  [1, 2, 3, 4]  place of each branch among the runs of the request
    ``groups``       [0, 0, 0, 0]  [2, 3, 4, 4]  run of each branch
    ``present``      [1, 0, 0, 0]  [1, 1, 1, 0]
    ===============  ============  ============  ================================================

    Args:
        fused: [D] bool: the request's first group is a commit, and its window follows; ``None``: of no request.
    """
    width, device = layout.window_blocks, state.branches.device
    if "run_request" not in sent:
        # One run per request. Whether a commit stands before the block is known on the device only.
        requests = iota(len(state.branches), device)
        zeros = torch.zeros_like(requests)
        present = torch.ones_like(requests, dtype=torch.bool).unsqueeze(1)
        one_each = DeviceBranches(requests=requests, branch=zeros, block=zeros)
        groups_of_runs = requests if fused is None else sent["first_group"] + fused
        return one_each, groups_of_runs, requests.view(-1, 1, 1), present
    assert fused is not None
    requests = sent["run_request"]
    commit_runs = fused * sent["drafting"]
    from_window = sent["run_index"] - commit_runs[requests]
    # The commit of a request that does not draft has no run.
    groups_of_runs = sent["run_group"] + (fused > commit_runs)[requests]
    first_run, num_runs = sent["first_run"].view(-1, 1, 1), sent["num_runs"].view(-1, 1, 1)
    blocks = branches.unsqueeze(1)
    if width > 1:
        blocks = torch.add(iota(width, device), blocks, alpha=width)
    index = commit_runs.view(-1, 1, 1) + blocks
    computed = (index[:, :, -1] < num_runs[:, :, 0]) & (branches <= state.progress.num_drafts.unsqueeze(1))
    of_branches = DeviceBranches(
        requests=requests,
        branch=torch.div(from_window, width, rounding_mode="floor").clamp_(min=0),
        block=from_window % width,
    )
    return of_branches, groups_of_runs, first_run + torch.minimum(index, num_runs - 1), computed | (branches == 0)
