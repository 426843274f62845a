"""Unmasking policies: which masked positions of a block a denoising step turns into tokens.

Every policy is an order of the candidates and a count: the first ``count`` of that order are unmasked. Some unmask
others beside them, whatever their place in the order.

=============  =====================  ====================================  ===================================
policy         order                  count                                 and besides
=============  =====================  ====================================  ===================================
``STATIC``     most confident first   the step's quota
``THRESHOLD``  most confident first   the step's quota                      all above the threshold
``SEQUENTIAL`` left to right          the step's quota
``ENTROPY``    least entropy first    prefix sums of the entropy that stay
                                      below the bound, but at least 1
``LOCALLEAP``  most confident first   the step's quota                      anchors, which reach the threshold,
                                                                            and all near one that reach the
                                                                            relaxed threshold
=============  =====================  ====================================  ===================================

Ties go to the leftmost. All functions take a batch of B requests with blocks of L positions, treat every
request by itself, and never wait for the device. They know nothing of vLLM.
"""

from collections.abc import Set
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Policy(IntEnum):
    """Unmasking policy of a request, as stored in ``PolicyParams.policy``.

    ``Policy[name.upper()]`` is the policy of a ``vllm_dllm.config.PolicyName``.
    """

    STATIC = 0
    """Low-confidence remasking with a fixed number of tokens per step (LLaDA, SDAR)."""
    THRESHOLD = 1
    """Confidence threshold (Fast-dLLM, SDAR's ``low_confidence_dynamic``, LLaDA2)."""
    SEQUENTIAL = 2
    """Left to right (SDAR)."""
    ENTROPY = 3
    """Entropy bound (EB-Sampler, as SDAR and JetEngine offer it)."""
    LOCALLEAP = 4
    """Confidence threshold, relaxed near positions that reach it (LocalLeap, arXiv 2510.07081)."""


ALL_POLICIES: Set[Policy] = frozenset(Policy)


class PolicyParams(NamedTuple):
    """What each request of a batch asked for. Fields of other policies than the request's own are ignored."""

    policy: Tensor
    """[B] int32 or int64: values of ``Policy``."""
    quota: Tensor
    """[B] int64: tokens of this step (see ``quota_of_step``); 0 is allowed."""
    threshold: Tensor
    """[B] float32: probability."""
    entropy_bound: Tensor
    """[B] float32: nats."""
    relaxed_threshold: Tensor
    """[B] float32: probability."""
    radius: Tensor
    """[B] int64: positions on either side of an anchor that are near it."""


def policy_scores(
    candidates: Tensor,
    confidence: Tensor,
    entropy: Tensor | None,
    params: PolicyParams,
    *,
    present: Set[Policy] = ALL_POLICIES,
) -> Tensor:
    """The order that each row's policy goes by.

    Args:
        candidates, confidence, entropy, params, present: as in ``unmask``.

    Returns:
        [B, L] float32: the higher, the earlier; -inf outside ``candidates``.

    Raises:
        ValueError: ``ENTROPY`` is present and ``entropy`` is None.
    """
    scores = confidence
    if Policy.SEQUENTIAL in present:
        leftmost_first = -torch.arange(candidates.shape[1], device=candidates.device, dtype=confidence.dtype)
        scores = _where_policy(Policy.SEQUENTIAL, leftmost_first.unsqueeze(0), scores, params, present)
    if Policy.ENTROPY in present:
        if entropy is None:
            raise ValueError("a batch with policy ENTROPY needs the entropy of its positions")
        scores = _where_policy(Policy.ENTROPY, -entropy, scores, params, present)
    return scores.where(candidates, -torch.inf)


def unmask(
    candidates: Tensor,
    confidence: Tensor,
    entropy: Tensor | None,
    params: PolicyParams,
    *,
    threshold_inclusive: bool,
    present: Set[Policy] = ALL_POLICIES,
) -> Tensor:
    """Choose the positions that this step unmasks.

    A row with candidates gets at least one of them, unless its quota is 0 and (for ``THRESHOLD`` and
    ``LOCALLEAP``) none of them passes the threshold.

    Args:
        candidates: [B, L] bool: masked positions that may be unmasked.
        confidence: [B, L] float32: probability of the token that each candidate would get.
        entropy: [B, L] float32: entropy in nats of each candidate's distribution; may be None when
            ``ENTROPY`` is not in ``present``.
        params: policy of each row.
        threshold_inclusive: whether a confidence equal to the threshold passes; in ``LOCALLEAP`` it always does.
        present: policies that occur in the batch, where the host knows them; the others cost nothing.

    Returns:
        [B, L] bool, a subset of ``candidates``.

    Raises:
        ValueError: ``ENTROPY`` is present and ``entropy`` is None.
    """
    scores = policy_scores(candidates, confidence, entropy, params, present=present)
    best_first, order = scores.sort(dim=1, descending=True, stable=True)
    count = params.quota
    if Policy.ENTROPY in present:
        within = (-best_first).cumsum(dim=1) < params.entropy_bound.unsqueeze(1)
        at_least_one = within.sum(dim=1).clamp(min=1)
        count = _where_policy(Policy.ENTROPY, at_least_one, count, params, present)
    in_count = torch.arange(candidates.shape[1], device=candidates.device) < count.unsqueeze(1)
    chosen = torch.empty_like(candidates).scatter_(1, order, in_count)

    threshold = params.threshold.unsqueeze(1)
    if Policy.THRESHOLD in present:
        above = confidence >= threshold if threshold_inclusive else confidence > threshold
        chosen = _where_policy(Policy.THRESHOLD, chosen | above, chosen, params, present)
    if Policy.LOCALLEAP in present:
        anchors = candidates & (confidence >= threshold)
        relaxed = _near(anchors, params.radius) & (confidence >= params.relaxed_threshold.unsqueeze(1))
        chosen = _where_policy(Policy.LOCALLEAP, chosen | anchors | relaxed, chosen, params, present)
    # A count above the number of candidates reaches into the -inf tail of the order.
    return chosen & candidates


def _near(anchors: Tensor, radius: Tensor) -> Tensor:
    """[B, L] bool: positions with an anchor ([B, L] bool) no more than ``radius`` ([B] int64) away."""
    positions = torch.arange(anchors.shape[1], device=anchors.device)
    distance = (positions.unsqueeze(1) - positions).abs()  # [L, L]
    return ((distance <= radius.view(-1, 1, 1)) & anchors.unsqueeze(1)).any(dim=2)


def _where_policy(policy: Policy, value: Tensor, other: Tensor, params: PolicyParams, present: Set[Policy]) -> Tensor:
    """``value`` in the rows of this policy, ``other`` in the rest. Both [B] or both [B or 1, L]."""
    if len(present) == 1:
        return value
    rows = params.policy == policy
    return torch.where(rows if value.ndim == 1 else rows.unsqueeze(1), value, other)


def quota_of_step(quota: Tensor, quota_remainder: Tensor, step: Tensor) -> Tensor:
    """Tokens of denoising step ``step`` (from 0, restarting in every block); one more in the first steps.

    Args:
        quota, quota_remainder, step: [B] int64.

    Returns:
        [B] int64.
    """
    return quota + (step < quota_remainder)


def sub_block_candidates(masked: Tensor, sub_block_length: int) -> Tensor:
    """Masked positions of the leftmost sub-block that still has any (Fast-dLLM v2's small blocks).

    Args:
        masked: [B, L] bool.
        sub_block_length: positions per sub-block, counted from the start of the block.

    Returns:
        [B, L] bool.
    """
    first = masked.view(torch.uint8).argmax(dim=1, keepdim=True)
    sub_block = torch.arange(masked.shape[1], device=masked.device) // sub_block_length
    return masked & (sub_block == first // sub_block_length)


def edits(tokens: Tensor, predicted: Tensor, confidence: Tensor, editable: Tensor, edit_threshold: Tensor) -> Tensor:
    """Unmasked positions whose token the model now wants replaced (LLaDA2.1's token editing, T2T).

    Args:
        tokens: [B, L] int64: the block before this step.
        predicted: [B, L] int64: the model's token for each position, from this step's forward.
        confidence: [B, L] float32: probability of ``predicted``.
        editable: [B, L] bool: positions that are neither masked nor part of the prompt.
        edit_threshold: [B] float32: probability that a replacement must exceed; ``inf`` turns editing off.

    Returns:
        [B, L] bool: positions to overwrite with ``predicted``.
    """
    return editable & (predicted != tokens) & (confidence > edit_threshold.unsqueeze(1))


def stop_length(tokens: Tensor, mask_id: int, is_stop: Tensor, start: Tensor) -> Tensor:
    """Tokens that a block outputs when a stop token ends it: from ``start`` through the first stop token.

    Args:
        tokens: [B, L] int64.
        mask_id: the mask token.
        is_stop: [B, L] bool: positions that hold a stop token.
        start: [B] int64: first position of the block that is not prompt.

    Returns:
        [B] int64; 0 where no stop token stands at or after ``start``, or a mask stands before it.
    """
    masked = tokens == mask_id
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    decisive = (is_stop | masked) & (positions >= start.unsqueeze(1))
    first = decisive.view(torch.uint8).argmax(dim=1, keepdim=True)
    stops = (decisive & ~masked).gather(1, first).squeeze(1)
    return (first.squeeze(1) - start + 1).where(stops, 0)
