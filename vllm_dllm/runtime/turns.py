"""Who gets rows where a step has too few of them: turns of the requests that decode, and shares of their drafts.

vLLM goes through its running requests in the order in which they came. With too few rows the first requests would have
rows in every step, and the last requests none before the first ones end.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class RowNeeds(NamedTuple):
    """Rows of a decoding request's next step."""

    wanted: int
    """If nothing limits them."""
    fixed: int
    """Without which the request cannot go on at all. The others are those of drafts that may be taken back."""
    per_draft: int

    @property
    def drafts(self) -> int:
        """Drafts that may be taken back."""
        return (self.wanted - self.fixed) // self.per_draft

    def keeping(self, drafts: int) -> int:
        """Rows with so many of the drafts that may be taken back."""
        return self.fixed + drafts * self.per_draft

    def within(self, room: int) -> int:
        """Rows out of ``room``, which is too little for all: those of as many drafts as fit, or none at all."""
        return 0 if room < self.fixed else self.keeping((room - self.fixed) // self.per_draft)


def serve(rows: Sequence[int], missed: Sequence[int], budget: int) -> list[bool]:
    """Which requests a step of ``budget`` rows serves: those that missed the most steps first, of equals the smallest.

    A request that needs many rows leaves its place to several that need few, but is never passed over for longer than
    they are.

    Args:
        rows: that each request needs in this step, all or none.
        missed: steps in a row that each request went without.
    """
    served = [False] * len(rows)
    for index in sorted(range(len(rows)), key=lambda index: (-missed[index], rows[index])):
        if rows[index] <= budget:
            budget -= rows[index]
            served[index] = True
    return served


def share(drafts: Sequence[int], units: Sequence[int], room: int) -> list[int]:
    """As many of each request's ``drafts`` as fit in ``room`` rows, taken from the requests with the most drafts.

    ``units``: rows of one draft of each request.
    """
    most = max(drafts, default=0)
    while most and sum(min(number, most) * unit for number, unit in zip(drafts, units, strict=True)) > room:
        most -= 1
    shares = [min(number, most) for number in drafts]
    left = room - sum(number * unit for number, unit in zip(shares, units, strict=True))
    for index, (number, unit) in enumerate(zip(drafts, units, strict=True)):
        if number > most and left >= unit:
            shares[index] += 1
            left -= unit
    return shares


class Turns:
    """Turns of the requests that decode, and of all prompts together, which take part like one request more.

    Attributes:
        sitting_out: requests that this step does not serve.
        prompt_rows: rows that prompts may have in this step; None: no limit but vLLM's own.
    """

    def __init__(self) -> None:
        self.all_have_room()

    def all_have_room(self) -> None:
        """The next step has rows for every request: nobody sits out, and nobody has missed a step."""
        self._missed: dict[str, int] = {}
        self._prompts_missed = 0
        self.sitting_out: frozenset[str] = frozenset()
        self.prompt_rows: int | None = None

    def take(self, rows: Mapping[str, int], prompts: int, budget: int) -> None:
        """Choose who sits out of the next step.

        Args:
            rows: that each decoding request needs, all or none.
            prompts: rows of the turn of the prompts; 0: there are no prompts.
        """
        missed = [self._missed.get(req_id, 0) for req_id in rows]
        served = serve([*rows.values(), prompts], [*missed, self._prompts_missed], budget)
        self._missed = dict(zip(rows, missed, strict=True))
        self.sitting_out = frozenset(req_id for req_id, is_served in zip(rows, served, strict=False) if not is_served)
        left = budget - sum(number for req_id, number in rows.items() if req_id not in self.sitting_out)
        self.prompt_rows = left if prompts else None
        # A turn of the prompts counts as taken whatever they make of it: that depends on free pages too.
        self._prompts_missed = 0 if served[-1] else self._prompts_missed + 1

    def end_step(self, scheduled: Collection[str]) -> None:
        """The step has rows for the requests ``scheduled``; others may lack pages."""
        for req_id, missed in self._missed.items():
            self._missed[req_id] = 0 if req_id in scheduled else missed + 1
