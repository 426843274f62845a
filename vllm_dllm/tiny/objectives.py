"""What the tiny models are trained on.

Sources: block diffusion (arXiv 2503.09573), as SDAR trains; masked diffusion with full attention, as LLaDA (arXiv
2502.09992, Algorithm 2) and Dream (arXiv 2508.15487) do; next tokens.
"""

import torch

from vllm_dllm.training.objectives import IGNORE, MIN_RATE, TrainingBatch, block_mask


def corrupt_blocks(
    clean: torch.Tensor,
    trainable: torch.Tensor,
    window_start: torch.Tensor,
    *,
    window_length: int,
    block_length: int,
    mask_token_id: int,
    generator: torch.Generator,
) -> TrainingBatch:
    """Build ``[clean; noisy; noisy]`` with two complementary noisy copies of a window of each sequence.

    Each block draws a masking rate t from U(0, 1) and masks each trainable position with probability t. The
    second copy masks the other trainable positions, so each of the window's is predicted exactly once.

    Args:
        clean: ``[B, L]`` int64, ``L`` a multiple of ``block_length``.
        trainable: ``[B, L]`` bool, positions that may be masked; others (a prompt) stay visible.
        window_start: ``[B]`` int64, a block start; the window ends within the sequence.
        window_length: a multiple of ``block_length``.

    Returns:
        A batch with ``S = L + 2 * window_length`` rows.
    """
    batch, length = clean.shape
    window = window_start.unsqueeze(1) + torch.arange(window_length, device=clean.device)  # [B, W]
    targets = clean.gather(1, window)
    rates = torch.rand(batch, window_length // block_length, generator=generator).to(clean.device)
    draws = torch.rand(batch, window_length, generator=generator).to(clean.device)
    first = draws < rates.repeat_interleave(block_length, dim=1)
    masked = torch.stack((first, ~first)) & trainable.gather(1, window)  # [2, B, W]
    noisy = targets.masked_fill(masked, mask_token_id)
    noisy_targets = targets.expand_as(masked).masked_fill(~masked, IGNORE)
    positions = torch.cat((torch.arange(length, device=clean.device).expand(batch, -1), window, window), dim=1)
    views = torch.arange(3, device=clean.device).repeat_interleave(
        torch.tensor([length, window_length, window_length], device=clean.device)
    )
    return TrainingBatch(
        input_ids=torch.cat((clean, *noisy), dim=1),
        positions=positions,
        mask=block_mask(positions // block_length, views.expand(batch, -1)),
        targets=torch.cat((torch.full_like(clean, IGNORE), *noisy_targets), dim=1),
    )


def visible_keys(lengths: torch.Tensor, length: int) -> torch.Tensor:
    """Full attention over sequences of ``lengths`` ``[B]`` that are padded to ``length``: ``[B, length, length]`` bool.

    Rows of padding see the sequence too (a row that sees nothing has no softmax); nobody reads them.
    """
    keys = torch.arange(length, device=lengths.device) < lengths.unsqueeze(1)
    return keys.unsqueeze(1).expand(-1, length, -1)


def corrupt_responses(
    clean: torch.Tensor,
    trainable: torch.Tensor,
    *,
    mask_token_id: int,
    generator: torch.Generator,
    shift: int = 0,
) -> TrainingBatch:
    """Mask each response at a rate of its own; the loss is LLaDA's, an upper bound of the responses' likelihood.

    A sequence's rate t is uniform on (:data:`MIN_RATE`, 1), stratified: the rates of a batch are spread evenly. Each
    trainable position is masked with probability t. The loss of a sequence is the sum over its masked positions of
    their cross-entropy, divided by t and by its number of trainable positions; the batch's is the mean.

    Args:
        clean: ``[B, L]`` int64.
        trainable: ``[B, L]`` bool, the responses. What is behind the last of them is padding that no row sees.
        shift: row ``i`` predicts token ``i + shift``; position 0 must not be trainable if it is 1.
    """
    batch, length = clean.shape
    device = clean.device
    places = torch.arange(length, device=device)
    lengths = torch.where(trainable, places + 1, 0).amax(dim=1)
    strata = torch.arange(batch) / batch + torch.rand((), generator=generator)
    rates = (MIN_RATE + (1 - MIN_RATE) * (strata % 1)[torch.randperm(batch, generator=generator)]).to(device)
    draws = torch.rand(batch, length, generator=generator).to(device)
    masked = (draws < rates.unsqueeze(1)) & trainable
    weights = 1 / (rates * trainable.sum(dim=1) * batch)
    targets = clean.masked_fill(~masked, IGNORE).roll(-shift, dims=1)
    return TrainingBatch(
        input_ids=clean.masked_fill(masked, mask_token_id),
        positions=places.unsqueeze(0),
        mask=visible_keys(lengths, length),
        targets=targets,
        weights=weights.unsqueeze(1).expand_as(clean),
    )


def causal_mask(length: int, device: torch.device | None = None) -> torch.Tensor:
    """Every row sees itself and the rows before it: ``[1, length, length]`` bool."""
    return torch.ones(1, length, length, dtype=torch.bool, device=device).tril()


def next_tokens(clean: torch.Tensor, trainable: torch.Tensor) -> TrainingBatch:
    """Each trainable token from those before it. Nothing is corrupted.

    Args:
        clean: ``[B, L]`` int64.
        trainable: ``[B, L]`` bool, tokens that are predicted; not the first.
    """
    length = clean.shape[1]
    return TrainingBatch(
        input_ids=clean,
        positions=torch.arange(length, device=clean.device).unsqueeze(0),
        mask=causal_mask(length, clean.device),
        targets=clean.masked_fill(~trainable, IGNORE).roll(-1, dims=1),
    )
