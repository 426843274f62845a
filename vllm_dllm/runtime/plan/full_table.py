"""The groups of a step of models with full attention, as the host knows them (see `full`)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_dllm.decoding.holes import Holes
from vllm_dllm.runtime.plan.arrays import runs, to_device
from vllm_dllm.runtime.plan.rows import Layout, Scheduled
from vllm_dllm.runtime.plan.spans import Span, Spans, cdiv

IN_BLOCK, KNOWN, MASK, PADDING = range(4)
"""Where the token of a row comes from: ``IN_BLOCK``: the block being denoised; ``KNOWN``: the prompt or emitted text;
``MASK``: it is the mask token; ``PADDING``: the row has none."""


@dataclass(frozen=True)
class Places:
    """Where the D decoding requests of a step are. On the host, each [D]."""

    block_start: np.ndarray
    window_end: np.ndarray
    """Position behind the last mask of the sequence."""
    refresh: np.ndarray
    """bool: this step computes the whole sequence."""
    prompt_length: np.ndarray
    cfg_scale: np.ndarray
    """float64; 0: the request has no unconditional branch."""
    unconditional_page: np.ndarray
    """Index in the request's row of the block table at which the pages of the unconditional branch begin."""

    text_end: np.ndarray
    """Position behind the last token of the text."""

    @property
    def guided(self) -> np.ndarray:
        """bool: the request has an unconditional branch."""
        return self.cfg_scale > 0

    @classmethod
    def of(cls, scheduled: Scheduled, spans: Spans, page_size: int, asked: np.ndarray) -> "Places":
        """The places of the decoding requests, which ``asked`` for that (``runtime.states.ASKED``)."""
        decoding = slice(scheduled.num_decodes)
        # Rows in front of those that vLLM takes for drafts are rows of known text.
        block_start = scheduled.computed[decoding] + scheduled.num_rows[decoding] - scheduled.num_draft_rows
        return cls(
            block_start=block_start,
            window_end=spans.window_end(block_start, asked["text_end"]),
            refresh=scheduled.computed[decoding] == 0,
            prompt_length=asked["grid_start"],
            cfg_scale=asked["cfg_scale"],
            unconditional_page=cdiv(asked["text_end"], page_size),
            text_end=asked["text_end"],
        )


class TextOrders:
    """Where each place of a sequence stands in its text, for requests that fill in masks (``decoding.holes``)."""

    def __init__(self, max_num_reqs: int, max_model_len: int):
        self.shape = max_num_reqs, max_model_len
        self.fills_in = np.zeros(max_num_reqs, dtype=bool)
        # Made for the first such request.
        self.positions = self.predictors = np.empty((0, max_model_len), dtype=np.int32)

    def add_request(self, slot: int, holes: Holes | None, text_end: int) -> None:
        """Take the ``holes`` of the request in ``slot``, whose text ends at ``text_end``; ``None``: it has none."""
        self.fills_in[slot] = holes is not None
        if holes is None:
            return
        if not len(self.positions):
            self.positions = np.zeros(self.shape, dtype=np.int32)
            self.predictors = np.zeros(self.shape, dtype=np.int32)
        self.positions[slot, :text_end] = holes.order(text_end)
        self.predictors[slot, :text_end] = holes.predictors(text_end)

    def of(self, slots: np.ndarray) -> "TextOrder | None":
        """The orders of the requests in ``slots`` [D]; ``None``: all of them have their text's."""
        fills_in = self.fills_in[slots]
        return TextOrder(self.positions, self.predictors, slots, fills_in) if fills_in.any() else None


class TextOrder(NamedTuple):
    """Orders of the D decoding requests of a step, on the host."""

    positions: np.ndarray
    """[max_num_reqs, max_model_len]: of each place, its position in the text."""
    predictors: np.ndarray
    """The same shape: of each place, the place that predicts it in shifted families."""
    slots: np.ndarray
    """[D]."""
    fills_in: np.ndarray
    """[D] bool: the request fills in masks. Others have the order of their text."""

    def look_up(self, table: np.ndarray, request: np.ndarray, place: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
        """Entries of one of the tables, for places of requests, all of one shape."""
        known = np.clip(place, 0, table.shape[1] - 1)
        return np.where(self.fills_in[request], table[self.slots[request], known], otherwise)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of a step on the host, N of decoding requests first, then those of requests that enter. Each [G]."""

    num_decode_groups: int  # N
    request: np.ndarray
    branch: np.ndarray  # 0: the sequence as it stands; above: a draft; -1: padding
    unconditional: np.ndarray  # bool: the sequence as it stands with its prompt masked
    query_start_loc: np.ndarray  # [G + 1] int32: first row
    start: np.ndarray  # position of the first row
    end: np.ndarray  # length of the K/V that the group sees


@dataclass(frozen=True)
class Step:
    """A step as the host knows it."""

    groups: Groups
    of_branch: np.ndarray
    """[N] int64: the groups of the runs of logits rows (see ``DeviceBranches``)."""
    sent: dict[str, torch.Tensor]
    """What the device needs. A key that is missing says that no request of the step has what the key is for: drafts,
    an unconditional branch, masks of its own to fill in."""


def step_of(
    scheduled: Scheduled,
    layout: Layout,
    spans: Spans,
    places: Places,
    order: TextOrder | None,
    *,
    max_drafts: int,
    text_width: int,
    num_columns: int,
    device: torch.device,
    copies: bool = False,
) -> Step:
    """The host's part of a plan; see ``full.lay_out_full_step``.

    Args:
        order: ``None``: all sequences are in the order of their text.
        max_drafts: drafts that a request of the engine may have.
        text_width: tokens in a row of the text's table.
        num_columns: pages in a row of the block table.
        copies: K/V may be copied to scratch pages.
    """
    groups = _groups(scheduled, spans, places, max_drafts)
    draft_span = spans.draft(places.block_start, places.window_end)
    decoding = slice(groups.num_decode_groups)
    # Logits rows: those of the branches, then those of the unconditional branches.
    of_branch = np.flatnonzero((groups.branch[decoding] >= 0) & ~groups.unconditional[decoding])
    of_unconditional = np.flatnonzero(groups.unconditional)
    arrays = {
        **_row_table(groups, places, layout, text_width, order),
        **_view_table(groups, places, draft_span, layout, num_columns),
        **_branch_table(groups, of_branch, scheduled.num_decodes),
        "logits_rows": _logits_rows(np.concatenate((of_branch, of_unconditional)), groups, places, layout, order),
        "refresh": places.refresh,
    }
    if len(of_unconditional):
        # The logits of the unconditional branches are the last, and each branch follows the sequence it belongs to.
        first_row = np.searchsorted(of_branch, of_unconditional - 1) * layout.block_length
        arrays["guided_rows"] = np.add.outer(first_row, np.arange(layout.block_length)).ravel()
        weight = places.cfg_scale[groups.request[of_unconditional]] + 1
        arrays["guidance_weight"] = np.repeat(weight, layout.block_length)
    if copies:
        arrays |= {"copy_start": draft_span.start, "copy_end": draft_span.end}
    if order is not None:
        arrays["length"] = places.text_end - places.block_start
        if layout.shifted and spans.cache != "none":
            arrays["outside"] = _predicted_outside(places, layout, order)
    return Step(groups, of_branch, to_device(device, **arrays))


def _groups(scheduled: Scheduled, spans: Spans, places: Places, max_drafts: int) -> Groups:
    num_decodes = scheduled.num_decodes
    decode_rows = scheduled.num_rows[:num_decodes]
    sequence = spans.sequence(places.block_start, places.window_end, places.refresh)
    draft = spans.draft(places.block_start, places.window_end)
    # vLLM's warm-up gives a request any number of rows, anywhere.
    guided = places.guided.astype(np.int64)
    sequence_rows = np.clip(sequence.length, 0, decode_rows // (1 + guided))
    draft_rows = np.maximum(draft.length, 1)
    rest = decode_rows - (1 + guided) * sequence_rows
    # A guided request has no drafts.
    num_drafts = np.minimum(rest // draft_rows, max_drafts) * (1 - guided)
    padding = rest - num_drafts * draft_rows

    request, index = runs(1 + guided + num_drafts + (padding > 0))
    unconditional = places.guided[request] & (index == 1)
    branch = np.where(index > (guided + num_drafts)[request], -1, np.where(unconditional, 0, index))
    kinds = [branch == 0, branch > 0]
    rows = np.select(kinds, [sequence_rows[request], draft_rows[request]], padding[request])
    start = np.select(kinds, [sequence.start[request], draft.start[request]], 0)
    end = np.where(branch >= 0, np.maximum(places.window_end[request], 1), 1)

    entering = np.arange(num_decodes, len(scheduled.num_rows))
    entering_rows, computed = scheduled.num_rows[entering], scheduled.computed[entering]
    return Groups(
        num_decode_groups=len(request),
        request=np.concatenate((request, entering)),
        branch=np.concatenate((branch, np.zeros_like(entering))),
        unconditional=np.concatenate((unconditional, np.zeros(len(entering), dtype=bool))),
        query_start_loc=np.cumsum(np.concatenate(([0], rows, entering_rows))).astype(np.int32),
        start=np.concatenate((start, computed)),
        end=np.concatenate((end, computed + entering_rows)),
    )


def _predicted_outside(places: Places, layout: Layout, order: TextOrder) -> np.ndarray:
    """[D, L] bool: positions of each block that a row before the block predicts (shifted families)."""
    place = places.block_start[:, None] + np.arange(layout.block_length)
    request = np.broadcast_to(np.arange(len(place))[:, None], place.shape)
    return order.look_up(order.predictors, request, place, place - 1) < places.block_start[:, None]


def _row_table(
    groups: Groups, places: Places, layout: Layout, text_width: int, order: TextOrder | None
) -> dict[str, np.ndarray]:
    """What the host knows of the rows of decoding requests; each array [rows]."""
    group, offset = runs(np.diff(groups.query_start_loc)[: groups.num_decode_groups])
    request, branch = groups.request[group], groups.branch[group]
    position = np.minimum(groups.start[group] + offset, layout.limit - 1)
    in_block = position - places.block_start[request]
    hidden = groups.unconditional[group] & (position < places.prompt_length[request])
    source = np.select(
        [branch < 0, hidden | (in_block >= layout.block_length), in_block < 0], [PADDING, MASK, KNOWN], IN_BLOCK
    )
    in_order = {} if order is None else {"row_in_order": order.look_up(order.positions, request, position, position)}
    return {
        **in_order,
        "row_group": group,
        "row_request": request,
        "row_branch": np.maximum(branch, 0),
        "row_position": np.where(branch < 0, 0, position),
        "row_source": source,
        "row_in_block": np.where(source == IN_BLOCK, in_block, 0),
        "row_in_text": np.where(source == KNOWN, np.minimum(position, text_width - 1), 0),
    }


def _view_table(
    groups: Groups, places: Places, draft_span: Span, layout: Layout, num_columns: int
) -> dict[str, np.ndarray]:
    """What the host knows of the views of all groups; each array [G], but the first [G + 1]."""
    is_draft = groups.branch > 0
    # Requests that enter are none of the D; no group of theirs looks at the places.
    decoding = np.where(np.arange(len(groups.request)) < groups.num_decode_groups, groups.request, 0)
    table = {
        "query_start_loc": groups.query_start_loc,
        "group_request": groups.request,
        "group_decoding": decoding,
        "group_draft": np.where(is_draft, groups.branch - 1, -1),
        "seq_lens": groups.end,
    }
    if is_draft.any():
        assert layout.scratch is not None
        first_page = np.where(is_draft, draft_span.start[decoding] // layout.page_size, 0)
        table["first_page"] = np.minimum(first_page, num_columns - layout.scratch.pages_per_draft)
        table["end_page"] = -(-draft_span.end[decoding] // layout.page_size)
    if groups.unconditional.any():
        table["page_shift"] = np.where(groups.unconditional, places.unconditional_page[decoding], 0)
    return table


def _branch_table(groups: Groups, of_branch: np.ndarray, num_decodes: int) -> dict[str, np.ndarray]:
    """Request, branch and block of each of the N runs of logits rows, which are those of the groups ``of_branch``.

    ``runs`` [D, B]: the run of each branch; ``computed`` [D, B]: the branch has rows in this step.
    """
    request, branch = groups.request[of_branch], groups.branch[of_branch]
    place = np.zeros((num_decodes, int(branch.max(initial=0)) + 1), dtype=np.int64)
    place += np.flatnonzero(branch == 0)[:, None]
    place[request, branch] = np.arange(len(of_branch))
    computed = np.zeros(place.shape, dtype=bool)
    computed[request, branch] = True
    of_run = {"run_request": request, "run_branch": branch, "run_block": np.zeros_like(branch)}
    return {**of_run, "runs": place, "computed": computed}


def _logits_rows(of: np.ndarray, groups: Groups, places: Places, layout: Layout, order: TextOrder | None) -> np.ndarray:
    """[len(of) * L] int64: rows that predict the positions of the block in the groups ``of``."""
    place = places.block_start[groups.request[of]][:, None] + np.arange(layout.block_length)
    predictor = place - layout.shifted
    if layout.shifted and order is not None:
        request = np.broadcast_to(groups.request[of][:, None], place.shape)
        predictor = order.look_up(order.predictors, request, place, predictor)
    # The row before predicts a position in shifted families. A step that does not compute the row before the block has
    # no need of it: the block's first position is unmasked by then.
    rows = np.maximum(predictor - groups.start[of][:, None], 0)
    num_decode_rows = int(groups.query_start_loc[groups.num_decode_groups])
    return np.minimum(groups.query_start_loc[of][:, None] + rows, max(num_decode_rows - 1, 0)).flatten()
