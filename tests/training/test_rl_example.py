"""``examples/rl.py``: rollouts, updates and pushed weights, on a handful of problems."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import CHECKPOINTS, ROOT
from vllm_dllm.training.layouts import load_network


@pytest.mark.slow
def test_the_example_learns_from_rollouts_and_pushes_what_it_learned(tmp_path: Path) -> None:
    command = [sys.executable, "examples/rl.py", "train", "--out", str(tmp_path), "--iterations", "2", "--prompts", "3"]
    done = subprocess.run(
        [*command, "--answers", "4", "--updates", "1", "--held-out", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run = json.loads((tmp_path / "curve.json").read_text())
    assert len(run["curve"]) == 2
    for point in run["curve"]:
        # Also after a push: the engine answers with the trainer's weights.
        assert point["mismatch"] < 1e-3
    assert 0 <= run["curve"][-1]["held_out"] <= 1
    assert (tmp_path / "curve.png").is_file()
    before, after = (load_network(folder).lm_head.weight for folder in (CHECKPOINTS / "tiny-sdar", tmp_path))
    assert 0 < (before - after).abs().max() < 1e-3
