"""Forty constraints of structured outputs, with checks of the texts by other libraries than those that made them."""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from vllm_dllm.tiny.arithmetic import Form
from vllm_dllm.tiny.forms import ANSWER_SCHEMA

Check = Callable[[str], bool]


@dataclass(frozen=True)
class Constraint:
    """What a request asks for.

    Attributes:
        field: of ``StructuredOutputsParams``.
        holds: whether a complete answer is what was asked for.
    """

    name: str
    kind: str
    field: str
    value: Any
    holds: Check


def _integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = [*properties] if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _list(items: Any, least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


WORD = {"type": "string", "maxLength": 8}
UNIT = {"enum": ["apples", "pens", "books"]}
STEP = _record(a=_integer(0, 20), op={"enum": ["+", "-"]}, b=_integer(0, 20))
TREE = {
    **_record(["value"], value=_integer(0, 9), left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
    "$defs": {"leaf": _record(value=_integer(0, 9))},
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": _integer(0, 40),
    "negative integer": _integer(-12, -3),
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "short string": WORD,
    "string of letters": {"type": "string", "pattern": "^[a-z]{2,6}$"},
    "date": {"type": "string", "format": "date"},
    "enum": UNIT,
    "enum of types": {"enum": [1, "two", None, True, 2.5]},
    "const": {"const": {"answer": 19}},
    "record": _record(answer=_integer(0, 40), unit=UNIT),
    "record with options": _record(["answer"], answer=_integer(0, 40), unit=UNIT, checked={"type": "boolean"}),
    "record of records": _record(first=_record(n=_integer(0, 9)), second=_record(n=_integer(0, 9), unit=UNIT)),
    "steps": _record(steps=_list(STEP, 1, 3), final={"type": "boolean"}),
    "list": _list(_integer(0, 9), 1, 4),
    "list of words": _list(UNIT, 2, 3),
    "tuple": {"type": "array", "prefixItems": [_integer(0, 9), UNIT], "items": False, "minItems": 2, "maxItems": 2},
    "matrix": _list(_list(_integer(0, 1), 2, 2), 2, 2),
    "anyOf": {"anyOf": [_integer(0, 99), {"type": "boolean"}]},
    "one of two records": {"anyOf": [_record(a=_integer(0, 9)), _record(b={"type": "boolean"})]},
    "$ref": TREE,
    "nullable": _record(answer={"anyOf": [_integer(0, 9), {"type": "null"}]}),
    "map": {"type": "object", "additionalProperties": _integer(0, 9), "maxProperties": 2},
}
_EQUATION = r"[0-9]{1,2} [+*\-] [0-9]{1,2} = [0-9]{1,2}"
REGEXES = {
    "digits": r"[0-9]{1,3}",
    "answer": r"The answer is [0-9]{1,2} (apples|pens|books)\.",
    "steps as trained": rf"First, {_EQUATION} [a-z]{{3,7}}\.( Then {_EQUATION} [a-z]{{3,7}}\.)?\n#### [0-9]{{1,2}}",
    "alternatives": r"(yes|no|maybe)( indeed| at all)?!",
    "letters": r"([a-d][e-h]){2,5}",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]",
    "e-mail": r"[a-z]{3,8}@[a-z]{3,8}\.(com|org)",
    "hexadecimal": r"0x[0-9a-f]{4,8}",
}
CHOICES = {
    "two words": ["yes", "no"],
    "many words": [f"answer {n}" for n in range(30)],
    "words with the same beginning": ["apple", "apples", "apple pie", "apple pies and pens"],
}
ARITHMETIC = 'root ::= sum\nsum ::= product (" + " product){0,2}\nproduct ::= atom (" * " atom)?\n' + (
    'atom ::= [1-9] [0-9]? | "(" [1-9] " - " [1-9] ")"'
)
SQL = 'root ::= "SELECT " col (", " col)? " FROM fruit WHERE n " op " " num ";"\n' + (
    'col ::= "name" | "count" | "owner"\nop ::= ">" | "<" | "="\nnum ::= [1-9] [0-9]?'
)
CALL = 'root ::= name "(a=" number ", b=" number ")"\nname ::= "add" | "subtract"\nnumber ::= [0-9] | [1-9] [0-9]'
BRACKETS = 'root ::= "(" inner ")"\ninner ::= "" | "a" | "(" inner2 ")"\ninner2 ::= "b" | "[" "c"{1,4} "]"'


def _arithmetic(text: str) -> bool:
    return all(
        isinstance(node, (ast.Expression, ast.BinOp, ast.Constant, ast.Add, ast.Sub, ast.Mult))
        for node in ast.walk(ast.parse(text, mode="eval"))
    )


def _call(text: str) -> bool:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    return call.func.id in ("add", "subtract") and [each.arg for each in call.keywords] == ["a", "b"]


def _matches(pattern: str) -> Check:
    return lambda text: re.fullmatch(pattern, text) is not None


def _conforms(schema: dict[str, Any]) -> Check:
    def holds(text: str) -> bool:
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).validate(
            json.loads(text)
        )
        return True

    return holds


SQL_TEXT = r"SELECT (name|count|owner)(, (name|count|owner))? FROM fruit WHERE n [><=] [1-9][0-9]?;"
GRAMMARS: dict[str, tuple[str, Check]] = {
    "arithmetic": (ARITHMETIC, _arithmetic),
    "SQL": (SQL, _matches(SQL_TEXT)),
    "function call": (CALL, _call),
    "brackets": (BRACKETS, _matches(r"\((a|\((b|\[c{1,4}\])\))?\)")),
    "SQL twice": (SQL.replace("root ::=", "root ::= one one\none ::="), _matches(f"{SQL_TEXT}{SQL_TEXT}")),
}

CONSTRAINTS: tuple[Constraint, ...] = (
    *(Constraint(name, "JSON schema", "json", value, _conforms(value)) for name, value in SCHEMAS.items()),
    *(Constraint(name, "regular expression", "regex", value, _matches(value)) for name, value in REGEXES.items()),
    *(Constraint(name, "choice", "choice", value, value.__contains__) for name, value in CHOICES.items()),
    *(Constraint(name, "grammar", "grammar", value, holds) for name, (value, holds) in GRAMMARS.items()),
)


TOOL_CALL = (
    r'<tool_call>\n\{"name": "(add|subtract|multiply)", '
    r'"arguments": \{"a": [0-9]{1,2}, "b": [0-9]{1,2}\}\}\n</tool_call>'
)
TRAINED_FORMS: dict[Form, dict[str, Any]] = {
    "words": {"regex": REGEXES["steps as trained"]},
    "json": {"json": ANSWER_SCHEMA},
    "call": {"regex": TOOL_CALL},
}
"""Fields of ``StructuredOutputsParams``: the answers as the training has them."""


def is_valid(constraint: Constraint, text: str) -> bool:
    """Whether a complete answer is what was asked for."""
    try:
        return constraint.holds(text)
    except (ValueError, SyntaxError, AssertionError, jsonschema.ValidationError):
        return False
