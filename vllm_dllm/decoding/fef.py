"""FeF-DLLM (paper 000, Algorithm 2): left to right, each token given all before it, several to a round.

With X the block as it stands and j_1 < ... < j_b its b leftmost masked positions (b at most the window k), a round is

1. *draft* (lines 9-10): one forward of X gives the distributions rho of all b positions; each position's token is drawn
   independently of the others;
2. *verify* (lines 11-13): a forward of X with the drafts of j_1 .. j_(m-1) filled in gives the target distribution pi
   of j_m;
3. *commit* (lines 14-26): from left to right, a draft x is accepted if u <= min(1, pi(x) / rho(x)). The first that is
   not is replaced by a draw from norm(max(0, pi - rho)), and those behind it are dropped.

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

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_VALUES = 4 << 20
"""Logits that are looked at together, in fp32: 16 MiB for each of the few temporary tensors."""

Noise = Callable[[slice, Tensor], Tensor]
"""``noise(requests, positions)``: [n, V] float32, logarithms of independent Exp(1) variables for the draws of those
requests at these positions ([n] int64, columns of the block). They must not be the ones that drew the drafts."""


class Distributions(NamedTuple):
    """Distributions of tokens, as rows of logits that nobody has to copy together."""

    logits: Tensor
    """[N, V] of any floating type, not modified. Sampling parameters may have been applied, with -inf for tokens that
    top-k and the like have ruled out."""
    rows: Tensor
    """[n] or [R, K] int64: row of each distribution."""
    temperature: Tensor
    """[n] or [R] float32, 0 for the most likely token."""
    mask_id: int
    temperature_applied: bool = False
    """The logits are divided by the temperature already."""

    def chunks(self) -> Iterator[slice]:
        """Slices of the distributions that are looked at together; an empty one if there are none."""
        size = max(1, CHUNK_VALUES // self.logits.shape[1])
        for start in range(0, max(1, self.rows.numel()), size):
            yield slice(start, start + size)

    def scores(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """[m, V] float32, a copy: logits whose softmax is each distribution. [m] bool: the temperature is 0."""
        rows = self.rows.flatten()[chunk]
        temperature = self.temperature.repeat_interleave(self.rows.numel() // max(1, len(self.rows)))[chunk]
        x = self.logits[rows].float()
        if not self.temperature_applied:
            x.mul_(torch.where(temperature > 0, temperature.reciprocal(), 1.0).unsqueeze(1))
        x[:, self.mask_id] = -torch.inf
        # If nothing but the mask token was left, the draw is the first other token, as in ``row_stats``.
        first = int(self.mask_id == 0)
        nothing_left = x.amax(dim=1) == -torch.inf
        x[:, first] = torch.where(nothing_left, 0.0, x[:, first])
        return x, temperature == 0


class TokenProbs(NamedTuple):
    """What distributions say of a token each."""

    log_prob: Tensor
    """float32 of the tokens' shape: logarithm of its probability; at temperature 0 that is 0 or -inf."""
    confidence: Tensor
    """float32: its softmax probability, at temperature 0 as well."""


class Draw(NamedTuple):
    """Tokens drawn from n distributions."""

    token: Tensor
    """[n] int64."""
    confidence: Tensor
    """[n] float32: probability of the token by pi."""


class Committed(NamedTuple):
    """R requests after a round."""

    tokens: Tensor
    """[R, L] int64: the block."""
    confidence: Tensor
    """[R, L] float32: probability of each token by the pi that it was committed with."""
    num_accepted: Tensor
    """[R] int64: drafts accepted, the first included."""
    num_committed: Tensor
    """[R] int64: tokens committed, the corrected one included."""
    forwarded: Tensor
    """[R] bool: the new block is the last branch of this round, whose logits draft the next round."""


def draft_positions(masked: Tensor, window: Tensor, *, max_window: int) -> tuple[Tensor, Tensor]:
    """The leftmost positions of every block that are ``masked`` [R, L] bool (lines 7-8).

    Args:
        window: [R] int64: drafts of a round at most; 0 for a request that drafts none.
        max_window: the largest window, known to the host. K is this or L if that is less.

    Returns:
        positions: [R, K] int64, those present in ascending order, all distinct.
        present: [R, K] bool, a prefix of every row.
    """
    num_drafts = min(max_window, masked.shape[1])
    positions = (~masked).view(torch.uint8).argsort(dim=1, stable=True)[:, :num_drafts]
    size = torch.minimum(window, masked.sum(dim=1))
    return positions, torch.arange(num_drafts, device=masked.device) < size.unsqueeze(1)


def fef_branches(block: Tensor, positions: Tensor, present: Tensor, tokens: Tensor) -> Tensor:
    """The inputs of the forward that verifies the drafts ``tokens`` [R, K] of ``draft_positions`` (lines 11-12).

    Returns:
        [R, K, L] int64. Branch m holds the drafts of j_1 .. j_(m+1): it verifies that of j_(m+2), and the last one is
        the block if all are accepted. ``branches_present`` says which are of use.
    """
    num_drafts = tokens.shape[1]
    index = torch.arange(num_drafts, device=block.device)
    drafted = block.scatter(1, positions, torch.where(present, tokens, block.gather(1, positions)))
    order = torch.full_like(block, num_drafts).scatter_(1, positions, torch.where(present, index, num_drafts))
    filled = order.unsqueeze(1) <= index.unsqueeze(1)  # [R, K, L]
    return torch.where(filled, drafted.unsqueeze(1), block.unsqueeze(1))


def branches_present(masked: Tensor, present: Tensor) -> Tensor:
    """[R, K] bool: branches of ``fef_branches`` that leave a mask. All but the last of a request must be forwarded.

    A request without any has one position left, and can be committed without a verifying forward.
    """
    num_filled = torch.arange(1, present.shape[1] + 1, device=masked.device)
    return present & (num_filled < masked.sum(dim=1, keepdim=True))


def accept(pi_of_token: Tensor, rho_of_token: Tensor, uniform: Tensor, present: Tensor) -> Tensor:
    """How many drafts are accepted, those before the first with u > pi / rho (line 16): [R] int64; 0 without drafts.

    Args:
        pi_of_token, rho_of_token: [R, K] float32: log-probabilities of the drafts. Those of the first are not read:
            its distributions are the same.
        uniform: [R, K] float32: draws from (0, 1].
        present: [R, K] bool, a prefix of every row.
    """
    # A token that pi rules out must not slip in where rho has underflowed as well.
    accepted = (uniform.log() + rho_of_token <= pi_of_token) & (pi_of_token > -torch.inf)
    first = torch.arange(present.shape[1], device=present.device) == 0
    return ((accepted | first) & present).long().cumprod(dim=1).sum(dim=1)


def token_probs(distributions: Distributions, tokens: Tensor) -> TokenProbs:
    """Probabilities of ``tokens``, one of each distribution, in memory that is bounded whatever the number of rows."""
    log_prob, confidence = [], []
    for chunk in distributions.chunks():
        x, greedy = distributions.scores(chunk)
        token = tokens.flatten()[chunk]
        of_token = x.log_softmax(dim=1).gather(1, token.unsqueeze(1)).squeeze(1)
        one_hot = torch.where(token == x.argmax(dim=1), 0.0, -torch.inf)
        log_prob.append(torch.where(greedy, one_hot, of_token))
        confidence.append(of_token.exp())
    return TokenProbs(torch.cat(log_prob).view_as(tokens), torch.cat(confidence).view_as(tokens))


def residual(pi: Distributions, rho: Distributions, noise: Callable[[slice], Tensor]) -> Draw:
    """Draw from norm(max(0, pi - rho)) (line 20, eq. 6); the most likely token of pi at temperature 0.

    Where pi = rho that distribution does not exist. No draft is rejected there, except by rounding, and the draw is one
    from pi.

    Args:
        noise: the logarithms [m, V] of independent Exp(1) variables for some of the n draws.
    """
    tokens, confidence = [], []
    for chunk in pi.chunks():
        x, greedy = pi.scores(chunk)
        probability = x.softmax(dim=1)
        excess = rho.scores(chunk)[0].softmax(dim=1).neg_().add_(probability).clamp_(min=0)
        distribution = torch.where(excess.amax(dim=1, keepdim=True) > 0, excess, probability)
        # The exponential race: the largest log p - log E is a draw from p.
        score = torch.where(greedy.unsqueeze(1), x, distribution.log_().sub_(noise(chunk)))
        token = score.argmax(dim=1)
        tokens.append(token)
        confidence.append(probability.gather(1, token.unsqueeze(1)).squeeze(1))
    return Draw(torch.cat(tokens), torch.cat(confidence))


def commit(
    block: Tensor,
    confidence: Tensor,
    positions: Tensor,
    present: Tensor,
    tokens: Tensor,
    branches: Tensor,
    rho: Distributions,
    pi: Distributions,
    uniform: Tensor,
    noise: Noise,
) -> Committed:
    """Accept drafts and correct the first that is not (lines 14-26).

    A request without drafts stays as it is.

    Args:
        block: [R, L] int64: as it was drafted for.
        confidence: [R, L] float32: of what was committed before.
        positions, present: of ``draft_positions``.
        tokens: [R, K] int64: drafts.
        branches: [R, K] bool: branches of ``fef_branches`` that were forwarded.
        rho: [R, K], of the draft forward; any row where no draft is present.
        pi: [R, K - 1], of the verifying forward: for the second position (of branch 0), the third (of branch 1), ...
            With K = 1 there is nothing to verify, and pi is not read.
        uniform: [R, K] float32: draws from (0, 1].
        noise: for the corrected tokens.
    """
    num_drafts = tokens.shape[1]
    drafted = verified = token_probs(rho, tokens)
    if num_drafts > 1:
        behind = token_probs(pi, tokens[:, 1:])
        # At the first position pi is rho.
        verified = TokenProbs(*(torch.cat((x[:, :1], rest), dim=1) for x, rest in zip(drafted, behind, strict=True)))
    num_accepted = accept(verified.log_prob, drafted.log_prob, uniform, present)
    size = present.sum(dim=1)
    num_committed = torch.minimum(num_accepted + 1, size)

    values, confidences = tokens, verified.confidence
    index = torch.arange(num_drafts, device=block.device)
    if num_drafts > 1:
        # A draw for every request, whether it is needed or not.
        rejected = num_accepted.clamp(1, num_drafts - 1).unsqueeze(1)
        at = positions.gather(1, rejected).squeeze(1)
        correction = residual(
            pi._replace(rows=pi.rows.gather(1, rejected - 1)),
            rho._replace(rows=rho.rows.gather(1, rejected)),
            lambda requests: noise(requests, at[requests]),
        )
        corrected = index == num_accepted.unsqueeze(1)
        values = torch.where(corrected, correction.token.unsqueeze(1), values)
        confidences = torch.where(corrected, correction.confidence.unsqueeze(1), confidences)

    written = index < num_committed.unsqueeze(1)
    last = (size - 1).clamp(min=0).unsqueeze(1)
    return Committed(
        tokens=block.scatter(1, positions, torch.where(written, values, block.gather(1, positions))),
        confidence=confidence.scatter(1, positions, torch.where(written, confidences, confidence.gather(1, positions))),
        num_accepted=num_accepted,
        num_committed=num_committed,
        forwarded=(num_accepted == size) & (present & branches).gather(1, last).squeeze(1),
    )


def num_remask(generated: Tensor, fraction: Tensor) -> Tensor:
    """How many positions a further pass draws anew: [R] int64.

    A ``fraction`` [R] of the positions that are not prompt, ``generated`` [R, L] bool; rounded up, but at least one.
    """
    share = generated.sum(dim=1) * fraction
    # What exceeds a whole number by rounding only is that number.
    return (share - 1e-4).ceil().long().clamp(min=1)


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
    order = torch.where(candidates, confidence, torch.inf).argsort(dim=1, stable=True)
    count = torch.minimum(num_remask, candidates.sum(dim=1))
    first = torch.arange(tokens.shape[1], device=tokens.device) < count.unsqueeze(1)
    chosen = torch.empty_like(candidates).scatter_(1, order, first)
    return torch.where(chosen, mask_id, tokens)
