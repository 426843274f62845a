"""Hostile bodies to the endpoints of a running server: each is answered or refused, and nobody else notices."""

from collections import Counter
from typing import Any

import fuzz
import openai
import pytest
from fuzz_bodies import CHAT, COMPLETIONS, FIELDS, Body, draw_bodies, encoded, kinds, valid_fields

from tests.server.ask import completion
from tests.server.server import MODEL, Server

pytestmark = pytest.mark.slow

NUM_BODIES = 400
SEED = 5


@pytest.fixture(scope="module")
def bodies() -> list[Body]:
    return list(draw_bodies(MODEL, NUM_BODIES, SEED))


def test_bodies_are_the_same_for_a_seed_and_try_every_field(bodies: list[Body]) -> None:
    again = draw_bodies(MODEL, NUM_BODIES, SEED)
    assert [body.content for body in bodies] == [body.content for body in again]
    assert [body.content for body in draw_bodies(MODEL, NUM_BODIES, SEED + 1)] != [body.content for body in bodies]
    tried = kinds(bodies)
    assert len({*FIELDS[COMPLETIONS], *FIELDS[CHAT]} - set(tried)) < 10
    assert tried["vllm_xargs"] > NUM_BODIES // 4
    assert {"no object", "seed", "prompt", "messages"} <= set(tried)


def test_hostile_bodies_are_answered_or_refused_and_nothing_is_left_behind(server: Server, bodies: list[Body]) -> None:
    findings = fuzz.attack(server, bodies)
    assert findings.clean, fuzz.explained(findings, server)
    assert findings.statuses.total() == len(bodies)
    by_status: Counter[int | None] = Counter()
    for (_, status), count in findings.statuses.items():
        by_status[status] += count
    # Of both kinds enough for the run to mean something.
    assert by_status[200] > NUM_BODIES // 10
    assert by_status[400] > NUM_BODIES // 4


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


@pytest.mark.parametrize(("path", "fields", "named"), NEAR, ids=str)
def test_what_would_harm_the_engine_is_refused_by_name(
    server: Server, client: openai.OpenAI, path: str, fields: dict[str, Any], named: str
) -> None:
    reply = fuzz.send(server, Body(path, encoded(valid_fields(path, MODEL) | fields)))
    assert (reply.status, reply.fault) == (400, None), reply.text
    assert named in reply.text
    answer = client.completions.create(**completion("Two and three", max_tokens=3))
    assert len(answer.choices[0].token_ids) == 3  # type: ignore[attr-defined]


def reply_of(status: int, content: bytes, content_type: str = "application/json") -> str | None:
    """What is wrong with a reply."""
    return fuzz.judge(status, content, content_type).fault


def test_a_reply_is_judged_by_status_form_and_end() -> None:
    stream = "text/event-stream; charset=utf-8"
    error = b'{"error": {"message": "no", "code": 400}}'
    assert reply_of(200, b"{}") is reply_of(400, error) is reply_of(422, b'{"detail": "no"}') is None
    assert reply_of(500, error) == "status 500"
    assert reply_of(302, b"{}") == "status 302"
    assert reply_of(200, b'{"choices": [') == "no JSON"
    assert reply_of(400, b"{}") == "an error without a message"
    assert reply_of(200, b'data: {"a": 1}\n\ndata: [DONE]\n\n', stream) is None
    assert reply_of(200, b'data: {"a": 1}\n\n', stream) == "a stream without an end"
    assert reply_of(200, b"", stream) == "a stream without an end"
    assert reply_of(200, b"data: " + error + b"\n\ndata: [DONE]\n\n", stream) is None
    assert reply_of(200, b'data: {"error": {"code": 500}}\n\ndata: [DONE]\n\n', stream) == "status 500 in a stream"
    assert reply_of(200, b"data: {\n\ndata: [DONE]\n\n", stream) == "a chunk that is no JSON"


def test_findings_are_not_clean_with_any_fault() -> None:
    body, bad = Body(COMPLETIONS, b"{}"), fuzz.Reply(500, "status 500", "")
    assert fuzz.Findings().clean
    for wrong in ({"faults": [(body, bad)]}, {"changed": ["x"]}, {"held": {"a": 1.0}}, {"died": True}):
        findings = fuzz.Findings(**wrong)
        assert not findings.clean
        assert fuzz.explained(findings)
