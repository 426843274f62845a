"""The server of these tests: ``vllm serve`` with ``FLAGS``, both of ``benchmarks/serving.py``, in warm processes."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import warm
from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import serving
from serving import (
    FLAGS,
    MAX_DRAFTS,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MODEL,
    START_DEADLINE,
    Process,
    Server,
    start_process,
)

__all__ = [
    "FLAGS",
    "MAX_DRAFTS",
    "MAX_MODEL_LEN",
    "MAX_NUM_SEQS",
    "MODEL",
    "START_DEADLINE",
    "Process",
    "Server",
    "serve",
    "start_process",
    "start_warm",
]


WITHOUT_TIMED_STEPS = """
import runpy, sys
from tests.engine.shared import no_timed_steps
del sys.argv[0]
with no_timed_steps():
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start_warm(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> warm.Process:
    """Start a server whose processes need not load vLLM first, and whose engine knows what steps cost."""
    return warm.Process(["-c", WITHOUT_TIMED_STEPS, *command], stdout=log, env=environment)


@contextmanager
def serve(checkpoint: Path, log: Path, *, is_warm: bool = True) -> Iterator[Server]:
    """Run ``vllm serve`` on a checkpoint with ``FLAGS`` until the block ends.

    Args:
        is_warm: or all processes start as a user's do.

    Raises:
        RuntimeError: the server ended, or was not healthy in time; with the end of its log.
    """
    with serving.serve(checkpoint, log, FLAGS, start_warm if is_warm else serving.start_process) as running:
        yield running
