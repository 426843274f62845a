"""Open-dCoder over vLLM's Qwen2: same tensors, same names."""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from vllm_dllm.models.block_diffusion import BlockDiffusionModel


class OpenDCoderModel(BlockDiffusionModel, Qwen2ForCausalLM):
    """Open-dCoder 0.5B, by ``--config-format open_dcoder``; its logits predict the position after their own."""
