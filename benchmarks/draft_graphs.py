"""Spiffy with draft graphs that are calibrated for their model: forwards by drafts, temperature and calibration data.

``python benchmarks/draft_graphs.py --help``; ``docs/benchmarks.md`` says what is compared and how.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from answers import Answers, answer, of_length, right_answers
from arguments import Docs, Out
from environment import begin
from in_process import engine
from published import SPIFFY, SPIFFY_CALIBRATION
from record import CHECKPOINTS, RESULTS
from recorded import CALIBRATION_PROMPTS, NODES, ask, calibrate, record_steps
from rich.console import Console
from sheet import Sheet, Wanted, publish, wanted_sheet
from workload import Workload, arithmetic

from vllm_dllm.commands.problems import train_questions

if TYPE_CHECKING:
    from vllm import LLM

MAX_TOKENS = 64
GAIN = 1.45
"""Times fewer forwards than the threshold policy that are wanted on LLaDA's and Dream's layouts."""
POLICY: dict[str, Any] = {"dllm_policy": "threshold", "dllm_threshold": 0.9}
DRAFTS = (1, 3, 5, 10)
DEFAULT_DRAFTS = 3
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
SHIPPED, CALIBRATED, OTHER = "shipped", "calibrated", "calibrated on other questions"
PAPERS = {"tiny-sdar": "SDAR-8B-Chat-b32", "tiny-llada": "LLaDA-8B-Instruct", "tiny-dream": "Dream-7B-Instruct"}


@dataclass(frozen=True)
class Model:
    """A bundled model, and its engine's options."""

    name: str
    block_length: int
    whole_text: bool

    @property
    def checkpoint(self) -> Path:
        return CHECKPOINTS / self.name

    def engine(self, graph: Path | None = None) -> "AbstractContextManager[LLM]":
        dllm: dict[str, Any] = {"block_length": self.block_length, "max_drafts": NODES}
        dllm |= {"cache": "dual"} if self.whole_text else {}
        dllm |= {"draft_graph": str(graph)} if graph else {}
        return engine(self.checkpoint, dllm, dtype="float32", eager=True, max_num_seqs=16, rows=8192)

    def problems(self, count: int) -> Workload:
        workload = arithmetic(self.name, self.checkpoint, count, MAX_TOKENS, self.block_length)
        return of_length(workload, MAX_TOKENS) if self.whole_text else workload


MODELS = (
    Model("tiny-sdar", 16, whole_text=False),
    Model("tiny-llada", 32, whole_text=True),
    Model("tiny-dream", 32, whole_text=True),
)


def other_questions(count: int) -> list[str]:
    """Questions unlike those that the models are trained for and judged by."""
    asked = ("Write a story about", "What is", "Give me a list of facts about", "Translate into French:", "Explain")
    things = ("a fox", "the sea", "music", "bread", "old trains", "a long winter", "cats", "rain", "a garden", "chess")
    return [f"{begin} {thing}." for begin, thing in product(asked, things)][:count]


@dataclass(frozen=True)
class Row:
    """Spiffy with one graph, beside its policy with the same seeds.

    Attributes:
        drafts: D*, drafts of a forward.
        forwards_saved: forwards of the policy alone over those with drafts.
        equal: requests with the policy's tokens.
    """

    model: str
    graph: str
    drafts: int
    temperature: float
    requests: int
    accuracy: float
    forwards: int
    forwards_saved: float
    equal: int


class Measured:
    """Rows of one model, each beside the policy without drafts at its temperature."""

    def __init__(self, model: Model, workload: Workload, console: Console):
        self.model, self.workload, self.console = model, workload, console
        self.alone: dict[float, Answers] = {}

    def policy_alone(self, llm: "LLM", temperature: float) -> Row:
        """The policy without drafts, which later rows are compared with."""
        self.alone[temperature] = answer(llm, self.workload, POLICY, temperature=temperature, seed=0)
        return self._row("", 0, temperature, self.alone[temperature])

    def drafted(self, llm: "LLM", graph: str, drafts: int, temperature: float = 0.0) -> Row:
        """Spiffy with the engine's graph."""
        self.console.print(f"{self.model.name}: {graph}, D*={drafts}, temperature {temperature:g}")
        args = {**POLICY, "dllm_verify": "spiffy", "dllm_drafts": drafts}
        return self._row(graph, drafts, temperature, answer(llm, self.workload, args, temperature=temperature, seed=0))

    def _row(self, graph: str, drafts: int, temperature: float, answers: Answers) -> Row:
        alone = self.alone[temperature]
        return Row(
            self.model.name,
            graph,
            drafts,
            temperature,
            len(answers.tokens),
            fmean(right_answers(self.workload, answers)),
            answers.forwards,
            alone.forwards / answers.forwards,
            answers.equal(alone),
        )


def measure(model: Model, count: int, scratch: Path, console: Console, *, quick: bool) -> Iterator[Row]:
    """Calibrate graphs for a model, and draft with them and with the graph that ships."""
    measured = Measured(model, model.problems(count), console)
    prompts = 4 if quick else CALIBRATION_PROMPTS
    graphs = {CALIBRATED: scratch / f"{model.name}.json", OTHER: scratch / f"{model.name}-other.json"}
    with model.engine() as llm:
        questions = {CALIBRATED: train_questions(prompts), OTHER: other_questions(prompts)}
        for name, path in graphs.items():
            console.print(f"{model.name}: {name}")
            calibrate(record_steps(llm, ask(measured.workload, questions[name]), POLICY), path)
        yield measured.policy_alone(llm, 0.0)
        yield measured.drafted(llm, SHIPPED, DEFAULT_DRAFTS)
        for temperature in TEMPERATURES[:1] if quick else TEMPERATURES:
            yield measured.policy_alone(llm, temperature)
    with model.engine(graphs[CALIBRATED]) as llm:
        for drafts in (DEFAULT_DRAFTS,) if quick else DRAFTS:
            yield measured.drafted(llm, CALIBRATED, drafts)
        for temperature in TEMPERATURES[:1] if quick else TEMPERATURES:
            yield measured.drafted(llm, CALIBRATED, DEFAULT_DRAFTS, temperature)
    with model.engine(graphs[OTHER]) as llm:
        yield measured.drafted(llm, OTHER, DEFAULT_DRAFTS)


def target_sheet(rows: Sequence[Row]) -> Sheet:
    """Targets and whether they are reached."""
    targets: list[Wanted] = []
    for row in rows:
        if (row.graph, row.drafts, row.temperature) == (CALIBRATED, DEFAULT_DRAFTS, 0) and row.model != "tiny-sdar":
            reached = row.forwards_saved >= GAIN and row.equal == row.requests
            name = f"{row.model}, D*={row.drafts}: times fewer forwards than the threshold policy, tokens equal"
            targets.append((name, f"at least {GAIN}", f"{row.forwards_saved:.2f}", reached))
    drafted = [row for row in rows if row.drafts]
    worst = min(drafted, key=lambda row: row.equal / row.requests)
    name = f"requests with the policy's tokens, {len(drafted)} settings"
    targets.append((name, "all", f"{worst.equal}/{worst.requests}", worst.equal == worst.requests))
    return wanted_sheet(targets)


def sheets(rows: Sequence[Row]) -> list[Sheet]:
    """The tables."""
    greedy = [row for row in rows if row.temperature == 0]
    found = {(row.model, row.graph, row.drafts, row.temperature): row for row in rows}
    models = list(dict.fromkeys(row.model for row in rows))
    temperatures = sorted({row.temperature for row in rows})
    by_drafts = [
        [
            row.model,
            row.graph or "no drafts",
            str(row.drafts or ""),
            f"{row.accuracy:.1%}",
            str(row.forwards),
            f"{row.forwards_saved:.2f}×",
            f"{row.equal}/{row.requests}",
        ]
        for row in greedy
    ]
    for model in models:
        dynamic, drafted = SPIFFY[PAPERS[model]]
        gains = [after.nfe / before.nfe for before, after in zip(dynamic, drafted, strict=True)]
        text = f"{min(gains):.2f} to {max(gains):.2f}×"
        by_drafts.append([f"{PAPERS[model]} (paper)", CALIBRATED, str(DEFAULT_DRAFTS), "", "", text, ""])

    def cell(model: str, temperature: float) -> str:
        row = found.get((model, CALIBRATED, DEFAULT_DRAFTS, temperature))
        return "" if row is None else f"{row.forwards_saved:.2f}×, {row.accuracy:.1%}, {row.equal}/{row.requests}"

    domains = [
        [model, *(f"{found[model, graph, DEFAULT_DRAFTS, 0.0].forwards_saved:.2f}×" for graph in (CALIBRATED, OTHER))]
        for model in models
    ]
    domains += [
        [f"LLaDA-8B-Instruct, {task} (paper)", f"{own:.2f}×", f"{other:.2f}×"]
        for task, (own, other) in SPIFFY_CALIBRATION.items()
    ]
    return [
        target_sheet(rows),
        Sheet(
            "Forwards by graph and number of drafts, temperature 0",
            ["model", "graph", "D*", "accuracy", "forwards", "fewer than the policy alone", "equal"],
            by_drafts,
        ),
        Sheet(
            f"Temperature, as in the paper's figure 6: fewer forwards, D*={DEFAULT_DRAFTS}, accuracy, equal requests",
            ["model", *(f"{temperature:g}" for temperature in temperatures)],
            [
                line
                for model in models
                for line in (
                    [f"{model}, policy alone: forwards", *(str(found[model, "", 0, t].forwards) for t in temperatures)],
                    [f"{model}, Spiffy", *(cell(model, temperature) for temperature in temperatures)],
                )
            ],
            num_labels=1,
        ),
        Sheet(
            f"Calibration data, as in the paper's table 4: fewer forwards than the policy alone, D*={DEFAULT_DRAFTS}",
            ["model", "questions like those it is judged by", "other questions"],
            domains,
            num_labels=1,
        ),
    ]


def main(
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 100,
    out: Out = RESULTS,
    docs: Docs = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few problems and settings: does it work?")] = False,
) -> None:
    """Calibrate draft graphs for the bundled models, and answer held-out problems with them."""
    console, environment = begin()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in MODELS:
            rows += measure(model, 4 if quick else problems, Path(scratch), console, quick=quick)
    result = {"environment": environment, "rows": [asdict(row) for row in rows]}
    publish(console, sheets(rows), result, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
