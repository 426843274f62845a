"""The word problems with answers in words, in JSON or as a tool call, for a tiny model that has seen all three."""

import json
import random
import re
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from vllm_dllm.commands.problems import grade
from vllm_dllm.tiny.arithmetic import Form, Problem

_EQUATION = re.compile(r"(\d+) ([+*-]) (\d+) = \d+")
_TOOL_OF_SIGN = {"+": "add", "-": "subtract", "*": "multiply"}
_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>")

ANSWER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {"type": "string", "pattern": r"^[0-9]{1,2} [+*-] [0-9]{1,2} = [0-9]{1,2}$"},
            "minItems": 1,
            "maxItems": 2,
        },
        "answer": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["steps", "answer"],
    "additionalProperties": False,
}
"""JSON schema of answers in the form ``"json"``."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} two numbers.",
            "parameters": {
                "type": "object",
                "properties": {number: {"type": "integer", "minimum": 0, "maximum": 99} for number in "ab"},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    for name in _TOOL_OF_SIGN.values()
]
"""The tools of the form ``"call"``, as the chat completions API takes them."""


def in_form(problem: Problem, form: Form) -> Problem:
    """The problem with its answer in another form.

    For example, the answer ``8 + 5 = 13`` becomes ``{"steps": ["8 + 5 = 13"], "answer": 13}`` in the form ``"json"``,
    and the call ``{"name": "add", "arguments": {"a": 8, "b": 5}}`` in the form ``"call"``. A problem of two steps is
    answered with a call of the first one.

    Args:
        problem: with worked steps in its answer, as :func:`make_problems` makes it.
    """
    if form == "words":
        return problem
    steps = list(_EQUATION.finditer(problem.answer_text))
    if form == "json":
        answer = {"steps": [step.group() for step in steps], "answer": problem.final_answer}
        return problem._replace(
            question=f"{problem.question} Answer in JSON.", answer_text=json.dumps(answer), form="json"
        )
    a, sign, b = steps[0].groups()
    call = {"name": _TOOL_OF_SIGN[sign], "arguments": {"a": int(a), "b": int(b)}}
    tools = list(_TOOL_OF_SIGN.values())
    random.Random(problem.question).shuffle(tools)
    return problem._replace(
        answer_text=f"<tool_call>\n{json.dumps(call)}\n</tool_call>", form="call", tools=tuple(tools)
    )


def in_forms(problems: Sequence[Problem], forms: Sequence[Form]) -> list[Problem]:
    """The problems in the forms, one after the other."""
    return [in_form(problem, form) for problem, form in zip(problems, cycle(forms), strict=False)]


def is_right(text: str, problem: Problem) -> bool:
    """Whether a model's output has the problem's final answer or, in the form ``"call"``, is the call asked for."""
    if problem.form == "words":
        return grade(text, problem.final_answer)
    try:
        if problem.form == "json":
            return json.loads(text).get("answer") == problem.final_answer
        return _call(text) == _call(problem.answer_text)
    except (ValueError, AttributeError, KeyError, TypeError):
        return False


def _call(text: str) -> tuple[str, dict[str, int]]:
    """Name and arguments of the first call in ``text``."""
    found = _CALL.search(text)
    if found is None:
        raise ValueError("there is no call")
    call = json.loads(found.group(1))
    return call["name"], call["arguments"]
