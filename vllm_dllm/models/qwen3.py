"""Families over vLLM's Qwen3 and Qwen3-MoE: same tensors, same names."""

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_dllm.models.block_diffusion import BlockDiffusionModel


class SDARForCausalLM(BlockDiffusionModel, Qwen3ForCausalLM):
    """SDAR-{1.7B,4B,8B}-Chat and TraDo."""


class SDARMoeForCausalLM(BlockDiffusionModel, Qwen3MoeForCausalLM):
    """SDAR-30B-A3B."""


class LLaDAMoEModelLM(BlockDiffusionModel, Qwen3MoeForCausalLM):
    """LLaDA-MoE-7B-A1B-{Base,Instruct}.

    The published code descends from OLMoE, but norms queries and keys per head, which vLLM's OLMoE does not.
    """
