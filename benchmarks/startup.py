"""From the command to the first token: what a diffusion model adds to the start of plain vLLM.

``python benchmarks/startup.py --help``; ``docs/benchmarks.md`` says what is measured and how.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer
from arguments import TINY_SDAR, Docs, OutOrBuild, Sdar, check_checkpoint, folder_of
from environment import begin
from sheet import Sheet, Wanted, publish, wanted_sheet
from startup_process import Stage
from workload import write_backbone

PROGRAM = Path(__file__).with_name("startup_process.py")
MIB = 1 << 20

BOUND = 1.1
"""Processor time of a start with this plugin over that of plain vLLM, at most."""


class Start(StrEnum):
    """What is started: the same weights each time."""

    PLAIN = "autoregressive, no plugin"
    PLUGIN = "autoregressive, plugin installed"
    DIFFUSION = "diffusion"


class Processes(StrEnum):
    """Of the engine."""

    ONE = "one"
    DEFAULT = "three, the default"
    """The program, the scheduler, the worker."""


@dataclass(frozen=True)
class Reading:
    """A start so far.

    Attributes:
        wall_seconds: since the program was started.
        cpu_seconds: of all its processes.
        memory: bytes; what processes share counts once (PSS).
    """

    stage: Stage
    wall_seconds: float
    cpu_seconds: float
    memory: int


@dataclass(frozen=True)
class Timing:
    """One start."""

    start: Start
    processes: Processes
    readings: list[Reading]


def measure(checkpoint: Path, start: Start, processes: Processes) -> Timing:
    """Start once, in processes of its own.

    Raises:
        RuntimeError: the start has failed; with the end of what it wrote.
    """
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if processes == Processes.ONE else "1",
        # A worker that takes all cores would bind its threads to them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if start == Start.PLAIN:
        environment["VLLM_PLUGINS"] = ""
    readings = []
    with tempfile.TemporaryFile("w+") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(checkpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with _ended(process):
            for stage, line in zip(Stage, process.stdout, strict=False):
                assert line.strip() == stage
                wall = time.monotonic() - began
                readings.append(Reading(stage, wall, *_usage(process.pid)))
                process.stdin.write("\n")
                process.stdin.flush()
        if len(readings) < len(Stage):
            log.seek(0)
            raise RuntimeError(f"{start} did not start:\n" + "".join(log.readlines()[-40:]))
    return Timing(start, processes, readings)


def _usage(pid: int) -> tuple[float, int]:
    """Processor seconds and bytes of a process and of everything it started."""
    cpu, memory = 0.0, 0
    parent = psutil.Process(pid)
    for each in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            # With those of children that have ended.
            cpu += sum(each.cpu_times()[:4])
            memory += each.memory_full_info().pss
    return cpu, memory


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a process and its children when the block ends."""
    try:
        yield
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


@dataclass(frozen=True)
class Row:
    """The starts of a kind; medians.

    Attributes:
        stage_cpu_seconds: of each stage by itself.
    """

    start: Start
    processes: Processes
    wall_seconds: float
    cpu_seconds: float
    stage_cpu_seconds: dict[Stage, float]
    memory: int


def make_rows(timings: Sequence[Timing]) -> list[Row]:
    """Medians of the repetitions."""
    rows = []
    for start, processes in dict.fromkeys((t.start, t.processes) for t in timings):
        runs = [t.readings for t in timings if (t.start, t.processes) == (start, processes)]
        stages = {}
        for i, stage in enumerate(Stage):
            before = [run[i - 1].cpu_seconds if i else 0.0 for run in runs]
            stages[stage] = median(run[i].cpu_seconds - spent for run, spent in zip(runs, before, strict=True))
        rows.append(
            Row(
                start,
                processes,
                wall_seconds=median(run[-1].wall_seconds for run in runs),
                cpu_seconds=median(run[-1].cpu_seconds for run in runs),
                stage_cpu_seconds=stages,
                memory=int(median(run[-1].memory for run in runs)),
            )
        )
    return rows


def over_plain(rows: Sequence[Row], row: Row) -> float:
    """Processor time of a start over that of plain vLLM with as many processes."""
    (plain,) = (each for each in rows if (each.start, each.processes) == (Start.PLAIN, row.processes))
    return row.cpu_seconds / plain.cpu_seconds


def make_sheet(rows: Sequence[Row]) -> Sheet:
    """Every kind of start."""
    headings = ["processes", "model", "wall s", "CPU s", *(f"CPU s: {stage}" for stage in Stage)]
    headings += ["CPU over plain vLLM", "MiB", "MiB over plain vLLM"]
    table = []
    for row in rows:
        (plain,) = (each for each in rows if (each.start, each.processes) == (Start.PLAIN, row.processes))
        table.append(
            [
                row.processes,
                row.start,
                f"{row.wall_seconds:.1f}",
                f"{row.cpu_seconds:.1f}",
                *(f"{row.stage_cpu_seconds[stage]:.1f}" for stage in Stage),
                f"{over_plain(rows, row):.2f}×",
                f"{row.memory / MIB:.0f}",
                f"{(row.memory - plain.memory) / MIB:+.0f}",
            ]
        )
    return Sheet("From the command to the first token", headings, table)


def make_target_sheet(rows: Sequence[Row]) -> Sheet:
    """The target and whether it was reached."""
    targets: list[Wanted] = []
    for row in rows:
        if row.start != Start.PLAIN:
            ratio = over_plain(rows, row)
            name = f"CPU over plain vLLM: {row.start}, processes: {row.processes}"
            targets.append((name, f"at most {BOUND:g}", f"{ratio:.2f}", ratio <= BOUND))
    return wanted_sheet(targets)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="Each start once, in one process: does it work?")] = False,
    checkpoint: Sdar = TINY_SDAR,
    repetitions: Annotated[int, typer.Option(min=1, help="Starts of each kind; they take turns.")] = 5,
    out: OutOrBuild = None,
    docs: Docs = None,
) -> None:
    """Measure the start of a small diffusion model, and of the same weights as an autoregressive model."""
    check_checkpoint(checkpoint)
    console, environment = begin()
    timings: list[Timing] = []
    with tempfile.TemporaryDirectory() as scratch:
        backbone = Path(scratch) / "backbone"
        write_backbone(checkpoint, backbone)
        # One more than is counted: the first start of all reads the files from the disk.
        for repetition in range(1 if quick else 1 + repetitions):
            for processes in [Processes.ONE] if quick else Processes:
                starts = list(Start)
                for start in starts if repetition % 2 else starts[::-1]:
                    timing = measure(checkpoint if start == Start.DIFFUSION else backbone, start, processes)
                    last = timing.readings[-1]
                    console.print(f"{processes}, {start}: {last.wall_seconds:.1f} s, CPU {last.cpu_seconds:.1f} s")
                    if repetition or quick:
                        timings.append(timing)
    order = [(start, processes) for processes in Processes for start in Start]
    rows = sorted(make_rows(timings), key=lambda row: order.index((row.start, row.processes)))
    result = {
        "environment": environment,
        "rows": [asdict(row) for row in rows],
        "timings": [asdict(timing) for timing in timings],
    }
    folder = folder_of(out, quick=quick)
    publish(console, [make_target_sheet(rows), make_sheet(rows)], result, folder, docs, __file__)


if __name__ == "__main__":
    app()
