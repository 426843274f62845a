"""Quantised weights and K/V: answers, bytes and seconds beside full precision's.

``python benchmarks/quantization.py --help``; ``docs/quantisation.md`` says what the formats are.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from arguments import Docs, Out
from environment import begin
from offline import answer, differing, finish, start, tokens
from quantize import Format, write
from record import CHECKPOINTS, RESULTS
from sheet import Sheet, Wanted

from vllm_dllm.commands.problems import grade
from vllm_dllm.tiny.arithmetic import make_problems

MOST_LOST = 0.02
"""Of the problems that full precision solves, for the target."""


@dataclass(frozen=True)
class Setting:
    """How an engine keeps its numbers."""

    model: str
    name: str
    dtype: str
    form: Format | None = None
    kv_cache_dtype: str = "auto"


def settings_of(model: str) -> list[Setting]:
    return [
        Setting(model, "float32", "float32"),
        Setting(model, "bfloat16", "bfloat16"),
        Setting(model, "INT8 W8A8", "bfloat16", Format.INT8),
        Setting(model, "FP8 W8A8, a scale for each output", "bfloat16", Format.FP8_CHANNEL),
        Setting(model, "AWQ, 4 bits", "bfloat16", Format.AWQ),
        Setting(model, "GPTQ, 4 bits", "bfloat16", Format.GPTQ),
        Setting(model, "W4A16", "bfloat16", Format.W4A16),
        Setting(model, "bfloat16, K/V in FP8", "bfloat16", None, "fp8"),
    ]


@dataclass(frozen=True)
class Row:
    """What one setting gives."""

    model: str
    name: str
    right: int
    problems: int
    megabytes: float
    """Of the checkpoint's tensors."""
    tokens_per_second: float
    """Of processor time, all problems together; the median of the repetitions."""
    timings: list[float]
    """Seconds of processor time of the repetitions."""
    differing: int
    """Of the answers to problems asked alone, those that differ from the answers to the same among all others."""


def measure(setting: Setting, problems: int, alone: int, repetitions: int, folder: Path) -> Row:
    checkpoint = CHECKPOINTS / setting.model
    if setting.form is not None:
        write(checkpoint, folder / "quantized", setting.form)
        checkpoint = folder / "quantized"
    llm = start(checkpoint, dtype=setting.dtype, kv_cache_dtype=setting.kv_cache_dtype)
    asked = make_problems(problems, 0, "test")

    def answers(part: list[Any]) -> tuple[list[Any], float]:
        return answer(llm, [problem.question for problem in part], max_tokens=64)

    answers(asked[:64])
    runs = [answers(asked) for _ in range(repetitions)]
    together = runs[0][0]
    by_itself = [answers([problem])[0][0] for problem in asked[:alone]]
    seconds = [run[1] for run in runs]
    return Row(
        setting.model,
        setting.name,
        right=sum(grade(each.text, problem.final_answer) for problem, each in zip(asked, together, strict=True)),
        problems=problems,
        megabytes=(checkpoint / "model.safetensors").stat().st_size / 1e6,
        tokens_per_second=sum(len(each.token_ids) for each in together) / median(seconds),
        timings=seconds,
        differing=differing(tokens(by_itself), tokens(together)),
    )


def target(rows: list[Row]) -> Wanted:
    """INT8 of tiny-sdar answers as full precision does, but for two points."""
    of = {(row.model, row.name): row for row in rows}
    full, quantized = (of["tiny-sdar", name] for name in ("float32", "INT8 W8A8"))
    lost = (full.right - quantized.right) / full.problems
    smaller = quantized.megabytes / of["tiny-sdar", "bfloat16"].megabytes
    is_met = lost <= MOST_LOST and smaller < 1
    return (
        "INT8 W8A8: right answers less than float32's; bytes, of bfloat16's",
        f"<= {MOST_LOST:.0%}; < 100%",
        f"{lost:.1%}; {smaller:.0%}",
        is_met,
    )


def main(
    more: Annotated[list[str] | None, typer.Argument(help="Folders of checkpoints/, beside tiny-sdar.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Problems.")] = 500,
    alone: Annotated[int, typer.Option(min=0, help="Problems that are asked alone, too.")] = 20,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed passes over all problems.")] = 3,
    out: Out = RESULTS,
    docs: Docs = None,
) -> None:
    """Answer problems with quantised weights and K/V, and with full precision."""
    console, environment = begin()
    rows = []
    for setting in [setting for model in ["tiny-sdar", *(more or [])] for setting in settings_of(model)]:
        console.print(f"[bold]{setting.model}, {setting.name}")
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(setting, problems, alone, repetitions, Path(folder)))
    table = Sheet(
        "Formats",
        ["model", "numbers", "right", "MB", "tokens per processor second", f"differ alone (of {alone})"],
        [
            [
                row.model,
                row.name,
                f"{row.right / row.problems:.1%}",
                f"{row.megabytes:.2f}",
                f"{row.tokens_per_second:.0f}",
                str(row.differing),
            ]
            for row in rows
        ],
    )
    finish(console, environment, target(rows), table, rows, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
