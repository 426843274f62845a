"""``vllm-dllm demo``: what decoding in parallel saves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_dllm import request_stats
from vllm_dllm.commands.engine import ModelOption, bundled_model, load_engine, make_table, request_options, timed_chat
from vllm_dllm.commands.problems import Problem, grade, test_problems
from vllm_dllm.methods import PolicyName

if TYPE_CHECKING:
    from vllm import LLM

DEMO_PROBLEMS = 8
DEMO_THRESHOLD = 0.9


Schedules = dict[str, dict[str, str | int | float]]
"""Ways to decode: the request options that select each, by its name in the table."""

ONE_TOKEN_PER_STEP: Schedules = {"static, k=1": {"policy": "static", "tokens_per_step": 1}}


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


def make_schedules(policy: PolicyName, threshold: float | None) -> Schedules:
    """One token per step, and the chosen policy beside it.

    Raises:
        typer.BadParameter: a threshold is given to a policy that has none.
    """
    if policy == "threshold":
        threshold = DEMO_THRESHOLD if threshold is None else threshold
        return {**ONE_TOKEN_PER_STEP, f"threshold {threshold:g}": {"policy": policy, "threshold": threshold}}
    if threshold is not None:
        raise typer.BadParameter(f"policy {policy!r} has none; it goes with 'threshold'", param_hint="--threshold")
    return ONE_TOKEN_PER_STEP if policy == "static" else {**ONE_TOKEN_PER_STEP, policy: {"policy": policy}}


def decode(llm: "LLM", prompts: list[Problem], schedule: str, options: dict[str, Any], max_tokens: int) -> Decoded:
    """Decode all prompts as one batch and measure it."""
    outputs, seconds = timed_chat(llm, [p.question for p in prompts], max_tokens, request_options(**options))
    texts = [output.outputs[0].text for output in outputs]
    return Decoded(
        schedule=schedule,
        texts=texts,
        tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        nfe=sum(request_stats(output).nfe for output in outputs),
        seconds=seconds,
        grades=[
            None if prompt.final_answer is None else grade(text, prompt.final_answer)
            for prompt, text in zip(prompts, texts, strict=True)
        ],
    )


def print_texts(console: Console, prompts: list[Problem], decoded: Decoded) -> None:
    """Print each prompt with the text that the schedule made of it, and whether the answer is right."""
    console.rule(Text(decoded.schedule))
    for prompt, text, right in zip(prompts, decoded.texts, decoded.grades, strict=True):
        console.print(Text(prompt.question, style="bold"))
        console.print(Text(text.rstrip()))
        if right is not None:
            console.print(Text("right", style="green") if right else Text("wrong", style="red"))
        console.print()


def compare(results: list[Decoded]) -> Table:
    """Compare schedules; without an answer that can be graded there is no accuracy column."""
    headings = ["policy", "tokens", "NFE", "tokens/forward", "tokens/s"]
    rows = [[r.schedule, r.tokens, r.nfe, f"{r.tokens / r.nfe:.2f}", f"{r.tokens / r.seconds:.1f}"] for r in results]
    for row, result in zip(rows, results, strict=True):
        if grades := [right for right in result.grades if right is not None]:
            row.append(f"{sum(grades)}/{len(grades)}")
    if len(rows[0]) > len(headings):
        headings.append("accuracy")
    return make_table(headings, rows, caption="NFE: model forwards after prefill")


def demo(
    model: ModelOption = None,
    prompt: Annotated[str | None, typer.Option(help="Your own question. Default: arithmetic word problems.")] = None,
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
    prompts = test_problems(DEMO_PROBLEMS) if prompt is None else [Problem(prompt)]
    model = model or bundled_model()
    console = Console()
    with console.status("Loading the model"):
        llm = load_engine(model)
    results = []
    for schedule, options in schedules.items():
        with console.status(f"Decoding: {schedule}"):
            results.append(decode(llm, prompts, schedule, options, max_tokens))
    print_texts(console, prompts, results[-1])
    console.print(compare(results))
