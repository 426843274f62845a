"""Fast-dLLM v2 over vLLM's Qwen2: same tensors, same names."""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from vllm_dllm.models.block_diffusion import BlockDiffusionModel


class FastDLLMQwenForCausalLM(BlockDiffusionModel, Qwen2ForCausalLM):
    """Fast_dLLM_v2_{1.5B,7B}; its logits predict the position after their own."""
