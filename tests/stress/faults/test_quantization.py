"""Quantization that cannot be had is refused; what can be had quantizes layers."""

from collections.abc import Iterator

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from .checkpoints import SDAR
from .test_loading import LLADA2, load, one_rank

__all__ = ["one_rank"]


@pytest.fixture(autouse=True)
def _config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize("method", ["deepseek_v4_fp8", "gpt_oss_mxfp4"])
def test_a_method_of_another_architecture_is_refused_by_name(method: str) -> None:
    with pytest.raises(
        ValueError, match=rf"quantization='{method}' is not allowed: .*SDARForCausalLM.*'fp8_per_channel'"
    ):
        EngineArgs(str(SDAR), quantization=method).create_engine_config()


@pytest.mark.parametrize("method", ["compressed-tensors", "quark", "torchao", "online"])
def test_a_method_that_the_checkpoint_knows_nothing_of_is_refused_by_name(method: str) -> None:
    with pytest.raises(ValueError, match=rf"quantization='{method}' is not allowed: config.json of .* has no quantiz"):
        EngineArgs(str(SDAR), quantization=method).create_engine_config()


@pytest.mark.parametrize("method", ["fp8", "fp8_per_tensor"])
def test_a_method_that_rounds_whole_layers_is_refused_by_name_on_a_cpu(method: str) -> None:
    """vLLM would end in an error of its kernel, once it has read the weights."""
    allowed = "allowed for a checkpoint that is not quantized: 'fp8_per_block', 'fp8_per_channel'"
    with pytest.raises(ValueError, match=rf"quantization='{method}' is not allowed .* on a CPU, .*{allowed}"):
        EngineArgs(str(SDAR), quantization=method).create_engine_config()


@pytest.mark.parametrize("method", ["experts_int8", "int8_per_channel_weight_only", "nvfp4_per_token"])
def test_a_method_that_quantizes_no_layer_is_refused_by_name(method: str) -> None:
    with pytest.raises(ValueError, match=rf"quantization='{method}' is not allowed: it quantizes no layer of SDAR"):
        load(SDAR, dtype="bfloat16", quantization=method)


def test_a_method_that_quantizes_layers_is_taken() -> None:
    model = load(SDAR, dtype="bfloat16", quantization="fp8_per_channel")
    assert any("Fp8" in type(getattr(module, "quant_method", None)).__name__ for module in model.modules())


def test_nothing_is_refused_where_nothing_is_asked_for() -> None:
    load(SDAR)
    load(LLADA2)
