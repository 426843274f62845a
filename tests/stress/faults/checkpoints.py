"""Checkpoints with something wrong in them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_dllm.commands.engine import BUNDLED_MODEL

SDAR = BUNDLED_MODEL
LLADA = BUNDLED_MODEL.with_name("tiny-llada")
DREAM = BUNDLED_MODEL.with_name("tiny-dream")

Tensors = dict[str, torch.Tensor]


def copy(checkpoint: Path, folder: Path, **config: Any) -> Path:
    """A checkpoint without its tensors, with these values in ``config.json``; ``None`` takes a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    settings = json.loads((checkpoint / "config.json").read_text()) | config
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in settings.items() if value is not None})
    )
    return folder


def with_tensors(
    checkpoint: Path, folder: Path, change: Callable[[Tensors], object] = lambda tensors: None, **config: Any
) -> Path:
    """A copy of a checkpoint whose tensors were changed."""
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    copy(checkpoint, folder, **config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def truncated(checkpoint: Path, folder: Path) -> Path:
    """A copy whose tensors were downloaded by half."""
    whole = (checkpoint / "model.safetensors").read_bytes()
    copy(checkpoint, folder)
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder
