"""Random checkpoints: an autoregressive target, and drafters of every kind of attention over the same vocabulary."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 48
MASK, SEP = 46, 47
"""Ids that texts do not have."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> Path:
    """A checkpoint without a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def qwen2_state(seed: int, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Weights whose laws are neither flat nor certain. No text goes on with the drafter's own ids."""
    torch.manual_seed(seed)
    state = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).state_dict()
    for name, tensor in state.items():
        if tensor.dim() == 2:
            state[name] = torch.randn_like(tensor) * scale
    return state


def write_target(folder: Path, seed: int = 0) -> Path:
    """An autoregressive Qwen2."""
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "float32", **SHAPE}
    return write(folder, config, qwen2_state(seed))


def write_drafter(folder: Path, context: str, seed: int = 0, **config: Any) -> Path:
    """An Open-dCoder. With the target's seed and a causal context its first draft has the target's own law."""
    own = {"mask_token_id": MASK, "sep_token_id": SEP, "context_attention": context, "torch_dtype": "float32"}
    config = {"architectures": ["OpenDCoderModel"], "model_type": "open_dcoder", **SHAPE, **own, **config}
    return write(folder, config, qwen2_state(seed))


def write_block_drafter(folder: Path, block_length: int = 8, seed: int = 0) -> Path:
    """An SDAR over the same vocabulary."""
    torch.manual_seed(seed)
    shape = {**SHAPE, "head_dim": 32}
    state = Qwen3ForCausalLM(Qwen3Config(**shape)).state_dict()
    for name, tensor in state.items():
        if tensor.dim() == 2:
            state[name] = torch.randn_like(tensor) * 0.3
    own = {"mask_token_id": MASK, "block_size": block_length, "torch_dtype": "float32"}
    config = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", **shape, **own}
    return write(folder, config, state)
