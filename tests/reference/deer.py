"""DEER (arXiv 2512.15176, Algorithm 1), written for the eye: each distribution is from a full recompute of the text.

A diffusion model reads the text, k masks and a separator; its logits there are the distributions of k drafts,
independent of each other. The target verifies them from the left and goes on from the first one that it rejects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .model import ReferenceModel, block_causal, causal_context


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A diffusion model that drafts.

    Attributes:
        num_drafts: k.
        context: what the text's positions see: everything (``full``), what is before them (``causal``), or their own
            diffusion block and those before it (``block-causal``). Masks and separator see everything, or, with blocks,
            what their block sees.
        shifted: the logits at position i are about position i + 1.
        mask, sep: ids; ``sep`` is absent in some.
        block_length: with ``block-causal``.
        missing: tokens of the target that are not the drafter's, or mean something else there.
        substitute: what the drafter reads in their place.
        limit: its context length.
    """

    model: ReferenceModel
    num_drafts: int
    context: Literal["full", "causal", "block-causal"]
    shifted: bool
    mask: int
    sep: int | None = None
    block_length: int = 1
    missing: tuple[int, ...] = ()
    substitute: int = 0
    limit: int = 1 << 30

    def input_ids(self, text: list[int]) -> list[int]:
        """What it reads."""
        read = [self.substitute if token in self.missing else token for token in text]
        end = len(text) + self.num_drafts
        if self.context == "block-causal":
            end = -(-end // self.block_length) * self.block_length
            return (read + [self.mask] * (end - len(text)))[: self.limit]
        return (read + [self.mask] * self.num_drafts + [self.sep] * (self.sep is not None))[: self.limit]

    def visible(self, num_text: int, length: int) -> Tensor:
        """[length, length] bool: position q sees position k."""
        match self.context:
            case "full":
                return torch.ones(length, length, dtype=torch.bool)
            case "causal":
                return causal_context(length, num_text)
            case "block-causal":
                return block_causal(length, self.block_length)

    def logits(self, text: list[int]) -> Tensor:
        """Of the drafts that follow a text: [k, V], -inf for what is not shared; fewer at the limit."""
        ids = torch.tensor(self.input_ids(text))
        logits = self.model(ids, self.visible(len(text), len(ids)))
        end = min(len(text) + self.num_drafts, self.limit)
        distributions = logits[len(text) - self.shifted : max(end, len(text)) - self.shifted].clone()
        distributions[:, list(self.missing)] = -torch.inf
        return distributions


def target_logits(model: ReferenceModel, text: list[int], start: int) -> Tensor:
    """An autoregressive model's logits of the tokens that follow ``text[:start]`` ... ``text``: [.., V]."""
    return model(torch.tensor(text), causal_context(len(text), len(text)))[start - 1 :]


class Randomness(Protocol):
    """Where draws come from, by the position of the token that they decide."""

    def draft(self, position: int, number: int, logits: Tensor) -> int:
        """A token of the drafter's distribution; ``number``: among the drafts of the round, from 0."""

    def uniform(self, position: int) -> float:
        """From (0, 1), for the test of a draft."""

    def draw(self, position: int, logits: Tensor) -> int:
        """A token of the target's distribution or of a residual."""


@dataclass(frozen=True)
class Round:
    """One verification: how many drafts there were, and how many of them were accepted."""

    drafted: int
    accepted: int


def generate(
    target: ReferenceModel,
    drafter: Drafter,
    prompt: list[int],
    max_tokens: int,
    temperature: float,
    randomness: Randomness,
    max_drafts: Callable[[int], int] = lambda length: 1 << 30,
) -> tuple[list[int], list[Round]]:
    """The new tokens, and the rounds that made all but the first.

    Args:
        max_drafts: how many drafts may follow a text of this length.
    """
    if temperature == 0:
        return _generate_greedily(target, drafter, prompt, max_tokens, max_drafts)
    text = [*prompt, randomness.draw(len(prompt), target_logits(target, prompt, len(prompt))[0] / temperature)]
    rounds = []
    while len(text) < len(prompt) + max_tokens:
        # Draft: all from one forward, none knows of the others.
        q = (drafter.logits(text) / temperature)[: max_drafts(len(text))]
        drafts = [randomness.draft(len(text) + i, i, logits) for i, logits in enumerate(q)]
        # Verify: one forward of the target.
        p = target_logits(target, [*text, *drafts], len(text)) / temperature
        accepted = 0
        for i, draft in enumerate(drafts):
            log_ratio = p[i].log_softmax(-1)[draft] - q[i].log_softmax(-1)[draft]
            if not randomness.uniform(len(text) + i) < min(1.0, float(log_ratio.exp())):
                break
            accepted += 1
        rounds.append(Round(len(drafts), accepted))
        distribution = p[accepted].softmax(-1)
        if accepted < len(drafts):
            distribution = (distribution - q[accepted].softmax(-1)).clamp(
                min=0
            )  # what the drafts took of it is used up
        text += [*drafts[:accepted], randomness.draw(len(text) + accepted, distribution.log())]
    return text[len(prompt) :][:max_tokens], rounds


def _generate_greedily(
    target: ReferenceModel, drafter: Drafter, prompt: list[int], max_tokens: int, max_drafts: Callable[[int], int]
) -> tuple[list[int], list[Round]]:
    text = [*prompt, int(target_logits(target, prompt, len(prompt))[0].argmax())]
    rounds = []
    while len(text) < len(prompt) + max_tokens:
        drafts = drafter.logits(text).argmax(-1).tolist()[: max_drafts(len(text))]
        chosen = target_logits(target, [*text, *drafts], len(text)).argmax(-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
        rounds.append(Round(len(drafts), accepted))
        text += chosen[: accepted + 1]
    return text[len(prompt) :][:max_tokens], rounds
