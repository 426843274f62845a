"""Random checkpoints: an autoregressive target, and drafters of every kind of attention over the same vocabulary."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 48
MASK, SEP = VOCAB - 2, VOCAB - 1
"""The drafter's own; to the target they are tokens like any other, which it does write."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
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


def random_state(model: PreTrainedModel, seed: int, scale: float) -> dict[str, torch.Tensor]:
    """Weights whose distributions are neither flat nor certain."""
    torch.manual_seed(seed)
    state = model.state_dict()
    for name, tensor in state.items():
        if tensor.dim() == 2:
            state[name] = torch.randn_like(tensor) * scale
    return state


def qwen2_state(seed: int, vocab: int = VOCAB, scale: float = 0.3) -> dict[str, torch.Tensor]:
    return random_state(Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "vocab_size": vocab})), seed, scale)


def write_target(folder: Path, seed: int = 0, vocab: int = VOCAB) -> Path:
    """An autoregressive Qwen2."""
    own = {"vocab_size": vocab, "torch_dtype": "float32"}
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SHAPE, **own}
    return write(folder, config, qwen2_state(seed, vocab))


def write_drafter(folder: Path, context: str, seed: int = 0, vocab: int = VOCAB, **config: Any) -> Path:
    """An Open-dCoder. With the target's seed and a causal context its first draft has the target's own distribution."""
    own = {"vocab_size": vocab, "mask_token_id": vocab - 2, "sep_token_id": vocab - 1, "context_attention": context}
    config = {"architectures": ["OpenDCoderModel"], "model_type": "open_dcoder", **SHAPE, **own, **config}
    return write(folder, {"torch_dtype": "float32", **config}, qwen2_state(seed, vocab))


def write_block_drafter(folder: Path, block_length: int = 8, seed: int = 0, vocab: int = VOCAB) -> Path:
    """An SDAR over the same vocabulary."""
    shape = {**SHAPE, "vocab_size": vocab, "head_dim": 32}
    state = random_state(Qwen3ForCausalLM(Qwen3Config(**shape)), seed, 0.3)
    own = {"mask_token_id": vocab - 2, "block_size": block_length, "torch_dtype": "float32"}
    return write(folder, {"architectures": ["SDARForCausalLM"], "model_type": "sdar", **shape, **own}, state)


def write_shifted_block_drafter(folder: Path, block_length: int, seed: int = 0, vocab: int = VOCAB) -> Path:
    """A Fast-dLLM v2 over the same vocabulary."""
    own = {"vocab_size": vocab, "mask_token_id": vocab - 2, "bd_size": block_length, "torch_dtype": "float32"}
    named = {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen"}
    return write(folder, {**named, **SHAPE, **own}, qwen2_state(seed, vocab))
