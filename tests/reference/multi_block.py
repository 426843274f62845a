"""Multi-block decoding after D2F (arXiv 2508.09192), written plainly: one request, no cache, Python loops.

A window of several blocks is denoised at a time. Every forward recomputes the whole text up to the end of the window,
and every block sees itself and the blocks before it as they stand.

Where tokens may be edited (LLaDA2.1), every forward edits all blocks of the window, and a block without masks is
finished once it is settled: a forward has edited nothing in it nor in the blocks before it, or it has had its post-edit
steps.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from .decode import Decoded, Model, Options, Prediction, cut, ends_in_tokens, forward, predict


@dataclass(frozen=True, kw_only=True)
class MultiBlock:
    """The rule: names and meanings are those of ``vllm_dllm.options.schema``."""

    policy: ClassVar = "multi_block"
    window_blocks: int
    threshold: float = 0.9
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95


def decode_multi_block(
    model: Model, prompt: list[int], max_new_tokens: int, options: Options, rule: MultiBlock
) -> Decoded:
    """Generate at least ``max_new_tokens`` tokens in whole blocks, fewer where a stop token ends decoding.

    Blocks are counted from the start of the text, so that the prompt's tail shares a block with the first masks. The
    window begins with the first block that no forward has seen finished.
    """
    length, result = options.block_length, Decoded()
    begin, end = len(prompt), len(prompt) + max_new_tokens
    start, canvas = begin // length * length, list(prompt)
    # End of the text that is final, and forwards that saw the block behind it whole.
    settled, looks = begin, 0
    edits, looks_again = options.edit_threshold != math.inf, options.max_post_edit_steps > 0
    while True:
        canvas += [options.mask_id] * (start + rule.window_blocks * length - len(canvas))
        blocks = [
            [i for i in range(first, first + length) if i >= begin] for first in range(start, len(canvas), length)
        ]
        finished = finished_length(canvas, start, options)
        if not (edits and looks_again):
            settled = max(settled, start + finished)
        if settled >= end or options.stop_ids.intersection(canvas[begin:settled]):
            break
        if options.eos_early_stop and not edits and ends_in_tokens(canvas[begin:], max_new_tokens, options):
            break

        logits = forward(model, canvas, start, options)
        predictions = {i: predict(logits[i], options.mask_id) for block in blocks for i in block}
        chosen = choose(canvas, blocks, predictions, options, rule)
        edited = [i for i in range(settled, len(canvas)) if edits_token(canvas[i], predictions.get(i), options)]
        chosen += edited
        for i in chosen:
            canvas[i] = predictions[i].token
        result.nfe += 1
        result.steps.append([(i, canvas[i]) for i in chosen])
        # A forward has seen these blocks finished, and as they stay, so their K/V is final.
        kept = finished
        while any(i < start + kept for i in edited):
            kept -= length
        if edits and looks_again:
            settled = max(settled, start + kept)
            looks = (looks if kept == 0 else 0) + (finished > kept)
            if finished > kept and looks >= options.max_post_edit_steps:
                settled = start + kept + length
        start += kept

    result.canvas = canvas[begin:]
    result.tokens = cut(result.canvas[:max_new_tokens], options.stop_ids)
    return result


def choose(
    canvas: list[int],
    blocks: list[list[int]],
    predictions: dict[int, Prediction],
    options: Options,
    rule: MultiBlock,
) -> list[int]:
    """Positions that one step unmasks, block after block."""
    chosen: list[int] = []
    in_front = 1.0
    for block in blocks:
        # A block begins once enough of the block in front is decoded.
        if in_front < rule.block_add_threshold:
            break
        masked = [i for i in block if canvas[i] == options.mask_id]
        above = [i for i in masked if passes(predictions[i].confidence, options, rule)]
        if not above and masked and in_front >= rule.decoded_token_threshold:
            # Fully activated: something is unmasked in any case.
            above = [max(masked, key=lambda i: predictions[i].confidence)]
        chosen += above
        in_front = (len(block) - len(masked)) / len(block)
    return chosen


def edits_token(token: int, prediction: Prediction | None, options: Options) -> bool:
    if prediction is None or token == options.mask_id:
        return False
    return prediction.token != token and prediction.confidence > options.edit_threshold


def passes(confidence: float, options: Options, rule: MultiBlock) -> bool:
    return confidence > rule.threshold or (options.threshold_inclusive and confidence == rule.threshold)


def finished_length(canvas: list[int], start: int, options: Options) -> int:
    """Positions of the window's leading blocks that have no masks."""
    length = 0
    while start + length < len(canvas):
        if options.mask_id in canvas[start + length : start + length + options.block_length]:
            break
        length += options.block_length
    return length
