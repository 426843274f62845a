"""Block diffusion the way SDAR's own ``generate.py`` decodes: Transformers, one request at a time.

This is the baseline of the benchmark. Blocks lie on a grid from position 0. Whole blocks of the prompt are
prefilled in one forward and cached; every denoising forward sees the cache and the current block and leaves
nothing in the cache; when no mask is left, one more forward of the clean block stores it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, Qwen3ForCausalLM


@dataclass(frozen=True)
class Decoded:
    """What one request got and what it cost.

    Attributes:
        tokens: generated tokens, through the first stop token.
        denoising_forwards: forwards that unmasked something.
        store_forwards: forwards that only stored a finished block.
    """

    tokens: list[int]
    denoising_forwards: int
    store_forwards: int

    @property
    def nfe(self) -> int:
        """Model forwards after the prefill."""
        return self.denoising_forwards + self.store_forwards


def load(checkpoint: Path, dtype: str) -> Qwen3ForCausalLM:
    """Load a checkpoint of SDAR's layout whose ``config.json`` says ``qwen3``."""
    return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()


def block_causal(length: int, block_length: int) -> torch.Tensor:
    """``[length, length]`` bool: a row sees its own block and everything before it."""
    blocks = torch.arange(length) // block_length
    return blocks[:, None] >= blocks


def choose(confidence: torch.Tensor, masked: torch.Tensor, quota: int, threshold: float | None) -> torch.Tensor:
    """Positions of a block that a denoising step unmasks.

    Args:
        confidence: ``[block]``, probability of each position's token.
        masked: ``[block]`` bool.
        quota: positions per step.
        threshold: unmask all positions above it instead, if these are at least ``quota``.

    Returns:
        ``[block]`` bool.
    """
    confidence = confidence.masked_fill(~masked, -torch.inf)
    if threshold is not None:
        above = confidence > threshold
        if above.sum() >= quota:
            return above
    chosen = torch.zeros_like(masked)
    chosen[confidence.topk(min(quota, int(masked.sum()))).indices] = True
    return chosen


@torch.inference_mode()
def generate(
    model: Qwen3ForCausalLM,
    prompt: list[int],
    max_tokens: int,
    *,
    block_length: int,
    mask_token_id: int,
    stop_token_ids: frozenset[int],
    threshold: float | None = None,
    quota: int = 1,
) -> Decoded:
    """Decode one request greedily.

    Args:
        threshold: confidence that unmasks a position; ``None``: the ``quota`` most confident ones per step.
        quota: positions per step, with a threshold at least.
    """
    cache = DynamicCache()

    def forward(start: int, end: int, mask: torch.Tensor) -> torch.Tensor:
        """Logits ``[end - start, vocab]``; the cache gets these rows too."""
        return model(
            canvas[:, start:end],
            attention_mask=mask[None, None],
            position_ids=torch.arange(start, end)[None],
            past_key_values=cache,
            use_cache=True,
        ).logits[0]

    prefilled = len(prompt) // block_length * block_length
    length = -(-(len(prompt) + max_tokens) // block_length) * block_length
    canvas = torch.full((1, length), mask_token_id)
    canvas[0, : len(prompt)] = torch.tensor(prompt)
    if prefilled:
        forward(0, prefilled, block_causal(prefilled, block_length))

    denoising_forwards = store_forwards = 0
    end = prefilled
    for start in range(prefilled, length, block_length):
        end = start + block_length
        block = canvas[0, start:end]
        everything = torch.ones(block_length, end, dtype=torch.bool)
        while (masked := block == mask_token_id).any():
            confidence, tokens = forward(start, end, everything).softmax(-1).max(-1)
            cache.crop(-block_length)
            chosen = choose(confidence, masked, quota, threshold)
            block[chosen] = tokens[chosen]
            denoising_forwards += 1
        forward(start, end, everything)
        store_forwards += 1
        if not stop_token_ids.isdisjoint(canvas[0, len(prompt) : end].tolist()):
            break

    tokens_made = canvas[0, len(prompt) : min(end, len(prompt) + max_tokens)].tolist()
    stops = [i for i, token in enumerate(tokens_made) if token in stop_token_ids]
    return Decoded(tokens_made[: stops[0] + 1] if stops else tokens_made, denoising_forwards, store_forwards)
