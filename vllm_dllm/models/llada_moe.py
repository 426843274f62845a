"""LLaDA-MoE over vLLM's Qwen3-MoE: same tensors, same names.

Its published code descends from OLMoE, but norms queries and keys per head, which vLLM's OLMoE does not.
"""

from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_dllm.models.block_diffusion import BlockDiffusionModel


class LLaDAMoEModelLM(BlockDiffusionModel, Qwen3MoeForCausalLM):
    """LLaDA-MoE-7B-A1B-{Base,Instruct}."""
