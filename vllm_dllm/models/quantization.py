"""Quantization that cannot be had is refused by name: vLLM starts with some of it, and quantizes nothing or wrongly."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

OF_OTHER_MODELS = frozenset({"deepseek_v4_fp8", "gpt_oss_mxfp4"})
"""Methods for the checkpoints of one architecture. With another's weights the first of them writes nonsense."""


def check_method(model_config: "ModelConfig") -> None:
    """Check the method that is asked for, before vLLM builds its configuration.

    Raises:
        ValueError: it is that of another architecture, or needs a checkpoint that was quantized with it.
    """
    method = model_config.quantization
    if method is None:
        return
    if method in OF_OTHER_MODELS:
        raise ValueError(
            f"quantization={method!r} is not allowed: it is for checkpoints of another architecture, and "
            f"{model_config.architecture} is none; {_allowed()}"
        )
    stored = getattr(model_config.hf_config, "quantization_config", None)
    if stored is None and model_config.quantization_config is None and _reads_checkpoint(method):
        raise ValueError(
            f"quantization={method!r} is not allowed: config.json of {model_config.model} has no quantization_config, "
            f"so the checkpoint was not quantized with it; {_allowed()}"
        )


def check_layers(model: Any, model_config: "ModelConfig") -> None:
    """Check that some layer of the model, a ``torch.nn.Module``, is quantized where that was asked for.

    Raises:
        ValueError: none is. Some methods are for experts only, and vLLM then leaves a model without experts as it is.
    """
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (UnquantizedLinearMethod, UnquantizedFusedMoEMethod, UnquantizedEmbeddingMethod, BaseKVCacheMethod)
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    if model_config.quantization is not None and all(each is None or isinstance(each, plain) for each in methods):
        raise ValueError(
            f"quantization={model_config.quantization!r} is not allowed: it quantizes no layer of "
            f"{model_config.architecture}; {_allowed()}"
        )


def _reads_checkpoint(method: str) -> bool:
    """Whether a method has no configuration of its own, and no file of the checkpoint besides ``config.json``."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = get_quantization_config(method)
    if config.get_config_filenames():
        return False
    try:
        config()
    except TypeError:
        return True
    return False


def _allowed() -> str:
    from vllm.config.quantization import _ONLINE_SHORTHANDS

    linear = sorted(name for name, spec in _ONLINE_SHORTHANDS.items() if spec.linear is not None)
    return f"allowed for a checkpoint that is not quantized: {', '.join(map(repr, linear))}, as far as the device can"
