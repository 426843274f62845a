"""Step events in the streams of a server, and ``vllm-dllm demo`` as their reader."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from vllm_dllm import StepEvent, response_stats
from vllm_dllm.commands import cli
from vllm_dllm.observe.step_events import KEY

from .ask import CODE, QUESTION, TOKENS, chat, completion
from .server import MODEL, Server

pytestmark = pytest.mark.slow


TRIES = 20
"""Streams that are asked for until one has all events."""


def events_of(chunks: list[Any]) -> list[StepEvent]:
    return [StepEvent.of_record(chunk.model_extra[KEY]) for chunk in chunks if KEY in (chunk.model_extra or {})]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def ids_of(choice: Any) -> list[int]:
    return (choice.model_extra or {}).get("token_ids") or []


def answer_of(chunks: list[Any]) -> tuple[str, list[int], list[Any], list[str]]:
    """Text, tokens, log-probabilities and finish reason. A server that is busy sends two steps' tokens in one chunk."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return (
        text_of(chunks),
        [token for choice in choices for token in ids_of(choice)],
        [token for choice in choices if choice.logprobs is not None for token in choice.logprobs.content],
        [choice.finish_reason for choice in choices if choice.finish_reason is not None],
    )


def written(events: list[StepEvent]) -> list[int | None]:
    """The tokens of an answer as its events tell them; None where none of them does."""
    tokens: list[int | None] = []
    for event in events:
        # A busy server merges outputs, and the client may get no event of a whole block.
        tokens += [None] * (event.start - len(tokens))
        tokens[event.start :] = event.tokens
    return tokens


@pytest.fixture(scope="module")
def streamed(client: openai.OpenAI) -> dict[bool, list[Any]]:
    """The chunks of a chat, with events and without. No two outputs were merged, which a busy server does."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1}

    def ask(wanted: bool) -> list[Any]:
        return [*client.chat.completions.create(**chat(QUESTION, dllm_step_events=wanted, **options))]

    for _ in range(TRIES):
        chunks = ask(True)
        if len(events_of(chunks)) == response_stats(chunks[-1].model_extra["metrics"]).nfe:
            return {True: chunks, False: ask(False)}
    pytest.fail(f"none of {TRIES} streams has an event of every forward")


def test_a_stream_with_events_is_the_stream_without_them_and_the_events(streamed: dict[bool, list[Any]]) -> None:
    others = [chunk for chunk in streamed[True] if KEY not in (chunk.model_extra or {})]
    assert len(events_of(streamed[True])) + len(others) == len(streamed[True])
    assert not events_of(streamed[False])
    assert answer_of(others) == answer_of(streamed[False])
    assert len(answer_of(others)[2]) == TOKENS
    assert others[-1].usage == streamed[False][-1].usage


def test_there_is_an_event_of_every_forward_before_the_text_that_it_ends(streamed: dict[bool, list[Any]]) -> None:
    chunks = streamed[True]
    events = events_of(chunks)
    assert [event.forward for event in events] == list(range(response_stats(chunks[-1].model_extra["metrics"]).nfe))
    tokens = [token for chunk in chunks for choice in chunk.choices for token in ids_of(choice)]
    assert written(events)[: len(tokens)] == tokens
    for event in events:
        assert event.texts is not None
        assert [text == "" for text, token in zip(event.texts, event.tokens, strict=True) if token is None] == [
            True
        ] * event.tokens.count(None)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    # What a client has read of the text is in the events before.
    known, read = "", ""
    for chunk in chunks:
        if KEY in (chunk.model_extra or {}):
            event = StepEvent.of_record(chunk.model_extra[KEY])
            assert event.texts is not None
            known = known[: len(read)] + "".join(event.texts)
        read += text_of([chunk])
        assert known.startswith(read)


def test_completions_of_several_prompts_say_whose_event_it_is(client: openai.OpenAI) -> None:
    prompts = [CODE, CODE + "    "]
    chunks = [*client.completions.create(**completion(prompts, stream=True, dllm_step_events=True))]  # type: ignore[arg-type]
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    for index in range(2):
        tokens = [
            token for chunk in chunks for choice in chunk.choices if choice.index == index for token in ids_of(choice)
        ]
        assert len(tokens) == TOKENS
        told = written([event for event in events_of(chunks) if event.index == index])
        assert any(token is not None for token in told)
        assert all(mine in (None, token) for mine, token in zip(told, tokens, strict=False))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, "goes with a stream"), ({"stream": True, "n": 2, "temperature": 1}, "goes with n=1, not n=2")],
    ids=["whole", "several answers"],
)
def test_requests_that_could_not_read_events_are_refused(
    client: openai.OpenAI, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.APIError, match=reason):
        [*client.chat.completions.create(**chat(QUESTION, dllm_step_events=True, **fields))]


def test_a_client_that_leaves_ends_its_request(client: openai.OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(**chat(QUESTION, stream=True, dllm_step_events=True, max_tokens=400))
    next(iter(stream))
    stream.close()
    server.wait_for_metric("vllm:num_requests_running", 0)


def test_other_endpoints_stream_as_without_events(client: openai.OpenAI) -> None:
    def text(**xargs: Any) -> str:
        # Of how many deltas depends on the client: vLLM joins outputs that nobody has taken yet.
        body = {"vllm_xargs": xargs}
        stream = client.responses.create(
            model=MODEL, input=QUESTION, temperature=0, max_output_tokens=TOKENS, stream=True, extra_body=body
        )
        return "".join(event.delta for event in stream if event.type == "response.output_text.delta")

    assert text(dllm_step_events=True) == text(dllm_policy="threshold")


def test_a_streamed_message_is_as_without_events(server: Server) -> None:
    def events(**xargs: Any) -> list[Any]:
        message = {"role": "user", "content": QUESTION}
        body = {"model": MODEL, "messages": [message], "max_tokens": TOKENS, "temperature": 0, "stream": True}
        lines = httpx.post(f"{server.address}/v1/messages", json={**body, "vllm_xargs": xargs}).text.splitlines()
        found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        events: list[Any] = []
        for event in found[1:]:  # The first has an id.
            if event["type"] == "content_block_delta" and events[-1]["type"] == "content_block_delta":
                # How many deltas a text has depends on the client: vLLM joins outputs that nobody has taken yet.
                events[-1]["delta"]["text"] += event["delta"]["text"]
            else:
                events.append(event)
        assert found[0]["type"] == "message_start"
        return events

    assert events(dllm_step_events=True) == events(dllm_policy="threshold")
    assert events()[-1] == {"type": "message_stop"}


@pytest.mark.parametrize("live", [[], ["--live"]], ids=["table", "live"])
def test_the_demonstration_asks_a_server(server: Server, live: list[str]) -> None:
    result = CliRunner(env={"COLUMNS": "110"}).invoke(
        cli.app, ["demo", "--url", server.address, "--max-tokens", "48", *live]
    )
    assert result.exit_code == 0, result.output
    rows = {
        name: [int(number) for number in numbers]
        for name, *numbers in re.findall(r"│ (\S.*?\S) +│ +(\d+) │ +(\d+) │", result.output)
    }
    assert rows["threshold 0.9"][1] < rows["static, k=1"][1]
    assert ("tokens/s" in result.output) != bool(live)
    assert ("the output is no terminal" in result.output) == bool(live)


def test_what_a_server_refuses_is_not_blamed_on_its_address(server: Server) -> None:
    result = CliRunner(env={"COLUMNS": "110"}).invoke(
        cli.app, ["demo", "--url", server.address, "--verify", "linear_spec", "--max-tokens", "8"]
    )
    assert result.exit_code == 2
    assert "refuses the requests" in result.output
    assert "--url" not in result.output
