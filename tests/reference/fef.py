"""FeF-DLLM (arXiv 2605.14305, Algorithm 2), written for the eye, for one request, with and without speculation.

The model is a function that maps a block to the distribution of every position. No distribution gives the mask token
any probability. Randomness comes from a ``Noise``, so that another implementation can be given the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Distribution = Sequence[float]
Distributions = Callable[[list[int]], Sequence[Distribution]]


class Noise(Protocol):
    """Randomness by pass, round of the pass, and position."""

    def uniform(self, step: int, round_: int, position: int) -> float:
        """From (0, 1]."""

    def draft(self, step: int, round_: int, position: int) -> Sequence[float]:
        """An Exp(1) variable for every token."""

    def correction(self, step: int, round_: int, position: int) -> Sequence[float]:
        """As ``draft``, and independent of it."""


@dataclass
class Round:
    drafts: list[int]
    num_accepted: int
    num_committed: int
    block: list[int]
    """After it."""
    forwarded: bool
    """The block is what the last branch of the verifying forward held, so that its distributions are known."""


@dataclass
class Pass:
    masked: list[int]
    """Positions that it is to fill."""
    rounds: list[Round] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    """After it."""
    confidence: dict[int, float] = field(default_factory=dict)


@dataclass
class Decoded:
    block: list[int]
    passes: list[Pass]
    forwards: int
    """A draft forward where the block's distributions are not known yet, and a verifying one where a mask is left."""


def expected_committed(alpha: float, k: int) -> float:
    """Mean number of tokens that a round commits if each of its k drafts is accepted with probability alpha.

    Theorem 2: (1 - alpha^k) / (1 - alpha), which counts the corrected token.
    """
    return float(k) if alpha == 1 else (1 - alpha**k) / (1 - alpha)


def expected_committed_first_certain(alpha: float, k: int) -> float:
    """The same where the first draft is accepted for certain, and the other k - 1 with probability alpha.

    Behind a first token that is always committed they are a window of k - 1: 1 + (1 - alpha^(k-1)) / (1 - alpha).
    """
    return 1 + expected_committed(alpha, k - 1)


def draw(distribution: Distribution, exponentials: Sequence[float]) -> int:
    """The exponential race: the first arrival, at rate p each."""
    arrivals = [e / p if p > 0 else math.inf for p, e in zip(distribution, exponentials, strict=True)]
    return arrivals.index(min(arrivals))


def one_hot(distribution: Distribution) -> list[float]:
    best = max(range(len(distribution)), key=lambda token: distribution[token])
    return [float(token == best) for token in range(len(distribution))]


def decode(
    block: list[int],
    distributions: Distributions,
    noise: Noise,
    *,
    mask_id: int,
    window: int,
    num_steps: int = 1,
    num_remask: int = 1,
    keep_confidence: bool = True,
    greedy: bool = False,
) -> Decoded:
    """Algorithm 2. J_pred are the positions that ``block`` masks.

    Args:
        window: k.
        num_steps: N_step.
        num_remask: n_rm.
        keep_confidence: confidences of earlier passes stay in C; Algorithm 2 empties it (line 5).
        greedy: distributions are one-hot, while confidences are those of the distributions as they were.
    """
    x = list(block)
    passes: list[Pass] = []
    kept: dict[int, float] = {}
    forwards, known = 0, False

    def distribution_at(at: Sequence[float]) -> list[float]:
        return one_hot(at) if greedy else list(at)

    for s in range(num_steps):
        this = Pass(masked=[i for i, token in enumerate(x) if token == mask_id])
        passes.append(this)
        known = False
        while mask_id in x:
            unresolved = [i for i, token in enumerate(x) if token == mask_id]
            b = min(window, len(unresolved))
            j = unresolved[:b]
            index = len(this.rounds)

            forwards += not known
            rho = distributions(x)
            drafts = [draw(distribution_at(rho[i]), noise.draft(s, index, i)) for i in j]

            # Input m holds the drafts of the positions before the m-th; input b, which holds all, verifies nothing.
            inputs = [list(x)]
            for i, token in zip(j, drafts, strict=True):
                inputs.append([token if at == i else old for at, old in enumerate(inputs[-1])])
            forwards += len(unresolved) > 1

            accepted = committed = 0
            for m in range(b):
                target = distributions(inputs[m])[j[m]]
                pi, draft_distribution = distribution_at(target), distribution_at(rho[j[m]])
                token = drafts[m]
                committed += 1
                if noise.uniform(s, index, j[m]) <= min(1, pi[token] / draft_distribution[token]):
                    accepted += 1
                else:
                    excess = [max(0.0, p - q) for p, q in zip(pi, draft_distribution, strict=True)]
                    corrected = [p / sum(excess) for p in excess]
                    token = draw(corrected, noise.correction(s, index, j[m]))
                x[j[m]] = token
                this.confidence[j[m]] = target[token]
                if accepted < committed:
                    break
            known = accepted == b and len(unresolved) > b
            this.rounds.append(Round(drafts, accepted, committed, list(x), known))

        this.block = list(x)
        kept.update(this.confidence)
        if s < num_steps - 1:
            confidence = kept if keep_confidence else this.confidence
            for i in sorted(confidence, key=lambda i: (confidence[i], i))[:num_remask]:
                x[i] = mask_id
    return Decoded(x, passes, forwards)


def decode_sequentially(
    block: list[int], distributions: Distributions, noise: Noise, *, mask_id: int, greedy: bool = False
) -> list[int]:
    """One pass without speculation: position by position from pi."""
    x = list(block)
    for i, token in enumerate(block):
        if token == mask_id:
            pi = distributions(x)[i]
            x[i] = draw(one_hot(pi) if greedy else pi, noise.draft(0, 0, i))
    return x
