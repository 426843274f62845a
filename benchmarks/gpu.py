"""The engine on a GPU: steps and their parts, launches, bandwidth, autoregression of the same shapes, equal tokens.

``python benchmarks/gpu.py --help``; ``docs/gpu.md`` says what is measured and how. ``--quick`` runs on a CPU too.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import gpu_report as report
import torch
import typer
from arguments import Docs, OutOrBuild, folder_of
from environment import child_environment, describe_environment, make_console, make_progress
from gpu_cells import (
    CHECKED,
    END,
    FULL_SCALE,
    QUICK_SCALE,
    Cell,
    Dtype,
    Graphs,
    Job,
    Kind,
    KVDtype,
    Outcome,
    Scale,
    Scheduling,
    Selection,
    Status,
    Steps,
    make_plan,
)
from gpu_probe import Card, measure_card
from gpu_shapes import SHAPES, Model, Shape
from gpu_sharing import MEMORY_SHARE, Memory, engine_bytes, kv_bytes
from gpu_steps import MAX_MODEL_LEN
from record import CHECKPOINTS, RESULTS, ROOT, write_result
from rich.console import Console
from sheet import Sheet, show, target_sheet
from systems import System

WORKER = Path(__file__).with_name("gpu_worker.py")
RESULT = "gpu"
"""Name of the result and of the picture."""
LEAST_SECONDS = 20.0
"""A cell that has less time left is not begun."""
TAIL_LINES = 20
"""Of what a failed process wrote."""
RANK = re.compile(r"^\[rank\d+\]: *")
"""Begins the lines of vLLM's workers."""
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
"""Begins the line that names an exception."""
TOGETHER = 4
"""Engines that share a GPU at most. One alone is timed, and the others start, or wait."""
RUNNING: set[int] = set()
"""Process groups of the engines that run."""
CPU_BYTES = 64 << 20
CPU_MATRIX = 256


def run_process(
    arguments: Sequence[str], stdin: str, seconds: float, system: System
) -> tuple[list[dict[str, Any]], str, list[str]]:
    """Run ``gpu_worker.py`` for at most so many seconds.

    Returns:
        The events that it told, why it failed (empty: it did not), and the last lines that it wrote.
    """
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    environment = child_environment(system, threads)
    # Why vLLM lowers what it was asked for is a warning.
    environment["VLLM_LOGGING_LEVEL"] = "WARNING"
    # FlashAttention 4 compiles its kernels in every process otherwise.
    environment.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        timed_out = threading.Event()

        def end_group() -> None:
            # Compilers that the process started outlive it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def end_late() -> None:
            timed_out.set()
            end_group()

        timer = threading.Timer(seconds, end_late)
        timer.start()
        RUNNING.add(process.pid)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # The exit status tells.
                process.stdin.write(stdin)
                process.stdin.close()
            events = list(read_events(process.stdout))
            code = process.wait()
        finally:
            timer.cancel()
            end_group()
            process.wait()
            RUNNING.discard(process.pid)
        log.seek(0)
        tail = log.read().splitlines()[-TAIL_LINES:]
    if timed_out.is_set():
        return events, f"took longer than {seconds:.0f} s", tail
    if code:
        return events, f"exit status {code}: {last_error(tail)}", tail
    return events, "", tail


def last_error(lines: Sequence[str]) -> str:
    """The last line that names an exception, as libraries may warn behind it; the last line where none does."""
    filled = [RANK.sub("", line.strip()) for line in lines if line.strip()]
    named = [line for line in filled if ERROR.match(line)]
    return (named or filled or [""])[-1]


def read_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Events of a process until its end, or until it was killed, perhaps in the midst of a line."""
    for line in lines:
        if not line.endswith("\n"):
            return
        event = json.loads(line)
        if event == END:
            return
        yield event


def run_cell(job: Job, seconds: float) -> Outcome:
    """Run a cell; whatever happens to its process is the outcome."""
    begin = time.monotonic()
    events, failure, tail = run_process([], job.to_json(), seconds, job.cell.system)
    taken = round(time.monotonic() - begin, 1)
    first, results = (events[0], events[1:]) if events else ({}, [])
    if refused := first.get("refused"):
        return Outcome(job.cell, Status.REFUSED, refused, taken, tail=tail)
    if failure or not events:
        message = failure or "the process told nothing"
        return Outcome(job.cell, Status.FAILED, message, taken, first, results, tail)
    return Outcome(job.cell, Status.MEASURED, "", taken, first, results)


def find_card(is_gpu: bool, seconds: float) -> tuple[Card | None, str]:
    """The device, measured; or None, and why not."""
    if not is_gpu:
        return measure_card(torch.device("cpu"), torch.bfloat16, num_bytes=CPU_BYTES, size=CPU_MATRIX), ""
    events, failure, _ = run_process(["card"], "", seconds, System.DLLM)
    return (Card(**events[0]), "") if events and not failure else (None, failure or "the process told nothing")


def make_job(cell: Cell, scale: Scale, shapes: dict[Model, Shape], scratch: Path, *, shared: bool = False) -> Job:
    """The job of a cell, and its checkpoint where that has no weights.

    Args:
        shared: other engines have the device too.
    """
    match cell.kind:
        case Kind.SPEED:
            checkpoint = scratch / f"{cell.model}-{cell.system}"
            shapes[Model(cell.model)].write(checkpoint, autoregressive=cell.system == System.AR)
        case Kind.TOKENS:
            checkpoint = CHECKPOINTS / CHECKED
        case Kind.GOLDEN:
            checkpoint = ROOT / "tests" / "golden" / cell.model / "checkpoint"
    return Job(
        cell=cell,
        checkpoint=str(checkpoint),
        prompt_tokens=scale.prompt_tokens,
        steps=scale.steps,
        requests=scale.requests,
        dummy=cell.kind == Kind.SPEED,
        kv_bytes=kv_bytes(cell, scale.prompt_tokens, MAX_MODEL_LEN) if shared else 0,
        lock=str(scratch / "lock") if shared else "",
    )


def run_plan(
    plan: Sequence[Cell],
    scale: Scale,
    shapes: dict[Model, Shape],
    deadline: float,
    cell_seconds: float,
    console: Console,
    keep: Callable[[Sequence[Outcome]], object],
    memory: int = 0,
) -> list[Outcome]:
    """Run cells until ``deadline`` (``time.monotonic``); ``keep`` takes the outcomes so far after every one of them.

    Args:
        memory: bytes of the device that engines share; 0: they run one after the other.
    """
    outcomes: dict[Cell, Outcome] = {}
    together = TOGETHER if memory else 1
    shared = Memory(memory)
    with (
        tempfile.TemporaryDirectory() as scratch,
        make_progress(console) as progress,
        ThreadPoolExecutor(together) as pool,
    ):
        bar = progress.add_task("", total=len(plan))
        # Before any process reads a checkpoint that another job has, too.
        jobs = [make_job(cell, scale, shapes, Path(scratch), shared=bool(memory)) for cell in plan]

        def attempt(job: Job) -> Outcome:
            with shared.take(engine_bytes(job) if memory else 0):
                left = deadline - time.monotonic()
                if left < LEAST_SECONDS:
                    return Outcome(job.cell, Status.NOT_RUN, "no time was left")
                progress.update(bar, description=job.cell.name)
                return run_cell(job, min(left, cell_seconds))

        attempts = [pool.submit(attempt, job) for job in jobs]
        try:
            for done in as_completed(attempts):
                outcome = done.result()
                outcomes[outcome.cell] = outcome
                if outcome.status != Status.NOT_RUN:
                    keep([outcomes[cell] for cell in plan if cell in outcomes])
                    why = f": {outcome.message}" if outcome.message else ""
                    name = outcome.cell.name
                    console.print(f"{name}: {outcome.status} in {outcome.seconds:.0f} s{why}", markup=False)
                progress.advance(bar)
        except BaseException:
            # Whoever interrupts the command waits for no engine: none begins, and one may be about to.
            deadline = 0.0
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(each.done() for each in attempts):
                for group in [*RUNNING]:
                    with suppress(ProcessLookupError):
                        os.killpg(group, signal.SIGKILL)
                time.sleep(0.1)
            raise
    return [outcomes[cell] for cell in plan]


@dataclass(frozen=True)
class Record:
    """What a run writes, after every cell."""

    result: dict[str, Any]
    shapes: dict[Model, Shape]
    card: Card | None
    file: Path

    def keep(self, outcomes: Sequence[Outcome]) -> tuple[list[report.Row], list[Sheet]]:
        """Write the outcomes so far; returns their rows and tables."""
        rows = report.make_rows(outcomes, self.shapes, self.card)
        equalities = report.make_equalities(outcomes)
        targets = [] if self.result["quick"] else report.check_targets(rows, equalities)
        self.result.update(
            cells=[describe(outcome) for outcome in outcomes],
            rows=[asdict(row) for row in rows],
            equalities=[asdict(each) for each in equalities],
            targets=[asdict(target) for target in targets],
        )
        write_result(self.result, self.file)
        sheets = [
            report.make_step_sheet(rows),
            report.make_launch_sheet(rows),
            report.make_host_sheet(rows),
            report.make_speed_sheet(rows),
            report.make_equality_sheet(equalities),
            target_sheet(targets),
            report.make_gap_sheet(outcomes),
        ]
        return rows, [sheet for sheet in sheets if sheet.rows]


def describe(outcome: Outcome) -> dict[str, Any]:
    """An outcome for the result, which has what came of it elsewhere."""
    values = {**asdict(outcome), "name": outcome.cell.name}
    values.pop("results")
    values["cell"].pop("levels")
    return values


app = typer.Typer(add_completion=False)
TokensPerStep = Annotated[
    list[int] | None, typer.Option(min=1, help="Tokens that a step unmasks; repeatable. Default: 1 and 3.")
]


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="Tiny shapes, on a CPU too: does it work?")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="What does not fit into these is listed as not run.")] = 10.0,
    cell_minutes: Annotated[
        float, typer.Option(min=0.1, help="An engine that takes longer is ended; waiting for others counts.")
    ] = 8.0,
    model: Annotated[list[Model] | None, typer.Option(help="Shapes, the first one most; repeatable.")] = None,
    part: Annotated[list[Kind] | None, typer.Option(help="What to do; repeatable. Default: everything.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Concurrent requests; repeatable.")] = None,
    tokens_per_step: TokensPerStep = None,
    block_length: Annotated[int | None, typer.Option(min=1, help="Of diffusion. Default: 32, or 8 quickly.")] = None,
    drafts: Annotated[list[int] | None, typer.Option(min=0, help="FreeDave's drafts; repeatable.")] = None,
    graphs: Annotated[list[Graphs] | None, typer.Option(help="CUDA graphs; repeatable.")] = None,
    scheduling: Annotated[list[Scheduling] | None, typer.Option(help="Of steps; repeatable.")] = None,
    steps: Annotated[list[Steps] | None, typer.Option(help="What a step does around the model; repeatable.")] = None,
    dtype: Annotated[list[Dtype] | None, typer.Option(help="Of weights and activations; repeatable.")] = None,
    kv_dtype: Annotated[list[KVDtype] | None, typer.Option(help="Of keys and values; repeatable.")] = None,
    memory_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of the GPU's memory, for all engines together; 0: one at a time.")
    ] = MEMORY_SHARE,
    out: OutOrBuild = None,
    docs: Docs = None,
) -> None:
    """Measure the engine on a GPU. Options of engines that are repeated are measured in all combinations."""
    is_gpu = torch.cuda.is_available()
    if not is_gpu and not quick:
        typer.echo("There is no CUDA device here; --quick runs the same program on a CPU.", err=True)
        raise typer.Exit(1)
    folder = folder_of(out, quick=quick).resolve()
    name = f"{RESULT}-quick" if quick else RESULT
    if quick and folder == RESULTS:
        raise typer.BadParameter(f"{RESULTS} holds figures of GPUs, and --quick measures none", param_hint="--out")
    if quick and docs:
        raise typer.BadParameter("--quick measures nothing that belongs into the documentation", param_hint="--docs")
    selection = Selection(
        models=model or (),
        kinds=part or (),
        concurrency=concurrency or (),
        tokens_per_step=tokens_per_step or (),
        drafts=drafts or (),
        graphs=graphs or (),
        scheduling=scheduling or (),
        steps=steps or (),
        dtypes=dtype or (),
        kv_dtypes=kv_dtype or (),
    )
    scale = QUICK_SCALE if quick else FULL_SCALE
    if block_length:
        whole_blocks = -(-scale.prompt_tokens // block_length) * block_length
        scale = replace(scale, block_length=block_length, prompt_tokens=whole_blocks)
    plan = make_plan(selection, scale, quick=quick, is_gpu=is_gpu)
    if not plan:
        raise typer.BadParameter("no engine of the plan is of these parts", param_hint="--part")
    console = make_console()
    if quick:
        console.print("All models have tiny shapes: the figures show that the program works, not how fast a model is.")
    deadline = time.monotonic() + 60 * minutes
    card, failure = find_card(is_gpu, 60 * cell_minutes)
    if card is None:
        console.print(f"[yellow]The device could not be measured, so there are no limits: {failure}")
    result: dict[str, Any] = {
        "environment": describe_environment() | {"cuda": torch.version.cuda if is_gpu else None},
        "quick": quick,
        "card": card and asdict(card),
        "scale": asdict(scale),
    }
    shapes = {each: shape.tiny() if quick else shape for each, shape in SHAPES.items()}
    record = Record(result, shapes, card, folder / f"{name}.json")
    memory = int(memory_share * card.memory_bytes) if card else 0
    outcomes = run_plan(plan, scale, shapes, deadline, 60 * cell_minutes, console, record.keep, memory)
    rows, sheets = record.keep(outcomes)
    file = folder / f"{name}.png"
    picture = ("Steps and tokens", file) if report.plot(rows, file) else None
    measured = f"{result['environment']['date'][:10]} on {card.name if card else 'an unmeasured GPU'}"
    show(console, sheets, docs, __file__, measured=measured, picture=picture)
    console.print(f"Written to {folder}")


if __name__ == "__main__":
    app()
