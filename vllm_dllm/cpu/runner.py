"""Which model runner a model gets on a CPU without Triton."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def needs_v2(config: "VllmConfig") -> bool:
    """Whether only Model Runner V2 serves this configuration: a diffusion target, a diffusion drafter, or a
    feature that vLLM gives to V2 with or without Triton (HiSparse, watermarking)."""
    speculative = config.speculative_config
    models = (config.model_config, speculative.draft_model_config if speculative is not None else None)
    return (
        any(model is not None and model.is_diffusion for model in models)
        or config.attention_config.hisparse_config is not None
        or config.watermark_config is not None
    )


def install() -> None:
    """Give Model Runner V2 to diffusion models and leave every other model on V1, as on any CPU without
    Triton. An explicit ``VLLM_USE_V2_MODEL_RUNNER`` decides as always.

    Raises:
        RuntimeError: ``VllmConfig.use_v2_model_runner`` is not the property this was written for.
    """
    import vllm.envs as envs
    from vllm.config import VllmConfig

    vllm_choice = vars(VllmConfig).get("use_v2_model_runner")
    if not isinstance(vllm_choice, property) or vllm_choice.fget is None:
        raise RuntimeError("VllmConfig.use_v2_model_runner is no property in the installed vLLM; vllm-dllm changes it.")
    choose = vllm_choice.fget

    def use_v2_model_runner(config: "VllmConfig") -> bool:
        if envs.VLLM_USE_V2_MODEL_RUNNER is None and not needs_v2(config):
            return False
        return choose(config)

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)
