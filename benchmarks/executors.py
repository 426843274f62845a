"""Tensor parallel two: the step of an engine whose ranks are Ray workers beside that of vLLM's own processes.

``python benchmarks/executors.py --help``; ``docs/benchmarks.md`` says what is measured and how.
"""

import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from arguments import TINY_SDAR, Docs, OutOrBuild, Sdar, check_checkpoint, folder_of
from environment import begin, make_progress
from in_process import decode
from sheet import Sheet, Wanted, publish, wanted_sheet
from step_skipping_settings import THRESHOLD, Setting
from systems import KV_CACHE_BYTES, WARM_UP_REQUESTS
from workload import ModelName, Workload, make_workload

if TYPE_CHECKING:
    from vllm import LLM

BOUND = 1.3
"""Ray's step over that of processes, at most."""
RANKS = 2
CONCURRENCIES = (1, 16)
TIMES_AS_MANY = {ModelName.TINY: 4, ModelName.RANDOM: 1}
"""Requests of a model over those asked for: the tiny one's steps are short."""
SHARE_ALONE = 4
"""Of the requests one in so many is timed with no other beside it."""
MAX_DRAFTS = 7
MAX_TOKENS = {ModelName.TINY: 128, ModelName.RANDOM: 32}
"""The random model is never sure of a token, so it takes a step for each."""

SETTINGS = (Setting(THRESHOLD), Setting(THRESHOLD, "freedave", 8))
"""What the requests ask for."""


class Executor(StrEnum):
    """Who starts the ranks."""

    ONE_RANK = "one rank"
    PROCESSES = "processes"
    RAY = "Ray"


@dataclass(frozen=True)
class Timing:
    """All requests, once.

    Attributes:
        repetition: executors are compared within one.
        options: policy and verifier.
        step_seconds: median of the steps while ``concurrency`` requests ran.
        tokens: of each request.
    """

    model: str
    executor: Executor
    repetition: int
    options: str
    concurrency: int
    step_seconds: float
    tokens: list[list[int]]


def load(checkpoint: Path, executor: Executor, block_length: int) -> "LLM":
    """An engine whose scheduler is in this process."""
    from vllm import LLM

    parallel: dict[str, Any] = {}
    if executor != Executor.ONE_RANK:
        backend = "ray" if executor == Executor.RAY else "mp"
        parallel = {"tensor_parallel_size": RANKS, "distributed_executor_backend": backend}
    if executor == Executor.RAY:
        import ray

        ray.init(address="local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
    return LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=max(CONCURRENCIES),
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
        additional_config={"dllm": {"block_length": block_length, "max_drafts": MAX_DRAFTS}},
        use_tqdm_on_load=False,
        **parallel,
    )


def measure(workload: Workload, executor: Executor, repetition: int, *, quick: bool) -> list[Timing]:
    """One executor with all kinds of requests, in a process of its own."""
    llm = load(workload.checkpoint, executor, workload.block_length)
    timings = []
    for setting in SETTINGS[: 1 if quick else None]:
        for concurrency in CONCURRENCIES:
            decode(llm, setting, workload.requests[:WARM_UP_REQUESTS], workload.stop_token_ids, 1)
            requests = workload.requests[: len(workload.requests) // (SHARE_ALONE if concurrency == 1 else 1)]
            measured = decode(llm, setting, requests, workload.stop_token_ids, concurrency)
            timings.append(
                Timing(
                    model=workload.model,
                    executor=executor,
                    repetition=repetition,
                    options=f"{setting.policy}, {setting.name}",
                    concurrency=concurrency,
                    step_seconds=measured.step_seconds,
                    tokens=measured.tokens,
                )
            )
    llm.llm_engine.engine_core.shutdown()
    if executor == Executor.RAY:
        import ray

        ray.shutdown()
    return timings


def plan(repetitions: int) -> list[tuple[int, Executor]]:
    """Executors take turns, in the other order every other time, so that neither has the quieter half of the run."""
    turns: list[tuple[int, Executor]] = [(0, Executor.ONE_RANK)]
    for repetition in range(repetitions):
        both = [Executor.PROCESSES, Executor.RAY]
        turns += [(repetition, executor) for executor in (both if repetition % 2 == 0 else both[::-1])]
    return turns


@dataclass(frozen=True)
class Row:
    """One kind of requests.

    Attributes:
        step_seconds: by executor, median over the repetitions.
        ratio: Ray's step over that of processes in the same repetition, median.
        equal: by executor, requests with the tokens of one rank in every repetition.
    """

    model: str
    options: str
    concurrency: int
    step_seconds: dict[Executor, float]
    ratio: float
    requests: int
    equal: dict[Executor, int]

    @property
    def where(self) -> str:
        return f"{self.model}, {self.options}, {self.concurrency} concurrent"

    @property
    def all_equal(self) -> bool:
        return all(equal == self.requests for equal in self.equal.values())


def make_rows(timings: Sequence[Timing]) -> list[Row]:
    """Compare the executors."""
    rows = []
    for key in dict.fromkeys((t.model, t.options, t.concurrency) for t in timings):
        own = [t for t in timings if (t.model, t.options, t.concurrency) == key]
        by_executor = {executor: [t for t in own if t.executor == executor] for executor in Executor}
        (alone,) = by_executor[Executor.ONE_RANK]
        steps = {
            executor: {t.repetition: t.step_seconds for t in by_executor[executor]}
            for executor in (Executor.PROCESSES, Executor.RAY)
        }
        rows.append(
            Row(
                *key,
                step_seconds={e: median(t.step_seconds for t in each) for e, each in by_executor.items()},
                ratio=median(steps[Executor.RAY][r] / step for r, step in steps[Executor.PROCESSES].items()),
                requests=len(alone.tokens),
                equal={
                    executor: sum(
                        all(t.tokens[i] == tokens for t in by_executor[executor])
                        for i, tokens in enumerate(alone.tokens)
                    )
                    for executor in steps
                },
            )
        )
    return rows


def make_step_sheet(rows: Sequence[Row]) -> Sheet:
    """Every kind of requests."""
    table = [
        [
            row.model,
            row.options,
            str(row.concurrency),
            *(f"{1000 * row.step_seconds[executor]:.2f}" for executor in Executor),
            f"{row.ratio:.2f}×",
            *(f"{equal}/{row.requests}" for equal in row.equal.values()),
        ]
        for row in rows
    ]
    headings = ["model", "requests", "concurrent", *(f"{executor}, ms/step" for executor in Executor)]
    headings += ["Ray over processes", *(f"{name}, equal tokens" for name in (Executor.PROCESSES, Executor.RAY))]
    return Sheet(f"Tensor parallel {RANKS}, by who starts the ranks", headings, table)


def make_target_sheet(rows: Sequence[Row]) -> Sheet:
    """Targets and whether they were reached."""
    worst = max(rows, key=lambda row: row.ratio)
    unequal = [row.where for row in rows if not row.all_equal]
    step = f"{worst.ratio:.2f} ({worst.where})"
    targets: list[Wanted] = [
        ("Ray's step over that of processes", f"at most {BOUND:g}", step, worst.ratio <= BOUND),
        ("requests with the tokens of one rank", "all", "; ".join(unequal) or "all", not unequal),
    ]
    return wanted_sheet(targets)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="A few requests of the tiny model, once: does it work?")] = False,
    checkpoint: Sdar = TINY_SDAR,
    requests: Annotated[
        int, typer.Option(min=max(CONCURRENCIES), help="Requests of each kind; four times as many to the tiny model.")
    ] = 16,
    repetitions: Annotated[int, typer.Option(min=1, help="How often each executor is started and timed.")] = 3,
    out: OutOrBuild = None,
    docs: Docs = None,
) -> None:
    """Measure the step of two ranks started by Ray and by vLLM itself, and compare their tokens with one rank's."""
    check_checkpoint(checkpoint)
    console, environment = begin()
    models = [ModelName.TINY] if quick else [ModelName.TINY, ModelName.RANDOM]
    turns = plan(1 if quick else repetitions)
    timings: list[Timing] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        make_progress(console) as progress,
    ):
        bar = progress.add_task("loading", total=len(turns) * len(models))
        for model in models:
            count = max(CONCURRENCIES) if quick else requests * TIMES_AS_MANY[model]
            workload = make_workload(model, Path(scratch), checkpoint, None, count=count, max_tokens=MAX_TOKENS[model])
            for repetition, executor in turns:
                progress.update(bar, description=f"{model}: {executor}")
                # Each in a process of its own, which vLLM's environment variables and Ray end with.
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    timings += process.submit(measure, workload, executor, repetition, quick=quick).result()
                progress.advance(bar)
    rows = make_rows(timings)
    result = {
        "environment": environment,
        "rows": [asdict(row) for row in rows],
        "timings": [{**asdict(t), "tokens": sum(map(len, t.tokens))} for t in timings],
    }
    folder = folder_of(out, quick=quick)
    publish(console, [make_target_sheet(rows), make_step_sheet(rows)], result, folder, docs, __file__)


if __name__ == "__main__":
    app()
