"""LLaDA2.0 and 2.1 over vLLM's BailingMoeV2 (Ling 2.0): same tensors, same names."""

from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM

from vllm_dllm.models.block_diffusion import BlockDiffusionModel


class LLaDA2MoeModelLM(BlockDiffusionModel, BailingMoeV2ForCausalLM):
    """LLaDA2.0-mini, LLaDA2.1-mini and their larger siblings."""
