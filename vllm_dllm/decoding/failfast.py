"""FailFast (arXiv 2512.20573, Algorithm 1): a draft grows while the drafter is sure of it.

A request's draft starts behind its text. The drafter fills the masks of a diffusion block sub-block by sub-block, one
forward for each, and forwards a full block once more, which writes the K/V that the next block reads. Whenever the
draft has its target length, the drafter stops if it was unsure of any position so far, or else aims for some tokens
more. The number of forwards that a request needs depends on its text, so every function here is one of tensors: a
batch runs as many forwards as its longest draft, and a request that has stopped changes nothing any more.

Shapes: R requests, W draft positions, L block length, S sub-block length. A position is one of the whole text; draft i
stands at position ``known + i``.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How long drafts become; the paper's names in brackets."""

    first: int  # target length at the beginning
    step: int  # tokens by which the target length grows (N)
    most: int  # confidences after which a draft no longer grows (N_max)
    threshold: float  # a confidence below is one of an unsure drafter (tau)
    unmask_threshold: float  # masks of the sub-block with a confidence above get their tokens at once
    sub_block_length: int  # S
    block_length: int  # L
    shifted: bool  # row i predicts position i + 1
    num_drafts: int  # the longest draft (k)
    limit: int  # positions from here on are never drafted

    @property
    def num_blocks(self) -> int:
        """Blocks that a draft may reach into, the unfinished one of the text among them."""
        return -(-self.most // self.block_length) + 1

    @property
    def width(self) -> int:
        """W: positions of the blocks, and the one behind that a shifted model predicts from the last block."""
        return self.num_blocks * self.block_length + 1


def longest_draft(first: int, step: int, most: int, block_length: int | None) -> int:
    """The longest draft that can grow by these numbers.

    Args:
        block_length: of a drafter that fills blocks; ``None``: one forward makes the whole draft.
    """
    length = first
    # The first position of a block has no confidence: the block before predicts its token.
    while length < most + (0 if block_length is None else -(-length // block_length)):
        length += step
    return length


def forwards_of_one_each(growth: Growth) -> int:
    """Forwards of the longest draft if each sub-block takes one forward."""
    size, length = growth.sub_block_length, growth.block_length

    def forwards(offset: int) -> int:
        """Where the text ends ``offset`` tokens into its block."""
        end = offset + growth.num_drafts
        sub_blocks = -(-min(end, growth.num_blocks * length) // size) - offset // size
        full_blocks = min((end - 1) // length, growth.num_blocks) + (growth.shifted and offset == 0)
        return sub_blocks + full_blocks

    return max(map(forwards, range(length)))


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Drafts in the making."""

    known: torch.Tensor  # [R] int64: length of the text
    tokens: torch.Tensor  # [R, W] int64
    is_filled: torch.Tensor  # [R, W] bool: the position has its token
    block: torch.Tensor  # [R] int64: first position of the block that the next forward computes
    end: torch.Tensor  # [R] int64: position behind the draft of the target length
    num_confidences: torch.Tensor  # [R] int64
    is_unsure: torch.Tensor  # [R] bool: a confidence was below the threshold
    is_done: torch.Tensor  # [R] bool


class Asked(NamedTuple):
    """What the next forward is asked for: each ``[R, S]``."""

    positions: torch.Tensor
    """int64"""
    is_asked: torch.Tensor
    """bool: the position is masked and gets its token from this forward, or could."""
    is_next_block: torch.Tensor
    """[R] bool: the block is full, and its last row predicts the first token of the next one."""


def begin(growth: Growth, known: torch.Tensor) -> Drafts:
    """Drafts behind texts of length ``known`` [R]."""
    shape = (len(known), growth.width)
    # The end of a text that fills its blocks is predicted from the last of them by a shifted model.
    reads = known - 1 if growth.shifted else known
    return Drafts(
        known=known,
        tokens=known.new_zeros(shape),
        is_filled=torch.zeros(shape, dtype=torch.bool, device=known.device),
        block=reads - reads % growth.block_length,
        end=known + min(growth.first, growth.num_drafts),
        num_confidences=torch.zeros_like(known),
        is_unsure=torch.zeros_like(known, dtype=torch.bool),
        is_done=known >= growth.limit,
    )


def block_tokens(growth: Growth, drafts: Drafts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The active blocks.

    Returns:
        positions ``[R, L]``; their drafted tokens ``[R, L]``, of no meaning where the next are True or the position is
        of the text; ``[R, L]`` bool, which positions are masked.
    """
    positions = drafts.block.unsqueeze(1) + torch.arange(growth.block_length, device=drafts.block.device)
    index = positions - drafts.known.unsqueeze(1)
    place = index.clamp(0, growth.width - 1)
    is_masked = (index >= 0) & ~drafts.is_filled.gather(1, place)
    return positions, drafts.tokens.gather(1, place), is_masked


def ask(growth: Growth, drafts: Drafts) -> Asked:
    """Which positions the next forward has to tell of: the first sub-block with masks, or the next block's first."""
    size = growth.sub_block_length
    positions, _, is_masked = block_tokens(growth, drafts)
    is_masked = is_masked & (positions < growth.limit)
    is_next_block = ~is_masked.any(1)
    start = is_masked.int().argmax(1)
    start = torch.where(is_next_block, growth.block_length, start - start % size).unsqueeze(1)
    column = torch.arange(size, device=positions.device)
    index = (start + column).clamp(max=growth.block_length - 1)
    asked = drafts.block.unsqueeze(1) + start + column
    predicts_next = is_next_block.unsqueeze(1) & (column == 0) & (asked < growth.limit) & growth.shifted
    is_asked = torch.where(is_next_block.unsqueeze(1), predicts_next, is_masked.gather(1, index))
    return Asked(asked, is_asked & ~drafts.is_done.unsqueeze(1), is_next_block)


def grow(
    growth: Growth,
    drafts: Drafts,
    asked: Asked,
    tokens: torch.Tensor,
    confidences: torch.Tensor,
    whole: torch.Tensor,
) -> Drafts:
    """The drafts after a forward.

    Args:
        tokens: ``[R, S]``, what the forward says of the positions that it was asked for.
        confidences: ``[R, S]``, probability of the likeliest token.
        whole: ``[R]`` bool: requests whose drafts are drawn. All masks of a sub-block get their tokens in one forward,
            and the target length grows by at least a sub-block. Rejection sampling is exact only if the decision to
            verify draft i depends on the drafts before i alone. A shorter step would leave drafts behind the target
            length, which the next forward would read and decide about.
    """
    is_active, is_next_block = ~drafts.is_done, asked.is_next_block
    is_filling = (is_active & ~is_next_block).unsqueeze(1)
    confidences = confidences.masked_fill(~asked.is_asked, -1.0)
    is_best = torch.zeros_like(asked.is_asked).scatter_(1, confidences.argmax(1, keepdim=True), True)
    is_taken = is_best | whole.unsqueeze(1) | is_next_block.unsqueeze(1) | (confidences > growth.unmask_threshold)
    is_taken = is_taken & asked.is_asked
    place = (asked.positions - drafts.known.unsqueeze(1)).clamp(0, growth.width - 1)
    # Positions of the text share place 0 with the first draft: adding, unlike storing, has no last writer.
    new = torch.zeros_like(drafts.tokens).scatter_add_(1, place, tokens.masked_fill(~is_taken, 0))
    is_new = torch.zeros_like(drafts.tokens).scatter_add_(1, place, is_taken.long()) > 0
    is_filled = drafts.is_filled | is_new
    measured = asked.is_asked & is_filling
    num_confidences = drafts.num_confidences + measured.sum(1)
    is_unsure = drafts.is_unsure | (measured & (confidences < growth.threshold)).any(1)
    drafted = drafts.known.unsqueeze(1) + torch.arange(growth.width, device=place.device)
    is_long = (is_filled | (drafted >= drafts.end.unsqueeze(1))).all(1) & is_filling.squeeze(1)
    longest = drafts.known + growth.num_drafts
    step = torch.where(whole, max(growth.step, growth.sub_block_length), growth.step)
    # Fail fast, or win big.
    is_last = is_unsure | (num_confidences >= growth.most) | (drafts.end >= longest)
    block = torch.where(is_active & is_next_block, drafts.block + growth.block_length, drafts.block)
    first_block = drafts.known - drafts.known % growth.block_length
    beyond = (first_block + growth.num_blocks * growth.block_length).clamp(max=growth.limit)
    return replace(
        drafts,
        tokens=torch.where(is_new, new, drafts.tokens),
        is_filled=is_filled,
        block=block,
        end=torch.where(is_long & ~is_last, torch.minimum(drafts.end + step, longest), drafts.end),
        num_confidences=num_confidences,
        is_unsure=is_unsure,
        is_done=drafts.is_done | (is_long & is_last) | (block >= beyond),
    )


def lengths(drafts: Drafts) -> torch.Tensor:
    """How many tokens each draft has, ``[R]`` int64: to its target length, or to its first mask if that is nearer."""
    return torch.minimum(drafts.is_filled.long().cumprod(1).sum(1), drafts.end - drafts.known)


def length_of_one_forward(growth: Growth, confidences: torch.Tensor) -> torch.Tensor:
    """How many of the drafts of one forward to verify, ``[R]`` int64: the same rule, each target length at a time.

    Args:
        confidences: ``[R, k]``, probability of the likeliest token.
    """
    ends = torch.arange(growth.first, growth.num_drafts + growth.step, growth.step, device=confidences.device)
    ends = ends.clamp(max=growth.num_drafts)
    is_sure = (confidences >= growth.threshold).long().cumprod(1).bool()
    goes_on = is_sure[:, ends - 1] & (ends < min(growth.most, growth.num_drafts))
    return ends[goes_on.long().cumprod(1).sum(1).clamp(max=len(ends) - 1)]
