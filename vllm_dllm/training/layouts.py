"""Released checkpoint layouts of the tiny models: ``config.json`` and tensor names, written and read.

The network's own parameter names are Qwen3's (and Qwen2's); a layout says what a release calls them.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers.initialization import no_init_weights

from vllm_dllm.training.network import Network, NetworkConfig, build_network
from vllm_dllm.training.text import END_OF_TEXT, IM_END, IM_START, MASK, special_id

MAX_POSITIONS = 1024
"""Context length that the tiny models state."""


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Token ids with a meaning; an autoregressive model's tokenizer has no mask."""

    end_of_text: int
    im_start: int
    im_end: int
    mask: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "SpecialIds":
        """The ids in ``tokenizer``."""
        return cls(
            end_of_text=special_id(tokenizer, END_OF_TEXT),
            im_start=special_id(tokenizer, IM_START),
            im_end=special_id(tokenizer, IM_END),
            mask=tokenizer.token_to_id(MASK),
        )


_HEAD = "lm_head.weight"
_TIED = {_HEAD, "model.embed_tokens.weight"}
"""Parameters that are one with ``tie_word_embeddings``."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How checkpoints of one ``model_type`` are written.

    Attributes:
        shift: row ``i`` predicts token ``i + shift``.
        config: ``config.json`` for a network, its special ids and its block length.
        network: shape of the network that a ``config.json`` describes.
        fixed: values that ``config.json`` must have, if it states them, for :class:`Network` to compute the same.
        released_name: the release's name of one of the network's parameters.
    """

    shift: int
    config: Callable[[NetworkConfig, SpecialIds, int], dict[str, Any]]
    network: Callable[[dict[str, Any]], NetworkConfig]
    fixed: Mapping[str, tuple[Any, ...]]
    released_name: Callable[[str], str]

    def tensors(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The network's state dictionary under the release's names; a tied head is left out, as releases do."""
        tied = state.keys() >= _TIED and len({state[name].data_ptr() for name in _TIED}) == 1
        return {self.released_name(name): tensor for name, tensor in state.items() if not (tied and name == _HEAD)}


def _sdar_config(network: NetworkConfig, ids: SpecialIds, block_length: int) -> dict[str, Any]:
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": block_length,
        "bos_token_id": ids.end_of_text,
        "eos_token_id": ids.end_of_text,
        "mask_token_id": ids.mask,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": network.num_hidden_layers,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": network.vocab_size,
        "hidden_size": network.hidden_size,
        "intermediate_size": network.intermediate_size,
        "num_hidden_layers": network.num_hidden_layers,
        "num_attention_heads": network.num_attention_heads,
        "num_key_value_heads": network.num_key_value_heads,
        "head_dim": network.head_dim,
        "rope_theta": network.rope_theta,
        "rms_norm_eps": network.rms_norm_eps,
    }


def _llada_config(network: NetworkConfig, ids: SpecialIds, block_length: int) -> dict[str, Any]:
    """The fields of GSAI-ML/LLaDA-8B-Instruct; blocks are the sampler's business, so it states no length."""
    return {
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": network.hidden_size,
        "embedding_dropout": 0.0,
        "embedding_size": network.vocab_size,
        "eos_token_id": ids.end_of_text,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": ids.mask,
        "max_sequence_length": MAX_POSITIONS,
        "mlp_hidden_size": network.intermediate_size,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": network.num_attention_heads,
        "n_kv_heads": network.num_key_value_heads,
        "n_layers": network.num_hidden_layers,
        "pad_token_id": ids.end_of_text,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": network.rms_norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": network.rope_theta,
        "scale_logits": False,
        "transformers_version": "4.46.3",
        "use_cache": False,
        "vocab_size": network.vocab_size,
        "weight_tying": False,
    }


def _llada_network(values: dict[str, Any]) -> NetworkConfig:
    return NetworkConfig(
        vocab_size=values["embedding_size"] or values["vocab_size"],
        hidden_size=values["d_model"],
        intermediate_size=values["mlp_hidden_size"],
        num_hidden_layers=values["n_layers"],
        num_attention_heads=values["n_heads"],
        num_key_value_heads=values["n_kv_heads"] or values["n_heads"],
        head_dim=values["d_model"] // values["n_heads"],
        rope_theta=values["rope_theta"],
        rms_norm_eps=values["rms_norm_eps"],
        qk_norm=False,
    )


_LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
}


def _llada_name(name: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if layer:
        return f"model.transformer.blocks.{layer[1]}.{_LLADA_NAMES[layer[2]]}.weight"
    return f"{_LLADA_NAMES[name.removesuffix('.weight')]}.weight"


def _dream_config(network: NetworkConfig, ids: SpecialIds, block_length: int) -> dict[str, Any]:
    """The fields of Dream-v0-Instruct-7B, which states no block length either."""
    return {
        "architectures": ["DreamModel"],
        "attention_dropout": 0.0,
        "bos_token_id": ids.end_of_text,
        "eos_token_id": ids.end_of_text,
        "hidden_act": "silu",
        "hidden_size": network.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": network.intermediate_size,
        "mask_token_id": ids.mask,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": network.num_hidden_layers,
        "model_type": "Dream",
        "num_attention_heads": network.num_attention_heads,
        "num_hidden_layers": network.num_hidden_layers,
        "num_key_value_heads": network.num_key_value_heads,
        "pad_token_id": ids.end_of_text,
        "rms_norm_eps": network.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": network.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.2",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": network.vocab_size,
    }


def _qwen2_config(network: NetworkConfig, ids: SpecialIds, block_length: int) -> dict[str, Any]:
    """The fields of Qwen/Qwen2.5-0.5B; an autoregressive model has no blocks."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": ids.end_of_text,
        "eos_token_id": ids.im_end,
        "hidden_act": "silu",
        "hidden_size": network.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": network.intermediate_size,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": network.num_hidden_layers,
        "model_type": "qwen2",
        "num_attention_heads": network.num_attention_heads,
        "num_hidden_layers": network.num_hidden_layers,
        "num_key_value_heads": network.num_key_value_heads,
        "rms_norm_eps": network.rms_norm_eps,
        "rope_theta": network.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": network.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": network.vocab_size,
    }


def _open_dcoder_config(network: NetworkConfig, ids: SpecialIds, block_length: int) -> dict[str, Any]:
    """A converted Qwen2 model. Checkpoints of drafters are written by ``d2a convert``, which adds [SEP] and context."""
    return {
        **_qwen2_config(network, ids, block_length),
        "architectures": ["OpenDCoderModel"],
        "model_type": "open_dcoder",
        "mask_token_id": ids.mask,
    }


def _rope_theta(values: dict[str, Any]) -> float:
    """Base of the rotary frequencies; newer releases of transformers write it into ``rope_parameters``.

    Raises:
        ValueError: the frequencies are scaled.
    """
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters={rope!r} is not supported: rope_type must be 'default'")
    return values["rope_theta"] if "rope_theta" in values else rope["rope_theta"]


def _qwen_network(values: dict[str, Any], *, qk_norm: bool, qkv_bias: bool) -> NetworkConfig:
    return NetworkConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_hidden_layers=values["num_hidden_layers"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values["num_key_value_heads"],
        head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        rope_theta=_rope_theta(values),
        rms_norm_eps=values["rms_norm_eps"],
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        tie_word_embeddings=values.get("tie_word_embeddings", False),
    )


_QWEN2_FIXED = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}
_QWEN_FIXED = {**_QWEN2_FIXED, "tie_word_embeddings": (False,)}

LAYOUTS = {
    "sdar": Layout(
        shift=0,
        config=_sdar_config,
        network=lambda values: _qwen_network(values, qk_norm=True, qkv_bias=False),
        fixed={**_QWEN_FIXED, "attention_bias": (False,)},
        released_name=str,
    ),
    "llada": Layout(
        shift=0,
        config=_llada_config,
        network=_llada_network,
        fixed={
            "architectures": (["LLaDAModelLM"],),
            "activation_type": ("silu",),
            "alibi": (False,),
            "attention_layer_norm": (False,),
            "bias_for_layer_norm": (False,),
            "block_group_size": (1,),
            "block_type": ("llama",),
            "include_bias": (False,),
            "include_qkv_bias": (False,),
            "input_emb_norm": (False,),
            "layer_norm_type": ("rms",),
            "rope": (True,),
            "scale_logits": (False,),
            "weight_tying": (False,),
        },
        released_name=_llada_name,
    ),
    "Dream": Layout(
        shift=1,
        config=_dream_config,
        network=lambda values: _qwen_network(values, qk_norm=False, qkv_bias=True),
        fixed=_QWEN_FIXED,
        released_name=str,
    ),
    "qwen2": Layout(
        shift=1,
        config=_qwen2_config,
        network=lambda values: _qwen_network(values, qk_norm=False, qkv_bias=True),
        fixed=_QWEN2_FIXED,
        released_name=str,
    ),
    "open_dcoder": Layout(
        shift=1,
        config=_open_dcoder_config,
        network=lambda values: _qwen_network(values, qk_norm=False, qkv_bias=True),
        fixed=_QWEN2_FIXED,
        released_name=str,
    ),
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
    for key, allowed in layout.fixed.items():
        if key in config and config[key] not in allowed:
            raise ValueError(f"{key}={config[key]!r} of {folder} is not supported: it must be {allowed[0]!r}")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.safetensors")
    with no_init_weights():
        network = build_network(layout.network(config))
    network.tie_weights()
    if not weights:
        return network.eval()
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    # By the network's names: a checkpoint with a tied head may hold it once more.
    names = {name: layout.released_name(name) for name in network.state_dict()}
    if network.shape.tie_word_embeddings:
        tensors.setdefault(names[_HEAD], tensors[names["model.embed_tokens.weight"]])
    if set(names.values()) != set(tensors):
        different = sorted(set(names.values()) ^ set(tensors))
        raise ValueError(f"tensors of {folder} that are missing or not expected: {', '.join(different[:5])}")
    network.load_state_dict({name: tensors[released] for name, released in names.items()})
    return network.eval()
