"""Checkpoints with quantised weights that lack something, and formats that this device has no kernel for."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.engine.models.test_quantized import BLOCK, checkpoint_of, load, one_rank, rewritten
from tests.paths import BENCHMARKS
from vllm_dllm.models.checkpoint import CheckpointError

sys.path.insert(0, str(BENCHMARKS))

from quantize import GROUP, Format, write

__all__ = ["one_rank"]


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        pytest.param(
            Format.AWQ,
            lambda tensors: tensors.pop(f"{BLOCK}.0.up_proj.scales"),
            f"missing: {BLOCK}.0.up_proj.scales",
            id="scales of one of two parts",
        ),
        pytest.param(
            Format.GPTQ,
            lambda tensors: tensors.pop(f"{BLOCK}.1.attn_out.qweight"),
            f"missing: {BLOCK}.1.attn_out.qweight",
            id="packed weights",
        ),
        pytest.param(
            Format.INT8,
            lambda tensors: tensors.update({"model.transformer.ff_out.weight_scale": torch.ones(512, 1)}),
            "the model has no place for: model.transformer.ff_out.weight_scale (model.safetensors)",
            id="a scale of a layer that is not quantised",
        ),
        pytest.param(
            Format.W4A16,
            lambda tensors: tensors.update({f"{BLOCK}.0.k_proj.weight_scale": torch.ones(128, 128 // GROUP // 2)}),
            f"of another shape: {BLOCK}.0.k_proj.weight_scale (model.safetensors) is [128, 2] and should be [128, 4]",
            id="groups of another size",
        ),
        pytest.param(
            Format.INT8,
            lambda tensors: tensors[f"{BLOCK}.0.q_proj.weight_scale"].view(-1)[3].fill_(torch.nan),
            f"not finite (NaN or infinite): {BLOCK}.0.q_proj.weight_scale (model.safetensors) has 1 of 128",
            id="a scale that is no number",
        ),
    ],
)
def test_what_a_quantised_checkpoint_lacks_is_named_as_the_checkpoint_would(
    form: Format, change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    write(checkpoint_of("llada"), tmp_path, form)
    rewritten(tmp_path, change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(tmp_path, processed=False)


# Refusals.


@pytest.mark.parametrize(
    ("family", "form", "dtype", "reason"),
    [
        ("sdar", Format.FP8_TENSOR, "bfloat16", "qkv_proj is fused of parts with an FP8 scale each"),
        ("sdar", Format.FP8_BLOCK, "bfloat16", "CPUFp8BlockScaledMMKernel requires AMX"),
        ("sdar", Format.W4A16, "float32", "packs weights of 4 bits; allowed: --dtype bfloat16 or float16"),
        ("llada2_moe", Format.AWQ, "bfloat16", "No WNA16 MoE backend"),
        ("llada2_moe", Format.INT8, "float32", "No Int8 MoE backend"),
        ("llada2_moe", Format.FP8_CHANNEL, "bfloat16", "no kernel for the experts in model.layers.1.mlp.experts"),
    ],
)
def test_what_has_no_kernel_here_is_refused_by_name(
    family: str, form: Format, dtype: str, reason: str, tmp_path: Path
) -> None:
    write(checkpoint_of(family), tmp_path, form)
    method = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"]
    with (
        mock.patch("torch.cpu._is_amx_tile_supported", return_value=False),
        pytest.raises(
            ValueError, match=rf"^quantization='{method}' of .* is not allowed .*dtype=torch.{dtype}"
        ) as error,
    ):
        load(tmp_path, dtype)
    assert "allowed on a CPU: awq" in str(error.value)
    assert reason in str(error.value)


def test_a_type_that_a_method_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    write(checkpoint_of("sdar"), tmp_path, Format.AWQ)
    with pytest.raises(ValueError, match=r"torch\.float32 is not supported for quantization method awq"):
        load(tmp_path, "float32")
