"""Quantised weights: a checkpoint's own names for its layers, and refusals by name.

vLLM starts with some quantisation that cannot be had, and quantises nothing or wrongly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

OF_OTHER_MODELS = frozenset({"deepseek_v4_fp8", "gpt_oss_mxfp4"})
"""Methods for the checkpoints of one architecture. With another's weights ``deepseek_v4_fp8`` writes nonsense."""

OF_WHOLE_LAYERS = frozenset({"fp8", "fp8_per_tensor"})
"""Methods that round weights to FP8, while they are read, with one scale for a layer."""


def stored_quantization(model_config: ModelConfig) -> dict[str, Any] | None:
    """What ``config.json`` says of the checkpoint's quantisation; compressed-tensors had another key for it once."""
    hf_config = model_config.hf_config
    return getattr(hf_config, "quantization_config", None) or getattr(hf_config, "compression_config", None)


def cache_dtype(vllm_config: VllmConfig) -> str:
    """Of the K/V cache, as vLLM calls it. A checkpoint may ask for FP8, which vLLM finds when it builds the model."""
    given = vllm_config.cache_config.cache_dtype
    stored = stored_quantization(vllm_config.model_config) or {}
    return "fp8" if given == "auto" and stored.get("kv_cache_scheme") is not None else given


def check_method(model_config: ModelConfig) -> None:
    """Check the method that is asked for, before vLLM builds its configuration.

    Raises:
        ValueError: it is that of another architecture, needs a checkpoint that was quantized with it, or a GPU.
    """
    method = model_config.quantization
    if method is None:
        return
    if method in OF_OTHER_MODELS:
        raise ValueError(
            f"quantization={method!r} is not allowed: it is for checkpoints of another architecture, and "
            f"{model_config.architecture} is none; {_allowed()}"
        )
    stored = stored_quantization(model_config)
    if stored is None and method in OF_WHOLE_LAYERS and current_platform.is_cpu():
        raise ValueError(
            f"quantization={method!r} is not allowed for {model_config.model} on a CPU, where vLLM has no kernel that "
            f"rounds weights to FP8 with one scale for a layer; {_allowed()}"
        )
    if stored is None and model_config.quantization_config is None and _reads_checkpoint(method):
        raise ValueError(
            f"quantization={method!r} is not allowed: config.json of {model_config.model} has no quantization_config, "
            f"so the checkpoint was not quantized with it; {_allowed()}"
        )


def check_layers(model: Any, model_config: ModelConfig) -> None:
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


def check_kernels(model: Any, vllm_config: VllmConfig) -> None:
    """Check what vLLM finds out after it has read the weights, or in the first step, and then without a name.

    Raises:
        ValueError: a layer of the model, a ``torch.nn.Module``, has no kernel on this device.
    """
    for name, module in model.named_modules():
        backend = getattr(getattr(module, "quant_method", None), "fp8_backend", None)
        if backend is not None and backend.name == "NONE":
            raise ValueError(f"no kernel for the experts in {name}")
        if not current_platform.is_cpu():
            continue
        if _is_fp8_of_whole_parts(module):
            raise ValueError(
                f"{name} is fused of parts with an FP8 scale each, which no kernel makes one; allowed: a scale for "
                "each output (per channel)"
            )
        if "WNA16" in type(getattr(module, "scheme", None)).__name__ and vllm_config.model_config.dtype.itemsize == 4:
            raise ValueError(f"{name} packs weights of 4 bits; allowed: --dtype bfloat16 or float16")
        if _is_int8(module) and vllm_config.lora_config is not None:
            # vLLM hands the weights to oneDNN, and its layer for adapters asks for them.
            raise ValueError(
                f"{name} has INT8 weights, over which a CPU has no LoRA adapters; leave out --enable-lora, or merge "
                "the adapter before the weights are quantised"
            )


def check_reload(model: Any) -> None:
    """Check that the weights of a model, a ``torch.nn.Module``, may change while its engine runs.

    Raises:
        ValueError: a layer would go on with what is no longer there.
    """
    for name, module in model.named_modules():
        if current_platform.is_cpu() and _is_int8(module):
            # oneDNN's handle of the layer refers to the memory that vLLM loads the new weights into, and frees.
            raise ValueError(
                f"{name} has INT8 weights, which vLLM does not load anew on a CPU; start an engine with the new ones"
            )


def _is_int8(module: Any) -> bool:
    return "W8A8Int8" in type(getattr(module, "scheme", None)).__name__


def _is_fp8_of_whole_parts(module: Any) -> bool:
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
    from vllm.model_executor.parameter import PerTensorScaleParameter

    scale = getattr(module, "weight_scale", None)
    is_fp8 = isinstance(getattr(module, "quant_method", None), Fp8LinearMethod) or (
        "Fp8" in type(getattr(module, "scheme", None)).__name__
    )
    return is_fp8 and isinstance(scale, PerTensorScaleParameter) and scale.numel() > 1


def give_checkpoint_names(vllm_config: VllmConfig, model: Any, prefix: str) -> None:
    """Have a quantisation method look the layers of a `BlockDiffusionModel` class up under the checkpoint's names.

    A checkpoint's ``quantization_config`` names layers that are not quantised, or quantised otherwise, by whole names,
    parts of names or regular expressions. All of them are meant for the checkpoint's names, so the names of vLLM's
    layers are translated, and the configuration stays as it is.
    """
    quantized, hf_config = vllm_config.quant_config, vllm_config.model_config.hf_config
    if quantized is None:
        return
    if model.stored_parts:
        quantized.packed_modules_mapping = {**quantized.packed_modules_mapping, **model.stored_parts}
    original = type(quantized).get_quant_method
    own = f"{prefix}." if prefix else ""

    def get_quant_method(layer: Any, prefix: str) -> Any:
        return original(quantized, layer, model.stored_module(hf_config, prefix.removeprefix(own)))

    quantized.get_quant_method = get_quant_method


@contextmanager
def refusals_by_name(vllm_config: VllmConfig) -> Iterator[None]:
    """Have what is said of layers that a device cannot compute name the method and its value.

    Raises:
        ValueError: vLLM, or a check of this module, raised an error inside.
    """
    if vllm_config.quant_config is None:
        yield
        return
    model_config = vllm_config.model_config
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if str(error).startswith("quantization="):
            raise
        raise ValueError(f"{_not_here(model_config)}: {error}") from error


def _not_here(model_config: ModelConfig) -> str:
    device = current_platform.device_name or current_platform.device_type
    formats = "docs/quantisation.md says which formats are allowed"
    if current_platform.is_cpu():
        formats = (
            "allowed on a CPU: awq, gptq with 4 bits, and compressed-tensors W4A16, with --dtype bfloat16 or float16; "
            "compressed-tensors INT8 W8A8 and FP8 W8A8 with a scale for each output. Experts in these formats, and FP8 "
            "in blocks, want a GPU, or AMX and a kernel of vLLM's for the model's router"
        )
    return (
        f"quantization={model_config.quantization!r} of {model_config.model} is not allowed with "
        f"dtype={model_config.dtype} on this {device}; {formats}"
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

    here = {name for name, spec in _ONLINE_SHORTHANDS.items() if spec.linear is not None}
    linear = sorted(here - OF_WHOLE_LAYERS if current_platform.is_cpu() else here)
    return f"allowed for a checkpoint that is not quantized: {', '.join(map(repr, linear))}, as far as the device can"
