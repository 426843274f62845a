"""A served model under load for long: does any answer change, does anything leak?

``python benchmarks/soak.py --help``; ``docs/benchmarks.md`` says what is sent and what is checked.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import psutil
import serving
import soak_report as report
import typer
from environment import begin, make_progress
from record import RESULTS, ROOT, script_marks
from rich.console import Console
from rich.progress import TimeRemainingColumn
from serving import MAX_NUM_SEQS, MODEL, Server
from sheet import publish
from soak_client import VERDICTS, Clients, Outcome
from soak_families import FAMILIES, Family
from soak_oracle import Case, make_cases
from soak_report import Run, Sample
from soak_traffic import Manner, Sending, malformed, stream_of

INTERVAL = 1.0
"""Seconds from one look at the server to the next."""


def processes_of(server: Server) -> dict[str, int]:
    """Resident bytes of the server's processes by what they do; those that only watch over others are left out."""
    memory: dict[str, int] = {}
    root = psutil.Process(server.pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            role = next((role for role in ("EngineCore", "Worker") if f"VLLM::{role}" in title), None)
            if process.pid == root.pid:
                role = "API server"
            if role is not None:
                memory[role] = memory.get(role, 0) + process.memory_info().rss
    return memory


def look(server: Server, begin: float) -> Sample:
    """At memory and metrics."""
    return Sample(time.perf_counter() - begin, processes_of(server), server.metrics())


def soak(
    server: Server,
    family: Family,
    cases: Sequence[Case],
    *,
    requests: int,
    concurrency: int,
    seed: int,
    left_out: int = 0,
    interval: float = INTERVAL,
    tick: Callable[[Outcome], None] = lambda _: None,
) -> Run:
    """Send a stream of requests to an idle server, check every answer, and look at the server meanwhile."""
    bad = malformed(MODEL, diffusion=bool(family.verifiers))
    clients = Clients(server.address, MODEL, cases, bad)
    server.held()
    before = look(server, time.perf_counter())
    stream = stream_of(requests, len(cases), len(bad), seed)
    samples = asyncio.run(_send(server, clients, stream, concurrency, interval, tick))
    seconds = time.perf_counter() - clients.begin
    after = None
    if server.is_healthy():
        # That it answers rightly when all are gone.
        asyncio.run(clients.run(iter([Sending(requests, Manner.WHOLE, 0)]), 1))
        server.held()
        after = look(server, clients.begin)
    return Run(
        family=family.name,
        cases=cases,
        left_out=left_out,
        outcomes=clients.outcomes,
        wrong=clients.wrong,
        seconds=seconds,
        samples=samples or [before],
        before=before,
        after=after,
        died=after is None,
    )


async def _send(
    server: Server,
    clients: Clients,
    stream: Iterator[Sending],
    concurrency: int,
    interval: float,
    tick: Callable[[Outcome], None],
) -> list[Sample]:
    samples: list[Sample] = []

    async def observe() -> None:
        while True:
            await asyncio.sleep(interval)
            # A dead server does not answer, and the clients notice it too.
            with suppress(OSError, psutil.Error):
                samples.append(await asyncio.to_thread(look, server, clients.begin))

    observer = asyncio.create_task(observe())
    try:
        await clients.run(stream, concurrency, tick)
    finally:
        observer.cancel()
        with suppress(asyncio.CancelledError):
            await observer
    return samples


def make_place(page: Path) -> None:
    """Give a page the section that the figures go to, if it lacks it."""
    text = page.read_text() if page.is_file() else "# Reliability\n"
    begin, end = script_marks(__file__)
    if begin not in text:
        about = "`benchmarks/soak.py` sends requests of all kinds and checks every answer ([how](benchmarks.md#soak))."
        page.write_text(f"{text.rstrip()}\n\n## Soak\n\n{about}\n\n{begin}\n\n{end}\n")


app = typer.Typer(add_completion=False)


@app.command()
def main(
    family: Annotated[
        list[str] | None, typer.Option(help=f"What is served: {', '.join(FAMILIES)}. May be given several times.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to each family.")] = 20_000,
    distinct: Annotated[int, typer.Option(min=1, help="Distinct requests among them.")] = 400,
    concurrency: Annotated[
        int, typer.Option(min=1, help=f"Requests at a time; the server decodes {MAX_NUM_SEQS}.")
    ] = 48,
    seed: Annotated[int, typer.Option(help="Of the requests and of their order.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the result and the plots.")] = RESULTS,
    docs: Annotated[Path | None, typer.Option(help="Page whose section Soak gets the tables.")] = None,
) -> None:
    """Serve a tiny model under load and compare every answer with what its request gets alone."""
    names = family or ["sdar"]
    if unknown := [name for name in names if name not in FAMILIES]:
        raise typer.BadParameter(f"{', '.join(unknown)}: there is {', '.join(FAMILIES)}", param_hint="--family")
    # Models this small only lose by sharing a forward out among threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    console, environment = begin()
    out.mkdir(parents=True, exist_ok=True)
    runs = []
    for name in names:
        run = _serve_and_soak(
            console, FAMILIES[name], requests=requests, distinct=distinct, concurrency=concurrency, seed=seed
        )
        report.plot(run, out / f"soak-{name}.png")
        for wrong in run.wrong[:3]:
            console.print(f"[red]Wrong:[/] {wrong}", highlight=False)
        runs.append(run)
    if docs:
        make_place(docs)
    sheets = [sheet for run in runs for sheet in report.sheets_of(run)]
    result = {
        "environment": environment,
        "requests": requests,
        "concurrency": concurrency,
        "seed": seed,
        "runs": [report.result_of(run) for run in runs],
    }
    publish(console, sheets, result, out, docs, __file__)
    failures = [f"{run.family}: {failure}" for run in runs for failure in run.failures]
    for failure in failures:
        console.print(f"[red]{failure}")
    if failures:
        raise typer.Exit(1)


def _serve_and_soak(
    console: Console, family: Family, *, requests: int, distinct: int, concurrency: int, seed: int
) -> Run:
    with make_progress(console, TimeRemainingColumn()) as progress:
        bar = progress.add_task(f"{family.name}: answers of requests that are alone", total=None)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            cases, left_out = process.submit(make_cases, family, distinct, seed).result()
        console.print(f"{family.name}: {len(cases)} distinct requests; {left_out} left out, as rounding decides them")
        progress.update(bar, description=f"{family.name}: starting the server")
        flags = {"--served-model-name": MODEL, **family.flags}
        log = ROOT / "build" / f"soak-{family.name}.log"
        log.parent.mkdir(exist_ok=True)
        with serving.serve(family.checkpoint, log, flags) as server:
            progress.update(bar, description=f"{family.name}: requests", total=requests)
            wrong = 0

            def tick(outcome: Outcome) -> None:
                nonlocal wrong
                wrong += outcome.verdict not in VERDICTS
                description = f"{family.name}: requests" + (f", [red]{wrong} bad[/]" if wrong else "")
                progress.update(bar, advance=1, description=description)

            return soak(
                server,
                family,
                cases,
                requests=requests,
                concurrency=concurrency,
                seed=seed,
                left_out=left_out,
                tick=tick,
            )


if __name__ == "__main__":
    app()
