"""The networks that are trained: transformers' Qwen3, Qwen2 and Llama, called with any attention mask.

SDAR is a Qwen3, Dream and Open-dCoder are Qwen2, LLaDA is a Llama; only the mask is another. `layouts` knows the names
that their releases give the tensors. ``tests/training`` compares the logits with those of the unchanged classes and of
the official LLaDA and Dream.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


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


class Network(PreTrainedModel):
    """A language model without an attention pattern of its own.

    Attributes:
        shape: what it was built from.
    """

    shape: NetworkConfig

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the chosen rows.

        Args:
            input_ids: ``[B, S]`` int64.
            positions: ``[B, S]`` or ``[1, S]`` int64, rotary positions.
            mask: ``[B, S, S]`` or ``[1, S, S]`` bool, ``True`` where a query (dim 1) sees a key (dim 2). Or, with
                B = 1, ``[n]`` int64: the lengths of n sequences, end to end, each of which sees itself.
            rows: ``[B, S]`` bool, the rows whose logits are wanted.

        Returns:
            ``[rows.sum(), vocab_size]`` logits.
        """
        seen = {"packed_lengths": mask} if mask.dim() == 1 else {"attention_mask": mask.unsqueeze(1)}
        hidden = self.model(input_ids=input_ids, position_ids=positions, use_cache=False, **seen).last_hidden_state
        return self.lm_head(hidden[rows])


class Qwen3Network(Network, Qwen3ForCausalLM):
    """SDAR's."""


class Qwen2Network(Network, Qwen2ForCausalLM):
    """Dream's, Open-dCoder's and the autoregressive models'."""


class LlamaNetwork(Network, LlamaForCausalLM):
    """LLaDA's."""


def build_network(shape: NetworkConfig) -> Network:
    """A network in float32 with new weights: matrices are normal with deviation 0.02, biases 0.

    Raises:
        ValueError: no class computes norms of queries and keys together with biases.
    """
    sizes = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "initializer_range": 0.02,
        "use_cache": False,
        "attn_implementation": _ATTENTION,
    }
    classes = {
        (True, False): (Qwen3Network, Qwen3Config),
        (False, True): (Qwen2Network, Qwen2Config),
        (False, False): (LlamaNetwork, LlamaConfig),
    }
    if (shape.qk_norm, shape.qkv_bias) not in classes:
        raise ValueError("qk_norm=True with qkv_bias=True: neither Qwen3, Qwen2 nor Llama has both")
    network_class, config_class = classes[shape.qk_norm, shape.qkv_bias]
    network = network_class(config_class(**sizes))
    network.shape = shape
    return network
