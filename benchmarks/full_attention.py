"""Models with full attention: caches against the plain loop.

``python benchmarks/full_attention.py --help``; ``docs/benchmarks.md`` says what is measured and how.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from answers import of_length
from arguments import Docs, Eager, Out, Repetitions, check_checkpoint
from environment import begin, make_progress
from in_process import decode, engine
from published import FAST_DLLM
from record import CHECKPOINTS, RESULTS
from rich.progress import Progress
from sheet import Sheet, Wanted, publish, wanted_sheet
from step_skipping_settings import STATIC, THRESHOLD, Setting
from systems import WARM_UP_REQUESTS, Pass
from workload import Workload, arithmetic

from vllm_dllm.options.schema import CacheName

CACHES: tuple[CacheName, ...] = ("none", "prefix", "dual")
ONE, SEVERAL = "1 token per step", "threshold 0.9"
POLICIES = {ONE: Setting(STATIC), SEVERAL: Setting(THRESHOLD)}
LOOP_THRESHOLDS = {ONE: None, SEVERAL: 0.9}
CONCURRENCIES = (1, 8)
WANTED = {ONE: 3, SEVERAL: 6}
"""Times the speed of one token per step without a cache."""


@dataclass(frozen=True)
class Timing:
    """Speed of one way to decode the same requests, one after the other or several at a time.

    Attributes:
        cache: of the engine; None for the plain loop.
        tokens_per_second: positions of the windows, what stands after the end of an answer included.
        accuracy: share of right answers.
        nfe: forwards of all requests.
        same: requests with the plain loop's answer, token for token up to the end.
    """

    cache: str | None
    policy: str
    concurrency: int
    tokens_per_second: float
    accuracy: float
    nfe: int
    same: int


def answers_of(done: Pass, workload: Workload) -> list[list[int]]:
    """Tokens of each window up to the first stop token."""
    cut = []
    for tokens in done.tokens:
        end = next((index for index, token in enumerate(tokens) if token in workload.stop_token_ids), len(tokens))
        cut.append(tokens[:end])
    return cut


def plain_loop(workload: Workload) -> Iterator[tuple[str, Pass]]:
    """The loop of LLaDA's own script over every policy: one request at a time, everything computed in every step."""
    import torch
    from plain_windows import decode_window

    from vllm_dllm.training.layouts import load_network

    network = load_network(workload.checkpoint).eval()
    torch.set_num_threads(os.cpu_count() or 1)
    for policy, threshold in LOOP_THRESHOLDS.items():
        begin = time.perf_counter()
        decoded = [
            decode_window(
                network,
                request.prompt,
                request.max_tokens,
                workload.block_length,
                workload.mask_token_id,
                threshold,
            )
            for request in workload.requests
        ]
        seconds = time.perf_counter() - begin
        nfe = [forwards for _, forwards in decoded]
        yield policy, Pass(seconds, seconds / sum(nfe), [tokens for tokens, _ in decoded], nfe)


def measure(workload: Workload, *, repetitions: int, eager: bool, progress: Progress) -> list[Timing]:
    """The plain loop, then every cache and policy; whole windows."""
    requests = workload.requests
    total = len(LOOP_THRESHOLDS) + len(CACHES) * len(POLICIES) * len(CONCURRENCIES) * repetitions
    bar = progress.add_task("plain loop", total=total)
    references: dict[str, Pass] = {}
    timings = []
    for policy, done in plain_loop(workload):
        references[policy] = done
        progress.advance(bar)
        timings.append(_timing(None, policy, 1, [done], done, workload))
    for cache in CACHES:
        dllm = {"block_length": workload.block_length, "cache": cache, "max_drafts": 0}
        with engine(workload.checkpoint, dllm, dtype="float32", eager=eager, max_num_seqs=8, rows=4096) as llm:
            for setting in POLICIES.values():
                decode(llm, setting, requests[:WARM_UP_REQUESTS], [], 1)
            for policy, setting in POLICIES.items():
                for concurrency in CONCURRENCIES:
                    passes = []
                    for _ in range(repetitions):
                        progress.update(bar, description=f"{cache}, {policy}, {concurrency} at a time")
                        passes.append(decode(llm, setting, requests, [], concurrency))
                        progress.advance(bar)
                    timings.append(_timing(cache, policy, concurrency, passes, references[policy], workload))
    progress.remove_task(bar)
    return timings


def _timing(
    cache: str | None, policy: str, concurrency: int, passes: Sequence[Pass], reference: Pass, workload: Workload
) -> Timing:
    last = passes[-1]
    answers = answers_of(last, workload)
    accuracy = workload.accuracy(answers)
    assert accuracy is not None, f"{workload.checkpoint} has no tokenizer"
    return Timing(
        cache=cache,
        policy=policy,
        concurrency=concurrency,
        tokens_per_second=sum(map(len, last.tokens)) / median(done.seconds for done in passes),
        accuracy=accuracy,
        nfe=sum(last.nfe),
        same=sum(map(list.__eq__, answers, answers_of(reference, workload))),
    )


def make_cache_sheet(timings: Sequence[Timing]) -> Sheet:
    """The shape of Fast-dLLM's table: tokens per second over the plain decoding, and accuracy."""
    base = next(t for t in timings if t.cache == "none" and t.policy == ONE and t.concurrency == 1)
    rows = [
        [
            "plain loop" if t.cache is None else f"cache={t.cache}",
            t.policy,
            str(t.concurrency),
            f"{t.tokens_per_second:.0f}",
            f"{t.tokens_per_second / base.tokens_per_second:.2f}×",
            f"{100 * t.accuracy:.0f}%",
            str(t.nfe),
            str(t.same),
        ]
        for t in timings
    ]
    for label, (tokens, times, accuracy) in FAST_DLLM.items():
        rows.append([label, "", "1", f"{tokens:.1f}", f"{times:.1f}×", f"{accuracy:.1f}%", "", ""])
    headings = [
        "decoding",
        "policy",
        "concurrent",
        "tokens/s",
        "over cache=none",
        "accuracy",
        "forwards",
        "answers as in the loop",
    ]
    return Sheet("Caches, whole windows", headings, rows)


def make_target_sheet(timings: Sequence[Timing]) -> Sheet:
    """Targets and whether they were reached."""
    speeds = {(t.cache, t.policy, t.concurrency): t.tokens_per_second for t in timings}
    rows: list[Wanted] = []
    for concurrency in CONCURRENCIES:
        for policy, wanted in WANTED.items():
            ratio = speeds["dual", policy, concurrency] / speeds["none", ONE, concurrency]
            name = f"dual, {policy}, over none, {ONE}; {concurrency} concurrent"
            rows.append((name, f"at least {wanted}", f"{ratio:.2f}", ratio >= wanted))
    return wanted_sheet(rows)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    checkpoint: Annotated[Path, typer.Option(help="Trained model in LLaDA's layout.")] = CHECKPOINTS / "tiny-llada",
    window: Annotated[int, typer.Option(min=32, help="Positions of a window.")] = 256,
    block_length: Annotated[int, typer.Option(min=1, help="Diffusion block length.")] = 32,
    timed_requests: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 8,
    repetitions: Repetitions = 3,
    enforce_eager: Eager = False,
    out: Out = RESULTS,
    docs: Docs = None,
) -> None:
    """Measure the caches of models with full attention on a bundled model."""
    check_checkpoint(checkpoint)
    if window % block_length:
        raise typer.BadParameter(f"{window} is not a multiple of {block_length}", param_hint="--window")
    console, environment = begin()
    workload = of_length(arithmetic(checkpoint.name, checkpoint, timed_requests, window, block_length), window)
    with make_progress(console) as progress:
        timings = measure(workload, repetitions=repetitions, eager=enforce_eager, progress=progress)
    result = {
        "environment": environment,
        "compiled": not enforce_eager,
        "window": window,
        "block_length": block_length,
        "caches": [asdict(timing) for timing in timings],
    }
    publish(console, [make_target_sheet(timings), make_cache_sheet(timings)], result, out, docs, __file__)


if __name__ == "__main__":
    app()
