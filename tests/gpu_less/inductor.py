"""What Inductor makes of a function for a GPU that is not there: kernels, compiled for the GPU, that never run."""

import re
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpu_less.device import CUDA, DeviceTensor, _load_guard
from tests.unit.kernels.test_kernels_compile import GPUS, Driver

LAUNCH = re.compile(
    r"^ +(?:\w+(?:, \w+)* = )?(?:\w+\.run\(|extern_kernels\.|torch\.ops\.|aten\.|\w+\.copy_\()", re.MULTILINE
)
"""A line of Inductor's program that launches a kernel, its own or PyTorch's."""

_code: list[str] = []
"""The programs that Inductor made."""


class NeverRuns(Exception):
    """A compiled function came to where it would run on a GPU."""


@contextmanager
def compiling_for(gpu: str) -> Iterator[None]:
    """``torch.compile`` of fake CUDA tensors makes kernels for ``gpu`` (a key of ``GPUS``) while the block runs."""
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.post_grad as post_grad
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.runtime import driver

    _load_guard()
    capability, _, limits = GPUS[gpu]
    properties = types.SimpleNamespace(
        name=gpu,
        major=capability // 10,
        minor=capability % 10,
        total_memory=80 << 30,
        multi_processor_count=limits["multiprocessor_count"],
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        warp_size=32,
        shared_memory_per_block_optin=limits["max_shared_mem"],
        shared_memory_per_multiprocessor=limits["max_shared_mem"],
        L2_cache_size=50 << 20,
        is_integrated=False,
        gcnArchName="",
    )
    load = GraphLowering._compile_to_module_lines

    def compile_lines(graph: Any, code: Any) -> Any:
        load(graph, code)  # compiles the kernels
        _code.append(code.value)
        return types.SimpleNamespace(call=_never_runs, __file__="", key="", recursively_apply_fns=None)

    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "get_rng_state", lambda *_: torch.zeros(1)),
        (torch.cuda, "set_rng_state", lambda *_: None),
        (torch.cuda, "get_device_capability", lambda *_: divmod(capability, 10)),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "_get_device_properties", lambda *_: properties),
        (torch.cuda, "_exchange_device", lambda _: 0),
        (torch.cuda, "_maybe_exchange_device", lambda _: 0),
        (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
        # Patterns of attention, which our functions have none of; PyTorch makes them of real tensors.
        (joint_graph, "lazy_init", lambda *_, **__: None),
        (post_grad, "lazy_init", lambda *_, **__: None),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (CachingAutotuner, "_make_launchers", lambda self: None),
        (GraphLowering, "_compile_to_module_lines", compile_lines),
    ]
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(
            config.patch(
                joint_graph_constant_folding=False,
                fx_graph_cache=False,
                compile_threads=1,
                use_static_cuda_launcher=False,
            )
        )
        before = driver._active
        driver.set_active(Driver(gpu))
        try:
            yield
        finally:
            driver._active = before
            torch._dynamo.reset()


def _never_runs(*_: Any) -> None:
    raise NeverRuns


class Replaced:
    """Copies objects that `OnDevice` made, with other tensors in the place of device tensors."""

    def __init__(self, make: Callable[[DeviceTensor], Tensor]):
        self._make = make
        self._made: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = self._copy(value)
        return self._made[id(value)]

    def _copy(self, value: Any) -> Any:
        match value:
            case DeviceTensor():
                return self._make(value)
            case torch.device():
                return self._make(DeviceTensor(torch.empty(0))).device
            case types.MethodType():
                return types.MethodType(value.__func__, self(value.__self__))
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(self, value))
            case list() | tuple():
                return type(value)(map(self, value))
            case dict() if type(value) is dict:
                return {key: self(item) for key, item in value.items()}
        if not type(value).__module__.startswith(("vllm_dllm.", "vllm.v1.worker.gpu.")) or isinstance(value, type):
            return value
        if not hasattr(value, "__dict__") or isinstance(value, int | frozenset):
            return value
        copy = object.__new__(type(value))
        self._made[id(value)] = copy
        for key, item in vars(value).items():
            object.__setattr__(copy, key, self(item))
        return copy


def count_kernels(function: Callable[..., Any], *args: Any) -> int:
    """Kernels of a compiled stage for arguments with `DeviceTensor`; within ``compiling_for``.

    Raises:
        torch._inductor.exc.InductorError: a kernel does not compile.
    """
    mode = FakeTensorMode()

    def fake(tensor: DeviceTensor) -> Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)

    replaced = Replaced(fake)
    function, args = replaced(function), replaced(args)
    torch._dynamo.reset()
    _code.clear()
    try:
        with torch.inference_mode():
            torch.compile(function, fullgraph=True)(*args)
    except NeverRuns:
        return sum(len(LAUNCH.findall(code)) for code in _code)
    raise AssertionError(f"{function} has nothing to run")


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a result or of arguments, and of all objects of the package among them, each once."""
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}

    def visit(item: Any) -> None:
        if id(item) in seen:
            return
        seen[id(item)] = item
        if isinstance(item, Tensor):
            found[id(item)] = item
        elif isinstance(item, types.MethodType):
            visit(item.__self__)
        elif isinstance(item, list | tuple):
            for part in item:
                visit(part)
        elif isinstance(item, dict):
            for part in item.values():
                visit(part)
        elif type(item).__module__.startswith("vllm_dllm.") and hasattr(item, "__dict__"):
            visit(vars(item))

    visit(value)
    return list(found.values())
