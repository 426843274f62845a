"""Programs in processes that have vLLM's modules; a new Python takes ten seconds of processor time to load them.

One process per process of pytest loads them once, and is forked for each program: a fork server, as Python's
``multiprocessing`` calls it. The engines and workers of such a program are forked from it in turn, as vLLM does by
default; on a CPU it starts them anew. Tests of what is loaded when, and of what a whole command does on a signal, start
Python anew.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.paths import ROOT

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.warm_modules"])


class Process:
    """As much of ``subprocess.Popen`` as tests need."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: Path,
        stderr: Path | None = None,
        env: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
    ) -> None:
        """Start Python on ``command``, in a process group of its own: what would come behind ``python``, or a script.

        Args:
            stderr: a file; where ``stdout`` goes to if there is none.
        """
        self._process = SERVER.Process(target=_run, args=(list(command), stdout, stderr, dict(env), cwd or Path.cwd()))
        with _found_by_the_server():
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def run(
    command: Sequence[str], *, timeout: float, env: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python on ``command`` to its end, like ``subprocess.run`` with ``capture_output`` and ``text``."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = Process(command, stdout=stdout, stderr=stderr, env=env, cwd=cwd)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, status, stdout.read_text(), stderr.read_text())


def sleep_between_looks() -> None:
    """Have this process sleep while it waits for a message of an engine or a worker.

    vLLM looks without a pause for a second after each message, and takes the processor from processes that have work.
    """
    if (messages := sys.modules.get("vllm.distributed.device_communicators.shm_broadcast")) is not None:
        messages.sched_yield = lambda: time.sleep(0.0002)


@contextlib.contextmanager
def workers() -> Iterator[None]:
    """Workers that vLLM starts in this process meanwhile are warm, too."""
    with _found_by_the_server(), mock.patch("multiprocessing.get_context", return_value=_Context()):
        yield


@contextlib.contextmanager
def _found_by_the_server() -> Iterator[None]:
    """The first process starts the fork server, which is to find its modules."""
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}):
        yield


class _Context:
    """A context of ``multiprocessing`` whose processes have the environment that its parent has when it starts them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(SERVER, name)

    def Process(
        self, target: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = {}, **options: Any
    ) -> Any:
        return SERVER.Process(target=_call, args=(dict(os.environ), target, args, kwargs), **options)


def _call(environment: dict[str, str], target: Callable[..., Any], args: Any, kwargs: Any) -> None:
    _take(environment)
    import torch

    # vLLM compiles a function that only several ranks call, for seconds in each worker.
    torch.compiler.set_stance("force_eager")
    target(*args, **kwargs)


def _run(command: list[str], stdout: Path, stderr: Path | None, environment: dict[str, str], cwd: Path) -> None:
    """What a process does that was forked for a command."""
    os.setsid()
    for number, path in ((1, stdout), (2, stderr)):
        if path is None:
            os.dup2(1, number)
        else:
            with path.open("wb") as sink:
                os.dup2(sink.fileno(), number)
    os.chdir(cwd)
    _take(environment)
    os.register_at_fork(after_in_child=_let_go_of_signals)
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
    match command:
        case ["-c", code, *_]:
            sys.argv = command[:1] + command[2:]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case ["-m", module, *_]:
            sys.argv = command[1:]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *_]:
            sys.argv = command
            runpy.run_path(script, run_name="__main__")


def _let_go_of_signals() -> None:
    """Or the parent's event loop would hear of signals that this process gets."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _take(environment: dict[str, str]) -> None:
    """Go on as if this process had begun with ``environment``."""
    os.environ.clear()
    os.environ.update(environment)
    from vllm.logger import _configure_vllm_root_logger

    _configure_vllm_root_logger()
