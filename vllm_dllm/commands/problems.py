"""Arithmetic word problems for the bundled models, made by ``vllm_dllm.tiny.arithmetic``."""

import json
import re
from importlib.resources import files
from typing import Any, NamedTuple

_FINAL_ANSWER = re.compile(r"####\s*(-?\d+)")


BUNDLED_QUESTIONS = 200
"""Of the training split."""


class Problem(NamedTuple):
    """A question, and its answer if it can be graded."""

    question: str
    final_answer: int | None = None


def _read(split: str) -> list[Any]:
    return json.loads(files("vllm_dllm.commands").joinpath("problems.json").read_text(encoding="utf-8"))[split]


def train_questions(n: int) -> list[str]:
    """Return the first ``n`` questions of the training split, at most `BUNDLED_QUESTIONS`."""
    return _read("train")[:n]


def test_problems(n: int) -> list[Problem]:
    """Return the first ``n`` problems of the test split, at most 8."""
    return [Problem(*problem) for problem in _read("test")[:n]]


def grade(text: str, final_answer: int) -> bool:
    """Whether the first ``#### <number>`` of a model's output is the final answer; without one it is not."""
    match = _FINAL_ANSWER.search(text)
    return match is not None and int(match.group(1)) == final_answer
