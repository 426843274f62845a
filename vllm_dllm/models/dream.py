"""Dream over vLLM's Qwen2: same tensors, same names."""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from vllm_dllm.models.block_diffusion import BlockDiffusionModel


class DreamModel(BlockDiffusionModel, Qwen2ForCausalLM):
    """Dream-v0-{Base,Instruct}-7B, Dream-Coder and DiffuCoder; its logits predict the position after their own."""
