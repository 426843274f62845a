"""Verification of drafts: which of the forwarded states of a block the request goes on from.

A forward sees B *branches* of each request's block: branch 0 is the block as it stands (the root), the others are
drafts of later states. Its logits give every branch a *target*, the state that one more denoising step of the policy
makes of it. A verifier is a set of edges, p to k, "from branch p one may go on to branch k", and a way to follow them
from the root:

==================  ======================================================  ======================================
verifier            edge from p to k                                        goes to
==================  ======================================================  ======================================
FreeDave, Spiffy    the target of p is k (FreeDave Alg. 2 line 30,          the end of the only path
                    Spiffy Alg. 1 step 5)
FreeDave, subset    the target of p holds every token of k                  the largest k, again and again
PSD                 p is a part of k, and the target of p holds every       the deepest branch that any path
                    token of k (PSD Alg. 1 lines 19-25)                     reaches
==================  ======================================================  ======================================

PSD accepts draft k from branch p if the policy at p would unmask every position that k adds, with k's tokens. The
target of p is the block after that policy step, so the test is whether the target of p holds all tokens of k.

All functions take R requests with blocks of W positions and never wait for the device.
"""

from collections.abc import Set
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Verifier(IntEnum):
    """How a request's drafts are verified, as stored in its state."""

    NONE = 0
    EXACT = 1
    SUBSET = 2
    PSD = 3
    FEF = 4
    """FeF-DLLM, which has a module of its own: ``vllm_dllm.decoding.fef``."""
    LINEAR_SPEC = 5
    """LinearSpec, likewise: ``vllm_dllm.decoding.linear_spec``."""
    S2D2 = 6
    """S2D2, likewise: ``vllm_dllm.decoding.s2d2``."""
    ISD = 7
    """Introspective strided decoding, likewise: ``vllm_dllm.decoding.isd``."""


AUTOREGRESSIVE = frozenset({Verifier.LINEAR_SPEC, Verifier.ISD})
"""Verifiers that write the text of an autoregressive model."""


class Verdict(NamedTuple):
    """Where R requests go on from."""

    accepted: Tensor
    """[R] int64: branch."""
    skipped: Tensor
    """[R] int64: denoising steps that the accepted drafts stand for."""
    reached: Tensor
    """[R, B] bool: branches on an accepted path, the root included."""


def verify(
    branches: Tensor,
    targets: Tensor,
    present: Tensor,
    levels: Tensor,
    timed: Tensor,
    verifier: Tensor,
    *,
    mask_id: int,
    verifiers: Set[Verifier],
    most_branches: int,
) -> Verdict:
    """Follow the accepted drafts.

    Args:
        branches: [R, B, W] int64.
        targets: [R, B, W] int64: the next state of every branch.
        present: [R, B] bool: branches that were forwarded; the root always is.
        levels: [R, B] int64: denoising steps that each branch is ahead of the root, as it was drafted.
        timed: [R] bool: the policy's next state depends on the step, not on the state alone. An edge of the exact
            verifiers then leads from each level to the next.
        verifier: [R] int64: values of ``Verifier``, of which ``verifiers`` occur in the batch.
        most_branches: at least B, the same in every step.
    """
    num_branches = branches.shape[1]
    # Paths are shorter than there are branches. A compiled step serves any number of them.
    path_length = (most_branches if torch.compiler.is_compiling() else num_branches) - 1
    index = torch.arange(num_branches, device=branches.device)
    forwarded = present.unsqueeze(2) & present.unsqueeze(1)
    at, to = branches.unsqueeze(2), branches.unsqueeze(1)  # [R, B, 1, W], [R, 1, B, W]
    target = targets.unsqueeze(2)
    verdicts: dict[Verifier, Verdict] = {}
    if verifiers & {Verifier.SUBSET, Verifier.PSD}:
        part_of_target = forwarded & ((to == mask_id) | (to == target)).all(dim=3)
        contained = ((at == mask_id) | (at == to)).all(dim=3)
        larger = contained & (index.unsqueeze(1) != index)
        if Verifier.SUBSET in verifiers:
            verdicts[Verifier.SUBSET] = _walk(part_of_target & larger, path_length)
        if Verifier.PSD in verifiers:
            verdicts[Verifier.PSD] = _deepest(
                part_of_target & larger, (branches != mask_id).sum(dim=2), levels, path_length
            )
    if Verifier.EXACT in verifiers or not verdicts:
        edges = forwarded & (target == to).all(dim=3) & (index.unsqueeze(1) != index) & (index > 0)
        follows = levels.unsqueeze(1) == levels.unsqueeze(2) + 1
        verdicts[Verifier.EXACT] = _walk(edges & (follows | ~timed.view(-1, 1, 1)), path_length)
    (_, verdict), *others = verdicts.items()
    for kind, other in others:
        rows = verifier == int(kind)
        verdict = Verdict(
            torch.where(rows, other.accepted, verdict.accepted),
            torch.where(rows, other.skipped, verdict.skipped),
            torch.where(rows.unsqueeze(1), other.reached, verdict.reached),
        )
    return verdict


def _walk(edges: Tensor, path_length: int) -> Verdict:
    """Go from the root to the largest branch that an edge [R, B, B] leads to, until none does.

    No path has more than ``path_length`` edges.
    """
    index = torch.arange(edges.shape[1], device=edges.device)
    following = torch.where(edges, index, -1).amax(dim=2)
    following = torch.where(following < 0, index, following)
    hops = (following != index).long()
    reached = (index == 0).expand(len(edges), -1)
    # Path lengths double: after each round `following` jumps twice as far.
    for _ in range(path_length.bit_length()):
        reached = reached.long().scatter_reduce(1, following, reached.long(), "amax").bool()
        hops = hops + hops.gather(1, following)
        following = following.gather(1, following)
    return Verdict(following[:, 0], hops[:, 0], reached)


def _deepest(edges: Tensor, num_tokens: Tensor, levels: Tensor, path_length: int) -> Verdict:
    """Of the branches that edges [R, B, B] lead to from the root, the one with most tokens; the first among equals.

    No path has more than ``path_length`` edges.
    """
    num_branches = edges.shape[1]
    paths = edges.float() + torch.eye(num_branches, device=edges.device)
    for _ in range(path_length.bit_length()):
        paths = paths.bmm(paths).clamp_(max=1.0)
    reached = paths[:, 0] > 0
    first_among_equals = torch.arange(num_branches - 1, -1, -1, device=edges.device)
    depth = torch.where(reached, num_tokens * num_branches + first_among_equals, -1)
    accepted = depth.argmax(dim=1)
    return Verdict(accepted, levels.gather(1, accepted.unsqueeze(1)).squeeze(1), reached)


def sources(branches: Tensor, targets: Tensor, accepted: Tensor, reached: Tensor, *, mask_id: int) -> Tensor:
    """The branch whose logits put each token of the accepted branch there: the last one that still masked it.

    Drafts of PSD may be reached along several paths, and a branch beside the path may want another token.

    Args:
        branches, targets: [R, B, W] int64: as in ``verify``.
        accepted, reached: as in ``Verdict``.

    Returns:
        [R, W] int64; the accepted branch itself for positions that it masks.
    """
    masked, num_tokens = branches == mask_id, (branches != mask_id).sum(dim=2)
    block = branches.gather(1, accepted.view(-1, 1, 1).expand(-1, 1, branches.shape[2]))
    is_part = reached & (masked | (branches == block)).all(dim=2)
    gives_it = masked & ((targets == block) | (block == mask_id)) & is_part.unsqueeze(2)
    return torch.where(gives_it, num_tokens.unsqueeze(2), -1).argmax(dim=1)
