"""Budgets of tokens for reasoning: the end of the reasoning is written into the block that would pass the budget.

vLLM's parameter ``thinking_token_budget`` counts tokens behind the last marker that starts reasoning, in the prompt or
in the output. Autoregressive decoding forces the end of the reasoning token by token once the budget is spent. A block
is denoised in any order, so here the end is part of a block before the block's first denoising step, as in NVIDIA's
sampler of Nemotron-Labs-Diffusion (``max_thinking_tokens``): tokens before it are denoised towards it.

What a block gets is decided by the text before the block::

    due   = behind the last start marker + budget
    begin = due, or the block's first free position where due lies before that
    if the text's last start marker is behind its last end marker, and begin lies within the block:
        write the end of the reasoning from ``begin`` on, less what the text already ends with

Text and positions are absolute. Nothing here waits for the device or knows vLLM.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_dllm.decoding.records import PerRequest

NOWHERE = -1
"""Position of a marker that a text does not have, and a token that is none."""


@dataclass(frozen=True)
class Markers:
    """Tokens around reasoning, [n] int64 each; never empty."""

    start: Tensor
    natural_end: Tensor
    """What a model ends its reasoning with."""
    forced_end: Tensor
    """What is written once the budget is spent; ends with ``natural_end`` as a rule."""

    @property
    def context(self) -> int:
        """Tokens before a block that may hold the beginning of a marker."""
        return max(len(self.start), len(self.natural_end), len(self.forced_end)) - 1


@dataclass(frozen=True)
class Reasoning(PerRequest):
    """What the texts of D requests say of their reasoning: [D] int64 each."""

    start: Tensor
    """Position of the last start marker; NOWHERE: there is none."""
    end: Tensor
    """Position of the last natural end; NOWHERE: there is none."""

    @property
    def is_open(self) -> Tensor:
        """[D] bool: the text is within its reasoning."""
        return self.start > self.end

    def column(self, row: Tensor) -> "Reasoning":
        """Of records [D, R] those of ``row`` [D]."""
        return self.map(lambda values: values.gather(1, row.unsqueeze(1)).squeeze(1))

    def where(self, condition: Tensor, other: "Reasoning") -> "Reasoning":
        """These records where the ``condition`` [D] holds, else the ``other`` ones."""
        return self.map(lambda own, others: torch.where(condition, own, others), other)


@dataclass(frozen=True)
class Given:
    """Tokens that a block has before it is denoised: [D] int64 each, and [D, L] int64."""

    column: Tensor
    """Column of the first of them."""
    number: Tensor
    tokens: Tensor
    """The token of each column; NOWHERE where there is none."""


def read(text: Tensor, text_start: Tensor, before: Reasoning, markers: Markers) -> Reasoning:
    """What the text says through each of its positions: records [D, T].

    Args:
        text: [D, T] int64; NOWHERE before position 0.
        text_start: [D] int64: position of the first column.
        before: [D], of text that begins earlier.
    """

    def last(marker: Tensor, known: Tensor) -> Tensor:
        size = len(marker)
        if text.shape[1] < size:
            return known.unsqueeze(1).expand_as(text)
        there = (text.unfold(1, size, 1) == marker).all(dim=2)
        position = text_start.unsqueeze(1) + torch.arange(there.shape[1], device=text.device)
        found = pad(position.masked_fill(~there, NOWHERE), (size - 1, 0), value=NOWHERE)
        return torch.maximum(found.cummax(dim=1).values, known.unsqueeze(1))

    return Reasoning(last(markers.start, before.start), last(markers.natural_end, before.end))


def given_to_block(
    reasoning: Reasoning, budget: Tensor, text: Tensor, free: Tensor, block_start: Tensor, length: int, markers: Markers
) -> Given:
    """What a block of ``length`` positions is given.

    Args:
        reasoning: [D], of the text before the block's free positions.
        budget: [D] int64: tokens of reasoning; negative: any number.
        text: [D, T] int64: the end of that text, ``markers.context`` tokens at least; NOWHERE before position 0.
        free: [D] int64: first position of the block that is no prompt.
        block_start: [D] int64.
    """
    forced = markers.forced_end
    due = reasoning.start + len(markers.start) + budget
    begin = torch.maximum(due, free)
    written = _written(text, forced) * (due <= free)
    column = begin - block_start
    number = torch.minimum(len(forced) - written, length - column).clamp(min=0)
    number = number * (reasoning.is_open & (budget >= 0))
    columns = torch.arange(length, device=text.device)
    index = columns - column.unsqueeze(1)
    within = (index >= 0) & (index < number.unsqueeze(1))
    tokens = forced[(index + written.unsqueeze(1)).clamp(0, len(forced) - 1)].masked_fill(~within, NOWHERE)
    return Given(column, number, tokens)


def forced_next(
    text: Tensor, text_start: Tensor, reasoning: Reasoning, budget: Tensor, rows: int, markers: Markers
) -> Tensor:
    """The token that must follow each of the last ``rows`` positions of a text: [D, rows] int64, or NOWHERE.

    Autoregressive decoding knows the text before each token, so the end comes exactly where it is due.

    Args:
        text: [D, T] int64, ``markers.context`` tokens before the rows; NOWHERE before position 0.
        text_start: [D] int64: position of the first column.
        reasoning: records [D, T] of ``read``.
    """
    forced, num_columns = markers.forced_end, text.shape[1]
    behind = text_start.unsqueeze(1) + torch.arange(1, num_columns + 1, device=text.device)
    spent = behind - reasoning.start - len(markers.start) >= budget.unsqueeze(1)
    applies = spent & reasoning.is_open & (budget >= 0).unsqueeze(1)
    size = len(forced) - 1
    tails = pad(text, (size, 0), value=NOWHERE).unfold(1, size, 1)[:, 1:] if size else text.unsqueeze(2)[:, :, :0]
    return forced[_written(tails, forced)].masked_fill(~applies, NOWHERE)[:, -rows:]


def _written(text: Tensor, forced: Tensor) -> Tensor:
    """[...] int64: tokens of ``forced`` [F], not all, that texts [..., T] end with: the most that do."""
    size = len(forced) - 1
    if not size:
        return torch.zeros(text.shape[:-1], dtype=torch.int64, device=text.device)
    count = torch.arange(1, size + 1, device=text.device).unsqueeze(1)
    index = torch.arange(size, device=text.device)
    tail = text[..., -size:]
    # Row n - 1: the last n tokens beside the first n of ``forced``.
    same = (tail[..., (size - count + index).clamp(max=size - 1)] == forced[:size]) | (index >= count)
    return (same.all(dim=-1) * count.squeeze(1)).amax(dim=-1)
