"""Rows of a drafter's forward against a plain loop that knows from the start what was accepted."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import examples
from vllm_dllm.runtime.plan.drafter import Context, Drafter, DraftRows, RowCounts, count_rows, lay_out

MASK, SEP = 1000, 1001
LENGTH = 200
"""Of the buffers that hold the texts."""


@dataclass(frozen=True)
class Request:
    """A request in a round.

    Attributes:
        start: tokens that the drafter has seen.
        rows: tokens that its text may have grown by, without the one sampled last.
        known: length of its text.
    """

    start: int
    rows: int
    known: int
    drafts: bool

    def token(self, position: int) -> int:
        return 3 * self.start + position


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Drafter, list[Request]]:
    context: Context = draw(st.sampled_from(["full", "causal-context", "block-causal"]))
    drafter = Drafter(
        num_drafts=draw(st.integers(1, 9)),
        context=context,
        shifted=draw(st.booleans()),
        mask_token_id=MASK,
        sep_token_id=draw(st.sampled_from([None, SEP])),
        block_length=draw(st.sampled_from([1, 2, 4, 8])),
        limit=draw(st.integers(20, 120)),
    )
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        start, rows, drafts = draw(st.integers(0, 100)), draw(st.integers(1, 20)), draw(st.booleans())
        # At least one token was accepted or sampled; a prompt in the making has grown by all its rows.
        known = start + draw(st.integers(1, rows)) + 1 if drafts else start + rows
        requests.append(Request(start, rows, known, drafts))
    return drafter, requests


def laid_out(drafter: Drafter, requests: list[Request]) -> tuple[RowCounts, DraftRows]:
    counts = count_rows(
        drafter, np.array([r.rows for r in requests]), np.array([r.drafts for r in requests], dtype=bool)
    )
    slots = torch.arange(len(requests)).flip(0) + 2
    tokens = torch.full((len(requests) + 2, LENGTH), -7, dtype=torch.int32)
    for slot, request in zip(slots.tolist(), requests, strict=True):
        tokens[slot, : request.known] = torch.tensor([request.token(p) for p in range(request.known)])
    rows = lay_out(
        drafter,
        counts.to_device(torch.device("cpu")),
        start=torch.tensor([r.start for r in requests]),
        known=torch.tensor([r.known for r in requests]),
        tokens=tokens,
        slots=slots,
    )
    return counts, rows


def content(drafter: Drafter, request: Request) -> dict[int, int]:
    """What stands at each position in this round: text, masks, separator."""
    ids = {position: request.token(position) for position in range(request.known)}
    end = request.known + (drafter.num_drafts if request.drafts else 0)
    if drafter.context == "block-causal":
        end = -(-end // drafter.block_length) * drafter.block_length
    ids |= dict.fromkeys(range(request.known, end), MASK)
    if drafter.context != "block-causal" and drafter.sep_token_id is not None and request.drafts:
        ids[end] = SEP
    return {position: token for position, token in ids.items() if position < drafter.limit}


def sees(drafter: Drafter, request: Request, position: int) -> set[int]:
    """Positions that one sees."""
    there = content(drafter, request)
    match drafter.context:
        case "full":
            return set(there)
        case "causal-context":
            return {p for p in there if p <= position or position >= request.known}
        case "block-causal":
            return {p for p in there if p // drafter.block_length <= position // drafter.block_length}


def rows_of(counts: RowCounts, rows: DraftRows, request: int) -> list[int]:
    return [row for row in range(counts.num_rows) if counts.group_request[int(rows.rows.groups[row])] == request]


@examples(300)
@given(rounds())
def test_every_position_that_is_new_has_its_token_in_one_row(case: tuple[Drafter, list[Request]]) -> None:
    drafter, requests = case
    counts, rows = laid_out(drafter, requests)
    assert counts.num_rows == len(rows.rows.tokens) == len(rows.rows.positions) == len(rows.rows.is_padding)
    for index, request in enumerate(requests):
        first = request.start
        if drafter.context == "block-causal":
            first -= first % drafter.block_length
        expected = {position: token for position, token in content(drafter, request).items() if position >= first}
        real = [row for row in rows_of(counts, rows, index) if not rows.rows.is_padding[row]]
        assert sorted(int(rows.rows.positions[row]) for row in real) == sorted(expected)
        for row in real:
            position = int(rows.rows.positions[row])
            assert int(rows.rows.tokens[row]) == expected[position]
            assert bool(rows.is_text[row]) == (position < request.known)


@examples(300)
@given(rounds())
def test_every_row_sees_what_its_context_says(case: tuple[Drafter, list[Request]]) -> None:
    drafter, requests = case
    counts, rows = laid_out(drafter, requests)
    causal = torch.as_tensor(rows.causal).expand(len(counts.group_request))
    for index, request in enumerate(requests):
        for row in rows_of(counts, rows, index):
            if rows.rows.is_padding[row]:
                continue
            group = int(rows.rows.groups[row])
            seen = int(rows.seq_lens[group])
            if causal[group]:
                # As attention kernels do it: the last row of a group sees all, each before it one less.
                seen -= int(counts.query_start_loc[group + 1]) - 1 - row
            assert set(range(seen)) == sees(drafter, request, int(rows.rows.positions[row]))


@examples(300)
@given(rounds())
def test_drafts_are_predicted_by_their_own_row_or_the_one_before(case: tuple[Drafter, list[Request]]) -> None:
    drafter, requests = case
    counts, rows = laid_out(drafter, requests)
    assert counts.drafting.tolist() == [index for index, request in enumerate(requests) if request.drafts]
    assert rows.predicting.shape == rows.draft_positions.shape == (len(counts.drafting), drafter.num_drafts)
    for place, index in enumerate(counts.drafting.tolist()):
        own_rows = rows_of(counts, rows, index)
        for i in range(drafter.num_drafts):
            position = requests[index].known + i
            assert int(rows.draft_positions[place, i]) == position
            row = int(rows.predicting[place, i])
            assert row in own_rows
            if position < drafter.limit:
                assert not rows.rows.is_padding[row]
                assert int(rows.rows.positions[row]) == position - drafter.shifted


@examples(200)
@given(rounds())
def test_there_are_no_more_rows_than_are_reserved(case: tuple[Drafter, list[Request]]) -> None:
    drafter, requests = case
    counts, rows = laid_out(drafter, requests)
    for index, request in enumerate(requests):
        assert len(rows_of(counts, rows, index)) <= request.rows + drafter.extra_rows
        new = [p for p in content(drafter, request) if p >= request.known - request.drafts]
        # The K/V slots behind those that the target has.
        assert len(new) <= 1 + drafter.rows_behind
    assert rows.rows.positions.min() >= 0
    assert rows.rows.positions.max() < drafter.limit
    assert rows.seq_lens.min() > 0


@examples(50)
@given(rounds())
def test_groups_are_runs_of_rows_in_the_order_of_the_batch(case: tuple[Drafter, list[Request]]) -> None:
    counts, rows = laid_out(*case)
    sizes = np.diff(counts.query_start_loc)
    assert (sizes > 0).all()
    assert rows.rows.groups.tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()
    assert (np.diff(counts.group_request) >= 0).all()
    assert len(rows.seq_lens) == len(sizes)


@pytest.mark.parametrize("context", ["full", "causal-context", "block-causal"])
def test_a_round_without_drafts_and_a_batch_without_requests(context: Context) -> None:
    drafter = Drafter(
        num_drafts=4, context=context, shifted=True, mask_token_id=MASK, sep_token_id=SEP, block_length=4, limit=99
    )
    rows = laid_out(drafter, [Request(0, 5, 5, False)])[1]
    assert rows.predicting.shape == (0, 4)
    assert rows.rows.tokens[:5].tolist() == [0, 1, 2, 3, 4]
    nobody = count_rows(drafter, np.array([], dtype=np.int64), np.array([], dtype=bool))
    assert nobody.num_rows == 0
