"""Models with full attention: caches against the plain loop, and FeF-DLLM against LLaDA's own decoding.

``python benchmarks/full_attention.py --help``; ``docs/benchmarks.md`` says what is measured and how.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from arguments import Docs, Eager, Out, Repetitions, check_checkpoint
from environment import begin, make_progress
from in_process import engine
from published import FAST_DLLM, FEF
from record import CHECKPOINTS, RESULTS
from rich.progress import Progress
from sheet import Sheet, publish, verdict
from systems import WARM_UP_REQUESTS, Pass, serve
from transformers import PreTrainedTokenizerFast

from vllm_dllm.commands.problems import grade
from vllm_dllm.methods import VERIFIER_ROWS
from vllm_dllm.options.schema import CacheName
from vllm_dllm.options.self_speculation import fef_drafts
from vllm_dllm.tiny.arithmetic import make_problems

if TYPE_CHECKING:
    from vllm import LLM

SEED = 0
CACHES: tuple[CacheName, ...] = ("none", "prefix", "dual")
STATIC: dict[str, Any] = {"dllm_policy": "static"}
THRESHOLD: dict[str, Any] = {"dllm_policy": "threshold", "dllm_threshold": 0.9}
POLICIES = {"1 token per step": STATIC, "threshold 0.9": THRESHOLD}

FEF_WINDOW = VERIFIER_ROWS["fef"].default_drafts
DECODINGS: dict[str, dict[str, Any]] = {
    "LLaDA": {**STATIC, "dllm_tokens_per_step": 1},
    "LLaDA/2": {**STATIC, "dllm_tokens_per_step": 2},
    "Fast-dLLM, threshold 0.9": THRESHOLD,
    "FreeDave, d=8": {**STATIC, "dllm_verify": "freedave", "dllm_drafts": 8},
    "PSD, d=3, threshold 0.9": {**THRESHOLD, "dllm_verify": "psd", "dllm_drafts": 3},
    "FeF, step=1": {"dllm_verify": "fef", "dllm_resample_steps": 1},
    "FeF, step=2": {"dllm_verify": "fef", "dllm_resample_steps": 2},
    "FeF, step=4": {"dllm_verify": "fef", "dllm_resample_steps": 4},
}


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


@dataclass(frozen=True)
class Quality:
    """Forwards and right answers of one decoding on the held-out problems; seconds one request at a time."""

    model: str
    decoding: str
    requests: int
    accuracy: float
    nfe: int
    seconds: float


@dataclass(frozen=True)
class Problems:
    """Held-out problems for one checkpoint."""

    prompts: list[list[int]]
    answers: list[int]
    tokenizer: PreTrainedTokenizerFast
    stop_token_ids: list[int]

    @classmethod
    def of(cls, checkpoint: Path, count: int) -> "Problems":
        """As many problems as asked for, the same for every checkpoint."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
        problems = make_problems(count, seed=SEED, split="test")
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_dict=False
            )
            for problem in problems
        ]
        eos = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
        stop_token_ids = eos if isinstance(eos, list) else [eos]
        return cls(prompts, [problem.final_answer for problem in problems], tokenizer, stop_token_ids)

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """Up to the first stop token."""
        ends = [index for index, token in enumerate(tokens) if token in self.stop_token_ids]
        return list(tokens[: ends[0]] if ends else tokens)

    def accuracy(self, tokens: Sequence[Sequence[int]]) -> float:
        """Share of right answers of the first problems."""
        texts = self.tokenizer.batch_decode([self.cut(row) for row in tokens], skip_special_tokens=True)
        return sum(map(grade, texts, self.answers)) / len(texts)


def run(
    llm: "LLM",
    prompts: Sequence[list[int]],
    extra_args: dict[str, Any],
    max_tokens: int,
    concurrency: int,
    stop_token_ids: list[int] | None = None,
) -> Pass:
    """All requests under one decoding; whole windows unless there are stop tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=stop_token_ids is None,
        stop_token_ids=stop_token_ids,
        extra_args=extra_args,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return serve(llm, list(prompts), [params] * len(prompts), concurrency)


def plain_loop(checkpoint: Path, prompts: Sequence[list[int]], window: int, block_length: int) -> Iterator[Pass]:
    """The loop of LLaDA's own script over every policy: one request at a time, everything computed in every step."""
    import torch
    from plain_windows import decode_window

    from vllm_dllm.training.layouts import load_network, read_config

    config = read_config(checkpoint)
    network = load_network(checkpoint).eval()
    torch.set_num_threads(os.cpu_count() or 1)
    for threshold in (None, THRESHOLD["dllm_threshold"]):
        begin = time.perf_counter()
        decoded = [
            decode_window(network, prompt, window, block_length, config["mask_token_id"], threshold)
            for prompt in prompts
        ]
        seconds = time.perf_counter() - begin
        nfe = [forwards for _, forwards in decoded]
        yield Pass(seconds, seconds / sum(nfe), [tokens for tokens, _ in decoded], nfe)


def measure_caches(
    checkpoint: Path,
    problems: Problems,
    *,
    window: int,
    block_length: int,
    requests: int,
    repetitions: int,
    eager: bool,
    progress: Progress,
) -> list[Timing]:
    """Every cache and policy, in turns over the repetitions."""
    prompts = problems.prompts[:requests]
    bar = progress.add_task("plain loop", total=2 + len(CACHES) * len(POLICIES) * 2 * repetitions)
    references: dict[str, Pass] = {}
    timings = []
    for policy, done in zip(POLICIES, plain_loop(checkpoint, prompts, window, block_length), strict=True):
        references[policy] = done
        progress.advance(bar)
        timings.append(_timing(None, policy, 1, [done], done, problems, window))
    for cache in CACHES:
        dllm = {"block_length": block_length, "cache": cache, "max_drafts": 0}
        with engine(checkpoint, dllm, dtype="float32", eager=eager, max_num_seqs=8, rows=4096) as llm:
            for extra_args in POLICIES.values():
                run(llm, prompts[:WARM_UP_REQUESTS], extra_args, window, 1)
            for policy, extra_args in POLICIES.items():
                for concurrency in (1, 8):
                    passes = []
                    for _ in range(repetitions):
                        progress.update(bar, description=f"{cache}, {policy}, {concurrency} at a time")
                        passes.append(run(llm, prompts, extra_args, window, min(concurrency, len(prompts))))
                        progress.advance(bar)
                    timings.append(_timing(cache, policy, concurrency, passes, references[policy], problems, window))
    progress.remove_task(bar)
    return timings


def _timing(
    cache: str | None,
    policy: str,
    concurrency: int,
    passes: Sequence[Pass],
    reference: Pass,
    problems: Problems,
    window: int,
) -> Timing:
    last = passes[-1]
    same = sum(problems.cut(a) == problems.cut(b) for a, b in zip(last.tokens, reference.tokens, strict=True))
    return Timing(
        cache=cache,
        policy=policy,
        concurrency=concurrency,
        tokens_per_second=len(last.tokens) * window / median(done.seconds for done in passes),
        accuracy=problems.accuracy(last.tokens),
        nfe=sum(last.nfe),
        same=same,
    )


def measure_fef(
    checkpoint: Path,
    problems: Problems,
    *,
    max_tokens: int,
    block_length: int,
    timed: int,
    eager: bool,
    progress: Progress,
) -> list[Quality]:
    """Forwards and accuracy of every decoding, all requests together; seconds of the first, one at a time."""
    bar = progress.add_task("FeF", total=2 * len(DECODINGS))
    drafts = max(7, fef_drafts(FEF_WINDOW, block_length))
    dllm = {"block_length": block_length, "cache": "dual", "max_drafts": drafts}
    qualities = []
    with engine(checkpoint, dllm, dtype="float32", eager=eager, max_num_seqs=16, rows=8192) as llm:
        for name, extra_args in DECODINGS.items():
            progress.update(bar, description=f"{checkpoint.name}: {name}")
            done = run(llm, problems.prompts, extra_args, max_tokens, 16, problems.stop_token_ids)
            progress.advance(bar)
            alone = run(llm, problems.prompts[:timed], extra_args, max_tokens, 1, problems.stop_token_ids)
            progress.advance(bar)
            qualities.append(
                Quality(
                    model=checkpoint.name,
                    decoding=name,
                    requests=len(problems.prompts),
                    accuracy=problems.accuracy(done.tokens),
                    nfe=sum(done.nfe),
                    seconds=alone.seconds,
                )
            )
    progress.remove_task(bar)
    return qualities


def make_cache_sheet(timings: Sequence[Timing]) -> Sheet:
    """The shape of Fast-dLLM's table: tokens per second over the plain decoding, and accuracy."""
    base = next(t for t in timings if t.cache == "none" and t.policy == "1 token per step" and t.concurrency == 1)
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


def make_fef_sheet(qualities: Sequence[Quality]) -> Sheet:
    """The shape of FeF-DLLM's table 1."""
    rows = []
    for row in qualities:
        base = next(q for q in qualities if q.model == row.model and q.decoding == "LLaDA")
        rows.append(
            [
                row.model,
                row.decoding,
                f"{100 * row.accuracy:.1f}%",
                str(row.nfe),
                f"{base.nfe / row.nfe:.2f}×",
                f"{base.seconds / row.seconds:.2f}×",
            ]
        )
    for name, (accuracy, speed) in FEF.items():
        rows.append(["LLaDA-8B-Instruct, mean of 4 tasks", name, f"{accuracy:.2f}%", "", "", f"{speed:.2f}×"])
    headings = ["model", "decoding", "accuracy", "forwards", "fewer forwards", "speed, one at a time"]
    return Sheet("FeF-DLLM, as in its table 1", headings, rows)


def make_target_sheet(timings: Sequence[Timing], qualities: Sequence[Quality]) -> Sheet:
    """Targets and whether they were reached."""
    speeds = {(t.cache, t.policy, t.concurrency): t.tokens_per_second for t in timings}
    rows = []

    def target(name: str, bound: float, value: float) -> None:
        rows.append([name, f"{bound:g}", f"{value:.2f}", verdict(value >= bound)])

    for concurrency in dict.fromkeys(t.concurrency for t in timings if t.cache == "none"):
        base = speeds["none", "1 token per step", concurrency]
        for policy, bound in (("1 token per step", 3), ("threshold 0.9", 6)):
            name = f"dual, {policy}, over none, 1 token per step; {concurrency} concurrent"
            target(name, bound, speeds["dual", policy, concurrency] / base)
    for model in dict.fromkeys(q.model for q in qualities):
        by_name = {q.decoding: q for q in qualities if q.model == model}
        one, two = by_name["LLaDA"], by_name["FeF, step=2"]
        target(f"{model}: accuracy of FeF step=2 over one token per step", 1, two.accuracy / one.accuracy)
        target(f"{model}: forwards of one token per step over FeF step=2", 1, one.nfe / two.nfe)
    return Sheet("Targets", ["target", "at least", "measured", "result"], rows, num_labels=1)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    checkpoint: Annotated[Path, typer.Option(help="Trained model in LLaDA's layout.")] = CHECKPOINTS / "tiny-llada",
    tuned: Annotated[
        list[Path] | None, typer.Option(help="Further models for the FeF table, fine-tuned for it; repeatable.")
    ] = None,
    window: Annotated[int, typer.Option(min=32, help="Positions of a window in the cache table.")] = 256,
    block_length: Annotated[int, typer.Option(min=1, help="Diffusion block length.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Held-out problems of the FeF table.")] = 200,
    timed_requests: Annotated[int, typer.Option(min=1, help="Problems of the timings.")] = 8,
    repetitions: Repetitions = 3,
    enforce_eager: Eager = False,
    out: Out = RESULTS,
    docs: Docs = None,
) -> None:
    """Measure the caches of models with full attention, and FeF-DLLM, on a bundled model."""
    check_checkpoint(checkpoint)
    if window % block_length:
        raise typer.BadParameter(f"{window} is not a multiple of {block_length}", param_hint="--window")
    console, environment = begin()
    qualities = []
    with make_progress(console) as progress:
        timings = measure_caches(
            checkpoint,
            Problems.of(checkpoint, timed_requests),
            window=window,
            block_length=block_length,
            requests=timed_requests,
            repetitions=repetitions,
            eager=enforce_eager,
            progress=progress,
        )
        for model in (checkpoint, *(tuned or ())):
            qualities += measure_fef(
                model,
                Problems.of(model, requests),
                max_tokens=2 * block_length,
                block_length=block_length,
                timed=4 * timed_requests,
                eager=enforce_eager,
                progress=progress,
            )
    sheets = [make_target_sheet(timings, qualities), make_cache_sheet(timings), make_fef_sheet(qualities)]
    result = {
        "environment": environment,
        "compiled": not enforce_eager,
        "window": window,
        "block_length": block_length,
        "caches": [asdict(timing) for timing in timings],
        "fef": [asdict(quality) for quality in qualities],
    }
    publish(console, sheets, result, out, docs, __file__)


if __name__ == "__main__":
    app()
