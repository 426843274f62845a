"""Small networks and checkpoints of the tiny models' layouts."""

from typing import Any

import torch
from transformers import Qwen2Config

from vllm_dllm.tiny import train as tiny
from vllm_dllm.training.layouts import layout_of, network_config
from vllm_dllm.training.network import Network, build_network
from vllm_dllm.training.trainer import read_recipe

RECIPES = ("sdar", "sdar-json", "llada", "dream", "qwen2", "qwen2-small")


def config_of(recipe: str, **sizes: Any) -> dict[str, Any]:
    """``config.json`` of a recipe, with other sizes by transformers' names."""
    config = read_recipe(f"tiny-{recipe}")["config"]
    read = layout_of(config).attribute_map.items()
    keys = {ours: theirs for theirs, ours in read if theirs in config}
    if "embedding_size" in config and "vocab_size" in sizes:
        sizes["embedding_size"] = sizes["vocab_size"]
    return {**config, **{keys.get(key, key): value for key, value in sizes.items()}}


def text_of(recipe: str, **changes: Any) -> tiny.Text:
    """Text of a recipe, with changes."""
    return tiny.Text(**{**read_recipe(f"tiny-{recipe}")["text"], **changes})


def qwen2_network(seed: int = 0, **sizes: Any) -> Network:
    """A network of two layers with ten tokens."""
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": 10,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    return build_network(Qwen2Config(**{**defaults, **sizes}))


def small_network(config: dict[str, Any]) -> Network:
    """The network of a ``config.json``, with noise as weights that bfloat16 holds."""
    torch.manual_seed(0)
    network = build_network(network_config(config))
    for parameter in network.parameters():
        parameter.data = torch.randn_like(parameter).bfloat16().float()
    return network
