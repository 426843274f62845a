"""Models and prompts of the benchmark."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from systems import Request
from transformers import PreTrainedTokenizerFast

from vllm_dllm.commands.problems import grade
from vllm_dllm.tiny.arithmetic import make_problems

SEED = 0


class ModelName(StrEnum):
    """What is decoded with."""

    TINY = "tiny"
    """The bundled model, which was trained on arithmetic, with problems it has not seen."""
    RANDOM = "random"
    """100 M random parameters and random prompts."""


@dataclass(frozen=True)
class Workload:
    """A checkpoint and what it is asked.

    Attributes:
        mask_token_id: -1 where the model is autoregressive.
        requests: their ``max_tokens`` end on a block border, so that every system decides the same positions.
        stop_token_ids: end a request; empty where every request runs to its ``max_tokens``.
        answers: the right answer to each request, where there is one.
        tokenizer: turns tokens into text to be graded.
    """

    model: str
    checkpoint: Path
    block_length: int
    mask_token_id: int
    stop_token_ids: list[int]
    requests: list[Request]
    answers: list[int] | None = None
    tokenizer: PreTrainedTokenizerFast | None = None

    def describe(self) -> dict[str, Any]:
        """For the result."""
        return {
            "prompts": "random" if self.answers is None else "arithmetic",
            "requests": len(self.requests),
            "prompt_tokens": sum(len(request.prompt) for request in self.requests),
            "block_length": self.block_length,
        }

    def accuracy(self, tokens: list[list[int]]) -> float | None:
        """Share of right answers among the first ``len(tokens)`` requests."""
        if self.tokenizer is None or self.answers is None:
            return None
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return sum(map(grade, texts, self.answers)) / len(texts)


def until_block_end(prompt_length: int, tokens: int, block_length: int) -> int:
    """The least number of tokens, at least ``tokens``, that ends on a block border after the prompt."""
    return -(-(prompt_length + tokens) // block_length) * block_length - prompt_length


def arithmetic(model: str, checkpoint: Path, count: int, max_tokens: int, block_length: int | None) -> Workload:
    """Held-out word problems for a checkpoint trained on such. Without a tokenizer: random prompts."""
    config = json.loads((checkpoint / "config.json").read_text())
    block_length = block_length or config["block_size"]
    if not (checkpoint / "tokenizer.json").is_file():
        return random_prompts(model, checkpoint, count, max_tokens, block_length)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    problems = make_problems(count, seed=SEED, split="test")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_dict=False
        )
        for problem in problems
    ]
    return Workload(
        model=model,
        checkpoint=checkpoint,
        block_length=block_length,
        mask_token_id=config.get("mask_token_id", -1),
        stop_token_ids=_stop_token_ids(checkpoint),
        requests=[Request(prompt, until_block_end(len(prompt), max_tokens, block_length)) for prompt in prompts],
        answers=[problem.final_answer for problem in problems],
        tokenizer=tokenizer,
    )


def random_prompts(model: str, checkpoint: Path, count: int, max_tokens: int, block_length: int | None) -> Workload:
    """Random tokens as prompts, of 2 to 4 blocks and a part of one; nothing stops early."""
    config = json.loads((checkpoint / "config.json").read_text())
    block_length = block_length or config["block_size"]
    rng = np.random.default_rng(SEED)
    ordinary = np.setdiff1d(np.arange(config["vocab_size"]), [config["mask_token_id"]])
    requests = []
    for _ in range(count):
        prompt = rng.choice(ordinary, int(rng.integers(2 * block_length, 4 * block_length))).tolist()
        requests.append(Request(prompt, until_block_end(len(prompt), max_tokens, block_length)))
    return Workload(
        model=model,
        checkpoint=checkpoint,
        block_length=block_length,
        mask_token_id=config["mask_token_id"],
        stop_token_ids=[],
        requests=requests,
    )


def _stop_token_ids(checkpoint: Path) -> list[int]:
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    eos = generation["eos_token_id"]
    return eos if isinstance(eos, list) else [eos]


RANDOM_MODEL: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "attention_bias": False,
    "block_size": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "mask_token_id": 8191,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 768,
    "intermediate_size": 2560,
    "max_position_embeddings": 1024,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 8192,
}
"""``config.json`` of the random model: about 100 M parameters."""

_WEIGHT_STD = 0.05
_LOGITS_STD = 8.0
"""Spread of the random model's logits: wide enough that some confidences exceed the threshold."""


def write_random_checkpoint(folder: Path, config: dict[str, Any], seed: int = SEED) -> int:
    """Write a random checkpoint of SDAR's layout in float32; returns the number of parameters.

    The mask's row of ``lm_head`` is zero, so no decoder ever predicts the mask.
    """
    rng = np.random.default_rng(seed)
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int, std: float = _WEIGHT_STD) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, std=1.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, queries),
            f"{prefix}.self_attn.q_norm.weight": ones(config["head_dim"]),
            f"{prefix}.self_attn.k_norm.weight": ones(config["head_dim"]),
            f"{prefix}.mlp.gate_proj.weight": matrix(inter, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inter, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inter),
            f"{prefix}.input_layernorm.weight": ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": ones(hidden),
        }
    tensors["model.norm.weight"] = ones(hidden)
    tensors["lm_head.weight"] = matrix(vocab, hidden, std=_LOGITS_STD / hidden**0.5)
    tensors["lm_head.weight"][config["mask_token_id"]] = 0.0

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.size for tensor in tensors.values())


def make_workload(
    name: ModelName, scratch: Path, checkpoint: Path, block_length: int | None, *, count: int, max_tokens: int
) -> Workload:
    """Prompts for a model, which is made first where it is random."""
    if name == ModelName.TINY:
        return arithmetic(name, checkpoint, count, max_tokens, block_length)
    write_random_checkpoint(scratch / name, RANDOM_MODEL)
    return random_prompts(name, scratch / name, count, max_tokens, block_length)


def write_backbone(checkpoint: Path, folder: Path) -> None:
    """Make ``folder`` the same weights as a Qwen3 model, which is what they are without block diffusion."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for weights in checkpoint.glob("*.safetensors*"):
        (folder / weights.name).symlink_to(weights.resolve())
