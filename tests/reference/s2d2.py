"""S2D2, written for the eye: one request, no cache, Python loops.

``decode`` is the definition of this project's ``s2d2`` at temperature 0, and, with ``OfficialDraws``, of the published
code's, which draws at temperature 0 too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .decode import (
    Commit,
    Model,
    Options,
    Predictions,
    advance,
    candidates,
    cut,
    ends_in_tokens,
    fill,
    masks,
    predict,
)
from .model import block_causal


class Drafted(NamedTuple):
    """What the drafting logits say of a position, as the estimators take it."""

    probability: float
    entropy: float
    """As a share of the largest possible."""
    margin: float
    collision: float
    """The sum of the squares of all probabilities."""


ESTIMATORS: dict[str, Callable[[Drafted, float], float]] = {
    "soft_entropy_negexp": lambda of, number: math.exp(-number * of.entropy),
    "hard_entropy_threshold": lambda of, number: float(of.entropy < number),
    "hard_margin_threshold": lambda of, number: float(of.margin > number),
    "soft_clipped_linear_margin": lambda of, number: min(max(number * of.margin, 0.0), 1.0),
    "soft_confidence_power": lambda of, number: of.probability**number,
    "soft_renyi_2_entropy": lambda of, _: of.collision,
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When drafts are verified, and how many; names are those of ``vllm_dllm.options.schema``."""

    route: Literal["always", "span", "score", "hysteresis"] = "always"
    window: int = 1 << 16
    min_span: int = 1
    score_threshold: float = 0.0
    score_on: float = 1.0
    score_off: float = -5.0
    score_cost: float = 1.0
    score_cost_per: Literal["forward", "token"] = "forward"
    estimator: str = "soft_entropy_negexp"
    number: float = 1.0
    causal_cache: bool = False
    causal_drafts: bool = False
    """The published ``draft_ver``: in drafting forwards, the positions before a block's first mask see only what is
    before them."""


class Acceptance(Protocol):
    """Accepts or replaces drafts."""

    def __call__(self, drafted: list[Tensor], verified: list[Tensor], tokens: list[int]) -> tuple[int, int | None]:
        """How many of the ``tokens`` are accepted, and what replaces the first that is not; both lists have logits [V],
        of the drafting and of the verifying forward."""

    def distribution(self, logits: Tensor) -> Tensor:
        """[V]: what the estimators take for probabilities."""


class Greedy:
    """Temperature 0."""

    def __init__(self, mask_id: int) -> None:
        self.mask_id = mask_id

    def __call__(self, drafted: list[Tensor], verified: list[Tensor], tokens: list[int]) -> tuple[int, int | None]:
        for index, (logits, token) in enumerate(zip(verified, tokens, strict=True)):
            said = predict(logits, self.mask_id).token
            if said != token:
                return index, said
        return len(tokens), None

    def distribution(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=0)


@dataclass
class Decoded:
    """What decoding gave.

    Attributes:
        drafts, verifications, stores: forwards; of those that store a block the ones that give a token.
        in_advance: drafting forwards that a verifying forward spares, which saw their block already.
        spans: first position and length of every span that was verified.
        accepted: drafts accepted of each.
        steps: tokens written by each step.
        scores: of the steps that have one.
    """

    tokens: list[int] = field(default_factory=list)
    canvas: list[int] = field(default_factory=list)
    drafts: int = 0
    verifications: int = 0
    stores: int = 0
    in_advance: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    steps: list[list[Commit]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    @property
    def nfe(self) -> int:
        """Forwards of this project's engine."""
        return self.drafts + self.verifications + self.stores - self.in_advance


class _Decoder:
    def __init__(self, model: Model, prompt: list[int], options: Options, rule: Rule, accept: Acceptance) -> None:
        self.model, self.begin, self.options, self.rule, self.accept = model, len(prompt), options, rule, accept
        self.canvas, self.found = list(prompt), Decoded()
        self.is_on = False

    def look(self, ids: list[int], start: int, causal_to: int) -> Tensor:
        """Logits [T, V] of ``ids``; the block that begins at ``start`` is causal in the rows before ``causal_to``."""
        length = self.options.block_length
        visible = block_causal(len(ids), length)
        if self.rule.causal_cache:
            visible[:start] = visible[:start].tril()
        visible[start:causal_to] = visible[start:causal_to].tril(start)
        return self.model(torch.tensor(ids), visible)

    def draft(self, start: int) -> Tensor:
        """Logits [T, V] that predict each position of the canvas."""
        self.found.drafts += 1
        masked = masks(self.canvas, start, self.options)
        causal_to = masked[0] if self.rule.causal_drafts and masked else start
        return self.predicting(self.look(self.canvas, start, causal_to))

    def predicting(self, logits: Tensor) -> Tensor:
        return logits.roll(1, dims=0) if self.options.shifted else logits

    def verify(self, filled: list[int], start: int, span: list[int]) -> list[Tensor]:
        """Logits [V] of every position of the span, given all before it, as blocks of one position would have them."""
        self.found.verifications += 1
        if self.options.shifted:
            logits = self.predicting(self.look(filled[: span[-1] + 1], start, span[-1] + 1))
            return [logits[i] for i in span]
        return [self.look([*filled[:i], self.options.mask_id], start, i + 1)[i] for i in span]

    def wants(self, run: list[int], open_positions: list[int], logits: Tensor, predictions: Predictions) -> bool:
        """Whether to verify a run of masks; ``open_positions`` are all that may be unmasked."""
        rule = self.rule
        if rule.route in ("always", "span"):
            return rule.route == "always" or len(run) >= rule.min_span
        expected, chance = 0.0, 1.0
        for i in run[: rule.window]:
            distribution = self.accept.distribution(logits[i])
            top = distribution.topk(2).values
            entropy = -(distribution * distribution.clamp(min=1e-12).log()).sum() / math.log(len(distribution))
            said = Drafted(
                float(distribution[predictions[i].token]),
                float(entropy),
                float(top[0] - top[1]),
                float(distribution.square().sum()),
            )
            chance *= ESTIMATORS[rule.estimator](said, rule.number)
            expected += chance
        confident = sum(predictions[i].confidence > self.options.threshold for i in open_positions)
        score = expected - rule.score_cost * (confident if rule.score_cost_per == "token" else 1)
        self.found.scores.append(score)
        if rule.route == "score":
            return score >= rule.score_threshold
        self.is_on = not score < rule.score_off if self.is_on else score > rule.score_on
        return self.is_on

    def step(self, start: int, step: int) -> bool:
        """One step of the block; whether all drafts of a span were accepted."""
        options, before = self.options, list(self.canvas)
        logits = self.draft(start)
        predictions = {i: predict(logits[i], options.mask_id) for i in range(max(start, self.begin), len(self.canvas))}
        masked = masks(self.canvas, start, options)
        open_positions, whole = candidates(masked, start, options), False
        run = [i for i in open_positions if all(j in open_positions for j in range(open_positions[0], i))]
        if not run:
            self.is_on = False
        if run and self.wants(run, open_positions, logits, predictions):
            span = run[: self.rule.window]
            edited = advance(self.canvas, predictions, start, 0, _edits_only(options))
            drafts = {i: predictions[i].token for i in span}
            said = self.verify(fill(edited, drafts), start, span)
            count, replacement = self.accept([logits[i] for i in span], said, [drafts[i] for i in span])
            written = {i: drafts[i] for i in span[:count]}
            if replacement is not None:
                written[span[count]] = replacement
            self.canvas = fill(edited, written)
            self.found.spans.append((span[0], len(span)))
            self.found.accepted.append(count)
            whole = count == len(span)
        else:
            self.canvas = advance(self.canvas, predictions, start, options.quota(step), options)
        changed = [(i, new) for i, (old, new) in enumerate(zip(before, self.canvas, strict=True)) if old != new]
        self.found.steps.append(changed)
        return whole

    def block(self, start: int, max_new_tokens: int) -> None:
        """Finish the last block of the canvas."""
        options, step, looks, whole = self.options, 0, 0, False
        while True:
            masked = masks(self.canvas, start, options)
            edits = options.edit_threshold != math.inf
            if (
                options.eos_early_stop
                and not edits
                and ends_in_tokens(self.canvas[self.begin :], max_new_tokens, options)
            ):
                return
            if not masked:
                if not edits or looks == options.max_post_edit_steps:
                    return
                looks += 1
            self.found.in_advance += whole
            whole = self.step(start, step)
            step += 1
            if not masked and not self.found.steps[-1]:
                return

    def text(self, max_new_tokens: int) -> Decoded:
        options, found = self.options, self.found
        length, end = options.block_length, self.begin + max_new_tokens
        for start in range(self.begin // length * length, end, length):
            self.canvas += [options.mask_id] * (start + length - len(self.canvas))
            if options.shifted and start >= self.begin:
                self.canvas[start] = predict(self.look(self.canvas[:start], start, 0)[-1], options.mask_id).token
                found.stores += start > self.begin
                if start == end - 1:
                    del self.canvas[end:]
                    break
            self.block(start, max_new_tokens)
            if options.stop_ids.intersection(self.canvas[self.begin :]):
                break
        found.canvas = self.canvas[self.begin :]
        found.tokens = cut(found.canvas[:max_new_tokens], options.stop_ids)
        return found


def decode(
    model: Model, prompt: list[int], max_new_tokens: int, options: Options, rule: Rule, accept: Acceptance | None = None
) -> Decoded:
    """Generate at least ``max_new_tokens`` tokens in whole blocks, fewer where a stop token ends decoding."""
    return _Decoder(model, prompt, options, rule, accept or Greedy(options.mask_id)).text(max_new_tokens)


def _edits_only(options: Options) -> Options:
    """A step that unmasks nothing."""
    return replace(options, policy="static")
