"""Weights that change under an engine: how many answers differ from those of an engine that began with the weights?

``python benchmarks/weight_updates.py --help``; ``docs/weights.md`` says what happens in an update.
"""

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from arguments import Docs, Out
from environment import begin
from offline import answer, differing, finish, none_differs, start, tokens
from record import CHECKPOINTS, RESULTS
from safetensors.torch import load_file, save_file
from sheet import Sheet

from vllm_dllm.tiny.arithmetic import make_problems

if TYPE_CHECKING:
    from vllm import LLM

MODELS = ("tiny-sdar", "tiny-llada")
NOISE = 0.02
"""Standard deviation of the noise that makes the other weights, in that of each matrix."""


@dataclass(frozen=True)
class Row:
    """One update."""

    model: str
    update: int
    prompts: int
    changed: int
    """Answers that are not those of the weights before."""
    differing: int
    """Answers that are not those of an engine that began with the weights."""
    seconds: float
    """Of the update."""


def write_noisy(source: Path, folder: Path, seed: int) -> None:
    """A checkpoint whose matrices differ a little."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        deviation = NOISE * tensor.float().std() if tensor.ndim > 1 else 0.0
        tensors[name] = (tensor.float() + deviation * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def engine(checkpoint: Path) -> "LLM":
    return start(checkpoint, **({} if "llada" in str(checkpoint) else {"enable_prefix_caching": True}))


def answers(llm: "LLM", questions: list[str]) -> list[list[int]]:
    """Greedy answers."""
    return tokens(answer(llm, questions)[0])


def main(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts after each update.")] = 200,
    updates: Annotated[int, typer.Option(min=1, help="Updates of each model.")] = 5,
    out: Out = RESULTS,
    docs: Docs = None,
) -> None:
    """Update the weights of a running engine, and compare its answers with those of fresh engines."""
    console, environment = begin()
    questions = [problem.question for problem in make_problems(prompts, 0, "test")]
    rows: list[Row] = []
    for model in MODELS:
        source = CHECKPOINTS / model
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = [Path(folder) / f"{model}-{update}" for update in range(1, updates + 1)]
            wanted = []
            # An engine that ends takes the process groups of others in its process along, so that these come first.
            for update, checkpoint in enumerate(checkpoints, 1):
                console.print(f"[bold]{model}, an engine that begins with the weights {update}")
                write_noisy(source, checkpoint, update)
                wanted.append(answers(engine(checkpoint), questions))
            llm = engine(source)
            before = answers(llm, questions)
            for update, checkpoint in enumerate(checkpoints, 1):
                console.print(f"[bold]{model}, update {update}")
                began = time.perf_counter()
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
                seconds = time.perf_counter() - began
                found = answers(llm, questions)
                changed, wrong = differing(found, before), differing(found, wanted[update - 1])
                rows.append(Row(model, update, prompts, changed, wrong, seconds))
                before = found
            del llm
    table = Sheet(
        "Updates",
        ["model", "update", "prompts", "changed by the update", "differ from a fresh engine's", "seconds"],
        [
            [row.model, *map(str, (row.update, row.prompts, row.changed, row.differing)), f"{row.seconds:.2f}"]
            for row in rows
        ],
    )
    target = none_differs("a fresh engine's", sum(row.differing for row in rows))
    finish(console, environment, target, table, rows, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
