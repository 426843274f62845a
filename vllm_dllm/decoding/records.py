"""What the stages of a denoising step (``vllm_dllm.decoding.step``) are told: frozen records of tensors.

Dimensions: D requests; B branches of each; windows of W positions, which are w blocks of L positions.
"""

import dataclasses
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from vllm_dllm.decoding.policies import Policy
from vllm_dllm.decoding.verifiers import Verifier


def dense(values: Tensor) -> Tensor:
    """``values``, in a compiled stage as a tensor without gaps: one form less than with them."""
    return values.clone(memory_format=torch.contiguous_format) if torch.compiler.is_compiling() else values


class PerRequest:
    """A frozen record whose tensors have one row per request."""

    def map(self, function: Callable[..., Tensor], *others: Self) -> Self:
        """The same of every tensor's ``function``, which is given the tensor of that name of the ``others`` too."""
        changed: dict[str, Tensor | PerRequest] = {}
        # Faster than dataclasses.fields, which is asked in every step.
        for name in self.__dataclass_fields__:  # type: ignore[attr-defined]
            value, *more = (getattr(record, name) for record in (self, *others))
            if isinstance(value, Tensor):
                changed[name] = function(value, *more)
            elif isinstance(value, PerRequest):
                changed[name] = value.map(function, *more)
            elif more and any(isinstance(other, (Tensor, PerRequest)) for other in more):
                raise TypeError(f"some records have {name}, and some have none")
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]

    def dense(self) -> Self:
        """The record; in a compiled stage with tensors that have no gaps."""
        return self.map(dense) if torch.compiler.is_compiling() else self

    def select(self, requests: Tensor) -> Self:
        """Some of the requests, [F] int64."""
        return self.map(lambda values: values[requests])

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The requests of all parts, one part after the other."""
        return parts[0].map(lambda *tensors: torch.cat(tensors), *parts[1:])


@dataclass(frozen=True)
class Rules:
    """What is the same in every step of an engine; the sampler makes it once."""

    mask_id: int
    block_length: int
    """L."""
    columns: Tensor
    """[W] int64: 0, 1, ..., W - 1, on the device."""
    group_length: int | None
    """Positions that are unmasked one group after the other, left to right; None: all of a window together."""
    first_apart: bool
    """Some forwards predict the first token of a window and nothing else: commits that predict, and refreshes of
    shifted families with full attention."""
    commit_emits: bool
    """The step that commits a block emits the first token of the next one."""
    threshold_inclusive: bool
    """Whether a confidence equal to the threshold passes."""
    most_branches: int = 1
    """Branches that a request may have."""
    strides: bool = False
    """Every forward verifies drafts and makes the next (``decoding.isd``)."""
    may_give: bool = False
    """Blocks may be given tokens before they are denoised (``decoding.thinking``)."""

    def written_by_denoising(self, generated: Tensor) -> Tensor:
        """Of ``generated`` positions [..., W] bool that are not emitted, those that the block's own steps write.

        Where commits emit, the first token of a block comes from the commit of the block before or, after a preemption,
        from a prefill. The commit has emitted the token; the prefill has not. Column 0 is left out in both cases, so
        that a preempted request has the same quotas as any other.
        """
        return generated & (self.columns > 0) if self.commit_emits else generated

    @property
    def window_blocks(self) -> int:
        """w."""
        return len(self.columns) // self.block_length


UNREACHED = 1 << 62
"""A position that no text reaches."""


@dataclass(frozen=True)
class RequestOptions:
    """What D requests asked for; ``runtime.states`` makes it when the batch changes."""

    policies: Set[Policy]
    """Policies that occur."""
    verifiers: Set[Verifier]
    """Verifiers that occur."""
    policy: Tensor
    """[D] int64: values of ``Policy``."""
    quota: Tensor
    """[D] int64: positions that a step unmasks."""
    quota_remainder: Tensor
    """[D] int64: steps of a block that unmask one position more."""
    verifier: Tensor
    """[D] int64: values of ``Verifier``."""
    timed: Tensor
    """[D] bool: the next state depends on the number of steps, not on the present state alone."""
    edit_threshold: Tensor | None
    """[D] float32, ``inf`` for a request that edits nothing; None: no request edits tokens."""
    max_post_steps: Tensor
    """[D] int64: steps that may edit a block once nothing is masked; 0: the block is final at once."""
    add_level: Tensor
    """[D] int64: share of a block that ``MULTI_BLOCK`` decodes before the next begins (``policies.share_level``)."""
    full_level: Tensor
    """[D] int64: share of a block that ``MULTI_BLOCK`` decodes before the next is fully activated."""
    last_position: Tensor
    """[D] int64: where the last token is that the request may have, which ends it inside a block; ``UNREACHED`` for a
    request that ends with a whole block."""
    stop_token_ids: Tensor | None
    """[D, S] int64, padded with -1: tokens that end the request inside a block; None: no request has any."""


@dataclass(frozen=True)
class Progress(PerRequest):
    """Where D requests stand: [D] int64 each, or bool from a step.

    ``runtime.states.DenoiseStates.rows`` has a column for each, in this order.
    """

    block_start: Tensor
    """Absolute position of the window's first column."""
    first: Tensor
    """Column of the first token that the request generates and has not emitted."""
    step: Tensor
    """Denoising steps the current block has had, those that accepted drafts stand for included."""
    post_steps: Tensor
    """Denoising steps the current block has had since nothing is masked in it (token editing)."""
    commit: Tensor
    """1 while the block before the current one is finished and its K/V is not in the cache yet."""
    num_drafts: Tensor
    """Drafts that wait for the next forward."""
    prefix_copied: Tensor
    """1 once the request's scratch pages hold a copy of what its page holds before the current block."""
    pending: Tensor
    """Positions that FeF drafted and has not verified, the first included, which it has committed; those that S2D2
    drafted and has not verified, which the window holds."""
    passes: Tensor
    """Passes of FeF that the current block has had."""
    span_start: Tensor
    """Column of the first of S2D2's ``pending`` positions."""
    switch: Tensor
    """S2D2's hysteresis: bit 0 is set while it verifies, bit 1 if it did when the current block began, bit 2 if it did
    when the block before began (``s2d2.switch_after``)."""
    given: Tensor
    """Column of the first token that the current block was given (``decoding.thinking``)."""
    num_given: Tensor
    """Tokens that the current block was given."""


def given_columns(progress: Progress, rules: Rules) -> Tensor | None:
    """[D, W] bool: positions whose tokens the current block was given; None: the engine gives none."""
    if not rules.may_give:
        return None
    begin, number = progress.given.unsqueeze(1), progress.num_given.unsqueeze(1)
    return (rules.columns >= begin) & (rules.columns < begin + number)


@dataclass(frozen=True)
class Window(PerRequest):
    """What a forward saw of D requests; made from the row plan."""

    progress: Progress
    branches: Tensor
    """[D, B, W] int64: tokens of every branch; masked positions hold the mask token."""
    present: Tensor
    """[D, B] bool: branches that were forwarded; branch 0 always is."""
    levels: Tensor
    """[D, B] int64: denoising steps that each branch is ahead of branch 0."""
    commit_only: Tensor
    """[D] bool: the forward wrote the block before to the K/V cache and denoises nothing."""
    denoises: Tensor
    """[D] bool: the forward denoises, the opposite of ``commit_only``."""
    first_only: Tensor
    """[D] bool: such a forward that predicts the first token of the window (``Rules.first_apart``)."""
    before: Tensor
    """[D, L] int64: the finished block before the window, where ``progress.commit`` is set."""
    generated: Tensor
    """[D, W] bool: positions that are neither prompt nor given. A mask token of the prompt is a token like others."""
    given: Tensor | None = None
    """[D, W] bool: positions whose tokens the block was given; None: the engine gives none (``Rules.may_give``)."""
    predicted_outside: Tensor | None = None
    """[D, W] bool: positions whose logits are those of a row outside of the window (shifted families), which a forward
    that is ``first_only`` predicts; None: the first position alone."""


@dataclass(frozen=True)
class Measured(PerRequest):
    """What the logits say of every position; made by ``runtime.logits.rows``.

    [D, B, W] of all branches, [D, W] of one.
    """

    token: Tensor
    """int64: the most likely token, or the one drawn."""
    confidence: Tensor
    """float32: its probability."""
    entropy: Tensor | None = None
    """float32, nats; None where no policy goes by it."""
    margin: Tensor | None = None
    """float32: difference of the two largest probabilities; None where no policy goes by it."""

    def of_branch(self, branch: Tensor) -> "Measured":
        """What the logits of one branch [D] of each request say: [D, W]."""
        return self.map(lambda values: of_branch(values, branch))

    def move(self, by: Tensor) -> "Measured":
        """Columns [D, W] moved ``by`` [D] to the left."""
        return self.map(lambda values: move(values, by, 0))


def of_branch(values: Tensor, branch: Tensor) -> Tensor:
    """[D, W]: of ``values`` [D, B, W] those of ``branch`` [D]."""
    if values.shape[1] == 1:
        return values.squeeze(1)
    index = branch.view(-1, 1, 1).expand(-1, 1, values.shape[2])
    return values.gather(1, index).squeeze(1)


def move(values: Tensor, by: Tensor, fill: int) -> Tensor:
    """Columns of ``values`` [D, W, ...] moved ``by`` [D] to the left; ``fill`` comes in from the right."""
    width = values.shape[1]
    columns = torch.arange(width, device=values.device) + by.unsqueeze(1)
    outside = (columns < 0) | (columns >= width)
    more = [1] * (values.ndim - 2)
    index = columns.clamp(0, width - 1).view(*columns.shape, *more).expand_as(values)
    return values.gather(1, index).masked_fill(outside.view(*outside.shape, *more), fill)
