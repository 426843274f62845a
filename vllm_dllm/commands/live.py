"""Texts in the terminal while they are denoised, and the two places that answers come from: an engine in the command's
own process, and a server."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from vllm_dllm.observe.stats import RequestStats, request_stats, response_stats
from vllm_dllm.observe.step_events import KEY, StepEvent, StreamedEvents, step_event

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from vllm import LLM, RequestOutput, SamplingParams

Show = Callable[[int, StepEvent], None]
"""Told of the number of a prompt and what its last forward did."""

SECONDS_PER_FRAME = 0.05
"""A picture stays at least as long: a small model would be done before anybody sees it."""

MASK = "░"

STYLES = {"unmasked": "bold green", "drafted": "bold black on yellow", "masked": "dim", "kept": ""}
"""Of a token, by what the last forward of its request did to it."""


@dataclass
class DenoisedText:
    """The answer to one prompt as far as it is denoised."""

    prompt: str
    texts: list[str] = field(default_factory=list)
    """By token."""
    kinds: list[str] = field(default_factory=list)
    """By token: a key of `STYLES`."""
    forwards: int = 0

    def take(self, event: StepEvent) -> None:
        """Go on to the state that an event has; the event's texts are known."""
        assert event.texts is not None
        end = event.start + len(event.tokens)
        before = self.texts[: event.start]
        self.texts = [*before, *[""] * (event.start - len(before)), *event.texts]
        self.kinds = ["kept"] * end
        for offset, token in enumerate(event.tokens):
            if token is None:
                self.kinds[event.start + offset] = "masked"
        for offset in event.unmasked:
            self.kinds[event.start + offset] = "drafted" if offset in event.drafted else "unmasked"
        self.forwards = event.forward + 1

    def __rich__(self) -> RenderableType:
        tokens = [
            (MASK, STYLES[kind]) if kind == "masked" else (text, STYLES[kind])
            for text, kind in zip(self.texts, self.kinds, strict=True)
        ]
        count = Text(f"forward {self.forwards}", style="dim")
        return Group(Text(self.prompt, style="bold"), Padding(Text.assemble(*tokens), (0, 0, 0, 2)), count)


def page_of(title: str, answers: Sequence[DenoisedText]) -> RenderableType:
    """Several answers under each other, and what the colours mean."""
    legend = Text()
    for sample, name, style in (
        ("token", "unmasked by the last forward", "unmasked"),
        ("token", "of an accepted draft", "drafted"),
        (MASK, "masked", "masked"),
    ):
        legend.append(sample, STYLES[style]).append(f" {name}   ")
    return Group(Text(title, style="bold underline"), *answers, legend)


@contextmanager
def shown(console: Console, title: str, prompts: Sequence[str]) -> Iterator[Show]:
    """Draw answers while they are denoised, and wipe them in the end; what is yielded is told of the events."""
    if not console.is_terminal or console.is_dumb_terminal:
        kind = "a terminal that draws nothing anew (TERM)" if console.is_terminal else "no terminal"
        console.print(f"--live draws nothing here: the output is {kind}")
    answers = [DenoisedText(prompt) for prompt in prompts]
    page = page_of(title, answers)
    with Live(page, console=console, auto_refresh=False, vertical_overflow="crop", transient=True) as live:

        def show(prompt: int, event: StepEvent) -> None:
            answers[prompt].take(event)
            live.refresh()

        yield show


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Say what is done meanwhile, and draw no answers."""
    with console.status(what):
        yield


def answer_here(
    llm: "LLM", prompts: Sequence[str], params: "SamplingParams", show: Show | None
) -> "list[RequestOutput]":
    """Answer all prompts as one batch, and tell of every forward.

    A prompt is a user's message; where the tokenizer has no chat template, it is text to go on from.

    Args:
        llm: an engine in this process, without other requests.
    """
    from vllm.sampling_params import RequestOutputKind

    tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
    streamed = params.clone()
    streamed.output_kind = RequestOutputKind.CUMULATIVE
    if show is not None:
        streamed.extra_args = {**(params.extra_args or {}), "dllm_step_events": True}
    describe = StreamedEvents(tokenizer)
    for number, prompt in enumerate(prompts):
        if tokenizer.chat_template:
            message = {"role": "user", "content": prompt}
            prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        token_ids = tokenizer.encode(prompt, add_special_tokens=not tokenizer.chat_template)
        engine.add_request(str(number), {"prompt_token_ids": token_ids}, streamed.clone())
    last: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        began = time.monotonic()
        outputs = engine.step()
        for output in outputs:
            number = int(output.request_id)
            last[number] = output
            if show is not None and (event := step_event(output)) is not None:
                show(number, describe.with_texts(event))
        if show is not None and outputs:
            time.sleep(max(0.0, SECONDS_PER_FRAME - (time.monotonic() - began)))
    return [last[number] for number in range(len(prompts))]


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    tokens: int
    stats: RequestStats


def answer_there(
    url: str, prompts: Sequence[str], max_tokens: int, options: dict[str, Any], show: Show | None
) -> list[Answer]:
    """Send all prompts at once to a server, as chats, and tell of every forward.

    Args:
        url: of the server, with or without ``/v1``. A server with ``--api-key`` gets the key in ``OPENAI_API_KEY``.
        options: request options, with their prefix.
        show: None: ask for no step events.

    Raises:
        typer.BadParameter: the server cannot be reached, refuses the requests, or is not one with this plugin.
    """
    import openai

    key = os.environ.get("OPENAI_API_KEY", "none")

    async def answers() -> list[Answer]:
        async with openai.AsyncOpenAI(base_url=f"{url.rstrip('/').removesuffix('/v1')}/v1", api_key=key) as client:
            model = await _model_of(client)
            tasks = (
                _streamed(client, model, number, prompt, max_tokens, options, show)
                for number, prompt in enumerate(prompts)
            )
            return [*await asyncio.gather(*tasks)]

    try:
        return asyncio.run(answers())
    except openai.BadRequestError as error:
        raise typer.BadParameter(f"{url} refuses the requests: {error}") from error
    except (openai.OpenAIError, ValueError) as error:
        raise typer.BadParameter(f"{url}: {error}", param_hint="--url") from error


async def _model_of(client: "AsyncOpenAI") -> str:
    """Name of the first model that a server lists.

    Raises:
        ValueError: it lists none.
    """
    try:
        return (await client.models.list()).data[0].id
    except (AttributeError, IndexError, TypeError):
        # What a web page, or JSON of another kind, comes to.
        raise ValueError("the server lists no model at /v1/models") from None


async def _streamed(
    client: "AsyncOpenAI",
    model: str,
    number: int,
    prompt: str,
    max_tokens: int,
    options: dict[str, Any],
    show: Show | None,
) -> Answer:
    events = {} if show is None else {"dllm_step_events": True}
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0.0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"vllm_xargs": {**options, **events}},
    )
    text, tokens, metrics = "", 0, None
    async for chunk in stream:
        extra = chunk.model_extra or {}
        for choice in chunk.choices:
            # A server with a reasoning parser gives what is before the answer a field of its own.
            text += ((choice.delta.model_extra or {}).get("reasoning") or "") + (choice.delta.content or "")
        metrics = extra.get("metrics") or metrics
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        if show is not None and KEY in extra:
            show(number, StepEvent.of_record(extra[KEY]))
            await asyncio.sleep(SECONDS_PER_FRAME)
    return Answer(text, tokens, response_stats(metrics))


def answers_of(outputs: "Sequence[RequestOutput]") -> list[Answer]:
    """Answers of an engine in this process."""
    return [
        Answer(output.outputs[0].text, len(output.outputs[0].token_ids), request_stats(output)) for output in outputs
    ]
