"""LoRA adapters: how many answers differ from those of a checkpoint with the adapter merged?

``python benchmarks/lora.py --help``; ``docs/lora.md`` says how adapters are served.
"""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from adapters import merge, random_adapter, write_adapter
from arguments import Docs, Out
from environment import begin
from offline import answer, differing, finish, none_differs, start, tokens
from record import CHECKPOINTS, RESULTS
from sheet import Sheet

from vllm_dllm.tiny.arithmetic import make_problems

if TYPE_CHECKING:
    from vllm import LLM

LAYERS = {
    "tiny-sdar": re.compile(r"\.(q|k|v|o|gate|up|down)_proj$"),
    "tiny-llada": re.compile(r"\.(q_proj|k_proj|v_proj|attn_out|ff_proj|up_proj|blocks\.\d+\.ff_out)$"),
}
RANK = 16
ENGINE: dict[str, Any] = {"additional_config": {"dllm": {"max_drafts": 3}}}
SIZE = 0.1
"""Of what an adapter adds, in the standard deviation of each matrix."""
VERIFIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "freedave": {"dllm_verify": "freedave", "dllm_drafts": 3},
}


@dataclass(frozen=True)
class Row:
    """Answers of one model under one verifier: to a third of the prompts without an adapter, to the others with one of
    two."""

    model: str
    verifier: str
    prompts: int
    changed: int
    """Answers that are not the base model's."""
    differing: int
    """Answers that are not those of the checkpoint with the adapter merged."""
    tokens_per_second: float
    """Of processor time, of the batch with both adapters and none."""
    base_tokens_per_second: float
    """Of the base model alone, for as many prompts."""


def answers(
    llm: "LLM", questions: list[str], options: dict[str, Any], adapters: list[Any] | None = None
) -> tuple[list[list[int]], float]:
    """Greedy answers, and tokens per second of processor time."""
    found, seconds = answer(llm, questions, options=options, adapters=adapters)
    return tokens(found), sum(map(len, tokens(found))) / seconds


def measure(model: str, questions: list[str], folder: Path) -> list[Row]:
    from vllm.lora.request import LoRARequest

    source = CHECKPOINTS / model
    checkpoints, requests = [source], [None]
    for number in (1, 2):
        pairs = random_adapter(source, LAYERS[model], rank=RANK, seed=number, size=SIZE)
        path = write_adapter(pairs, folder / f"adapter-{number}")
        checkpoints.append(merge(source, pairs, folder / f"merged-{number}"))
        requests.append(LoRARequest(f"adapter-{number}", number, str(path)))
    # An engine that ends takes the process groups of others in its process along, so that these come first.
    wanted: dict[str, list[tuple[list[list[int]], float]]] = {name: [] for name in VERIFIERS}
    for checkpoint in checkpoints:
        llm = start(checkpoint, **ENGINE)
        for name, options in VERIFIERS.items():
            wanted[name].append(answers(llm, questions, options))
        del llm
    llm = start(source, **ENGINE, enable_lora=True, max_loras=2, max_lora_rank=RANK)
    chosen = [row % 3 for row in range(len(questions))]
    rows = []
    for name, options in VERIFIERS.items():
        found, speed = answers(llm, questions, options, [requests[each] for each in chosen])
        right = [wanted[name][each][0][row] for row, each in enumerate(chosen)]
        rows.append(
            Row(
                model,
                name,
                len(questions),
                changed=differing(found, wanted[name][0][0]),
                differing=differing(found, right),
                tokens_per_second=speed,
                base_tokens_per_second=wanted[name][0][1],
            )
        )
    return rows


def main(
    prompts: Annotated[int, typer.Option(min=3, help="Prompts of each batch.")] = 200,
    out: Out = RESULTS,
    docs: Docs = None,
) -> None:
    """Answer with two adapters and none in one batch, and compare with checkpoints that have an adapter merged."""
    console, environment = begin()
    questions = [problem.question for problem in make_problems(prompts, 0, "test")]
    rows: list[Row] = []
    for model in LAYERS:
        console.print(f"[bold]{model}")
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(model, questions, Path(folder))
    table = Sheet(
        "Adapters",
        [
            "model",
            "verifier",
            "prompts",
            "changed",
            "differ from merged",
            "tokens per processor second",
            "without adapters",
        ],
        [
            [
                row.model,
                row.verifier,
                *map(str, (row.prompts, row.changed, row.differing)),
                f"{row.tokens_per_second:.0f}",
                f"{row.base_tokens_per_second:.0f}",
            ]
            for row in rows
        ],
    )
    target = none_differs("a merged checkpoint's", sum(row.differing for row in rows))
    finish(console, environment, target, table, rows, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
