"""Structured outputs: are all complete answers valid, how many tokens does a forward give, what does a step cost?

``python benchmarks/structured_outputs.py --help``; ``docs/benchmarks.md`` says what is measured and how.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from arguments import Docs, Out
from constraints import CONSTRAINTS, TRAINED_FORMS, Constraint, is_valid
from environment import begin
from record import CHECKPOINTS, RESULTS
from sheet import publish
from structured_outputs_report import Accuracy, Neighbours, Row, StepCost, sheets

from vllm_dllm.methods import POLICIES
from vllm_dllm.observe.stats import request_stats
from vllm_dllm.tiny.arithmetic import Form, make_problems
from vllm_dllm.tiny.forms import TOOLS, in_form, is_right

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

SEED = 0
MAX_TOKENS = 96
AT_A_TIME = 64
TEMPERATURES = (0.0, 0.8, 1.2)
SEVERAL: dict[str, dict[str, Any]] = {
    "threshold": {"dllm_threshold": 0.9},
    "entropy": {"dllm_entropy_bound": 1.0},
    "static": {"dllm_tokens_per_step": 4},
}
"""Options under which a step may unmask several tokens; other policies have their defaults."""
MODELS = {
    "tiny-sdar": ("tiny-sdar", {}),
    "tiny-sdar-json": ("tiny-sdar-json", {}),
    "tiny-llada": ("tiny-llada", {"cache": "dual"}),
    "tiny-dream": ("tiny-dream", {"cache": "prefix"}),
    "random": ("tiny-sdar", {}),
}
"""Checkpoint and engine options; ``random`` has the first one's shape and no training."""


def open_engine(model: str, *, backend: str) -> "LLM":
    """An engine of one of ``MODELS``."""
    from vllm import LLM

    checkpoint, dllm = MODELS[model]
    return LLM(
        str(CHECKPOINTS / checkpoint),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=AT_A_TIME,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        seed=SEED,
        load_format="dummy" if model == "random" else "auto",
        # It was trained on JSON with spaces.
        structured_outputs_config={"backend": backend, "disable_any_whitespace": model != "tiny-sdar-json"},
        additional_config={"dllm": dllm},
    )


def params(
    constraint: dict[str, Any] | None, *, args: dict[str, Any], temperature: float, seed: int
) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = None if constraint is None else StructuredOutputsParams(**constraint)
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=MAX_TOKENS, structured_outputs=asked, extra_args=args
    )


def ask(
    llm: "LLM", questions: Sequence[str], asked: Sequence["SamplingParams"], tools: list[dict[str, Any]] | None = None
) -> "list[RequestOutput]":
    chats: Any = [[{"role": "user", "content": question}] for question in questions]
    return llm.chat(chats, list(asked), tools=tools, use_tqdm=False)


def measure_validity(llm: "LLM", model: str, requests: int) -> tuple[list[Row], Neighbours]:
    """Requests of all constraints, policies and temperatures, a fifth of them without a constraint, in one batch."""
    timed = MODELS[model][0] == "tiny-dream"
    policies = [row.name for row in POLICIES if row.timed <= timed and not row.needs_windows]
    policies = list(dict.fromkeys(policies))
    questions = [problem.question for problem in make_problems(requests + requests // 4, seed=SEED, split="test")]
    cases = []
    for number in range(requests):
        policy = policies[number // len(CONSTRAINTS) % len(policies)]
        temperature = TEMPERATURES[(number // len(CONSTRAINTS) // len(policies) + number) % len(TEMPERATURES)]
        cases.append((CONSTRAINTS[number % len(CONSTRAINTS)], policy, temperature))
    asked = [
        params(
            {each.field: each.value},
            args={"dllm_policy": policy, **SEVERAL.get(policy, {})},
            temperature=temperature,
            seed=number,
        )
        for number, (each, policy, temperature) in enumerate(cases)
    ]
    plain = [
        params(None, args={"dllm_policy": policies[number % len(policies)]}, temperature=(0.0, 0.8)[number % 2], seed=1)
        for number in range(requests // 4)
    ]
    alone = ask(llm, questions[requests:], plain)
    # The two kinds stand in turns as long as there are both.
    pairs = itertools.zip_longest(range(requests), range(requests, requests + len(plain)))
    everyone = [number for pair in pairs for number in pair if number is not None]
    outputs = ask(llm, [questions[number] for number in everyone], [[*asked, *plain][number] for number in everyone])
    by_number = dict(zip(everyone, outputs, strict=True))
    structured = [by_number[number] for number in range(requests)]
    together = [by_number[number] for number in range(requests, requests + len(plain))]
    rows = [
        _row(model, kind, [(c, o) for (c, *_), o in zip(cases, structured, strict=True) if c.kind == kind])
        for kind in dict.fromkeys(each.kind for each in CONSTRAINTS)
    ]
    rows += [
        _row(model, policy, [(c, o) for (c, p, _), o in zip(cases, structured, strict=True) if p == policy])
        for policy in policies
    ]
    rows = [row for row in rows if row.requests]
    return rows, Neighbours(model, len(plain), sum(_seen(a) != _seen(b) for a, b in zip(alone, together, strict=True)))


def _seen(output: "RequestOutput") -> tuple[list[int], int]:
    return list(output.outputs[0].token_ids), request_stats(output).nfe


def _row(model: str, what: str, answers: "Sequence[tuple[Constraint, RequestOutput]]") -> Row:
    texts = [(constraint, output.outputs[0]) for constraint, output in answers]
    stats = [request_stats(output) for _, output in answers]
    return Row(
        model,
        what,
        requests=len(texts),
        complete=sum(answer.finish_reason == "stop" for _, answer in texts),
        invalid=sum(answer.finish_reason == "stop" and not is_valid(c, answer.text) for c, answer in texts),
        errors=sum(answer.finish_reason not in ("stop", "length") for _, answer in texts),
        tokens=sum(each.committed_tokens for each in stats),
        nfe=sum(each.nfe for each in stats),
    )


def measure_accuracy(llm: "LLM", model: str, requests: int) -> list[Accuracy]:
    """Right answers to held-out problems in the forms that the model was trained on, greedy."""
    problems = make_problems(requests, seed=SEED + 1, split="test")
    found = []
    forms: tuple[Form, ...] = ("words", "json", "call") if model == "tiny-sdar-json" else ("words",)
    for form, constrained, policy in itertools.product(forms, (False, True), ("static", "threshold")):
        asked = params(
            TRAINED_FORMS[form] if constrained else None,
            args={"dllm_policy": policy, **({"dllm_threshold": 0.9} if policy == "threshold" else {})},
            temperature=0.0,
            seed=0,
        )
        cases = [in_form(problem, form) for problem in problems]
        outputs = ask(llm, [each.question for each in cases], [asked] * requests, TOOLS if form == "call" else None)
        stats = [request_stats(output) for output in outputs]
        found.append(
            Accuracy(
                model,
                form,
                {"static": "1 token per step", "threshold": "threshold 0.9"}[policy],
                constrained,
                requests,
                sum(is_right(o.outputs[0].text, case) for o, case in zip(outputs, cases, strict=True)) / requests,
                sum(each.committed_tokens for each in stats) / sum(each.nfe for each in stats),
            )
        )
    return found


def time_step(llm: "LLM", asked: "SamplingParams", number: int) -> float:
    """Mean seconds of processor time of the steps in which ``number`` equal requests are denoised, and nothing else.

    A grammar that is being compiled delays its request and no step.
    """
    engine: Any = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    prompt = engine.get_tokenizer().encode("How many?")
    for each in range(number):
        engine.add_request(str(each), {"prompt_token_ids": prompt}, asked)
    seconds = []
    while engine.has_unfinished_requests():
        denoises = len(scheduler.running) == number and not any(each.is_prefill_chunk for each in scheduler.running)
        began = time.process_time()
        engine.step()
        if denoises:
            seconds.append(time.process_time() - began)
    return mean(seconds)


def measure_steps(llm: "LLM", model: str, repetitions: int) -> list[StepCost]:
    """Steps of requests that all have a constraint and of requests that all have none, in turns."""
    constraint = next(each for each in CONSTRAINTS if each.name == "SQL twice")
    found = []
    for number in (1, 16, 64):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repetitions + 1):
            for is_structured in (True, False):
                asked = params(
                    {constraint.field: constraint.value} if is_structured else None,
                    args={"dllm_policy": "static"},
                    temperature=0.0,
                    seed=0,
                )
                asked.max_tokens, asked.ignore_eos = 32, True
                seconds[is_structured].append(time_step(llm, asked, number))
        pairs = [(plain, structured) for plain, structured in zip(seconds[False][1:], seconds[True][1:], strict=True)]
        found.append(
            StepCost(
                model,
                number,
                1e3 * median(plain for plain, _ in pairs),
                1e3 * median(structured for _, structured in pairs),
                median(structured / plain for plain, structured in pairs),
            )
        )
    return found


def main(
    requests: Annotated[int, typer.Option(min=40, help="Structured requests in all.")] = 2000,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each timing.")] = 5,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems of the trained task.")] = 100,
    backend: Annotated[str, typer.Option(help="xgrammar or guidance.")] = "xgrammar",
    model: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(MODELS)}. Default: all.")] = None,
    out: Out = RESULTS,
    docs: Docs = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few requests of each kind: does it work?")] = False,
) -> None:
    """Ask for structured outputs of all kinds and check every answer."""
    if quick:
        requests, repetitions, problems = 80, 1, 4
    models = model or [*MODELS]
    if unknown := [name for name in models if name not in MODELS]:
        raise typer.BadParameter(f"model={unknown[0]!r} is not allowed: allowed: {', '.join(MODELS)}")
    console, environment = begin()
    rows: list[Row] = []
    neighbours: list[Neighbours] = []
    accuracies: list[Accuracy] = []
    costs: list[StepCost] = []
    for name in models:
        console.print(f"[bold]{name}")
        llm = open_engine(name, backend=backend)
        validity, unconstrained = measure_validity(llm, name, requests // len(models))
        rows, neighbours = [*rows, *validity], [*neighbours, unconstrained]
        if name != "random":
            accuracies += measure_accuracy(llm, name, problems)
        if name == models[0]:
            costs += measure_steps(llm, name, repetitions)
        del llm
    result: dict[str, Any] = {"environment": environment, "backend": backend}
    for key, table in (("rows", rows), ("neighbours", neighbours), ("accuracies", accuracies), ("costs", costs)):
        result[key] = [asdict(each) for each in table]
    publish(console, sheets(rows, neighbours, accuracies, costs), result, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
