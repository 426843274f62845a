"""SDAR and TraDo."""

from typing import ClassVar

from transformers import Qwen3Config, Qwen3MoeConfig

from vllm_dllm.models.configs.base import BlockDiffusionConfig
from vllm_dllm.traits import FamilyTraits


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
