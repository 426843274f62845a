"""Runs Python in a process of its own, with an environment of its own."""

import os
import subprocess
import sys

from tests import warm


def run(*command: str, timeout: int = 300, is_warm: bool = False, **environment: str) -> str:
    """Return the last line that a Python process prints.

    Which model runner serves a model is a matter of the environment, which starts without any choice of ours.
    """
    choices = {"VLLM_USE_V2_MODEL_RUNNER", "VLLM_PLUGINS"}
    if not is_warm:  # A warm process has imported Triton.
        choices.add("TRITON_INTERPRET")
    inherited = {name: value for name, value in os.environ.items() if name not in choices}
    env = inherited | {"OMP_NUM_THREADS": "1"} | environment
    if is_warm:
        process = warm.run(command, env=env, timeout=timeout)
    else:
        process = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=timeout)
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout.strip().splitlines()[-1]
