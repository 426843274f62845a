"""Hostile requests: what schemathesis draws them from, whether a reply is one to work with, and neighbours.

The document is the server's own OpenAPI document. In it, ``vllm_xargs`` gets the schema of this project's options.
"""

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests
import schemathesis

from tests.server.server import MODEL, Server
from vllm_dllm.methods import POLICIES
from vllm_dllm.options.schema import DecodingOptions

TIMEOUT = 120.0
"""Seconds for an answer."""
COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
ENDPOINTS = (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE)
REF = "#/components/schemas/{model}"


def number(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": high}


def integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


TEXT = {"type": "string", "minLength": 1, "maxLength": 40}
TOKENS = {"type": "array", "items": integer(0, 600), "minItems": 1, "maxItems": 40}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT},
    "required": ["role", "content"],
    "additionalProperties": False,
}
FIELDS: dict[str, dict[str, Any]] = {
    "model": {"enum": [MODEL]},
    "max_tokens": integer(1, 24),
    "min_tokens": integer(0, 1),
    "n": integer(1, 3),
    "stream": {"type": "boolean"},
    "seed": integer(-(2**31), 2**62),
    "temperature": number(0, 2),
    "top_p": number(0.01, 1),
    "top_k": integer(-1, 100),
    "min_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0.5, 2),
    "stop": {"type": "array", "items": TEXT, "maxItems": 3},
    "stop_token_ids": TOKENS,
    "bad_words": {"type": "array", "items": {"enum": ["Ada", "apples", "two"]}, "maxItems": 3},
    "ignore_eos": {"type": "boolean"},
    "logprobs": {"enum": [None]},
}
"""Fields of vLLM that vary, within what vLLM allows: negative data leaves these bounds, positive data must not."""


def body_of(own: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of a body that has all fields of ``own``, and some of ``shared``."""
    required = [*own, *({"model", "max_tokens", "vllm_xargs"} & shared.keys())]
    return {"type": "object", "properties": shared | own, "required": required, "additionalProperties": False}


def options_schema() -> dict[str, Any]:
    """JSON schema of ``vllm_xargs``: for each policy the options that it reads, or any options together."""
    properties = DecodingOptions.model_json_schema(ref_template=REF)["properties"]
    sets = [
        {
            "policy": {"enum": [row.name]},
            **{name: properties[name] for name in row.options},
            "verify": properties["verify"],
        }
        for row in POLICIES
    ]
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {f"dllm_{name}": schema for name, schema in chosen.items()},
                "required": ["dllm_policy"] if chosen is not properties else [],
                "additionalProperties": False,
            }
            for chosen in (*sets, properties)
        ]
    }


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """A server's OpenAPI document, with ``ENDPOINTS`` alone and bodies of ``FIELDS`` and our options."""
    fields = FIELDS | {"vllm_xargs": options_schema()}
    model = {"model": FIELDS["model"]}
    bodies = {
        COMPLETIONS: body_of({"prompt": {"anyOf": [TEXT, TOKENS]}}, fields),
        CHAT: body_of({"messages": {"type": "array", "minItems": 1, "maxItems": 3, "items": MESSAGE}}, fields),
        TOKENIZE: body_of({"prompt": TEXT}, model | {"add_special_tokens": {"type": "boolean"}}),
        DETOKENIZE: body_of({"tokens": TOKENS}, model),
    }
    paths = {}
    for path, schema in bodies.items():
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {**document["paths"][path]["post"], "parameters": [], "requestBody": body}}
    definitions = DecodingOptions.model_json_schema(ref_template=REF).get("$defs", {})
    schemas = document["components"]["schemas"] | definitions
    return {**document, "components": {**document["components"], "schemas": schemas}, "paths": paths}


def schema_of(server: Server) -> schemathesis.BaseSchema:
    with urllib.request.urlopen(f"{server.address}/openapi.json", timeout=TIMEOUT) as response:
        return schemathesis.openapi.from_dict(narrowed(json.load(response)))


def fault_of(status: int, content: bytes, content_type: str = "application/json") -> str | None:
    """What is wrong with a reply, if anything: every request is answered or refused, in form, streams to their end."""
    if status >= 500 or not (200 <= status < 300 or status >= 400):
        return f"status {status}"
    if "text/event-stream" in content_type:
        return _fault_of_stream(content)
    try:
        answer = json.loads(content)
    except ValueError:
        return "no JSON"
    if status < 400:
        return None
    # A body whose bytes cannot be read is answered by the HTTP framework, not by vLLM.
    error = answer.get("error", {"message": answer.get("detail")}) if isinstance(answer, dict) else None
    return None if isinstance(error, dict) and error.get("message") else "an error without a message"


def _fault_of_stream(content: bytes) -> str | None:
    """A stream has sent status 200 before it knows; an error is an event of its own, and the end another."""
    events = [event.removeprefix(b"data: ") for event in content.split(b"\n\n") if event.strip()]
    if not events or events[-1] != b"[DONE]":
        return "a stream without an end"
    for event in events[:-1]:
        try:
            chunk = json.loads(event)
        except ValueError:
            return "a chunk that is no JSON"
        if isinstance(chunk, dict) and "error" in chunk:
            code = chunk["error"].get("code", 500)
            if not 400 <= code < 500:
                return f"status {code} in a stream"
    return None


def post(server: Server, path: str, content: bytes | dict[str, Any]) -> requests.Response:
    """Send a body as it is, or JSON as Python writes it: with ``NaN`` and ``Infinity``, surrogates escaped."""
    body = json.dumps(content).encode() if isinstance(content, dict) else content
    headers = {"Content-Type": "application/json"}
    return requests.post(server.address + path, data=body, headers=headers, timeout=TIMEOUT)


NEIGHBOURS: tuple[dict[str, Any], ...] = (
    {"prompt": "Two and three", "max_tokens": 24, "vllm_xargs": {"dllm_policy": "static"}},
    {"prompt": "def add(first, second):\n", "max_tokens": 40, "vllm_xargs": {"dllm_verify": "psd"}},
    {"prompt": "Ada has 12 apples.", "max_tokens": 30, "temperature": 1.0, "seed": 7},
    {"prompt": "Once upon a time", "max_tokens": 18, "vllm_xargs": {"dllm_verify": "fef", "dllm_window": 4}},
)
"""Requests whose answers must not change, whatever is sent beside them."""


def _answer(server: Server, request: dict[str, Any]) -> Any:
    reply = post(server, COMPLETIONS, {"model": MODEL, "temperature": 0, "return_token_ids": True, **request})
    return reply.json()["choices"][0]["token_ids"] if reply.status_code == 200 else reply.text


@contextmanager
def unharmed_neighbours(server: Server) -> Iterator[None]:
    """Send ``NEIGHBOURS`` again and again meanwhile.

    Raises:
        AssertionError: an answer changed, the server died, or it holds something when it is idle again.
    """
    alone = [_answer(server, request) for request in NEIGHBOURS]
    changed: list[str] = []
    done = threading.Event()

    def ask() -> None:
        while not done.wait(0.2):
            for request, expected in zip(NEIGHBOURS, alone, strict=True):
                if (got := _answer(server, request)) != expected:
                    changed.append(f"{request}: {got} instead of {expected}")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(TIMEOUT)
    assert server.is_healthy(), f"the server died; its log is {server.log}"
    assert not changed
    assert not server.held()
