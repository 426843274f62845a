"""Generated arithmetic word problems with checkable answers, which the tiny models learn and are judged by.

Needs the standard library only, so that benchmarks and clients can use it without loading torch.
"""

import random
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Literal, NamedTuple, get_args

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

Wording = Literal["short", "long"]
"""Of answers: one of four patterns, or sentences with a choice of words every few tokens."""

Form = Literal["words", "json", "call"]
"""Of answers: worked steps in words, a JSON object, or the call of a tool."""

HELD_OUT_SEED = 0
"""Seed of the held-out problems that a checkpoint is judged by."""

HELD_OUT_ADD_UNTIL = 11
"""Of the held-out problems: to 11 and less every number from 2 to 9 can be added."""

_LARGEST = 20
"""No number of a problem is larger."""

_TEST_SHARE = 10
"""One problem in this many belongs to the test split."""

# fmt: off
_NAMES = (
    "Ada", "Ben", "Chloe", "David", "Emma", "Finn", "Grace", "Hugo", "Ivy", "Jonas",
    "Kira", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Viktor",
)
THINGS = (
    "apples", "books", "cards", "coins", "cookies", "eggs", "flowers", "lemons",
    "marbles", "nuts", "pears", "pencils", "rings", "shells", "stamps", "toys",
)
# fmt: on

_START = (
    "{name} has {a} {things}.",
    "{name} starts the day with {a} {things}.",
    "There are {a} {things} on {name}'s table.",
    "In the morning {name} counts {a} {things}.",
)
_START_GROUPS = (
    "{name} has {k} bags with {m} {things} each.",
    "{name} fills {k} boxes with {m} {things} each.",
)
_ADD = (
    "{other} gives {name} {b} more.",
    "{name} buys {b} more {things}.",
    "Then {name} finds {b} more.",
    "{other} brings another {b} {things}.",
)
_SUBTRACT = (
    "{name} gives {b} to {other}.",
    "{name} loses {b} of them.",
    "Then {name} sells {b} {things}.",
    "{other} takes {b} {things} away.",
)
_QUESTION = (
    "How many {things} does {name} have now?",
    "How many {things} are there in the end?",
    "How many {things} is that now?",
)

_LONG_OPENING = (
    "Let us go through it.",
    "We work it out step by step.",
    "This takes a little sum.",
    "Here is how it goes.",
)
_LONG_FIRST = ("First, ", "At the start ", "To begin, ", "We begin with ")
_LONG_NEXT = ("Then ", "After that, ", "Next, ", "Now we have ")
_LONG_EQUALS = ("=", "is", "makes", "gives")
_LONG_CONSEQUENCE = (
    ", so {name} has {total} {things}",
    ", that is {total} {things}",
    " and there are {total} {things}",
    ". {name} has {total} {things}",
)
_LONG_FULL_STOP = (".", " now.", " by then.", " in all.")
_LONG_CLOSING = (
    "So the answer is {total}.",
    "In the end it is {total}.",
    "That is the whole sum: {total}.",
    "This leaves us with {total}.",
)


class Problem(NamedTuple):
    """One word problem.

    Attributes:
        question: what the user asks.
        answer_text: worked reasoning that ends with a line ``#### <final answer>``.
        final_answer: the number asked for, between 1 and 20.
        form: of the answer; :mod:`vllm_dllm.tiny.forms` makes the others.
        tools: names of the tools that the prompt offers.
    """

    question: str
    answer_text: str
    final_answer: int
    form: Form = "words"
    tools: tuple[str, ...] = ()


def _explain(steps: list[str], total: int, name: str, things: str, rng: random.Random) -> str:
    """Word the worked steps. The wording does not follow from the question, so no model can be sure of it."""
    style = rng.randrange(4)
    if style == 0:
        text = f"First, {steps[0]} {things}."
        text += "".join(f" Then {step} {things}." for step in steps[1:])
    elif style == 1:
        text = " and ".join(steps) + f". So {name} has {total} {things}."
    elif style == 2:
        text = "We compute " + ", then ".join(steps) + "."
    else:
        text = f"{name} has {steps[0]} {things}."
        text += "".join(f" After that, {step}." for step in steps[1:])
    return f"{text}\n#### {total}"


def _explain_at_length(steps: list[str], name: str, things: str, rng: random.Random) -> str:
    """Word the worked steps in sentences, each choice of words made by itself."""
    sentences = [rng.choice(_LONG_OPENING)]
    total = ""
    for number, step in enumerate(steps):
        term, total = step.split(" = ")
        start = rng.choice(_LONG_NEXT if number else _LONG_FIRST)
        consequence = rng.choice(_LONG_CONSEQUENCE).format(name=name, things=things, total=total)
        sentences.append(f"{start}{term} {rng.choice(_LONG_EQUALS)} {total}{consequence}{rng.choice(_LONG_FULL_STOP)}")
    sentences.append(rng.choice(_LONG_CLOSING).format(total=total))
    return f"{' '.join(sentences)}\n#### {total}"


def _make_problem(rng: random.Random, wording: Wording, add_until: int) -> Problem:
    name, other = rng.sample(_NAMES, 2)
    things = rng.choice(THINGS)
    sentences: list[str] = []
    steps: list[str] = []
    if rng.random() < 0.3:
        k, m = rng.randint(2, 4), rng.randint(2, 5)
        total = k * m
        sentences.append(rng.choice(_START_GROUPS).format(name=name, k=k, m=m, things=things))
        steps.append(f"{k} * {m} = {total}")
        changes = rng.randint(0, 1)
    else:
        total = rng.randint(3, 12)
        sentences.append(rng.choice(_START).format(name=name, a=total, things=things))
        changes = rng.choice((1, 1, 2))
    for _ in range(changes):
        before = total
        if total > add_until or (total > 3 and rng.random() < 0.5):
            b = rng.randint(2, min(9, total - 1))
            total -= b
            templates, sign = _SUBTRACT, "-"
        else:
            b = rng.randint(2, min(9, _LARGEST - total))
            total += b
            templates, sign = _ADD, "+"
        sentences.append(rng.choice(templates).format(name=name, other=other, b=b, things=things))
        steps.append(f"{before} {sign} {b} = {total}")
    sentences.append(rng.choice(_QUESTION).format(name=name, things=things))
    question = " ".join(sentences)
    answer = _explain(steps, total, name, things, rng)  # it draws, and both wordings are to have the same questions
    if wording == "long":
        answer = _explain_at_length(steps, name, things, random.Random(question))
    return Problem(question, answer, total)


def split_of(question: str) -> Split:
    """The split of a question, a fixed function of its text: splits are disjoint whatever the seeds."""
    return "test" if zlib.crc32(question.encode()) % _TEST_SHARE == 0 else "train"


def _problems(seed: int, split: Split, wording: Wording, add_until: int) -> Iterator[Problem]:
    rng = random.Random(f"{split}-{seed}")
    seen: set[str] = set()
    while True:
        problem = _make_problem(rng, wording, add_until)
        if problem.question not in seen and split_of(problem.question) == split:
            seen.add(problem.question)
            yield problem


def make_problems(
    n: int, seed: int, split: Split, wording: Wording = "short", add_until: int = HELD_OUT_ADD_UNTIL
) -> list[Problem]:
    """Generate ``n`` problems with distinct questions.

    The same arguments give the same problems, and a larger ``n`` a longer list with the same beginning. The
    questions do not depend on the answers' wording.

    Args:
        add_until: nothing is added to a larger number than this; at most 18, because no sum is larger than 20.

    Raises:
        ValueError: ``split`` is not one of :data:`SPLITS`, or ``add_until`` is larger than 18.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not allowed: it must be one of {', '.join(SPLITS)}")
    if add_until > _LARGEST - 2:
        raise ValueError(f"add_until={add_until} is not allowed: it must be at most {_LARGEST - 2}")
    return list(islice(_problems(seed, split, wording, add_until), n))
