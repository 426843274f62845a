"""The tensor functions of a step, compiled: a few kernels in the place of many.

A *stage* is a function of tensors, and of records of them, that decides nothing on the host. ``torch.compile`` makes
kernels of a stage for every form that its arguments take (drafts or none, log-probabilities or none, which policies).
That takes seconds, so a stage is compiled in the steps that an engine takes when it starts, of requests that nobody
sent (``vllm_dllm.runtime.scheduling.timing``). In all other steps a form that is not compiled runs as it is written.

A compiled stage must give what the written one gives, to the last bit: a request's tokens must not depend on whether
the requests beside it have a form that is compiled. So no stage rounds sums or quotients, but for the scores of a
graph's drafts, which are added in double precision before they are rounded. Softmax and logarithms of FeF's and S2D2's
distributions, and S2D2's scores, run between stages. Policies whose choices rest on rounded sums or quotients run as
they are written (``BatchOptions.compares_only``).
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch.fx.experimental import _config as shape_config
from vllm.platforms import current_platform
from vllm.utils import jit_monitor
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from vllm_dllm.observe.vllm_log import module_logger

logger = module_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

NOBODYS = "vllm-dllm start "
"""What the ids of requests begin with that nobody sent. Ids of others end in a suffix of vLLM's."""

VARYING = {"present", "groups", "reached", "runs", "computed", "stop_token_ids"}
"""Tensors of records whose second dimension counts branches or stop tokens: another number in every step, too."""

LASTING = {"rules", "seeds", "temperatures"}
"""Arguments whose tensors are the same objects in every step. These are never marked: a mark changes what is compared
of a tensor, so that forms of other stages that read the tensor would no longer fit."""

GPU_OPTIONS = {"combo_kernels": True}
"""Inductor's options for a GPU: kernels that do not wait for each other share a launch, so that a step has down to half
as many. vLLM compiles models with the option, too. Inductor has no such kernels for CPUs."""

MOST_FORMS = 64
"""Forms that a stage is compiled for."""

UNTRACED = (Unsupported, FailOnRecompileLimitHit)
"""What `torch.compile` raises before a backend is asked."""


class Stages:
    """The stages of a worker.

    Args:
        enabled: whether they are compiled at all.
    """

    backend = "inductor"
    """Of ``torch.compile``."""
    backend_options: Sequence[dict[str, bool]] = [{}] if current_platform.is_cpu() else [GPU_OPTIONS, {}]
    """The backend's options, and others where a stage does not compile with those."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self.may_compile = False
        """The step is one that nobody waits for."""
        self.served: dict[str, Callable[..., Any]] = {}
        """Stages by their names and numbers, as steps run them that somebody waits for."""

    def begin_step(self, req_ids: Sequence[str]) -> None:
        """Begin the step of these requests."""
        self.may_compile = any(each.startswith(NOBODYS) for each in req_ids)
        jit_monitor.expect(self.may_compile)

    def stage(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, or its compiled forms."""
        if not self.enabled:
            return function
        # Modules stay as they are while an engine lives. To compare what a stage reads of them (classes, fields of
        # records) would take a fifth of a call.
        guards: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
        ways = [
            torch.compile(function, fullgraph=True, backend=self.backend, options=guards | options)
            for options in self.backend_options
        ]
        # Two objects may have a stage of the same name.
        stage = f"{function.__qualname__} {len(self.served)}"
        self.served[stage] = without_compiling(function)
        names = list(inspect.signature(function).parameters)

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if not ways:
                return function(*args, **kwargs)
            if not self.may_compile:
                return self.served[stage](*args, **kwargs)
            mark_sizes(names, args)
            while ways:
                try:
                    # What times the candidates for a kernel waits for the device.
                    with dynamo_config.patch(recompile_limit=MOST_FORMS), any_sizes(), gpu_sync_allowed():
                        return ways[0](*args, **kwargs)
                except Exception as error:
                    # The options are the backend's, and change nothing of what is traced.
                    del ways[: len(ways) if isinstance(error, UNTRACED) else 1]
                    now = "is tried with fewer options" if ways else "runs as it is written"
                    logger.exception(f"%s cannot be compiled, and {now}", function.__name__)
            return function(*args, **kwargs)

        return run


def without_compiling(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, by a compiled form where one fits the arguments, else as it is written.

    ``torch._dynamo.run`` and ``torch.compiler.set_stance`` do the same, and take a fifth of a call to prepare for
    what no stage does, such as calling another stage.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = set_eval_frame(False)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(outer)

    return run


def mark_sizes(names: Sequence[str], args: Sequence[Any]) -> None:
    """Have a form that is compiled for these arguments of a stage serve all sizes that another step may have."""
    varying = [value for name, value in zip(names, args, strict=False) if name not in LASTING]
    for name, tensor in _tensors(varying):
        # The first dimension counts requests, groups or rows: another number in every step. Where there are none (no
        # prompts, say), a form of its own has fewer kernels.
        _mark(tensor, 0, varies=tensor.shape[0] > 0)
        if name in VARYING:
            # Where there is one branch, nothing is verified.
            _mark(tensor, 1, varies=tensor.shape[1] > 1)


def any_sizes() -> AbstractContextManager[None]:
    """While it is open, `torch.compile` asks nothing of sizes that are marked as varying.

    Two such sizes may be equal in one step and not in the next. And one is a size like any other: forms of their own
    for one and for several take twice as long to compile.
    """
    return shape_config.patch(use_duck_shape=False, backed_size_oblivious=True)  # type: ignore[attr-defined]


def _mark(tensor: Tensor, dimension: int, *, varies: bool) -> None:
    """Have forms that this call compiles serve every size of a dimension, or only the one that it has."""
    if varies:
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)
    else:
        torch._dynamo.mark_static(tensor, dimension)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments of a stage, and in their records, with the names that they have there."""
    match value:
        case Tensor():
            if value.ndim:
                yield name, value
        case list() | tuple():
            for item in value:
                yield from _tensors(item)
        case dict():
            for key, item in value.items():
                yield from _tensors(item, key)
        case _ if dataclasses.is_dataclass(value):
            yield from _tensors(vars(value))
