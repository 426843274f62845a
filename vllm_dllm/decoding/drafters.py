"""Drafts of a block's later states, from the logits that made its present one.

The root r is what the policy made of the accepted branch. Its masked positions are ranked by the policy's own order,
and the same logits that ranked them predict their tokens.

- A *chain* (FreeDave, arXiv 2510.00294, Alg. 2 lines 6-13; PSD's confidence order, arXiv 2605.15609, stage 2): draft k
  fills as many of them as the policy would in k steps.
- A *graph* (Spiffy, arXiv 2509.18085, section 4.4): each node fills positions by rank with a token by vocabulary rank.
  Of a calibrated graph, the nodes with the best score (eq. 12-14) are drafted.

A draft always leaves a mask: what would fill the block is the accepted branch's target, and needs no forward. All
functions take R requests with blocks of W positions and never wait for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_dllm.decoding.policies import ranks_of


class Drafts(NamedTuple):
    """K drafts of each of R requests."""

    tokens: Tensor
    """[R, K, W] int64; those of absent drafts are of no use."""
    present: Tensor
    """[R, K] bool: a draft's present ones come first."""
    levels: Tensor
    """[R, K] int64: denoising steps that each draft is ahead of the root."""


def ranks(scores: Tensor, group_length: int | None = None) -> Tensor:
    """Rank of every position, 0 for the highest score; ties go to the leftmost: [R, W] int64.

    Args:
        scores: [R, W], -inf where a position takes no part.
        group_length: positions of an earlier group of this many rank before those of a later one.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    if group_length is not None and group_length < scores.shape[1]:
        group = order // group_length + scores.shape[1] * torch.isinf(scores.gather(1, order))
        order = order.gather(1, group.argsort(dim=1, stable=True))
    return ranks_of(order)


def chain_lengths(quotas: Tensor) -> Tensor:
    """Positions that each draft of a chain fills, by the ``quotas`` [R, K] of the next K steps, at least one each."""
    return quotas.clamp(min=1).cumsum(dim=1)


def chain_rounds(masked: Tensor, rank: Tensor, lengths: Tensor, block_length: int) -> Tensor:
    """Tokens that each position's block holds when a chain comes to fill that position: [R, W] int64.

    Windows are whole blocks of ``block_length``; the other arguments are those of ``chain_drafts``.
    """
    in_blocks = masked.unflatten(1, (-1, block_length))
    before = torch.where(lengths.unsqueeze(1) <= rank.unsqueeze(2), lengths.unsqueeze(1), 0).amax(dim=2)
    num_masked = in_blocks.sum(dim=2)
    earlier = num_masked.cumsum(dim=1) - num_masked
    in_block = (before.view_as(in_blocks) - earlier.unsqueeze(2)).clamp(min=0)
    return ((block_length - num_masked).unsqueeze(2) + in_block).flatten(1)


def chain_drafts(root: Tensor, masked: Tensor, rank: Tensor, tokens: Tensor, lengths: Tensor) -> Drafts:
    """Drafts that fill the first ``lengths`` [R, K] masked positions.

    Args:
        root: [R, W] int64.
        masked: [R, W] bool: its masked positions.
        rank: [R, W] int64: their order.
        tokens: [R, W] int64: what each would get.
        lengths: of ``chain_lengths``.
    """
    fill = (rank.unsqueeze(1) < lengths.unsqueeze(2)) & masked.unsqueeze(1)
    levels = torch.arange(1, lengths.shape[1] + 1, device=root.device).expand_as(lengths)
    return Drafts(
        tokens=torch.where(fill, tokens.unsqueeze(1), root.unsqueeze(1)),
        present=lengths < masked.sum(dim=1, keepdim=True),
        levels=levels,
    )


class GraphTensors(NamedTuple):
    """A draft graph of G nodes on the device."""

    vocab_rank: Tensor
    """[G, I] int64: vocabulary rank (from 1) of the token that a node puts at each position rank; 0: none."""
    children: Tensor
    """[G, G] bool: the second is a child of the first."""


def graph_drafts(
    root: Tensor,
    masked: Tensor,
    rank: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    lengths: Tensor,
    graph: GraphTensors,
    num_drafts: int,
) -> Drafts:
    """The best ``num_drafts`` nodes of a graph.

    Args:
        root, masked, rank: as for ``chain_drafts``.
        tokens: [R, W, J] int64: the J best tokens of each position.
        logprobs: [R, W, J] float32: their log-probabilities.
        lengths: [R, S] int64: positions that the policy fills in so many steps, for the levels.
    """
    num_ranks = graph.vocab_rank.shape[1]
    used = graph.vocab_rank > 0  # [G, I]
    size = used.sum(dim=1)  # [G]
    # Which token each node puts where: [R, G, W].
    node = torch.nn.functional.pad(graph.vocab_rank, (0, 1)).t()[rank.clamp(max=num_ranks)].transpose(1, 2)
    node = node * masked.unsqueeze(1)
    choice = (node - 1).clamp(min=0).transpose(1, 2)  # [R, W, G]
    filled = torch.where(node > 0, tokens.gather(2, choice).transpose(1, 2), root.unsqueeze(1))

    # Geometric means (eq. 12-14), as means of logarithms. In double precision until the scores are compared, since a
    # compiled stage, and a GPU for another number of requests, add in another order.
    log_p = torch.where(node > 0, logprobs.gather(2, choice).transpose(1, 2), 0.0).double()
    last_rank = (used * torch.arange(1, num_ranks + 1, device=root.device)).amax(dim=1)
    num_masked = masked.sum(dim=1, keepdim=True)
    fits = (last_rank <= num_masked) & (size < num_masked)  # [R, G]
    local = log_p.sum(dim=2) / size
    children = graph.children & fits.unsqueeze(1)  # [R, G, G]
    num_children = children.sum(dim=2)
    # Impossible tokens have a log-probability of -inf.
    finite = local.clamp(min=-1e9)
    child = torch.where(children, finite.unsqueeze(1), 0.0).sum(dim=2) / num_children.clamp(min=1)
    score = torch.where(num_children > 0, (finite + child) / 2, finite).float().masked_fill(~fits, -torch.inf)
    # Graphs may have fewer nodes.
    score = torch.nn.functional.pad(score, (0, max(0, num_drafts - len(size))), value=-torch.inf)
    score, best = score.sort(dim=1, descending=True, stable=True)
    best = best[:, :num_drafts].clamp(max=len(size) - 1)
    tokens_of_best = filled.gather(1, best.unsqueeze(2).expand(-1, -1, root.shape[1]))
    levels = 1 + (lengths.unsqueeze(1) < size[best].unsqueeze(2)).sum(dim=2)
    return Drafts(tokens_of_best, score[:, :num_drafts] > -torch.inf, levels)
