"""Hugging Face configurations of the model families, with the traits of each.

Apart from the model classes, because every process of vLLM registers these when it starts, and most of them
never need a model's layers.
"""

import dataclasses
import re
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from vllm_dllm.traits import FamilyTraits

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_dllm.geometry import Geometry
    from vllm_dllm.runtime.plan.drafter import Drafter

# "SDAR-8B-Chat-b32", also as a path and in the hub's cache ("models--JetLM--...-b32/snapshots/<commit>").
_NAME_SUFFIX = re.compile(r"-b(8|16|32|64)(/snapshots/[^/]+)?/*$", re.IGNORECASE)


DEFAULT_MAX_TOKENS = 256
"""Answers of this length are what LLaDA and Fast-dLLM (arXiv 2505.22618) evaluate with."""


def block_length_of_name(name: str) -> int | None:
    """Block length that a model's name or path ends in: ``-b8``, ``-b16``, ``-b32`` or ``-b64``."""
    match = _NAME_SUFFIX.search(name)
    return int(match[1]) if match else None


class BlockDiffusionConfig(PreTrainedConfig):
    """What every block-diffusion family adds to the configuration of its backbone.

    Hub configurations leave most of it out; ``block_length`` then comes from the model's name (``-b32``) and
    everything else from the family's traits.
    """

    traits: ClassVar[FamilyTraits]
    attribute_map: ClassVar[dict[str, str]] = {"block_size": "block_length", "bd_size": "block_length"}

    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """What the backbone can do of settings that change the computation; other values are refused."""

    diffusion_supports_sampling_params: ClassVar[bool] = True
    """For `vllm_dllm.patches.sampling_params`: our sampler honours what vLLM refuses for diffusion models."""

    model_stat_loggers: ClassVar[tuple[str, ...]] = ("vllm_dllm.observe.metrics.DiffusionStatLogger",)
    """Read by `vllm_dllm.patches.model_stat_loggers`."""

    draft_scheduler_cls: ClassVar[str] = "vllm_dllm.speculators.scheduler.create_scheduler"
    """Of an engine with this drafter; for `vllm_dllm.patches.draft_model_speculators`."""

    geometry: ClassVar["Geometry | None"] = None
    """What the engine is; the hook sets the record on the instance."""

    block_length: int | None = None
    mask_token_id: int | None = None
    engine_options: dict[str, Any] | None = None
    """The engine's resolved options; the hook leaves them here for the front end, which admits requests."""
    max_drafts: int = 0
    """Drafts beside the block that a request may have in a forward; the hook sets it from the engine's options."""
    window_blocks: int = 1
    """Blocks that are denoised together; the hook sets it where drafts reach into later ones (``eager``)."""
    refresh_rows: int = 0
    """Rows that a request may get in a step with full attention; the hook sets it, and it replaces what the blocks
    alone would need."""
    max_rows: int = 0
    """Rows of a step of all requests with full attention; the hook sets it."""
    max_model_len: int = 0
    """The engine's, with full attention; the hook sets it."""
    branch_rows: int = 0
    """Rows of one draft with full attention, at most; the hook sets it."""
    sep_token_id: int | None = None
    """What a drafter for autoregressive targets was trained to find behind its masks (DEER's ``[SEP]``)."""
    drafter_options: dict[str, Any] | None = None
    """Of a drafter; the workers find them here (`vllm_dllm.speculators.config.DrafterOptions`)."""

    def __post_init__(self, **kwargs: Any) -> None:
        # To vLLM's backbones False means attention without a KV cache.
        kwargs.pop("is_causal", None)
        super().__post_init__(**kwargs)
        for key, values in self.supported_values.items():
            value = getattr(self, key, values[0])
            if value not in values:
                raise ValueError(
                    f"{key}={value!r} is not supported for {self.traits.family} models; "
                    f"allowed: {', '.join(map(repr, values))}"
                )
        if self.block_length is None:
            self.block_length = block_length_of_name(self.name_or_path or "") or self.traits.block_length
        if self.mask_token_id is None:
            self.mask_token_id = self.traits.mask_token_id

    @property
    def canvas_length(self) -> int:
        """Rows that a request may get in a step. What has this attribute is a diffusion model to vLLM."""
        assert self.block_length is not None
        return 2 * self.block_length if self.geometry is None else self.geometry.canvas_length

    @property
    def diffusion_default_max_tokens(self) -> int | None:
        """``max_tokens`` of a request that gives none; for `vllm_dllm.patches.request_admission`.

        A model that sees the whole text sees the masks of the whole answer too, and answers with nothing where they
        are more than the model was trained on. ``None``: the rest of the context. ``max_new_tokens`` of the
        checkpoint's ``generation_config.json`` precedes this default.
        """
        if not self.traits.sees_whole_text:
            return None
        step_rows = self.geometry.step_rows if self.geometry else 2 * DEFAULT_MAX_TOKENS
        return max(min(DEFAULT_MAX_TOKENS, step_rows // 2), 1)

    def to_dict(self) -> dict[str, Any]:
        """What can be written to ``config.json``: what the engine is cannot."""
        output = super().to_dict()
        output.pop("geometry", None)
        return output

    def longest_text(self, max_model_len: int) -> int:
        """Positions that may be written of a text of ``max_model_len``: its last block is denoised whole."""
        length = self.block_length
        assert length is not None
        if self.traits.blocks_from_prompt:
            # The last block may begin on the last position.
            return max_model_len + length - 1
        return -(-max_model_len // length) * length

    def drafter(self, num_drafts: int, limit: int) -> "Drafter":
        """The model as a drafter of ``num_drafts`` tokens for texts of up to ``limit``."""
        from vllm_dllm.runtime.plan.drafter import Drafter

        assert self.block_length is not None and self.mask_token_id is not None
        return Drafter(
            num_drafts=num_drafts,
            context=self.traits.attention,
            shifted=self.traits.shifted,
            mask_token_id=self.mask_token_id,
            sep_token_id=self.sep_token_id,
            block_length=self.block_length,
            limit=limit,
        )

    def draft_slots(self, num_drafts: int) -> int:
        """Rows of a request in its forward, as a drafter, over the target's; for the patch below.

        Raises:
            ValueError: the model was not asked for as a diffusion drafter.
        """
        if self.drafter_options is None:
            raise ValueError(
                f'{self.traits.family} models draft with "method": "dllm" in speculative_config, not "draft_model"'
            )
        return self.drafter(num_drafts, 0).extra_rows

    def draft_lookahead(self, num_drafts: int) -> int:
        """K/V slots behind those that the target has in a step; `vllm_dllm.patches.draft_model_speculators`."""
        return 1 + self.drafter(num_drafts, 0).rows_behind

    def validate_sampling_params(self, params: "SamplingParams") -> None:
        """Refuse what a request may not ask of a model of this family; vLLM answers with HTTP 400."""
        from vllm_dllm.options.admission import validate_sampling_params

        assert self.block_length is not None
        validate_sampling_params(params, self.traits, self.block_length, self.engine_options)

    def diffusion_validate_request(self, prompt_length: int, params: "SamplingParams", resumable: bool) -> None:
        """Refuse a request as a whole, its ``max_tokens`` known; for `vllm_dllm.patches.request_admission`."""
        from vllm_dllm.options.admission import validate_request

        assert self.block_length is not None
        validate_request(
            prompt_length,
            params,
            self.traits,
            self.block_length,
            self.engine_options,
            max_rows=self.max_rows,
            max_model_len=self.max_model_len,
            resumable=resumable,
        )

    def resolve_speculative_config(
        self, speculative_config: dict[str, Any], additional_config: dict[str, Any] | None
    ) -> dict[str, Any]:
        """For `vllm_dllm.patches.speculative_methods`: ``additional_config`` with what the other asks for."""
        from vllm_dllm.options.speculative import lay_under_additional_config

        return lay_under_additional_config(speculative_config, additional_config)


class SDARConfig(BlockDiffusionConfig, Qwen3Config):
    """SDAR and TraDo: a Qwen3 backbone."""

    model_type = "sdar"
    traits = FamilyTraits(family="SDAR", block_length=4, mask_token_id=151669)


class SDARMoeConfig(BlockDiffusionConfig, Qwen3MoeConfig):
    """SDAR mixture of experts: a Qwen3-MoE backbone."""

    model_type = "sdar_moe"
    traits = SDARConfig.traits
    attribute_map: ClassVar[dict[str, str]] = {
        **Qwen3MoeConfig.attribute_map,
        **BlockDiffusionConfig.attribute_map,
    }


class FastDLLMQwenConfig(BlockDiffusionConfig, Qwen2Config):
    """Fast-dLLM v2: a Qwen2.5 backbone."""

    model_type = "Fast_dLLM_Qwen"
    traits = FamilyTraits(
        family="Fast-dLLM v2",
        block_length=32,
        mask_token_id=151665,
        shifted=True,
        sub_block_length=8,
    )


class LLaDA2MoeConfig(BlockDiffusionConfig):
    """LLaDA2.0 and 2.1: a Ling 2.0 (BailingMoeV2) backbone. Defaults are those of LLaDA2.0-mini."""

    model_type = "llada2_moe"
    traits = FamilyTraits(family="LLaDA2", block_length=32, mask_token_id=156895, threshold=0.95, editing=True)
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
    initializer_range: float = 0.02
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
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_sliding_window": (False,),
        "use_mrope": (False, None),
    }


class _TraitsByContext:
    """Traits of a checkpoint whose ``context_attention`` is not the family's."""

    def __init__(self, traits: FamilyTraits):
        self.by_context = {
            "full": traits,
            "causal": dataclasses.replace(traits, attention="causal-context"),
        }

    def __get__(self, config: "OpenDCoderConfig | None", owner: type) -> FamilyTraits:
        return self.by_context["full" if config is None else config.context_attention]


class OpenDCoderConfig(BlockDiffusionConfig, Qwen2Config):
    """Open-dCoder: a Qwen2.5-Coder checkpoint trained for diffusion. Its ``config.json`` says plain ``qwen2``."""

    model_type = "open_dcoder"
    traits = _TraitsByContext(dataclasses.replace(DreamConfig.traits, family="Open-dCoder", mask_token_id=151665))
    supported_values = DreamConfig.supported_values

    context_attention: str = "full"
    """What finished text sees: ``full``: everything, as Open-dCoder was trained; ``causal``: what is before it, as the
    autoregressive model did that a drafter was made from."""

    def __post_init__(self, **kwargs: Any) -> None:
        allowed = type(self).__dict__["traits"].by_context
        if self.context_attention not in allowed:
            raise ValueError(
                f"context_attention={self.context_attention!r} is not allowed; allowed: {', '.join(map(repr, allowed))}"
            )
        super().__post_init__(**kwargs)


class PanguDiffusionConfig(BlockDiffusionConfig):
    """openPangu-7B-Diffusion: vLLM's openPangu backbone. Its ``config.json`` says ``PanguEmbedded``, as those of the
    autoregressive openPangu models do. Defaults are those of openPangu-7B-Diffusion-Base."""

    model_type = "pangu_diffusion"
    traits = FamilyTraits(
        family="openPangu",
        block_length=32,
        mask_token_id=45830,
        shifted=True,
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
