"""The networks that are trained: transformers' Qwen3, Qwen2 and Llama, called with any attention mask.

SDAR is a Qwen3, Dream and Open-dCoder are Qwen2, LLaDA is a Llama; only the mask is another. `layouts` knows the names
that their releases give the tensors. ``tests/training`` compares the logits with those of the unchanged classes and of
the official LLaDA and Dream.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


@cache
def xformers_attention() -> Any:
    """The module ``xformers.ops.fmha`` if it is installed and there is a CUDA device to run it on, else ``None``."""
    if not torch.cuda.is_available():
        return None
    try:
        from xformers.ops import fmha
    except ImportError:
        return None
    return fmha


def _attend_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Full attention within each of the sequences of ``lengths`` that one row holds, end to end.

    Args:
        q, k, v: ``[1, heads, S, D]``, with as many heads each.
        lengths: ``[n]`` int64, of sum S.

    Returns:
        ``[1, S, heads, D]``.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    fmha = xformers_attention()
    if fmha is not None:
        bias = fmha.BlockDiagonalMask.from_seqlens(lengths.tolist(), device=q.device)
        return fmha.memory_efficient_attention(q, k, v, attn_bias=bias)
    sizes = lengths.tolist()
    q, k, v = (
        nn.utils.rnn.pad_sequence(list(x.squeeze(0).split(sizes)), batch_first=True).transpose(1, 2) for x in (q, k, v)
    )
    present = torch.arange(q.shape[2], device=q.device) < lengths.unsqueeze(1)  # [n, longest]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=present[:, None, None])
    return mixed.transpose(1, 2)[present].unsqueeze(0)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_lengths: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface of attention: ``query`` ``[B, heads, S, D]``, the result ``[B, S, heads, D]``."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # RMS norms leave autocast's dtype
    if packed_lengths is None:
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, enable_gqa=True)
        return mixed.transpose(1, 2).contiguous(), None
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return _attend_packed(query, key, value, packed_lengths), None


_ATTENTION = "vllm_dllm"
# Without a function for masks of its own, transformers hands a four-dimensional mask through and makes no other.
AttentionInterface.register(_ATTENTION, _attend)


LOSS_ROWS = 1024
"""Rows of logits at a time. The backward pass computes them again: of 150,000 tokens, a row takes 2 MB."""


class Network(PreTrainedModel):
    """A language model without an attention pattern of its own."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the chosen rows, or the losses of their targets.

        Args:
            input_ids: ``[B, S]`` int64.
            positions: ``[B, S]`` or ``[1, S]`` int64, rotary positions.
            mask: ``[B, S, S]`` or ``[1, S, S]`` bool, ``True`` where a query (dim 1) sees a key (dim 2). Or, with
                B = 1, ``[n]`` int64: the lengths of n sequences, end to end, each of which sees itself.
            rows: ``[B, S]`` bool, the rows whose logits are wanted.
            targets: ``[rows.sum()]`` int64. With them, no more than `LOSS_ROWS` rows of logits are in memory.

        Returns:
            ``[rows.sum(), vocab_size]`` logits, or the cross-entropies of the targets, ``[rows.sum()]`` float32.
        """
        seen = {"packed_lengths": mask} if mask.dim() == 1 else {"attention_mask": mask.unsqueeze(1)}
        hidden = self.model(input_ids=input_ids, position_ids=positions, use_cache=False, **seen).last_hidden_state
        chosen = hidden[rows]
        if targets is None:
            return self.lm_head(chosen)
        if len(chosen) <= LOSS_ROWS:
            return self._losses(chosen, targets)
        parts = zip(chosen.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True)
        return torch.cat([checkpoint(self._losses, *part, use_reentrant=False) for part in parts])

    def _losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm_head(hidden).float(), targets, reduction="none")


class Qwen3Network(Network, Qwen3ForCausalLM):
    """SDAR's."""


class Qwen2Network(Network, Qwen2ForCausalLM):
    """Dream's, Open-dCoder's and the autoregressive models'."""


class LlamaNetwork(Network, LlamaForCausalLM):
    """LLaDA's."""


_CLASSES = {Qwen3Config: Qwen3Network, Qwen2Config: Qwen2Network, LlamaConfig: LlamaNetwork}
"""By transformers' config, or one that is derived from it."""


def build_network(config: PreTrainedConfig) -> Network:
    """A network in float32 with new weights: matrices are normal with deviation 0.02, biases 0."""
    config._attn_implementation = _ATTENTION
    return next(network for kind, network in _CLASSES.items() if isinstance(config, kind))(config)
