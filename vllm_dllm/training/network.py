"""The network of the tiny models: Qwen3, or Qwen2 or Llama by its options, with any attention mask.

Parameters carry Qwen's released tensor names (``model.layers.0.self_attn.q_proj.weight``); `layouts` knows those of
other releases. ``tests/training`` compares the logits with those of transformers' ``Qwen3ForCausalLM`` and with those
of the official LLaDA and Dream.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Shape of the network; the names are those of Qwen3's ``config.json``.

    Attributes:
        qk_norm: queries and keys are RMS-normalised, as in Qwen3.
        qkv_bias: queries, keys and values have biases, as in Qwen2.
        tie_word_embeddings: the output head is the embedding, as in Qwen2.5-0.5B.
    """

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 448
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    qkv_bias: bool = False
    tie_word_embeddings: bool = False


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of NeoX (halves). x: ``[B, heads, S, D]``; cos, sin: ``[B, 1, S, D / 2]``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RMSNorm(nn.RMSNorm):
    """RMS norm in float32, whatever the autocast dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


Mask = Any
"""``[B, S, S]`` or ``[1, S, S]`` bool, ``True`` where a query (dim 1) sees a key (dim 2); or, with B = 1 and on CUDA, a
``BlockDiagonalMask`` of xformers over the S rows."""


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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Attention of ``q`` ``[B, heads, S, D]`` to ``k`` and ``v`` ``[B, kv_heads, S, D]``; of ``q``'s shape."""
    if isinstance(mask, torch.Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1), enable_gqa=True)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # rows before heads, as xformers wants them
    return xformers_attention().memory_efficient_attention(q, k, v, attn_bias=mask).transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: NetworkConfig):
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm: nn.Module = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (-1, self.head_dim))

        q = _rotate(self.q_norm(heads(self.q_proj(x))).transpose(1, 2), cos, sin)
        k = _rotate(self.k_norm(heads(self.k_proj(x))).transpose(1, 2), cos, sin)
        v = heads(self.v_proj(x)).transpose(1, 2)
        mixed = attend(q.to(v.dtype), k.to(v.dtype), v, mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: NetworkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: NetworkConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Everything below the logits."""

    inverse_frequencies: torch.Tensor

    def __init__(self, config: NetworkConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        self.register_buffer("inverse_frequencies", config.rope_theta**-exponents, persistent=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, mask: Mask) -> torch.Tensor:
        angles = positions.unsqueeze(-1) * self.inverse_frequencies
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class TinyNetwork(nn.Module):
    """A language model without an attention pattern of its own."""

    def __init__(self, config: NetworkConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, mask: Mask, rows: torch.Tensor) -> torch.Tensor:
        """Logits of the chosen rows.

        Args:
            input_ids: ``[B, S]`` int64.
            positions: ``[B, S]`` or ``[1, S]`` int64, rotary positions.
            mask: what each row sees, see :data:`Mask`.
            rows: ``[B, S]`` bool, the rows whose logits are wanted.

        Returns:
            ``[rows.sum(), vocab_size]`` logits.
        """
        return self.lm_head(self.model(input_ids, positions, mask)[rows])
