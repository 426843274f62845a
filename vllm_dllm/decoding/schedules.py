"""How far a block is to be at a step: quotas, timesteps, and which blocks of a window have begun.

Nothing here waits for the device.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

LEVELS = 1_000_000
"""Shares of a block are compared in whole millionths: a quotient of floats would be rounded otherwise elsewhere."""


def share_level(share: float) -> int:
    """A share of a block's positions, 0 to 1, in millionths."""
    return round(share * LEVELS)


def multi_block_progress(
    masked: Tensor, generated: Tensor, add_level: Tensor, full_level: Tensor, block_length: int
) -> tuple[Tensor, Tensor]:
    """Which blocks of a window ``MULTI_BLOCK`` has begun, and which are fully activated (D2F, arXiv 2508.09192).

    A block begins once the share ``add_level`` of the block in front is decoded, and is fully activated once the share
    ``full_level`` of the block in front is. The first block of a window is both: what is in front of a window is final.

    Args:
        masked: [B, W] bool: positions without a token.
        generated: [B, W] bool: positions that the request generates and has not emitted. A block without any is
            decoded.
        add_level, full_level: [B] int64: of ``share_level``.

    Returns:
        [B, w] bool each.
    """
    total = generated.unflatten(1, (-1, block_length)).sum(dim=2)[:, :-1]
    decoded = (total - masked.unflatten(1, (-1, block_length)).sum(dim=2)[:, :-1]) * LEVELS
    reaches = pad((decoded >= total * add_level.unsqueeze(1)).long(), (1, 0), value=1)
    full = pad((decoded >= total * full_level.unsqueeze(1)).long(), (1, 0), value=1)
    return reaches.cumprod(dim=1).bool(), full.bool()


def quota_of_step(quota: Tensor, quota_remainder: Tensor, step: Tensor) -> Tensor:
    """Tokens of denoising step ``step`` (from 0, restarting in every block); one more in the first steps. [B] int64."""
    return quota + (step < quota_remainder)


def timestep_ratios(steps: int, eps: float = 1e-3) -> Tensor:
    """Share of the masked positions that each step of Dream's timestep schedule unmasks.

    Time runs evenly from 1 down to ``eps``; a step from t to s unmasks 1 - s / t, the last step all that is left.

    Returns:
        [steps] float32, on the CPU.
    """
    times = torch.linspace(1, eps, steps + 1, dtype=torch.float32, device="cpu")
    ratios = 1 - times[1:] / times[:-1]
    ratios[-1] = 1
    return ratios
