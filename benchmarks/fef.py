"""FeF-DLLM: accuracy beside decodings that draw positions independently, and what speculation and its window do.

``python benchmarks/fef.py --help``; ``docs/benchmarks.md`` says what is compared and how.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated, Any

import typer
from answers import Answers, answer, first, interval, of_length, right_answers
from arguments import Docs, Out
from environment import begin
from in_process import engine
from published import FEF
from record import CHECKPOINTS, RAW, RESULTS
from rich.console import Console
from sheet import Sheet, Wanted, publish, wanted_sheet
from workload import Workload, arithmetic

from vllm_dllm.options.self_speculation import fef_drafts

if TYPE_CHECKING:
    from vllm import LLM

BLOCK_LENGTH = 32
MAX_TOKENS = 64
LARGEST_WINDOW = 16
ONE, TWO = "one token per step", "two tokens per step"
PASSES = (1, 2, 4)
WINDOWS = (1, 2, 4, 8, 16)
ACCURACY: dict[str, dict[str, Any]] = {
    ONE: {"dllm_policy": "static", "dllm_tokens_per_step": 1},
    # The order of FeF-DLLM, without FeF-DLLM.
    "one token per step, from left to right": {"dllm_policy": "sequential", "dllm_tokens_per_step": 1},
    TWO: {"dllm_policy": "static", "dllm_tokens_per_step": 2},
    "threshold 0.9": {"dllm_policy": "threshold", "dllm_threshold": 0.9},
    **{
        f"FeF, {passes} pass{'es' * (passes > 1)}": {"dllm_verify": "fef", "dllm_resample_steps": passes}
        for passes in PASSES
    },
}
SWEEPS = ((0.0, 2), (0.0, 4), (1.0, 4))
"""Temperatures and passes of the windows."""


class Part(StrEnum):
    """What can be measured again by itself."""

    ACCURACY = "accuracy"
    WINDOWS = "windows"


@dataclass(frozen=True)
class Accuracy:
    """One decoding of all problems.

    Attributes:
        difference: of its accuracy to that of one token per step.
        low, high: 95 % interval of the difference, of problems in pairs.
    """

    model: str
    decoding: str
    requests: int
    accuracy: float
    difference: float
    low: float
    high: float
    forwards: int
    fewer_forwards: float


@dataclass(frozen=True)
class Window:
    """One window of speculation.

    Attributes:
        equal: requests with the tokens of a window of 1, which is decoding without speculation.
        acceptance: share of the drafts that were accepted, of those that a forward verified; None where there are none.
    """

    model: str
    passes: int
    window: int
    temperature: float
    requests: int
    accuracy: float
    equal: int
    tokens_per_forward: float
    fewer_forwards: float
    acceptance: float | None


def compare(model: str, decoding: str, right: Sequence[bool], forwards: int, one: "Graded") -> Accuracy:
    """A decoding beside one token per step, problem by problem."""
    differences = [float(own) - float(other) for own, other in zip(right, one.right, strict=True)]
    difference = fmean(differences)
    low, high = interval(difference, pstdev(differences), len(differences))
    return Accuracy(model, decoding, len(right), fmean(right), difference, low, high, forwards, one.forwards / forwards)


@dataclass(frozen=True)
class Graded:
    """Right answers and forwards of one decoding: what is kept of it when the program is cut off."""

    model: str
    decoding: str
    right: list[bool]
    forwards: int


def open_engine(checkpoint: Path) -> Any:
    drafts = fef_drafts(LARGEST_WINDOW, BLOCK_LENGTH)
    dllm = {"block_length": BLOCK_LENGTH, "cache": "dual", "max_drafts": drafts}
    return engine(checkpoint, dllm, dtype="float32", eager=True, max_num_seqs=16, rows=8192)


def problems_of(checkpoint: Path, count: int) -> Workload:
    return of_length(arithmetic(checkpoint.name, checkpoint, count, MAX_TOKENS, BLOCK_LENGTH), MAX_TOKENS)


def measure_accuracy(llm: "LLM", workload: Workload, model: str, kept: Path, console: Console) -> Iterator[Graded]:
    """Every decoding. One that ``kept`` holds is not measured again, and a new one is added."""
    for decoding, extra_args in ACCURACY.items():
        rows = json.loads(kept.read_text()) if kept.is_file() else []
        graded = [Graded(**row) for row in rows]
        done = next(
            (
                row
                for row in graded
                if (row.model, row.decoding, len(row.right)) == (model, decoding, len(workload.requests))
            ),
            None,
        )
        if done is None:
            console.print(f"{model}: {decoding}")
            answers = answer(llm, workload, extra_args)
            done = Graded(model, decoding, right_answers(workload, answers), answers.forwards)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps([*rows, asdict(done)]))
        yield done


def measure_windows(llm: "LLM", workload: Workload, model: str, console: Console) -> Iterator[Window]:
    """Windows of every sweep, each beside a window of 1."""
    for temperature, passes in SWEEPS:
        alone: Answers | None = None
        for window in WINDOWS:
            console.print(f"{model}: {passes} passes, window {window}, temperature {temperature}")
            args = {"dllm_verify": "fef", "dllm_resample_steps": passes, "dllm_window": window}
            answers = answer(llm, workload, args, temperature=temperature, seed=0)
            alone = alone or answers
            yield Window(
                model,
                passes,
                window,
                temperature,
                len(answers.tokens),
                fmean(right_answers(workload, answers)),
                answers.equal(alone),
                answers.tokens_per_forward,
                alone.forwards / answers.forwards,
                acceptance_of(answers),
            )


def acceptance_of(answers: Answers) -> float | None:
    """Share of the verified drafts that were accepted."""
    return sum(stats.accepted for stats in answers.stats) / answers.drafted if answers.drafted else None


def target_sheet(accuracies: Sequence[Accuracy], windows: Sequence[Window]) -> Sheet:
    """Targets and whether they are reached."""
    rows: list[Wanted] = []
    for row in accuracies:
        one = row.accuracy - row.difference
        if row.decoding.startswith("FeF") and row.decoding != "FeF, 1 pass" and row.fewer_forwards >= 1 and one:
            interval_ = f"{1 + row.low / one:.2f} to {1 + row.high / one:.2f}"
            name = (
                f"{row.model}: accuracy of {row.decoding} over {ONE}, at {1 / row.fewer_forwards:.2f} of its forwards"
            )
            ratio = row.accuracy / one
            rows.append((name, "at least 1", f"{ratio:.3f} ({interval_})", ratio >= 1))
    exact = [row for row in windows if row.temperature == 0]
    if exact:
        worst = min(exact, key=lambda row: row.equal / row.requests)
        name = "temperature 0: requests with the tokens of decoding without speculation"
        rows.append((name, "all", f"{worst.equal / worst.requests:.3f}", worst.equal == worst.requests))
    return wanted_sheet(rows)


def sheets(accuracies: Sequence[Accuracy], windows: Sequence[Window]) -> list[Sheet]:
    """The tables."""
    paper = FEF["LLaDA"][0]
    made = [
        target_sheet(accuracies, windows),
        Sheet(
            "Accuracy, as in the paper's table 1; difference to one token per step with its 95 % interval, in points",
            ["model", "decoding", "problems", "accuracy", "difference", "interval", "forwards", "fewer forwards"],
            [
                [
                    row.model,
                    row.decoding,
                    str(row.requests),
                    f"{row.accuracy:.1%}",
                    f"{100 * row.difference:+.1f}",
                    f"{100 * row.low:+.1f} to {100 * row.high:+.1f}",
                    str(row.forwards),
                    f"{row.fewer_forwards:.2f}×",
                ]
                for row in accuracies
            ]
            + [
                [
                    "LLaDA-8B-Instruct, fine-tuned for FeF" if name.startswith("FeF") else "LLaDA-8B-Instruct",
                    name,
                    "",
                    f"{accuracy:.1f}%",
                    f"{accuracy - paper:+.1f}",
                    "",
                    "",
                    "",
                ]
                for name, (accuracy, _) in FEF.items()
            ],
        ),
    ]
    if windows:
        made.append(window_sheet(windows))
    return made


def window_sheet(windows: Sequence[Window]) -> Sheet:
    """What speculation and its window do."""
    return Sheet(
        "Windows, as in the paper's tables 3 (window 1: no speculation) and 5",
        [
            "model",
            "temperature",
            "passes",
            "window",
            "accuracy",
            "equal to window 1",
            "accepted drafts",
            "tokens per forward",
            "fewer forwards",
        ],
        [
            [
                row.model,
                f"{row.temperature:g}",
                str(row.passes),
                str(row.window),
                f"{row.accuracy:.1%}",
                f"{row.equal}/{row.requests}",
                "" if row.acceptance is None else f"{row.acceptance:.1%}",
                f"{row.tokens_per_forward:.2f}",
                f"{row.fewer_forwards:.2f}×",
            ]
            for row in windows
        ],
    )


def main(
    checkpoint: Annotated[Path, typer.Option(help="Trained model in LLaDA's layout.")] = CHECKPOINTS / "tiny-llada",
    tuned: Annotated[
        list[Path] | None, typer.Option(help="Further models, fine-tuned for FeF-DLLM; repeatable.")
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems of the accuracies.")] = 1500,
    window_problems: Annotated[int, typer.Option(min=1, help="Held-out problems of the windows.")] = 100,
    part: Annotated[
        list[Part] | None,
        typer.Option(help="What to measure, the rest being that of the last result; repeatable. Default: everything."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep accuracies that a run cut off has measured.")] = False,
    out: Out = RESULTS,
    docs: Docs = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few problems: does it work?")] = False,
) -> None:
    """Decode held-out problems with FeF-DLLM and with others, and with every window."""
    if quick:
        problems = window_problems = 4
    console, environment = begin()
    parts, kept = list(part or Part), RAW / "fef_graded.json"
    if not resume:
        kept.unlink(missing_ok=True)
    last_path = out / "fef.json"
    last = json.loads(last_path.read_text()) if len(parts) < len(Part) and last_path.is_file() else {}
    accuracies = [Accuracy(**row) for row in last.get("accuracies", [])] if Part.ACCURACY not in parts else []
    windows = [Window(**row) for row in last.get("windows", [])] if Part.WINDOWS not in parts else []
    for path in (checkpoint, *(tuned or ())):
        with open_engine(path) as llm:
            workload = problems_of(path, max(problems, window_problems))
            if Part.ACCURACY in parts:
                graded = list(measure_accuracy(llm, first(workload, problems), path.name, kept, console))
                accuracies += [compare(path.name, row.decoding, row.right, row.forwards, graded[0]) for row in graded]
            if Part.WINDOWS in parts:
                windows += measure_windows(llm, first(workload, window_problems), path.name, console)
    result = {
        "environment": environment,
        "accuracies": [asdict(row) for row in accuracies],
        "windows": [asdict(row) for row in windows],
    }
    publish(console, sheets(accuracies, windows), result, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
