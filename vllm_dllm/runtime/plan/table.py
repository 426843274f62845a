"""The groups of a step of models whose blocks do not see what is after them, as the host knows them (see `block`)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_dllm.runtime.plan.arrays import iota, runs, to_device
from vllm_dllm.runtime.plan.rows import Layout, Scheduled


@dataclass(frozen=True, kw_only=True)
class Table:
    """The groups of a step as the host knows them: N of the D decoding requests, then those of the prompts."""

    num_groups: np.ndarray  # [D] int64: of each decoding request
    drafting: np.ndarray  # [D] bool: the request may have drafts, and rows for them
    one_each: bool  # as in Form
    num_branches: int  # B
    num_runs: np.ndarray  # [D] int64: runs of logits rows of each decoding request (see ``DeviceBranches``)
    run_requests: np.ndarray  # [N] int64: request of every run
    requests: np.ndarray  # [G] int64: batch index of each group's request
    index: np.ndarray  # [N] int64: place of each group among its request's
    prefill_end: np.ndarray  # [G - N] int64: K/V length that each group of a prompt sees
    query_start_loc: np.ndarray  # [G + 1] int32: first row of each group
    first_tokens: np.ndarray  # [P] int64: as RowPlan.first_token_requests


@dataclass(frozen=True)
class Step:
    """A step as the host knows it."""

    table: Table
    sent: dict[str, torch.Tensor]
    """What of the table the device needs."""
    branches: torch.Tensor
    """[B] int64: 0, 1, ..., B - 1."""
    form: "Form"


class Form(NamedTuple):
    """What ``block.lay_out_step`` decides by."""

    one_each: bool
    """Nearly all steps without drafts: every decoding request has one group, its block or the commit."""
    drafting: bool
    """A request may have drafts, and rows for them."""
    first_tokens: bool
    """A prefill yields the first token of a block."""


def step_of(
    scheduled: Scheduled, layout: Layout, drafting: np.ndarray, grid_start: np.ndarray, device: torch.device
) -> Step:
    """The host's part of a plan.

    Args:
        drafting: [D] bool: decoding requests that may have drafts.
        grid_start: [R] int64: position that each request's blocks are counted from.
    """
    table = _table(scheduled, layout, drafting, grid_start)
    sent: dict[str, torch.Tensor] = {}
    if not table.one_each or scheduled.num_decodes < len(scheduled.num_rows):
        sent = _send(table, scheduled, layout, device)
    return Step(
        table,
        sent,
        branches=iota(table.num_branches, device),
        form=Form(table.one_each, bool(table.drafting.any()), len(table.first_tokens) > 0),
    )


def _table(scheduled: Scheduled, layout: Layout, drafting: np.ndarray, grid_start: np.ndarray) -> Table:
    """What the numbers of rows say of the groups."""
    length, width, num_decodes = layout.block_length, layout.window_blocks, scheduled.num_decodes
    if num_decodes == len(scheduled.num_rows) and width == 1 and (scheduled.num_rows == length).all():
        return _plain_table(num_decodes, length)
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
    drafting = drafting & (num_groups > width)
    # A request without drafts needs the logits of its window alone; one with drafts those of all its groups.
    num_runs = np.where(drafting, num_groups, width)
    return Table(
        num_groups=num_groups,
        drafting=drafting,
        one_each=num_decodes == 0 or (width == 1 and bool((num_groups == 1).all())),
        num_branches=int(np.where(drafting, num_groups // width, 1).max(initial=1)),
        num_runs=num_runs,
        run_requests=np.repeat(np.arange(num_decodes), num_runs),
        requests=np.concatenate((decoding, prefilling + num_decodes)),
        index=index,
        prefill_end=end,
        query_start_loc=np.concatenate(first_rows).astype(np.int32),
        first_tokens=_finished_prefills(scheduled, layout, grid_start),
    )


def _plain_table(num_decodes: int, length: int) -> Table:
    """What `_table` says of nearly all steps without drafts: all requests decode, and have the rows of one block."""
    requests, zeros = np.arange(num_decodes), np.zeros(num_decodes, dtype=np.int64)
    return Table(
        num_groups=zeros + 1,
        drafting=zeros > 0,
        one_each=True,
        num_branches=1,
        num_runs=zeros + 1,
        run_requests=requests,
        requests=requests,
        index=zeros,
        prefill_end=zeros[:0],
        query_start_loc=np.arange(0, (num_decodes + 1) * length, length, dtype=np.int32),
        first_tokens=zeros[:0],
    )


def _finished_prefills(scheduled: Scheduled, layout: Layout, grid_start: np.ndarray) -> np.ndarray:
    """[P] int64: requests that finish their prefill in this step on the border of a block, which it predicts."""
    if not layout.commit_predicts:
        return np.empty(0, dtype=np.int64)
    length = scheduled.prefill_length
    done = (scheduled.computed + scheduled.num_rows >= length) & (length > 0)
    done &= (length - grid_start) % layout.block_length == 0
    done[: scheduled.num_decodes] = False
    return np.flatnonzero(done)


def _send(table: Table, scheduled: Scheduled, layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    """The table on the device, and where requests have several runs of logits rows the table of these.

    ``block._branches`` has an example of that table.
    """
    num_groups, width = table.num_groups, layout.window_blocks
    first_group = np.cumsum(num_groups) - num_groups
    arrays = {
        "requests": table.requests,
        "decoding": table.requests[: len(table.index)],
        "index": table.index,
        "alone": (num_groups == 1) | layout.commit_predicts,
        "first_group": first_group,
        "prefill_end": table.prefill_end,
        "query_start_loc": table.query_start_loc,
        "first_token_rows": scheduled.query_start_loc[table.first_tokens + 1] - 1,
    }
    if not table.one_each and (width > 1 or table.drafting.any()):
        request, first_run = table.run_requests, np.cumsum(table.num_runs) - table.num_runs
        index = np.arange(len(request)) - first_run[request]
        arrays |= {
            "run_request": request,
            "run_index": index,
            "run_group": first_group[request] + index,
            "num_runs": table.num_runs,
            "first_run": first_run,
            "drafting": table.drafting,
        }
    return to_device(device, **arrays)
