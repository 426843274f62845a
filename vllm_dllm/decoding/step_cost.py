"""What a step costs, learned from steps that the engine timed when it started."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


class StepCost:
    """Seconds of a step: a convex function of its rows, and more where drafts are verified and made.

    Convex fits an accelerator (flat up to a knee, then linear) and a CPU (linear from the start), and evens out noise.

    Args:
        timed: rows of a step, whether the step verified drafts and made drafts for the next one, seconds.

    Attributes:
        knows_sizes: steps without drafts were timed with more than one number of rows.
    """

    def __init__(self, timed: Sequence[tuple[int, bool, float]] = ()) -> None:
        kinds: dict[tuple[int, bool], list[float]] = {}
        for number, has_drafts, seconds in timed or [(1, False, 1.0)]:
            kinds.setdefault((number, has_drafts), []).append(seconds)
        rows, drafts = np.array(list(kinds), dtype=float).T
        self._knees = np.unique(rows)[:-1]
        self.knows_sizes = bool(np.count_nonzero(drafts == 0) > 1)
        # Noise is about proportional to the seconds, and less so where a kind of step was timed often.
        often = np.sqrt([len(each) for each in kinds.values()])
        terms = self._terms(rows, drafts) * (often / [median(each) for each in kinds.values()])[:, None]
        # Least squares without negative weights: terms that would have one are left out, one by one.
        self._weights, used = np.zeros(terms.shape[1]), np.flatnonzero(terms.any(axis=0))
        while (fitted := np.linalg.lstsq(terms[:, used], often, rcond=None)[0]).min() < 0:
            used = np.delete(used, fitted.argmin())
        self._weights[used] = fitted

    def _terms(self, rows: Floats, drafts: Floats) -> Floats:
        """[n, terms] of n steps: none falls with rows, and all are convex."""
        knees = [np.maximum(rows - knee, 0.0) for knee in self._knees]
        return np.stack([np.ones_like(rows), rows, drafts, drafts * rows, *knees], axis=1)

    def seconds(self, rows: Floats, drafts: bool) -> Floats:
        """[n]: seconds of steps of ``rows`` [n] rows, all of them with or all without ``drafts``."""
        return self._terms(rows, np.full_like(rows, drafts)) @ self._weights
