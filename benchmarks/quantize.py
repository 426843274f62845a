"""Checkpoints of the families in the published layouts of quantised weights, rounded to nearest.

``python benchmarks/quantize.py --help``; ``docs/quantisation.md`` says what runs where. Tools that calibrate
(llm-compressor, AutoAWQ, GPTQModel) round better and write the same layouts.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
"""Inputs that share a scale, in the formats of 4 bits."""
FP8_BLOCK = (128, 128)
"""Rows and columns that share a scale, in blockwise FP8."""

KEPT = re.compile(r"(embed_tokens|word_embeddings|wte|lm_head|diffusion_head|transformer\.ff_out|mlp\.gate)\.weight$")
"""Matrices that stay as they are: embeddings, output heads, routers."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours AWQ puts into each four bits of an integer, from the lowest."""


class Quantized(NamedTuple):
    """A matrix in a format."""

    tensors: dict[str, Tensor]
    """As stored, by the name behind the layer's."""
    weight: Tensor
    """``[out, in]`` float32, what the stored tensors stand for."""


class Format(StrEnum):
    AWQ = "awq"
    GPTQ = "gptq"
    INT8 = "int8"
    W4A16 = "w4a16"
    FP8_TENSOR = "fp8-tensor"
    FP8_CHANNEL = "fp8-channel"
    FP8_BLOCK = "fp8-block"


def _packed(values: Tensor, dim: int, order: Sequence[int] = range(8)) -> Tensor:
    """Eight 4-bit integers along ``dim`` in each int32."""
    eight = values.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    packed = sum(eight[..., source] << 4 * place for place, source in enumerate(order))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _scale(scale: Tensor, dtype: torch.dtype, exact: bool) -> Tensor:
    """A scale as it is stored. ``exact``: a power of two, so that bfloat16 holds every dequantised weight."""
    scale = scale.clamp(min=2.0**-14)
    return (torch.exp2(scale.log2().ceil()) if exact else scale).to(dtype)


def _symmetric(weight: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """4-bit integers ``[out, in]`` around 8, and the scales ``[out, groups]`` of groups of inputs."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = _scale(groups.abs().amax(2) / 7.5, torch.float16, exact)
    return (groups / scale[..., None]).round().clamp(-8, 7).flatten(1) + 8, scale


def _awq(weight: Tensor, exact: bool) -> Quantized:
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2)
    scale = _scale((high - low) / 15, torch.float16, exact)
    zero = (-low / scale).round().clamp(0, 15)
    integers = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    tensors = {
        "qweight": _packed(integers.flatten(1).T, 1, _AWQ_ORDER),
        "qzeros": _packed(zero.T, 1, _AWQ_ORDER),
        "scales": scale.T,
    }
    return Quantized(tensors, ((integers - zero[..., None]) * scale[..., None].float()).flatten(1))


def _gptq(weight: Tensor, exact: bool) -> Quantized:
    integers, scale = _symmetric(weight, exact)
    tensors = {
        "qweight": _packed(integers.T, 0),
        # Stored less one, as GPTQ does.
        "qzeros": _packed(torch.full((scale.shape[1], scale.shape[0]), 7), 1),
        "scales": scale.T,
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }
    return Quantized(tensors, (integers - 8) * scale.float().repeat_interleave(GROUP, 1))


def _w4a16(weight: Tensor, exact: bool) -> Quantized:
    integers, scale = _symmetric(weight, exact)
    tensors = {
        "weight_packed": _packed(integers, 1),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return Quantized(tensors, (integers - 8) * scale.bfloat16().float().repeat_interleave(GROUP, 1))


def _int8(weight: Tensor, exact: bool) -> Quantized:
    scale = _scale(weight.abs().amax(1, keepdim=True) / 127.5, torch.float32, exact)
    integers = (weight / scale).round().clamp(-128, 127)
    return Quantized({"weight": integers.to(torch.int8), "weight_scale": scale}, integers * scale)


def _fp8(weight: Tensor, limit: Tensor, name: str, exact: bool) -> Quantized:
    """``limit``: the largest weight of each scale, in the shape of the scales."""
    scale = _scale(limit / torch.finfo(torch.float8_e4m3fn).max, torch.float32, exact)
    spread = scale
    for dim in range(scale.dim()):
        spread = spread.repeat_interleave(-(-weight.shape[dim] // scale.shape[dim]), dim).narrow(
            dim, 0, weight.shape[dim]
        )
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return Quantized({"weight": stored, name: scale}, stored.float() * spread)


def _fp8_blocks(weight: Tensor, exact: bool) -> Quantized:
    rows, columns = weight.shape
    high, wide = FP8_BLOCK
    padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    limit = blocks.abs().amax((1, 3))
    quantized = _fp8(padded, limit, "weight_scale_inv", exact)
    tensors = {**quantized.tensors, "weight": quantized.tensors["weight"][:rows, :columns].contiguous()}
    return Quantized(tensors, quantized.weight[:rows, :columns])


_WRITERS: dict[Format, Callable[[Tensor, bool], Quantized]] = {
    Format.AWQ: _awq,
    Format.GPTQ: _gptq,
    Format.INT8: _int8,
    Format.W4A16: _w4a16,
    Format.FP8_TENSOR: lambda weight, exact: _fp8(weight, weight.abs().amax(), "weight_scale", exact),
    Format.FP8_CHANNEL: lambda weight, exact: _fp8(weight, weight.abs().amax(1, keepdim=True), "weight_scale", exact),
    Format.FP8_BLOCK: _fp8_blocks,
}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, kept: list[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
        "kv_cache_scheme": None,
    }


def configuration(form: Format, kept: list[str]) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint. ``kept``: layers, in the checkpoint's names, that stay as they are."""
    channel = {"strategy": "channel", "symmetric": True, "dynamic": False, "group_size": None}
    token = {"strategy": "token", "symmetric": True, "dynamic": True}
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": kept}
    match form:
        case Format.AWQ:
            names = {"modules_to_not_convert": kept or None}
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": GROUP,
                "zero_point": True,
                "version": "gemm",
                **names,
            }
        case Format.GPTQ:
            return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
        case Format.INT8:
            sizes = {"num_bits": 8, "type": "int"}
            return _compressed("int-quantized", {**sizes, **channel}, {**sizes, **token}, kept)
        case Format.W4A16:
            group = {"strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False}
            return _compressed("pack-quantized", {"num_bits": 4, "type": "int", **group}, None, kept)
        case Format.FP8_TENSOR:
            return fp8
        case Format.FP8_CHANNEL:
            sizes = {"num_bits": 8, "type": "float"}
            return _compressed("float-quantized", {**sizes, **channel}, {**sizes, **token}, kept)
        case Format.FP8_BLOCK:
            return {**fp8, "weight_block_size": list(FP8_BLOCK)}


def write(
    source: Path,
    folder: Path,
    form: Format,
    *,
    keep: re.Pattern[str] | None = None,
    exact: bool = False,
    dequantized: Path | None = None,
    change: Callable[[dict[str, Any]], object] = lambda settings: None,
) -> None:
    """Write a checkpoint with its matrices in a format.

    Args:
        keep: further names of matrices that stay as they are.
        exact: scales are powers of two, so that bfloat16 holds every dequantised weight.
        dequantized: folder for a checkpoint without quantisation whose weights are those of the quantised one.
        change: changes ``quantization_config`` before it is written.
    """
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    kept = []
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        stored[name] = plain[name] = tensor
        if tensor.dim() != 2 or not name.endswith(".weight"):
            continue
        layer = name.removesuffix(".weight")
        if KEPT.search(name) or (keep is not None and keep.search(name)):
            kept.append(layer)
            continue
        quantized = _WRITERS[form](tensor.float(), exact)
        del stored[name]
        stored |= {f"{layer}.{kind}": part.contiguous() for kind, part in quantized.tensors.items()}
        plain[name] = quantized.weight.to(tensor.dtype).contiguous()
    settings = configuration(form, kept)
    change(settings)
    copy_checkpoint(source, folder, stored, quantization_config=settings)
    if dequantized is not None:
        copy_checkpoint(source, dequantized, plain)


def copy_checkpoint(source: Path, folder: Path, tensors: dict[str, Tensor], **settings: Any) -> None:
    """Write a copy of a checkpoint with other tensors, and with these values in its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main(
    source: Annotated[Path, typer.Argument(help="Checkpoint, in one file.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the quantised one.")],
    form: Annotated[Format, typer.Option("--format", help="Format of the weights.")] = Format.INT8,
) -> None:
    """Write a checkpoint with its matrices in a format, rounded to nearest."""
    write(source, folder, form)


if __name__ == "__main__":
    typer.run(main)
