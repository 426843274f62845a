"""What the models are trained on: the tokens that a batch shows, what they see, and which losses count."""

from dataclasses import dataclass

import torch

IGNORE = -100
"""Target of rows without a loss."""

MIN_RATE = 1e-3
"""Masking rates are drawn between this and 1, as LLaDA does, so that 1 / t is bounded."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """One forward of the objective.

    Attributes:
        input_ids: ``[B, S]`` int64.
        positions: ``[B, S]`` or ``[1, S]`` int64, rotary positions.
        mask: ``[B, S, S]`` bool, ``True`` where a query (dim 1) sees a key (dim 2).
        targets: ``[B, S]`` int64, the token each row is to predict, or :data:`IGNORE`.
        weights: ``[B, S]`` float32, factor of each row's loss in a sum; ``None``: the loss is the plain mean.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor | None = None


def block_mask(blocks: torch.Tensor, views: torch.Tensor) -> torch.Tensor:
    """Attention of block diffusion over clean rows and noisy copies of them.

    Every row sees its own block in its own view (bidirectionally) and all clean blocks before it.

    Args:
        blocks: ``[B, S]`` int64, the diffusion block of each row.
        views: ``[B, S]`` int64, 0 for clean rows, the number of the noisy copy for others.

    Returns:
        ``[B, S, S]`` bool.
    """
    query_block, key_block = blocks.unsqueeze(2), blocks.unsqueeze(1)
    query_view, key_view = views.unsqueeze(2), views.unsqueeze(1)
    own_block = (query_block == key_block) & (query_view == key_view)
    return own_block | ((key_view == 0) & (key_block < query_block))
