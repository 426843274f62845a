"""Rejection sampling of drafts, by which FeF-DLLM and S2D2 verify theirs.

A draft x is a draw from a distribution p. The verifying forward gives the distribution q that the token is to have::

    accept    x if u <= q(x) / p(x), from left to right up to the first draft that is not
    replace   that one by a draw from norm(max(0, q - p)); the drafts behind it are dropped

A written token then has the distribution q, whatever p was. At temperature 0 both are one-hot: a draft is accepted if
it is the most likely token of q, and is replaced by that token if it is not.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", arXiv 2211.17192.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_dllm.decoding.distributions import DistributionReader, Distributions, Draw, Noise, Stage, as_written


class Verified(NamedTuple):
    """What becomes of the drafts of R requests."""

    num_accepted: Tensor
    """[R] int64."""
    confidence: Tensor
    """[R, K] float32: probability of each draft by q."""
    replacement: Draw
    """[R]: for the first draft that is not accepted; of no use where all are."""


def accept(q_of_token: Tensor, p_of_token: Tensor, log_uniform: Tensor, present: Tensor) -> Tensor:
    """How many drafts are accepted, those before the first with u > q / p: [R] int64.

    Args:
        q_of_token, p_of_token: [R, K] float32: log-probabilities of the drafts.
        log_uniform: [R, K] float32: logarithms of draws from (0, 1].
        present: [R, K] bool, a prefix of every row.
    """
    # A token that q rules out must not slip in where p has underflowed as well.
    accepted = (log_uniform + p_of_token <= q_of_token) & (q_of_token > -torch.inf) & present
    return accepted.long().cumprod(dim=1).sum(dim=1)


def judge(
    q_of_token: Tensor, p_of_token: Tensor, log_uniform: Tensor, present: Tensor, columns: Tensor, q: Tensor, p: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How many drafts are accepted, and of the first other one: its column and its rows of q and p. [R] int64 each.

    Args:
        q_of_token, p_of_token, log_uniform, present: as for ``accept``.
        columns: [R, K] int64: of the drafts.
        q, p: [R, K] int64: rows of the distributions.
    """
    count = accept(q_of_token, p_of_token, log_uniform, present)
    # A draw for every request, whether it is needed or not.
    at = count.clamp(max=present.shape[1] - 1).unsqueeze(1)
    return count, columns.gather(1, at).squeeze(1), q.gather(1, at).squeeze(1), p.gather(1, at).squeeze(1)


class RejectionSampler:
    """Accepts and replaces drafts, in tensor functions that ``stage`` makes forms of."""

    def __init__(self, stage: Stage = as_written):
        self.reader = DistributionReader(stage)
        self._judge = stage(judge)

    def verify(
        self,
        drafts: Tensor,
        columns: Tensor,
        present: Tensor,
        q: Distributions,
        p: Distributions,
        uniform: Tensor,
        noise: Noise,
    ) -> Verified:
        """Accept drafts, and draw a replacement of the first that is not accepted.

        Args:
            drafts: [R, K] int64, from left to right; K at least 1.
            columns: [R, K] int64: of the drafts in their blocks.
            present: [R, K] bool, a prefix of every row.
            q, p: [R, K]; any row where no draft is present.
            uniform: [R, K] float32: draws from (0, 1].
            noise: for the replacements, given columns.
        """
        of_q, of_p = self.reader.token_probs(q, drafts), self.reader.token_probs(p, drafts)
        count, column, row_of_q, row_of_p = self._judge(
            of_q.log_prob, of_p.log_prob, uniform.log(), present, columns, q.rows, p.rows
        )
        replacement = self.reader.residual(
            q._replace(rows=row_of_q), p._replace(rows=row_of_p), lambda requests: noise(requests, column[requests])
        )
        return Verified(count, of_q.confidence, replacement)
