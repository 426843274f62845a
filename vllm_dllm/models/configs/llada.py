"""LLaDA and LLaDA-MoE, whose checkpoints have the same ``model_type``."""

from typing import Any, ClassVar

from vllm_dllm.models.configs.base import BlockDiffusionConfig
from vllm_dllm.traits import FamilyTraits


class LLaDAConfig(BlockDiffusionConfig):
    """LLaDA-8B and LLaDA-1.5: a Llama backbone under field names of its own. Defaults are those of LLaDA-8B.

    The mixture of experts has the same ``model_type``: what names its architecture becomes a `LLaDAMoEConfig`.
    """

    model_type = "llada"
    traits = FamilyTraits(
        family="LLaDA",
        block_length=32,
        mask_token_id=126336,
        threshold_inclusive=True,
        attention="full",
    )
    attribute_map: ClassVar[dict[str, str]] = {
        **BlockDiffusionConfig.attribute_map,
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "n_layers": "num_hidden_layers",
        "mlp_hidden_size": "intermediate_size",
        "max_sequence_length": "max_position_embeddings",
        "activation_type": "hidden_act",
        "weight_tying": "tie_word_embeddings",
        "include_qkv_bias": "qkv_bias",
    }
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_type": ("llama",),
        "activation_type": ("silu",),
        "layer_norm_type": ("rms",),
        "layer_norm_with_affine": (True,),
        "bias_for_layer_norm": (False, None),
        "include_bias": (False,),
        "attention_layer_norm": (False,),
        "input_emb_norm": (False,),
        "rope": (True,),
        "alibi": (False,),
        "scale_logits": (False,),
    }
    default_theta = 500000.0

    vocab_size: int = 126464
    embedding_size: int | None = None
    """Rows of the embedding, at least ``vocab_size``; ``vocab_size`` is set to it."""
    hidden_size: int = 4096
    intermediate_size: int | None = None
    """``None``: ``mlp_ratio * hidden_size``."""
    mlp_ratio: int = 4
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    """``None``: 1 with ``multi_query_attention``, else one for each head."""
    multi_query_attention: bool | None = None
    block_group_size: int = 1
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    qkv_bias: bool | None = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read either layout of ``model_type: llada``; returns what Transformers' method of this name does."""
        if cls is LLaDAConfig and "LLaDAMoEModelLM" in (config_dict.get("architectures") or ()):
            return LLaDAMoEConfig.from_dict(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"n_heads={self.num_attention_heads} does not divide d_model={self.hidden_size}")
        self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = self.mlp_ratio * self.hidden_size
        self.num_key_value_heads = self._resolve_num_key_value_heads()
        if self.embedding_size is not None:
            if self.embedding_size < self.vocab_size:
                raise ValueError(f"embedding_size={self.embedding_size} is less than vocab_size={self.vocab_size}")
            self.vocab_size = self.embedding_size
        self.qkv_bias = bool(self.qkv_bias)

    def _resolve_num_key_value_heads(self) -> int:
        heads, given, multi_query = self.num_attention_heads, self.num_key_value_heads, self.multi_query_attention
        if multi_query is None:
            resolved = heads if given is None else given
        else:
            resolved = 1 if multi_query else heads
            if given not in (None, resolved):
                raise ValueError(f"n_kv_heads={given} contradicts multi_query_attention={multi_query}")
        if resolved < 1 or heads % resolved:
            raise ValueError(f"n_kv_heads={resolved} does not divide n_heads={heads}")
        return resolved


class LLaDAMoEConfig(BlockDiffusionConfig):
    """LLaDA-MoE: a Qwen3-MoE backbone. Defaults are those of LLaDA-MoE-7B-A1B."""

    model_type = "llada"
    traits = FamilyTraits(
        family="LLaDA-MoE",
        block_length=32,
        mask_token_id=156895,
        threshold_inclusive=True,
        attention="full",
    )
    attribute_map: ClassVar[dict[str, str]] = {
        **BlockDiffusionConfig.attribute_map,
        "dense_intermediate_size": "intermediate_size",
        "expert_intermediate_size": "moe_intermediate_size",
    }
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "clip_qkv": (None,),
        "qk_layernorm": (True,),
        "moe_router_enable_expert_bias": (False, None),
        "shared_expert_intermediate_size": (None, 0),
    }
    default_theta = 50000.0

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 8192
    moe_intermediate_size: int = 1024
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    num_experts: int = 64
    num_experts_per_tok: int = 8
    moe_layer_freq: list[int] | None = None
    """1 for each layer with experts, 0 for each without. ``None``: all have them."""
    shared_expert_intermediate_size: int | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = 156892
    eos_token_id: int | list[int] | None = 156892

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.head_dim = self.hidden_size // self.num_attention_heads
        if self.moe_layer_freq is None:
            self.moe_layer_freq = [1] * self.num_hidden_layers
        if len(self.moe_layer_freq) != self.num_hidden_layers:
            raise ValueError(
                f"moe_layer_freq has {len(self.moe_layer_freq)} entries for num_hidden_layers={self.num_hidden_layers}"
            )
        # What the backbone calls these.
        self.mlp_only_layers = [layer for layer, has_experts in enumerate(self.moe_layer_freq) if not has_experts]
        self.decoder_sparse_step = 1
        self.shared_expert_intermediate_size = 0
        # The published code never renormalises the chosen experts' weights, whatever config.json says.
        self.norm_topk_prob = False
