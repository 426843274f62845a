"""Folders of the repository that tests read."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = ROOT / "checkpoints"
BENCHMARKS = ROOT / "benchmarks"
GOLDEN = Path(os.environ.get("VLLM_DLLM_GOLDEN", ROOT.parent / "shared" / "golden"))
