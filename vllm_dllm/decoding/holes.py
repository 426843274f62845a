"""Filling in masks that stand anywhere in a text, for models with full attention.

Such a model sees its whole text, and only rotary positions say where a token stands. So the engine computes a text with
holes in another order than the text's, its *sequence*: first the known tokens behind the first hole, then those before
it, then the masks of all holes. A sequence has its masks at the end, as the engine has them for any request, and each
place of the sequence has a position in the text.

For example, the text ``a b _ _ c _ d``, with holes at the positions 2 to 3 and 5::

    place of the sequence     0  1  2  3  4  5  6
    token                     c  d  a  b  _  _  _
    position in the text      4  6  0  1  2  3  5

The token before the first hole stands before the first mask in the sequence, too, as logits of shifted families and
``bad_words`` need it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Holes:
    """Runs of masks in a text."""

    runs: tuple[tuple[int, int], ...]
    """Position in the text of the first mask, and number of masks, of each hole; in the order of the text."""

    @classmethod
    def of(cls, positions: np.ndarray) -> "Holes":
        """The holes that masks at these ``positions`` [M] of a text make, in rising order."""
        begins = np.flatnonzero(np.diff(positions, prepend=-2) > 1)
        lengths = np.diff(begins, append=len(positions))
        return cls(tuple(zip(positions[begins].tolist(), lengths.tolist(), strict=True)))

    @cached_property
    def positions(self) -> np.ndarray:
        """[M] int64: positions of the masks in the text."""
        return np.concatenate([start + np.arange(length) for start, length in self.runs])

    def known(self, text_length: int) -> np.ndarray:
        """[text_length - M] int64: positions of the known tokens in the text, in the order of the sequence."""
        known = np.setdiff1d(np.arange(text_length), self.positions)
        first = self.runs[0][0]
        return np.concatenate((known[known > first], known[known < first]))

    def order(self, text_length: int) -> np.ndarray:
        """[text_length] int64: position in the text of each place of the sequence."""
        return np.concatenate((self.known(text_length), self.positions))

    def predictors(self, text_length: int) -> np.ndarray:
        """[text_length] int64: for each place, the place whose logits predict it in shifted families.

        That is the place of the token before it in the text; the first token of a text has its own.
        """
        order = self.order(text_length)
        place = np.empty_like(order)
        place[order] = np.arange(text_length)
        return place[np.maximum(order - 1, 0)]

    def cut(self, tokens: Sequence[int], end_ids: frozenset[int]) -> list[list[int]]:
        """Tokens of each hole, from the tokens of all, cut before the first end of the text in it.

        A model that needs fewer tokens than a hole has fills the rest with ends of the text.
        """
        holes, begin = [], 0
        for _, length in self.runs:
            filled = list(tokens[begin : begin + length])
            ends = [index for index, token in enumerate(filled) if token in end_ids]
            holes.append(filled[: ends[0]] if ends else filled)
            begin += length
        return holes
