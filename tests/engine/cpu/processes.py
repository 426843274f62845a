"""Runs Python in a process of its own."""

import os
import subprocess
import sys


def run(*command: str, timeout: int = 300, **environment: str) -> str:
    """Return the last line that a Python process prints.

    Which model runner serves a model is a matter of the environment, which starts without any choice of ours.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {"TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_PLUGINS"}
    }
    process = subprocess.run(
        [sys.executable, *command],
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout.strip().splitlines()[-1]
