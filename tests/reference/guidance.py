"""Classifier-free guidance of models with full attention, written for the eye."""

import torch
from torch import Tensor

from .bidirectional import BidirectionalModel, Cache


class GuidedModel:
    """A model whose logits are guided: to a decoder it is a model like any other.

    Beside every sequence goes its unconditional branch, whose prompt is masked. What it keeps is the K/V of both, the
    layers of the sequence first.
    """

    def __init__(self, model: BidirectionalModel, prompt_length: int, cfg_scale: float, mask_id: int):
        self.model, self.prompt_length, self.cfg_scale, self.mask_id = model, prompt_length, cfg_scale, mask_id

    def __call__(self, ids: Tensor, start: int = 0, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """As ``BidirectionalModel``: guided logits [B, N, V] and K/V of ``ids`` [B, N] at positions from ``start``."""
        hidden = torch.arange(start, start + ids.shape[1]) < self.prompt_length
        layers = self.model.layers
        own, of_unconditional = (None, None) if cache is None else (cache[:layers], cache[layers:])
        logits, kv = self.model(ids, start, own)
        unconditional_logits, unconditional_kv = self.model(
            ids.masked_fill(hidden, self.mask_id), start, of_unconditional
        )
        return unconditional_logits + (self.cfg_scale + 1) * (logits - unconditional_logits), kv + unconditional_kv


@torch.inference_mode()
def llada_sample(
    model: BidirectionalModel,
    prompt: list[int],
    *,
    mask_id: int,
    gen_length: int,
    block_length: int,
    steps: int,
    cfg_scale: float,
) -> list[int]:
    """LLaDA's own sampler (arXiv 2502.09992, low-confidence remasking) without any cache: both texts whole, each time.

    As many positions per step, ``steps`` over the window, as go into a block without remainder.
    """
    text = torch.tensor(prompt + [mask_id] * gen_length)
    per_step = gen_length // steps
    for start in range(len(prompt), len(text), block_length):
        block = slice(start, start + block_length)
        for _ in range(block_length // per_step):
            unconditional = text.clone()
            unconditional[: len(prompt)] = mask_id
            logits, unconditional_logits = model(torch.stack((text, unconditional)))[0][:, block].double()
            guided = unconditional_logits + (cfg_scale + 1) * (logits - unconditional_logits)
            confidence = guided.softmax(dim=1)
            confidence[:, mask_id] = 0.0
            best, tokens = confidence.max(dim=1)
            chosen = best.masked_fill(text[block] != mask_id, -1.0).topk(per_step).indices
            text[start + chosen] = tokens[chosen]
    return text[len(prompt) :].tolist()
