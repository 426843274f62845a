"""Engines of the whole test run: in this process, and one per configuration."""

import contextlib
import gc
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.profiles  # noqa: F401 (loads the Hypothesis profile)
from tests import warm

# Or each of the many processes of the tests would compile vLLM anew, for ten seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Read by vLLM when it is imported: the engine core runs in this process, where tests can look into it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# The first engine of a process has vLLM write its log to this stream from then on. A test that replaces ``sys.stdout``,
# as Typer's runner does, closes its own when it ends, and later messages would be tracebacks of `logging`.
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.__stdout__")
# Models this small only lose by sharing a forward out among threads, the more so beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On processors with AMX vLLM would round the activations of weights of 4 bits to 8 bits, and answers differ by machine.
os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")
# On a GPU Triton would round products of float32 to TF32, and attention would miss golden tokens.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Or the engines of all of pytest's processes would be bound to the same processor.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


ORDER = ("training", "stress", "server", "gpu_less", "reference", "engine", "docs", "unit")
"""Rooms by the length of their longest file: what takes long begins first, so that both processes end together."""
TOGETHER = {
    "tests/reference/test_bidirectional_matches_golden.py": "golden cases of full attention",
    "tests/engine/runtime/test_full_attention_golden.py": "golden cases of full attention",
}
"""Files that share what takes long to compute, here the plain reference's runs of the cases."""


# Before pytest-xdist, which writes the groups into the names of the tests, and sends a name without a group anywhere.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests ``--dist=loadgroup`` keeps in one process: those of a file, and all that ask the one server."""
    for item in items:
        file = item.nodeid.split("::")[0]
        group = "server" if "server" in getattr(item, "fixturenames", ()) else TOGETHER.get(file, file)
        item.add_marker(pytest.mark.xdist_group(group))
    rooms = {room: place for place, room in enumerate(ORDER)}
    items.sort(key=lambda item: rooms.get(item.nodeid.split("/")[1] if "/" in item.nodeid else "", 0))


def pytest_collection_finish(session: pytest.Session) -> None:
    """With ``--dist=loadgroup``, every process would start the engines of every file if the groups had no effect."""
    # An engine that ends would destroy the process groups of the other engines, and the garbage collector ends engines.
    if (core := sys.modules.get("vllm.v1.engine.core")) is not None:
        core.cleanup_dist_env_and_memory = lambda: None
    warm.sleep_between_looks()
    # pytest gives its handlers to loggers that do not propagate, and PyTorch would print all graphs and guards to them.
    logging.getLogger("torch.__trace").propagate = True
    if getattr(session.config.option, "loadgroup", False):
        alone = [item.nodeid for item in session.items if "@" not in item.nodeid]
        if alone:
            raise pytest.UsageError(f"pytest-xdist does not see the group of {alone[0]}: is pytest too new for it?")


@pytest.fixture(scope="module", autouse=True)
def _engines_are_let_go_of() -> Iterator[None]:
    if (envs := sys.modules.get("vllm.envs")) is not None:
        # The first engine of a process has vLLM read its environment variables once and for all.
        envs.disable_envs_cache()
    yield
    if (engines := sys.modules.get("tests.engine.shared")) is not None:
        engines.let_go_of_engines()
    _remove_names_of_shared_memory()


def _remove_names_of_shared_memory() -> None:
    """Remove what ranks on CPUs leave behind: vLLM names their memory by a port, which a later engine may be given, and
    the engine would not start. Ranks that have begun need no name any more."""
    for name in Path("/dev/shm").glob("*-cpushm_*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - name.stat().st_mtime > 120:
                name.unlink()


def pytest_configure() -> None:
    # Ray would leave the address of its latest cluster under /tmp/ray, and look there for one, which may be dead. The
    # names of Ray's sockets begin with this folder, and a socket's name has 107 characters at most.
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="r-", dir="/tmp")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ.pop("RAY_TMPDIR"), ignore_errors=True)
    # vLLM keeps its engines from the garbage collector. Triton would report all that it finds alive at the end.
    gc.unfreeze()
