"""Statistics of logits rows, by the implementation for their device."""

import torch

from vllm_dllm.kernels.confidence import RowStats, row_stats_torch


def row_stats(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    round_: torch.Tensor,
    forbidden_token: int,
    with_entropy: bool,
    sampling: bool,
    temperature_applied: bool = False,
    with_margin: bool = False,
) -> RowStats:
    """Choose one token per row and measure how sure the model is of it, in one pass over the logits.

    A row is distributed as ``softmax(logits)`` at temperature 0, as ``softmax(logits / temperature)`` above.
    ``forbidden_token`` (the mask token) is never chosen, but its probability mass stays in the distribution:
    it lowers the confidence of the others. Among equal scores the smallest token id wins.

    Args:
        logits: [rows, vocab] bfloat16, float16 or float32, any row stride, not modified. Entries may be
            ``-inf`` (filtered by top-k, top-p and the like), but not all of a row.
        temperature: [rows] float32, 0 for the most likely token.
        seed: [rows] int64, the request's seed.
        position: [rows] int64, position of the row's token in its sequence.
        round_: [rows] int64, denoising round, so that a position is drawn anew in every round.
        forbidden_token: token id that must not be chosen.
        with_entropy: compute the entropy as well.
        sampling: whether any row may have a temperature above 0. ``False`` is a promise of the caller that
            none has; ``temperature``, ``seed``, ``position`` and ``round_`` are not read then.
        temperature_applied: the logits are divided by the temperature already.
        with_margin: compute the margin as well.

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
    return implementation(
        logits,
        temperature=temperature,
        seed=seed,
        position=position,
        round_=round_,
        forbidden_token=forbidden_token,
        with_entropy=with_entropy,
        sampling=sampling,
        temperature_applied=temperature_applied,
        with_margin=with_margin,
    )
