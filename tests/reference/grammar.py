"""Decoding under a grammar, written for the eye: one request, no cache, Python loops."""

from collections.abc import Sequence
from typing import Protocol

import torch

from .decode import (
    Decoded,
    Model,
    Options,
    Prediction,
    candidates,
    choose,
    cut,
    ends_in_tokens,
    forward,
    masks,
    predict,
)

NUM_CANDIDATES = 16
MOST_POSITIONS = 16
"""As ``vllm_dllm.decoding.grammar`` has them."""


class Grammar(Protocol):
    """What a text may be."""

    def allowed(self, tokens: Sequence[int]) -> set[int]:
        """Tokens that may follow these, which are all since the beginning."""


def decode(model: Model, prompt: list[int], max_new_tokens: int, options: Options, grammar: Grammar) -> Decoded:
    """As ``decode.decode``, with every token from the grammar."""
    length, result = options.block_length, Decoded()
    begin, end = len(prompt), len(prompt) + max_new_tokens
    canvas = list(prompt)
    for start in range(begin // length * length, end, length):
        canvas += [options.mask_id] * (start + length - len(canvas))
        if options.carries and start >= begin:
            logits = forward(model, canvas[:start], start, options)[-1]
            canvas[start] = restricted(logits, grammar.allowed(canvas[begin:start]), options).token
            result.nfe += start > begin
            if ends_in_tokens(canvas[begin:], max_new_tokens, options):
                break
        step = 0
        while masks(canvas, start, options) and not ends_in_tokens(canvas[begin:], max_new_tokens, options):
            for position, token in denoise(model, canvas, start, begin, step, options, grammar):
                canvas[position] = token
            result.nfe += 1
            step += 1
        if options.stop_ids.intersection(canvas[begin:]):
            break
    result.canvas = canvas[begin:]
    result.tokens = cut(result.canvas[:max_new_tokens], options.stop_ids)
    return result


def restricted(logits: torch.Tensor, allowed: set[int], options: Options) -> Prediction:
    """What a forward says of a position that may only get some tokens."""
    keep = torch.zeros_like(logits, dtype=torch.bool)
    keep[sorted(allowed - {options.mask_id})] = True
    return predict(logits.masked_fill(~keep, -torch.inf), options.mask_id)


def denoise(
    model: Model, canvas: list[int], start: int, begin: int, step: int, options: Options, grammar: Grammar
) -> list[tuple[int, int]]:
    """Positions that one step unmasks, and their tokens."""
    logits = forward(model, canvas, start, options)
    masked, shift = masks(canvas, start, options), 1 if options.shifted else 0
    quota = options.quota(step)
    most = quota if options.policy in ("static", "sequential") else MOST_POSITIONS
    predictions = {i: predict(logits[i - shift], options.mask_id) for i in masked}
    draft: dict[int, int | None] = {}
    text = canvas[begin : masked[0]]
    for i in masked[:most]:
        allowed = grammar.allowed(text)
        predictions[i] = restricted(logits[i - shift], allowed, options)
        best = logits[i - shift].argsort(descending=True, stable=True).tolist()
        best = [token for token in best if token != options.mask_id][:NUM_CANDIDATES]
        forced = [*allowed] if len(allowed) == 1 else []
        draft[i] = next((token for token in [*best, *forced] if token in allowed), None)
        if draft[i] is None:
            break
        text = [*text, draft[i]]
    wanted = choose(candidates(masked, start, options), predictions, quota, options)
    kept: list[tuple[int, int]] = []
    for i in masked:
        judges = options.policy not in ("static", "sequential")
        if i not in draft or (kept and not (i in wanted if judges else len(kept) < len(wanted))):
            break
        kept.append((i, predictions[i].token))
        if predictions[i].token != draft[i] or (judges and i not in wanted):
            break
    return kept
