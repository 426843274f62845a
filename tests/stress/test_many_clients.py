"""Clients do not notice each other, and those that leave leave nothing behind."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from tests.server.ask import completion
from tests.server.server import MAX_NUM_SEQS, Server

pytestmark = pytest.mark.slow

OPTIONS: tuple[dict[str, Any], ...] = (
    {"dllm_policy": "threshold", "dllm_threshold": 0.5},
    {"dllm_policy": "threshold", "dllm_threshold": 0.05},
    {"dllm_policy": "static", "dllm_tokens_per_step": 2},
    {"dllm_policy": "static", "dllm_denoising_steps": 3},
    {"dllm_policy": "sequential"},
    {"dllm_policy": "entropy", "dllm_entropy_bound": 2.0},
    {},
)
LEAVING = 16
"""Clients that leave in the midst of an answer."""
LONG = 400
"""Tokens of an answer that is still going on when its client has read the beginning."""
DEADLINE = 30.0
"""Seconds until some of them have pages."""


def request(number: int) -> dict[str, Any]:
    """A request that differs from the others in prompt, length of prompt and answer, and options."""
    prompt = f"Ada has {number} apples. " * (1 + number % 5) + "How many?"[: 1 + number % 9]
    return completion(prompt, max_tokens=5 + 3 * number % 40, **OPTIONS[number % len(OPTIONS)])


async def answers(server: Server, requests: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Tokens of the answers to requests that are sent at once."""
    async with server.connect_async() as client:
        replies = await asyncio.gather(*(client.completions.create(**each) for each in requests))
    return [reply.choices[0].token_ids for reply in replies]


def test_thirty_two_clients_get_the_answers_they_get_alone(server: Server, client: openai.OpenAI) -> None:
    requests = [request(number) for number in range(MAX_NUM_SEQS)]
    together = asyncio.run(answers(server, requests))
    alone = [client.completions.create(**each).choices[0].token_ids for each in requests]
    assert together == alone


def test_more_clients_than_the_server_decodes_at_once_wait_their_turn(server: Server) -> None:
    requests = [request(number) for number in range(2 * MAX_NUM_SEQS)]
    lengths = [len(tokens) for tokens in asyncio.run(answers(server, requests))]
    assert lengths == [each["max_tokens"] for each in requests]


def test_a_seed_draws_the_same_text_alone_and_among_eight_others(server: Server, client: openai.OpenAI) -> None:
    seeded = completion("Once upon a time", temperature=1.0, seed=42)
    others = [completion("Once upon a time", temperature=1.0, seed=seed) for seed in range(4)]
    others += [request(number) for number in range(4)]
    alone = client.completions.create(**seeded).choices[0].token_ids
    among = asyncio.run(answers(server, [*others[:4], seeded, *others[4:]]))
    assert among[4] == alone
    assert alone not in (among[:4] + among[5:])


def test_clients_that_leave_in_mid_stream_free_their_pages_and_the_server_goes_on(
    server: Server, client: openai.OpenAI
) -> None:
    server.wait_for_metric("vllm:num_requests_running", 0)
    # The share of pages that a request holds. Pages that only the prefix cache remembers count as free.
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    generated = server.metric("vllm:generation_tokens_total")

    async def first_chunk(connected: openai.AsyncOpenAI, number: int) -> openai.AsyncStream[Any]:
        stream = await connected.completions.create(
            **completion(f"Count to {number}:", max_tokens=LONG, stream=True, dllm_policy="static")
        )
        assert (await anext(stream)).choices[0].finish_reason is None
        return stream

    def wait_for_pages() -> None:
        end = time.monotonic() + DEADLINE
        while server.metric("vllm:kv_cache_usage_perc") == 0:
            assert time.monotonic() < end

    async def leave() -> int:
        """Returns how many clients there were: more come while nobody has seen that some of them have pages."""
        async with server.connect_async() as connected:
            # A busy server may take longer to tell its metrics than to answer.
            pages, clients = asyncio.create_task(asyncio.to_thread(wait_for_pages)), 0
            while clients == 0 or not pages.done():
                streams = await asyncio.gather(*(first_chunk(connected, number) for number in range(LEAVING)))
                await asyncio.wait([pages], timeout=1)
                await asyncio.gather(*(stream.close() for stream in streams))
                clients += LEAVING
            await pages
            return clients

    clients = asyncio.run(leave())
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        server.wait_for_metric(f"vllm:{gauge}", 0)
    assert server.metric("vllm:generation_tokens_total") - generated < clients * LONG
    test_thirty_two_clients_get_the_answers_they_get_alone(server, client)
    server.wait_for_metric("vllm:kv_cache_usage_perc", 0)
