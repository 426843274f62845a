"""Blockwise decoding of masked diffusion models, written for the eye: one request, no cache, Python loops.

Every forward recomputes the whole sequence up to the end of the current block. Under the block-causal mask
this gives the logits that a cache of the finished blocks would give, and so it does where all but the current block
is causal.
"""

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .model import block_causal, causal_context
from .thinking import Thinking, given_to_block

Model = Callable[[Tensor, Tensor], Tensor]
"""Maps ids [T] int64 and visibility [T, T] bool to logits [T, V] float32."""

Commit = tuple[int, int]
"""(absolute position, token)"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to decode. Names and meanings are those of ``vllm_dllm.options.schema`` and ``vllm_dllm.traits``."""

    block_length: int
    mask_id: int
    policy: Literal["static", "threshold", "sequential", "entropy", "localleap"] = "threshold"
    tokens_per_step: int = 1
    denoising_steps: int | None = None
    """Steps per block, instead of ``tokens_per_step``."""
    threshold: float = 0.9
    threshold_inclusive: bool = False
    entropy_bound: float = 0.35
    relaxed_threshold: float = 0.75
    radius: int = 4
    sub_block_length: int | None = None
    shifted: bool = False
    commit_predicts: bool = False
    """Blocks begin with a token that the logits before them predict (Nemotron-Labs-Diffusion; shifted families)."""
    causal_context: bool = False
    """Prompt and finished blocks see only what is before them, and blocks start where the prompt ends."""
    edit_threshold: float = math.inf
    max_post_edit_steps: int = 0
    stop_ids: frozenset[int] = frozenset()
    eos_early_stop: bool = False
    thinking: Thinking | None = None

    @property
    def carries(self) -> bool:
        """Whether the forward that stores a block gives the first token of the next one."""
        return self.shifted or self.commit_predicts

    def quota(self, step: int) -> int:
        """Tokens that denoising step ``step`` of a block unmasks (``threshold``, ``localleap``: at least)."""
        if self.denoising_steps is None:
            return self.tokens_per_step
        quota, remainder = divmod(self.block_length, self.denoising_steps)
        return quota + 1 if step < remainder else quota


class Prediction(NamedTuple):
    """What a forward says of a position."""

    token: int
    """The most probable one; never the mask token."""
    confidence: float
    """Its probability."""
    entropy: float
    """Of the distribution, in nats."""
    log_probs: Tensor
    """[V]; -inf for the mask token, which keeps its share of the distribution, as in the official samplers."""


Predictions = dict[int, Prediction]
"""By absolute position."""


class Branch(NamedTuple):
    """A state of the block that a forward sees: the block as it stands, or a draft of a later state."""

    canvas: list[int]
    """With everything before the block."""
    level: int
    """Denoising steps that it is ahead of the block as it stands, so the drafter thinks."""


class StepSkipping(Protocol):
    """Drafts later states of a block, to be verified all in one forward; see ``drafts.py``."""

    def draft(
        self, canvas: list[int], predictions: Predictions, step: int, start: int, options: Options
    ) -> list[Branch]:
        """Drafts of what comes after ``canvas``, which has had ``step`` denoising steps since its block began at
        ``start``; ``predictions`` are those that the last of them was made from."""

    def accept(
        self, branches: list[Branch], target: Callable[[int, int], list[int]], options: Options
    ) -> tuple[int, int]:
        """The branch to go on from and the denoising steps that it skips. Branch 0 is the block as it stands;
        ``target(k, n)`` is what a denoising step makes of branch ``k`` when it has skipped ``n`` steps."""


class Round(NamedTuple):
    """What one denoising forward saw."""

    step: int
    """Denoising steps that the block had had."""
    masked: int
    """Masked positions of the block as it stood."""
    drafts: int
    """Drafts beside it."""
    accepted: int
    """The branch that decoding went on from; 0: the block as it stood."""
    hops: int
    """Denoising steps that this skipped."""


@dataclass
class Decoded:
    """What decoding gave.

    Attributes:
        tokens: the output: at most ``max_new_tokens``, cut after the first stop token.
        canvas: everything after the prompt up to the end of the last block that was begun, masks included.
        nfe: forwards, without those of the prompt and those that only store a finished block.
        steps: tokens written by each denoising forward, by position.
        carried: first tokens of blocks, taken from the forward of the block before (shifted families).
        rounds: what each denoising forward saw, in the order of ``steps``.
    """

    tokens: list[int] = field(default_factory=list)
    canvas: list[int] = field(default_factory=list)
    nfe: int = 0
    steps: list[list[Commit]] = field(default_factory=list)
    carried: list[Commit] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)


def decode(
    model: Model, prompt: list[int], max_new_tokens: int, options: Options, skipping: StepSkipping | None = None
) -> Decoded:
    """Generate at least ``max_new_tokens`` tokens in whole blocks, fewer where a stop token ends decoding.

    Blocks start at absolute positions 0, L, 2L, ...; the prompt's tail shares a block with the first masks. Or they
    start at the end of the prompt (``causal_context``).
    """
    length, result = options.block_length, Decoded()
    begin, end = len(prompt), len(prompt) + max_new_tokens
    canvas = list(prompt)
    first = begin if options.causal_context else begin // length * length
    for start in range(first, end, length):
        given = {}
        if options.thinking is not None:
            given = given_to_block(canvas, start + length, options.thinking)
        canvas += [options.mask_id] * (start + length - len(canvas))

        if options.carries and start >= begin:
            # The last logits of the block before predict this block's first token. They come from the forward
            # that stores that block, which therefore counts, or from the prompt's, which does not.
            logits = forward(model, canvas[:start], start, options)
            canvas[start] = given.get(start, predict(logits[-1], options.mask_id).token)
            result.carried.append((start, canvas[start]))
            result.nfe += start > begin
            if start == end - 1:
                del canvas[end:]
                break

        for position, token in given.items():
            canvas[position] = token
        if given and not masks(canvas, start, options) and options.edit_threshold == math.inf:
            # Its K/V takes a forward that has nothing to denoise.
            result.nfe += 1
        denoise_block(model, canvas, start, begin, max_new_tokens, options, result, skipping, given)
        if options.stop_ids.intersection(canvas[begin:]):
            break

    result.canvas = canvas[begin:]
    result.tokens = cut(result.canvas[:max_new_tokens], options.stop_ids)
    return result


def denoise_block(
    model: Model,
    canvas: list[int],
    start: int,
    begin: int,
    max_new_tokens: int,
    options: Options,
    result: Decoded,
    skipping: StepSkipping | None,
    given: Collection[int] = (),
) -> None:
    """Unmask (and edit) the last block of ``canvas`` in place; ``begin`` is the length of the prompt.

    ``given`` are positions that stay as they are.
    """
    step = post_edit_steps = 0
    drafts: list[Branch] = []
    while True:
        masked = masks(canvas, start, options)
        edits = options.edit_threshold != math.inf
        if options.eos_early_stop and not edits and ends_in_tokens(canvas[begin:], max_new_tokens, options):
            return
        if not masked:
            if post_edit_steps == options.max_post_edit_steps or not edits:
                return
            post_edit_steps += 1

        outcome = denoise(model, [Branch(canvas, 0), *drafts], step, start, begin, options, skipping, given)
        written = [(i, new) for i, (old, new) in enumerate(zip(canvas, outcome.canvas, strict=True)) if new != old]
        canvas[:] = outcome.canvas
        result.nfe += 1
        result.steps.append(written)
        result.rounds.append(Round(step, len(masked), len(drafts), outcome.accepted, outcome.hops))
        step += outcome.hops + 1
        if not masked and not written:
            return
        if skipping is not None:
            drafts = skipping.draft(canvas, outcome.predictions, step, start, options)


class Outcome(NamedTuple):
    """What a denoising forward led to."""

    accepted: int
    hops: int
    predictions: Predictions
    """Of the accepted branch."""
    canvas: list[int]
    """What a denoising step made of it."""


def denoise(
    model: Model,
    branches: list[Branch],
    step: int,
    start: int,
    begin: int,
    options: Options,
    skipping: StepSkipping | None,
    given: Collection[int] = (),
) -> Outcome:
    """One forward on all branches, and one denoising step from the accepted one.

    What a forward says of a branch that nobody asks about is not computed.
    """

    @functools.cache
    def look(branch: int) -> Predictions:
        canvas = branches[branch].canvas
        logits = forward(model, canvas, start, options)
        shift = 1 if options.shifted else 0
        asked = (i for i in range(max(start, begin), len(canvas)) if i not in given)
        return {i: predict(logits[i - shift], options.mask_id) for i in asked}

    def target(branch: int, skipped: int) -> list[int]:
        return advance(branches[branch].canvas, look(branch), start, options.quota(step + skipped), options)

    accepted, hops = (0, 0) if skipping is None else skipping.accept(branches, target, options)
    return Outcome(accepted, hops, look(accepted), target(accepted, hops))


def advance(canvas: list[int], predictions: Predictions, start: int, quota: int, options: Options) -> list[int]:
    """``canvas`` after one denoising step."""
    masked = masks(canvas, start, options)
    unmasked = choose(candidates(masked, start, options), predictions, quota, options)
    edited = [
        i
        for i, prediction in predictions.items()
        if i not in masked and prediction.token != canvas[i] and prediction.confidence > options.edit_threshold
    ]
    return fill(canvas, {i: predictions[i].token for i in [*unmasked, *edited]})


def fill(canvas: list[int], tokens: dict[int, int]) -> list[int]:
    return [tokens.get(i, token) for i, token in enumerate(canvas)]


def masks(canvas: list[int], start: int, options: Options) -> list[int]:
    return [i for i in range(start, len(canvas)) if canvas[i] == options.mask_id]


def forward(model: Model, canvas: list[int], start: int, options: Options) -> Tensor:
    """Logits of ``canvas``, whose positions from ``start`` on are the block being denoised."""
    if options.causal_context:
        return model(torch.tensor(canvas), causal_context(len(canvas), start))
    return model(torch.tensor(canvas), block_causal(len(canvas), options.block_length))


def predict(logits: Tensor, mask_id: int) -> Prediction:
    log_probs = logits.log_softmax(dim=-1)
    # Of tokens that may not be chosen, 0 * -inf is to be 0.
    entropy = -(log_probs.exp() * log_probs.clamp(min=torch.finfo().min)).sum()
    log_probs[mask_id] = -torch.inf
    token = int(log_probs.argmax())
    return Prediction(token, float(log_probs[token].exp()), float(entropy), log_probs)


def candidates(masked: list[int], start: int, options: Options) -> list[int]:
    """Masked positions of the leftmost unfinished sub-block; without sub-blocks, all of them."""
    if options.sub_block_length is None or not masked:
        return masked
    first = (masked[0] - start) // options.sub_block_length
    return [i for i in masked if (i - start) // options.sub_block_length == first]


def ranked(candidates: list[int], predictions: Predictions, options: Options) -> list[int]:
    """Candidates in the policy's order, ties from left to right."""
    if options.policy == "sequential":
        return candidates
    if options.policy == "entropy":
        return sorted(candidates, key=lambda i: predictions[i].entropy)
    return sorted(candidates, key=lambda i: -predictions[i].confidence)


def choose(candidates: list[int], predictions: Predictions, quota: int, options: Options) -> list[int]:
    """Positions that one step unmasks: the policies."""
    first = ranked(candidates, predictions, options)
    confidence = {i: predictions[i].confidence for i in candidates}

    if options.policy in ("static", "sequential"):
        return first[:quota]

    if options.policy == "threshold":
        above = [
            i
            for i in candidates
            if confidence[i] > options.threshold or (options.threshold_inclusive and confidence[i] == options.threshold)
        ]
        return above if len(above) >= quota else first[:quota]

    if options.policy == "localleap":
        anchors = [i for i in candidates if confidence[i] >= options.threshold]
        relaxed = [
            i
            for i in candidates
            if confidence[i] >= options.relaxed_threshold
            and any(abs(i - anchor) <= options.radius for anchor in anchors)
        ]
        return sorted({*anchors, *relaxed, *first[:quota]})

    chosen, total = first[:1], sum(predictions[i].entropy for i in first[:1])
    for i in first[1:]:
        total += predictions[i].entropy
        if total >= options.entropy_bound:
            break
        chosen.append(i)
    return chosen


def ends_in_tokens(generated: list[int], max_new_tokens: int, options: Options) -> bool:
    """Whether a stop token or the last of ``max_new_tokens`` is there and nothing before it is masked."""
    for count, token in enumerate(generated, 1):
        if token == options.mask_id:
            return False
        if token in options.stop_ids or count == max_new_tokens:
            return True
    return False


def cut(generated: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Everything through the first stop token."""
    for i, token in enumerate(generated):
        if token in stop_ids:
            return generated[: i + 1]
    return generated
