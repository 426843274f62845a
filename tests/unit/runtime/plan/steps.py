"""Parts of the steps that the tests of plans make up, and the comparison with the reference."""

import dataclasses
from types import SimpleNamespace
from typing import Any

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


def assert_rows_and_views(plan: RowPlan, layout: Layout, expected: list[Group | None], *, num_laid_out: int) -> None:
    """The plan has the groups expected, and writes the first ``num_laid_out`` rows.

    Args:
        expected: ``None`` for a group of padding.
    """
    views, starts = plan.views, plan.views.query_start_loc
    assert len(starts) - 1 == len(expected) == len(views.seq_lens) == len(views.block_tables[0])
    assert views.query_start_loc_on_device.tolist() == starts.tolist()
    assert views.max_seq_len >= int(views.seq_lens.max())
    causal = torch.as_tensor(views.causal).expand(len(expected)).bool().tolist()
    num_rows = int(starts[-1])
    batch: Any = SimpleNamespace(
        input_ids=torch.full((num_rows,), -7, dtype=torch.int32), positions=torch.full((num_rows,), -7)
    )
    slots = torch.full((num_rows,), -7)
    plan.rows.write(Buffers(batch.input_ids, batch.positions, slots), views.block_tables[0], layout.page_size)
    for index, group in enumerate(expected):
        rows = slice(int(starts[index]), int(starts[index + 1]))
        if group is None:
            assert set(slots[rows].tolist()) == {PAD_SLOT_ID}
            continue
        assert rows.stop - rows.start == len(group.positions)
        if rows.stop <= num_laid_out:
            assert batch.input_ids[rows].tolist() == group.tokens
            assert batch.positions[rows].tolist() == group.positions
            assert slots[rows].tolist() == group.slots
        else:
            assert set(slots[rows].tolist()) == {-7}
        seen = range(int(views.seq_lens[index]))
        size, table = layout.page_size, views.block_tables[0][index].tolist()
        assert [table[position // size] * size + position % size for position in seen] == group.sees
        assert causal[index] == group.causal
        if group.causal:
            # A causal mask is aligned to the end of a group.
            assert group.positions[-1] == len(group.sees) - 1
