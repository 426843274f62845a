"""Blockwise decoding of masked diffusion models, written for the eye: one request, no cache, Python loops.

Every forward recomputes the whole sequence up to the end of the current block. Under the block-causal mask
this gives the logits that a cache of the finished blocks would give.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .model import block_causal

Model = Callable[[Tensor, Tensor], Tensor]
"""Maps ids [T] int64 and visibility [T, T] bool to logits [T, V] float32."""

Commit = tuple[int, int]
"""(absolute position, token)"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to decode. Names and meanings are those of ``vllm_dllm.config`` and ``vllm_dllm.models.traits``."""

    block_length: int
    mask_id: int
    policy: Literal["static", "threshold", "sequential", "entropy"] = "threshold"
    tokens_per_step: int = 1
    denoising_steps: int | None = None
    """Steps per block, instead of ``tokens_per_step``."""
    threshold: float = 0.9
    threshold_inclusive: bool = False
    entropy_bound: float = 0.35
    sub_block_length: int | None = None
    shifted: bool = False
    edit_threshold: float = math.inf
    max_post_edit_steps: int = 0
    stop_ids: frozenset[int] = frozenset()
    eos_early_stop: bool = False

    def quota(self, step: int) -> int:
        """Tokens that denoising step ``step`` of a block unmasks (``threshold``: at least)."""
        if self.denoising_steps is None:
            return self.tokens_per_step
        quota, remainder = divmod(self.block_length, self.denoising_steps)
        return quota + 1 if step < remainder else quota


@dataclass
class Decoded:
    """What decoding gave.

    Attributes:
        tokens: the output: at most ``max_new_tokens``, cut after the first stop token.
        canvas: everything after the prompt up to the end of the last block that was begun, masks included.
        nfe: forwards, without those of the prompt and those that only store a finished block.
        steps: tokens written by each denoising forward, by position.
        carried: first tokens of blocks, taken from the forward of the block before (shifted families).
    """

    tokens: list[int] = field(default_factory=list)
    canvas: list[int] = field(default_factory=list)
    nfe: int = 0
    steps: list[list[Commit]] = field(default_factory=list)
    carried: list[Commit] = field(default_factory=list)


def decode(model: Model, prompt: list[int], max_new_tokens: int, options: Options) -> Decoded:
    """Generate at least ``max_new_tokens`` tokens in whole blocks, fewer where a stop token ends decoding.

    Blocks start at absolute positions 0, L, 2L, ...; the prompt's tail shares a block with the first masks.
    """
    length, result = options.block_length, Decoded()
    begin, end = len(prompt), len(prompt) + max_new_tokens
    canvas = list(prompt)
    for start in range(begin // length * length, end, length):
        canvas += [options.mask_id] * (start + length - len(canvas))

        if options.shifted and start >= begin:
            # The last logits of the block before predict this block's first token. They come from the forward
            # that stores that block, which therefore counts, or from the prompt's, which does not.
            logits = forward(model, canvas[:start], options)
            canvas[start], _, _ = predict(logits[-1], options.mask_id)
            result.carried.append((start, canvas[start]))
            result.nfe += start > begin
            if start == end - 1:
                del canvas[end:]
                break

        denoise_block(model, canvas, start, begin, options, result)
        if options.stop_ids.intersection(canvas[begin:]):
            break

    result.canvas = canvas[begin:]
    result.tokens = cut(result.canvas[:max_new_tokens], options.stop_ids)
    return result


def denoise_block(model: Model, canvas: list[int], start: int, begin: int, options: Options, result: Decoded) -> None:
    """Unmask (and edit) the last block of ``canvas`` in place; ``begin`` is the length of the prompt."""
    step = post_edit_steps = 0
    while True:
        masked = [i for i in range(start, len(canvas)) if canvas[i] == options.mask_id]
        if options.eos_early_stop and ends_in_tokens(canvas[begin:], options):
            return
        if not masked:
            if post_edit_steps == options.max_post_edit_steps or options.edit_threshold == math.inf:
                return
            post_edit_steps += 1

        logits = forward(model, canvas, options)
        predictions = {}
        for i in range(max(start, begin), len(canvas)):
            predictions[i] = predict(logits[i - 1 if options.shifted else i], options.mask_id)

        unmasked = choose(candidates(masked, start, options), predictions, options.quota(step), options)
        edited = [
            i
            for i, (token, confidence, _) in predictions.items()
            if i not in masked and token != canvas[i] and confidence > options.edit_threshold
        ]
        written = sorted((i, predictions[i][0]) for i in [*unmasked, *edited])
        for i, token in written:
            canvas[i] = token
        result.nfe += 1
        result.steps.append(written)
        step += 1
        if not masked and not edited:
            return


def forward(model: Model, canvas: list[int], options: Options) -> Tensor:
    return model(torch.tensor(canvas), block_causal(len(canvas), options.block_length))


def predict(logits: Tensor, mask_id: int) -> tuple[int, float, float]:
    """Most probable token, its probability, and the distribution's entropy in nats.

    The mask token is never chosen, but it keeps its share of the distribution, as in the official samplers.
    """
    log_probs = logits.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum()
    choices = log_probs.clone()
    choices[mask_id] = -torch.inf
    token = int(choices.argmax())
    return token, float(log_probs[token].exp()), float(entropy)


def candidates(masked: list[int], start: int, options: Options) -> list[int]:
    """Masked positions of the leftmost unfinished sub-block; without sub-blocks, all of them."""
    if options.sub_block_length is None or not masked:
        return masked
    first = (masked[0] - start) // options.sub_block_length
    return [i for i in masked if (i - start) // options.sub_block_length == first]


def choose(
    candidates: list[int], predictions: dict[int, tuple[int, float, float]], quota: int, options: Options
) -> list[int]:
    """Positions that one step unmasks: the policies."""
    confidence = {i: predictions[i][1] for i in candidates}
    entropy = {i: predictions[i][2] for i in candidates}
    most_confident = sorted(candidates, key=lambda i: -confidence[i])

    if options.policy == "static":
        return most_confident[:quota]

    if options.policy == "sequential":
        return candidates[:quota]

    if options.policy == "threshold":
        above = [
            i
            for i in candidates
            if confidence[i] > options.threshold or (options.threshold_inclusive and confidence[i] == options.threshold)
        ]
        return above if len(above) >= quota else most_confident[:quota]

    least_uncertain = sorted(candidates, key=lambda i: entropy[i])
    chosen, total = least_uncertain[:1], sum(entropy[i] for i in least_uncertain[:1])
    for i in least_uncertain[1:]:
        total += entropy[i]
        if total >= options.entropy_bound:
            break
        chosen.append(i)
    return chosen


def ends_in_tokens(generated: list[int], options: Options) -> bool:
    """Whether a stop token is there and nothing before it is masked."""
    for token in generated:
        if token == options.mask_id:
            return False
        if token in options.stop_ids:
            return True
    return False


def cut(generated: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Everything through the first stop token."""
    for i, token in enumerate(generated):
        if token in stop_ids:
            return generated[: i + 1]
    return generated
