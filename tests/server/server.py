"""The server of these tests: ``vllm serve`` with ``FLAGS``. ``benchmarks/serving.py`` has them, and the process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import serving
from serving import FLAGS, MAX_DRAFTS, MAX_MODEL_LEN, MAX_NUM_SEQS, MODEL, START_DEADLINE, Server

__all__ = ["FLAGS", "MAX_DRAFTS", "MAX_MODEL_LEN", "MAX_NUM_SEQS", "MODEL", "START_DEADLINE", "Server", "serve"]


@contextmanager
def serve(checkpoint: Path, log: Path) -> Iterator[Server]:
    """Run ``vllm serve`` on a checkpoint with ``FLAGS`` until the block ends.

    Raises:
        RuntimeError: the server ended, or was not healthy in time; with the end of its log.
    """
    with serving.serve(checkpoint, log, FLAGS) as running:
        yield running
