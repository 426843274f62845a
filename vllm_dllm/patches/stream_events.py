"""A model may send events of its own in a request's stream (``patches/020-diffusion-stream-events.diff``).

vLLM's streams tell of tokens that are final. A diffusion model also has a text between two of its blocks' ends: an
event is a chunk without choices, as the one that reports the usage.
"""

import asyncio
import functools
import inspect
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import anyio

from vllm_dllm.patches.original import of_vllm

EVENTS = "diffusion_stream_events"
"""Of a model's configuration: takes the ``vllm_xargs`` of a request and the tokenizer, and returns a function that
gives the event of a ``RequestOutput``, or None, for the number of its prompt in the request. It returns None itself
where the request wants no events."""

MOST_WAITING = 16
"""Chunks that wait for a slow client. Beyond, vLLM merges the outputs of the request."""


def apply() -> bool:
    """Change the streams of chats and of completions, and what is measured; False where vLLM has the change."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.output_processor import OutputProcessor

    chat = of_vllm(OpenAIServingChat, "chat_completion_stream_generator", ("self", "request", "result_generator"))
    completion = of_vllm(
        OpenAIServingCompletion, "completion_stream_generator", ("self", "request", "engine_inputs", "result_generator")
    )
    measure = of_vllm(OutputProcessor, "_update_stats_from_output", ("self", "req_state", "engine_core_output"))
    if hasattr(inspect.getmodule(OpenAIServingChat), "with_stream_events"):
        return False
    OutputProcessor._update_stats_from_output = without_events(measure)
    OpenAIServingChat.chat_completion_stream_generator = with_stream_events(chat)
    OpenAIServingCompletion.completion_stream_generator = with_stream_events(completion)
    return True


def without_events(measure: Callable[..., None]) -> Callable[..., None]:
    """A method that measures outputs, and leaves out those that have an event and nothing else.

    vLLM itself sends no output without tokens before a request ends.
    """

    @functools.wraps(measure)
    def measure_tokens(self: Any, req_state: Any, engine_core_output: Any, *args: Any, **kwargs: Any) -> None:
        output = engine_core_output
        if not output.new_token_ids and output.finish_reason is None and output.pooling_output is None:
            return
        if output.prefill_stats is not None:
            # The first output with tokens. vLLM takes an event before it for the end of the prefill.
            req_state.is_prefilling = True
        measure(self, req_state, output, *args, **kwargs)

    return measure_tokens


def with_stream_events(stream: Callable[..., Any]) -> Callable[..., AsyncIterator[str]]:
    """A method that streams a response, with the events of the model between its chunks."""
    signature = inspect.signature(stream)

    @functools.wraps(stream)
    def stream_with_events(self: Any, request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        make_events = getattr(self.model_config.hf_config, EVENTS, None)
        if hasattr(self, "message_stream_converter"):
            # The Messages API takes a chunk without choices for the end of the message.
            make_events = None
        given = signature.bind(self, request, *args, **kwargs).arguments if make_events is not None else {}
        event_of = make_events(request.vllm_xargs, given["tokenizer"]) if make_events is not None else None
        if event_of is None:
            return stream(self, request, *args, **kwargs)
        head = {
            "id": given["request_id"],
            "object": "chat.completion.chunk" if hasattr(request, "messages") else "text_completion",
            "created": int(time.time()),
            "model": given["model_name"],
            "choices": [],
        }

        def chunk_of(output: Any, prompt: int) -> str | None:
            event = event_of(output, prompt)
            return None if event is None else f"data: {json.dumps({**head, **event}, ensure_ascii=False)}\n\n"

        return _joined(
            lambda results: stream(**{**given, "result_generator": results}), given["result_generator"], chunk_of
        )

    return stream_with_events


async def _joined(
    stream: Callable[[AsyncIterator[Any]], AsyncIterator[str]],
    results: AsyncIterator[Any],
    chunk_of: Callable[[Any, int], str | None],
) -> AsyncGenerator[str, None]:
    """The chunks of ``stream(results)``, with ``chunk_of`` each result before them.

    ``stream`` gets no result that has an event and nothing else.
    """
    chunks, joined = anyio.create_memory_object_stream[str](MOST_WAITING)

    async def without_events() -> AsyncGenerator[Any, None]:
        async for result in results:
            # Completions have several prompts, and their results the number of the prompt.
            prompt, output = result if isinstance(result, tuple) else (0, result)
            chunk = chunk_of(output, prompt)
            if chunk is not None:
                await chunks.send(chunk)
            if chunk is None or any(each.token_ids or each.finish_reason for each in output.outputs):
                yield result

    async def run() -> None:
        with chunks:
            async for chunk in stream(without_events()):
                await chunks.send(chunk)

    running = asyncio.create_task(run())
    try:
        async for chunk in joined:
            yield chunk
        await running
    finally:
        # Also where the client has gone, which aborts the request.
        joined.close()
        running.cancel()
