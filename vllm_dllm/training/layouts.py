"""Released checkpoint layouts: what `config.json` and the tensors of a release mean for the network, read and written.

The network's own names are those of transformers' Qwen3, Qwen2 and Llama; a layout says what a release calls them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, PreTrainedConfig
from transformers.initialization import no_init_weights

from vllm_dllm.models.configs import DreamConfig, LLaDAConfig, OpenDCoderConfig, SDARConfig
from vllm_dllm.training.network import Network, build_network

_HEAD = "lm_head.weight"
"""One with the embedding where there is ``tie_word_embeddings``."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How checkpoints of one ``model_type`` are written.

    Attributes:
        shift: row ``i`` predicts token ``i + shift``.
        config: reads ``config.json``, and refuses what the network does not compute.
        parts: the release's names of parts of the parameters' names, where they differ.
    """

    shift: int
    config: type[PreTrainedConfig]
    parts: Mapping[str, str] = field(default_factory=dict)

    def released_name(self, name: str) -> str:
        """The release's name of one of the network's parameters."""
        for ours, theirs in self.parts.items():
            name = name.replace(ours, theirs)
        return name

    def tensors(self, state: Mapping[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The network's state dictionary under the release's names; a tied head is left out, as releases do.

        Args:
            config: the release's ``config.json``. The state does not say whether the head is tied: of processes that
                share the parameters, head and embedding come as two tensors.
        """
        is_tied = self.config.from_dict(config).tie_word_embeddings
        return {self.released_name(name): tensor for name, tensor in state.items() if not (is_tied and name == _HEAD)}


_LLADA = Layout(
    shift=0,
    config=LLaDAConfig,
    parts={
        "model.embed_tokens": "model.transformer.wte",
        "model.norm": "model.transformer.ln_f",
        "lm_head": "model.transformer.ff_out",
        "model.layers": "model.transformer.blocks",
        "self_attn.o_proj": "attn_out",
        "self_attn.": "",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
    },
)
_OF_LLAMA = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
)
"""Keys of transformers' config of LLaDA's network."""

LAYOUTS = {
    "sdar": Layout(shift=0, config=SDARConfig),
    "llada": _LLADA,
    "Dream": Layout(shift=1, config=DreamConfig),
    "qwen2": Layout(shift=1, config=OpenDCoderConfig),
    "open_dcoder": Layout(shift=1, config=OpenDCoderConfig),
}
"""By ``model_type``."""


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no config.json")
    return json.loads(path.read_text())


def layout_of(config: dict[str, Any]) -> Layout:
    """Layout of a checkpoint.

    Raises:
        ValueError: it is of another type.
    """
    model_type = config.get("model_type")
    if model_type not in LAYOUTS:
        raise ValueError(f"model_type={model_type!r} is not one of {', '.join(LAYOUTS)}")
    return LAYOUTS[model_type]


def network_config(config: dict[str, Any]) -> PreTrainedConfig:
    """transformers' config of the network that a ``config.json`` describes.

    Raises:
        ValueError: the network would compute something else than ``config.json`` asks for.
    """
    # transformers gives the embedding of a `pad_token_id` no gradient, and answers end in that token.
    read = layout_of(config).config.from_dict({**config, "pad_token_id": None})
    if not isinstance(read, LLaDAConfig):
        if config["model_type"] == "llada":
            raise ValueError(f"architectures={config['architectures']!r} is not supported: a mixture of experts")
        return read
    for key, needed in (("include_qkv_bias", False), ("block_group_size", 1)):
        if config.get(key) not in (needed, None):
            raise ValueError(f"{key}={config[key]!r} is not supported in training: it must be {needed!r}")
    return LlamaConfig(**{key: getattr(read, key) for key in _OF_LLAMA})


def load_network(folder: Path, *, weights: bool = True) -> Network:
    """Load a checkpoint in one of the layouts, in float32.

    Args:
        weights: ``False`` leaves them as the memory is, for a process that another one sends its weights.

    Raises:
        FileNotFoundError: config or weights are missing.
        ValueError: the network computes something else than the checkpoint's ``config.json`` asks for.
    """
    config = read_config(folder)
    layout = layout_of(config)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.safetensors")
    with no_init_weights():
        network = build_network(network_config(config))
    network.tie_weights()
    if not weights:
        return network.eval()
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    # By the network's names: a checkpoint with a tied head may hold it once more.
    names = {name: layout.released_name(name) for name in network.state_dict()}
    if network.config.tie_word_embeddings:
        tensors.setdefault(names[_HEAD], tensors[names["model.embed_tokens.weight"]])
    if set(names.values()) != set(tensors):
        different = sorted(set(names.values()) ^ set(tensors))
        raise ValueError(f"tensors of {folder} that are missing or not expected: {', '.join(different[:5])}")
    network.load_state_dict({name: tensors[released] for name, released in names.items()})
    return network.eval()
