"""openPangu-Diffusion over vLLM's openPangu: same tensors, same names."""

from vllm.model_executor.models.openpangu import PanguEmbeddedForCausalLM

from vllm_dllm.models.block_diffusion import BlockDiffusionModel


class PanguDiffusionForCausalLM(BlockDiffusionModel, PanguEmbeddedForCausalLM):
    """openPangu-7B-Diffusion-Base; its logits predict the position after their own.

    Registered under a name of its own, because checkpoints of the autoregressive openPangu models have the same
    ``architectures``, ``model_type`` and tensors.
    """
