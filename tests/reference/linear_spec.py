"""LinearSpec, written for the eye: one request, no cache.

A round drafts the positions behind the text from a block of masks, as diffusion does, and verifies the draft with a
causal forward: the tokens that the model would have written one by one stay.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field

import torch

from .decode import Model, predict
from .model import causal_context
from .thinking import Thinking, forced_next


@dataclass
class Speculated:
    """What decoding gave.

    Attributes:
        nfe: forwards behind the prefill.
        drafts: the block that each round verified, the last token of the text first.
        accepted: tokens that each round added to the text.
    """

    tokens: list[int] = field(default_factory=list)
    nfe: int = 0
    drafts: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def next_tokens(model: Model, text: list[int], start: int, mask_id: int, thinking: Thinking | None = None) -> list[int]:
    """What an autoregressive model would write behind each position of ``text`` from ``start`` on."""
    logits = model(torch.tensor(text), causal_context(len(text), len(text)))
    tokens = [predict(row, mask_id).token for row in logits[start:]]
    if thinking is not None:
        forced = [forced_next(text[: end + 1], thinking) for end in range(start, len(text))]
        tokens = [token if must is None else must for token, must in zip(tokens, forced, strict=True)]
    return tokens


def greedy_text(
    model: Model,
    prompt: list[int],
    max_new_tokens: int,
    mask_id: int,
    stop_ids: Set[int],
    thinking: Thinking | None = None,
) -> list[int]:
    """What the model writes one token at a time."""
    text = list(prompt)
    while len(text) < len(prompt) + max_new_tokens and not stop_ids.intersection(text[len(prompt) :]):
        text += next_tokens(model, text, len(text) - 1, mask_id, thinking)
    return text[len(prompt) :]


def draft_block(
    drafter: Callable[[int], Model], text: list[int], length: int, threshold: float, mask_id: int
) -> tuple[list[int], int]:
    """The last token of the text and ``length - 1`` drafts behind it, and the number of forwards."""
    start, forwards = len(text) - 1, 0
    canvas = text + [mask_id] * (length - 1)
    while mask_id in canvas[start + 1 :]:
        logits = drafter(start)(torch.tensor(canvas), causal_context(len(canvas), start))
        said = {i: predict(logits[i], mask_id) for i in range(start + 1, len(canvas)) if canvas[i] == mask_id}
        best = max(said, key=lambda i: said[i].confidence)
        for i, prediction in said.items():
            if i == best or prediction.confidence >= threshold:
                canvas[i] = prediction.token
        forwards += 1
    return canvas[start:], forwards


def decode_speculatively(
    model: Model,
    drafter: Callable[[int], Model],
    prompt: list[int],
    max_new_tokens: int,
    *,
    block_length: int,
    mask_id: int,
    threshold: float = 0.0,
    stop_ids: Set[int] = frozenset(),
    thinking: Thinking | None = None,
) -> Speculated:
    """Go on behind ``prompt``; ``drafter(start)`` is the model with its adapter from a position on."""
    found = Speculated()
    text = prompt + next_tokens(model, prompt, len(prompt) - 1, mask_id, thinking)
    while len(text) < len(prompt) + max_new_tokens and not stop_ids.intersection(text[len(prompt) :]):
        block, forwards = draft_block(drafter, text, block_length, threshold, mask_id)
        follows = next_tokens(model, text[:-1] + block, len(text) - 1, mask_id, thinking)
        agreed = 0
        while agreed < block_length - 1 and block[1 + agreed] == follows[agreed]:
            agreed += 1
        found.nfe += forwards + 1
        found.drafts.append(block)
        found.accepted.append(agreed + 1)
        text += follows[: agreed + 1]
    found.tokens = text[len(prompt) :][:max_new_tokens]
    for index, token in enumerate(found.tokens):
        if token in stop_ids:
            found.tokens = found.tokens[: index + 1]
            break
    return found
