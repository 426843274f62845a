"""Where a finished block's rows go if a step is scheduled before the outcome of the step before it is known.

A finished block has one more forward, which writes the K/V of the block's final tokens. Nobody knows yet whose block is
finished, so in a step either all requests have rows for that forward, or none has, and a finished block takes the rows
of the next block:

======  =============================  ===============
rows    steps of a block               rows of a step
======  =============================  ===============
beside  n                              2 L per request
apart   n + 1, the last to commit      L per request
======  =============================  ===============

A GPU multiplies a few hundred rows in the time in which it reads the weights, so rows are free in a small batch and
have their full price in a large batch. A small batch therefore commits beside, and a large batch apart. Nothing here
knows of vLLM or of tokens.
"""

import functools

import numpy as np

from vllm_dllm.decoding.step_cost import StepCost

PRIOR_STEPS, PRIOR_BLOCKS = 4.0, 16.0
"""Steps that unmask a block, until it is known, and how many blocks weigh as much."""
WINDOW = 1024.0
"""Blocks after which an observation has lost most of its weight."""


class CommitRows:
    """Decides of each step whether it has rows for finished blocks beside those of the next blocks. Not thread-safe.

    Args:
        cost: seconds of steps; None, or of one size only: what rows cost is not known, and all steps have the rows.
    """

    def __init__(self, cost: StepCost | None = None) -> None:
        self._cost = cost
        # Many steps in a row have as many requests, and the fit takes longer than looking it up.
        self._seconds = functools.lru_cache(maxsize=4096)(self._fitted)
        self._steps = self._blocks = 0.0

    @property
    def steps_per_block(self) -> float:
        """Steps that unmask a block, n."""
        return (self._steps + PRIOR_STEPS * PRIOR_BLOCKS) / (self._blocks + PRIOR_BLOCKS)

    def observe(self, steps: float, blocks: int) -> None:
        """All requests together took ``steps`` steps that unmask, and finished ``blocks`` blocks."""
        keep = max(0.0, 1 - blocks / WINDOW)
        self._steps = self._steps * keep + steps
        self._blocks = self._blocks * keep + blocks

    def beside(self, rows: int, commit_rows: int) -> bool:
        """Whether a step of ``rows`` rows is to have ``commit_rows`` rows more, for the blocks that may be finished."""
        if self._cost is None or not self._cost.knows_sizes:
            return True
        steps = self.steps_per_block
        return steps * self._seconds(rows + commit_rows) <= (steps + 1) * self._seconds(rows)

    def _fitted(self, rows: int) -> float:
        """Seconds of a step without drafts."""
        assert self._cost is not None
        return float(self._cost.seconds(np.array([rows], dtype=float), drafts=False)[0])
