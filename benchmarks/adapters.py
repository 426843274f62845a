"""LoRA adapters in the layout of PEFT, random or given, and checkpoints with an adapter merged.

``python benchmarks/adapters.py --help`` writes a random one, to try adapters with; ``docs/lora.md`` says how adapters
are served.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from quantize import copy_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."
"""Before the names of a checkpoint, as PEFT stores them."""


class Pair(NamedTuple):
    """What an adapter adds to a matrix ``[out, in]``: ``up @ down``, scaled."""

    down: Tensor
    """``[rank, in]``"""
    up: Tensor
    """``[out, rank]``"""


def random_adapter(checkpoint: Path, layers: re.Pattern[str], *, rank: int, seed: int, size: float) -> dict[str, Pair]:
    """Pairs for the matrices of a checkpoint whose names ``layers`` finds, by layer.

    Args:
        size: of what is added, in the standard deviation of the matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, tensor in sorted(load_file(checkpoint / "model.safetensors").items()):
        layer = name.removesuffix(".weight")
        if tensor.dim() != 2 or not layers.search(layer):
            continue
        rows, columns = tensor.shape
        deviation = float(tensor.float().std()) * size
        down = torch.randn(rank, columns, generator=generator)
        up = torch.randn(rows, rank, generator=generator) * deviation / rank**0.5
        pairs[layer] = Pair(down, up)
    return pairs


def write_adapter(pairs: Mapping[str, Pair], folder: Path, *, alpha: int | None = None) -> Path:
    """Write an adapter; ``alpha``: its ``lora_alpha``, by default its rank, for a scale of 1."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(pairs.values())).down.shape[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank if alpha is None else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({layer.rpartition(".")[2] for layer in pairs}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    tensors = {}
    for layer, pair in pairs.items():
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = pair.down.contiguous()
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = pair.up.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def merge(checkpoint: Path, pairs: Mapping[str, Pair], folder: Path, *, scale: float = 1.0) -> Path:
    """A checkpoint in float32 with an adapter in its matrices."""
    tensors = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    for layer, pair in pairs.items():
        added = scale * (pair.up.double() @ pair.down.double())
        tensors[f"{layer}.weight"] = (tensors[f"{layer}.weight"].double() + added).float()
    copy_checkpoint(checkpoint, folder, tensors, torch_dtype="float32")
    return folder


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint that the adapter is for, in one file.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the adapter.")],
    layers: Annotated[str, typer.Option(help="Regular expression that finds the names of its layers.")] = "[qv]_proj$",
    rank: Annotated[int, typer.Option(min=1, help="Its rank.")] = 8,
    seed: Annotated[int, typer.Option(help="Of its numbers.")] = 0,
    size: Annotated[float, typer.Option(help="Of what it adds, in the standard deviation of each matrix.")] = 0.1,
) -> None:
    """Write a random adapter of a checkpoint."""
    write_adapter(random_adapter(checkpoint, re.compile(layers), rank=rank, seed=seed, size=size), folder)


if __name__ == "__main__":
    typer.run(main)
