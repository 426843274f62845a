"""Groups of a step of models with full attention.

===========  =====================================================  ====================================================
request      groups, in this order                                  sees K/V of
===========  =====================================================  ====================================================
enters       all its rows, which vLLM schedules before the first    the rows themselves
             refresh; nothing reads their results
decodes      the sequence as it stands, whole in a refresh; then    the whole sequence; drafts see their own scratch
             each draft. `Spans` says how much of both              pages where these hold other tokens
guided       the sequence as it stands; then its unconditional      the whole sequence; the whole unconditional branch,
             branch, the same positions with the prompt masked      which has pages behind those of the sequence
===========  =====================================================  ====================================================

All rows of a group see each other. Scheduling is synchronous for these models, so the host knows where each request is
and which rows a group has; only the device knows the tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dllm.runtime.logits.guidance import Guidance
from vllm_dllm.runtime.plan.arrays import iota
from vllm_dllm.runtime.plan.full_table import KNOWN, MASK, PADDING, Step
from vllm_dllm.runtime.plan.rows import (
    BlockState,
    Buffers,
    DeviceBranches,
    Layout,
    RowPlan,
    Rows,
    Scheduled,
    Sight,
    Views,
    see_own_pages,
)
from vllm_dllm.runtime.plan.scratch import Copies


@dataclass(frozen=True)
class LaidOut:
    """What the device knows of a step's groups; see ``RowPlan``, whose fields these are."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    sight: Sight


def lay_out_full_step(
    gather: Callable[[torch.Tensor], BlockState],
    layout: Layout,
    sent: dict[str, torch.Tensor],
    keeps: bool,
    slots: torch.Tensor,
    text: torch.Tensor,
    block_table: torch.Tensor,
    max_drafts: torch.Tensor | None,
    buffers: Buffers,
) -> tuple[LaidOut, Copies | None]:
    """The device's part of a plan, a stage of ``runtime.compiled``.

    Args:
        gather: where the D decoding requests in ``slots`` stand. Positions of a block that the text has not got become
            known ones.
        sent: of ``Step``.
        keeps: K/V is kept from the refresh.
        slots: [D] int64: the worker's indices of the decoding requests.
        text: [max_num_reqs, max_model_len] int32: prompt and emitted tokens by the worker's index.
        block_table: [R, pages] int32: page ids of each request.
        max_drafts: [D] int64: drafts that each request may have; None: no K/V is copied for drafts.
        buffers: for the decoding requests' rows; change. Rows of requests that enter stay as vLLM laid them out.

    Returns:
        What ``plan_of`` takes, and pages to copy before the forward.
    """
    state, pages, refresh = gather(slots), None, sent["refresh"].bool()
    if max_drafts is not None:
        assert layout.scratch is not None
        pages = layout.scratch.copies_before_drafts(
            state.progress,
            ~refresh,
            max_drafts=max_drafts,
            slots=slots,
            start=sent["copy_start"],
            end=sent["copy_end"],
            block_table=block_table[: len(slots)],
        )
    if "length" in sent:
        _end_last_blocks(state, layout, sent["length"])
    # Only a refresh computes the row before the block, which predicts the block's first position in shifted families.
    first_only, outside = torch.zeros_like(refresh), None
    if layout.shifted and keeps:
        first_only = refresh & (state.branches[:, 0] == layout.mask_token_id)
        if "outside" in sent:
            outside = sent["outside"].bool()
            block = state.branches[:, : layout.block_length]
            first_only = refresh & (outside & (block == layout.mask_token_id)).any(dim=1)
    present = sent["computed"].bool()
    if present.shape[1] > 1:
        present = present & (iota(present.shape[1], slots.device) <= state.progress.num_drafts.unsqueeze(1))
    table = _tables(sent, layout, slots, block_table)
    _rows(sent, state, layout, slots, text).write(buffers, table, layout.page_size)
    laid_out = LaidOut(
        query_start_loc=sent["query_start_loc"].int(),
        seq_lens=sent["seq_lens"].int(),
        block_table=table,
        sight=Sight(
            state.packed,
            commit_only=torch.zeros_like(refresh),
            first_only=first_only,
            present=present,
            groups=sent["runs"].unsqueeze(2),
            slots=slots,
            predicted_outside=outside,
        ),
    )
    return laid_out, pages


def plan_of(scheduled: Scheduled, step: Step, laid_out: LaidOut) -> RowPlan:
    """The plan that the host's part ``step`` and the device's part ``laid_out`` make."""
    groups, sent = step.groups, step.sent
    guidance = None
    if "guided_rows" in sent:
        guidance = Guidance(rows=sent["guided_rows"], weight=sent["guidance_weight"].float().unsqueeze(1))
    return RowPlan(
        num_decodes=scheduled.num_decodes,
        views=Views(
            query_start_loc=groups.query_start_loc,
            query_start_loc_on_device=laid_out.query_start_loc,
            block_tables=[laid_out.block_table],
            seq_lens=laid_out.seq_lens,
            max_seq_len=int(groups.end.max()),
        ),
        sight=laid_out.sight,
        run_requests_np=groups.request[step.of_branch],
        branches=DeviceBranches(requests=sent["run_request"], branch=sent["run_branch"], block=sent["run_block"]),
        logits_rows=sent["logits_rows"],
        first_token_requests=np.empty(0, dtype=np.int64),
        guidance=guidance,
    )


def _end_last_blocks(state: BlockState, layout: Layout, length: torch.Tensor) -> None:
    """Put a token where the text of a request has no more masks, so that its last block can be finished.

    Such positions have no rows, and what is emitted of them is beyond the request's ``max_tokens``.

    Args:
        length: [D] int64: positions from the beginning of the block to the end of the text.
    """
    branches = state.branches.unflatten(1, (-1, layout.block_length))
    beyond = iota(layout.block_length, branches.device) >= length.view(-1, 1, 1)
    branches.masked_fill_(beyond, 0 if layout.mask_token_id else 1)


def _rows(
    sent: dict[str, torch.Tensor], state: BlockState, layout: Layout, slots: torch.Tensor, text: torch.Tensor
) -> Rows:
    request, source = sent["row_request"], sent["row_source"]
    blocks = state.branches.unflatten(1, (-1, layout.block_length))
    tokens = blocks[request, sent["row_branch"], sent["row_in_block"]].masked_fill_(
        source >= MASK, layout.mask_token_id
    )
    known = text[slots[request], sent["row_in_text"]]
    return Rows(
        tokens=torch.where(source == KNOWN, known.long(), tokens),
        positions=sent["row_position"],
        is_padding=source == PADDING,
        groups=sent["row_group"],
        text_positions=sent.get("row_in_order"),
    )


def _tables(
    sent: dict[str, torch.Tensor], layout: Layout, slots: torch.Tensor, block_table: torch.Tensor
) -> torch.Tensor:
    """[G, pages] int32: pages that every group sees."""
    table = block_table[sent["group_request"]]
    if "page_shift" in sent:
        last = table.shape[1] - 1
        columns = iota(last + 1, table.device) + sent["page_shift"].unsqueeze(1)
        table = table.gather(1, columns.clamp_(max=last))
    if "first_page" in sent:
        assert layout.scratch is not None
        see_own_pages(
            table,
            layout.scratch,
            slots=slots[sent["group_decoding"]],
            drafts=sent["group_draft"],
            first_page=sent["first_page"],
            end_page=sent["end_page"],
        )
    return table
