"""What step maps and step events cost: processor time of a step with them over that of a step without them.

``python benchmarks/step_events.py --help``; ``docs/live.md`` says what step events are.
"""

import random
import time
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer
from arguments import TINY_SDAR, Docs, Out
from environment import begin
from record import RESULTS
from sheet import Sheet, Wanted, publish, wanted_sheet

from vllm_dllm.tiny.arithmetic import make_problems

if TYPE_CHECKING:
    from vllm import LLM

MODEL = TINY_SDAR
MAX_TOKENS = 48
ROUNDS = {1: 8, 16: 3, 64: 1}
"""Number of requests, and how many times as many rounds it has: runs of few requests are short."""

ASKED: dict[str, dict[str, Any]] = {
    "nothing, and no request is looked at": {},
    "nothing": {},
    "step map": {"dllm_step_map": True},
    "step events": {"dllm_step_events": True},
}
"""What all requests of a run ask for. The first is the baseline: the sampler does not even see whether one asks."""
BASELINE, NOTHING, MAP, EVENTS = ASKED
MOST = {NOTHING: 1.01, MAP: 1.03}
"""Largest time of a step over the baseline's."""


@dataclass
class Row:
    """One batch size, and what its requests ask for."""

    requests: int
    asked: str
    step: float = 0.0
    """Median processor seconds."""
    ratio: float = 0.0
    """Median over rounds of the step's time over the baseline's in the same round."""
    low: float = 0.0
    high: float = 0.0
    """Quartiles of the ratio."""
    differing: int = 0
    """Answers that are not the baseline's."""
    samples: list[float] = field(default_factory=list)


def start(max_num_seqs: int) -> "LLM":
    from vllm import LLM

    return LLM(
        str(MODEL),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
    )


def run(llm: "LLM", prompts: list[list[int]], asked: dict[str, Any]) -> tuple[float, list[list[int]]]:
    """Processor seconds per step of a batch of streams, and their tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    args = {"dllm_policy": "static", "dllm_tokens_per_step": 1, **asked}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
            extra_args=args,
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    tokens: list[list[int]] = [[] for _ in prompts]
    steps, began = 0, time.process_time()
    while engine.has_unfinished_requests():
        steps += 1
        for output in engine.step():
            tokens[int(output.request_id)] += output.outputs[0].token_ids
    return (time.process_time() - began) / steps, tokens


def measure(llm: "LLM", prompts: list[list[int]], rounds: int) -> list[Row]:
    runner: Any = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    step_maps = runner.sampler.step_maps
    rows = {asked: Row(len(prompts), asked) for asked in ASKED}
    order = random.Random(0)
    for number in range(rounds + 1):
        tokens = {}
        for asked in order.sample([*ASKED], len(ASKED)):
            if asked == BASELINE:
                step_maps.wanted = lambda slots: False
            seconds, tokens[asked] = run(llm, prompts, ASKED[asked])
            vars(step_maps).pop("wanted", None)
            if number:  # the first round warms up
                rows[asked].samples.append(seconds)
        for asked, row in rows.items():
            row.differing += sum(a != b for a, b in zip(tokens[asked], tokens[BASELINE], strict=True))
    for row in rows.values():
        ratios = [a / b for a, b in zip(row.samples, rows[BASELINE].samples, strict=True)]
        row.step, row.ratio = median(row.samples), median(ratios)
        row.low, _, row.high = quantiles(ratios, n=4)
    return [*rows.values()]


def main(
    rounds: Annotated[
        int, typer.Option(min=2, help="Runs of each kind with 64 requests; with fewer, up to eight times as many.")
    ] = 15,
    out: Out = RESULTS,
    docs: Docs = None,
) -> None:
    """Time steps whose requests ask for nothing, for step maps, and for step events."""
    console, environment = begin()
    llm = start(64)
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode(problem.question) for problem in make_problems(64, 0, "test")]
    rows: list[Row] = []
    for size, times in ROUNDS.items():
        console.print(f"[bold]{size} requests")
        rows += measure(llm, prompts[:size], times * rounds)
    targets: list[Wanted] = []
    for asked, most in MOST.items():
        worst = max(row.ratio for row in rows if row.asked == asked)
        name = f"processor time of a step that is asked for: {asked}"
        targets.append((name, f"at most {most:.2f}", f"{worst:.3f}", worst <= most))
    differing = sum(row.differing for row in rows)
    targets.append(("answers that differ", "0", str(differing), not differing))
    tables = [
        wanted_sheet(targets),
        Sheet(
            "Steps",
            ["requests", "asked for", "processor ms per step", "over the baseline", "quartiles"],
            [
                [
                    str(row.requests),
                    row.asked,
                    f"{row.step * 1e3:.2f}",
                    f"{row.ratio:.3f}",
                    f"{row.low:.3f}–{row.high:.3f}",
                ]
                for row in rows
            ],
        ),
    ]
    result = {"environment": environment, "rows": [asdict(row) for row in rows]}
    publish(console, tables, result, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
