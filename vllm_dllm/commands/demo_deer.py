"""``vllm-dllm demo-deer``: what a diffusion drafter saves an autoregressive target."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_dllm.commands.engine import CHECKPOINTS, start_engine
from vllm_dllm.commands.problems import test_problems

if TYPE_CHECKING:
    from vllm import LLM

BUNDLED_TARGET, BUNDLED_DRAFTER = CHECKPOINTS / "tiny-qwen2", CHECKPOINTS / "tiny-deer"

PROBLEMS = 4


@dataclass(frozen=True)
class Answer:
    """What the target wrote.

    Attributes:
        token_ids: the text.
        rounds: drafts accepted in each round after the prompt's forward; empty without a drafter.
        forwards: of the target, the prompt's included.
    """

    token_ids: list[int]
    rounds: list[int]
    forwards: int


def answer(llm: "LLM", questions: list[str], max_tokens: int) -> tuple[list[Answer], float]:
    """Greedy answers, all together, and the seconds they took."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    chats: Any = [[{"role": "user", "content": question}] for question in questions]
    llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)  # nobody pays for first use
    begin = time.perf_counter()
    outputs = llm.chat(chats, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    answers = []
    for output in outputs:
        completion = output.outputs[0]
        metrics = completion.spec_decode_metrics
        rounds = [] if metrics is None else list(metrics.per_step_accepted)
        forwards = 1 + len(rounds) if metrics is not None else len(completion.token_ids)
        answers.append(Answer(list(completion.token_ids), rounds, forwards))
    return answers, seconds


def colour(tokenizer: Any, shown: Answer) -> Text:
    """The text: drafted tokens in green, those that the target put in itself in bold."""
    text = Text()
    own = {0}
    at = 0
    for accepted in shown.rounds:
        at += accepted + 1
        own.add(at)
    for index, token in enumerate(shown.token_ids):
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
    drafts: Annotated[int, typer.Option(min=1, help="Tokens drafted per forward of the drafter.")] = 16,
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
    questions = [prompt] if prompt else [problem.question for problem in test_problems(PROBLEMS)]
    with console.status("Answering with the drafter"):
        llm = start_engine(
            target,
            hint="--target",
            speculative_config={"method": "dllm", "model": drafter, "num_speculative_tokens": drafts},
            per_request_spec_decode_metrics="detailed",
        )
        drafted, drafted_seconds = answer(llm, questions, max_tokens)
        tokenizer = llm.get_tokenizer()
        llm.llm_engine.engine_core.shutdown()
    with console.status("Answering without"):
        alone, alone_seconds = answer(start_engine(target, hint="--target"), questions, max_tokens)
    for question, shown in zip(questions, drafted, strict=True):
        console.print(Text(question, style="bold"))
        console.print(colour(tokenizer, shown))
        console.print()
    console.print(Text.assemble(("drafted and accepted", "green"), ", ", ("written by the target", "bold")))
    table = Table()
    table.add_column("")
    for heading in ("tokens", "forwards of the target", "tokens per forward", "tokens/s"):
        table.add_column(heading, justify="right")
    for name, answers, seconds in (
        ("target alone", alone, alone_seconds),
        (f"with the drafter, k={drafts}", drafted, drafted_seconds),
    ):
        tokens, forwards = sum(len(a.token_ids) for a in answers), sum(a.forwards for a in answers)
        table.add_row(name, str(tokens), str(forwards), f"{tokens / forwards:.2f}", f"{tokens / seconds:.1f}")
    console.print(table)
    same = sum(a.token_ids == b.token_ids for a, b in zip(alone, drafted, strict=True))
    console.print(f"{same} of {len(questions)} answers are equal, token for token.")
    if target == str(BUNDLED_TARGET):
        console.print("Of models as small as the bundled pair a step is mostly fixed costs: look at the forwards.")
