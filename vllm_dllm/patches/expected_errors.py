"""What was to be expected is no error in the log (``patches/015-expected-errors.diff``).

A server that is told to end kills its engine, unless ``--shutdown-timeout`` gives requests time to finish. vLLM then
logs with a traceback that the engine is gone, warns of each process that it kills, and leaves a frozen heap, of which
native modules report leaks when the process ends. A stream, or a request of the Messages API or of generative scoring,
that is refused is logged with a traceback, too.
"""

import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import of_vllm

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

MARKER = "stopping"
"""Attribute of an engine's client: the engine was told to end."""

ERRORS = (
    "vllm.v1.engine.async_llm",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.generate.generative_scoring.serving",
)
KILLS = ("vllm.v1.utils", "vllm.utils.system_utils")
"""Loggers, by name: most processes need none of the HTTP server's modules."""


def apply() -> bool:
    """Change ``AsyncLLM.shutdown``, how processes are ended, and the loggers; False where vLLM has the change."""
    from vllm.v1 import utils
    from vllm.v1.engine import async_llm, exceptions
    from vllm.v1.engine import utils as engine_utils

    if hasattr(exceptions, "log_error"):
        return False
    stop = of_vllm(async_llm.AsyncLLM, "shutdown", ("self", "timeout"))
    end = of_vllm(utils, "shutdown", ("procs", "timeout"))
    of_vllm(engine_utils, "shutdown", ("procs", "timeout"))
    kills = Kills()

    @functools.wraps(stop)
    def shutdown(self: "AsyncLLM", timeout: float | None = None) -> None:
        if (engine_core := getattr(self, "engine_core", None)) is not None:
            setattr(engine_core, MARKER, True)
        stop(self, timeout)
        # A server froze what it had when it was ready.
        gc.unfreeze()

    @functools.wraps(end)
    def end_processes(procs: Any, timeout: float | None = None) -> None:
        with kills.wanted() if timeout == 0 else contextlib.nullcontext():
            end(procs, timeout)

    async_llm.AsyncLLM.shutdown = shutdown
    utils.shutdown = engine_utils.shutdown = end_processes
    for name in ERRORS:
        logging.getLogger(name).addFilter(leave_out_expected)
    for name in KILLS:
        logging.getLogger(name).addFilter(kills)
    return True


def leave_out_expected(record: logging.LogRecord) -> bool:
    """A filter: an expected error becomes information without a traceback."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    _, error, traceback = record.exc_info if isinstance(record.exc_info, tuple) else (None, None, None)
    if isinstance(error, VLLMClientError):
        _tell(record, f"Refused a request: {error}")
    elif isinstance(error, EngineDeadError) and traceback is not None and _was_told_to_end(traceback):
        _tell(record, "The engine has ended, as it was told to")
    return True


def _was_told_to_end(traceback: TracebackType) -> bool:
    """Whether an engine had been told to end when the function of vLLM that waited for it got the error."""
    names = traceback.tb_frame.f_locals
    client = getattr(names.get("self"), "engine_client", None)
    return getattr(names.get("engine_core", getattr(client, "engine_core", None)), MARKER, False)


def _tell(record: logging.LogRecord, message: str) -> None:
    record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    record.msg, record.args = message, ()
    record.exc_info = record.exc_text = None


class Kills(logging.Filter):
    """Processes that got no time to end are killed: information, and no warning."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.local()

    @contextlib.contextmanager
    def wanted(self) -> Iterator[None]:
        """In this thread, until the block ends."""
        self._thread.wanted = True
        try:
            yield
        finally:
            self._thread.wanted = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING and getattr(self._thread, "wanted", False):
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return True
