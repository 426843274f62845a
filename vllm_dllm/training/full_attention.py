"""Masked diffusion with full attention, as LLaDA and Dream train and decode: the objective and a plain decoding loop.

Sources: LLaDA (arXiv 2502.09992, Algorithms 2 and 5), Dream (arXiv 2508.15487; each row predicts the next position's
token). A sequence is a prompt and a window that follows it; every row sees every
row. ``shift`` says which row predicts which token: row ``i`` that of position ``i + shift``.
"""

from dataclasses import dataclass

import torch

from vllm_dllm.training.diffusion import IGNORE, Decoded, TrainingBatch
from vllm_dllm.training.network import Network

MIN_RATE = 1e-3
"""Masking rates are drawn between this and 1, as LLaDA does, so that 1 / t is bounded."""

_ROWS_PER_FORWARD = 1 << 15


def visible_keys(lengths: torch.Tensor, length: int) -> torch.Tensor:
    """Full attention over sequences of ``lengths`` ``[B]`` that are padded to ``length``: ``[B, length, length]`` bool.

    Rows of padding see the sequence too (a row that sees nothing has no softmax); nobody reads them.
    """
    keys = torch.arange(length, device=lengths.device) < lengths.unsqueeze(1)
    return keys.unsqueeze(1).expand(-1, length, -1)


def corrupt_responses(
    clean: torch.Tensor,
    trainable: torch.Tensor,
    window_start: torch.Tensor,
    *,
    window_length: int,
    block_length: int,
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
        window_start, window_length, block_length: of block diffusion, not used.
        shift: see above; position 0 must not be trainable if it is 1.
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


@dataclass
class _Canvas:
    """Prompts with a masked window behind each.

    Attributes:
        ids: ``[n, S]`` int64; sequences begin at column 0 and have padding behind the window.
        window: ``[n, W]`` int64, the columns of each window.
        lengths: ``[n]`` int64, of prompt and window.
    """

    ids: torch.Tensor
    window: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, prompts: list[list[int]], window: int, mask_token_id: int, device: torch.device) -> "_Canvas":
        starts = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids = torch.full((len(prompts), int(starts.max()) + window), mask_token_id, device=device)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt, device=device)
        return cls(ids, starts.unsqueeze(1) + torch.arange(window, device=device), starts + window)


def _logits(
    network: Network, ids: torch.Tensor, lengths: torch.Tensor, predicted: torch.Tensor, shift: int
) -> torch.Tensor:
    """Logits of the tokens at ``predicted`` ``[n, K]``, a stretch of columns in ascending order: ``[n, K, V]``."""
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    size = max(1, _ROWS_PER_FORWARD // ids.shape[1])
    logits = []
    for start in range(0, len(ids), size):
        chunk = slice(start, start + size)
        rows = torch.zeros_like(ids[chunk], dtype=torch.bool).scatter(1, predicted[chunk] - shift, True)
        mask = visible_keys(lengths[chunk], ids.shape[1])
        logits.append(network(ids[chunk], positions, mask, rows).float())
    return torch.cat(logits).unflatten(0, predicted.shape)


@torch.inference_mode()
def decode_windows(
    network: Network,
    prompts: list[list[int]],
    *,
    length: int,
    block_length: int,
    mask_token_id: int,
    stop_token_ids: list[int],
    threshold: float | None,
    tokens_per_step: int = 1,
    shift: int = 0,
) -> Decoded:
    """Decode greedily by semi-autoregressive blocks and low confidence, with a full forward in every step.

    LLaDA's own loop; Dream's with the logits shifted.

    Args:
        prompts: token ids of each prompt, at least one each.
        length: the longest prompt and its window end here at the latest. The window, of as many tokens for each prompt,
            is the largest multiple of ``block_length`` that this allows.
        block_length: blocks begin at the prompt's end.
        stop_token_ids: decoding of a prompt ends after the block that contains one of them; the window is there
            nevertheless. Empty: never.
        threshold: each forward unmasks the block's positions with a greater confidence, and always the most confident.
            ``None``: the ``tokens_per_step`` most confident.
    """
    window = (length - max(map(len, prompts))) // block_length * block_length
    if window <= 0:
        raise ValueError(f"prompts of up to {max(map(len, prompts))} tokens leave no block within {length}")
    device = network.lm_head.weight.device
    canvas = _Canvas.of(prompts, window, mask_token_id, device)
    block = torch.zeros(len(prompts), dtype=torch.long, device=device)
    forwards = torch.zeros_like(block)
    running = torch.ones_like(block, dtype=torch.bool)
    stops = torch.tensor(stop_token_ids, dtype=torch.long, device=device)
    confidences: list[torch.Tensor] = []
    within = torch.arange(block_length, device=device)
    while running.any():
        active = running.nonzero().squeeze(1)
        columns = canvas.window[active].gather(1, block[active].unsqueeze(1) * block_length + within)  # [n, block]
        tokens = canvas.ids[active].gather(1, columns)
        logits = _logits(network, canvas.ids[active], canvas.lengths[active], columns, shift)
        logits[..., mask_token_id] = -torch.inf
        confidence, token = logits.softmax(-1).max(-1)
        masked = tokens == mask_token_id
        confidence = confidence.masked_fill(~masked, -1.0)
        confidences.append(confidence[masked])
        first = confidence.argsort(dim=1, descending=True, stable=True)
        count = 1 if threshold is not None else tokens_per_step
        chosen = torch.zeros_like(masked).scatter(1, first[:, :count], True) & masked
        if threshold is not None:
            chosen |= confidence > threshold
        tokens = torch.where(chosen, token, tokens)
        canvas.ids[active] = canvas.ids[active].scatter(1, columns, tokens)
        forwards[active] += 1
        complete = (tokens != mask_token_id).all(1)
        block[active] += complete
        stopped = complete & torch.isin(tokens, stops).any(1)
        running[active] = ~stopped & (block[active] * block_length < window)
    decoded = canvas.ids.gather(1, canvas.window).tolist()
    ends = (block * block_length).tolist()
    return Decoded(
        tokens=[row[:end] for row, end in zip(decoded, ends, strict=True)],
        forwards=forwards.tolist(),
        confidences=torch.cat(confidences).cpu(),
    )
