"""How many of a decoding request's rows may be taken away where a step has too few for all."""

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
