"""Fast-dLLM v2."""

from transformers import Qwen2Config

from vllm_dllm.models.configs.base import BlockDiffusionConfig
from vllm_dllm.traits import FamilyTraits


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
