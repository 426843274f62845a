"""Introspective strided decoding (I-DLM), written for the eye: one request, no cache.

A forward has the last token of the text, the drafts of the forward before and as many masks again, and is causal. The
drafts stay as far as they are what the model writes itself, and the masks say the next ones.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from .decode import Model
from .linear_spec import next_tokens
from .thinking import Thinking


@dataclass
class Strided:
    """What decoding gave.

    Attributes:
        nfe: forwards behind the prefill.
        accepted: for each forward that had drafts, how many of them stayed.
    """

    tokens: list[int] = field(default_factory=list)
    nfe: int = 0
    accepted: list[int] = field(default_factory=list)


def decode_by_strides(
    model: Model,
    prompt: list[int],
    max_new_tokens: int,
    *,
    stride: int,
    mask_id: int,
    stop_ids: Set[int] = frozenset(),
    thinking: Thinking | None = None,
    drafter: Callable[[int], Model] | None = None,
) -> Strided:
    """Go on behind ``prompt``, with ``stride`` tokens per forward at most.

    Args:
        drafter: ``drafter(start)`` is the model with an adapter in the rows from a position on, where the masks are.
    """
    found, drafts = Strided(), list[int]()
    text = prompt + next_tokens(model, prompt, len(prompt) - 1, mask_id, thinking)
    while not found.nfe or (
        len(text) < len(prompt) + max_new_tokens and not stop_ids.intersection(text[len(prompt) :])
    ):
        fed = [*text, *drafts, *[mask_id] * (stride - 1)]
        at_masks = model if drafter is None else drafter(len(text) + len(drafts))
        follows = next_tokens(at_masks, fed, len(text) - 1, mask_id, thinking)
        agreed = 0
        while agreed < len(drafts) and drafts[agreed] == follows[agreed]:
            agreed += 1
        found.nfe += 1
        if drafts:
            found.accepted.append(agreed)
        drafts = follows[agreed + 1 :] if agreed == len(drafts) else []
        text += follows[: agreed + 1]
    found.tokens = text[len(prompt) :][:max_new_tokens]
    for index, token in enumerate(found.tokens):
        if token in stop_ids:
            found.tokens = found.tokens[: index + 1]
            break
    return found
