"""PSD: which positions are decoded next, what drafts contribute to a block, and chains beside calibrated graphs.

``python benchmarks/psd.py --help``; ``docs/benchmarks.md`` says what is compared and how.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from answers import Answers, answer, first, right_answers
from arguments import Docs, Out
from draft_graphs import MODELS, POLICY, Model
from environment import begin
from record import RESULTS
from recorded import CALIBRATION_PROMPTS, NODES, ask, calibrate, record_steps
from rich.console import Console
from sheet import Sheet, Wanted, publish, wanted_sheet
from step_skipping_results import PSD_ACCURACY_LOSS, PSD_GAIN
from workload import Workload

from vllm_dllm.commands.problems import train_questions
from vllm_dllm.decoding.calibration import Step
from vllm_dllm.observe.recorder import Round, recording

if TYPE_CHECKING:
    from vllm import LLM

CANDIDATES = (3, 5, 7)
"""K, positions that a step is most sure of. The paper has 5, 7 and 9 in longer answers."""
HORIZONS = (1, 2, 3, 4, 5, 6)
STAGES = 4
"""Parts of a block's progress."""
DEPTHS = (1, 3, 7)
PROFILE_DEPTH = 3


@dataclass(frozen=True)
class Precision:
    """Of the K masked positions that a step was most sure of, the share decoded within the next steps.

    Attributes:
        oracle: the share that the best K positions would have had.
    """

    model: str
    candidates: int
    horizon: int
    steps: int
    precision: float
    oracle: float


@dataclass(frozen=True)
class Stage:
    """What decoded the tokens of blocks at one stage of their progress: shares of all tokens of those blocks."""

    model: str
    block: str
    stage: int
    policy: float
    drafts: float


@dataclass(frozen=True)
class Row:
    """Answers under PSD, or under its policy alone."""

    model: str
    drafts: str
    depth: int
    requests: int
    accuracy: float
    forwards: int
    tokens_per_forward: float
    gain: float


def precisions(model: str, blocks: Sequence[Sequence[Step]]) -> Iterator[Precision]:
    """Figure 5: every step that leaves at least K masks, and has as many steps behind it in its block."""
    for k in CANDIDATES:
        for horizon in HORIZONS:
            hits, most = [], []
            for block in blocks:
                for t, step in enumerate(block[:-1]):
                    decoded = {column for later in block[t + 1 : t + 1 + horizon] for column in later.unmasked}
                    chosen = {column for column, rank in step.ranks.items() if rank <= k}
                    if len(chosen) == k:
                        hits.append(len(chosen & decoded) / k)
                        most.append(min(len(decoded), k) / k)
            if hits:
                yield Precision(model, k, horizon, len(hits), fmean(hits), fmean(most))


@dataclass
class Profile:
    """Recorder of what decodes each token: the policy, or an accepted draft."""

    mask_token_id: int
    blocks: dict[str, dict[int, list[tuple[float, int, int]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """By request and block start: progress before a forward, tokens of the policy, tokens of drafts."""

    def __call__(self, round_: Round) -> None:
        before, after = round_.branches[:, 0] == self.mask_token_id, round_.tokens == self.mask_token_id
        length = before.shape[1]
        for d, req_id in enumerate(round_.req_ids):
            first_column = int(round_.first[d])
            if not round_.denoised[d]:
                continue
            was = before[d, first_column:]
            decoded = int((was & ~after[d, first_column:]).sum())
            by_policy = int((round_.chosen[d, first_column:] & was).sum())
            progress = 1 - int(was.sum()) / (length - first_column)
            self.blocks[req_id][int(round_.block_start[d])].append((progress, by_policy, decoded - by_policy))

    def stages(self, model: str) -> Iterator[Stage]:
        """Figure 6: the first, the middle and the last block of the answers, and the only block of short ones."""
        named: dict[str, list[list[tuple[float, int, int]]]] = {"only": [], "first": [], "middle": [], "last": []}
        for blocks in self.blocks.values():
            in_order = [blocks[start] for start in sorted(blocks)]
            if len(in_order) == 1:
                named["only"] += in_order
                continue
            begin_, *middle, end = in_order
            named["first"].append(begin_)
            named["middle"] += middle
            named["last"].append(end)
        for name, steps_of in named.items():
            steps = [step for steps in steps_of for step in steps]
            total = sum(policy + drafts for _, policy, drafts in steps)
            if not total:
                continue
            for stage in range(STAGES):
                inside = [step for step in steps if min(int(step[0] * STAGES), STAGES - 1) == stage]
                yield Stage(
                    model,
                    name,
                    stage,
                    sum(policy for _, policy, _ in inside) / total,
                    sum(drafts for _, _, drafts in inside) / total,
                )


def profile(llm: "LLM", workload: Workload, model: str) -> list[Stage]:
    """Decode with PSD and see what decodes the tokens."""
    recorded = Profile(workload.mask_token_id)
    with recording(llm, recorded):
        answer(llm, workload, {**POLICY, "dllm_verify": "psd", "dllm_drafts": PROFILE_DEPTH})
    return list(recorded.stages(model))


class Measured:
    """Rows of one model beside its policy alone."""

    def __init__(self, model: Model, workload: Workload, console: Console):
        self.model, self.workload, self.console = model, workload, console
        self.alone: Answers | None = None

    def row(self, llm: "LLM", drafts: str, depth: int) -> Row:
        """PSD with ``depth`` drafts of what the engine drafts from; 0: the policy alone, which comes first."""
        self.console.print(f"{self.model.name}: {drafts}, d={depth}")
        args: dict[str, Any] = {**POLICY, **({"dllm_verify": "psd", "dllm_drafts": depth} if depth else {})}
        answers = answer(llm, self.workload, args)
        self.alone = self.alone or answers
        return Row(
            self.model.name,
            drafts,
            depth,
            len(answers.tokens),
            fmean(right_answers(self.workload, answers)),
            answers.forwards,
            answers.tokens_per_forward,
            answers.tokens_per_forward / self.alone.tokens_per_forward,
        )


def measure(
    model: Model, count: int, scratch: Path, console: Console, *, quick: bool
) -> tuple[list[Row], list[Precision], list[Stage]]:
    """Everything about one model."""
    measured = Measured(model, model.problems(count), console)
    path, depths = scratch / f"{model.name}.json", (PROFILE_DEPTH,) if quick else DEPTHS
    with model.engine() as llm:
        rows = [measured.row(llm, "none", 0), *(measured.row(llm, "chain", depth) for depth in depths)]
        blocks = record_steps(llm, first(measured.workload, 4 if quick else 100), POLICY)
        found = list(precisions(model.name, blocks))
        stages = profile(llm, first(measured.workload, 4 if quick else 100), model.name)
        asked = ask(measured.workload, train_questions(4 if quick else CALIBRATION_PROMPTS))
        calibrate(record_steps(llm, asked, POLICY), path)
    with model.engine(path) as llm:
        rows += [measured.row(llm, f"graph of {NODES} nodes", depth) for depth in depths]
    return rows, found, stages


def sheets(rows: Sequence[Row], found: Sequence[Precision], stages: Sequence[Stage]) -> list[Sheet]:
    """The tables."""
    targets: list[Wanted] = []
    for row in rows:
        if row.depth == PROFILE_DEPTH:
            alone = next(each for each in rows if each.model == row.model and not each.depth)
            loss = alone.accuracy - row.accuracy
            reached = row.gain >= PSD_GAIN and round(loss, 9) <= PSD_ACCURACY_LOSS
            targets.append(
                (
                    f"{row.model}, {row.drafts}, d={row.depth}: tokens per forward over the policy alone, at most "
                    f"{PSD_ACCURACY_LOSS:.0%} of accuracy lost",
                    f"at least {PSD_GAIN}",
                    f"{row.gain:.2f}, {100 * loss:+.1f} points lost",
                    reached,
                )
            )
    models = list(dict.fromkeys(row.model for row in rows))
    by_key = {(each.model, each.candidates, each.horizon): each for each in found}

    def precision(model: str, k: int, horizon: int) -> str:
        each = by_key.get((model, k, horizon))
        return "" if each is None else f"{each.precision:.0%} of {each.oracle:.0%}"

    kinds = dict.fromkeys((each.model, each.block) for each in stages)
    by_stage = {(each.model, each.block, each.stage): each for each in stages}
    return [
        wanted_sheet(targets),
        Sheet(
            "Drafts of PSD: a chain, and a calibrated graph",
            ["model", "drafts", "d", "accuracy", "forwards", "tokens per forward", "over the policy alone"],
            [
                [
                    row.model,
                    row.drafts,
                    str(row.depth),
                    f"{row.accuracy:.1%}",
                    str(row.forwards),
                    f"{row.tokens_per_forward:.2f}",
                    f"{row.gain:.2f}×",
                ]
                for row in rows
            ],
        ),
        Sheet(
            "Precision@K, as in the paper's figure 5: of the K positions a step is most sure of, those decoded within "
            "h steps, of the most there could be",
            ["model", "K", *(f"h={horizon}" for horizon in HORIZONS)],
            [
                [model, str(k), *(precision(model, k, horizon) for horizon in HORIZONS)]
                for model in models
                for k in CANDIDATES
            ],
        ),
        Sheet(
            f"Stages of a block, as in the paper's figure 6: tokens of the policy + of drafts, d={PROFILE_DEPTH}",
            ["model", "block", *(f"{part / STAGES:.0%} to {(part + 1) / STAGES:.0%}" for part in range(STAGES))],
            [
                [
                    model,
                    block,
                    *(
                        f"{each.policy:.0%} + {each.drafts:.0%}"
                        for part in range(STAGES)
                        for each in [by_stage[model, block, part]]
                    ),
                ]
                for model, block in kinds
            ],
        ),
    ]


def main(
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 100,
    out: Out = RESULTS,
    docs: Docs = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few problems and settings: does it work?")] = False,
) -> None:
    """Answer held-out problems with PSD, and record what is decoded when."""
    console, environment = begin()
    rows: list[Row] = []
    found: list[Precision] = []
    stages: list[Stage] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in MODELS[:1] if quick else MODELS:
            own = measure(model, 4 if quick else problems, Path(scratch), console, quick=quick)
            rows, found, stages = rows + own[0], found + own[1], stages + own[2]
    result = {
        "environment": environment,
        "rows": [asdict(row) for row in rows],
        "precisions": [asdict(each) for each in found],
        "stages": [asdict(each) for each in stages],
    }
    publish(console, sheets(rows, found, stages), result, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
