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
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.initialization import no_init_weights

from vllm_dllm.training.network import Network, build_network

_HEAD = "lm_head.weight"
"""One with the embedding where there is ``tie_word_embeddings``."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
)
"""Keys of transformers' configs that a checkpoint decides."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How checkpoints of one ``model_type`` are written.

    Attributes:
        shift: row ``i`` predicts token ``i + shift``.
        config: transformers' config of the network.
        fixed: values that ``config.json`` must have, if it states them, for the network to compute the same.
        keys: the release's names of :data:`_SIZES`, where they differ.
        parts: the release's names of parts of the parameters' names, where they differ.
    """

    shift: int
    config: type[PreTrainedConfig]
    fixed: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
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
        is_tied = bool(config.get(self.keys.get("tie_word_embeddings", "tie_word_embeddings")))
        return {self.released_name(name): tensor for name, tensor in state.items() if not (is_tied and name == _HEAD)}


_QWEN2_FIXED = {"hidden_act": "silu", "rope_scaling": None, "use_mrope": False, "use_sliding_window": False}
_QWEN_FIXED = {**_QWEN2_FIXED, "tie_word_embeddings": False}
_LLADA = Layout(
    shift=0,
    config=LlamaConfig,
    fixed={
        "architectures": ["LLaDAModelLM"],
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "rope": True,
        "scale_logits": False,
        "weight_tying": False,
    },
    keys={
        "vocab_size": "embedding_size",
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "tie_word_embeddings": "weight_tying",
    },
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

LAYOUTS = {
    "sdar": Layout(shift=0, config=Qwen3Config, fixed={**_QWEN_FIXED, "attention_bias": False}),
    "llada": _LLADA,
    "Dream": Layout(shift=1, config=Qwen2Config, fixed=_QWEN_FIXED),
    "qwen2": Layout(shift=1, config=Qwen2Config, fixed=_QWEN2_FIXED),
    "open_dcoder": Layout(shift=1, config=Qwen2Config, fixed=_QWEN2_FIXED),
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
    layout = layout_of(config)
    for key, needed in layout.fixed.items():
        if config.get(key, needed) != needed:
            raise ValueError(f"{key}={config[key]!r} is not supported: it must be {needed!r}")
    rope = config.get("rope_parameters") or {}  # where newer releases of transformers write the base
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters={rope!r} is not supported: rope_type must be 'default'")
    theta = config["rope_theta"] if "rope_theta" in config else rope["rope_theta"]
    stated: dict[str, Any] = {key: config.get(layout.keys.get(key, key)) for key in _SIZES}
    heads = stated["num_attention_heads"]
    defaults = {
        "vocab_size": config["vocab_size"],
        "num_key_value_heads": heads,
        "head_dim": stated["hidden_size"] // heads,
        "tie_word_embeddings": False,
    }
    sizes = {**defaults, **{key: value for key, value in stated.items() if value is not None}}
    return layout.config(
        **sizes, rope_parameters={"rope_type": "default", "rope_theta": theta}, initializer_range=0.02, use_cache=False
    )


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
