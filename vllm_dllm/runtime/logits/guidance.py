"""Classifier-free guidance, as LLaDA's sampler does it (arXiv 2502.09992, 2410.18514).

A guided request computes its text and an *unconditional branch*, the same text with its prompt masked::

    guided = unconditional + (cfg_scale + 1) * (text - unconditional)
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Guidance:
    """The guided rows of a step's logits, T of them."""

    rows: torch.Tensor
    """[T] int64: the text's rows. Those of the unconditional branches are the last T, in the same order."""
    weight: torch.Tensor
    """[T, 1] float32: ``cfg_scale + 1`` of the row's request."""

    def apply(self, logits: torch.Tensor, values_at_a_time: int) -> None:
        """Put guided logits in the place of the text's.

        Args:
            logits: [rows, vocab]; only ``rows`` of them change.
            values_at_a_time: logits that are computed in fp32 together.
        """
        size = max(1, values_at_a_time // logits.shape[1])
        unconditional = logits[len(logits) - len(self.rows) :]
        parts = zip(self.rows.split(size), self.weight.split(size), unconditional.split(size), strict=True)
        for rows, weight, part in parts:
            part = part.float()
            guided = logits[rows].float().sub_(part).mul_(weight).add_(part)
            logits[rows] = guided.to(logits.dtype)
