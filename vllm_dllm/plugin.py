"""Entry points: what this plugin registers with vLLM."""

from typing import NamedTuple


class Family(NamedTuple):
    """One registration. Classes are named, not imported: a process that needs none of them imports none."""

    model_type: str
    """``model_type`` of the checkpoint's ``config.json``."""
    config: str
    """Configuration class, in ``vllm_dllm.models.configs``."""
    architecture: str
    """Entry of ``architectures`` in ``config.json``."""
    model: str
    """Model class, ``module:Class``."""


FAMILIES = (
    Family("sdar", "SDARConfig", "SDARForCausalLM", "vllm_dllm.models.sdar:SDARForCausalLM"),
    Family("sdar_moe", "SDARMoeConfig", "SDARMoeForCausalLM", "vllm_dllm.models.sdar:SDARMoeForCausalLM"),
    Family(
        "llada2_moe", "LLaDA2MoeConfig", "LLaDA2MoeModelLM", "vllm_dllm.models.llada2_moe:LLaDA2MoeModelLM"
    ),
    Family(
        "Fast_dLLM_Qwen",
        "FastDLLMQwenConfig",
        "Fast_dLLM_QwenForCausalLM",
        "vllm_dllm.models.fast_dllm_v2:FastDLLMQwenForCausalLM",
    ),
)


def register() -> None:
    """Entry point ``vllm.general_plugins``; runs in every process of vLLM, in some more than once."""
    register_models()


def register_models() -> None:
    """Make vLLM and Transformers know the model families, without remote code."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from vllm_dllm.models import configs

    for family in FAMILIES:
        AutoConfig.register(family.model_type, getattr(configs, family.config), exist_ok=True)
        if family.architecture not in ModelRegistry.models:
            ModelRegistry.register_model(family.architecture, family.model)
