"""LLaDA's own decoding loop (arXiv 2502.09992, Algorithm 5): one request, a full forward in every step."""

from typing import Any

import torch


@torch.inference_mode()
def decode_window(
    network: Any, prompt: list[int], window: int, block_length: int, mask_token_id: int, threshold: float | None
) -> tuple[list[int], int]:
    """Fill a window behind the prompt greedily, block by block: its tokens, and how many forwards they took.

    Args:
        threshold: each forward unmasks the block's positions with a greater confidence, and always the most confident
            one; ``None``: only that one.
    """
    ids = torch.tensor([[*prompt, *[mask_token_id] * window]])
    length, forwards = ids.shape[1], 0
    positions, mask = torch.arange(length).unsqueeze(0), torch.ones(1, length, length, dtype=torch.bool)
    for start in range(len(prompt), length, block_length):
        rows = (positions >= start) & (positions < start + block_length)
        while (masked := ids[rows] == mask_token_id).any():
            logits = network(ids, positions, mask, rows).float()
            logits[:, mask_token_id] = -torch.inf
            confidence, token = logits.softmax(-1).max(-1)
            confidence = confidence.masked_fill(~masked, -1.0)
            chosen = torch.zeros_like(masked)
            chosen[confidence.argmax()] = True
            if threshold is not None:
                chosen |= confidence > threshold
            ids[rows] = torch.where(chosen, token, ids[rows])
            forwards += 1
    return ids[0, len(prompt) :].tolist(), forwards
