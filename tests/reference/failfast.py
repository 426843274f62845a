"""FailFast (arXiv 2512.20573, Algorithm 1), written for the eye: every forward is a full recompute of text and draft.

A diffusion model drafts sub-block by sub-block. As soon as the draft has its target length, a drafter that was unsure
of any position stops (fail fast), and a sure one aims for more (win big).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .deer import Drafter
from .model import ReferenceModel, block_causal


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The paper's numbers: N at first and then, N_max, tau, and the threshold of the drafter's own decoding."""

    first: int = 10
    step: int = 10
    most: int = 60
    threshold: float = 0.45
    unmask_threshold: float = 0.05
    sub_block_length: int = 8


@dataclass
class Drafted:
    """A draft, the confidences that decided its length, and its forwards."""

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    forwards: list[str] = field(default_factory=list)


class BlockDrafter:
    """A diffusion model with blocks; ``shifted``: row i predicts position i + 1, as Fast-dLLM v2."""

    def __init__(self, drafter: Drafter, rule: Rule):
        self.drafter, self.rule = drafter, rule

    def _logits(self, text: list[int], number: int) -> Tensor:
        """Over the text and the draft so far, the rest of its last block masked: [.., V], row i about position i."""
        drafter = self.drafter
        read = [drafter.substitute if token in drafter.missing else token for token in text[:number]]
        ids = read + text[number:]
        ids += [drafter.mask] * (-len(ids) % drafter.block_length)
        logits = run(drafter.model, ids, drafter.block_length)
        logits = logits.index_fill(1, torch.tensor(drafter.missing, dtype=torch.long), -torch.inf)
        # The first row is about the position behind the last.
        return logits.roll(1, 0) if drafter.shifted else logits

    def _predicts_next(self, text: list[int], number: int, drafted: Drafted) -> None:
        """A full block is forwarded once more; a shifted model predicts the token behind the block there."""
        drafted.forwards.append("store")
        if self.drafter.shifted:
            text.append(int(self._logits(text, number)[0].argmax()))

    def draft(self, known: list[int]) -> Drafted:
        """What is drafted behind the text ``known``."""
        rule, length, mask = self.rule, self.drafter.block_length, self.drafter.mask
        number, text, drafted = len(known), list(known), Drafted()
        end = number + rule.first
        start = number - number % length
        if start == number and self.drafter.shifted:
            self._predicts_next(text, number, drafted)
        for block in range(start, start + length * (-(-rule.most // length) + 1), length):
            text += [mask] * (block + length - len(text))
            while mask in text[block:]:
                drafted.forwards.append("denoise")
                probabilities = self._logits(text, number).softmax(-1)
                first = text.index(mask, block)
                begin = first - first % rule.sub_block_length
                masked = [i for i in range(begin, begin + rule.sub_block_length) if text[i] == mask]
                confidence = {i: float(probabilities[i].max()) for i in masked}
                drafted.confidences += confidence.values()
                best = max(masked, key=lambda i: confidence[i])
                for i in masked:
                    if confidence[i] > rule.unmask_threshold or i == best:
                        text[i] = int(probabilities[i].argmax())
                if len(text) >= end and mask not in text[number:end]:
                    is_unsure = min(drafted.confidences) < rule.threshold
                    if is_unsure or len(drafted.confidences) >= rule.most:
                        drafted.tokens = text[number:end]
                        return drafted
                    end += rule.step
            self._predicts_next(text, number, drafted)
        drafted.tokens = text[number:end]
        return drafted


def run(model: ReferenceModel, ids: list[int], block_length: int) -> Tensor:
    """Logits under the block-causal mask: [.., V]."""
    return model(torch.tensor(ids), block_causal(len(ids), block_length))


def draft_of_one_forward(drafter: Drafter, rule: Rule, known: list[int]) -> list[int]:
    """What a drafter without blocks drafts: the same rule over the confidences of its one forward."""
    logits = drafter.logits(known)
    tokens, confidences = logits.argmax(-1).tolist(), logits.softmax(-1).amax(-1).tolist()
    end = rule.first
    while end < min(rule.most, drafter.num_drafts) and min(confidences[:end]) >= rule.threshold:
        end += rule.step
    return tokens[: min(end, drafter.num_drafts)]
