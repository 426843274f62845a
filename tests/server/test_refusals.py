"""Requests that ask for what cannot be are told so, and why; the others go on."""

from typing import Any

import openai
import pytest

from .ask import chat, completion
from .server import MAX_MODEL_LEN, MODEL

pytestmark = pytest.mark.slow

PROMPT = "Two and three"
POLICIES = ("'static'", "'threshold'", "'sequential'", "'entropy'")

OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": ({"dllm_polic": "static"}, ["dllm_polic", "static", "dllm_policy", "dllm_threshold"]),
    "unknown policy": ({"dllm_policy": "best"}, ["dllm_policy", "'best'", *POLICIES]),
    "threshold too large": ({"dllm_threshold": 2}, ["dllm_threshold", "2", "less than or equal to 1"]),
    "threshold of a wrong type": ({"dllm_threshold": "high"}, ["dllm_threshold", "'high'", "number"]),
    "no tokens per step": ({"dllm_tokens_per_step": 0}, ["dllm_tokens_per_step", "0", "greater than"]),
    "list for a number": ({"dllm_tokens_per_step": [1, 2]}, ["dllm_tokens_per_step", "[1, 2]", "integer"]),
    "token editing": ({"dllm_edit_threshold": 0.5}, ["dllm_edit_threshold", "0.5", "SDAR", "LLaDA2"]),
    "two schedules": (
        {"dllm_tokens_per_step": 1, "dllm_denoising_steps": 2},
        ["dllm_denoising_steps", "2", "tokens_per_step, denoising_steps, steps exclude each other"],
    ),
}
"""Request options that are wrong, and what the message must name: the key, the value, what is allowed."""

FIELDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "prompt logprobs": ({"body": {"prompt_logprobs": 1}}, ["prompt_logprobs", "1", "not supported"]),
    "echo with logprobs": ({"echo": True, "logprobs": 1}, ["prompt_logprobs", "echo", "not supported"]),
    "all logprobs": ({"logprobs": -1}, ["logprobs", "max allowed: 20"]),
    "drafts under a grammar": (
        {"body": {"structured_outputs": {"regex": "a+"}}, "dllm_verify": "freedave"},
        ["verify='freedave'", "structured outputs", "'none'"],
    ),
    "beam search": ({"body": {"use_beam_search": True}, "n": 2}, ["Beam search", "not supported"]),
    "negative temperature": ({"temperature": -1}, ["temperature", "-1"]),
}


def refused(call: Any, **arguments: Any) -> str:
    """Message of the status 400 that the call is answered with."""
    with pytest.raises(openai.BadRequestError) as error:
        call(**arguments)
    return error.value.body["message"]  # type: ignore[index]


@pytest.fixture(autouse=True)
def _still_serving(client: openai.OpenAI) -> Any:
    yield
    answer = client.completions.create(**completion(PROMPT, max_tokens=6, dllm_policy="static"))
    assert len(answer.choices[0].token_ids) == 6


@pytest.mark.parametrize("case", OPTIONS)
def test_a_wrong_option_is_refused_by_key_value_and_what_is_allowed(client: openai.OpenAI, case: str) -> None:
    options, named = OPTIONS[case]
    for message in (
        refused(client.completions.create, **completion(PROMPT, **options)),
        refused(client.chat.completions.create, **chat(PROMPT, **options)),
        refused(client.completions.create, **completion(PROMPT, **options, stream=True)),
        refused(client.chat.completions.create, **chat(PROMPT, **options, stream=True)),
    ):
        assert [word for word in named if word not in message] == []


@pytest.mark.parametrize("case", FIELDS)
def test_a_parameter_without_a_meaning_for_diffusion_is_refused(client: openai.OpenAI, case: str) -> None:
    fields, named = FIELDS[case]
    message = refused(client.completions.create, **completion(PROMPT, **fields))
    assert [word for word in named if word not in message] == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_option_beside_vllm_xargs_is_refused_with_the_place_where_it_belongs(
    client: openai.OpenAI, stream: bool
) -> None:
    body = {"dllm_policy": "static"}
    for message in (
        refused(client.completions.create, **completion(PROMPT, body=body, stream=stream)),
        refused(client.chat.completions.create, **chat(PROMPT, body=body, stream=stream)),
        refused(client.responses.create, model=MODEL, input=PROMPT, extra_body=body),
    ):
        assert "dllm_policy" in message
        assert "vllm_xargs" in message


UNREAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no prefix": ({"threshold": 0.5}, ["threshold=0.5", "write dllm_threshold"]),
    "another policy's": ({"dllm_policy": "static", "dllm_radius": 2}, ["radius=2", "policy='static'", "localleap"]),
    "without a verifier": ({"dllm_drafts": 2}, ["drafts=2", "verify='none'", "freedave"]),
}


@pytest.mark.parametrize("case", UNREAD)
def test_an_option_that_nobody_would_read_is_refused(client: openai.OpenAI, case: str) -> None:
    options, named = UNREAD[case]
    for message in (
        refused(client.completions.create, **completion(PROMPT, body={"vllm_xargs": options})),
        refused(client.chat.completions.create, **chat(PROMPT, body={"vllm_xargs": options})),
    ):
        assert [word for word in named if word not in message] == []


def test_options_of_another_diffusion_model_are_refused(client: openai.OpenAI) -> None:
    body = {"vllm_xargs": {"diffusion_steps": 1}}
    message = refused(client.completions.create, **completion(PROMPT, body=body))
    assert "diffusion_steps" in message
    assert "dllm_" in message


@pytest.mark.parametrize(
    ("length", "named"),
    [(MAX_MODEL_LEN, "max_tokens"), (MAX_MODEL_LEN + 1, str(MAX_MODEL_LEN)), (10_000, str(MAX_MODEL_LEN))],
)
def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(client: openai.OpenAI, length: int, named: str) -> None:
    assert named in refused(client.completions.create, **completion([20] * length))


def test_a_block_causal_model_fills_in_nothing_and_says_why(client: openai.OpenAI) -> None:
    message = refused(client.completions.create, model=MODEL, prompt="a", suffix="b", max_tokens=4)
    assert "do not see the text behind them" in message
    message = refused(client.completions.create, **completion([20, 3, 21], dllm_infill=True))
    assert "do not see the text behind them" in message
