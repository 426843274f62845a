"""Distributions of tokens, read a bounded number of logits at a time.

What may be compiled (``runtime.compiled``) is apart from what rounds, softmax and logarithms, and may not.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

Noise = Callable[[slice, Tensor], Tensor]
"""``noise(requests, places)``: [n, V] float32, logarithms of independent Exp(1) variables for the draws of those
requests at these places, [n] int64. They must not be the ones that drew the drafts."""

CHUNK_VALUES = 4 << 20
"""Logits that are looked at together, in fp32: 16 MiB for each of the few temporary tensors."""
GPU_CHUNK_VALUES = 32 << 20
"""The same on a GPU, where every chunk takes launches: 128 MiB."""


class Stage(Protocol):
    """Makes compiled forms of a tensor function."""

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, or its compiled forms."""


def as_written(function: Callable[P, R]) -> Callable[P, R]:
    """The ``Stage`` that compiles nothing."""
    return function


class Distributions(NamedTuple):
    """Distributions of tokens, as rows of logits that nobody has to copy together."""

    logits: Tensor
    """[N, V] of any floating type, not modified. Sampling parameters may have been applied, with -inf for tokens that
    top-k and the like have ruled out."""
    rows: Tensor
    """[R] or [R, K] int64: row of each distribution."""
    temperature: Tensor
    """[R] float32, 0 for the most likely token."""
    mask_id: int
    temperature_applied: bool = False
    """The logits are divided by the temperature already."""
    inverse: Tensor | None = None
    """[R] float32: reciprocals of the temperatures, for who has them."""

    def chunks(self) -> Iterator[slice]:
        """Slices of the R that are looked at together; an empty one if there are none."""
        width = self.rows.shape[1] if self.rows.ndim > 1 else 1
        values = GPU_CHUNK_VALUES if self.logits.is_cuda else CHUNK_VALUES
        size = max(1, values // (self.logits.shape[1] * max(1, width)))
        for start in range(0, max(1, len(self.rows)), size):
            yield slice(start, start + size)

    def at(self, chunk: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, int, bool]:
        """Arguments of ``scores``."""
        temperature = self.temperature[chunk]
        inverse = temperature.reciprocal() if self.inverse is None else self.inverse[chunk]
        return self.logits, self.rows[chunk], temperature, inverse, self.mask_id, self.temperature_applied


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
    """[n] float32: probability of the token by q."""


def scores(
    logits: Tensor, rows: Tensor, temperature: Tensor, inverse: Tensor, mask_id: int, temperature_applied: bool
) -> tuple[Tensor, Tensor]:
    """[r, ..., V] float32, a copy: logits whose softmax is each distribution; and the most likely tokens [r, ...].

    Args:
        inverse: [r] float32: reciprocals of the temperatures.
    """
    x = logits[rows].float()
    if not temperature_applied:
        x.mul_(torch.where(temperature > 0, inverse, 1.0).view(-1, *[1] * (x.ndim - 1)))
    # An assignment to `x[..., mask_id]` would ask for the number of rows: a compiled form of its own for one row.
    x.select(-1, mask_id).fill_(-torch.inf)
    # By an index: Inductor makes several kernels of other reductions of long rows.
    best = x.argmax(dim=-1, keepdim=True)
    # If nothing but the mask token was left, the draw is the first other token, as in ``row_stats``.
    first = int(mask_id == 0)
    nothing_left = (x.gather(-1, best) == -torch.inf).squeeze(-1)
    x.select(-1, first).masked_fill_(nothing_left, 0.0)
    return x, torch.where(nothing_left, first, best.squeeze(-1))


def of_tokens(log_prob: Tensor, tokens: Tensor, best: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of the probabilities of ``tokens`` [r, ...], and those of the softmax.

    Args:
        log_prob: [r, ..., V] float32: of the softmax.
        best: [r, ...] int64: the most likely tokens.
    """
    of_token = log_prob.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    is_greedy = (temperature == 0).view(-1, *[1] * (tokens.ndim - 1))
    return torch.where(is_greedy, torch.where(tokens == best, 0.0, -torch.inf), of_token), of_token


def excess(q: Tensor, p: Tensor) -> Tensor:
    """max(0, q - p), not normalised; q where that is 0 everywhere. [r, V] float32 each."""
    more = (q - p).clamp(min=0)
    # By an index, as in ``scores``.
    most = more.gather(1, more.argmax(dim=1, keepdim=True))
    return torch.where(most > 0, more, q)


def race(x: Tensor, log_prob: Tensor, noise: Tensor, probability: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [r] and their probabilities: the exponential race, the largest log p - log E is a draw from p.

    At temperature 0 the most likely tokens of ``x``.
    """
    token = torch.where((temperature == 0).unsqueeze(1), x, log_prob - noise).argmax(dim=1)
    return token, probability.gather(1, token.unsqueeze(1)).squeeze(1)


class DistributionReader:
    """Reads distributions, in tensor functions that ``stage`` makes forms of."""

    def __init__(self, stage: Stage = as_written):
        self._scores, self._of_tokens = stage(scores), stage(of_tokens)
        self._excess, self._race = stage(excess), stage(race)

    def token_probs(self, distributions: Distributions, tokens: Tensor) -> TokenProbs:
        """Probabilities of ``tokens``, one of each distribution, in memory that is bounded whatever R is."""
        log_prob, confidence = [], []
        for chunk in distributions.chunks():
            x, best = self._scores(*(at := distributions.at(chunk)))
            of_token, softmax = self._of_tokens(x.log_softmax(dim=-1), tokens[chunk], best, at[2])
            log_prob.append(of_token)
            confidence.append(softmax.exp())
        return TokenProbs(_cat(log_prob), _cat(confidence))

    def residual(self, q: Distributions, p: Distributions, noise: Callable[[slice], Tensor]) -> Draw:
        """Draw from norm(max(0, q - p)), as in ``decoding.rejection``; the most likely token of q at temperature 0.

        Where q = p that distribution does not exist. No draft is rejected there, except by rounding, and the draw is
        one from q.

        Args:
            q, p: [R] each.
            noise: the logarithms [m, V] of independent Exp(1) variables for some of the R draws.
        """
        tokens, confidence = [], []
        for chunk in q.chunks():
            x, _ = self._scores(*(at := q.at(chunk)))
            probability = x.softmax(dim=1)
            distribution = self._excess(probability, self._scores(*p.at(chunk))[0].softmax(dim=1))
            token, of_token = self._race(x, distribution.log(), noise(chunk), probability, at[2])
            tokens.append(token)
            confidence.append(of_token)
        return Draw(_cat(tokens), _cat(confidence))


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
