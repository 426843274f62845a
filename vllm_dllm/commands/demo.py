"""``vllm-dllm demo``: what decoding in parallel saves."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_dllm import request_stats
from vllm_dllm.commands.engine import bundled_model, load_engine
from vllm_dllm.commands.problems import Problem, grade, test_problems
from vllm_dllm.methods import PolicyName
from vllm_dllm.options.schema import REQUEST_PREFIX

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

DEMO_PROBLEMS = 8
DEMO_THRESHOLD = 0.9


@dataclass(frozen=True)
class Schedule:
    """One way to decode: its name in the table, and the request options that select it."""

    name: str
    options: dict[str, str | int | float]


@dataclass(frozen=True)
class DemoPrompt:
    """What a user says; ``problem``: if the answer can be graded."""

    text: str
    problem: Problem | None = None


@dataclass(frozen=True)
class Decoded:
    """What one schedule made of all prompts.

    Attributes:
        schedule: name of the schedule.
        texts: one text per prompt.
        tokens: generated tokens, of all prompts together.
        nfe: model forwards that the requests took part in after their prefill, summed over the requests.
        seconds: wall time of the whole batch.
        grades: whether each answer is right; ``None`` where that cannot be told.
    """

    schedule: str
    texts: list[str]
    tokens: int
    nfe: int
    seconds: float
    grades: list[bool | None]


ONE_TOKEN_PER_STEP = Schedule("static, k=1", {"policy": "static", "tokens_per_step": 1})


def make_schedules(policy: PolicyName, threshold: float | None) -> list[Schedule]:
    """One token per step, and the chosen policy beside it.

    Raises:
        typer.BadParameter: a threshold is given to a policy that has none.
    """
    if policy == "threshold":
        threshold = DEMO_THRESHOLD if threshold is None else threshold
        return [
            ONE_TOKEN_PER_STEP,
            Schedule(f"threshold {threshold:g}", {"policy": policy, "threshold": threshold}),
        ]
    if threshold is not None:
        raise typer.BadParameter(f"policy {policy!r} has none; it goes with 'threshold'", param_hint="--threshold")
    if policy == "static":
        return [ONE_TOKEN_PER_STEP]
    return [ONE_TOKEN_PER_STEP, Schedule(policy, {"policy": policy})]


def make_prompts(prompt: str | None) -> list[DemoPrompt]:
    """The user's own prompt, or arithmetic problems of the test split."""
    if prompt is not None:
        return [DemoPrompt(prompt)]
    return [DemoPrompt(problem.question, problem) for problem in test_problems(DEMO_PROBLEMS)]


def _run(
    llm: "LLM", prompts: list[DemoPrompt], options: dict[str, str | int | float], max_tokens: int
) -> "list[RequestOutput]":
    """Decode all prompts as one batch; outputs in the order of the prompts."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        extra_args={f"{REQUEST_PREFIX}{key}": value for key, value in options.items()},
    )
    chats = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    return llm.chat(chats, params, use_tqdm=False)


def decode(llm: "LLM", prompts: list[DemoPrompt], schedule: Schedule, max_tokens: int) -> Decoded:
    """Decode all prompts as one batch and measure it.

    The batch first runs for one token per prompt: then no schedule pays for first use, and each finds the
    prompts in the prefix cache.
    """
    _run(llm, prompts, schedule.options, max_tokens=1)
    start = time.perf_counter()
    outputs = _run(llm, prompts, schedule.options, max_tokens)
    seconds = time.perf_counter() - start
    texts = [output.outputs[0].text for output in outputs]
    return Decoded(
        schedule=schedule.name,
        texts=texts,
        tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        nfe=sum(request_stats(output).nfe for output in outputs),
        seconds=seconds,
        grades=[
            None if prompt.problem is None else grade(text, prompt.problem.final_answer)
            for prompt, text in zip(prompts, texts, strict=True)
        ],
    )


def print_texts(console: Console, prompts: list[DemoPrompt], decoded: Decoded) -> None:
    """Print each prompt with the text that the schedule made of it, and whether the answer is right."""
    console.rule(Text(decoded.schedule))
    for prompt, text, right in zip(prompts, decoded.texts, decoded.grades, strict=True):
        console.print(Text(prompt.text, style="bold"))
        console.print(Text(text.rstrip()))
        if right is not None:
            console.print(Text("right", style="green") if right else Text("wrong", style="red"))
        console.print()


def make_table(results: list[Decoded]) -> Table:
    """Compare schedules; without an answer that can be graded there is no accuracy column."""
    with_accuracy = any(right is not None for right in results[0].grades)
    table = Table(caption="NFE: model forwards after prefill")
    table.add_column("policy")
    for heading in ("tokens", "NFE", "tokens/forward", "tokens/s"):
        table.add_column(heading, justify="right")
    if with_accuracy:
        table.add_column("accuracy", justify="right")
    for result in results:
        row = [
            result.schedule,
            str(result.tokens),
            str(result.nfe),
            f"{result.tokens / result.nfe:.2f}",
            f"{result.tokens / result.seconds:.1f}",
        ]
        if with_accuracy:
            grades = [right for right in result.grades if right is not None]
            row.append(f"{sum(grades)}/{len(grades)}")
        table.add_row(*row)
    return table


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Path or hub name of a diffusion language model. Default: the bundled one."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Your own question. Default: word problems and a code completion.")
    ] = None,
    policy: Annotated[
        PolicyName, typer.Option(help="Decoding policy to compare with one token per step.")
    ] = "threshold",
    threshold: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help=f"Confidence that 'threshold' unmasks at. Default: {DEMO_THRESHOLD}."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate per prompt.")] = 128,
) -> None:
    """Decode a few prompts one token per step and in parallel, and compare the cost."""
    schedules = make_schedules(policy, threshold)
    prompts = make_prompts(prompt)
    model = model or bundled_model()
    console = Console()
    with console.status("Loading the model"):
        llm = load_engine(model)
    results = []
    for schedule in schedules:
        with console.status(f"Decoding: {schedule.name}"):
            results.append(decode(llm, prompts, schedule, max_tokens))
    print_texts(console, prompts, results[-1])
    console.print(make_table(results))
