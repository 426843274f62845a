"""Groups of a drafter's forward: one forward drafts k tokens for every request of the batch.

A request's rows are the text that the drafter has not seen yet, k masks behind the text, and a separator behind the
masks where the drafter was trained with one. Only the device knows how many of the last drafts the target accepted, so
the host reserves rows for all of them; rows left over are padding.

==============  ===============================================================  =======================================
context         groups of a request                                              see
==============  ===============================================================  =======================================
full            the new text; the masks with the separator                       everything, both
causal-context  the new text; the masks with the separator                       what is before a row; everything
block-causal    one per diffusion block, from the block that the new text        all up to the end of the group's block,
                begins in to the block of the k-th mask, with masks to its end   the masks of earlier blocks too
==============  ===============================================================  =======================================

K/V of accepted text stays in the cache: exact with a causal context, and with blocks, of which an unfinished one is
computed again; with ``full`` the K/V is what it was when the text was new.

Source: DEER (arXiv 2512.15176), Section 3.2; figure 3 of the paper puts the separator behind the masks.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dllm.runtime.plan.arrays import iota, runs, to_device
from vllm_dllm.runtime.plan.rows import Rows

Integers = NDArray[np.int64]

Context = Literal["full", "causal-context", "block-causal"]


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """What the forwards of a drafter have in common while the engine lives."""

    num_drafts: int  # k
    context: Context  # what the rows of the text see, see above
    shifted: bool  # row i predicts position i + 1
    mask_token_id: int  # token of a position that is to be drafted
    sep_token_id: int | None  # token behind the masks; not for drafters with blocks, since a block ends in masks
    block_length: int  # diffusion block length, where context is "block-causal"
    limit: int  # positions from here on are never forwarded

    @property
    def rows_behind(self) -> int:
        """Rows behind the text, of masks and the separator."""
        if self.context == "block-causal":
            return self.num_drafts + self.block_length - 1
        return self.num_drafts + (self.sep_token_id is not None)

    @property
    def extra_rows(self) -> int:
        """Rows of a request, at most, beyond those that the target has of the request in the same step."""
        before = self.block_length - 1 if self.context == "block-causal" else 0
        # The token that the target has just sampled is in none of the target's rows.
        return before + 1 + self.rows_behind


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """What the host knows of a forward with R requests, D of which draft, in G groups."""

    is_drafting: NDArray[np.bool_]  # [R]
    drafting: Integers  # [D]: the requests that draft, in the order of the batch
    context_rows: Integers  # [R]: rows of each request's text, padding included; with blocks all its rows
    group_request: Integers  # [G]: request of each group
    group_index: Integers  # [G]: place of each group among those of its request
    query_start_loc: NDArray[np.int32]  # [G + 1]: first row of each group

    @property
    def num_rows(self) -> int:
        """Rows of the forward."""
        return int(self.query_start_loc[-1])

    def to_device(self, device: torch.device, **more: np.ndarray) -> dict[str, torch.Tensor]:
        """The counts on the device, and ``more``, in one transfer; ``row_group`` [rows] is the group of each row."""
        first_row = self.query_start_loc[np.searchsorted(self.group_request, np.arange(len(self.is_drafting)))]
        return to_device(
            device,
            row_group=runs(np.diff(self.query_start_loc))[0],
            group_request=self.group_request,
            group_index=self.group_index,
            query_start_loc=self.query_start_loc,
            is_drafting=self.is_drafting,
            drafting=self.drafting,
            context_rows=self.context_rows,
            first_row=first_row,
            last_row=np.append(first_row[1:], self.query_start_loc[-1])[self.drafting] - 1,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The rows of a forward, on the device."""

    rows: Rows  # tokens of the text are ids of the target, masks and separator ids of the drafter
    is_text: torch.Tensor  # [rows] bool: the row's token belongs to the text
    seq_lens: torch.Tensor  # [G] int32: K/V length that each group sees
    causal: torch.Tensor | bool  # [G] int32: rows of a group see only what is before them; or the same for all
    predicting: torch.Tensor  # [D, k] int64: row whose logits give the distribution of each draft
    draft_positions: torch.Tensor  # [D, k] int64


def count_rows(drafter: Drafter, new_text: Integers, is_drafting: NDArray[np.bool_]) -> RowCounts:
    """Reserve rows.

    Args:
        new_text: ``[R]`` tokens, at most, that each request's text has grown by since the drafter saw the text; for
            requests that draft without the token sampled last.
        is_drafting: ``[R]``; the others are in the middle of their prompt.
    """
    if drafter.context == "block-causal":
        length = drafter.block_length
        reach = new_text + np.where(is_drafting, 1 + drafter.num_drafts, 0)
        # The text may begin at the last position of a block.
        num_groups = -(-(length - 1 + reach) // length)
        context_rows = num_groups * length
        group_request, group_index = runs(num_groups)
        sizes = np.full(len(group_request), length)
    else:
        context_rows = new_text + is_drafting
        group_request, group_index = runs(1 + is_drafting.astype(np.int64))
        sizes = np.where(group_index == 0, context_rows[group_request], drafter.rows_behind)
    return RowCounts(
        is_drafting=is_drafting,
        drafting=np.flatnonzero(is_drafting),
        context_rows=context_rows,
        group_request=group_request,
        group_index=group_index,
        query_start_loc=np.cumsum(np.concatenate(([0], sizes))).astype(np.int32),
    )


@dataclass(frozen=True)
class _Groups:
    """The groups on the device: each ``[G]`` int64."""

    start: torch.Tensor  # position of the first row
    seq_lens: torch.Tensor  # K/V length
    end: torch.Tensor  # of the group's rows
    causal: torch.Tensor | bool = False


def lay_out(
    drafter: Drafter,
    counts: dict[str, torch.Tensor],
    *,
    start: torch.Tensor,
    known: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
) -> DraftRows:
    """Fill the reserved rows.

    Args:
        counts: `RowCounts.to_device`.
        start: ``[R]`` int64, position of the first token that the drafter has not seen.
        known: ``[R]`` int64, length of each text: the token sampled last included, or as far as the prompt is
            computed by now.
        tokens: ``[slots, length]``, the texts.
        slots: ``[R]`` int64, row of ``tokens`` of each request.
    """
    if drafter.context == "block-causal":
        start = start - start % drafter.block_length
        groups = _blocks(drafter, counts, start, known)
    else:
        groups = _text_and_masks(drafter, counts, start, known)
    group = counts["row_group"]
    request = counts["group_request"][group]
    offset = iota(len(group), start.device) - counts["query_start_loc"][group]
    positions = groups.start[group] + offset
    is_padding = positions >= groups.end[group]
    positions = positions.masked_fill_(is_padding, 0)

    is_text = positions < known[request]
    text = tokens[slots[request], positions.clamp(max=tokens.shape[1] - 1)].long()
    ids = text.masked_fill_(~is_text, drafter.mask_token_id)
    if drafter.sep_token_id is not None and drafter.context != "block-causal":
        end_of_masks = torch.add(known, counts["is_drafting"], alpha=drafter.num_drafts)
        ids = ids.masked_fill_(positions == end_of_masks[request], drafter.sep_token_id)
    predicting, draft_positions = _predicting(drafter, counts, start, known)
    return DraftRows(
        rows=Rows(tokens=ids, positions=positions, is_padding=is_padding, groups=group),
        is_text=is_text,
        seq_lens=groups.seq_lens.int(),
        causal=groups.causal,
        predicting=predicting,
        draft_positions=draft_positions,
    )


def _blocks(drafter: Drafter, counts: dict[str, torch.Tensor], start: torch.Tensor, known: torch.Tensor) -> _Groups:
    """One group per diffusion block, from position ``start`` [R] on."""
    length, request = drafter.block_length, counts["group_request"]
    block_start = torch.add(start[request], counts["group_index"], alpha=length)
    # Masks to the end of the block: a block is never computed in part.
    text_end = torch.add(known, counts["is_drafting"], alpha=drafter.num_drafts).clamp_(max=drafter.limit)
    is_padding = block_start >= text_end[request]
    block_start = block_start.masked_fill_(is_padding, 0)
    seq_lens = (block_start + length).clamp_(max=drafter.limit)
    return _Groups(block_start, seq_lens, end=seq_lens.masked_fill(is_padding, 0))


def _text_and_masks(
    drafter: Drafter, counts: dict[str, torch.Tensor], start: torch.Tensor, known: torch.Tensor
) -> _Groups:
    """The text from position ``start`` [R] to ``known`` [R], and behind it the masks and the separator."""
    request, is_masks = counts["group_request"], counts["group_index"] == 1
    end = torch.add(known, counts["is_drafting"], alpha=drafter.rows_behind).clamp_(max=drafter.limit)
    seq_lens = end[request]
    text_end = known.clamp(max=drafter.limit)
    causal: torch.Tensor | bool = False
    group_end = torch.where(is_masks, seq_lens, text_end[request])
    if drafter.context == "causal-context":
        causal = (~is_masks).int()
        # A causal mask is aligned to the end of a group, and the text to the group's beginning.
        seq_lens = torch.where(is_masks, seq_lens, (start + counts["context_rows"])[request])
    return _Groups(torch.where(is_masks, known[request], start[request]), seq_lens, group_end, causal)


def _predicting(
    drafter: Drafter, counts: dict[str, torch.Tensor], start: torch.Tensor, known: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row that predicts each draft, and position of each draft: both ``[D, k]`` int64."""
    drafting = counts["drafting"]
    ahead = iota(drafter.num_drafts, start.device)
    draft_positions = known[drafting].unsqueeze(1) + ahead
    # The row of the draft's mask, or the row before.
    from_start = draft_positions - start[drafting].unsqueeze(1) - int(drafter.shifted)
    if drafter.context != "block-causal":
        in_text = ahead < int(drafter.shifted)
        behind_text = counts["context_rows"][drafting].unsqueeze(1) + ahead - int(drafter.shifted)
        from_start = torch.where(in_text, from_start, behind_text)
    # The scheduler takes drafts beyond the limit back, but their rows have to exist.
    rows = counts["first_row"][drafting].unsqueeze(1) + from_start
    return torch.minimum(rows, counts["last_row"].unsqueeze(1)), draft_positions
