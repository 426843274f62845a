"""Unmasking policies: which masked positions of a block a denoising step turns into tokens.

Every policy is an order of the candidates (`vllm_dllm.methods.PolicyRow.orders_by`) and a rule: a function below, which
`RULES` names. As a rule the first of the order are unmasked, as many as the step's quota says.

With ``alg_temp`` the order is drawn: position after position without replacement, each with a probability in proportion
to ``exp(score / alg_temp)``.

Ties go to the leftmost. All functions take a batch of B requests with blocks of L positions, treat every
request by itself, and never wait for the device. Noise is an argument, so that it can be the request's own (see
``vllm_dllm.kernels.confidence.position_noise``).
"""

from collections.abc import Callable, Mapping, Set
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
    """[B] int64: tokens of this step (see ``schedules.quota_of_step``); 0 is allowed."""
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
    """[B] float32: share of the candidates to unmask in this step (see ``schedules.timestep_ratios``); 1 for all."""
    alg_temp: Tensor | None = None
    """[B] float32: temperature of the order of ``ALG_TEMP_POLICIES``, 0 for the order itself; None: 0 for all."""
    full: Tensor | None = None
    """[B, w] bool: which of the w blocks in a row ``MULTI_BLOCK`` unmasks a position of in any case (see
    ``schedules.multi_block_progress``); None: a row is one block, and each is."""
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
                order = -_needed(entropy, f"policy {policy.name}", "the entropy of its positions")
            case "margin":
                order = _needed(margin, f"policy {policy.name}", "the margin of its positions")
            case "noise":
                order = -_needed(params.noise, f"policy {policy.name}", "noise")
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
    step = _Step(candidates, confidence, best_first, ranks_of(order), params, threshold_inclusive)
    chosen = candidates
    for policy in sorted(present):
        chosen = _where_policy(policy, RULES[policy](step), chosen, params, present)
    # A count above the number of candidates reaches into the -inf tail of the order.
    return chosen & candidates


class _Step(NamedTuple):
    """What the rules of B requests go by."""

    candidates: Tensor
    """[B, L] bool."""
    confidence: Tensor
    """[B, L] float32."""
    best_first: Tensor
    """[B, L] float32: the scores in their order, -inf behind the candidates."""
    rank: Tensor
    """[B, L] int64: place in the order, from 0."""
    params: PolicyParams
    threshold_inclusive: bool

    def first(self, count: Tensor) -> Tensor:
        """[B, L] bool: the first ``count`` [B] of the order."""
        return self.rank < count.unsqueeze(1)

    def reaches(self, bound: Tensor) -> Tensor:
        """[B, L] bool: candidates with a confidence of at least ``bound`` [B]."""
        return self.candidates & (self.confidence >= bound.unsqueeze(1))

    def passes_threshold(self) -> Tensor:
        """[B, L] bool: positions whose confidence passes the threshold."""
        threshold = self.params.threshold.unsqueeze(1)
        return self.confidence >= threshold if self.threshold_inclusive else self.confidence > threshold


def _first_of_quota(step: _Step) -> Tensor:
    return step.first(step.params.quota)


def _threshold(step: _Step) -> Tensor:
    return step.first(step.params.quota) | step.passes_threshold()


def _entropy(step: _Step) -> Tensor:
    """The first whose entropies add up to less than the bound."""
    # In double precision, since a GPU adds in an order that depends on the number of rows.
    within = (-step.best_first).double().cumsum(dim=1) < step.params.entropy_bound.unsqueeze(1)
    return step.first(within.sum(dim=1).clamp(min=1))


def _localleap(step: _Step) -> Tensor:
    """Anchors, which reach the threshold, and what reaches the relaxed threshold near one."""
    anchors = step.reaches(step.params.threshold)
    relaxed = _near(anchors, step.params.radius) & step.reaches(step.params.relaxed_threshold)
    return step.first(step.params.quota) | anchors | relaxed


def _factor(step: _Step) -> Tensor:
    """Fast-dLLM's factor.

    Rank k = 1, 2, ... is bound to a confidence of 1 - factor / (k + 1), rank 1 to none at all, and the ranks before
    the first below its bound are unmasked. But where that is the last one, it is unmasked as well, as in the reference.
    """
    rank = torch.arange(1, step.best_first.shape[1] + 1, device=step.best_first.device)
    bound = 1 - _needed(step.params.factor, "policy FACTOR", "its factor").unsqueeze(1) / (rank + 1)
    bound[:, 0] = -1
    # Rank 1 passes even where a confidence is none (NaN): a step that unmasks nothing would be followed by its like.
    passing = (step.best_first >= bound).long().cumprod(dim=1).sum(dim=1).clamp(min=1)
    num_candidates = step.candidates.sum(dim=1)
    return step.first(torch.where(passing >= num_candidates - 1, num_candidates, passing))


def _origin(step: _Step) -> Tensor:
    """Each by a chance of its own."""
    ratio = _needed(step.params.ratio, "policy ORIGIN", "its ratio")
    return _needed(step.params.noise, "policy ORIGIN", "noise") < ratio.unsqueeze(1)


def _first_of_ratio(step: _Step) -> Tensor:
    """A share of the candidates."""
    # In float32 and cut off, as the reference counts: int(n * (1 - s / t)).
    ratio = _needed(step.params.ratio, "a policy of timesteps", "its ratio")
    return step.first((step.candidates.sum(dim=1).float() * ratio).long())


def _paced(step: _Step) -> Tensor:
    """At most the quota of those that reach the threshold, and one where none does."""
    reaching = step.reaches(step.params.threshold).sum(dim=1).clamp(min=1)
    return step.first(torch.minimum(step.params.quota, reaching))


def _hierarchy(step: _Step) -> Tensor:
    """The best of all, the best of every run of candidates above the relaxed threshold, and all above the threshold."""
    above, above_relaxed = (
        step.confidence > bound.unsqueeze(1) for bound in (step.params.threshold, step.params.relaxed_threshold)
    )
    best_of_all = step.first(torch.ones_like(step.params.quota))
    return best_of_all | (_best_of_run(step.candidates, step.rank) & above_relaxed) | above


def _multi_block(step: _Step) -> Tensor:
    """What passes the threshold, and of every full block without such a position the best."""
    above = step.candidates & step.passes_threshold()
    return above | _best_of_blocks(above, step.rank, step.params.full)


RULES: Mapping[Policy, Callable[[_Step], Tensor]] = {
    Policy.STATIC: _first_of_quota,
    Policy.THRESHOLD: _threshold,
    Policy.SEQUENTIAL: _first_of_quota,
    Policy.ENTROPY: _entropy,
    Policy.LOCALLEAP: _localleap,
    Policy.FACTOR: _factor,
    Policy.RANDOM: _first_of_quota,
    Policy.ORIGIN: _origin,
    Policy.MASKGIT_PLUS: _first_of_ratio,
    Policy.TOPK_MARGIN: _first_of_ratio,
    Policy.TIMED_ENTROPY: _first_of_ratio,
    Policy.PACED: _paced,
    Policy.HIERARCHY: _hierarchy,
    Policy.MULTI_BLOCK: _multi_block,
}
"""What a step unmasks by each policy: [B, L] bool, positions that are no candidates of no meaning."""


def _drawn_order(scores: Tensor, alg_temp: Tensor, noise: Tensor) -> Tensor:
    """Scores [B, L] whose order is a draw without replacement from softmax(scores / alg_temp), by Gumbel noise.

    Rows with an ``alg_temp`` [B] of 0 keep their scores.
    """
    alg_temp = alg_temp.unsqueeze(1)
    gumbel = -(-(-noise).log1p()).log()
    return torch.where(alg_temp > 0, scores / alg_temp + gumbel, scores)


def _best_of_blocks(above: Tensor, rank: Tensor, full: Tensor | None) -> Tensor:
    """[B, L] bool: the first by ``rank`` ([B, L] int64) of every block that has no position ``above`` ([B, L] bool).

    Args:
        full: [B, w] bool: blocks that count, as in ``PolicyParams``.
    """
    blocks = len(rank), 1 if full is None else full.shape[1], -1
    rank, wanting = rank.view(blocks), ~above.view(blocks).any(dim=2, keepdim=True)
    if full is not None:
        wanting = wanting & full.unsqueeze(2)
    return ((rank == rank.amin(dim=2, keepdim=True)) & wanting).flatten(1)


def _best_of_run(candidates: Tensor, rank: Tensor) -> Tensor:
    """[B, L] bool: the first by ``rank`` ([B, L] int64) of every run of adjacent candidates ([B, L] bool).

    Candidates come first in the order.
    """
    length = candidates.shape[1]
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
    """``value`` [B or 1, L] in the rows of this policy, ``other`` [B or 1, L] in the rest."""
    if len(present) == 1:
        return value
    # A number, for the compiler takes an enum and a tensor for unequal.
    return torch.where((params.policy == int(policy)).unsqueeze(1), value, other)


def _needed(value: Tensor | None, whose: str, what: str) -> Tensor:
    if value is None:
        raise ValueError(f"{whose} needs {what}")
    return value


def sub_block_candidates(masked: Tensor, sub_block_length: int) -> Tensor:
    """``masked`` [B, L] in the leftmost sub-block that still has masks (Fast-dLLM v2's small blocks): [B, L] bool."""
    # Not a view, nor 8 bits: compiled, Triton refuses to cast the bits of a mask, and Inductor's kernels for CPUs find
    # places beyond the row.
    first = masked.long().argmax(dim=1, keepdim=True)
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
    # As in `sub_block_candidates`.
    first = decisive.long().argmax(dim=1, keepdim=True)
    ends = (decisive & ~masked).gather(1, first).squeeze(1)
    return (first.squeeze(1) - start + 1).where(ends, 0)
