"""In-process engines of the test run: one per configuration, let go of once many others were asked for."""

import functools
import gc
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

from vllm import LLM
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils
from vllm.v1.engine.core import EngineCore

from vllm_dllm.decoding.step_cost import StepCost
from vllm_dllm.runtime.scheduling.timing import StartSteps

KEPT = 12
"""Engines that outlive a test module. Each has some hundred megabytes."""
TOO_MANY = 20
"""Engines that there may be before all but those are let go of: the garbage collector takes a second for any number."""
STEP_COST = StepCost([(8, False, 1.0), (64, True, 1.3)])
"""What a step with and without drafts costs."""

_processors = functools.cache(cpu_resource_utils._get_cpu_list)
_engines: dict[Hashable, LLM] = {}
"""In the order in which they were asked for."""


def shared_engine(key: Hashable, make: Callable[[], LLM]) -> LLM:
    """The engine that was made for this key, or the one that ``make`` makes now."""
    llm = _engines.pop(key, None)
    if llm is None:
        with started_quickly():
            llm = make()
        # Or vLLM takes every engine apart when the process ends, and searches the whole heap several times for each.
        llm.llm_engine.engine_core._finalizer.atexit = False
        _wait_after_empty_steps(llm.llm_engine.engine_core.engine_core)
    _engines[key] = llm
    return llm


def _wait_after_empty_steps(core: EngineCore) -> None:
    """As vLLM's engine process does: while a grammar is compiled, thousands of steps would have nothing to run."""
    post_step = core.post_step

    def wait(model_executed: bool) -> None:
        post_step(model_executed)
        if not model_executed:
            time.sleep(0.001)

    core.post_step = wait


@contextmanager
def started_quickly() -> Iterator[None]:
    """Engines that start meanwhile leave out what changes none of their tokens."""
    with _without_collections(), no_timed_steps(), _known_processors(), _shared_gpu():
        yield


def _shared_gpu() -> AbstractContextManager[Any]:
    """Engines of tests have K/V of a fixed size, and vLLM asks for most of a GPU to be free all the same."""
    if not current_platform.is_cuda():
        return nullcontext()
    return mock.patch("vllm.v1.worker.gpu_worker.request_memory", return_value=8 << 30)


def _without_collections() -> AbstractContextManager[Any]:
    """vLLM collects garbage when an engine starts or ends: seconds each time in a process with many engines."""
    return mock.patch("gc.collect", return_value=0)


def no_timed_steps() -> AbstractContextManager[Any]:
    """An engine times its steps when it starts, for a second or two. The times change no token."""
    return mock.patch.object(StartSteps, "cost", return_value=STEP_COST)


def _known_processors() -> AbstractContextManager[Any]:
    """vLLM asks ``lscpu`` several times for each engine."""
    return mock.patch.object(cpu_resource_utils, "_get_cpu_list", _processors)


def let_go_of_engines() -> None:
    """Once there are too many, end all but the engines asked for last. No test may hold one of the others still."""
    keys = list(_engines)
    if len(keys) <= TOO_MANY:
        return
    old = keys[: len(keys) - KEPT]
    with _without_collections():
        for key in old:
            _engines.pop(key).llm_engine.engine_core.shutdown()
    gc.collect()
    # So that the garbage collector does not look at the other engines again, which vLLM had frozen.
    gc.freeze()
