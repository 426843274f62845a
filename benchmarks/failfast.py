"""FailFast beside fixed numbers of drafts, in forwards of the drafter, forwards of the target and rows of the target.

``python benchmarks/failfast.py --help``; ``docs/deer.md`` has the tables. Nothing here is timed: the counts are the
same on every machine.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Annotated, Any
from unittest import mock

import typer
from arguments import Docs, OutOrBuild, folder_of
from deer import KV_CACHE_BYTES, MAX_TOKENS, problems_of
from environment import begin
from record import CHECKPOINTS, ROOT
from sheet import Sheet, publish

if TYPE_CHECKING:
    from vllm import LLM

GOLDEN = ROOT / "tests" / "golden" / "failfast"
FIXED = (4, 8, 16, 32)
THRESHOLDS = (0.45, 0.9)
"""The paper's, and a strict one."""


@dataclass(frozen=True)
class Pair:
    """A target with its drafter, and what is asked of both.

    Attributes:
        prompts: token ids.
        stop_token_ids: that end a text.
    """

    name: str
    target: str
    drafter: str
    prompts: list[list[int]]
    stop_token_ids: list[int]


@dataclass(frozen=True)
class Counts:
    """All requests of one way to draft, one at a time, greedy.

    Attributes:
        drafted, accepted: drafts that the target verified, and accepted.
        drafter_forwards: that the texts needed; a GPU runs the most that a round may have.
        most_forwards: of a round.
        equal: requests with the target's own text.
    """

    pair: str
    system: str
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    drafter_forwards: int
    most_forwards: int
    equal: int
    requests: int


def pairs_of(requests: int) -> list[Pair]:
    """The bundled pair, whose drafter was trained for its target, and a Fast-dLLM v2 that was not."""
    from tests.reference.failfast_golden import load_failfast

    target = CHECKPOINTS / "tiny-qwen2"
    problems = problems_of(target, requests)
    golden = load_failfast()[:requests]
    return [
        Pair(
            "tiny-deer for tiny-qwen2",
            str(target),
            str(CHECKPOINTS / "tiny-deer"),
            [request.prompt for request in problems.requests],
            problems.stop_token_ids,
        ),
        Pair(
            "untrained Fast-dLLM v2",
            str(GOLDEN / "target"),
            str(GOLDEN / "checkpoint"),
            [case.text[: case.num_prompt] for case in golden],
            [],
        ),
    ]


def systems_of(*, quick: bool) -> dict[str, dict[str, Any] | None]:
    """Ways to draft by name, the target alone first."""
    systems: dict[str, dict[str, Any] | None] = {"target alone": None}
    systems |= {f"k={number}": {"num_speculative_tokens": number} for number in (FIXED[:2] if quick else FIXED)}
    for threshold in THRESHOLDS[:1] if quick else THRESHOLDS:
        growing = {"draft_length": "failfast", "draft_length_threshold": threshold}
        systems[f"FailFast, threshold {threshold:g}"] = growing
        systems[f"FailFast, threshold {threshold:g}, start and step 4"] = growing | {
            "draft_length_start": 4,
            "draft_length_step": 4,
        }
    return systems


def load(pair: Pair, speculative: dict[str, Any] | None) -> "LLM":
    """An engine in this process."""
    from vllm import LLM

    if speculative is not None:
        speculative = {"method": "dllm", "model": pair.drafter, "draft_sample_method": "greedy", **speculative}
    return LLM(
        pair.target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        max_num_batched_tokens=2048,
        block_size=32,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=speculative,
    )


def measure(pair: Pair, systems: dict[str, dict[str, Any] | None]) -> list[Counts]:
    """Every way to draft for a pair, the target alone first."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=MAX_TOKENS,
        stop_token_ids=pair.stop_token_ids,
        ignore_eos=not pair.stop_token_ids,
        detokenize=False,
    )
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in pair.prompts]
    engines, outcomes, alone = [], [], None
    for name, speculative in systems.items():
        # An engine that ends takes what the next one needs along.
        engines.append(llm := load(pair, speculative))
        core: Any = llm.llm_engine.engine_core
        speculator = core.engine_core.model_executor.driver_worker.worker.model_runner.speculator
        with mock.patch.object(speculator, "_run", wraps=speculator._run) if speculator else nullcontext() as run:
            texts = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
        # vLLM's metrics are of the latest engine.
        metrics: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
        rounds, drafted, accepted = (
            metrics[f"vllm:spec_decode_num_{of}"].value if speculator else 0
            for of in ("drafts", "draft_tokens", "accepted_tokens")
        )
        alone = alone or texts
        outcomes.append(
            Counts(
                pair=pair.name,
                system=name,
                tokens=sum(map(len, texts)),
                rounds=rounds,
                drafted=drafted,
                accepted=accepted,
                drafter_forwards=run.call_count if speculator else 0,
                most_forwards=getattr(speculator, "num_forwards", 1) if speculator else 0,
                equal=sum(map(list.__eq__, texts, alone)),
                requests=len(texts),
            )
        )
    return outcomes


def make_sheet(pair: str, outcomes: Sequence[Counts]) -> Sheet:
    """One row per way to draft."""
    rows = []
    for one in (each for each in outcomes if each.pair == pair):
        # The prefill makes a request's first token; the last round of a request may end with drafts left.
        target_forwards = one.rounds + one.requests if one.rounds else one.tokens
        target_rows = one.drafted + one.rounds + one.requests if one.rounds else one.tokens
        rows.append(
            [
                one.system,
                f"{one.drafted / one.rounds:.2f}" if one.rounds else "",
                f"{one.accepted / one.rounds:.2f}" if one.rounds else "",
                f"{100 * one.accepted / one.drafted:.0f}%" if one.drafted else "",
                f"{target_forwards / one.tokens:.3f}",
                f"{target_rows / one.tokens:.2f}",
                f"{one.drafter_forwards / one.tokens:.3f}" if one.rounds else "",
                str(one.most_forwards or ""),
                f"{one.equal}/{one.requests}",
            ]
        )
    headings = [
        "drafts",
        "verified per round",
        "accepted per round (τ)",
        "accepted",
        "target forwards per token",
        "target rows per token",
        "drafter forwards per token",
        "most drafter forwards per round",
        "equal texts",
    ]
    return Sheet(f"FailFast and fixed k: {pair}", headings, rows, num_labels=1)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="A few requests and systems: does it work?")] = False,
    requests: Annotated[int, typer.Option(min=1, help="Requests per pair; the untrained one has 18.")] = 8,
    out: OutOrBuild = None,
    docs: Docs = None,
) -> None:
    """Count what FailFast gains over fixed numbers of drafts."""
    console, environment = begin()
    outcomes: list[Counts] = []
    pairs = pairs_of(2 if quick else requests)
    for pair in pairs:
        # Each in a process of its own: engines leave things behind in one that others trip over.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            outcomes += process.submit(measure, pair, systems_of(quick=quick)).result()
    result = {"environment": environment, "outcomes": [asdict(one) for one in outcomes]}
    folder = folder_of(out, quick=quick)
    publish(console, [make_sheet(pair.name, outcomes) for pair in pairs], result, folder, docs, __file__)


if __name__ == "__main__":
    app()
