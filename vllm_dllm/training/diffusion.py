"""Block diffusion: the attention mask, the corruption of training text, and a plain decoding loop.

Source: Arriola et al., Block Diffusion (arXiv 2503.09573), as SDAR trains and decodes: blocks are anchored at
position 0, and row ``i`` predicts position ``i``.
"""

from dataclasses import dataclass

import torch

from vllm_dllm.training.network import Network

IGNORE = -100
"""Target of rows without a loss."""


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


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Outcome of :func:`decode_blocks`.

    Attributes:
        tokens: per prompt, everything after the prompt up to the end of the last decoded block.
        forwards: per prompt, denoising forwards.
        confidences: ``[n]`` float32, of all masked positions in all forwards.
    """

    tokens: list[list[int]]
    forwards: list[int]
    confidences: torch.Tensor


@torch.inference_mode()
def decode_blocks(
    network: Network,
    prompts: list[list[int]],
    *,
    length: int,
    block_length: int,
    mask_token_id: int,
    stop_token_ids: list[int],
    threshold: float | None,
) -> Decoded:
    """Decode greedily, block by block, without a cache: the plain loop that a served model has to agree with.

    Args:
        prompts: token ids of each prompt, shorter than ``length``.
        length: prompt and answer together end here; a multiple of ``block_length``.
        stop_token_ids: decoding of a prompt ends after the block that contains one of them.
        threshold: each forward unmasks the positions with a greater confidence, and always the most confident
            one; ``None``: only that one (one token per step).
    """
    device = network.lm_head.weight.device
    canvas = torch.full((len(prompts), length), mask_token_id, device=device)
    for row, prompt in zip(canvas, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    block = prompt_lengths // block_length
    forwards = torch.zeros_like(block)
    running = torch.ones_like(block, dtype=torch.bool)
    confidences: list[torch.Tensor] = []
    positions = torch.arange(length, device=device).unsqueeze(0)
    stops = torch.tensor(stop_token_ids, device=device)
    while running.any():
        active = running.nonzero().squeeze(1)
        end = int(block[active].max() + 1) * block_length
        ids = canvas[active, :end]
        grid = positions[:, :end] // block_length
        rows = grid == block[active].unsqueeze(1)  # [n, end]
        logits = network(ids, positions[:, :end], block_mask(grid, torch.zeros_like(grid)), rows).float()
        logits[:, mask_token_id] = float("-inf")
        confidence, token = logits.softmax(-1).max(-1)
        masked = (ids[rows] == mask_token_id).unflatten(0, (-1, block_length))
        confidence = confidence.view_as(masked).masked_fill(~masked, -1.0)
        confidences.append(confidence[masked])
        chosen = torch.zeros_like(masked).scatter(1, confidence.argmax(1, keepdim=True), True)
        if threshold is not None:
            chosen |= confidence > threshold
        ids[rows] = torch.where(chosen.flatten(), token, ids[rows])
        canvas[active, :end] = ids
        forwards[active] += 1
        finished = active[(masked & ~chosen).sum(1) == 0]
        answers = (positions >= prompt_lengths[finished, None]) & torch.isin(canvas[finished], stops)
        block[finished] += 1
        running[finished] = ~answers.any(1) & (block[finished] * block_length < length)
    answer_ends = (block * block_length).tolist()
    tokens = [row[len(prompt) : end].tolist() for row, prompt, end in zip(canvas, prompts, answer_ends, strict=True)]
    return Decoded(tokens=tokens, forwards=forwards.tolist(), confidences=torch.cat(confidences).cpu())
