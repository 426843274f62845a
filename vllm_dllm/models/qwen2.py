"""Families over vLLM's Qwen2: same tensors, same names. Their logits predict the position after their own."""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from vllm_dllm.models.block_diffusion import BlockDiffusionModel


class DreamModel(BlockDiffusionModel, Qwen2ForCausalLM):
    """Dream-v0-{Base,Instruct}-7B, Dream-Coder and DiffuCoder."""


class FastDLLMQwenForCausalLM(BlockDiffusionModel, Qwen2ForCausalLM):
    """Fast_dLLM_v2_{1.5B,7B}."""


class OpenDCoderModel(BlockDiffusionModel, Qwen2ForCausalLM):
    """Open-dCoder 0.5B, by ``--config-format open_dcoder``."""
