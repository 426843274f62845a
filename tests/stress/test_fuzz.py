"""Hostile bodies to the endpoints of a running server: each is answered or refused, and nobody else notices."""

import os
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.profiles import PROFILE
from tests.server.server import MODEL, Server

from .hostile import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    fault_of,
    options_schema,
    post,
    schema_of,
    unharmed_neighbours,
)

pytestmark = pytest.mark.slow

BODIES = int(os.environ.get("VLLM_DLLM_FUZZ_BODIES", 60 if PROFILE == "full" else 20))
"""Of each endpoint and kind."""
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def api(server: Server) -> schemathesis.BaseSchema:
    return schema_of(server)


def test_every_option_is_drawn_alone_and_with_its_policy() -> None:
    *policies, anything = options_schema()["anyOf"]
    assert {name for each in policies for name in each["properties"]} <= anything["properties"].keys()
    assert {"dllm_policy", "dllm_threshold", "dllm_verify", "dllm_drafts", "dllm_window"} <= anything[
        "properties"
    ].keys()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_drawn_bodies_are_answered_or_refused_and_nothing_is_left_behind(
    server: Server, api: schemathesis.BaseSchema, path: str, mode: schemathesis.GenerationMode
) -> None:
    statuses: Counter[int] = Counter()

    @settings(max_examples=BODIES, database=None, suppress_health_check=list(HealthCheck))
    @given(api[path]["POST"].as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        reply = case.call(base_url=server.address, timeout=120)
        statuses[reply.status_code] += 1
        fault = fault_of(reply.status_code, reply.content, reply.headers.get("content-type", [""])[0])
        assert fault is None, f"{fault}: {case.body!r} -> {reply.content[:500]!r}"

    with unharmed_neighbours(server):
        send()
    # Of both kinds enough for the run to mean something.
    if mode == schemathesis.GenerationMode.POSITIVE and path in (COMPLETIONS, CHAT):
        assert statuses[200] > BODIES // 10, statuses
    if mode == schemathesis.GenerationMode.NEGATIVE:
        assert sum(count for status, count in statuses.items() if status >= 400) > BODIES // 4, statuses


NEAR: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"seed": 2**63 - 1, "n": 2, "temperature": 1}, "seed"),
    (CHAT, {"seed": 2**63 - 1, "n": 2, "temperature": 1}, "seed"),
    (COMPLETIONS, {"top_k": 2**64, "temperature": 1}, "top_k"),
    (COMPLETIONS, {"stream": True, "stream_interval": 2**64}, "stream_interval"),
    (COMPLETIONS, {"stop": ["\ud800"]}, "stop"),
    (COMPLETIONS, {"repetition_detection": {"max_pattern_size": 4, "min_count": 2**64}}, "repetition_detection"),
    (COMPLETIONS, {"repetition_detection": {"max_pattern_size": 2**31, "min_count": 2}}, "repetition_detection"),
    (CHAT, {"kv_transfer_params": {"a": [[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]}}, "extra_args"),
    (COMPLETIONS, {"vllm_xargs": {"kv_transfer_params": "text"}}, "kv_transfer_params"),
    (COMPLETIONS, {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": -5}}, "prefill"),
    (COMPLETIONS, {"bad_words": ["x y " * 100]}, "bad_words"),
    (COMPLETIONS, {"vllm_xargs": {"dllm_policy": "\ud800"}}, "dllm_policy"),
    (COMPLETIONS, {"vllm_xargs": {"dllm_\ud800": 1}}, "dllm_"),
    (COMPLETIONS, {"structured_outputs": ["regex"]}, "structured_outputs"),
    (CHAT, {"structured_outputs": "regex"}, "structured_outputs"),
    (COMPLETIONS, {"request_id": "\udfff"}, "request_id"),
    (CHAT, {"session_id": "\ud800a", "stream": True}, "session_id"),
    (COMPLETIONS, {"vllm_xargs": {"dllm_draft_graph": "/etc/passwd"}}, "dllm_draft_graph"),
    (CHAT, {"vllm_xargs": {"dllm_resample_steps": 65}}, "dllm_resample_steps"),
    (COMPLETIONS, {"vllm_xargs": {"dllm_policy": "origin", "dllm_denoising_steps": 4096}}, "denoising_steps"),
]
"""Bodies that would end the engine or hold it up, or be an error of the server, if vLLM alone looked at them; and what
the refusal names."""


NO_OBJECTS = {
    "empty": b"",
    "cut off": b"{",
    "a list": b"[]",
    "null": b"null",
    "no text": b"\xff",
    "no JSON": b"{'a': 1}",
}


@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS.keys())
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_body_that_is_no_object_is_refused(server: Server, path: str, content: bytes) -> None:
    reply = post(server, path, content)
    assert 400 <= reply.status_code < 500
    assert fault_of(reply.status_code, reply.content) is None


def valid(path: str) -> dict[str, Any]:
    """A request that is answered."""
    common = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    own = {
        COMPLETIONS: {"prompt": "Two and three"},
        CHAT: {"messages": [{"role": "user", "content": "What is 2 + 3?"}]},
    }
    return common | own[path]


@pytest.mark.parametrize(("path", "fields", "named"), NEAR, ids=str)
def test_what_would_harm_the_engine_is_refused_by_name(
    server: Server, path: str, fields: dict[str, Any], named: str
) -> None:
    reply = post(server, path, valid(path) | fields)
    assert fault_of(reply.status_code, reply.content, reply.headers["content-type"]) is None, reply.text
    assert reply.status_code == 400, reply.text
    assert named in reply.text
    answer = post(server, COMPLETIONS, valid(COMPLETIONS) | {"max_tokens": 3, "return_token_ids": True})
    assert len(answer.json()["choices"][0]["token_ids"]) == 3


def test_a_reply_is_judged_by_status_form_and_end() -> None:
    stream = "text/event-stream; charset=utf-8"
    error = b'{"error": {"message": "no", "code": 400}}'
    assert fault_of(200, b"{}") is fault_of(400, error) is fault_of(422, b'{"detail": "no"}') is None
    assert fault_of(500, error) == "status 500"
    assert fault_of(302, b"{}") == "status 302"
    assert fault_of(200, b'{"choices": [') == "no JSON"
    assert fault_of(400, b"{}") == "an error without a message"
    assert fault_of(200, b'data: {"a": 1}\n\ndata: [DONE]\n\n', stream) is None
    assert fault_of(200, b'data: {"a": 1}\n\n', stream) == "a stream without an end"
    assert fault_of(200, b"", stream) == "a stream without an end"
    assert fault_of(200, b"data: " + error + b"\n\ndata: [DONE]\n\n", stream) is None
    assert fault_of(200, b'data: {"error": {"code": 500}}\n\ndata: [DONE]\n\n', stream) == "status 500 in a stream"
    assert fault_of(200, b"data: {\n\ndata: [DONE]\n\n", stream) == "a chunk that is no JSON"
