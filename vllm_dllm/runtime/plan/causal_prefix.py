"""Views of blocks whose rows before the first mask see only what is before them (S2D2's ``causal_drafts``).

All rows of a view have one mask, so each group of a decoding request has two views: the causal rows of its block, and
the rows behind. A group without causal rows is cut as well, behind its first row, and both of its views see the whole
block. Only the device knows where a block has its first mask. The number of views, and the rows of the longest, are the
same wherever that is.
"""

import numpy as np
import torch

from vllm_dllm.runtime.plan.rows import DeviceViews


def causal_rows(tokens: torch.Tensor, drafts: torch.Tensor, mask_token_id: int) -> torch.Tensor:
    """[N] int64: rows of each group before its block's first mask; 0 in groups that do not draft.

    Args:
        tokens: [N, L] int64.
        drafts: [N] bool: the forward drafts the group's block.
    """
    # Without a mask nothing is drafted, and argmax is 0.
    return (tokens == mask_token_id).long().argmax(dim=1) * drafts


def in_two_views(views: DeviceViews, rows: torch.Tensor, length: int) -> DeviceViews:
    """``views`` with two views of each of the first N groups.

    Args:
        rows: [N] int64: causal rows of each group, below ``length``.
        length: rows of each group, at least 2.
    """
    num_groups, first = len(rows), rows.clamp(min=1).int()
    causal = views.causal
    if not isinstance(causal, torch.Tensor):
        causal = torch.full_like(views.seq_lens, causal)
    start, end, table, behind = (
        values[:num_groups] for values in (views.query_start_loc, views.seq_lens, views.block_table, causal)
    )
    before = behind | (rows > 0).int()

    def both(one: torch.Tensor, other: torch.Tensor, of_all: torch.Tensor) -> torch.Tensor:
        return torch.cat((torch.stack((one, other), dim=1).flatten(0, 1), of_all[num_groups:]))

    return DeviceViews(
        query_start_loc=both(start, start + first, views.query_start_loc),
        # A causal mask is aligned to the end of a view.
        seq_lens=both(torch.where(before.bool(), end - length + first, end), end, views.seq_lens),
        block_table=both(table, table, views.block_table),
        causal=both(before, behind, causal),
    )


def starts_of_two_views(query_start_loc: np.ndarray, num_groups: int) -> np.ndarray:
    """First rows of two views of each of the first ``num_groups`` groups, as the host knows them: one row in the first.

    Args:
        query_start_loc: [G + 1] int32.
    """
    starts = query_start_loc[:num_groups, None] + np.arange(2, dtype=np.int32)
    return np.concatenate((starts.ravel(), query_start_loc[num_groups:]))
