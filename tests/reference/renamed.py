"""Golden data with other token ids: the same model and the same decoding, said with a permuted vocabulary."""

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .golden import read_cases

OVER_VOCABULARY = (
    "embed_tokens.weight",
    "word_embeddings.weight",
    "lm_head.weight",
    "wte.weight",
    "transformer.ff_out.weight",
)
"""Ends of the names of the tensors that have a row per token."""
TOKEN_IDS = ("mask_id", "mask_token_id", "eos_id", "eos_token_id", "pad_token_id", "bos_token_id", "stop_token")
LISTS_OF_TOKENS = ("prompt_token_ids", "output_token_ids", "canvas_token_ids", "stopping_criteria_idx", "stop_words")


def rename_tokens(source: Path, target: Path, swapped: dict[int, int], names: set[str] | None = None) -> None:
    """Write golden data of a family with token ids exchanged pairwise.

    Args:
        source: the family's folder.
        target: a folder that is made.
        swapped: a token id, and the one that it changes places with.
        names: cases to keep; all if None.
    """
    to = list(range(json.loads((source / "checkpoint" / "config.json").read_text())["vocab_size"]))
    for one, other in swapped.items():
        to[one], to[other] = other, one
    rows = torch.tensor(to)  # An exchange of pairs is its own inverse.

    checkpoint = target / "checkpoint"
    checkpoint.mkdir(parents=True)
    for file in (source / "checkpoint").glob("*.json"):
        (checkpoint / file.name).write_text(json.dumps(_renamed(json.loads(file.read_text()), to)))
    weights = load_file(source / "checkpoint" / "model.safetensors")
    save_file(
        {name: weight[rows] if name.endswith(OVER_VOCABULARY) else weight for name, weight in weights.items()},
        checkpoint / "model.safetensors",
    )

    def of_logits(name: str, tensor: Tensor) -> Tensor:
        if name.startswith("input_ids"):
            return rows[tensor.long()]
        return tensor[..., rows].contiguous() if name.startswith("logits") else tensor

    recorded = load_file(source / "logits.safetensors")
    save_file({name: of_logits(name, tensor) for name, tensor in recorded.items()}, target / "logits.safetensors")

    data = read_cases(source)
    cases = data["cases"] if isinstance(data, dict) else data
    kept = [_renamed(case, to) for case in cases if names is None or case["name"] in names]
    renamed = {**_renamed({**data, "cases": []}, to), "cases": kept} if isinstance(data, dict) else kept
    with gzip.open(target / "cases.json.gz", "wt") as file:
        json.dump(renamed, file)


def _renamed(value: Any, to: list[int], key: str = "") -> Any:
    """A case or a configuration with other token ids. Steps hold pairs of a position and a token."""
    if isinstance(value, dict):
        return {name: _renamed(inner, to, name) for name, inner in value.items()}
    if key in TOKEN_IDS and isinstance(value, int):
        return to[value]
    if key in LISTS_OF_TOKENS or key in TOKEN_IDS:
        return value and [to[token] for token in value]
    if key == "tokens_from_store_or_prefill_logits":
        return [[position, to[token]] for position, token in value]
    if key == "steps" and isinstance(value, list):
        return [[[position, to[token]] for position, token in step] for step in value]
    return value
