"""Step-skipping: accuracy, forwards and speed of every policy under every verifier, beside the papers' numbers.

``python benchmarks/step_skipping.py --help``; ``docs/benchmarks.md`` says what is measured and how.
"""

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from arguments import TINY_SDAR, Docs, Eager, OutOrBuild, Sdar, Tables, check_checkpoint, folder_of
from environment import begin, make_progress
from in_process import decode, engine
from overhead import Overhead, Step, compare, timed_steps
from record import write_result
from rich.console import Console
from rich.progress import Progress
from sheet import show
from step_skipping_report import make_sheets, plot_pareto
from step_skipping_results import (
    Duel,
    Quality,
    Results,
    Speed,
    check_targets,
    make_duel,
    make_qualities,
    make_speeds,
    read_results,
    rival_of,
)
from step_skipping_settings import (
    AUTO_CONCURRENCY,
    LOCALLEAP,
    LOW_PRECISION,
    MAX_DRAFTS,
    OVERHEAD_DRAFTS,
    OVERHEAD_VERIFIERS,
    POLICIES,
    STATIC,
    THRESHOLD,
    Plan,
    Setting,
    make_plan,
)
from systems import WARM_UP_REQUESTS, Pass
from workload import RANDOM_MODEL, Workload, arithmetic, random_prompts, write_random_checkpoint

if TYPE_CHECKING:
    from vllm import LLM

RESULT = "step_skipping.json"
PICTURE = "step_skipping_pareto.png"
QUALITY_CONCURRENCY = 64
MAX_TOKENS = 64


class Part(StrEnum):
    """What can be measured again by itself."""

    QUALITY = "quality"
    SPEED = "speed"
    TURNS = "turns"
    BFLOAT16 = "bfloat16"
    OVERHEAD = "overhead"


def measure_quality(llm: "LLM", settings: Sequence[Setting], workload: Workload, tick: "Tick") -> list[Quality]:
    """Tokens and forwards of every setting."""
    passes = {}
    for setting in settings:
        tick(f"quality: {setting.policy}, {setting.name}")
        passes[setting] = decode(llm, setting, workload.requests, workload.stop_token_ids, QUALITY_CONCURRENCY)
    return make_qualities(passes, workload)


def measure_speed(llm: "LLM", plan: Plan, workload: Workload, tick: "Tick") -> list[Speed]:
    """Speed of every setting: the settings of a policy take turns, forwards and backwards, so that what else the
    machine does meets all of them alike."""
    speeds: list[Speed] = []
    for concurrency, timed in plan.timed.items():
        for policy in dict.fromkeys(setting.policy for setting in timed):
            requests = workload.requests[: plan.timed_requests[concurrency]]
            turns = [setting for setting in timed if setting.policy == policy]
            passes: dict[Setting, list[Pass]] = {setting: [] for setting in turns}
            for setting in turns:
                decode(llm, setting, requests[:WARM_UP_REQUESTS], workload.stop_token_ids, 1)
            for repetition in range(plan.repetitions):
                for setting in turns if repetition % 2 == 0 else reversed(turns):
                    tick(f"speed at {concurrency}: {policy}, {setting.name}")
                    passes[setting].append(decode(llm, setting, requests, workload.stop_token_ids, concurrency))
            speeds += make_speeds(passes, concurrency)
    return speeds


def measure_duels(llm: "LLM", plan: Plan, speeds: Sequence[Speed], workload: Workload, tick: "Tick") -> list[Duel]:
    """``auto`` by turns with what it is to match, the other first in every other turn."""
    duels = []
    for setting, concurrency, count, turns in plan.duels:
        rival = rival_of(setting, concurrency, speeds)
        requests = workload.requests[:count]
        passes: dict[Setting, list[Pass]] = {setting: [], rival: []}
        for each in passes:
            decode(llm, each, requests[:WARM_UP_REQUESTS], workload.stop_token_ids, 1)
        for turn in range(turns):
            tick(f"by turns at {concurrency}: {setting.policy}, {setting.name}")
            for each in (setting, rival) if turn % 2 == 0 else (rival, setting):
                passes[each].append(decode(llm, each, requests, workload.stop_token_ids, concurrency))
        duels.append(make_duel(setting, rival, concurrency, list(zip(*passes.values(), strict=True))))
    return duels


def measure_low_precision(
    llm: "LLM", settings: Sequence[Setting], workload: Workload, tick: "Tick"
) -> tuple[list[Quality], dict[str, int]]:
    """Quality, and how many requests each policy alone decodes the same way one at a time and together."""
    passes, alone_equal = {}, {}
    for setting in settings:
        tick(f"bfloat16: {setting.policy}, {setting.name}")
        passes[setting] = decode(llm, setting, workload.requests, workload.stop_token_ids, QUALITY_CONCURRENCY)
        if setting == setting.alone:
            single = decode(llm, setting, workload.requests, workload.stop_token_ids, 1)
            alone_equal[setting.policy] = sum(map(list.__eq__, single.tokens, passes[setting].tokens))
    return make_qualities(passes, workload), alone_equal


def measure_overheads(llm: "LLM", workload: Workload, repetitions: int, tick: "Tick") -> list[Overhead]:
    """Each verifier beside no drafts, one request at a time, in turns."""
    alone = Setting(THRESHOLD)
    overheads = []
    for verify, drafts in OVERHEAD_VERIFIERS.items():
        drafted = Setting(THRESHOLD, verify, drafts)
        steps: dict[Setting, list[Step]] = {alone: [], drafted: []}
        for setting in steps:
            decode(llm, setting, workload.requests[:1], workload.stop_token_ids, 1)
        for _ in range(repetitions):
            for setting, collected in steps.items():
                tick(f"overhead: {setting.name}")
                run = partial(decode, llm, setting, workload.requests, workload.stop_token_ids, 1)
                collected += timed_steps(llm, run)
        overheads.append(compare(verify, OVERHEAD_DRAFTS, steps[alone], steps[drafted], workload.block_length))
    return overheads


@dataclass
class Tick:
    """Moves the progress bar one step on."""

    progress: Progress
    total: int

    def __post_init__(self) -> None:
        self.bar = self.progress.add_task("loading", total=self.total)
        self.begun = 0

    def __call__(self, description: str) -> None:
        """What begins now."""
        self.progress.update(self.bar, completed=self.begun, description=description)
        self.begun += 1


def measure(
    plan: Plan,
    checkpoint: Path,
    draft_graph: Path | None,
    results: Results,
    parts: Collection[Part],
    *,
    eager: bool,
    scratch: Path,
    console: Console,
) -> tuple[Results, dict[str, Any]]:
    """Measure parts of the results, the others staying as they are; returns also what was asked."""
    count = max(plan.requests, *plan.timed_requests.values(), *(count for _, _, count, _ in plan.duels))
    problems = arithmetic("tiny", checkpoint, count, MAX_TOKENS, None)
    assert problems.answers is not None, f"{checkpoint} has no tokenizer"
    graded = replace(problems, requests=problems.requests[: plan.requests], answers=problems.answers[: plan.requests])
    write_random_checkpoint(scratch, RANDOM_MODEL)
    sequences = random_prompts("random", scratch, plan.overhead_requests, 4 * RANDOM_MODEL["block_size"], None)
    low_precision = [setting for setting in LOW_PRECISION if setting.alone in plan.settings]
    dllm = {"max_drafts": MAX_DRAFTS} | ({"draft_graph": str(draft_graph)} if draft_graph else {})

    steps = {
        Part.QUALITY: len(plan.settings),
        Part.SPEED: plan.repetitions * sum(map(len, plan.timed.values())),
        Part.TURNS: sum(turns for _, _, _, turns in plan.duels),
        Part.BFLOAT16: len(low_precision),
        Part.OVERHEAD: 2 * plan.repetitions * len(OVERHEAD_VERIFIERS),
    }
    with make_progress(console) as progress:
        tick = Tick(progress, sum(steps[part] for part in parts))
        if {Part.QUALITY, Part.SPEED, Part.TURNS} & {*parts}:
            with engine(checkpoint, dllm, dtype="float32", eager=eager, max_num_seqs=AUTO_CONCURRENCY) as llm:
                if Part.QUALITY in parts:
                    results = replace(results, qualities=measure_quality(llm, plan.settings, graded, tick))
                if Part.SPEED in parts:
                    results = replace(results, speeds=measure_speed(llm, plan, problems, tick))
                if Part.TURNS in parts:
                    results = replace(results, duels=measure_duels(llm, plan, results.speeds, problems, tick))
        if Part.BFLOAT16 in parts:
            with engine(checkpoint, dllm, dtype="bfloat16", eager=eager, max_num_seqs=AUTO_CONCURRENCY) as llm:
                qualities, alone_equal = measure_low_precision(llm, low_precision, graded, tick)
                results = replace(results, low_precision=qualities, alone_equal=alone_equal)
        if Part.OVERHEAD in parts:
            with engine(scratch, {"max_drafts": OVERHEAD_DRAFTS}, dtype="float32", eager=eager, max_num_seqs=4) as llm:
                results = replace(results, overheads=measure_overheads(llm, sequences, plan.repetitions, tick))
    return results, {"graded": graded.describe(), "timed": problems.describe(), "random": sequences.describe()}


def describe_runs(environments: Mapping[str, Mapping[str, Any]]) -> str:
    """When and where the parts were measured; those of a run together."""
    runs: dict[str, list[str]] = {}
    for part, environment in environments.items():
        made = f"{environment['date'][:16].replace('T', ' ')}, {environment['cpu']}, {environment['cores']} cores"
        runs.setdefault(made, []).append(part)
    if len(runs) == 1:
        return next(iter(runs))
    return "; ".join(f"{made} ({', '.join(parts)})" for made, parts in runs.items())


def publish(result: dict[str, Any], folder: Path, docs: Path | None, console: Console) -> None:
    """Print the tables of a result, draw its picture into ``folder``, and write both into ``docs``."""
    results, environments = read_results(result["results"]), result["environments"]
    of_one_run = environments[Part.QUALITY] == environments[Part.SPEED]
    grid, sheets = make_sheets(results, check_targets(results), of_one_run=of_one_run)
    console.print(grid.rich())
    plot_pareto(results.qualities, folder / PICTURE)
    picture = ("Tokens per forward of every policy and verifier, and their accuracy", folder / PICTURE)
    show(console, sheets, docs, __file__, measured=describe_runs(environments), picture=picture)


app = typer.Typer(add_completion=False)
Policies = Annotated[
    list[str] | None, typer.Option(help=f"Policies; repeatable. Default: all of {', '.join(POLICIES)}.")
]
Parts = Annotated[
    list[Part] | None,
    typer.Option(help="What to measure, the rest being that of the last result; repeatable. Default: everything."),
]
Graph = Annotated[
    Path | None,
    typer.Option(help="Draft graph of `vllm-dllm calibrate`, for Spiffy and PSD. Default: the family's, and a chain."),
]


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="A few problems and settings, eagerly: does it work?")] = False,
    policy: Policies = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Held-out problems. Default: 200, or 16 quickly.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Of a timing. Default: 3, or 1 quickly.")] = None,
    part: Parts = None,
    enforce_eager: Eager = False,
    checkpoint: Sdar = TINY_SDAR,
    draft_graph: Graph = None,
    out: OutOrBuild = None,
    docs: Docs = None,
    tables: Tables = False,
) -> None:
    """Measure policies and verifiers on the bundled model, and the verifiers' overhead on a random one."""
    policies = policy or ([STATIC, THRESHOLD, LOCALLEAP] if quick else list(POLICIES))
    if unknown := set(policies) - POLICIES.keys():
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(POLICIES)}", param_hint="--policy")
    check_checkpoint(checkpoint)
    folder = folder_of(out, quick=quick)
    parts = [] if tables else list(part or Part)
    result: dict[str, Any] = {"environments": {}, "plans": {}, "results": asdict(Results([], [], [], [], {}, []))}
    if len(parts) < len(Part):
        if not (folder / RESULT).is_file():
            raise typer.BadParameter(f"{folder} holds no {RESULT}, whose other parts stay", param_hint="--out")
        result = json.loads((folder / RESULT).read_text())
    console, environment = begin()
    if parts:
        plan = make_plan(
            policies,
            quick=quick,
            requests=requests or (16 if quick else 200),
            repetitions=repetitions or (1 if quick else 3),
        )
        eager = enforce_eager or quick
        with tempfile.TemporaryDirectory() as scratch:
            last = read_results(result["results"])
            results, workloads = measure(
                plan, checkpoint, draft_graph, last, parts, eager=eager, scratch=Path(scratch), console=console
            )
        asked = {"requests": plan.requests, "timed_requests": plan.timed_requests, "repetitions": plan.repetitions}
        result = {
            "environments": result["environments"] | dict.fromkeys(parts, environment),
            "compiled": not eager,
            "plans": result["plans"] | dict.fromkeys(parts, asked),
            "workloads": workloads,
            "results": asdict(results),
            "targets": [asdict(target) for target in check_targets(results)],
        }
        write_result(result, folder / RESULT)
        console.print(f"Written to {folder}")
    publish(result, folder, docs, console)


if __name__ == "__main__":
    app()
