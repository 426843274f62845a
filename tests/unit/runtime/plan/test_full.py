"""Plans of models with full attention, against tests.reference.plan."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.plan import MASK, Group, Sequence, computed_by, groups_of_sequence
from tests.unit.runtime.plan.steps import (
    Planned,
    assert_rows_and_views,
    buffers_for,
    pages_for,
    progress,
    scheduled,
    scratch_pages,
)
from vllm_dllm.runtime.plan.full import lay_out_full_step, plan_of
from vllm_dllm.runtime.plan.full_table import Places, step_of
from vllm_dllm.runtime.plan.rows import BlockState, Layout
from vllm_dllm.runtime.plan.scratch import pages_per_draft
from vllm_dllm.runtime.plan.spans import Spans


@dataclass(frozen=True)
class Step:
    """A step of decoding requests, and of requests that enter with so many rows."""

    layout: Layout
    spans: Spans
    decoding: list[Sequence]
    spare_rows: list[int]
    entering: list[int]

    def groups_of(self, index: int) -> list[Group | None]:
        groups = groups_of_sequence(self.decoding[index], self.spans.cache, self.layout.block_length)
        return [*groups, *([None] if self.spare_rows[index] else [])]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    length, size = draw(st.sampled_from([4, 8])), draw(st.sampled_from([4, 8, 16]))
    spans = Spans(draw(st.sampled_from(["none", "prefix", "dual"])), length, length * draw(st.integers(1, 3)))
    max_drafts = draw(st.sampled_from([0, 1, 3]))
    per_draft = pages_per_draft(60 if spans.cache == "none" else spans.generation_window, 1, size)
    layout = Layout(
        block_length=length,
        page_size=size,
        limit=60,
        shifted=draw(st.booleans()),
        mask_token_id=MASK,
        scratch=scratch_pages(max_drafts, per_draft, size) if max_drafts else None,
    )
    decoding, spare_rows = [], []
    num_decodes, num_entering = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    num_entering += not num_decodes + num_entering
    tokens = st.integers(0, MASK - 1)
    for slot in range(num_decodes):
        prompt_length, num_blocks = draw(st.integers(1, 20)), draw(st.integers(1, 3))
        block_start = prompt_length + length * draw(st.integers(0, num_blocks - 1))
        text_end = prompt_length + length * num_blocks
        guided = draw(st.booleans())
        decoding.append(
            Sequence(
                pages=pages_for(layout, slot),
                prompt_length=prompt_length,
                text=draw(st.lists(tokens, min_size=block_start, max_size=block_start)),
                blocks=[
                    draw(st.lists(tokens | st.just(MASK), min_size=length, max_size=length))
                    for _ in range(1 + max_drafts)
                ],
                window_end=min(text_end, block_start + spans.generation_window),
                refresh=spans.cache == "none" or draw(st.booleans()),
                num_drafts=0 if guided else draw(st.integers(0, max_drafts)),
                shift=-(-text_end // size) if guided else None,
            )
        )
        # Fewer than a draft would need.
        spare_rows.append(draw(st.integers(0, length - 1)))
    return Step(layout, spans, decoding, spare_rows, [draw(st.integers(1, 3)) for _ in range(num_entering)])


def planned(step: Step) -> Planned:
    layout, spans, decoding = step.layout, step.spans, step.decoding
    num_decodes, num_slots = len(decoding), len(decoding) + len(step.entering)
    rows, known = [], []
    for index, request in enumerate(decoding):
        groups = groups_of_sequence(request, spans.cache, layout.block_length)
        rows.append(sum(len(group.positions) for group in groups) + step.spare_rows[index])
        known.append(len(request.text) if request.refresh else 0)
    step_rows = scheduled(
        num_rows=rows + step.entering,
        computed=[0 if r.refresh else len(r.text) for r in decoding] + [0] * len(step.entering),
        num_decodes=num_decodes,
        known=known,
    )
    max_drafts = 0 if layout.scratch is None else layout.scratch.max_drafts
    state = BlockState(
        progress(num_decodes, num_drafts=[r.num_drafts for r in decoding]),
        torch.zeros(num_decodes, max_drafts, dtype=torch.int64),
        torch.zeros(num_decodes, layout.block_length, dtype=torch.int64),
        torch.tensor([r.blocks for r in decoding], dtype=torch.int64).view(
            num_decodes, (1 + max_drafts) * layout.block_length
        ),
        packed=torch.empty(0),
    )
    text = torch.full((num_slots, 64), -7, dtype=torch.int32)
    for slot, request in enumerate(decoding):
        text[slot, : len(request.text)] = torch.tensor(request.text)
    places = Places(
        block_start=np.array([len(r.text) for r in decoding], dtype=np.int64),
        window_end=np.array([r.window_end for r in decoding], dtype=np.int64),
        refresh=np.array([r.refresh for r in decoding], dtype=bool),
        prompt_length=np.array([r.prompt_length for r in decoding], dtype=np.int64),
        cfg_scale=np.array([0.0 if r.shift is None else 1.5 for r in decoding]),
        unconditional_page=np.array([r.shift or 0 for r in decoding], dtype=np.int64),
        text_end=np.array([r.window_end for r in decoding], dtype=np.int64),
    )
    block_table = torch.tensor([pages_for(layout, slot).own for slot in range(num_slots)], dtype=torch.int32)
    of_host = step_of(
        step_rows,
        layout,
        spans,
        places,
        None,
        max_drafts=max_drafts,
        text_width=text.shape[1],
        num_columns=block_table.shape[1],
        device=block_table.device,
    )
    num_laid_out, buffers = sum(rows), buffers_for(step_rows)
    laid_out, _ = lay_out_full_step(
        lambda _: state,
        layout,
        of_host.sent,
        spans.cache != "none",
        torch.arange(num_decodes),
        text,
        block_table,
        None,
        buffers.first(num_laid_out),
    )
    return Planned(plan_of(step_rows, of_host, laid_out), buffers, num_laid_out)


@given(steps())
def test_every_row_has_its_token_position_and_slot_and_sees_its_context(step: Step) -> None:
    expected = [group for index in range(len(step.decoding)) for group in step.groups_of(index)]
    for slot, num_rows in enumerate(step.entering, start=len(step.decoding)):
        pages, positions = pages_for(step.layout, slot), list(range(num_rows))
        expected.append(Group(positions, sees=[pages.kv_slot(position) for position in positions]))
    assert_rows_and_views(planned(step), step.layout.page_size, expected)


@given(steps())
def test_logits_rows_predict_the_block_in_every_branch_and_guidance_pairs_them(step: Step) -> None:
    plan, length, shifted = planned(step).plan, step.layout.block_length, step.layout.shifted
    branches, first_row = plan.branches, 0
    unconditional = []
    for d, request in enumerate(step.decoding):
        groups = groups_of_sequence(request, step.spans.cache, length)
        assert plan.sight.present[d].nonzero().flatten().tolist() == list(range(1 + request.num_drafts))
        for index, group in enumerate(groups):
            rows = [
                first_row + group.positions.index(position)
                for position in range(len(request.text), len(request.text) + length)
            ]
            first_row += len(group.positions)
            if request.shift is not None and index == 1:
                unconditional += rows
                continue
            assert group.branch is not None
            run = int(plan.sight.groups[d, group.branch, 0])
            assert (int(branches.requests[run]), int(branches.branch[run])) == (d, group.branch)
            logits = plan.logits_rows[run * length : (run + 1) * length].tolist()
            # Without the row before the block, the block's first position has no prediction.
            assert logits[1:] == [row - shifted for row in rows[1:]]
            if not shifted or group.positions[0] < len(request.text):
                assert logits[0] == rows[0] - shifted
        first_row += step.spare_rows[d]
    assert (plan.guidance is None) == (not unconditional)
    if plan.guidance is not None:
        last = plan.logits_rows[len(plan.logits_rows) - len(unconditional) :].view(-1, length)
        assert torch.equal(last[:, 1:], torch.tensor(unconditional).view(-1, length)[:, 1:] - int(shifted))
        guided = [d for d, request in enumerate(step.decoding) if request.shift is not None]
        runs = [int(plan.sight.groups[d, 0, 0]) for d in guided]
        assert plan.guidance.rows.tolist() == [run * length + i for run in runs for i in range(length)]
        assert set(plan.guidance.weight.flatten().tolist()) == {2.5}


def test_spans_of_every_cache_are_those_of_the_reference() -> None:
    for cache in ("none", "prefix", "dual"):
        spans = Spans(cache, 4, 8)
        draft = spans.draft(12, 20)
        assert range(draft.start, draft.end) == computed_by(cache, 12, 20, 4)
        assert tuple(spans.sequence(12, 20, True)) == (0, 20)
        assert spans.text_end(5, 6, infill=False) == 13
        assert spans.text_end(5, 6, infill=True) == 11
        assert spans.window_end(5, 30) == 13
