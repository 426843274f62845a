"""Engines of the GPU benchmark that share a device: several start at a time, and one alone is timed.

A start takes a minute or more, most of it in compilers, and a measurement takes seconds. So engines start side by side,
as many as the device's memory holds, and every process holds a lock on one file: a shared lock while its engine starts,
an exclusive one while the engine is timed.
"""

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_cells import Cell, Dtype, Job, Kind
from gpu_shapes import SHAPES, Model

SMALL_ENGINE_BYTES = 6 << 30
"""Of an engine of a bundled model or a golden checkpoint, K/V cache and CUDA context included."""
BESIDE_BYTES = 7 << 30
"""What an engine takes beside weights and K/V cache: activations of a prefill, logits, graphs and a CUDA context."""
MEMORY_SHARE = 0.95
"""Of the device, for all engines together. vLLM's smaller tensors and other programs have the rest."""
STEPS_OF_LEVEL = 64
"""A request takes no more steps than these at a level."""


def kv_positions(cell: Cell, prompt_tokens: int, max_model_len: int) -> int:
    """Positions of K/V that a cell's requests and their drafts need at the level that needs most."""
    windows = cell.drafts + 1
    needs = [
        level.concurrency
        * (prompt_tokens + STEPS_OF_LEVEL * level.tokens_per_step * windows + windows * cell.block_length)
        for level in cell.levels
    ]
    return max([max_model_len + windows * cell.block_length, *needs])


def kv_bytes(cell: Cell, prompt_tokens: int, max_model_len: int) -> int:
    """The same in bytes; 0 for an engine whose steps are not timed."""
    if cell.kind != Kind.SPEED:
        return 0
    return kv_positions(cell, prompt_tokens, max_model_len) * SHAPES[Model(cell.model)].kv_entries * _bytes_of(cell)


def engine_bytes(job: Job) -> int:
    """Memory of a job's engine on the device, at most."""
    if job.cell.kind != Kind.SPEED:
        return SMALL_ENGINE_BYTES
    weights = SHAPES[Model(job.cell.model)].parameters.total * _bytes_of(job.cell)
    return weights + job.kv_bytes + BESIDE_BYTES


def _bytes_of(cell: Cell) -> int:
    return 4 if cell.dtype == Dtype.FLOAT32 else 2


class Memory:
    """What engines may take of a device together.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        """Wait until there are ``amount`` bytes left, and hold them. Who wants more than there is waits to be alone."""
        amount = min(amount, self.limit)
        with self._changed:
            self._changed.wait_for(lambda: self._taken + amount <= self.limit)
            self._taken += amount
        try:
            yield
        finally:
            with self._changed:
                self._taken -= amount
                self._changed.notify_all()


@contextmanager
def hold(path: str, *, alone: bool) -> Iterator[None]:
    """Hold the lock on ``path``, which ends with the process too; nothing to hold where ``path`` is empty."""
    if not path:
        yield
        return
    with Path(path).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
