"""Engines of the whole test run: in this process, and one per configuration."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest

import tests.profiles  # noqa: F401 (loads the Hypothesis profile)

# Read by vLLM when it is imported: the engine core runs in this process, where tests can look into it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Models this small only lose by sharing a forward out among threads, the more so beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Or the engines of all of pytest's processes would be bound to the same processor.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture(scope="module", autouse=True)
def _engines_are_let_go_of() -> Iterator[None]:
    yield
    if (engines := sys.modules.get("tests.engine.shared")) is not None:
        engines.let_go_of_engines()


def pytest_unconfigure() -> None:
    # vLLM keeps its engines from the garbage collector. Triton would report all that it finds alive at the end.
    gc.unfreeze()
