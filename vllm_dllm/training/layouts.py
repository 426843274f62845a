"""Released checkpoint layouts: what `config.json` and the tensors of a release mean for the network, read and written.

The network's own names are those of transformers' Qwen3, Qwen2 and Llama; a layout says what a release calls them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, PreTrainedConfig
from transformers.initialization import no_init_weights

from vllm_dllm.models.configs import (
    LLADA_INSIDE,
    LLADA_OUTSIDE,
    BlockDiffusionConfig,
    DreamConfig,
    LLaDAConfig,
    OpenDCoderConfig,
    SDARConfig,
)
from vllm_dllm.training.network import Network, build_network

_HEAD = "lm_head.weight"
"""One with the embedding where there is ``tie_word_embeddings``."""


LAYOUTS: Mapping[str, type[BlockDiffusionConfig]] = {
    "sdar": SDARConfig,
    "llada": LLaDAConfig,
    "Dream": DreamConfig,
    "qwen2": OpenDCoderConfig,
    "open_dcoder": OpenDCoderConfig,
}
"""By ``model_type``: what reads ``config.json``, and refuses what the network does not compute."""

RELEASED_PARTS: Mapping[str, Mapping[str, str]] = {
    "llada": {
        **{llamas: f"model.transformer.{ours}" for ours, llamas in LLADA_OUTSIDE.items()},
        "model.layers": "model.transformer.blocks",
        **{llamas: ours for ours, llamas in LLADA_INSIDE.items()},
    }
}
"""By ``model_type``: a release's names of parts of the network's names, where they differ."""


def released_name(name: str, config: dict[str, Any]) -> str:
    """What a release calls one of the network's parameters."""
    for ours, theirs in RELEASED_PARTS.get(config["model_type"], {}).items():
        name = name.replace(ours, theirs)
    return name


def released_tensors(state: Mapping[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The network's state dictionary under the release's names; a tied head is left out, as releases do.

    Args:
        config: the release's ``config.json``. The state does not say whether the head is tied: of processes that share
            the parameters, head and embedding come as two tensors.
    """
    is_tied = layout_of(config).from_dict(config).tie_word_embeddings
    return {released_name(name, config): tensor for name, tensor in state.items() if not (is_tied and name == _HEAD)}


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no config.json")
    return json.loads(path.read_text())


def layout_of(config: dict[str, Any]) -> type[BlockDiffusionConfig]:
    """The class that reads a checkpoint's ``config.json``.

    Raises:
        ValueError: it is of another type.
    """
    model_type: Any = config.get("model_type")
    if model_type not in LAYOUTS:
        raise ValueError(f"model_type={model_type!r} is not one of {', '.join(LAYOUTS)}")
    return LAYOUTS[model_type]


def network_config(config: dict[str, Any]) -> PreTrainedConfig:
    """transformers' config of the network that a ``config.json`` describes.

    Raises:
        ValueError: the network would compute something else than ``config.json`` asks for.
    """
    # transformers gives the embedding of a `pad_token_id` no gradient, and answers end in that token.
    read = layout_of(config).from_dict({**config, "pad_token_id": None})
    if read.traits.causal_blocks:
        raise ValueError("use_regular_causal=True is not supported in training: blocks see themselves whole there")
    if not isinstance(read, LLaDAConfig):
        if config["model_type"] == "llada":
            raise ValueError(f"architectures={config['architectures']!r} is not supported: a mixture of experts")
        return read
    for key, needed in (("include_qkv_bias", False), ("block_group_size", 1)):
        if config.get(key) not in (needed, None):
            raise ValueError(f"{key}={config[key]!r} is not supported in training: it must be {needed!r}")
    return LlamaConfig.from_dict(read.to_dict())


def load_network(folder: Path, *, weights: bool = True) -> Network:
    """Load a checkpoint in one of the layouts, in float32.

    Args:
        weights: ``False`` leaves them as the memory is, for a process that another one sends its weights.

    Raises:
        FileNotFoundError: config or weights are missing.
        ValueError: the network computes something else than the checkpoint's ``config.json`` asks for.
    """
    config = read_config(folder)
    of_network = network_config(config)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.safetensors")
    with no_init_weights():
        network = build_network(of_network)
    network.tie_weights()
    if not weights:
        return network.eval()
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    # By the network's names: a checkpoint with a tied head may hold it once more.
    names = {name: released_name(name, config) for name in network.state_dict()}
    if network.config.tie_word_embeddings:
        tensors.setdefault(names[_HEAD], tensors[names["model.embed_tokens.weight"]])
    if set(names.values()) != set(tensors):
        different = sorted(set(names.values()) ^ set(tensors))
        raise ValueError(f"tensors of {folder} that are missing or not expected: {', '.join(different[:5])}")
    network.load_state_dict({name: tensors[released] for name, released in names.items()})
    return network.eval()
