"""Hostile requests: bodies for the OpenAI endpoints, each one or several steps from a valid one.

A body is a valid request with some of its fields replaced, by values that are wrong in type, in range or in form, or
that are right and rarely seen; now and then its JSON is broken too. Hypothesis draws them, from a seed.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from vllm_dllm.methods import POLICY_NAMES, VERIFIER_NAMES
from vllm_dllm.options.schema import DecodingOptions, DllmConfig

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
ENDPOINTS = (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE)

MOST_TOKENS = 24
"""Tokens of most answers: what is tried is the way in, not the model."""


@dataclass(frozen=True)
class Body:
    """A request as it is sent.

    Attributes:
        content: bytes that need not be JSON.
        fields: the JSON object that they are, if they are one; for finding the field that does it.
    """

    path: str
    content: bytes
    content_type: str = "application/json"
    fields: dict[str, Any] | None = None


NASTY_INTEGERS = [0, -1, 1, 2, 7, 128, 511, 512, 513, 10**6, 2**31 - 1, 2**31, 2**32, 2**53 + 1]
NASTY_INTEGERS += [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31) - 1, -(2**63), -(2**63) - 1, 10**30]
NASTY_FLOATS = [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-320, -0.0, 0.5, 1.0 + 1e-9, 2.5]
NASTY_TEXTS = [
    "",
    " ",
    "auto",
    "nan",
    "1e999",
    "0x10",
    "null",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "é" * 3,
    "\u202etxt.exe",
    "🏳️\u200d🌈",
    "../../../etc/passwd",
    "/tmp/graph.json",
    "file:///etc/passwd",
    "__import__('os').abort()",
    "{{ 7 * 7 }}",
    "{% for x in range(10**9) %}{% endfor %}",
    "gASVJQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAh0cnVlICMgIJSFlFKULg==",
    "<|MASK|>",
    "<|endoftext|>",
    "<|im_end|>",
    "a" * 70_000,
]

integers = st.one_of(st.sampled_from(NASTY_INTEGERS), st.integers())
floats = st.one_of(st.sampled_from(NASTY_FLOATS), st.floats())
texts = st.one_of(st.sampled_from(NASTY_TEXTS), st.text(max_size=12))
scalars = st.one_of(st.none(), st.booleans(), integers, floats, texts)
names = texts.map(lambda text: text[:50])
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)
tokens = st.one_of(st.integers(0, 511), integers)
token_lists = st.one_of(st.lists(tokens, max_size=6), st.sampled_from([[511], [510], list(range(600)), [5] * 2000]))


def or_anything(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A value of the right kind for the most part."""
    return st.one_of(good, good, good, anything)


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "policy": st.sampled_from(POLICY_NAMES),
    "verify": st.sampled_from(VERIFIER_NAMES),
    "match": st.sampled_from(["exact", "subset"]),
    "drafts": st.one_of(st.integers(0, 9), st.just("auto")),
    "eos_early_stop": st.sampled_from([0, 1]),
    "threshold": st.floats(0, 1),
    "relaxed_threshold": st.floats(0, 1),
    "edit_threshold": st.floats(0, 1),
    "remask": st.floats(0, 1),
    "entropy_bound": st.floats(0, 1e6),
    "factor": st.floats(0, 1e6),
    "alg_temp": st.floats(0, 1e6),
    "cfg_scale": st.floats(0, 1e3),
}
"""Values that options may have, where they are not small integers."""

assert set(OPTIONS) <= set(DecodingOptions.model_fields)

FOREIGN = ["diffusion_max_steps", "diffusion_seed_canvas", "kv_transfer_params", "ec_transfer_params", "other", ""]
FOREIGN += ["dllm_", "dllm_self", "dllm___class__", "dllm_model_config", "DLLM_POLICY", "dllm_\ud800"]
FOREIGN += [f"dllm_{name}" for name in DllmConfig.model_fields if name not in DecodingOptions.model_fields]
"""Keys of ``vllm_xargs`` that are none of ours, or ours but not of a request."""


def _option(name: str) -> st.SearchStrategy[Any]:
    good = OPTIONS.get(name, st.integers(0, 9))
    return st.one_of(good, good, good, scalars, st.lists(scalars, max_size=2))


xargs = st.one_of(
    st.fixed_dictionaries({}, optional={f"dllm_{name}": _option(name) for name in DecodingOptions.model_fields}),
    # Two or three options, which is what a request has.
    st.lists(st.sampled_from(sorted(DecodingOptions.model_fields)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({f"dllm_{name}": OPTIONS.get(name, st.integers(0, 9)) for name in names})
    ),
    st.dictionaries(st.sampled_from(FOREIGN), scalars, max_size=2),
    anything,
)

formats = st.sampled_from(
    [{"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}, {"type": "structural_tag"}, {"type": 7}]
)
PARAMETERS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": or_anything(floats),
    "top_p": or_anything(floats),
    "min_p": or_anything(floats),
    "top_k": or_anything(integers),
    "seed": or_anything(integers),
    "max_tokens": or_anything(integers),
    "min_tokens": or_anything(integers),
    "n": or_anything(st.one_of(st.integers(-1, 4), st.sampled_from([16385, 2**31, 2**63, 2**70]))),
    "stop": or_anything(st.one_of(texts, st.lists(texts, max_size=5))),
    "stop_token_ids": or_anything(token_lists),
    "bad_words": or_anything(st.lists(texts, max_size=4)),
    "allowed_token_ids": or_anything(token_lists),
    "logit_bias": or_anything(st.dictionaries(st.one_of(st.integers(0, 511).map(str), texts), floats, max_size=4)),
    "presence_penalty": or_anything(floats),
    "frequency_penalty": or_anything(floats),
    "repetition_penalty": or_anything(floats),
    "logprobs": or_anything(st.one_of(integers, st.booleans())),
    "prompt_logprobs": or_anything(integers),
    "logprob_token_ids": or_anything(token_lists),
    "echo": or_anything(st.booleans()),
    "ignore_eos": or_anything(st.booleans()),
    "stream": or_anything(st.booleans()),
    "stream_options": or_anything(st.fixed_dictionaries({"include_usage": st.booleans()})),
    "stream_interval": or_anything(integers),
    "include_stop_str_in_output": or_anything(st.booleans()),
    "skip_special_tokens": or_anything(st.booleans()),
    "spaces_between_special_tokens": or_anything(st.booleans()),
    "truncate_prompt_tokens": or_anything(integers),
    "use_beam_search": or_anything(st.booleans()),
    "length_penalty": or_anything(floats),
    "response_format": or_anything(formats),
    "structured_outputs": or_anything(st.fixed_dictionaries({"regex": texts})),
    "priority": or_anything(integers),
    "request_id": or_anything(texts),
    "session_id": or_anything(texts),
    "cache_salt": or_anything(texts),
    "user": or_anything(texts),
    "kv_transfer_params": or_anything(
        st.fixed_dictionaries(
            {"do_remote_prefill": st.booleans(), "do_remote_decode": st.booleans()},
            optional={"remote_prefill_cached_tokens": integers, "remote_block_ids": anything},
        )
    ),
    "ec_transfer_params": or_anything(st.dictionaries(names, anything, max_size=2)),
    "repetition_detection": or_anything(
        st.fixed_dictionaries(
            {"max_pattern_size": integers, "min_count": integers}, optional={"min_pattern_size": integers}
        )
    ),
    "thinking_token_budget": or_anything(integers),
    "return_token_ids": or_anything(st.booleans()),
    "return_tokens_as_token_ids": or_anything(st.booleans()),
    "routed_experts_prompt_start": or_anything(integers),
    "watermarking": or_anything(st.booleans()),
    "model": or_anything(texts),
    "vllm_xargs": xargs,
}
"""Fields that both endpoints have."""

messages = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": texts},
            optional={"name": texts, "tool_calls": anything},
        ),
        st.fixed_dictionaries(
            {
                "role": st.just("user"),
                "content": st.lists(
                    st.one_of(
                        st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
                        st.fixed_dictionaries(
                            {"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": texts})}
                        ),
                        anything,
                    ),
                    max_size=2,
                ),
            }
        ),
        anything,
    ),
    max_size=3,
)
tools = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": texts, "parameters": anything})}
    ),
    max_size=2,
)

FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    COMPLETIONS: {
        **PARAMETERS,
        "prompt": st.one_of(texts, token_lists, st.lists(st.one_of(token_lists, texts), max_size=3), anything),
        "prompt_embeds": or_anything(texts),
        "suffix": or_anything(texts),
        "add_special_tokens": or_anything(st.booleans()),
    },
    CHAT: {
        **PARAMETERS,
        "messages": or_anything(messages),
        "max_completion_tokens": or_anything(integers),
        "top_logprobs": or_anything(integers),
        "tools": or_anything(tools),
        "tool_choice": or_anything(st.sampled_from(["none", "auto", "required"])),
        "parallel_tool_calls": or_anything(st.booleans()),
        "reasoning_effort": or_anything(st.sampled_from(["none", "low", "high"])),
        "add_generation_prompt": or_anything(st.booleans()),
        "continue_final_message": or_anything(st.booleans()),
        "chat_template": or_anything(texts),
        "chat_template_kwargs": or_anything(
            st.dictionaries(
                st.sampled_from(["messages", "tokenize", "add_generation_prompt", "tools", "x"]),
                scalars,
            )
        ),
        "documents": or_anything(st.lists(st.dictionaries(names, texts, max_size=1), max_size=2)),
        "mm_processor_kwargs": or_anything(st.dictionaries(names, scalars, max_size=1)),
        "media_io_kwargs": anything,
    },
    TOKENIZE: {
        "prompt": or_anything(texts),
        "messages": or_anything(messages),
        "model": or_anything(texts),
        "add_special_tokens": or_anything(st.booleans()),
        "return_token_strs": or_anything(st.booleans()),
    },
    DETOKENIZE: {"tokens": or_anything(token_lists), "model": or_anything(texts)},
}

WEIGHTED_ENDPOINTS = (COMPLETIONS,) * 10 + (CHAT,) * 8 + (TOKENIZE, DETOKENIZE)


def valid_fields(path: str, model: str) -> dict[str, Any]:
    """A request that is answered."""
    common = {"model": model, "max_tokens": MOST_TOKENS, "temperature": 0}
    fields: dict[str, dict[str, Any]] = {
        COMPLETIONS: {**common, "prompt": "Two and three"},
        CHAT: {**common, "messages": [{"role": "user", "content": "What is 2 + 3?"}]},
        TOKENIZE: {"model": model, "prompt": "Two and three"},
        DETOKENIZE: {"model": model, "tokens": [20, 30]},
    }
    return fields[path]


def encoded(fields: Any) -> bytes:
    """JSON as Python writes it: with ``NaN`` and ``Infinity``, surrogates escaped."""
    return json.dumps(fields).encode()


@st.composite
def object_bodies(draw: st.DrawFn, model: str) -> Body:
    """Bodies that are JSON objects."""
    path = draw(st.sampled_from(WEIGHTED_ENDPOINTS))
    fields = valid_fields(path, model)
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS[path])), max_size=4, unique=True)):
        fields[name] = draw(FIELDS[path][name])
    if "vllm_xargs" in FIELDS[path] and draw(st.booleans()):
        fields["vllm_xargs"] = draw(xargs)
    if draw(st.integers(0, 9)) == 0:
        del fields[draw(st.sampled_from(sorted(fields)))]
    return Body(path, encoded(fields), fields=fields)


BROKEN = [b"", b"null", b"[]", b"7", b'"text"', b"{", b"{}", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{'model': 1}", b"NaN"]
BROKEN += [b"[" * 100_000, b'{"a":' * 50_000, b'{"seed": ' + b"9" * 5000 + b"}", b"{}" * 2, b"\x00" * 64]


@st.composite
def broken_bodies(draw: st.DrawFn, model: str) -> Body:
    """Bodies whose JSON is none, or is of a form that no field of it explains."""
    path = draw(st.sampled_from(WEIGHTED_ENDPOINTS))
    content = encoded(valid_fields(path, model))
    kind = draw(st.sampled_from(["whole", "cut", "bytes", "twice", "deep", "type"]))
    content_type = "application/json"
    if kind == "whole":
        content = draw(st.sampled_from(BROKEN))
    elif kind == "cut":
        content = content[: draw(st.integers(0, len(content) - 1))]
    elif kind == "bytes":
        at = draw(st.integers(0, len(content) - 1))
        content = content[:at] + draw(st.binary(min_size=1, max_size=4)) + content[at + 1 :]
    elif kind == "twice":
        # The last of the same keys counts.
        name = draw(st.sampled_from(sorted(FIELDS[path])))
        content = content[:-1] + b", " + encoded(name) + b": " + encoded(draw(scalars)) + b"}"
    elif kind == "deep":
        name = draw(st.sampled_from(["vllm_xargs", "kv_transfer_params", "chat_template_kwargs", "messages"]))
        depth = draw(st.sampled_from([10, 200, 500, 900]))
        content = content[:-1] + b", " + encoded(name) + b': {"a": ' + b"[" * depth + b"]" * depth + b"}}"
    else:
        content_type = draw(st.sampled_from(["text/plain", "application/xml", "multipart/form-data"]))
    return Body(path, content, content_type)


def bodies(model: str) -> st.SearchStrategy[Body]:
    """Hostile bodies for a server of ``model``."""
    return st.integers(0, 11).flatmap(lambda kind: broken_bodies(model) if kind == 0 else object_bodies(model))


def draw_bodies(model: str, count: int, seed_: int) -> Sequence[Body]:
    """``count`` bodies, the same ones for the same seed."""
    drawn: list[Body] = []

    # In rounds: Hypothesis does not tire of short ones.
    while len(drawn) < count:

        @seed(seed_ + len(drawn))
        @settings(
            max_examples=min(1000, count - len(drawn)),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(bodies(model))
        def collect(body: Body) -> None:
            drawn.append(body)

        collect()
    drawn = drawn[:count]
    # Hypothesis begins with the simplest.
    random.Random(seed_).shuffle(drawn)
    return drawn


def kinds(drawn: Sequence[Body]) -> dict[str, int]:
    """How many bodies have each field, for tests of what is drawn."""
    counts: dict[str, int] = {}
    for body in drawn:
        for name in body.fields or {"no object": None}:
            counts[name] = counts.get(name, 0) + 1
    return counts
