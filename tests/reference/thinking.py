"""The end of reasoning that has spent its budget, written for the eye: one text, Python loops."""

from typing import NamedTuple


class Thinking(NamedTuple):
    """Tokens around reasoning, and how many tokens it may have."""

    budget: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    """What a model ends its reasoning with."""
    forced: tuple[int, ...]
    """What is written once the budget is spent."""


def find_last(text: list[int], marker: tuple[int, ...]) -> int:
    places = [i for i in range(len(text) - len(marker) + 1) if tuple(text[i : i + len(marker)]) == marker]
    return places[-1] if places else -1


def due(text: list[int], thinking: Thinking) -> int | None:
    """Position that the end of the reasoning is due at; None where the text is not within its reasoning."""
    start = find_last(text, thinking.start)
    if start <= find_last(text, thinking.end):
        return None
    return start + len(thinking.start) + thinking.budget


def written(text: list[int], thinking: Thinking) -> int:
    """Tokens of the end, not all, that the text ends with."""
    sizes = range(len(thinking.forced) - 1, 0, -1)
    return next((n for n in sizes if tuple(text[-n:]) == thinking.forced[:n]), 0)


def given_to_block(text: list[int], end: int, thinking: Thinking) -> dict[int, int]:
    """Tokens by position of a block that begins behind ``text`` and ends at ``end``."""
    position = due(text, thinking)
    if position is None:
        return {}
    begin = max(position, len(text))
    tokens = thinking.forced[written(text, thinking) if begin == len(text) else 0 :]
    return {i: token for i, token in enumerate(tokens, begin) if i < end}


def forced_next(text: list[int], thinking: Thinking) -> int | None:
    """The token that must follow ``text``, as autoregressive decoding has it."""
    position = due(text, thinking)
    return None if position is None or position > len(text) else thinking.forced[written(text, thinking)]
