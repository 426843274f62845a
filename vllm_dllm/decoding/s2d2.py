"""S2D2 (arXiv 2603.25702): a block-diffusion model verifies its own drafts, as a model of blocks of one position.

A step of a block with masks::

    draft    a forward of the block: token x_i and its probability p_i(x_i) for every masked position
    span     the first run of masked positions, or the first ``window`` of them
    route    verify?  if not, the policy unmasks as ever, and that is the step
    verify   a forward that gives q_i, what the model says of position i when it sees, under a causal mask, the block's
             tokens before i, drafts among them
    accept   drafts from left to right, and replace the first that is not accepted: rejection sampling
             (``decoding.rejection``), so that a written token has the distribution q_i

A step that verifies thus writes one position more than it accepts, or the whole span.

The official code deviates: at temperature 0 it takes the most likely token for a draft and its softmax probability for
p, and draws u and the replacement nevertheless. So its text is random, and its tokens do not have the distribution q.

*What verifies.* If row i predicts position i (SDAR, LLaDA2), each position m of the span has a branch of its own: the
tokens before m, drafts among them, then masks; row m gives q_m. If row i - 1 predicts position i (Fast-dLLM v2), one
branch with all drafts gives every q_i.

*The whole draft in advance.* The verifying forward also sees the block with all drafts of the span in it, without a
causal mask. If all are accepted, that is the next step's drafting forward, and the two are one.

Dimensions: R requests, blocks of L positions. Nothing here waits for the device.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_dllm.decoding.records import PerRequest
from vllm_dllm.methods import ESTIMATORS, ROUTES

ALWAYS, SPAN, SCORE, HYSTERESIS = range(len(ROUTES))
"""Values of ``Routing.route``."""


@dataclass(frozen=True)
class Span(PerRequest):
    """Consecutive positions of R blocks."""

    start: Tensor
    """[R] int64: first column."""
    length: Tensor
    """[R] int64."""

    def place(self, columns: Tensor) -> Tensor:
        """[R, L] int64: place of the ``columns`` [L] in the span, from 0."""
        return columns - self.start.unsqueeze(1)

    def holds(self, columns: Tensor) -> Tensor:
        """[R, L] bool: which of the ``columns`` [L] are in the span."""
        place = self.place(columns)
        return (place >= 0) & (place < self.length.unsqueeze(1))


@dataclass(frozen=True)
class Beliefs(PerRequest):
    """What the drafting logits say of every position: [R, L] float32 each."""

    confidence: Tensor
    """Probability of the draft."""
    entropy: Tensor
    """Of the distribution, in nats or, for the estimators, as a share of the largest possible, ln V."""
    margin: Tensor
    """Difference of the two largest probabilities."""


GUESSES: Mapping[str, Callable[[Beliefs, Tensor], Tensor]] = {
    "soft_entropy_negexp": lambda of, number: (-number * of.entropy).exp(),
    "hard_entropy_threshold": lambda of, number: (of.entropy < number).float(),
    "hard_margin_threshold": lambda of, number: (of.margin > number).float(),
    "soft_clipped_linear_margin": lambda of, number: (number * of.margin).clamp(0, 1),
    "soft_confidence_power": lambda of, number: of.confidence**number,
}
"""The probability that a draft is accepted, as the estimators guess it (paper, section on routing). ``number`` is the
estimator's parameter."""
assert [*GUESSES] == [*ESTIMATORS]


class Routing(NamedTuple):
    """When R requests verify: [R] each."""

    route: Tensor
    """Places in ``methods.ROUTES``."""
    min_span: Tensor
    score_threshold: Tensor
    score_on: Tensor
    score_off: Tensor
    score_cost: Tensor
    per_token: Tensor
    """bool: the cost counts for every position that the policy's threshold would unmask."""
    estimator: Tensor
    """Places in ``methods.ESTIMATORS``."""
    strength: Tensor
    """Parameter of the estimator."""


def first_span(masked: Tensor) -> Span:
    """The first run of ``masked`` [R, L] positions."""
    start = masked.long().argmax(dim=1)
    columns = torch.arange(masked.shape[1], device=masked.device)
    behind = columns >= start.unsqueeze(1)
    return Span(start, ((masked | ~behind).long().cumprod(dim=1) * behind).sum(dim=1) * masked.any(dim=1))


def acceptances(beliefs: Beliefs, routing: Routing, present: Set[int]) -> Tensor:
    """[R, L] float32: the guess for every position that its draft is accepted, given that those before it are.

    Args:
        present: estimators that occur; the others cost nothing.
    """
    guess: Tensor | None = None
    for index, rule in enumerate(GUESSES.values()):
        if index in present:
            of_rule = rule(beliefs, routing.strength.unsqueeze(1))
            is_asked = (routing.estimator == index).unsqueeze(1)
            guess = of_rule if guess is None else torch.where(is_asked, of_rule, guess)
    assert guess is not None
    return guess


def expected_accepted(guess: Tensor, inside: Tensor) -> Tensor:
    """[R] float32: how many drafts of the span are accepted by expectation: sum over k of the product of the first k.

    Args:
        guess: [R, L] float32: of ``acceptances``.
        inside: [R, L] bool: positions of the span.
    """
    # In double precision, since a GPU multiplies and adds in an order that depends on the number of rows.
    return (torch.where(inside, guess, 1.0).double().cumprod(dim=1) * inside).sum(dim=1).float()


def score(expected: Tensor, num_confident: Tensor, routing: Routing) -> Tensor:
    """[R] float32: expected drafts less what their verification costs.

    Args:
        expected: [R] float32.
        num_confident: [R] int64: masked positions whose confidence passes the threshold.
    """
    return expected - routing.score_cost * torch.where(routing.per_token, num_confident.float(), 1.0)


def verifies(run: Tensor, scores: Tensor, was_on: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Which requests verify, and the switch of hysteresis after the step: [R] bool each.

    Args:
        run: [R] int64: length of the first run of masks; 0: nothing is masked.
        scores: [R] float32.
        was_on: [R] bool: the switch before.
    """
    is_on = torch.where(was_on, ~(scores < routing.score_off), scores > routing.score_on)
    rules = {
        ALWAYS: torch.ones_like(is_on),
        SPAN: run >= routing.min_span,
        SCORE: scores >= routing.score_threshold,
        HYSTERESIS: is_on,
    }
    chosen = torch.zeros_like(is_on)
    for route, rule in rules.items():
        chosen = chosen | ((routing.route == route) & rule)
    return chosen & (run > 0), is_on


def switch_is_on(switch: Tensor) -> Tensor:
    """[R] bool: whether hysteresis is on, by ``Progress.switch`` [R] (bit 0)."""
    return (switch & 1).bool()


def switch_after(switch: Tensor, is_on: Tensor, block_is_finished: Tensor) -> Tensor:
    """``Progress.switch`` [R] after a step: what it is now, when its block began, and when the block before began.

    Args:
        switch: before the step.
        is_on, block_is_finished: [R] bool: after the step.
    """
    began = torch.where(block_is_finished, (switch & 2) | is_on, (switch >> 1) & 3)
    return began * 2 + is_on


def switch_when_began(switch: Tensor, *, before: Tensor) -> Tensor:
    """``Progress.switch`` [R] of requests that begin their block, or the block ``before`` [R] it, again."""
    is_on = torch.where(before, switch >> 2, switch >> 1) & 1
    return is_on * 7


def filled(block: Tensor, span: Span, tokens: Tensor) -> Tensor:
    """[R, L] int64: the block with the drafts ``tokens`` [R, L] in the span."""
    columns = torch.arange(block.shape[1], device=block.device)
    return torch.where(span.holds(columns), tokens, block)


def verifying_branches(block: Tensor, span: Span, mask_id: int, *, shifted: bool, most: int) -> Tensor:
    """The blocks whose forward under a causal mask gives q: [R, most, L] int64.

    Args:
        block: [R, L] int64: with the drafts in it.
        shifted: row i - 1 predicts position i: the first branch tells of every position. Otherwise branch m is for the
            span's position m: the tokens before that position, and masks.
    """
    if shifted:
        return block.unsqueeze(1).expand(-1, most, -1)
    columns = torch.arange(block.shape[1], device=block.device)
    place = span.place(columns).unsqueeze(1)
    behind = place >= torch.arange(most, device=block.device).unsqueeze(1)  # [R, most, L]
    return torch.where(behind, mask_id, block.unsqueeze(1))


def accept_greedily(drafts: Tensor, said: Tensor, span: Span) -> Tensor:
    """How many drafts are accepted at temperature 0: those before the first that the verifier does not say. [R] int64.

    Args:
        drafts, said: [R, L] int64; those outside of the span are not read.
    """
    columns = torch.arange(drafts.shape[1], device=drafts.device)
    agreed = (drafts == said) | (columns < span.start.unsqueeze(1))
    return (agreed.long().cumprod(dim=1) * span.holds(columns)).sum(dim=1)
