"""The server of these tests: ``vllm serve`` with the flags below. ``benchmarks/serving.py`` has the process."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import serving
from serving import START_DEADLINE, Server

__all__ = ["FLAGS", "MAX_DRAFTS", "MAX_MODEL_LEN", "MAX_NUM_SEQS", "MODEL", "START_DEADLINE", "Server", "serve"]

MODEL = "tiny"
"""Name under which the checkpoint is served."""
MAX_MODEL_LEN = 510
"""Ends in the midst of a block."""
MAX_NUM_SEQS = 32
MAX_DRAFTS = 7
"""As many as FreeDave's default needs."""

FLAGS = {
    "--served-model-name": MODEL,
    "--dtype": "float32",
    "--max-model-len": str(MAX_MODEL_LEN),
    "--max-num-seqs": str(MAX_NUM_SEQS),
    # Pages for every request at its longest, some to remember prefixes in, and those of drafts.
    "--kv-cache-memory-bytes": str(128 << 20),
    "--additional-config": json.dumps({"dllm": {"max_drafts": MAX_DRAFTS}}),
}


@contextmanager
def serve(checkpoint: Path, log: Path) -> Iterator[Server]:
    """Run ``vllm serve`` on a checkpoint with ``FLAGS`` until the block ends.

    Raises:
        RuntimeError: the server ended, or was not healthy in time; with the end of its log.
    """
    with serving.serve(checkpoint, log, FLAGS) as running:
        yield running
