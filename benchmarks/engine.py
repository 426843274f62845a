"""Speed of the engine, beside Transformers and beside autoregressive decoding of the same weights in vLLM.

``python benchmarks/engine.py --help``; ``docs/benchmarks.md`` says what is compared and how.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from arguments import TINY_SDAR, Sdar, check_checkpoint
from engine_report import ONE_TOKEN_PER_STEP, Execution, Measurement, Row, check_targets, make_rows, make_sheet
from environment import begin, child_environment, make_progress
from record import RESULTS, write_result
from rich.console import Console
from sheet import target_sheet
from systems import Job, Measured, Policy, Request, Run, System
from workload import ModelName, Workload, make_workload, write_backbone


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


def make_runs(system: System, policies: Sequence[Policy], concurrency: Sequence[int]) -> list[Run]:
    """What is measured of a system."""
    if system == System.HF_LOOP:
        return [Run(policy, 1) for policy in policies]
    if system == System.DLLM:
        return [Run(policy, n) for policy in policies for n in concurrency]
    return [Run(None, n) for n in concurrency]


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
    with make_progress(console) as progress:
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
Models = Annotated[list[ModelName] | None, typer.Option(help="Models to measure; repeatable. Default: both.")]
Systems = Annotated[list[System] | None, typer.Option(help="Systems to measure; repeatable. Default: all.")]
Levels = Annotated[list[int] | None, typer.Option(min=1, help="Concurrent requests; repeatable. Default: by model.")]
Executions = Annotated[
    list[Execution] | None, typer.Option(help="How vLLM runs the model; repeatable. Default: compiled, as vLLM does.")
]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Requests of a run, at least the highest concurrency. Default: by model.")
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens per request, rounded up to a block. Default: by model.")
]
BlockLength = Annotated[int | None, typer.Option(min=1, help="Diffusion block length. Default: the checkpoint's.")]
Threads = Annotated[int | None, typer.Option(min=1, help="OpenMP threads of every system. Default: all cores.")]


@app.command()
def main(
    model: Models = None,
    system: Systems = None,
    concurrency: Levels = None,
    execution: Executions = None,
    checkpoint: Sdar = TINY_SDAR,
    block_length: BlockLength = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Of the threshold policy.")] = 0.9,
    requests: Requests = None,
    max_tokens: MaxTokens = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of a run.")] = 3,
    seconds_per_run: Annotated[float, typer.Option(min=0, help="Do not repeat a run that has taken this long.")] = 20.0,
    threads: Threads = None,
    dtype: Annotated[str, typer.Option(help="Of the weights and the K/V cache.")] = "float32",
    out: Annotated[Path, typer.Option(help="Where the result goes, as JSON.")] = (RESULTS / "engine.json"),
) -> None:
    """Measure the engine, the Transformers loop and autoregressive vLLM on the same weights and prompts."""
    models = model or list(ModelName)
    if ModelName.TINY in models:
        check_checkpoint(checkpoint)
    console, environment = begin()
    settings = Settings(
        systems=system or list(System),
        executions=execution or [Execution.COMPILED],
        policies=[ONE_TOKEN_PER_STEP, Policy(f"threshold {threshold:g}", threshold)],
        threads=threads or len(os.sched_getaffinity(0)),
        dtype=dtype,
        repetitions=repetitions,
        seconds_per_run=seconds_per_run,
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
            console.print(make_sheet(model_rows, f"{name}, {dtype}, {settings.threads} threads").rich())
    targets = check_targets(rows)
    console.print(target_sheet(targets).rich())
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
