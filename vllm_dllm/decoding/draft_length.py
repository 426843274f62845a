"""How many drafts of each request are worth a target's rows: adaptive k.

The drafter makes all k drafts in one forward whatever becomes of them, so only the target's rows can be saved. How many
are verified follows from earlier rounds alone, never from the drafts themselves: the output keeps the target's
distribution.
"""

from dataclasses import dataclass

WEIGHT = 0.25
"""Of the latest round in the mean."""
HEADROOM = 1.5
"""Drafts over the mean accepted, times this and one more."""
GROWTH = 2
"""Factor after a round whose drafts were all accepted: nothing says how far the next ones would have gone."""


@dataclass(slots=True)
class DraftLength:
    """The number of drafts of one request.

    Attributes:
        most: k, what the drafter makes.
        mean: moving average of the drafts accepted in a round.
        length: drafts to verify in the next round.
    """

    most: int
    mean: float = 0.0
    length: int = 0

    def __post_init__(self) -> None:
        self.mean, self.length = float(self.most), self.most

    def observe(self, drafted: int, accepted: int) -> None:
        """A round with ``drafted`` > 0 drafts, of which the first ``accepted`` were kept."""
        reached = min(GROWTH * drafted, self.most) if accepted == drafted else accepted
        self.mean += WEIGHT * (reached - self.mean)
        self.length = max(1, min(self.most, int(HEADROOM * self.mean) + 1))
