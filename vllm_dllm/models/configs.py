"""Configurations of the model families, with the traits of each.

The configurations lie apart from the model classes, because every process of vLLM registers all configurations when the
process starts, and most processes never need a model's layers. Nothing here imports vLLM.
"""

import dataclasses
from typing import Any, ClassVar

from transformers import Ministral3Config, Qwen2Config, Qwen3MoeConfig

from vllm_dllm.models.base_config import BlockDiffusionConfig
from vllm_dllm.models.sdar_configs import SDARConfig
from vllm_dllm.traits import FamilyTraits


class SDARMoeConfig(BlockDiffusionConfig, Qwen3MoeConfig):
    """SDAR mixture of experts: a Qwen3-MoE backbone."""

    model_type = "sdar_moe"
    traits = SDARConfig.traits
    attribute_map: ClassVar[dict[str, str]] = {**Qwen3MoeConfig.attribute_map, **BlockDiffusionConfig.attribute_map}
    supported_values = SDARConfig.supported_values


class LLaDA2MoeConfig(BlockDiffusionConfig):
    """LLaDA2.0 and 2.1: a Ling 2.0 (BailingMoeV2) backbone. Defaults are those of LLaDA2.0-mini."""

    model_type = "llada2_moe"
    traits = FamilyTraits(family="LLaDA2", block_length=32, mask_token_id=156895, threshold=0.95, editing=True)
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        # LLaDA2.2 has the same architecture, and its blocks change their length while they are denoised.
        "delete_token_id": (None,),
        "split_token_id": (None,),
    }
    default_theta = 600000.0

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 0.5
    use_bias: bool = False
    use_qkv_bias: bool = False
    use_qk_norm: bool = True
    use_rmsnorm: bool = True
    embedding_dropout: float = 0.0
    tie_word_embeddings: bool = False
    norm_head: bool = False
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    router_dtype: str = "fp32"
    pad_token_id: int | None = 156892
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # The reference code goes by `partial_rotary_factor` alone; vLLM's backbone would prefer this.
        kwargs.pop("rotary_dim", None)
        if self.eos_token_id is None:
            self.eos_token_id = self.pad_token_id
        super().__post_init__(**kwargs)


class FastDLLMQwenConfig(BlockDiffusionConfig, Qwen2Config):
    """Fast-dLLM v2: a Qwen2.5 backbone."""

    model_type = "Fast_dLLM_Qwen"
    traits = FamilyTraits(
        family="Fast-dLLM v2",
        block_length=32,
        mask_token_id=151665,
        shifted=True,
        commit_predicts=True,
        sub_block_length=8,
    )


class DreamConfig(BlockDiffusionConfig, Qwen2Config):
    """Dream, Dream-Coder and DiffuCoder: a Qwen2.5 backbone."""

    model_type = "Dream"
    traits = FamilyTraits(
        family="Dream",
        block_length=32,
        mask_token_id=151666,
        shifted=True,
        threshold_inclusive=True,
        attention="full",
        timesteps=True,
    )
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {"use_mrope": (False, None)}


class _TraitsByContext:
    """Traits of a checkpoint whose ``context_attention`` is not the family's."""

    def __init__(self, traits: FamilyTraits):
        self.full = traits
        self.causal = dataclasses.replace(traits, attention="causal-context", commit_predicts=True)

    def __get__(self, config: "OpenDCoderConfig | None", owner: type) -> FamilyTraits:
        return self.causal if config is not None and config.context_attention == "causal" else self.full


class OpenDCoderConfig(BlockDiffusionConfig, Qwen2Config):
    """Open-dCoder: a Qwen2.5-Coder checkpoint trained for diffusion. Its ``config.json`` says plain ``qwen2``."""

    model_type = "open_dcoder"
    traits = _TraitsByContext(dataclasses.replace(DreamConfig.traits, family="Open-dCoder", mask_token_id=151665))
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        **DreamConfig.supported_values,
        "context_attention": ("full", "causal"),
    }

    context_attention: str = "full"
    """What finished text sees: ``full``: everything, as Open-dCoder was trained; ``causal``: what is before it, as the
    autoregressive model did that a drafter was made from."""


# LLaDA's modules and Llama's, outside of the layers and inside.
LLADA_OUTSIDE = {"ff_out": "lm_head", "wte": "model.embed_tokens", "ln_f": "model.norm"}
LLADA_INSIDE = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


class LLaDAConfig(BlockDiffusionConfig):
    """LLaDA-8B and LLaDA-1.5: a Llama backbone under field names of its own. Defaults are those of LLaDA-8B.

    The mixture of experts has the same ``model_type``: what names its architecture becomes a `LLaDAMoEConfig`.
    """

    model_type = "llada"
    traits = FamilyTraits(
        family="LLaDA", block_length=32, mask_token_id=126336, threshold_inclusive=True, attention="full"
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
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(f"n_heads={self.num_attention_heads} does not divide d_model={self.hidden_size}")
        self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = self.mlp_ratio * self.hidden_size
        heads = self.num_attention_heads
        if self.multi_query_attention is not None:
            resolved = 1 if self.multi_query_attention else heads
            if self.num_key_value_heads not in (None, resolved):
                raise ValueError(
                    f"n_kv_heads={self.num_key_value_heads} contradicts "
                    f"multi_query_attention={self.multi_query_attention}"
                )
            self.num_key_value_heads = resolved
        elif self.num_key_value_heads is None:
            self.num_key_value_heads = heads
        if self.num_key_value_heads < 1 or heads % self.num_key_value_heads:
            raise ValueError(f"n_kv_heads={self.num_key_value_heads} does not divide n_heads={heads}")
        if self.embedding_size is not None:
            if self.embedding_size < self.vocab_size:
                raise ValueError(f"embedding_size={self.embedding_size} is less than vocab_size={self.vocab_size}")
            self.vocab_size = self.embedding_size
        self.qkv_bias = bool(self.qkv_bias)


class LLaDAMoEConfig(BlockDiffusionConfig):
    """LLaDA-MoE: a Qwen3-MoE backbone. Defaults are those of LLaDA-MoE-7B-A1B."""

    model_type = "llada"
    traits = dataclasses.replace(LLaDAConfig.traits, family="LLaDA-MoE", mask_token_id=156895)
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


class NemotronLabsDiffusionConfig(BlockDiffusionConfig, Ministral3Config):
    """Nemotron-Labs-Diffusion: a Ministral 3 backbone. Defaults are those of Nemotron-Labs-Diffusion-8B."""

    model_type = "nemotron_labs_diffusion"
    traits = FamilyTraits(
        family="Nemotron-Labs-Diffusion",
        block_length=32,
        mask_token_id=100,
        commit_predicts=True,
        threshold_inclusive=True,
        attention="causal-context",
        draft_adapter="linear_spec_lora",
    )
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "dlm_paradigm": ("bidirectional", "block_diff", None),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "tie_word_embeddings": (False,),
    }

    eos_token_id: int | list[int] | None = 11
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
            if not isinstance(self.rope_parameters.get(key), int | float):
                raise ValueError(
                    f"rope_parameters[{key!r}]={self.rope_parameters.get(key)!r} is not allowed: "
                    f"{self.traits.family} models scale queries by it; give a number"
                )

    @property
    def llama_4_scaling(self) -> dict[str, int | float]:
        """How queries are scaled behind the original length; vLLM's backbone reads it here alone."""
        return {
            "original_max_position_embeddings": self.rope_parameters["original_max_position_embeddings"],
            "beta": self.rope_parameters["llama_4_scaling_beta"],
        }


class PanguDiffusionConfig(BlockDiffusionConfig):
    """openPangu-7B-Diffusion: vLLM's openPangu backbone. Its ``config.json`` says ``PanguEmbedded``, as those of the
    autoregressive openPangu models do. Defaults are those of openPangu-7B-Diffusion-Base."""

    model_type = "pangu_diffusion"
    traits = FamilyTraits(
        family="openPangu",
        block_length=32,
        mask_token_id=45830,
        shifted=True,
        commit_predicts=True,
        attention="causal-context",
    )
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "sandwich_norm": (False,),
        "param_sink_number": (0, None),
    }
    default_theta = 16000000.0

    vocab_size: int = 153376
    hidden_size: int = 4096
    intermediate_size: int = 12800
    num_hidden_layers: int = 34
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    bias: bool = True
    """Of queries, keys, values and the output projection of attention."""
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 45892
