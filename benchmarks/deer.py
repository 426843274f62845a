"""DEER: a diffusion drafter beside n-grams and an autoregressive draft model of its size, on the bundled pair.

``python benchmarks/deer.py --help``; ``docs/benchmarks.md`` says what is measured and how.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from engine import ROOT
from full_attention import Problems
from record import RESULTS
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from step_skipping import begin
from step_skipping_report import Sheet, publish

if TYPE_CHECKING:
    from vllm import LLM

SEED = 0
MAX_TOKENS = 160
DRAFTS = (4, 8, 16, 32)
TEMPERATURES = (0.0, 0.6)
CONCURRENCIES = (1, 2, 4, 8, 16)
KV_CACHE_BYTES = 1 << 28

PUBLISHED_TAU = {
    "Qwen3-4B": (4.61, 3.31, 2.77, 2.40),
    "Qwen3-8B": (4.61, 3.45, 2.83, 2.48),
    "Qwen3-14B": (4.82, 3.54, 2.98, 2.39),
    "Qwen3-30B-A3B": (5.03, 3.05, 4.04, 2.21),
}
"""Mean of four code tasks at temperature 0 (arXiv 2512.15176, tables 1 and 2): tau of DEER, of EAGLE-3, speed-ups."""

PUBLISHED_BATCHED = {2: (34.0, 83.0), 4: (32.5, 104.0), 8: (38.4, 159.9), 16: (49.8, 175.7)}
"""Tokens per second without a K/V cache by batch size (its table 5): autoregressive, DEER."""


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


@dataclass(frozen=True)
class Outcome:
    """All requests of one system at one temperature and concurrency.

    Attributes:
        seconds: wall time of the median repetition.
        tokens: generated tokens of each request.
        forwards: steps of the target, one request at a time; 0 where several ran together.
        accepted: how many rounds accepted 0, 1, 2, ... drafts.
        accuracy: share of right answers.
    """

    system: str
    drafts: int
    temperature: float
    concurrency: int
    seconds: float
    tokens: list[list[int]]
    forwards: int
    accepted: dict[int, int]
    accuracy: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def tau(self) -> float | None:
        """Drafts accepted per round, the paper's tau; without drafts there is none."""
        rounds = sum(self.accepted.values())
        return sum(number * count for number, count in self.accepted.items()) / rounds if rounds else None


def systems_of(
    drafter: Path, autoregressive: Path | None, stage_one: Path | None, drafts: Sequence[int]
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
    if autoregressive is not None:
        for number in drafts:
            draft = {
                "method": "draft_model",
                "model": str(autoregressive),
                "num_speculative_tokens": number,
                "draft_sample_method": "probabilistic",
            }
            systems.append(System("autoregressive draft model", number, draft, v2=True))
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


def run(llm: "LLM", problems: Problems, count: int, temperature: float, concurrency: int) -> tuple[Any, ...]:
    """Seconds, tokens, steps and accepted drafts of the first ``count`` problems, ``concurrency`` at a time."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    llm.reset_prefix_cache()
    waiting = deque(enumerate(problems.prompts[:count]))
    done: dict[int, Any] = {}
    in_flight = steps = 0
    begin = time.perf_counter()
    while waiting or in_flight:
        while waiting and in_flight < concurrency:
            index, prompt = waiting.popleft()
            params = SamplingParams(
                temperature=temperature,
                seed=SEED + index,
                max_tokens=MAX_TOKENS,
                stop_token_ids=problems.stop_token_ids,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
            in_flight += 1
        steps += 1
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = output.outputs[0]
                in_flight -= 1
    seconds = time.perf_counter() - begin
    accepted: Counter[int] = Counter()
    for completion in done.values():
        if completion.spec_decode_metrics is not None:
            accepted.update(dict(enumerate(completion.spec_decode_metrics.histogram)))
    tokens = [list(done[index].token_ids) for index in range(count)]
    return seconds, tokens, steps, {number: times for number, times in accepted.items() if times}


def measure(
    target: Path,
    system: System,
    problems: Problems,
    *,
    counts: dict[int, int],
    repetitions: int,
    eager: bool,
) -> list[Outcome]:
    """One system at every temperature and concurrency."""
    llm = load(target, system, eager=eager, concurrency=max(counts))
    outcomes = []
    for temperature in TEMPERATURES[:1] if system.greedy_only else TEMPERATURES:
        run(llm, problems, 2, temperature, 1)
        # Together greedily only: what the table of batches shows.
        for concurrency, count in counts.items() if not temperature else ((1, counts[1]),):
            passes = [run(llm, problems, count, temperature, concurrency) for _ in range(repetitions)]
            _, tokens, steps, accepted = passes[-1]
            outcomes.append(
                Outcome(
                    system=system.name,
                    drafts=system.drafts,
                    temperature=temperature,
                    concurrency=concurrency,
                    seconds=median(seconds for seconds, *_ in passes),
                    tokens=tokens,
                    forwards=steps if concurrency == 1 else 0,
                    accepted=accepted,
                    accuracy=problems.accuracy(tokens),
                )
            )
    llm.llm_engine.engine_core.shutdown()
    return outcomes


def _find(outcomes: Sequence[Outcome], system: str, drafts: int, temperature: float, concurrency: int) -> Outcome:
    return next(
        o
        for o in outcomes
        if (o.system, o.drafts, o.temperature, o.concurrency) == (system, drafts, temperature, concurrency)
    )


def _equal(outcomes: Sequence[Outcome], one: Outcome) -> str:
    """Requests with the target's own tokens, where sampling does not make them differ."""
    if one.temperature:
        return ""
    alone = _find(outcomes, "target alone", 0, 0.0, one.concurrency)
    return f"{sum(map(list.__eq__, one.tokens, alone.tokens))}/{len(one.tokens)}"


def make_tau_sheet(outcomes: Sequence[Outcome]) -> Sheet:
    """The shape of the paper's tables 1 and 2, one request at a time."""
    rows = []
    for one in (o for o in outcomes if o.concurrency == 1):
        alone = _find(outcomes, "target alone", 0, one.temperature, 1)
        rows.append(
            [
                f"{one.temperature:g}",
                one.system,
                str(one.drafts or ""),
                "" if one.tau is None else f"{one.tau:.2f}",
                f"{one.num_tokens / one.forwards:.2f}",
                f"{one.forwards / one.num_tokens:.2f}",
                f"{one.rate / alone.rate:.2f}×",
                _equal(outcomes, one),
                f"{100 * one.accuracy:.0f}%",
            ]
        )
    for model, (deer, eagle, deer_speed, eagle_speed) in PUBLISHED_TAU.items():
        rows.append(["0", f"{model}: DEER", "", f"{deer:.2f}", "", "", f"{deer_speed:.2f}×", "", ""])
        rows.append(["0", f"{model}: EAGLE-3", "", f"{eagle:.2f}", "", "", f"{eagle_speed:.2f}×", "", ""])
    headings = [
        "temperature",
        "system",
        "k",
        "accepted per round (τ)",
        "tokens per forward",
        "forwards per token",
        "speed",
        "equal tokens",
        "right answers",
    ]
    return Sheet("Drafters, one request at a time", headings, rows)


def make_batch_sheet(outcomes: Sequence[Outcome]) -> Sheet:
    """The shape of the paper's table 5: tokens per second over the target alone, by how many requests run together."""
    levels = list(dict.fromkeys(o.concurrency for o in outcomes))
    rows = []
    for system, drafts in dict.fromkeys((o.system, o.drafts) for o in outcomes):
        row = [system, str(drafts or "")]
        for level in levels:
            alone = _find(outcomes, "target alone", 0, 0.0, level)
            one = _find(outcomes, system, drafts, 0.0, level)
            row.append(f"{one.rate / alone.rate:.2f}× ({_equal(outcomes, one)})")
        rows.append(row)
    published = {1: "", **{n: f"{deer / alone:.2f}×" for n, (alone, deer) in PUBLISHED_BATCHED.items()}}
    rows.append(["DEER, Qwen3-8B without K/V cache", "", *(published.get(level, "") for level in levels)])
    return Sheet("Requests together, greedy: speed (equal tokens)", ["system", "k", *map(str, levels)], rows)


def make_histogram_sheet(outcomes: Sequence[Outcome]) -> Sheet:
    """How long the accepted blocks are."""
    bins = ((0, 0), (1, 3), (4, 7), (8, 15), (16, 31), (32, 128))
    rows = []
    for one in outcomes:
        if one.concurrency != 1 or one.temperature or not one.accepted:
            continue
        rounds = sum(one.accepted.values())
        shares = [sum(c for n, c in one.accepted.items() if low <= n <= high) / rounds for low, high in bins]
        rows.append([one.system, str(one.drafts), *(f"{100 * share:.1f}%" for share in shares), str(max(one.accepted))])
    names = [str(low) if low == high else f"{low}-{high}" for low, high in bins[:-1]] + ["32 and more"]
    return Sheet("Rounds by accepted drafts, greedy, one at a time", ["system", "k", *names, "longest"], rows)


def make_target_sheet(outcomes: Sequence[Outcome], drafts: Sequence[int]) -> Sheet:
    """Targets and whether they were reached."""
    greedy = [o for o in outcomes if o.concurrency == 1 and not o.temperature]
    deer = {o.drafts: o for o in greedy if o.system == "DEER"}
    plain = {o.drafts: o for o in greedy if o.system == "autoregressive draft model"}
    first = next((o for o in greedy if o.system == "DEER, stage I only"), None)
    rows = []

    def target(name: str, wanted: str, value: str, *, passed: bool) -> None:
        rows.append([name, wanted, value, "pass" if passed else "miss"])

    middle = deer[16 if 16 in deer else max(deer)]
    per_round = middle.num_tokens / middle.forwards
    k = middle.drafts
    tau = middle.tau or 0.0
    target(f"accepted per round (τ), k={k}, temperature 0", "at least 4", f"{tau:.2f}", passed=tau >= 4)
    target(f"forwards of the target per token, k={k}", "at most 0.25", f"{1 / per_round:.2f}", passed=per_round >= 4)
    taus = [one.tau or 0.0 for _, one in sorted(deer.items())]
    shown = ", ".join(f"{tau:.2f}" for tau in taus)
    target(f"accepted per round over k={', '.join(map(str, drafts))}", "rising", shown, passed=taus == sorted(taus))
    for number in drafts:
        if number >= 8 and number in plain:
            ours, theirs = deer[number].tau or 0.0, plain[number].tau or 0.0
            name = f"accepted per round over the autoregressive draft model's, k={number}"
            target(name, "above 1", f"{ours / theirs:.2f}", passed=ours > theirs)
    if first is not None:
        target(
            f"accepted per round after stage II over stage I, k={k}",
            "above 1",
            f"{(middle.tau or 0.0) / (first.tau or 1.0):.2f}",
            passed=(middle.tau or 0.0) > (first.tau or 0.0),
        )
    return Sheet("Targets", ["target", "wanted", "measured", "result"], rows, num_labels=1)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="A few problems, eagerly: does it work?")] = False,
    target: Annotated[Path, typer.Option(help="Autoregressive target.")] = ROOT / "checkpoints" / "tiny-qwen2",
    drafter: Annotated[Path, typer.Option(help="Aligned drafter.")] = ROOT / "checkpoints" / "tiny-deer",
    autoregressive: Annotated[
        Path | None,
        typer.Option(help="Autoregressive draft model of the drafter's size; docs/deer-training.md makes one."),
    ] = None,
    stage_one: Annotated[Path | None, typer.Option(help="The drafter after stage I, for the ablation.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Problems, one at a time; twice as many together.")] = 50,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of a timing.")] = 3,
    enforce_eager: Annotated[bool, typer.Option(help="Run the models without torch.compile.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the result.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Page whose marked place gets the tables.")] = None,
) -> None:
    """Measure drafters for an autoregressive target: accepted drafts, target forwards, speed, equal tokens."""
    for checkpoint in (target, drafter, autoregressive, stage_one):
        if checkpoint is not None and not (checkpoint / "config.json").is_file():
            raise typer.BadParameter(f"{checkpoint} holds no checkpoint")
    console, environment = begin()
    drafts = (4, 16) if quick else DRAFTS
    levels = (1, 4) if quick else CONCURRENCIES
    requests = 4 if quick else requests
    counts = {level: requests if level == 1 else 2 * requests for level in levels}
    problems = Problems.of(target, max(counts.values()))
    if autoregressive is None:
        console.print("Without --autoregressive the draft model of the drafter's size is left out.")
    outcomes: list[Outcome] = []
    systems = systems_of(drafter, autoregressive, stage_one, drafts)
    with Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        bar = progress.add_task("loading", total=len(systems))
        for system in systems:
            progress.update(bar, description=f"{system.name}, k={system.drafts}" if system.drafts else system.name)
            # Each in a process of its own: engines leave things behind in one that others trip over.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                measured = process.submit(
                    measure,
                    target,
                    system,
                    problems,
                    counts=counts,
                    repetitions=1 if quick else repetitions,
                    eager=enforce_eager or quick,
                )
                outcomes += measured.result()
            progress.advance(bar)
    sheets = [
        make_target_sheet(outcomes, drafts),
        make_tau_sheet(outcomes),
        make_batch_sheet(outcomes),
        make_histogram_sheet(outcomes),
    ]
    result = {
        "environment": environment,
        "compiled": not (enforce_eager or quick),
        "outcomes": [{**asdict(one), "tokens": one.num_tokens} for one in outcomes],
    }
    folder = out or (ROOT / "build" if quick else RESULTS)
    publish(console, sheets, result, folder, docs, __file__)


if __name__ == "__main__":
    app()
