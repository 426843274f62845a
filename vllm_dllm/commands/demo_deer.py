"""``vllm-dllm demo-deer``: what a diffusion drafter saves an autoregressive target."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from vllm_dllm.commands.engine import CHECKPOINTS, make_table, refusals, start_engine, timed_chat
from vllm_dllm.commands.problems import test_problems
from vllm_dllm.options.drafter import MOST_DRAFT_TOKENS

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

BUNDLED_TARGET, BUNDLED_DRAFTER = CHECKPOINTS / "tiny-qwen2", CHECKPOINTS / "tiny-deer"

PROBLEMS = 4


def rounds_of(answer: "CompletionOutput") -> Sequence[int]:
    """Drafts accepted in each forward of the target after the prompt's; 0 in all of them without a drafter."""
    metrics = answer.spec_decode_metrics
    return [0] * (len(answer.token_ids) - 1) if metrics is None else metrics.per_step_accepted


def colour(tokenizer: Any, answer: "CompletionOutput") -> Text:
    """The text: drafted tokens in green, those that the target put in itself in bold."""
    text = Text()
    own = {0, *itertools.accumulate(accepted + 1 for accepted in rounds_of(answer))}
    for index, token in enumerate(answer.token_ids):
        piece = tokenizer.decode([token], skip_special_tokens=True)
        text.append(piece, style="bold" if index in own else "green")
    return text


def demo_deer(
    target: Annotated[
        str | None, typer.Option(help="Path or hub name of an autoregressive model. Default: the bundled one.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Path or hub name of its diffusion drafter. Default: the bundled one.")
    ] = None,
    drafts: Annotated[
        int, typer.Option(min=1, max=MOST_DRAFT_TOKENS, help="Tokens drafted per forward of the drafter.")
    ] = 16,
    prompt: Annotated[str | None, typer.Option(help="Your own question. Default: word problems.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate per prompt.")] = 64,
) -> None:
    """Answer a few prompts with a diffusion drafter and without, and compare text and cost."""
    if (target is None) != (drafter is None):
        raise typer.BadParameter("--target and --drafter go together: a drafter is made for its target")
    if target is None and not (BUNDLED_TARGET / "config.json").is_file():
        raise typer.BadParameter(f"there is no bundled pair in {CHECKPOINTS}; name one, or install from a checkout")
    target, drafter = target or str(BUNDLED_TARGET), drafter or str(BUNDLED_DRAFTER)
    console = Console()
    questions = [prompt] if prompt is not None else [problem.question for problem in test_problems(PROBLEMS)]
    with console.status("Answering with the drafter"), refusals():
        llm = start_engine(
            target,
            hint=None,
            speculative_config={"method": "dllm", "model": drafter, "num_speculative_tokens": drafts},
            per_request_spec_decode_metrics="detailed",
        )
        drafted, drafted_seconds = timed_chat(llm, questions, max_tokens)
        tokenizer = llm.get_tokenizer()
        llm.llm_engine.engine_core.shutdown()
    with console.status("Answering without"), refusals():
        alone, alone_seconds = timed_chat(start_engine(target, hint="--target"), questions, max_tokens)
    for question, output in zip(questions, drafted, strict=True):
        console.print(Text(question, style="bold"))
        console.print(colour(tokenizer, output.outputs[0]))
        console.print()
    console.print(Text.assemble(("drafted and accepted", "green"), ", ", ("written by the target", "bold")))
    rows = []
    for name, outputs, seconds in (
        ("target alone", alone, alone_seconds),
        (f"with the drafter, k={drafts}", drafted, drafted_seconds),
    ):
        answers = [output.outputs[0] for output in outputs]
        tokens = sum(len(answer.token_ids) for answer in answers)
        forwards = sum(1 + len(rounds_of(answer)) for answer in answers)
        rows.append((name, tokens, forwards, f"{tokens / forwards:.2f}", f"{tokens / seconds:.1f}"))
    console.print(make_table(("", "tokens", "forwards of the target", "tokens per forward", "tokens/s"), rows))
    same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(alone, drafted, strict=True))
    console.print(f"{same} of {len(questions)} answers are equal, token for token.")
    if target == str(BUNDLED_TARGET):
        console.print("Of models as small as the bundled pair a step is mostly fixed costs: look at the forwards.")
