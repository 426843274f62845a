"""Hugging Face configurations of the model families, with the traits of each.

Apart from the model classes, because every process of vLLM registers these when it starts, and most of them
never need a model's layers.
"""

import re
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from vllm_dllm.models.traits import FamilyTraits

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# "SDAR-8B-Chat-b32", also as a path and in the hub's cache ("models--JetLM--...-b32/snapshots/<commit>").
_NAME_SUFFIX = re.compile(r"-b(8|16|32|64)(/snapshots/[^/]+)?/*$", re.IGNORECASE)


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

    diffusion_supports_sampling_params: ClassVar[bool] = True
    """For `vllm_dllm.patches.sampling_params`: our sampler honours what vLLM refuses for diffusion models."""

    model_stat_loggers: ClassVar[tuple[str, ...]] = ("vllm_dllm.metrics.DiffusionStatLogger",)
    """Read by `vllm_dllm.patches.model_stat_loggers`."""

    block_length: int | None = None
    mask_token_id: int | None = None
    engine_options: dict[str, Any] | None = None
    """The engine's resolved options; the hook leaves them here for the front end, which admits requests."""
    max_drafts: int = 0
    """Drafts beside the block that a request may have in a forward; the hook sets it from the engine's options."""
    window_blocks: int = 1
    """Blocks that are denoised together; the hook sets it where drafts reach into later ones (``eager``)."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.block_length is None:
            self.block_length = block_length_of_name(self.name_or_path or "") or self.traits.block_length
        if self.mask_token_id is None:
            self.mask_token_id = self.traits.mask_token_id

    @property
    def canvas_length(self) -> int:
        """Rows that a request may get in a step. What has this attribute is a diffusion model to vLLM.

        The current window and its drafts, or two blocks: a step may commit the finished block and denoise the next. In
        shifted families the next block's first token is only known after the commit, so a step does one or the other.
        """
        assert self.block_length is not None
        branches = 1 + self.max_drafts
        if self.window_blocks == 1 and not self.traits.shifted:
            branches = max(branches, 2)
        return branches * self.window_blocks * self.block_length

    def validate_sampling_params(self, params: "SamplingParams") -> None:
        """Refuse what a request may not ask of a model of this family; vLLM answers with HTTP 400."""
        from vllm_dllm.validation import validate_sampling_params

        assert self.block_length is not None
        validate_sampling_params(params, self.traits, self.block_length, self.engine_options)

    def resolve_speculative_config(
        self, speculative_config: dict[str, Any], additional_config: dict[str, Any] | None
    ) -> dict[str, Any]:
        """For `vllm_dllm.patches.speculative_methods`: ``additional_config`` with what the other asks for."""
        from vllm_dllm.speculative import lay_under_additional_config

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
