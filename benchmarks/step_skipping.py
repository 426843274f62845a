"""Step-skipping: accuracy, forwards and speed of every policy under every verifier, beside the papers' numbers.

``python benchmarks/step_skipping.py --help``; ``docs/benchmarks.md`` says what is measured and how.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import step_skipping_report as report
import typer
from engine import BUSY_LOAD, FILE_WIDTH, ROOT, Target, describe_environment
from overhead import Overhead, compare, timed_steps
from record import RESULTS, write_result
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from step_skipping_report import LOCALLEAP, POLICIES, STATIC, THRESHOLD, Quality, Results, Setting, Speed
from systems import KV_CACHE_BYTES, WARM_UP_REQUESTS, Pass, Request, serve
from workload import RANDOM_MODEL, Workload, arithmetic, random_prompts, write_random_checkpoint

from vllm_dllm.methods import VERIFIER_ROWS, VerifierName

if TYPE_CHECKING:
    from vllm import LLM

MAX_DRAFTS = 10
"""Of Spiffy's D* = 10, the most that is measured."""

RESULT = "step_skipping.json"
QUALITY_CONCURRENCY = 64
MAX_TOKENS = 64

DRAFTS: dict[VerifierName, tuple[int, ...]] = {
    "freedave": (1, 3, 5, 7, 8),
    "spiffy": (1, 3, 5, 7, 10),
    "psd": (1, 3, 5, 7),
}
QUICK_DRAFTS: dict[VerifierName, tuple[int, ...]] = {"freedave": (8,), "spiffy": (3,), "psd": (3, 7)}

AUTO_POLICIES = (STATIC, THRESHOLD)
AUTO_VERIFIERS: tuple[VerifierName, ...] = ("freedave", "spiffy")
AUTO_CONCURRENCY = 64
TURNS = {1: 8, AUTO_CONCURRENCY: 7}
"""Where ``auto`` has a target, by concurrency, and for each repetition how often it takes turns with its rival."""
LONGER = {STATIC: 1, THRESHOLD: 2}
"""As many times the problems of a timing in such a turn: a policy with fewer forwards is done too soon to tell some
percent from noise."""


class Part(StrEnum):
    """What can be measured again by itself."""

    QUALITY = "quality"
    SPEED = "speed"
    TURNS = "turns"
    BFLOAT16 = "bfloat16"
    OVERHEAD = "overhead"


SUBSET = Setting(THRESHOLD, "freedave", 8, "subset")
LOW_PRECISION: list[Setting] = [
    setting
    for policy in (STATIC, THRESHOLD)
    for setting in (Setting(policy), Setting(policy, "freedave", 8), Setting(policy, "spiffy", 3))
]
OVERHEAD_DRAFTS = 3
OVERHEAD_VERIFIERS: dict[VerifierName, int] = {
    "freedave": OVERHEAD_DRAFTS + 1,
    "spiffy": OVERHEAD_DRAFTS,
    "psd": OVERHEAD_DRAFTS,
}
"""``drafts`` that each verifier calls so many drafts beside the block."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        settings: whose quality is measured.
        timed: settings whose speed is measured at a concurrency.
        requests: problems of the quality.
        timed_requests: problems of a timing, by concurrency.
        repetitions: of a timing.
        overhead_requests: of each of the random model's runs.
    """

    settings: list[Setting]
    timed: dict[int, list[Setting]]
    requests: int
    timed_requests: dict[int, int]
    repetitions: int
    overhead_requests: int

    @property
    def duels(self) -> list[tuple[Setting, int, int, int]]:
        """What takes turns with its rival: ``auto`` of a kind, concurrency, problems, turns."""
        return [
            (setting, concurrency, self.timed_requests[concurrency] * LONGER[setting.policy], turns * self.repetitions)
            for concurrency, turns in TURNS.items()
            for setting in self.timed[concurrency]
            if setting.drafts == "auto"
        ]


def make_plan(policies: Sequence[str], *, quick: bool, requests: int, repetitions: int) -> Plan:
    """Everything, or enough to see that it works."""
    settings: list[Setting] = []
    for policy in policies:
        settings.append(Setting(policy))
        for verify, numbers in (QUICK_DRAFTS if quick else DRAFTS).items():
            settings += [Setting(policy, verify, drafts) for drafts in numbers]
            if policy in AUTO_POLICIES and verify in AUTO_VERIFIERS:
                settings.append(Setting(policy, verify, "auto"))
        if policy == SUBSET.policy:
            settings.append(SUBSET)
    loaded = [setting for setting in settings if _shows_load(setting)]
    return Plan(
        settings=settings,
        timed={1: settings, 16: settings, AUTO_CONCURRENCY: loaded},
        requests=requests,
        # Some multiple of the concurrency: the last requests of a run leave the batch half empty.
        timed_requests={1: 4, 16: 16, 64: 64} if quick else {1: 16, 16: 64, 64: 256},
        repetitions=repetitions,
        overhead_requests=1 if quick else 4,
    )


def _shows_load(setting: Setting) -> bool:
    """``auto``, and what it is to be compared with: no drafts, and the verifier's default number of them."""
    return (
        setting.policy in AUTO_POLICIES
        and setting.match == "exact"
        and setting.verify in ("none", *AUTO_VERIFIERS)
        and setting.drafts in ("auto", VERIFIER_ROWS[setting.verify].default_drafts)
    )


@contextmanager
def engine(
    checkpoint: Path,
    dllm: dict[str, Any],
    *,
    dtype: str,
    eager: bool,
    max_num_seqs: int,
    rows: int | None = None,
) -> "Iterator[LLM]":
    """An engine in this process.

    Args:
        rows: of a step. Default: room for all requests with all their drafts.
    """
    from vllm import LLM

    if rows is None:
        block_length = json.loads((checkpoint / "config.json").read_text())["block_size"]
        rows = max(max_num_seqs * (2 + dllm["max_drafts"]) * block_length, 2048)
    llm = LLM(
        str(checkpoint),
        dtype=dtype,
        enforce_eager=eager,
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rows,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
        additional_config={"dllm": dllm},
        use_tqdm_on_load=False,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def decode(
    llm: "LLM", setting: Setting, requests: Sequence[Request], stop_token_ids: list[int], concurrency: int
) -> Pass:
    """All requests greedily under a setting. None finds what an earlier run left in the prefix cache."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm.reset_prefix_cache()
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=not stop_token_ids,
            extra_args=setting.extra_args(),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for request in requests
    ]
    return serve(llm, [request.prompt for request in requests], params, min(concurrency, len(requests)))


def measure_quality(llm: "LLM", settings: Sequence[Setting], workload: Workload, tick: "Tick") -> list[Quality]:
    """Tokens and forwards of every setting."""
    passes = {}
    for setting in settings:
        tick(f"quality: {setting.policy}, {setting.name}")
        passes[setting] = decode(llm, setting, workload.requests, workload.stop_token_ids, QUALITY_CONCURRENCY)
    return report.make_qualities(passes, workload)


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
            speeds += report.make_speeds(passes, concurrency)
    return speeds


def measure_duels(
    llm: "LLM", plan: Plan, speeds: Sequence[Speed], workload: Workload, tick: "Tick"
) -> list[report.Duel]:
    """``auto`` by turns with what it is to match, the other first in every other turn."""
    duels = []
    for setting, concurrency, count, turns in plan.duels:
        rival = report.rival_of(setting, concurrency, speeds)
        requests = workload.requests[:count]
        passes: dict[Setting, list[Pass]] = {setting: [], rival: []}
        for each in passes:
            decode(llm, each, requests[:WARM_UP_REQUESTS], workload.stop_token_ids, 1)
        for turn in range(turns):
            tick(f"by turns at {concurrency}: {setting.policy}, {setting.name}")
            for each in (setting, rival) if turn % 2 == 0 else (rival, setting):
                passes[each].append(decode(llm, each, requests, workload.stop_token_ids, concurrency))
        duels.append(report.make_duel(setting, rival, concurrency, list(zip(*passes.values(), strict=True))))
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
    return report.make_qualities(passes, workload), alone_equal


def measure_overheads(llm: "LLM", workload: Workload, repetitions: int, tick: "Tick") -> list[Overhead]:
    """Each verifier beside no drafts, one request at a time, in turns."""
    alone = Setting(THRESHOLD)
    overheads = []
    for verify, drafts in OVERHEAD_VERIFIERS.items():
        drafted = Setting(THRESHOLD, verify, drafts)
        steps: dict[Setting, list[Any]] = {alone: [], drafted: []}
        for setting in steps:
            decode(llm, setting, workload.requests[:1], workload.stop_token_ids, 1)
        for _ in range(repetitions):
            for setting, collected in steps.items():
                tick(f"overhead: {setting.name}")
                with timed_steps(llm) as timed:
                    decode(llm, setting, workload.requests, workload.stop_token_ids, 1)
                collected += timed
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
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
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


def begin() -> tuple[Console, dict[str, Any]]:
    """Where to print, and what this runs on. Sets what vLLM reads when it is imported."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    environment = describe_environment()
    if environment["load_average"] > BUSY_LOAD:
        console.print(
            f"[yellow]The load average is {environment['load_average']:.1f}: "
            "other programs are running, do not trust the timings."
        )
    return console, environment


def describe_runs(environments: Mapping[str, Mapping[str, Any]]) -> str:
    """When and where the parts were measured; those of a run together."""
    runs: dict[str, list[str]] = {}
    for part, environment in environments.items():
        made = f"{environment['date'][:16].replace('T', ' ')}, {environment['cpu']}, {environment['cores']} cores"
        runs.setdefault(made, []).append(part)
    if len(runs) == 1:
        return next(iter(runs))
    return "; ".join(f"{made} ({', '.join(parts)})" for made, parts in runs.items())


def make_sheets(
    results: Results, targets: Sequence[Target], *, of_one_run: bool
) -> tuple[report.Sheet, list[report.Sheet]]:
    """A table of everything, and those of the page.

    Args:
        of_one_run: qualities and speeds are. Else speeds may be of another checkpoint, and do not stand in one row with
            forwards.
    """
    in_one_row = results if of_one_run else replace(results, speeds=[])
    return report.make_grid(in_one_row), [
        report.make_target_sheet(targets),
        report.make_freedave_sheet(in_one_row),
        report.make_spiffy_sheet(in_one_row),
        report.make_psd_sheet(results),
        report.make_overhead_sheet(results.overheads),
        report.make_load_sheet(results),
        report.make_duel_sheet(results.duels),
        report.make_low_precision_sheet(results),
    ]


app = typer.Typer(add_completion=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="A few problems and settings, eagerly: does it work?")] = False,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"Policies; repeatable. Default: all of {', '.join(POLICIES)}.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Held-out problems. Default: 200, or 16 quickly.")] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Repetitions of a timing. Default: 3, or 1 quickly.")
    ] = None,
    part: Annotated[
        list[Part] | None,
        typer.Option(help="What to measure, the rest being that of the last result; repeatable. Default: everything."),
    ] = None,
    enforce_eager: Annotated[bool, typer.Option(help="Run the model without torch.compile.")] = False,
    checkpoint: Annotated[Path, typer.Option(help="Trained model, in SDAR's layout.")] = ROOT
    / "checkpoints"
    / "tiny-sdar",
    draft_graph: Annotated[
        Path | None,
        typer.Option(
            help="Draft graph of `vllm-dllm calibrate`, for Spiffy and PSD. Default: the family's, and a chain."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result. Default: benchmarks/results, or build quickly.")
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Page whose marked place gets the tables, for instance docs/step-skipping.md.")
    ] = None,
) -> None:
    """Measure policies and verifiers on the bundled model, and the verifiers' overhead on a random one."""
    policies = policy or ([STATIC, THRESHOLD, LOCALLEAP] if quick else list(POLICIES))
    if unknown := set(policies) - POLICIES.keys():
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(POLICIES)}", param_hint="--policy")
    if not (checkpoint / "config.json").is_file():
        raise typer.BadParameter(f"{checkpoint} holds no checkpoint", param_hint="--checkpoint")
    console, environment = begin()
    plan = make_plan(
        policies,
        quick=quick,
        requests=requests or (16 if quick else 200),
        repetitions=repetitions or (1 if quick else 3),
    )
    eager = enforce_eager or quick
    folder = out or (ROOT / "build" if quick else RESULTS)
    parts = list(part or Part)
    results, environments, plans = Results([], [], [], [], {}, []), {}, {}
    if len(parts) < len(Part):
        if not (folder / RESULT).is_file():
            raise typer.BadParameter(f"{folder} holds no {RESULT} with the other parts", param_hint="--part")
        last = json.loads((folder / RESULT).read_text())
        results, environments, plans = report.read_results(last["results"]), last["environments"], last["plans"]
    asked = {"requests": plan.requests, "timed_requests": plan.timed_requests, "repetitions": plan.repetitions}
    environments, plans = environments | dict.fromkeys(parts, environment), plans | dict.fromkeys(parts, asked)
    with tempfile.TemporaryDirectory() as scratch:
        results, workloads = measure(
            plan, checkpoint, draft_graph, results, parts, eager=eager, scratch=Path(scratch), console=console
        )
    targets = report.check_targets(results)
    grid, sheets = make_sheets(results, targets, of_one_run=environments[Part.QUALITY] == environments[Part.SPEED])
    for sheet in [grid, *sheets]:
        console.print(sheet.rich())

    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "environments": environments,
        "compiled": not eager,
        "plans": plans,
        "workloads": workloads,
        "results": asdict(results),
        "targets": [asdict(target) for target in targets],
    }
    write_result(result, folder / RESULT)
    report.plot_pareto(results.qualities, folder / "step_skipping_pareto.png")
    console.print(f"Written to {folder}")
    if docs:
        made = describe_runs(environments)
        picture = os.path.relpath(folder / "step_skipping_pareto.png", docs.parent)
        texts = [f"Measured {made}.\n", *(sheet.markdown() for sheet in sheets)]
        report.write_docs(
            docs,
            "\n".join([*texts, f"![Tokens per forward of every policy and verifier, and their accuracy]({picture})"]),
            __file__,
        )
        console.print(f"Figures written to {docs}")


if __name__ == "__main__":
    app()
