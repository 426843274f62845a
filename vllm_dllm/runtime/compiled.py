"""The tensor functions of a step, compiled: a few kernels in the place of many.

A *stage* is a function of tensors, and of records of them, that decides nothing on the host. ``torch.compile`` makes
kernels of a stage for every form that its arguments take (one request or several, drafts or none, which policies). That
takes seconds, so a stage is compiled in the steps that an engine takes when it starts, of requests that nobody sent
(``vllm_dllm.runtime.scheduling.timing``). In all other steps a form that is not compiled runs as it is written.

A compiled stage must give what the written one gives, to the last bit: a request's tokens must not depend on whether
the requests beside it have a form that is compiled. So no stage rounds sums or quotients, but for the scores of a
graph's drafts, which are added in double precision before they are rounded. Softmax and logarithms of FeF's and S2D2's
distributions, and S2D2's scores, run between stages. Policies whose choices rest on rounded sums or quotients run as
they are written (``BatchOptions.compares_only``).
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import config as dynamo_config
from torch.fx.experimental import _config as shape_config
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

MOST_FORMS = 64
"""Forms that a stage is compiled for."""


class Stages:
    """The stages of a worker.

    Args:
        enabled: whether they are compiled at all.
    """

    backend = "inductor"
    """Of ``torch.compile``."""

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
        compiled = torch.compile(
            function,
            fullgraph=True,
            backend=self.backend,
            options={"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe},
        )
        # Two objects may have a stage of the same name.
        stage = f"{function.__qualname__} {len(self.served)}"
        self.served[stage] = without_compiling(function)
        names = list(inspect.signature(function).parameters)
        works = True

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal works
            if not works:
                return function(*args, **kwargs)
            if not self.may_compile:
                return self.served[stage](*args, **kwargs)
            varying = [value for name, value in zip(names, args, strict=False) if name not in LASTING]
            for name, tensor in _tensors(varying):
                # The first dimension counts requests, groups or rows: another number in every step. Where there are
                # none (no prompts, say), a form of its own has fewer kernels.
                _mark(tensor, 0, varies=tensor.shape[0] > 0)
                if name in VARYING:
                    # Where there is one branch, nothing is verified.
                    _mark(tensor, 1, varies=tensor.shape[1] > 1)
            # Two such numbers may be equal in one step and not in the next. And one is a size like any other: forms of
            # their own for one and for several take twice as long to compile.
            sizes = shape_config.patch(use_duck_shape=False, backed_size_oblivious=True)  # type: ignore[attr-defined]
            try:
                # What times the candidates for a kernel waits for the device.
                with dynamo_config.patch(recompile_limit=MOST_FORMS), sizes, gpu_sync_allowed():
                    return compiled(*args, **kwargs)
            except Exception:
                logger.exception("%s cannot be compiled, and runs as it is written", function.__name__)
                works = False
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
