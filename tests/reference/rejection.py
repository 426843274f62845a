"""Speculative sampling, written for the eye, for one request: distributions are lists of probabilities.

``targets`` [drafts + 1] are the target's distributions after each prefix of the drafts, ``proposals`` [drafts] those
that the drafts were drawn from. Randomness comes as ``uniforms`` [drafts] from (0, 1) and ``draw(step, weights)``,
so that another implementation can be given the same.
"""

from collections.abc import Callable, Sequence

PLACEHOLDER = -1
"""A draft that no one proposed. The target's own draw takes its place."""

Distribution = Sequence[float]
Draw = Callable[[int, Distribution], int]


def verify_tokens(
    drafts: list[int],
    proposals: Sequence[Distribution],
    targets: Sequence[Distribution],
    uniforms: Sequence[float],
    draw: Draw,
) -> list[int]:
    """Speculative sampling (arXiv 2211.17192, Algorithm 1)."""
    for step, (x, u) in enumerate(zip(drafts, uniforms, strict=True)):
        p = targets[step]
        if x == PLACEHOLDER:
            return [*drafts[:step], draw(step, p)]
        q = proposals[step]
        if u >= min(1, p[x] / q[x]):
            return [*drafts[:step], draw(step, residual(p, q))]
    return [*drafts, draw(len(drafts), targets[-1])]


def verify_greedily(drafts: list[int], targets: Sequence[Distribution]) -> list[int]:
    """Keep the drafts that the target would have chosen itself, and choose one token more."""
    chosen = [max(range(len(p)), key=lambda token, p=p: p[token]) for p in targets]
    for step, x in enumerate(drafts):
        if x != chosen[step]:
            return chosen[: step + 1]
    return chosen


def residual(p: Distribution, q: Distribution) -> list[float]:
    """What q leaves of p, not normalised."""
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
