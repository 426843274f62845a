"""Structured outputs and tool calls over HTTP, as clients ask for them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from . import server as servers
from .ask import QUESTION, chat, completion
from .server import FLAGS, MODEL, Server, start_warm

pytestmark = pytest.mark.slow

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in ("a", "b")},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}}
    for name in ("add", "subtract")
]
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class Answer(BaseModel):
    """An answer to a question about numbers of things."""

    number: int = Field(ge=0, le=99)
    sure: bool


@pytest.fixture(scope="module")
def structured(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that parses tool calls."""
    folder = tmp_path_factory.mktemp("structured")
    flags = {**FLAGS, "--config": str(folder / "server.yaml")}
    (folder / "server.yaml").write_text("enable-auto-tool-choice: true\ntool-call-parser: hermes\n")
    with servers.serving.serve(checkpoint, folder / "server.log", flags, start_warm) as running:
        yield running


@pytest.fixture(scope="module")
def client(structured: Server) -> Iterator[openai.OpenAI]:
    with structured.connect() as connected:
        yield connected


@pytest.fixture(scope="module")
def no_spaces(tokenizer: Tokenizer) -> dict[str, float]:
    """A bias against tokens of nothing but spaces, which vLLM's grammars of tool calls allow anywhere."""
    vocabulary = tokenizer.get_vocab()
    return {str(token): -100.0 for token in vocabulary.values() if not tokenizer.decode([token]).strip()}


def asked(**fields: Any) -> dict[str, Any]:
    return chat(QUESTION, **{"max_tokens": 96, "body": {"ignore_eos": False}, **fields})


def as_pair(text: str) -> dict[str, int]:
    pair = json.loads(text)
    assert pair.keys() == {"a", "b"}
    assert all(isinstance(value, int) and 0 <= value <= 99 for value in pair.values())
    return pair


def test_a_json_schema(client: openai.OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "pair", "schema": PARAMETERS}}
    whole = client.chat.completions.create(**asked(response_format=schema))
    assert whole.choices[0].finish_reason == "stop"
    as_pair(whole.choices[0].message.content)
    stream = client.chat.completions.create(**asked(response_format=schema, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[0-9]{2} (apples|pens)!"}, r"[0-9]{2} (apples|pens)!"),
        ({"choice": ["nineteen", "nine"]}, "nineteen|nine"),
        ({"grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
        ({"json": {"enum": [1, "two", None]}}, '1|"two"|null'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("policy", ["static", "threshold"])
def test_other_constraints(client: openai.OpenAI, constraint: dict[str, Any], pattern: str, policy: str) -> None:
    body = {"structured_outputs": constraint, "ignore_eos": False}
    for answer in (
        client.chat.completions.create(**asked(body=body, dllm_policy=policy, n=2, temperature=1.0, seed=1)),
        client.completions.create(**completion("So", body=body, dllm_policy=policy, max_tokens=96)),
    ):
        for choice in answer.choices:
            text = choice.text if hasattr(choice, "text") else choice.message.content
            assert choice.finish_reason == "stop"
            assert re.fullmatch(pattern, text)


def test_objects_of_pydantic(client: openai.OpenAI, structured: Server) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Answer, max_tokens=96, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)
    langchain = ChatOpenAI(
        base_url=f"{structured.address}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=96
    )
    assert isinstance(langchain.with_structured_output(Answer).invoke(QUESTION), Answer)


def test_the_responses_api(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "pair", "schema": PARAMETERS}}
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=96, text=form, temperature=0)
    as_pair(answer.output_text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "subtract"}}], ids=str)
def test_tool_calls(client: openai.OpenAI, choice: Any, no_spaces: dict[str, float]) -> None:
    fields = asked(tools=TOOLS, tool_choice=choice, logit_bias=no_spaces, max_tokens=160, parallel_tool_calls=False)
    answer = client.chat.completions.create(**fields)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name in (["add", "subtract"] if choice == "required" else ["subtract"])
    pair = as_pair(call.function.arguments)
    stream = client.chat.completions.create(**fields, stream=True)
    calls = [each for chunk in stream if chunk.choices for each in chunk.choices[0].delta.tool_calls or []]
    assert as_pair("".join(each.function.arguments or "" for each in calls if each.index == 0)) == pair


def test_tools_that_the_model_may_leave_alone(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asked(tools=TOOLS, tool_choice="auto"))
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    ("constraint", "options", "named"),
    [
        ({"regex": "(["}, {}, ["regex"]),
        ({"grammar": "root ::= x"}, {}, ["grammar"]),
        ({"choice": []}, {}, ["Choice", "empty"]),
        ({"json": {"type": "integer", "multipleOf": 3}}, {}, ["schema", "xgrammar"]),
        ({"regex": "a+"}, {"dllm_verify": "freedave"}, ["verify='freedave'", "structured outputs", "'none'"]),
        ({"regex": "a+"}, {"dllm_drafts": 3}, ["drafts=3", "structured outputs"]),
        ({"regex": "a+"}, {"dllm_edit_threshold": 0.5}, ["edit_threshold=0.5", "structured outputs"]),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    client: openai.OpenAI, constraint: dict[str, Any], options: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**completion("So", body={"structured_outputs": constraint}, **options))
    message = error.value.body["message"]  # type: ignore[index]
    assert [word for word in named if word not in message] == []
