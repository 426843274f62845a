"""Accuracy and forwards of LLaDA's decoding and FeF-DLLM's, before and after prefix-conditioned fine-tuning.

``python -m vllm_dllm.training.compare_fef --model DIR --tuned DIR`` makes the table of ``docs/tiny-models.md``, in the
shape of paper 000's Table 1 and its first ablation.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from vllm_dllm.commands.problems import grade
from vllm_dllm.methods import OPTION_DEFAULTS
from vllm_dllm.training.arithmetic import Problem, make_problems
from vllm_dllm.training.full_attention import decode_fef, decode_windows
from vllm_dllm.training.layouts import layout_of, load_network, read_config
from vllm_dllm.training.network import Network
from vllm_dllm.training.text import MASK, render_prompt, special_id
from vllm_dllm.training.tiny import FAMILIES, HELD_OUT_SEED

_GROUP = 25


class Result(NamedTuple):
    """One model under one policy.

    Attributes:
        accuracy: share of exact final answers.
        forwards: mean per problem; a verifying forward counts one, however many inputs it has.
        accepted: share of the drafts accepted, without the first of each round, which always is; ``None``: no drafts.
    """

    accuracy: float
    forwards: float
    accepted: float | None


class Decoding(NamedTuple):
    """Windows of several prompts.

    Attributes:
        tokens: per prompt.
        forwards: per prompt.
        drafts, accepted: of all of them together.
    """

    tokens: list[list[int]]
    forwards: list[int]
    drafts: int = 0
    accepted: int = 0


Policy = Callable[[Network, list[list[int]]], Decoding]


def measure(network: Network, tokenizer: Tokenizer, problems: list[Problem], policy: Policy, name: str) -> Result:
    """Decode and grade problems, a group of them at a time."""
    right = forwards = drafts = accepted = 0
    for start in track(range(0, len(problems), _GROUP), description=name, transient=True):
        group = problems[start : start + _GROUP]
        decoded = policy(network, [tokenizer.encode(render_prompt(problem.question)).ids for problem in group])
        texts = tokenizer.decode_batch(decoded.tokens)
        right += sum(grade(text, problem.final_answer) for text, problem in zip(texts, group, strict=True))
        forwards += sum(decoded.forwards)
        drafts += decoded.drafts
        accepted += decoded.accepted
    share = accepted / drafts if drafts else None
    return Result(right / len(problems), forwards / len(problems), share)


def policies(*, shift: int, window: int, block_length: int, mask_token_id: int, remask: float) -> dict[str, Policy]:
    """The policies compared, by name; none of them stops early."""

    def low_confidence(tokens_per_step: int) -> Policy:
        def decode(network: Network, prompts: list[list[int]]) -> Decoding:
            decoded = decode_windows(
                network,
                prompts,
                length=max(map(len, prompts)) + window,
                block_length=block_length,
                mask_token_id=mask_token_id,
                stop_token_ids=[],
                threshold=None,
                tokens_per_step=tokens_per_step,
                shift=shift,
            )
            return Decoding(decoded.tokens, decoded.forwards)

        return decode

    def speculative(passes: int) -> Policy:
        def decode(network: Network, prompts: list[list[int]]) -> Decoding:
            decoded = decode_fef(
                network,
                prompts,
                window=window,
                mask_token_id=mask_token_id,
                passes=passes,
                remask=remask,
                shift=shift,
            )
            return Decoding(decoded.tokens, decoded.forwards, decoded.drafts, decoded.accepted)

        return decode

    return {
        "low confidence, 1 token per step": low_confidence(1),
        "low confidence, 2 tokens per step": low_confidence(2),
        "low confidence, 4 tokens per step": low_confidence(4),
        "FeF, step=2": speculative(2),
    }


app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[Path, typer.Option(help="Checkpoint before fine-tuning.")],
    tuned: Annotated[Path | None, typer.Option(help="Checkpoint after it.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 200,
    window: Annotated[int, typer.Option(min=16, help="Tokens of each answer, a multiple of the block length.")] = 48,
    remask: Annotated[
        float, typer.Option(min=0, max=1, help="Fraction of the window that FeF's second pass draws anew.")
    ] = OPTION_DEFAULTS["remask"],
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Compare LLaDA's or Dream's greedy decoding with FeF-DLLM's, without caches, on held-out arithmetic."""
    console = Console()
    held_out = make_problems(problems, HELD_OUT_SEED, "test")
    table = Table("checkpoint", "decoding", "accuracy", "forwards", "drafts accepted", box=None)
    figures: dict[str, dict[str, dict[str, float | None]]] = {}
    for folder in (model, *([] if tuned is None else [tuned])):
        config = read_config(folder)
        layout = layout_of(config)
        family = next(family for family in FAMILIES.values() if family.layout is layout)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        network = load_network(folder)
        compared = policies(
            shift=layout.shift,
            window=window,
            block_length=family.block_length,
            mask_token_id=special_id(tokenizer, MASK),
            remask=remask,
        )
        for name, policy in compared.items():
            result = measure(network, tokenizer, held_out, policy, name)
            figures.setdefault(folder.name, {})[name] = result._asdict()
            accepted = "" if result.accepted is None else f"{result.accepted:.1%}"
            table.add_row(folder.name, name, f"{result.accuracy:.1%}", f"{result.forwards:.1f}", accepted)
            console.print(f"{folder.name}, {name}: {result.accuracy:.3f}, {result.forwards:.1f} forwards {accepted}")
    console.print(table)
    if out is not None:
        settings = {"problems": problems, "window": window, "remask": remask, "torch": torch.__version__}
        out.write_text(json.dumps({"settings": settings, "results": figures}, indent=1) + "\n")


if __name__ == "__main__":
    app()
