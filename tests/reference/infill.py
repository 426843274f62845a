"""Masks that stand anywhere in a text, filled in by models with full attention: one request, in the text's order.

The masks are filled in blocks, which are the next ``block_length`` masks from left to right, whichever holes they lie
in; masks beyond the ``generation_window`` are not there yet. Text between and behind the holes is visible from the
first forward on. What a forward computes anew is the cache's business, as in `bidirectional`: ``dual`` the block,
``prefix`` the block and all masks behind it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .bidirectional import (
    BidirectionalModel,
    Cache,
    Options,
    Prediction,
    Predictions,
    choose,
    fill,
    predict,
    ranked,
    refreshes,
)


@dataclass
class Filled:
    """What filling gave.

    Attributes:
        tokens: of the masks, in the text's order, through the first of ``stop_ids``.
        nfe: forwards.
    """

    tokens: list[int] = field(default_factory=list)
    nfe: int = 0


class Kept(NamedTuple):
    """K/V of a refresh."""

    positions: list[int]
    kept: Cache


def fill_in(
    model: BidirectionalModel, text: list[int], options: Options, stop_ids: frozenset[int] = frozenset()
) -> Filled:
    """Fill in the masks of ``text``; ``options.gen_length`` is of no meaning.

    Args:
        stop_ids: one of them, with no mask before it, ends the request.
    """
    masks = [position for position, token in enumerate(text) if token == options.mask_id]
    canvas, result = list(text), Filled()
    for begin in range(0, len(masks), options.block_length):
        window = masks[begin:][: options.generation_window]
        block, later = window[: options.block_length], window[options.block_length :]
        absent = set(masks[begin + len(window) :])
        step, cache = 0, None
        while left := [position for position in block if canvas[position] == options.mask_id]:
            refresh = options.cache == "none" or refreshes(step, options)
            computed = [position for position in range(len(canvas)) if position not in absent]
            if not refresh:
                computed = block + (later if options.cache == "prefix" else [])
            predictions, cache = look(model, canvas, computed, None if refresh else cache, block, options)
            # Where no refresh decides a first position, as at the start of a text, the schedule begins at once.
            at = max(step, 1) if options.policy == "static" and options.refresh_decides_first else step
            chosen = choose(ranked(left, predictions), predictions, at, options)
            if refresh and options.refresh_decides_first:
                outside = [position for position in left if position > 0 and position - 1 not in block]
                chosen = outside or chosen
            canvas = fill(canvas, predictions, chosen)
            result.nfe += 1
            step += 1
            if (tokens := ended(canvas, masks, options, stop_ids)) is not None:
                result.tokens = tokens
                return result
    result.tokens = [canvas[position] for position in masks]
    return result


def ended(canvas: list[int], masks: list[int], options: Options, stop_ids: frozenset[int]) -> list[int] | None:
    """Tokens through the first stop token, if nothing before it is masked."""
    tokens: list[int] = []
    for position in masks:
        if canvas[position] == options.mask_id:
            return None
        tokens.append(canvas[position])
        if canvas[position] in stop_ids:
            return tokens
    return None


def look(
    model: BidirectionalModel,
    canvas: list[int],
    computed: list[int],
    cache: Kept | None,
    block: list[int],
    options: Options,
) -> tuple[Predictions, Kept]:
    """Predictions of the block's positions by a forward that computes some positions, and the K/V from then on."""
    ids, positions = torch.tensor([[canvas[i] for i in computed]]), torch.tensor(computed)
    places = None if cache is None else torch.tensor([cache.positions.index(i) for i in computed])
    logits, own = model(ids, positions, None if cache is None else cache.kept, places)
    # Rows that predict the block: the row before in shifted families. Where that one is not computed, the position is
    # filled in already, and any row will do.
    row = {position: index for index, position in enumerate(computed)}
    rows = [row.get(max(position - options.shifted, 0), 0) for position in block]
    tokens, scores = predict(logits[:, rows], options)
    predictions = dict(zip(block, map(Prediction, tokens[0].tolist(), scores[0].tolist()), strict=True))
    return predictions, Kept(computed, own) if cache is None else cache
