"""Folders of the repository that tests read."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = ROOT / "checkpoints"
BENCHMARKS = ROOT / "benchmarks"

BUNDLED = ROOT / "tests" / "golden"
"""Golden data of the repository. Tests with prompts and options of their own use its checkpoints."""
GOLDEN = Path(os.environ.get("VLLM_DLLM_GOLDEN", BUNDLED)).resolve()
"""Golden data that the golden tests compare with: the repository's, or another folder of the same form."""
