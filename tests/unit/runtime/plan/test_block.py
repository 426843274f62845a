"""Plans of block-causal models and of those with a causal context, against tests.reference.plan."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.plan import MASK, Decoding, Group, Pages, groups_of_blocks, groups_of_prompt
from tests.unit.runtime.plan.steps import (
    Planned,
    assert_rows_and_views,
    buffers_for,
    pages_for,
    progress,
    scheduled,
    scratch_pages,
)
from vllm_dllm.kernels.page_copy import PageCopy
from vllm_dllm.runtime.plan.block import lay_out_step, plan_of
from vllm_dllm.runtime.plan.rows import BlockState, Layout
from vllm_dllm.runtime.plan.scratch import pages_per_draft
from vllm_dllm.runtime.plan.table import step_of


@dataclass(frozen=True)
class Step:
    """A step of decoding requests, then of prompts: start and rows of each."""

    layout: Layout
    decoding: list[Decoding]
    may_draft: list[bool]
    prompts: list[tuple[Pages, int, int]]
    grid_start: list[int]

    def groups(self) -> list[Group | None]:
        layout, groups = self.layout, list[Group | None]()
        for request in self.decoding:
            groups += groups_of_blocks(
                request,
                length=layout.block_length,
                limit=layout.limit,
                commit_predicts=layout.commit_predicts,
                causal_context=layout.causal_context,
            )
        for pages, start, num_rows in self.prompts:
            groups += groups_of_prompt(
                pages, start, num_rows, length=layout.block_length, causal_context=layout.causal_context
            )
        return groups


@st.composite
def steps(draw: st.DrawFn) -> Step:
    length, causal_context = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([False, False, True]))
    max_drafts = draw(st.sampled_from([0, 1, 3]))
    width = draw(st.sampled_from([1, 1, 2])) if max_drafts and not causal_context else 1
    size = length * draw(st.sampled_from([1, 2, 4]))
    per_draft = pages_per_draft(width * length, 1 if causal_context else length, size)
    predictions = draw(st.sampled_from(["own", "shifted", "own behind the first"]))
    layout = Layout(
        block_length=length,
        page_size=size,
        limit=length * draw(st.integers(6, 12)),
        shifted=predictions == "shifted",
        commit_predicts=predictions != "own",
        mask_token_id=MASK,
        window_blocks=width,
        causal_context=causal_context,
        scratch=scratch_pages(max_drafts, per_draft, size) if max_drafts else None,
    )
    plain = draw(st.booleans()) and width == 1
    num_decodes, num_prompts = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    num_prompts += not num_decodes + num_prompts
    grid_start = [draw(st.integers(0, 5)) if causal_context else 0 for _ in range(num_decodes + num_prompts)]
    pages = [pages_for(layout, slot) for slot in draw(st.permutations(range(num_decodes + num_prompts)))]
    decoding, may_draft = [], []
    for index in range(num_decodes):
        most = (1 + max_drafts) * width if max_drafts else 2
        num_groups = 1 if plain else draw(st.integers(width, max(most, 2)))
        # Only a request that drafts, and has rows for that, has drafts that wait.
        drafting = bool(max_drafts) and num_groups > width and draw(st.booleans())
        commit = draw(st.booleans())
        # A commit that stands alone leaves no logits to make drafts from.
        most_drafts = 0 if commit and layout.commit_predicts else min(max_drafts, num_groups // width - 1)
        last_block = layout.limit // length - 1
        tokens = st.integers(0, MASK - 1)
        decoding.append(
            Decoding(
                pages=pages[index],
                block_start=grid_start[index] + length * draw(st.integers(1, last_block + 1) | st.just(last_block)),
                commit=commit,
                finished=draw(st.lists(tokens, min_size=length, max_size=length)),
                window=[
                    draw(st.lists(tokens, min_size=width * length, max_size=width * length))
                    for _ in range(1 + max_drafts)
                ],
                num_drafts=draw(st.integers(0, most_drafts)) if drafting else 0,
                num_rows=num_groups * length,
            )
        )
        may_draft.append(drafting)
    prompts = []
    for index in range(num_decodes, num_decodes + num_prompts):
        start = draw(st.integers(0, 3)) * (1 if causal_context else length)
        prompts.append((pages[index], start, draw(st.integers(1, 3 * length))))
    return Step(layout, decoding, may_draft, prompts, grid_start)


def planned(step: Step) -> Planned:
    layout, decoding = step.layout, step.decoding
    max_drafts = 0 if layout.scratch is None else layout.scratch.max_drafts
    width = layout.window_blocks * layout.block_length
    state = BlockState(
        progress(
            len(decoding),
            block_start=[request.block_start for request in decoding],
            commit=[request.commit for request in decoding],
            num_drafts=[request.num_drafts for request in decoding],
        ),
        torch.zeros(len(decoding), max_drafts, dtype=torch.int64),
        torch.tensor([r.finished for r in decoding], dtype=torch.int64).view(-1, layout.block_length),
        torch.tensor([r.window for r in decoding], dtype=torch.int64).view(-1, (1 + max_drafts) * width),
        packed=torch.empty(0),
    )
    pages = [r.pages for r in decoding] + [p for p, _, _ in step.prompts]
    slots = torch.tensor([p.slot for p in pages[: len(decoding)]], dtype=torch.int64)
    block_table = torch.tensor([p.own for p in pages], dtype=torch.int32)
    step_rows = scheduled(
        num_rows=[r.num_rows for r in decoding] + [n for _, _, n in step.prompts],
        computed=[r.block_start for r in decoding] + [start for _, start, _ in step.prompts],
        num_decodes=len(decoding),
    )
    drafting, grid_start = np.array(step.may_draft, dtype=bool), np.array(step.grid_start)
    of_host = step_of(step_rows, layout, drafting, grid_start, block_table.device)
    num_laid_out, buffers = sum(r.num_rows for r in decoding), buffers_for(step_rows)
    laid_out, _ = lay_out_step(
        lambda _: state,
        layout,
        of_host.form,
        of_host.sent,
        of_host.branches,
        slots,
        block_table,
        step_rows.query_start_loc_on_device,
        None,
        buffers.first(num_laid_out),
        None,
    )
    return Planned(plan_of(step_rows, layout, of_host, laid_out), buffers, num_laid_out)


@given(steps())
def test_every_row_has_its_token_position_and_slot_and_sees_its_context(step: Step) -> None:
    result = planned(step)
    assert result.plan.num_decodes == len(step.decoding)
    assert_rows_and_views(result, step.layout.page_size, step.groups())


@given(steps())
def test_logits_rows_are_those_that_predict_the_positions_of_every_branch(step: Step) -> None:
    plan, layout = planned(step).plan, step.layout
    length, shifted, predicts = layout.block_length, layout.shifted, layout.commit_predicts
    branches = plan.branches
    assert branches.requests.tolist() == plan.run_requests_np.tolist()
    first_row = 0
    for d, request in enumerate(step.decoding):
        groups = groups_of_blocks(
            request, length=length, limit=layout.limit, commit_predicts=predicts, causal_context=layout.causal_context
        )
        row_of = {
            (group.branch, position): first_row + index * length + offset
            for index, group in enumerate(groups)
            if group is not None
            for offset, position in enumerate(group.positions)
        }
        commits_alone = request.commit and (predicts or len(groups) == 1)
        assert bool(plan.sight.commit_only[d]) == commits_alone
        assert bool(plan.sight.first_only[d]) == (commits_alone and predicts)
        expected = {0} | {
            branch
            for branch in range(1, 1 + request.num_drafts)
            if not commits_alone and (1 + branch) * layout.window_blocks + request.commit <= len(groups)
        }
        assert {*plan.sight.present[d].nonzero().flatten().tolist()} == expected
        for branch in expected:
            for k in range(layout.window_blocks):
                run = int(plan.sight.groups[d, branch, k])
                assert int(branches.requests[run]) == d
                assert (int(branches.branch[run]), int(branches.block[run])) == (branch, k) or commits_alone
                for offset in range(length):
                    position = request.block_start + k * length + offset
                    row = int(plan.logits_rows[run * length + offset])
                    if commits_alone:
                        # The finished block's last row predicts the first position of the block, and its other rows
                        # the positions behind them.
                        at = position - 1 if offset == 0 else position - length - 1
                        assert not predicts or row == row_of.get((-1, at), row)
                    elif (branch, position) in row_of and (offset or not shifted):
                        assert row == row_of[branch, position] - shifted
        first_row += request.num_rows


def test_a_prompt_that_ends_with_a_block_yields_the_first_token_where_commits_predict() -> None:
    layout = Layout(block_length=4, page_size=4, limit=64, shifted=True, commit_predicts=True, mask_token_id=MASK)
    prompts = [(pages_for(layout, slot), 0, rows) for slot, rows in enumerate([8, 7])]
    plan = planned(Step(layout, [], [], prompts, [0, 0])).plan
    assert plan.first_token_requests.tolist() == [0]
    assert plan.logits_rows.tolist() == [7]
    plan = planned(Step(replace(layout, commit_predicts=False), [], [], prompts, [0, 0])).plan
    assert len(plan.logits_rows) == 0


def test_the_runs_of_a_request_that_drafts_begin_with_its_commit() -> None:
    # The example of ``block._branches``.
    layout = Layout(
        block_length=2, page_size=2, limit=16, shifted=False, mask_token_id=MASK, scratch=scratch_pages(2, 1, 2)
    )
    decoding = [
        Decoding(
            pages=pages_for(layout, slot),
            block_start=4,
            commit=True,
            finished=[0, 1],
            window=[[2, 3], [4, 5], [6, 7]],
            num_drafts=num_drafts,
            num_rows=num_rows,
        )
        for slot, (num_drafts, num_rows) in enumerate([(0, 4), (2, 8)])
    ]
    plan = planned(Step(layout, decoding, [False, True], [], [0, 0])).plan
    branches = plan.branches
    assert branches.requests.tolist() == [0, 1, 1, 1, 1]
    assert branches.branch.tolist() == [0, 0, 0, 1, 2]
    assert branches.block.tolist() == [0, 0, 0, 0, 0]
    assert plan.sight.groups.flatten(1).tolist() == [[0, 0, 0, 0], [2, 3, 4, 4]]
    assert plan.sight.present.tolist() == [[True, False, False, False], [True, True, True, False]]
    assert (plan.logits_rows[::2] // 2).tolist() == [1, 2, 3, 4, 5]


def test_a_draft_gets_a_copy_of_what_stands_before_the_block_once() -> None:
    cache = torch.arange(40.0).view(40, 1) * torch.ones(40, 2)
    scratch = scratch_pages(2, 1, 8, copy=PageCopy([cache]), first_page=30)
    stand = progress(2, block_start=[12, 20], num_drafts=[1, 1])
    arguments = {
        "max_drafts": torch.tensor([2, 1]),
        "slots": torch.tensor([3, 0]),
        "start": stand.block_start,
        "end": (stand.block_start // 8 + 1) * 8,
        "block_table": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
    }
    scratch.copy(*scratch.copies_before_drafts(stand, torch.tensor([True, False]), **arguments))
    assert cache[30:40, 0].tolist() == [30, 31, 32, 33, 34, 35, 2, 2, 38, 39]
    assert stand.prefix_copied.tolist() == [1, 0]
    cache[2] = -1
    scratch.copy(*scratch.copies_before_drafts(stand, torch.tensor([True, True]), **arguments))
    assert cache[30:40, 0].tolist() == [7, 31, 32, 33, 34, 35, 2, 2, 38, 39]
