"""Unmasking policies: which masked positions of a block a denoising step turns into tokens.

Every policy is an order of the candidates (`vllm_dllm.methods.PolicyRow.orders_by`) and a count: the first ``count`` of
that order are unmasked, as a rule the step's quota. ``THRESHOLD``, ``LOCALLEAP`` and ``HIERARCHY`` unmask others beside
them, whatever their place in the order. ``MULTI_BLOCK`` has no count: it looks at every block of a window by itself.

With ``alg_temp`` the order is drawn: position after position without replacement, each with a probability in proportion
to ``exp(score / alg_temp)``.

Ties go to the leftmost. All functions take a batch of B requests with blocks of L positions, treat every
request by itself, and never wait for the device. Noise is an argument, so that it can be the request's own (see
``vllm_dllm.kernels.confidence.position_noise``).
"""

from collections.abc import Set
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_dllm.methods import BY_KIND, POLICIES, Policy

ALL_POLICIES: Set[Policy] = frozenset(Policy)
ALG_TEMP_POLICIES: Set[Policy] = frozenset(row.kind for row in POLICIES if row.has_alg_temp)
"""Policies that unmask ``PolicyParams.ratio`` of the candidates, in an order that ``alg_temp`` may draw."""

TIMED_POLICIES: Set[Policy] = frozenset(row.kind for row in POLICIES if row.timed)
"""Policies with a schedule of timesteps, which gives ``PolicyParams.ratio``."""

DRAWN_POLICIES: Set[Policy] = frozenset(row.kind for row in POLICIES if row.drawn)
"""Policies that draw positions, whatever ``alg_temp`` says."""


ROUNDING_POLICIES: Set[Policy] = frozenset({Policy.ENTROPY, Policy.FACTOR})
"""Policies whose count rests on a sum or quotient of floats, which rounds otherwise where it is computed otherwise."""


class PolicyParams(NamedTuple):
    """What each request of a batch asked for. Fields of other policies than the request's own are ignored.

    The fields from ``factor`` on may be None where no policy that is present reads them.
    """

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
    factor: Tensor | None = None
    """[B] float32: ``FACTOR``'s own, above 0; the smaller, the more are unmasked."""
    ratio: Tensor | None = None
    """[B] float32: share of the candidates to unmask in this step (see ``timestep_ratios``); 1 for all."""
    alg_temp: Tensor | None = None
    """[B] float32: temperature of the order of ``ALG_TEMP_POLICIES``, 0 for the order itself; None: 0 for all."""
    full: Tensor | None = None
    """[B, w] bool: which of the w blocks in a row ``MULTI_BLOCK`` unmasks a position of in any case (see
    ``multi_block_progress``); None: a row is one block, and each is."""
    noise: Tensor | None = None
    """[B, L] float32: uniform in (0, 1), for ``RANDOM``, ``ORIGIN`` and ``alg_temp``. None says that every ``alg_temp``
    is 0, which cannot be seen here without waiting for the device."""


def policy_scores(
    candidates: Tensor,
    confidence: Tensor,
    entropy: Tensor | None,
    params: PolicyParams,
    *,
    present: Set[Policy] = ALL_POLICIES,
    margin: Tensor | None = None,
) -> Tensor:
    """The order that each row's policy goes by: [B, L] float32, the higher, the earlier; -inf outside ``candidates``.

    Arguments and errors are those of ``unmask``.
    """
    scores = confidence
    for policy in present:
        match BY_KIND[policy].orders_by:
            case "confidence":
                continue
            case "position":
                order = -torch.arange(candidates.shape[1], device=candidates.device, dtype=confidence.dtype)[None]
            case "entropy":
                order = -_needed(entropy, policy, "the entropy of its positions")
            case "margin":
                order = _needed(margin, policy, "the margin of its positions")
            case "noise":
                order = -_needed(params.noise, policy, "noise")
        scores = _where_policy(policy, order, scores, params, present)
    drawable = ALG_TEMP_POLICIES & present
    if drawable and params.alg_temp is not None and params.noise is not None:
        drawn = _drawn_order(scores, params.alg_temp, params.noise)
        for policy in drawable:
            scores = _where_policy(policy, drawn, scores, params, present)
    return scores.where(candidates, -torch.inf)


def unmask(
    candidates: Tensor,
    confidence: Tensor,
    entropy: Tensor | None,
    params: PolicyParams,
    *,
    threshold_inclusive: bool,
    present: Set[Policy] = ALL_POLICIES,
    margin: Tensor | None = None,
) -> Tensor:
    """Choose the positions that this step unmasks.

    A row with candidates gets at least one of them, unless its quota is 0 and (for ``THRESHOLD`` and ``LOCALLEAP``)
    none of them passes the threshold, or its ratio (for ``TIMED_POLICIES``) makes none due.

    Args:
        candidates: [B, L] bool: masked positions that may be unmasked.
        confidence: [B, L] float32: probability of the token that each candidate would get.
        entropy: [B, L] float32: entropy in nats of each candidate's distribution.
        params: policy of each row.
        threshold_inclusive: whether a confidence equal to the threshold passes; in ``LOCALLEAP`` and ``PACED`` it
            always does, in ``HIERARCHY`` never.
        present: policies that occur in the batch, where the host knows them; the others cost nothing.
        margin: [B, L] float32: difference of the two largest probabilities of each candidate's distribution.

    Returns:
        [B, L] bool, a subset of ``candidates``.

    Raises:
        ValueError: what a policy that is present goes by is None.
    """
    scores = policy_scores(candidates, confidence, entropy, params, present=present, margin=margin)
    best_first, order = scores.sort(dim=1, descending=True, stable=True)
    threshold = params.threshold.unsqueeze(1)
    count = params.quota
    if Policy.ENTROPY in present:
        # In double precision, since a GPU adds in an order that depends on the number of rows.
        within = (-best_first).double().cumsum(dim=1) < params.entropy_bound.unsqueeze(1)
        at_least_one = within.sum(dim=1).clamp(min=1)
        count = _where_policy(Policy.ENTROPY, at_least_one, count, params, present)
    if Policy.FACTOR in present:
        factor = _needed(params.factor, Policy.FACTOR, "its factor")
        within_bounds = _factor_count(best_first, candidates.sum(dim=1), factor)
        count = _where_policy(Policy.FACTOR, within_bounds, count, params, present)
    if Policy.ORIGIN in present:
        ratio = _needed(params.ratio, Policy.ORIGIN, "its ratio")
        by_chance = candidates & (_needed(params.noise, Policy.ORIGIN, "noise") < ratio.unsqueeze(1))
        count = _where_policy(Policy.ORIGIN, by_chance.sum(dim=1), count, params, present)
    ordered = ALG_TEMP_POLICIES & present
    if ordered:
        # In float32 and cut off, as the reference counts: int(n * (1 - s / t)).
        due = (candidates.sum(dim=1).float() * _needed(params.ratio, min(ordered), "its ratio")).long()
        for policy in ordered:
            count = _where_policy(policy, due, count, params, present)
    if Policy.PACED in present:
        reaching = (candidates & (confidence >= threshold)).sum(dim=1).clamp(min=1)
        count = _where_policy(Policy.PACED, torch.minimum(params.quota, reaching), count, params, present)
    if Policy.HIERARCHY in present:
        count = _where_policy(Policy.HIERARCHY, torch.ones_like(params.quota), count, params, present)
    in_count = torch.arange(candidates.shape[1], device=candidates.device) < count.unsqueeze(1)
    chosen = torch.empty_like(candidates).scatter_(1, order, in_count)

    relaxed_threshold = params.relaxed_threshold.unsqueeze(1)
    if not present.isdisjoint({Policy.THRESHOLD, Policy.MULTI_BLOCK}):
        above = confidence >= threshold if threshold_inclusive else confidence > threshold
    if Policy.THRESHOLD in present:
        chosen = _where_policy(Policy.THRESHOLD, chosen | above, chosen, params, present)
    if Policy.MULTI_BLOCK in present:
        leads = _best_of_blocks(candidates & above, order, params.full)
        chosen = _where_policy(Policy.MULTI_BLOCK, above | leads, chosen, params, present)
    if Policy.LOCALLEAP in present:
        anchors = candidates & (confidence >= threshold)
        relaxed = _near(anchors, params.radius) & (confidence >= relaxed_threshold)
        chosen = _where_policy(Policy.LOCALLEAP, chosen | anchors | relaxed, chosen, params, present)
    if Policy.HIERARCHY in present:
        leads = _best_of_run(candidates, order) & (confidence > relaxed_threshold)
        chosen = _where_policy(Policy.HIERARCHY, chosen | leads | (confidence > threshold), chosen, params, present)
    # A count above the number of candidates reaches into the -inf tail of the order.
    return chosen & candidates


def _drawn_order(scores: Tensor, alg_temp: Tensor, noise: Tensor) -> Tensor:
    """Scores [B, L] whose order is a draw without replacement from softmax(scores / alg_temp), by Gumbel noise.

    Rows with an ``alg_temp`` [B] of 0 keep their scores.
    """
    alg_temp = alg_temp.unsqueeze(1)
    gumbel = -(-(-noise).log1p()).log()
    return torch.where(alg_temp > 0, scores / alg_temp + gumbel, scores)


def _factor_count(best_first: Tensor, num_candidates: Tensor, factor: Tensor) -> Tensor:
    """Ranks that Fast-dLLM's ``factor`` unmasks: [B] int64.

    Rank k = 1, 2, ... is bound to a confidence of 1 - factor / (k + 1), rank 1 to none at all, and the ranks before
    the first below its bound are unmasked. But where that is the last one, it is unmasked as well, as in the reference.

    Args:
        best_first: [B, L] float32: confidences in descending order, -inf beyond the candidates.
    """
    rank = torch.arange(1, best_first.shape[1] + 1, device=best_first.device)
    bound = 1 - factor.unsqueeze(1) / (rank + 1)
    bound[:, 0] = -1
    # Rank 1 passes even where a confidence is none (NaN): a step that unmasks nothing would be followed by its like.
    passing = (best_first >= bound).long().cumprod(dim=1).sum(dim=1).clamp(min=1)
    return torch.where(passing >= num_candidates - 1, num_candidates, passing)


def _best_of_blocks(above: Tensor, order: Tensor, full: Tensor | None) -> Tensor:
    """[B, L] bool: the first in ``order`` ([B, L] int64) of every block that has no position ``above`` ([B, L] bool).

    Args:
        full: [B, w] bool: blocks that count, as in ``PolicyParams``.
    """
    rows, num_blocks = len(order), 1 if full is None else full.shape[1]
    rank = ranks_of(order).view(rows, num_blocks, -1)
    wanting = ~above.view(rows, num_blocks, -1).any(dim=2, keepdim=True)
    if full is not None:
        wanting = wanting & full.unsqueeze(2)
    return ((rank == rank.amin(dim=2, keepdim=True)) & wanting).flatten(1)


def _best_of_run(candidates: Tensor, order: Tensor) -> Tensor:
    """[B, L] bool: the first of every run of adjacent candidates ([B, L] bool) in ``order`` ([B, L] int64).

    Candidates come first in the order.
    """
    length, rank = candidates.shape[1], ranks_of(order)
    follows = pad(candidates[:, :-1], (1, 0))
    # What is no candidate counts to the run on its left; it is behind all candidates, and so never that run's best.
    run = (candidates & ~follows).cumsum(dim=1)
    best = rank.new_full((len(rank), length + 1), length).scatter_reduce_(1, run, rank, "amin")
    return candidates & (rank == best.gather(1, run))


def ranks_of(order: Tensor) -> Tensor:
    """[B, L] int64: place of every column in ``order``, [B, L] int64, which names the columns from first to last."""
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )


def _near(anchors: Tensor, radius: Tensor) -> Tensor:
    """[B, L] bool: positions with an anchor ([B, L] bool) no more than ``radius`` ([B] int64) away."""
    positions = torch.arange(anchors.shape[1], device=anchors.device)
    distance = (positions.unsqueeze(1) - positions).abs()  # [L, L]
    return ((distance <= radius.view(-1, 1, 1)) & anchors.unsqueeze(1)).any(dim=2)


def _where_policy(policy: Policy, value: Tensor, other: Tensor, params: PolicyParams, present: Set[Policy]) -> Tensor:
    """``value`` in the rows of this policy, ``other`` in the rest. Both [B] or both [B or 1, L]."""
    if len(present) == 1:
        return value
    # A number, for the compiler takes an enum and a tensor for unequal.
    rows = params.policy == int(policy)
    return torch.where(rows if value.ndim == 1 else rows.unsqueeze(1), value, other)


def _needed(value: Tensor | None, policy: Policy, what: str) -> Tensor:
    if value is None:
        raise ValueError(f"a batch with policy {policy.name} needs {what}")
    return value


LEVELS = 1_000_000
"""Shares of a block are compared in whole millionths: a quotient of floats would be rounded otherwise elsewhere."""


def share_level(share: float) -> int:
    """A share of a block's positions, 0 to 1, in millionths."""
    return round(share * LEVELS)


def multi_block_progress(
    masked: Tensor, generated: Tensor, add_level: Tensor, full_level: Tensor, block_length: int
) -> tuple[Tensor, Tensor]:
    """Which blocks of a window ``MULTI_BLOCK`` has begun, and which are fully activated (D2F, arXiv 2508.09192).

    A block begins once the share ``add_level`` of the block in front is decoded, and is fully activated once the share
    ``full_level`` of the block in front is. The first block of a window is both: what is in front of a window is final.

    Args:
        masked: [B, W] bool: positions without a token.
        generated: [B, W] bool: positions that the request generates and has not emitted. A block without any is
            decoded.
        add_level, full_level: [B] int64: of ``share_level``.

    Returns:
        [B, w] bool each.
    """
    total = generated.unflatten(1, (-1, block_length)).sum(dim=2)[:, :-1]
    decoded = (total - masked.unflatten(1, (-1, block_length)).sum(dim=2)[:, :-1]) * LEVELS
    reaches = pad((decoded >= total * add_level.unsqueeze(1)).long(), (1, 0), value=1)
    full = pad((decoded >= total * full_level.unsqueeze(1)).long(), (1, 0), value=1)
    return reaches.cumprod(dim=1).bool(), full.bool()


def quota_of_step(quota: Tensor, quota_remainder: Tensor, step: Tensor) -> Tensor:
    """Tokens of denoising step ``step`` (from 0, restarting in every block); one more in the first steps. [B] int64."""
    return quota + (step < quota_remainder)


def timestep_ratios(steps: int, eps: float = 1e-3) -> Tensor:
    """Share of the masked positions that each step of Dream's timestep schedule unmasks.

    Time runs evenly from 1 down to ``eps``; a step from t to s unmasks 1 - s / t, the last step all that is left.

    Returns:
        [steps] float32, on the CPU.
    """
    times = torch.linspace(1, eps, steps + 1, dtype=torch.float32, device="cpu")
    ratios = 1 - times[1:] / times[:-1]
    ratios[-1] = 1
    return ratios


def sub_block_candidates(masked: Tensor, sub_block_length: int) -> Tensor:
    """``masked`` [B, L] in the leftmost sub-block that still has masks (Fast-dLLM v2's small blocks): [B, L] bool."""
    # Not a view: compiled, it would cast the bits of a mask, which Triton refuses.
    first = masked.to(torch.uint8).argmax(dim=1, keepdim=True)
    sub_block = torch.arange(masked.shape[1], device=masked.device) // sub_block_length
    return masked & (sub_block == first // sub_block_length)


def edits(tokens: Tensor, predicted: Tensor, confidence: Tensor, editable: Tensor, edit_threshold: Tensor) -> Tensor:
    """Positions whose token the model now wants replaced by ``predicted`` (LLaDA2.1's token editing, T2T): [B, L] bool.

    Args:
        confidence: [B, L] float32: probability of ``predicted`` [B, L] int64.
        editable: [B, L] bool: positions that are neither masked nor part of the prompt.
        edit_threshold: [B] float32: probability that a replacement must exceed; ``inf`` turns editing off.
    """
    return editable & (predicted != tokens) & (confidence > edit_threshold.unsqueeze(1))


def end_length(tokens: Tensor, mask_id: int, is_end: Tensor, start: Tensor) -> Tensor:
    """Tokens that a block outputs when its text ends in it: from ``start`` through the first position that ends it.

    Args:
        tokens: [B, L] int64.
        is_end: [B, L] bool: positions that hold a stop token, or the last token that the request may have.
        start: [B] int64: first position of the block that is not prompt.

    Returns:
        [B] int64; 0 where the text ends nowhere at or after ``start``, or a mask stands there or before.
    """
    masked = tokens == mask_id
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    decisive = (is_end | masked) & (positions >= start.unsqueeze(1))
    # Not a view: see `sub_block_candidates`.
    first = decisive.to(torch.uint8).argmax(dim=1, keepdim=True)
    ends = (decisive & ~masked).gather(1, first).squeeze(1)
    return (first.squeeze(1) - start + 1).where(ends, 0)
