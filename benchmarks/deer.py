"""DEER: a diffusion drafter beside n-grams and an autoregressive draft model of its size, on the bundled pair.

``python benchmarks/deer.py --help``; ``docs/benchmarks.md`` says what is measured and how.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from arguments import Docs, Eager, OutOrBuild, Repetitions, Tables, folder_of
from deer_report import AUTOREGRESSIVE, Outcome, sheets_of
from environment import begin, make_progress
from pydantic import TypeAdapter
from record import CHECKPOINTS
from sheet import publish
from systems import finish
from workload import Workload, arithmetic

if TYPE_CHECKING:
    from vllm import LLM

SEED = 0
MAX_TOKENS = 160
DRAFTS = (4, 8, 16, 32)
TEMPERATURES = (0.0, 0.6)
CONCURRENCIES = (1, 2, 4, 8, 16)
KV_CACHE_BYTES = 1 << 28


@dataclass(frozen=True)
class System:
    """One way to decode with the target.

    Attributes:
        name: what is compared.
        drafts: k; 0 for the target alone.
        speculative: vLLM's ``speculative_config``.
        v2: the target runs on Model Runner V2, as it does with a diffusion drafter.
        greedy_only: it is wrong at other temperatures.
    """

    name: str
    drafts: int = 0
    speculative: dict[str, Any] | None = field(default=None, hash=False)
    v2: bool = False
    greedy_only: bool = False


def problems_of(target: Path, count: int) -> Workload:
    """Held-out problems for an autoregressive model: blocks of one token."""
    return arithmetic(target.name, target, count, MAX_TOKENS, 1)


def systems_of(
    drafter: Path, autoregressive: Sequence[Path], stage_one: Path | None, drafts: Sequence[int]
) -> list[System]:
    """What is compared, the target alone first."""

    def deer(model: Path, number: int, **options: Any) -> dict[str, Any]:
        return {"method": "dllm", "model": str(model), "num_speculative_tokens": number, **options}

    systems = [System("target alone"), System("target alone, runner V2", v2=True)]
    for number in drafts:
        if number > 8:
            continue
        ngram = {"method": "ngram", "num_speculative_tokens": number, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        # Runner V2 refuses it without a GPU, and V1's rejection sampler writes nonsense on a CPU above temperature 0.
        systems.append(System("n-gram", number, ngram, greedy_only=True))
    for model in autoregressive:
        for number in drafts:
            draft = {
                "method": "draft_model",
                "model": str(model),
                "num_speculative_tokens": number,
                "draft_sample_method": "probabilistic",
            }
            systems.append(System(f"{AUTOREGRESSIVE} {model.name}", number, draft, v2=True))
    systems += [System("DEER", number, deer(drafter, number), v2=True) for number in drafts]
    most = max(drafts)
    middle = 16 if 16 in drafts else most
    systems.append(System("DEER, recomputed", middle, deer(drafter, middle, draft_cache="recompute"), v2=True))
    systems.append(System("DEER, adaptive", most, deer(drafter, most, adaptive=True), v2=True))
    if stage_one is not None:
        systems.append(System("DEER, stage I only", middle, deer(stage_one, middle), v2=True))
    return systems


def load(target: Path, system: System, *, eager: bool, concurrency: int) -> "LLM":
    """An engine in this process."""
    from vllm import LLM

    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if system.v2:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return LLM(
        str(target),
        dtype="float32",
        enforce_eager=eager,
        max_model_len=512,
        max_num_seqs=concurrency,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
        speculative_config=system.speculative,
        per_request_spec_decode_metrics="none" if system.speculative is None else "summary",
        use_tqdm_on_load=False,
    )


def run(
    llm: "LLM", workload: Workload, count: int, temperature: float, concurrency: int
) -> tuple[float, list[list[int]], int, dict[int, int]]:
    """The first ``count`` problems, ``concurrency`` at a time.

    Returns:
        Seconds, tokens of each request, steps at full concurrency, and rounds by the number of accepted drafts.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm.reset_prefix_cache()
    requests = workload.requests[:count]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=SEED + index,
            max_tokens=request.max_tokens,
            stop_token_ids=workload.stop_token_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for index, request in enumerate(requests)
    ]
    seconds, steps, outputs = finish(llm, [request.prompt for request in requests], params, concurrency)
    accepted: Counter[int] = Counter()
    for output in outputs:
        metrics = output.outputs[0].spec_decode_metrics
        if metrics is not None:
            accepted.update(dict(enumerate(metrics.histogram)))
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return seconds, tokens, len(steps), {number: times for number, times in accepted.items() if times}


def measure(
    target: Path,
    system: System,
    workload: Workload,
    *,
    counts: dict[int, int],
    repetitions: int,
    eager: bool,
    alone: dict[int, list[list[int]]],
) -> tuple[list[Outcome], dict[int, list[list[int]]]]:
    """One system at every temperature and concurrency.

    Args:
        alone: tokens of the target alone at temperature 0, by concurrency; empty where this is the target alone.

    Returns:
        What was measured, and ``alone``, of this system where it was empty.
    """
    llm = load(target, system, eager=eager, concurrency=max(counts))
    outcomes = []
    greedy: dict[int, list[list[int]]] = {}
    for temperature in TEMPERATURES[:1] if system.greedy_only else TEMPERATURES:
        run(llm, workload, 2, temperature, 1)
        # Together greedily only: what the table of batches shows.
        for concurrency, count in counts.items() if not temperature else ((1, counts[1]),):
            passes = [run(llm, workload, count, temperature, concurrency) for _ in range(repetitions)]
            _, tokens, steps, accepted = passes[-1]
            if not temperature:
                greedy[concurrency] = tokens
            own = alone.get(concurrency, tokens)
            accuracy = workload.accuracy(tokens)
            assert accuracy is not None, f"{target} has no tokenizer"
            outcomes.append(
                Outcome(
                    system=system.name,
                    drafts=system.drafts,
                    temperature=temperature,
                    concurrency=concurrency,
                    requests=count,
                    seconds=median(seconds for seconds, *_ in passes),
                    num_tokens=sum(map(len, tokens)),
                    equal=None if temperature else sum(map(list.__eq__, tokens, own)),
                    forwards=steps if concurrency == 1 else 0,
                    accepted=accepted,
                    accuracy=accuracy,
                )
            )
    llm.llm_engine.engine_core.shutdown()
    return outcomes, alone or greedy


app = typer.Typer(add_completion=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="A few problems, eagerly: does it work?")] = False,
    target: Annotated[Path, typer.Option(help="Autoregressive target.")] = CHECKPOINTS / "tiny-qwen2",
    drafter: Annotated[Path, typer.Option(help="Aligned drafter.")] = CHECKPOINTS / "tiny-deer",
    autoregressive: Annotated[
        list[Path] | None,
        typer.Option(help="Autoregressive draft model of the drafter's size; repeatable. docs/deer.md makes two."),
    ] = None,
    stage_one: Annotated[Path | None, typer.Option(help="The drafter after stage I, for the ablation.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Problems, one at a time; twice as many together.")] = 50,
    repetitions: Repetitions = 3,
    enforce_eager: Eager = False,
    out: OutOrBuild = None,
    docs: Docs = None,
    tables: Tables = False,
) -> None:
    """Measure drafters for an autoregressive target: accepted drafts, target forwards, speed, equal tokens."""
    folder = folder_of(out, quick=quick)
    console, environment = begin()
    if tables:
        result = json.loads((folder / "deer.json").read_text())
        found = TypeAdapter(list[Outcome]).validate_python(result["outcomes"])
        return publish(console, sheets_of(found, DRAFTS), result, folder, docs, __file__)
    for checkpoint in (target, drafter, *(autoregressive or ()), stage_one):
        if checkpoint is not None and not (checkpoint / "config.json").is_file():
            raise typer.BadParameter(f"{checkpoint} holds no checkpoint")
    drafts = (4, 16) if quick else DRAFTS
    levels = (1, 4) if quick else CONCURRENCIES
    requests = 4 if quick else requests
    counts = {level: requests if level == 1 else 2 * requests for level in levels}
    workload = problems_of(target, max(counts.values()))
    if not autoregressive:
        console.print("Without --autoregressive the draft model of the drafter's size is left out.")
    outcomes: list[Outcome] = []
    alone: dict[int, list[list[int]]] = {}
    systems = systems_of(drafter, autoregressive or (), stage_one, drafts)
    with make_progress(console) as progress:
        bar = progress.add_task("loading", total=len(systems))
        for system in systems:
            progress.update(bar, description=f"{system.name}, k={system.drafts}" if system.drafts else system.name)
            # Each in a process of its own: engines leave things behind in one that others trip over.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                measured = process.submit(
                    measure,
                    target,
                    system,
                    workload,
                    counts=counts,
                    repetitions=1 if quick else repetitions,
                    eager=enforce_eager or quick,
                    alone=alone,
                )
                found, alone = measured.result()
                outcomes += found
            progress.advance(bar)
    result = {
        "environment": environment,
        "compiled": not (enforce_eager or quick),
        "outcomes": [asdict(one) for one in outcomes],
    }
    publish(console, sheets_of(outcomes, drafts), result, folder, docs, __file__)


if __name__ == "__main__":
    app()
