"""What the rows of a drafter's forward are: one forward drafts k tokens for every request of the batch.

A request's rows are the text that the drafter has not seen yet, k masks behind it, and a separator where the drafter
was trained with one. How many tokens of the last drafts the target accepted is known on the device only, so the host
reserves rows for all of them; those that stay over are padding, which writes no K/V and which nobody reads. Rows come
in *groups*, each a request of its own to the attention backend, with the K/V length it sees:

==============  ===============================================================  ==================================
context         groups of a request                                              see
==============  ===============================================================  ==================================
full            the new text; the masks with the separator                       everything, both
causal-context  the new text; the masks with the separator                       what is before a row; everything
block-causal    one per diffusion block, from the one the new text begins in to  all up to the end of their block,
                that of the k-th mask, with masks to its end                     the masks of earlier blocks too
==============  ===============================================================  ==================================

All K/V of a layer is written before its attention runs. K/V of accepted text stays in the cache: exact with a causal
context, and with blocks, of which an unfinished one is computed again; with ``full`` it is what it was when the text
was new.

Source: DEER (arXiv 2512.15176), Section 3.2; its figure 3 puts the separator behind the masks.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

Integers = NDArray[np.int64]

Context = Literal["full", "causal-context", "block-causal"]


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """What never changes while the engine lives.

    Attributes:
        num_drafts: k.
        context: what the rows of the text see, see above.
        shifted: row i predicts position i + 1.
        mask_token_id: what stands where a token is to be drafted.
        sep_token_id: what stands behind the masks, if anything does. Not with blocks, which end in masks.
        block_length: diffusion block length, where context is ``block-causal``.
        limit: positions from here on are never forwarded.
    """

    num_drafts: int
    context: Context
    shifted: bool
    mask_token_id: int
    sep_token_id: int | None
    block_length: int
    limit: int

    @property
    def rows_behind(self) -> int:
        """Rows behind the text, of masks and the separator."""
        if self.context == "block-causal":
            return self.num_drafts + self.block_length - 1
        return self.num_drafts + (self.sep_token_id is not None)

    @property
    def extra_rows(self) -> int:
        """Rows of a request, at most, over those the target has of it in the same step."""
        before = self.block_length - 1 if self.context == "block-causal" else 0
        # The token that the target has just sampled is in none of its rows.
        return before + 1 + self.rows_behind


@dataclass(frozen=True)
class RowCounts:
    """What the host knows of a forward with R requests, D of which draft, in G groups.

    Attributes:
        drafting: ``[D]`` int64, the requests that draft, in the order of the batch.
        first_row: ``[R]``, of each request.
        context_rows: ``[R]``, rows of each request's text, padding included; all its rows with blocks.
        group_request: ``[G]``, request of each group.
        group_index: ``[G]``, which of its request's groups it is.
        group_start: ``[G + 1]`` int32, first row of each group.
    """

    drafting: Integers
    first_row: Integers
    context_rows: Integers
    group_request: Integers
    group_index: Integers
    group_start: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        return int(self.group_start[-1])


@dataclass(frozen=True)
class DraftRows:
    """The rows of a forward, on the device.

    Attributes:
        input_ids: ``[rows]`` int32.
        positions: ``[rows]`` int64.
        is_padding: ``[rows]`` bool: write no K/V.
        is_text: ``[rows]`` bool: `input_ids` is the target's id of a token of the text.
        groups: ``[rows]`` int64, group of each row.
        seq_lens: ``[G]`` int32, K/V length that each group sees.
        causal: ``[G]`` int32, whether rows of a group see only what is before them; or the same for all.
        predicting: ``[D, k]`` int64, row whose logits are the law of each draft.
        draft_positions: ``[D, k]`` int64, position of each draft.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    is_padding: torch.Tensor
    is_text: torch.Tensor
    groups: torch.Tensor
    seq_lens: torch.Tensor
    causal: torch.Tensor | bool
    predicting: torch.Tensor
    draft_positions: torch.Tensor


def count_rows(drafter: Drafter, new_text: Integers, is_drafting: NDArray[np.bool_]) -> RowCounts:
    """Reserve rows.

    Args:
        new_text: ``[R]`` tokens, at most, that each request's text has grown by since the drafter saw it; for those
            that draft without the token sampled last.
        is_drafting: ``[R]``; the others are in the middle of their prompt.
    """
    drafting = np.flatnonzero(is_drafting)
    requests = np.arange(len(new_text))
    if drafter.context == "block-causal":
        length = drafter.block_length
        reach = new_text + np.where(is_drafting, 1 + drafter.num_drafts, 0)
        # The text may begin at the last position of a block.
        num_groups = -(-(length - 1 + reach) // length)
        group_request = np.repeat(requests, num_groups)
        sizes = np.full(len(group_request), length)
        context_rows = num_groups * length
        rows = context_rows
    else:
        context_rows = new_text + is_drafting
        num_groups = 1 + is_drafting.astype(np.int64)
        group_request = np.repeat(requests, num_groups)
        is_first = np.ones(len(group_request), dtype=bool)
        is_first[1:] = group_request[1:] != group_request[:-1]
        sizes = np.where(is_first, context_rows[group_request], drafter.rows_behind)
        rows = context_rows + is_drafting * drafter.rows_behind
    group_index = np.arange(len(group_request)) - (np.cumsum(num_groups) - num_groups)[group_request]
    return RowCounts(
        drafting=drafting,
        first_row=np.cumsum(rows) - rows,
        context_rows=context_rows,
        group_request=group_request,
        group_index=group_index,
        group_start=np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
    )


def lay_out(
    drafter: Drafter,
    counts: RowCounts,
    counts_on_device: torch.Tensor,
    *,
    start: torch.Tensor,
    known: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
) -> DraftRows:
    """Fill the reserved rows.

    Args:
        counts_on_device: `pack` of the counts.
        start: ``[R]`` int64, position of the first token that the drafter has not seen.
        known: ``[R]`` int64, length of each text: the token sampled last included, or as far as its prompt is
            computed by now.
        tokens: ``[slots, length]``, the texts.
        slots: ``[R]`` int64, row of ``tokens`` of each request.
    """
    num_reqs, num_groups, num_drafting = len(slots), len(counts.group_request), len(counts.drafting)
    # Both are read often below; the rest is one value per request or group.
    group, group_request, group_index, group_start, first_row, context_rows, is_drafting, drafting = (
        counts_on_device.split(
            [counts.num_rows, num_groups, num_groups, num_groups, num_reqs, num_reqs, num_reqs, num_drafting]
        )
    )
    request = group_request[group]
    offset = torch.arange(counts.num_rows, device=start.device) - group_start[group]
    drafts = drafter.num_drafts * is_drafting
    causal: torch.Tensor | bool = False
    if drafter.context == "block-causal":
        length = drafter.block_length
        start = torch.div(start, length, rounding_mode="floor") * length
        block_start = start[group_request] + group_index * length
        # Masks to the end of the block: a block is never computed in part.
        is_real = block_start < (known + drafts).clamp(max=drafter.limit)[group_request]
        block_start = torch.where(is_real, block_start, 0)
        end = (block_start + length).clamp(max=drafter.limit)
        seq_lens = end
        positions = block_start[group] + offset
        is_padding = ~is_real[group] | (positions >= drafter.limit)
    else:
        behind = group_index == 1
        group_first = torch.where(behind, known[group_request], start[group_request])
        positions = group_first[group] + offset
        end = (known + is_drafting * drafter.rows_behind).clamp(max=drafter.limit)
        is_padding = positions >= torch.where(behind, end[group_request], known[group_request])[group]
        seq_lens = end[group_request]
        if drafter.context == "causal-context":
            causal = (~behind).int()
            # The mask is aligned to the end of a group, and the text to its beginning.
            seq_lens = torch.where(behind, seq_lens, (start + context_rows)[group_request])
    is_padding |= positions >= drafter.limit
    positions = torch.where(is_padding, 0, positions)

    text = tokens[slots[request], positions.clamp(max=tokens.shape[1] - 1)]
    is_text = positions < known[request]
    input_ids = torch.where(is_text, text, drafter.mask_token_id)
    if drafter.sep_token_id is not None and drafter.context != "block-causal":
        input_ids = torch.where(positions == (known + drafts)[request], drafter.sep_token_id, input_ids)

    # The row that predicts each draft: that of its mask, or the one before.
    ahead = torch.arange(drafter.num_drafts, device=start.device)
    draft_positions = known[drafting].unsqueeze(1) + ahead
    from_start = draft_positions - int(drafter.shifted) - start[drafting].unsqueeze(1)
    if drafter.context != "block-causal":
        in_text = ahead < int(drafter.shifted)
        behind_text = context_rows[drafting].unsqueeze(1) + ahead - int(drafter.shifted)
        from_start = torch.where(in_text, from_start, behind_text)
    # Drafts beyond the limit are nobody's, but their rows have to be some.
    num_rows = torch.full_like(first_row, counts.num_rows)
    last_row = torch.cat((first_row[1:], num_rows[:1]))[drafting].unsqueeze(1) - 1
    predicting = torch.minimum(first_row[drafting].unsqueeze(1) + from_start, last_row)
    return DraftRows(
        input_ids=input_ids.int(),
        positions=positions,
        is_padding=is_padding,
        is_text=is_text,
        groups=group,
        seq_lens=seq_lens.int(),
        causal=causal,
        predicting=predicting,
        draft_positions=draft_positions,
    )


def pack(counts: RowCounts, num_reqs: int) -> Integers:
    """What :func:`lay_out` needs of the counts on the device, as one array for one copy."""
    sizes = np.diff(counts.group_start)
    is_drafting = np.zeros(num_reqs, dtype=np.int64)
    is_drafting[counts.drafting] = 1
    return np.concatenate(
        (
            np.repeat(np.arange(len(sizes)), sizes),
            counts.group_request,
            counts.group_index,
            counts.group_start[:-1],
            counts.first_row,
            counts.context_rows,
            is_drafting,
            counts.drafting,
        )
    ).astype(np.int64)
