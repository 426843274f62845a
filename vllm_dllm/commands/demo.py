"""``vllm-dllm demo``: what decoding in parallel saves."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_dllm.commands.engine import (
    ModelOption,
    bundled_model,
    check_policy_is_used,
    load_engine,
    make_table,
    refusals,
    request_options,
    timed_chat,
)
from vllm_dllm.commands.live import Answer, Show, answer_here, answer_there, answers_of, shown, waiting
from vllm_dllm.commands.problems import Problem, grade, test_problems
from vllm_dllm.methods import VERIFIER_ROWS, PolicyName, VerifierName, policy_row
from vllm_dllm.options.resolve import drafts_beside_block

if TYPE_CHECKING:
    from vllm import LLM

DEMO_PROBLEMS = 8
DEMO_THRESHOLD = 0.9


Schedules = dict[str, dict[str, str | int | float]]
"""Ways to decode: the request options that select each, by its name in the table."""

# Said in full, because a server that is asked may have a verifier for its default.
ONE_TOKEN_PER_STEP: Schedules = {"static, k=1": {"policy": "static", "tokens_per_step": 1, "verify": "none"}}


@dataclass(frozen=True)
class Decoded:
    """What one schedule made of all prompts.

    Attributes:
        schedule: name of the schedule.
        texts: one text per prompt.
        tokens: generated tokens, of all prompts together.
        nfe: model forwards that the requests took part in after their prefill, summed over the requests.
        seconds: wall time of the whole batch; ``None`` where it was drawn meanwhile.
        grades: whether each answer is right; ``None`` where that cannot be told.
    """

    schedule: str
    texts: list[str]
    tokens: int
    nfe: int
    seconds: float | None
    grades: list[bool | None]


def make_schedules(
    policy: PolicyName | None = None, threshold: float | None = None, verify: VerifierName = "none"
) -> Schedules:
    """One token per step, and the chosen policy beside it.

    Args:
        policy: None: ``threshold``, where the verifier has a policy.

    Raises:
        typer.BadParameter: an option is given that nothing would use.
    """
    if not VERIFIER_ROWS[verify].uses_policy:
        # It decides itself what a step unmasks.
        check_policy_is_used(verify, policy, threshold)
        # Models with an autoregressive verifier of their own have no other way.
        beside = {} if VERIFIER_ROWS[verify].is_autoregressive else ONE_TOKEN_PER_STEP
        return {**beside, verify: {"verify": verify}}
    policy = policy or "threshold"
    name = str(policy)
    options: dict[str, str | int | float] = {"policy": policy, "verify": verify}
    if threshold is not None and "threshold" not in policy_row(name, timesteps=False).options:
        raise typer.BadParameter(f"policy {policy!r} has none", param_hint="--threshold")
    if policy == "threshold" and threshold is None:
        threshold = DEMO_THRESHOLD
    if threshold is not None:
        name, options = f"{name} {threshold:g}", {**options, "threshold": threshold}
    if verify != "none":
        name = f"{name}, {verify}"
    if name == "static":
        return ONE_TOKEN_PER_STEP
    return {**ONE_TOKEN_PER_STEP, name: options}


def decode(
    place: "LLM | str",
    prompts: list[Problem],
    schedule: str,
    options: dict[str, Any],
    max_tokens: int,
    show: Show | None,
) -> Decoded:
    """Decode all prompts as one batch and measure it.

    Args:
        place: an engine in this process, or the URL of a server.
    """
    questions = [prompt.question for prompt in prompts]
    answers, seconds = answer_all(place, questions, request_options(**options), max_tokens, show)
    return Decoded(
        schedule=schedule,
        texts=[answer.text for answer in answers],
        tokens=sum(answer.tokens for answer in answers),
        nfe=sum(answer.stats.nfe for answer in answers),
        seconds=seconds,
        grades=[
            None if prompt.final_answer is None else grade(answer.text, prompt.final_answer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
    )


def answer_all(
    place: "LLM | str", questions: Sequence[str], options: dict[str, Any], max_tokens: int, show: Show | None
) -> tuple[list[Answer], float | None]:
    """Answers to all questions as one batch, and the seconds that they took, unless they were drawn meanwhile."""
    if isinstance(place, str):
        start = time.perf_counter()
        answers = answer_there(place, questions, max_tokens, options, show)
        return answers, None if show else time.perf_counter() - start
    from vllm import SamplingParams

    with refusals():
        if show is None:
            outputs, seconds = timed_chat(place, questions, max_tokens, options)
            return answers_of(outputs), seconds
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, extra_args=options)
        return answers_of(answer_here(place, questions, params, show)), None


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
    """Compare schedules; what was not measured, or cannot be graded, has no column."""
    headings = ["policy", "tokens", "NFE", "tokens/forward"]
    rows = [[r.schedule, r.tokens, r.nfe, f"{r.tokens / r.nfe:.2f}"] for r in results]
    timed = all(result.seconds is not None for result in results)
    for row, result in zip(rows, results, strict=True):
        if timed and result.seconds is not None:
            row.append(f"{result.tokens / result.seconds:.1f}")
        if grades := [right for right in result.grades if right is not None]:
            row.append(f"{sum(grades)}/{len(grades)}")
    headings += ["tokens/s"] * timed
    headings += ["accuracy"] * (len(rows[0]) - len(headings))
    return make_table(headings, rows, caption="NFE: model forwards after prefill")


def _address(url: str | None) -> str | None:
    if url is None:
        return None
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{url!r} begins with neither http:// nor https://")
    try:
        urlsplit(url).port  # noqa: B018 It is read when it is asked for.
    except ValueError as error:
        raise typer.BadParameter(f"{url!r}: {error}") from None
    return url


def demo(
    model: ModelOption = None,
    prompt: Annotated[str | None, typer.Option(help="Your own question. Default: arithmetic word problems.")] = None,
    policy: Annotated[
        PolicyName | None,
        typer.Option(help="Decoding policy to compare with one token per step. Default: 'threshold'."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help=f"Confidence to unmask at. Default of 'threshold': {DEMO_THRESHOLD}."),
    ] = None,
    verify: Annotated[VerifierName, typer.Option(help="Skip steps with drafts; 'fef' has no policy.")] = "none",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate per prompt.")] = 128,
    live: Annotated[bool, typer.Option("--live", help="Redraw the texts while they are denoised.")] = False,
    url: Annotated[
        str | None,
        typer.Option(
            callback=_address, help="Ask a running server, such as http://localhost:8000, instead of an engine here."
        ),
    ] = None,
) -> None:
    """Decode a few prompts one token per step and in parallel, and compare the cost."""
    schedules = make_schedules(policy, threshold, verify)
    prompts = test_problems(DEMO_PROBLEMS) if prompt is None else [Problem(prompt)]
    if url is not None and model is not None:
        raise typer.BadParameter("the server has its model; leave one of them out", param_hint="--model")
    if url is None and VERIFIER_ROWS[verify].verifies_causally:
        raise typer.BadParameter(
            "an engine is started for it, and the demo compares several ways to decode; ask a server with --url",
            param_hint="--verify",
        )
    console = Console()
    place: LLM | str
    if url is not None:
        place = url
    else:
        model = model or bundled_model()
        with console.status("Loading the model"):
            place = load_engine(model, {"max_drafts": drafts_beside_block(verify, None)})
        own: VerifierName | None = place.model_config.hf_config.traits.verifier
        if own is not None and verify == "none":
            schedules = make_schedules(policy, threshold, own)
    results = []
    for schedule, options in schedules.items():
        questions = [each.question for each in prompts]
        with shown(console, schedule, questions) if live else waiting(console, f"Decoding: {schedule}") as show:
            results.append(decode(place, prompts, schedule, options, max_tokens, show))
    print_texts(console, prompts, results[-1])
    console.print(compare(results))
