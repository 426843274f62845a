"""Statistics of logits rows, by the implementation for their device."""

import torch

from vllm_dllm.kernels.confidence import Draws, RowStats, row_stats_torch


def row_stats(
    logits: torch.Tensor,
    draws: Draws | None,
    *,
    forbidden_token: int,
    with_entropy: bool = False,
    with_margin: bool = False,
) -> RowStats:
    """Choose one token per row and measure how sure the model is of it, in one pass over the logits.

    A row is distributed as ``softmax(logits)`` at temperature 0, as ``softmax(logits / temperature)`` above.
    ``forbidden_token`` (the mask token) is never chosen, but its probability mass stays in the distribution:
    it lowers the confidence of the others. Among equal scores the smallest token id wins.

    Args:
        logits: [rows, vocab] bfloat16, float16 or float32, any row stride, not modified. Entries may be
            ``-inf`` (filtered by top-k, top-p and the like), but not all of a row.
        draws: how tokens are drawn; ``None``: every row gets its most likely token.
        forbidden_token: token id that must not be chosen.
        with_entropy, with_margin: what to compute beside token and confidence.

    Raises:
        ValueError: ``forbidden_token`` is not a column of ``logits``.
    """
    if not 0 <= forbidden_token < logits.shape[1]:
        raise ValueError(f"forbidden_token must be in [0, {logits.shape[1]}), got {forbidden_token}")
    if logits.is_cuda:
        # Triton is absent from CPU-only installations.
        from vllm_dllm.kernels.confidence_triton import row_stats_triton as implementation
    else:
        implementation = row_stats_torch
    return implementation(logits, draws, forbidden_token, with_entropy, with_margin)
