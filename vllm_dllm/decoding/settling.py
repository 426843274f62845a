"""When tokens that may be edited are final (LLaDA2.1's token editing): of one block, and of windows of several.

Dimensions are those of ``vllm_dllm.decoding.step``.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_dllm.decoding.records import RequestOptions, Rules


def settled(
    done: Tensor, was_whole: Tensor, was_edited: Tensor, options: RequestOptions, post_steps: Tensor
) -> tuple[Tensor, Tensor]:
    """Finished blocks [D] and post-edit steps [D] where tokens may be edited.

    A block without masks gets another look until the step edits nothing, or the block has had its post-edit steps.

    Args:
        done: [D] bool: nothing is masked after the step.
        was_whole, was_edited: [D] bool: nothing was masked before the step; the step replaced a token.
    """
    assert options.edit_threshold is not None
    post_steps = post_steps + was_whole
    is_settled = was_whole & (~was_edited | (post_steps >= options.max_post_steps))
    edits_on = options.edit_threshold != torch.inf
    return done & (~edits_on | (options.max_post_steps == 0) | is_settled), post_steps


def settled_length(
    finished_length: Tensor,
    shift: Tensor,
    seen_masked: Tensor,
    options: RequestOptions,
    post_steps: Tensor,
    rules: Rules,
) -> tuple[Tensor, Tensor]:
    """Finished positions [D] of windows of several blocks, and post-edit steps [D], where tokens may be edited.

    A block is settled once a forward saw the block without masks and edited nothing in it. The window moves on by its
    leading settled blocks. The first block that is not may be edited in ``max_post_steps`` further forwards; then it is
    finished, whatever the last forward edited. ``post_steps`` counts these forwards, and starts again when the window
    moves.

    Args:
        finished_length: [D] int64: positions of the leading blocks without masks.
        shift: [D] int64: positions of the leading settled blocks.
        seen_masked: [D, W] bool: what was masked in the forward.
    """
    assert options.edit_threshold is not None
    was_whole = ~seen_masked.unflatten(1, (-1, rules.block_length)).any(dim=2)
    lead = (shift // rules.block_length).unsqueeze(1)
    # Behind a window that is settled as a whole is nothing.
    lead_was_whole = pad(was_whole, (0, 1)).gather(1, lead).squeeze(1)
    post_steps = post_steps * (shift == 0) + lead_was_whole
    given_up = lead_was_whole & (post_steps >= options.max_post_steps)
    looks_again = (options.edit_threshold != torch.inf) & (options.max_post_steps > 0)
    length = shift + given_up * rules.block_length
    return torch.where(looks_again, length, finished_length), post_steps


def leading_length(masked: Tensor, rules: Rules) -> Tensor:
    """[D] int64: positions of the leading blocks of each window that are without masks."""
    whole = ~masked.unflatten(1, (-1, rules.block_length)).any(dim=2)
    return whole.long().cumprod(dim=1).sum(dim=1) * rules.block_length
