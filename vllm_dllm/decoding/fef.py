"""FeF-DLLM (arXiv 2605.14305, Algorithm 2): left to right, each token given all before it, several to a round.

With X the block as it stands and j_1 < ... < j_b its b leftmost masked positions (b at most the window k), a round is

1. *draft* (lines 9-10): one forward of X gives the distributions rho of all b positions; each position's token is drawn
   independently of the others;
2. *verify* (lines 11-13): a forward of X with the drafts of j_1 .. j_(m-1) filled in gives the target distribution pi
   of j_m;
3. *commit* (lines 14-26): rejection sampling (``decoding.rejection``) with q = pi and p = rho accepts the drafts up to
   the first that is not, and replaces that one.

Whatever the drafts, the tokens are then drawn from the product of the distributions pi (Theorem 1).

Drafts and targets come from one model, so pi = rho at j_1: that draft is always accepted, and its input is not
forwarded again. Instead X with all b drafts may be forwarded: if all are accepted, that is the next round's draft
forward, and a round costs one forward.

When no mask is left, low-confidence positions are masked again for another pass (lines 29-34), see ``remask``.

*Temperature 0*: the distributions are one-hot at the most likely token. A draft is accepted if it is the most likely
token of pi, and that token replaces it if it is not: the outcome is left-to-right greedy decoding, one position at a
time. The confidence is the softmax probability nevertheless, or all positions would be equally sure.

The mask token, ``mask_id``, is no part of any distribution: its probability goes to the others in proportion. All
functions take R requests with blocks of L positions and up to K drafts, and never wait for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_dllm.decoding.rejection import Verified

REMASK_BITS = 32
REMASK_UNIT = 1 << REMASK_BITS
"""What ``num_remask`` counts a position as."""


class Committed(NamedTuple):
    """R requests after a round."""

    tokens: Tensor
    """[R, L] int64: the block."""
    confidence: Tensor
    """[R, L] float32: probability of each token by the pi that it was committed with."""
    num_accepted: Tensor
    """[R] int64: drafts accepted, the first included."""
    forwarded: Tensor
    """[R] bool: the new block is the last branch of this round, whose logits draft the next round."""


def draft_positions(masked: Tensor, window: Tensor, *, max_window: int) -> tuple[Tensor, Tensor]:
    """The leftmost positions of every block that are ``masked`` [R, L] bool (lines 7-8).

    Args:
        window: [R] int64: drafts of a round at most; 0 for a request that drafts none.
        max_window: the largest window, known to the host. K is this or L if that is less.

    Returns:
        positions: [R, K] int64, those present in ascending order; columns of the block where none is present.
        present: [R, K] bool, a prefix of every row.
    """
    length = masked.shape[1]
    index = torch.arange(min(max_window, length), device=masked.device)
    # So many columns are to the left of the masked one that has ``index`` others before it.
    is_left = masked.cumsum(dim=1).unsqueeze(1) <= index.unsqueeze(1)  # [R, K, L]
    size = torch.minimum(window, masked.sum(dim=1))
    return is_left.sum(dim=2).clamp(max=length - 1), index < size.unsqueeze(1)


def places(positions: Tensor, present: Tensor, length: int) -> Tensor:
    """[R, K, L] bool: which column each of the ``positions`` [R, K] is that are ``present``, as ``draft_positions``."""
    return (positions.unsqueeze(2) == torch.arange(length, device=positions.device)) & present.unsqueeze(2)


def spread(values: Tensor, is_at: Tensor) -> Tensor:
    """[R, L]: ``values`` [R, K] in their columns, by ``places``; 0 in all others.

    Sums in the place of a scatter, for which Inductor launches a kernel of PyTorch's.
    """
    return torch.where(is_at, values.unsqueeze(2), 0).sum(dim=1)


def fef_branches(block: Tensor, positions: Tensor, present: Tensor, tokens: Tensor) -> Tensor:
    """The inputs of the forward that verifies the drafts ``tokens`` [R, K] of ``draft_positions`` (lines 11-12).

    Returns:
        [R, K, L] int64. Branch m holds the drafts of j_1 .. j_(m+1): it verifies that of j_(m+2), and the last one is
        the block if all are accepted. ``branches_present`` says which are of use.
    """
    num_drafts = tokens.shape[1]
    index = torch.arange(num_drafts, device=block.device)
    is_at = places(positions, present, block.shape[1])
    order = torch.where(is_at, index.unsqueeze(1), num_drafts).amin(dim=1)
    filled = order.unsqueeze(1) <= index.unsqueeze(1)  # [R, K, L]
    return torch.where(filled, spread(tokens, is_at).unsqueeze(1), block.unsqueeze(1))


def branches_present(masked: Tensor, present: Tensor) -> Tensor:
    """[R, K] bool: branches of ``fef_branches`` that leave a mask. All but the last of a request must be forwarded.

    A request without any has one position left, and can be committed without a verifying forward.
    """
    num_filled = torch.arange(1, present.shape[1] + 1, device=masked.device)
    return present & (num_filled < masked.sum(dim=1, keepdim=True))


def commit(
    block: Tensor,
    confidence: Tensor,
    positions: Tensor,
    present: Tensor,
    tokens: Tensor,
    branches: Tensor,
    verified: Verified | None,
) -> Committed:
    """Write accepted drafts, and the replacement of the first that is not accepted (lines 14-26).

    A request without drafts stays as it is.

    Args:
        block: [R, L] int64: as it was drafted for.
        confidence: [R, L] float32: of what was committed before, and of the first draft.
        positions, present: of ``draft_positions``.
        tokens: [R, K] int64: drafts.
        branches: [R, K] bool: branches of ``fef_branches`` that were forwarded.
        verified: of the drafts from the second on, with q = pi and p = rho; ``None``: K = 1.
    """
    size = present.sum(dim=1)
    confidences, values, num_accepted = confidence.gather(1, positions[:, :1]), tokens, size
    index = torch.arange(tokens.shape[1], device=tokens.device)
    if verified is not None:
        num_accepted = present[:, 0] + verified.num_accepted
        replaced = index == num_accepted.unsqueeze(1)
        values = torch.where(replaced, verified.replacement.token.unsqueeze(1), values)
        confidences = torch.cat((confidences, verified.confidence), dim=1)
        confidences = torch.where(replaced, verified.replacement.confidence.unsqueeze(1), confidences)
    written = index < torch.minimum(num_accepted + 1, size).unsqueeze(1)
    is_at = places(positions, written, block.shape[1])
    is_written = is_at.any(dim=1)
    last = (size - 1).clamp(min=0).unsqueeze(1)
    return Committed(
        tokens=torch.where(is_written, spread(values, is_at), block),
        confidence=torch.where(is_written, spread(confidences, is_at), confidence),
        num_accepted=num_accepted,
        forwarded=(num_accepted == size) & (present & branches).gather(1, last).squeeze(1),
    )


def num_remask(generated: Tensor, fraction: Tensor) -> Tensor:
    """How many positions a further pass draws anew: [R] int64.

    A ``fraction`` [R] of the positions that the block's own steps write, ``generated`` [R, L] bool; rounded up, but at
    least one.
    """
    # In whole numbers, since a compiled step would round sums of products in a way of its own.
    share = generated.sum(dim=1) * (fraction * REMASK_UNIT).long()
    # What exceeds a whole number by rounding only is that number.
    share = share - REMASK_UNIT // 10_000
    return (-(-share >> REMASK_BITS)).clamp(min=1)


def remask(tokens: Tensor, confidence: Tensor, candidates: Tensor, num_remask: Tensor, mask_id: int) -> Tensor:
    """Mask the least confident positions again for another pass (lines 29-34); ties go to the leftmost.

    Algorithm 2 empties its set of confidences in every pass (line 5), which leaves the positions of that pass as
    candidates. With an n_rm that stays the same, all passes but the first would then draw the same positions given the
    same others, so that a third pass would change nothing in distribution. With all generated positions as candidates,
    each with the confidence that it was last committed with, every pass looks for the least confident anew.

    Args:
        tokens: [R, L] int64.
        confidence: [R, L] float32.
        candidates: [R, L] bool: positions that may be masked again.
        num_remask: [R] int64: how many; 0 for a request that has another pass to finish, or none to come.
    """
    one, other = confidence.unsqueeze(2), confidence.unsqueeze(1)  # [R, L, 1] and [R, 1, L]
    column = torch.arange(tokens.shape[1], device=tokens.device)
    is_before = (other < one) | ((other == one) & (column < column.unsqueeze(1)))
    place = (is_before & candidates.unsqueeze(1)).sum(dim=2)
    return torch.where(candidates & (place < num_remask.unsqueeze(1)), mask_id, tokens)
