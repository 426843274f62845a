"""Checkpoints with quantised weights: the model is that of the dequantised weights, in every family and format.

Scales are powers of two here (`write(..., exact=True)`), so that bfloat16 holds every dequantised weight, and a kernel
that multiplies by the scales has nothing to round.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.engine.models.test_backbones import (
    BLOCK_CAUSAL,
    FULL_ATTENTION,
    logits_of,
    one_rank,
    rewrite_config,
    save_llada_moe,
)
from tests.engine.runtime.test_pangu import CONFIG as PANGU
from tests.engine.runtime.test_pangu import save_checkpoint as save_pangu
from tests.paths import BENCHMARKS, BUNDLED
from vllm_dllm.models.checkpoint import CheckpointError
from vllm_dllm.plugin import register

sys.path.insert(0, str(BENCHMARKS))

import quantize
from quantize import Format, write

__all__ = ["one_rank"]

register()

WEIGHTS_ALONE = (Format.AWQ, Format.GPTQ, Format.W4A16)
INPUTS_TOO = (Format.INT8, Format.FP8_CHANNEL)
IDS = torch.arange(1, 33)


class Loaded(NamedTuple):
    model: nn.Module
    config: VllmConfig

    def logits(self) -> Tensor:
        with set_default_torch_dtype(self.config.model_config.dtype):
            return logits_of(self.model, self.config, IDS, len(IDS)).float()


def load(checkpoint: Path, dtype: str = "bfloat16", *, processed: bool = True, **arguments: Any) -> Loaded:
    """Load a checkpoint as vLLM does. ``processed``: ready to run, its weights in the kernels' layout."""
    config = EngineArgs(
        str(checkpoint),
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        hf_overrides={"mask_token_id": 0},
        **arguments,
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        if processed:
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return Loaded(model.eval(), config)


def checkpoint_of(family: str) -> Path:
    return BUNDLED / family / "checkpoint"


FAMILIES = (*BLOCK_CAUSAL, *FULL_ATTENTION, "nemotron_labs_diffusion")
FORMATS = {"open_dcoder": "open_dcoder", "pangu": "pangu_diffusion"}
"""``--config-format`` of families whose checkpoints look like autoregressive ones."""


def write_source(family: str, folder: Path) -> Path:
    """A small checkpoint of a family without quantisation."""
    match family:
        case "pangu":
            folder.mkdir()
            return save_pangu(folder, PANGU)
        case "open_dcoder":
            folder.mkdir()
            config = json.loads((checkpoint_of("dream") / "config.json").read_text())
            rewrite_config(folder, config | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
            shutil.copy(checkpoint_of("dream") / "model.safetensors", folder)
        case "llada_moe" | "sdar_moe":
            save_llada_moe(folder)
            if family == "sdar_moe":
                config = json.loads((folder / "config.json").read_text())
                names = {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "norm_topk_prob": True}
                sizes = {"intermediate_size": 128, "moe_intermediate_size": 32, "head_dim": 32, "mlp_only_layers": [1]}
                del config["shared_expert_intermediate_size"]
                rewrite_config(folder, config | names | sizes)
        case _:
            return checkpoint_of(family)
    return folder


def load_family(family: str, checkpoint: Path, dtype: str = "bfloat16", **arguments: Any) -> Loaded:
    if family in FORMATS:
        arguments["config_format"] = FORMATS[family]
    return load(checkpoint, dtype, **arguments)


def quantized_layers(model: nn.Module) -> set[str]:
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, LinearBase) and not isinstance(module.quant_method, UnquantizedLinearMethod)
    }


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


MOES = ("llada2_moe", "sdar_moe", "llada_moe")
EXPERTS = re.compile("experts")
"""What stays as it is where experts have no kernel here."""


@pytest.mark.parametrize("form", [Format.W4A16, *INPUTS_TOO])
@pytest.mark.parametrize("family", [*FAMILIES, *MOES[1:], *FORMATS])
def test_compressed_tensors_are_what_they_stand_for(family: str, form: Format, tmp_path: Path) -> None:
    is_exact = form == Format.W4A16
    source = write_source(family, tmp_path / "source")
    write(source, tmp_path / "q", form, keep=EXPERTS, exact=True, dequantized=tmp_path / "plain")
    dtype = "bfloat16" if is_exact else "float32"
    quantized, plain = (load_family(family, tmp_path / name, dtype) for name in ("q", "plain"))
    assert quantized_layers(quantized.model)
    if not is_exact:
        round_inputs(plain.model, quantized_layers(quantized.model), ROUND[form])
    # A kernel may round an input that lies between two integers to either.
    # Another integer may choose another expert.
    tolerance = 1e-3 if is_exact else 3e-2 if family in MOES else 1e-2
    assert distance(quantized.logits(), plain.logits()) < tolerance


def _int8(inputs: Tensor) -> Tensor:
    scale = inputs.abs().amax(-1, keepdim=True) / 127
    return (inputs / scale).round() * scale


def _fp8(inputs: Tensor) -> Tensor:
    scale = inputs.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (inputs / scale).to(torch.float8_e4m3fn).float() * scale


ROUND = {Format.INT8: _int8, Format.FP8_CHANNEL: _fp8}


def round_inputs(model: nn.Module, layers: set[str], rounded: Callable[[Tensor], Tensor]) -> None:
    """Have layers round their inputs, a scale for each row."""
    for name in layers:
        model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))


@pytest.mark.parametrize("form", [Format.AWQ, Format.GPTQ])
@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != "llada2_moe"), *FORMATS])
def test_awq_and_gptq_are_what_they_stand_for(family: str, form: Format, tmp_path: Path) -> None:
    source = write_source(family, tmp_path / "source")
    write(source, tmp_path / "q", form, exact=True, dequantized=tmp_path / "plain")
    quantized, plain = (load_family(family, tmp_path / name).logits() for name in ("q", "plain"))
    assert distance(quantized, plain) < 1e-3


# Names.


def changed(**settings: Any) -> Callable[[dict[str, Any]], object]:
    return lambda given: given.update(settings)


BLOCK = "model.transformer.blocks"


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        pytest.param(
            Format.W4A16, {"ignore": ["model.transformer.ff_out", f"{BLOCK}.1.ff_out"]}, id="compressed-tensors, names"
        ),
        pytest.param(
            Format.W4A16,
            {"ignore": [r"re:.*transformer\.ff_out", r"re:.*blocks\.1\.ff_out"]},
            id="compressed-tensors, expressions",
        ),
        pytest.param(
            Format.AWQ, {"modules_to_not_convert": ["1.ff_out", "transformer.ff_out"]}, id="AWQ, parts of names"
        ),
        pytest.param(Format.AWQ, {"modules_to_not_convert": None}, id="AWQ, from the tensors"),
        pytest.param(Format.GPTQ, {}, id="GPTQ, from the tensors"),
        pytest.param(
            Format.GPTQ,
            {"dynamic": {rf"-:{re.escape(BLOCK)}\.1\.ff_out": {}}, "modules_in_block_to_quantize": [["blocks"]]},
            id="GPTQ, dynamic",
        ),
    ],
)
def test_layers_that_stay_as_they_are_have_the_checkpoints_names(
    form: Format, settings: dict[str, Any], tmp_path: Path
) -> None:
    """LLaDA calls its output head and its down projections ``ff_out``, and its gates ``ff_proj``."""
    write(
        checkpoint_of("llada"),
        tmp_path / "q",
        form,
        keep=re.compile(r"1\.ff_out"),
        exact=True,
        dequantized=tmp_path / "plain",
        change=changed(**settings),
    )
    quantized = load(tmp_path / "q")
    assert {name for name in quantized_layers(quantized.model) if "mlp" in name} == {
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.gate_up_proj",
    }
    assert distance(quantized.logits(), load(tmp_path / "plain").logits()) < 1e-3


@pytest.mark.parametrize(
    ("form", "layer", "kept"),
    [
        (Format.INT8, "self_attn.qkv_proj", r"1\.self_attn\.[qkv]_proj"),
        (Format.FP8_CHANNEL, "mlp.gate_up_proj", r"1\.mlp\.(gate|up)_proj"),
    ],
)
def test_a_fused_layer_stays_as_it_is_where_its_parts_do(form: Format, layer: str, kept: str, tmp_path: Path) -> None:
    write(checkpoint_of("dream"), tmp_path, form, keep=re.compile(kept))
    layers = quantized_layers(load(tmp_path, "float32").model)
    assert {f"model.layers.0.{layer}", f"model.layers.1.{layer}"} & layers == {f"model.layers.0.{layer}"}


def test_groups_of_blocks_have_the_checkpoints_names(tmp_path: Path) -> None:
    """LLaDA's layout with ``block_group_size`` 2."""
    source = tmp_path / "grouped"
    source.mkdir()
    config = json.loads((checkpoint_of("llada") / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"block_group_size": 2}))
    tensors = load_file(checkpoint_of("llada") / "model.safetensors")
    save_file(
        {name.replace(".blocks.", ".block_groups.0."): x for name, x in tensors.items()}, source / "model.safetensors"
    )
    write(
        source,
        tmp_path / "q",
        Format.AWQ,
        keep=re.compile(r"0\.1\.(q|k|v)_proj"),
        exact=True,
        dequantized=tmp_path / "p",
    )
    quantized = load(tmp_path / "q")
    assert "model.layers.1.self_attn.qkv_proj" not in quantized_layers(quantized.model)
    assert distance(quantized.logits(), load(tmp_path / "p").logits()) < 1e-3


# What cannot run here loads.


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with kernels for every layer, as far as loading goes."""
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(FusedMoEExperts, "is_supported_config", staticmethod(lambda *_: (True, None)))
    monkeypatch.setattr(
        "vllm.model_executor.layers.quantization.auto_awq.check_moe_marlin_supports_layer", lambda *_, **__: True
    )
    monkeypatch.setattr(CPUFp8BlockScaledMMKernel, "can_implement", lambda *_: (True, None))
    monkeypatch.setattr("vllm_dllm.models.block_diffusion.check_kernels", lambda *_: None)
    # Small enough for the parts of these checkpoints' layers.
    monkeypatch.setattr(quantize, "FP8_BLOCK", (32, 32))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", [*WEIGHTS_ALONE, *INPUTS_TOO, Format.FP8_BLOCK, Format.FP8_TENSOR])
@pytest.mark.parametrize("family", MOES)
def test_experts_take_every_tensor(family: str, form: Format, tmp_path: Path) -> None:
    """A tensor without a place, and a place without a tensor, would be an error."""
    write(write_source(family, tmp_path / "source"), tmp_path / "q", form)
    model = load(tmp_path / "q", processed=False).model
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    assert experts
    assert not any(isinstance(layer.quant_method, UnquantizedFusedMoEMethod) for layer in experts)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", [Format.FP8_BLOCK, Format.FP8_TENSOR])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MOES])
def test_dense_layers_take_every_tensor(family: str, form: Format, tmp_path: Path) -> None:
    write(checkpoint_of(family), tmp_path, form)
    assert quantized_layers(load(tmp_path, processed=False).model)


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


SCALES = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def write_with_scales(family: str, attention: str, folder: Path) -> None:
    """A checkpoint whose scales of K/V are 0.5 and 1.5."""
    write(checkpoint_of(family), folder, Format.FP8_CHANNEL, keep=EXPERTS, change=changed(kv_cache_scheme=SCALES))
    scales = {f"model.layers.{layer}.{attention}.{x}_scale": 0.5 + layer for layer in range(2) for x in "kv"}
    rewritten(folder, lambda tensors: tensors.update({name: torch.tensor(scale) for name, scale in scales.items()}))


@pytest.mark.parametrize("family", ["sdar", "dream"])
def test_scales_of_keys_and_values_are_the_checkpoints(family: str, tmp_path: Path) -> None:
    write_with_scales(family, "self_attn", tmp_path)
    model = load(tmp_path, kv_cache_dtype="fp8").model
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    assert [(each._k_scale.item(), each._v_scale.item()) for each in layers] == [(0.5, 0.5), (1.5, 1.5)]


def test_scales_of_keys_and_values_without_a_place_are_named_where_they_would_count(tmp_path: Path) -> None:
    """vLLM's attention of LLaDA2 has none."""
    write_with_scales("llada2_moe", "attention", tmp_path)
    with pytest.raises(CheckpointError, match=r"the model has no place for: model\.layers\.0\.attention\.k_scale"):
        load(tmp_path, kv_cache_dtype="fp8")
    load(tmp_path)
