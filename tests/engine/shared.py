"""In-process engines of the test run: one per configuration, let go of once many others were asked for."""

import gc
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from vllm import LLM

from vllm_dllm.runtime.scheduling import timing

KEPT = 12
"""Engines that outlive a test module. Each has some hundred megabytes."""

_engines: dict[Hashable, LLM] = {}
"""In the order in which they were asked for."""


def shared_engine(key: Hashable, make: Callable[[], LLM]) -> LLM:
    """The engine that was made for this key, or the one that ``make`` makes now."""
    llm = _engines.pop(key, None)
    if llm is None:
        with _without_collections(), _few_timed_steps():
            llm = make()
    # Or vLLM takes every engine apart when the process ends, and searches the whole heap several times for each.
    llm.llm_engine.engine_core._finalizer.atexit = False
    _engines[key] = llm
    return llm


def _without_collections() -> AbstractContextManager[Any]:
    """vLLM collects garbage when an engine starts or ends: seconds each time in a process with many engines."""
    return mock.patch("gc.collect", return_value=0)


def _few_timed_steps() -> AbstractContextManager[Any]:
    """An engine with drafts times its steps when it starts, for a second or two. The times change no token."""
    return mock.patch.multiple(timing, TIMED_STEPS=2, MOST_SECONDS=0.0)


def let_go_of_engines(kept: int = KEPT) -> None:
    """End all but the engines asked for last. No test may hold one of the others still."""
    keys = list(_engines)
    old = keys[: max(0, len(keys) - kept)]
    if not old:
        return
    # It would take the process groups of the other engines in this process along.
    with mock.patch("vllm.v1.engine.core.cleanup_dist_env_and_memory"), _without_collections():
        for key in old:
            _engines.pop(key).llm_engine.engine_core.shutdown()
    gc.collect()
    # So that the garbage collector does not look at the other engines again, which vLLM had frozen.
    gc.freeze()
