"""Parts of the steps that the tests of plans make up, and the comparison with the reference."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.reference.plan import Group, Pages
from vllm_dllm.decoding.records import Progress
from vllm_dllm.runtime.plan.rows import PAD_SLOT_ID, Buffers, Layout, RowPlan, Scheduled
from vllm_dllm.runtime.plan.scratch import ScratchPages

COLUMNS = 80
FIRST_SCRATCH_PAGE = 10_000


def scratch_pages(
    max_drafts: int, pages_per_draft: int, page_size: int, *, copy: Any = None, first_page: int = FIRST_SCRATCH_PAGE
) -> ScratchPages:
    return ScratchPages(
        first_page=first_page,
        max_drafts=max_drafts,
        pages_per_draft=pages_per_draft,
        page_size=page_size,
        copy=copy,
    )


def pages_for(layout: Layout, slot: int) -> Pages:
    scratch = layout.scratch
    numbers = (0, 0, 0) if scratch is None else (scratch.first_page, scratch.max_drafts, scratch.pages_per_draft)
    # Every request has pages of its own, in no order.
    own = [slot * COLUMNS + (index * 37) % COLUMNS for index in range(COLUMNS)]
    return Pages(layout.page_size, own, slot, numbers)


def progress(num_requests: int, **values: list[int]) -> Progress:
    """Where the requests stand: 0, but for ``values``."""
    names = (field.name for field in dataclasses.fields(Progress))
    return Progress(*(torch.tensor(values.get(name, [0] * num_requests), dtype=torch.int64) for name in names))


def scheduled(
    *, num_rows: list[int], computed: list[int], num_decodes: int, known: list[int] | None = None
) -> Scheduled:
    """What the scheduler gave a step. ``known``: rows of known text of each decoding request."""
    rows = np.array(num_rows, dtype=np.int64)
    start = np.concatenate(([0], np.cumsum(rows))).astype(np.int32)
    return Scheduled(
        num_decodes=num_decodes,
        num_rows=rows,
        num_draft_rows=rows[:num_decodes] - np.array(known or [0] * num_decodes, dtype=np.int64),
        computed=np.array(computed, dtype=np.int64),
        prefill_length=np.array(computed, dtype=np.int64) + rows,
        query_start_loc=start,
        query_start_loc_on_device=torch.from_numpy(start.copy()),
        longest=int((np.array(computed) + rows).max()),
    )


class Planned(NamedTuple):
    """A plan, and the buffers that it was written to."""

    plan: RowPlan
    buffers: Buffers
    num_laid_out: int
    """Rows of the decoding requests, which the plan writes."""


def buffers_for(step_rows: Scheduled) -> Buffers:
    """For all rows of a step. What nobody writes stays -7."""
    num_rows = int(step_rows.num_rows.sum())
    ids = torch.full((num_rows,), -7, dtype=torch.int32)
    return Buffers(ids, torch.full((num_rows,), -7), torch.full((num_rows,), -7))


def assert_rows_and_views(planned: Planned, page_size: int, expected: list[Group | None]) -> None:
    """The plan has the groups expected, and wrote the rows of the decoding requests.

    Args:
        expected: ``None`` for a group of padding.
    """
    views, written = planned.plan.views, planned.buffers
    starts = views.query_start_loc
    assert len(starts) - 1 == len(expected) == len(views.seq_lens) == len(views.block_tables[0])
    assert views.query_start_loc_on_device.tolist() == starts.tolist()
    assert views.max_seq_len >= int(views.seq_lens.max())
    assert int(starts[-1]) == len(written.slot_mapping)
    causal = torch.as_tensor(views.causal).expand(len(expected)).bool().tolist()
    for index, group in enumerate(expected):
        rows = slice(int(starts[index]), int(starts[index + 1]))
        if group is None:
            assert set(written.slot_mapping[rows].tolist()) == {PAD_SLOT_ID}
            continue
        assert rows.stop - rows.start == len(group.positions)
        if rows.stop <= planned.num_laid_out:
            assert written.input_ids[rows].tolist() == group.tokens
            assert written.positions[rows].tolist() == group.positions
            assert written.slot_mapping[rows].tolist() == group.slots
        else:
            assert {*torch.cat([buffer[rows] for buffer in written[:3]]).tolist()} == {-7}
        seen = range(int(views.seq_lens[index]))
        table = views.block_tables[0][index].tolist()
        assert [table[position // page_size] * page_size + position % page_size for position in seen] == group.sees
        assert causal[index] == group.causal
        if group.causal:
            # A causal mask is aligned to the end of a group.
            assert group.positions[-1] == len(group.sees) - 1
