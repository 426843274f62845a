"""The golden data of Nemotron-Labs-Diffusion in this project's terms; see ``golden`` for that of the other families."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from tests.paths import GOLDEN

from .decode import Commit, Options
from .golden import Case, read_cases
from .thinking import Thinking

FAMILY = "nemotron_labs_diffusion"
MASK, EOS = 100, 11
SEEDED = Options(
    block_length=32,
    mask_id=MASK,
    policy="static",
    threshold_inclusive=True,
    commit_predicts=True,
    causal_context=True,
    eos_early_stop=True,
)
"""NVIDIA's decoding, one token per forward."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeCase:
    """One run of NVIDIA's ``linear_spec_generate``.

    Attributes:
        tokens: what ours outputs for ``max_new_tokens``: NVIDIA's may be longer.
        nfe: its forwards behind the prefill.
        accepted: for each round, the number of tokens that the round output.
        drafts: for each round, the block that the round verified, the last token of the text first.
    """

    name: str
    prompt: list[int]
    max_new_tokens: int
    block_length: int
    threshold: float
    lora: bool
    stop_ids: frozenset[int]
    thinking: Thinking | None
    tokens: list[int]
    nfe: int
    accepted: list[int]
    drafts: list[list[int]]


class Logits(NamedTuple):
    """Logits of a prompt, and of two states of the block behind it. P positions of the prompt, L of the block."""

    prompt: Tensor  # [P] int64
    block: Tensor  # [L] int64: the first token, masks, and some tokens
    final_block: Tensor  # [L] int64
    prefill: Tensor  # [P, V]: of the prompt
    denoise: Tensor  # [L, V]: of the block, which sees itself whole
    adapted: Tensor  # [L, V]: the same with the adapter
    commit: Tensor  # [L, V]: of the final block, under a causal mask


@dataclass(frozen=True, kw_only=True)
class NemotronGolden:
    checkpoint: Path
    cases: list[Case]
    """Of diffusion: NVIDIA's, and those whose first tokens are denoised, which begin with ``unseeded``."""
    speculative: list[SpeculativeCase]
    autoregressive: list[tuple[list[int], list[int]]]
    """Prompts, and what NVIDIA's ``ar_generate`` outputs."""
    logits: list[Logits]
    thinking: list[Case]
    """Of diffusion with a budget of reasoning, which starts where the prompt ends."""
    speculative_thinking: list[SpeculativeCase]


@functools.cache
def load_nemotron(folder: Path = GOLDEN) -> NemotronGolden:
    """Golden data of the family; the same object whenever it is asked for.

    Raises:
        FileNotFoundError: the golden data is not there.
    """
    folder = folder / FAMILY
    cases, speculative, autoregressive, thinking, speculative_thinking = [], [], [], [], []
    for raw in read_cases(folder)["cases"]:
        thinks = "max_thinking_tokens" in raw["kwargs"]
        if raw["mode"] == "ar":
            autoregressive.append((raw["prompt_token_ids"], raw["output_token_ids"]))
        elif raw["mode"] == "linear_spec":
            (speculative_thinking if thinks else speculative).append(_speculative(raw))
        else:
            (thinking if thinks else cases).append(_diffusion(raw))
    tensors = load_file(folder / "logits.safetensors")
    names = ("prompt", "block", "final_block", "prefill_logits", "denoise_logits", "denoise_lora_logits")
    logits = [Logits(*(tensors[f"{name}_{j}"] for name in (*names, "commit_logits"))) for j in range(4)]
    return NemotronGolden(
        checkpoint=folder / "checkpoint",
        cases=cases,
        speculative=speculative,
        autoregressive=autoregressive,
        logits=logits,
        thinking=thinking,
        speculative_thinking=speculative_thinking,
    )


def _stop_ids(raw: dict[str, Any]) -> frozenset[int]:
    return frozenset() if raw["eos"] == "ignored" else frozenset({raw["eos"]})


def _thinking(raw: dict[str, Any]) -> Thinking | None:
    """NVIDIA's code counts from the end of the prompt: in vLLM's terms the prompt's last token starts the reasoning."""
    if "max_thinking_tokens" not in raw["kwargs"]:
        return None
    end = (raw["kwargs"]["end_think_token_id"],)
    return Thinking(raw["kwargs"]["max_thinking_tokens"], (raw["prompt_token_ids"][-1],), end, end)


def _diffusion(raw: dict[str, Any]) -> Case:
    kwargs, prompt, seeded = raw["kwargs"], raw["prompt_token_ids"], raw["mode"] == "diffusion"
    length, threshold = kwargs["block_length"], kwargs["threshold"]
    options = Options(
        block_length=length,
        mask_id=MASK,
        policy="static" if threshold is None else "threshold",
        threshold=1.0 if threshold is None else threshold,
        threshold_inclusive=True,
        commit_predicts=seeded,
        causal_context=True,
        stop_ids=_stop_ids(raw),
        eos_early_stop=seeded,
        thinking=_thinking(raw),
    )
    steps = [sorted((position, token) for position, token in step) for step in raw["steps"]]
    canvas = [token for block in raw["committed_blocks"] for token in block]
    if options.eos_early_stop and options.stop_ids.intersection(canvas):
        # NVIDIA's code leaves masks behind the stop token.
        canvas = None
    nfe, carried = raw["nfe_denoise"], list[Commit]()
    if seeded:
        # The last block's commit yields nothing.
        nfe += raw["nfe_commit"] - 1
        carried = [(len(prompt) + index * length, token) for index, token in enumerate(raw["seeds"])]
        if len(raw["seeds"]) > 1 and raw["seeds"][-1] in options.stop_ids:
            # Nor does the denoising of a block that begins with the stop token, which ours ends at.
            nfe -= 1
            steps = steps[:-1]
    return Case(
        name=raw["name"],
        prompt=prompt,
        max_new_tokens=kwargs["max_new_tokens"],
        options=options,
        tokens=raw["output_token_ids"],
        canvas=canvas,
        nfe=nfe,
        steps=steps,
        carried=carried,
    )


def _speculative(raw: dict[str, Any]) -> SpeculativeCase:
    kwargs, rounds = raw["kwargs"], raw["rounds"]
    return SpeculativeCase(
        name=raw["name"],
        prompt=raw["prompt_token_ids"],
        max_new_tokens=kwargs["max_new_tokens"],
        block_length=kwargs["block_length"],
        threshold=kwargs["threshold"],
        lora=raw["lora"],
        stop_ids=_stop_ids(raw),
        thinking=_thinking(raw),
        tokens=raw["output_token_ids"][: kwargs["max_new_tokens"]],
        nfe=raw["nfe_draft"] + raw["nfe_verify"],
        accepted=[round_["accepted"] for round_ in rounds],
        drafts=[round_["draft"] for round_ in rounds],
    )
