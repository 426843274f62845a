"""What Inductor makes of a function for a GPU that is not there: a program, which ``programs.py`` compiles and runs."""

import inspect
import re
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from tests.gpu_less.device import CUDA, DeviceTensor, Replaced, _load_guard
from tests.unit.kernels.test_kernels_compile import GPUS, Driver
from vllm_dllm.runtime.compiled import GPU_OPTIONS, any_sizes, mark_sizes

LAUNCH = re.compile(
    r"^ +(?:\w+(?:, \w+)* = )?(?:\w+\.run\(|extern_kernels\.|torch\.ops\.|aten\.|\w+\.copy_\()", re.MULTILINE
)
"""A line of Inductor's program that launches a kernel, its own or PyTorch's."""

_made: list[Any] = []
"""The graph of operations that was traced, the program that Inductor made of it, and the arguments of both."""


class NeverRuns(Exception):
    """A compiled function came to where it would run on a GPU."""


@contextmanager
def compiling_for(gpu: str) -> Iterator[None]:
    """``torch.compile`` of fake CUDA tensors makes programs for ``gpu`` (a key of ``GPUS``) while the block runs."""
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.post_grad as post_grad
    from torch._inductor.graph import GraphLowering
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

    change_graph = compile_fx._recursive_joint_graph_passes

    def take_graph(graph: GraphModule, *args: Any, **kwargs: Any) -> GraphModule:
        _made.append(_on_the_host(graph))
        return change_graph(graph, *args, **kwargs)

    def take_program(graph: Any, code: Any) -> Any:
        _made.append(code.value)
        return types.SimpleNamespace(call=_never_runs, __file__="", key="", recursively_apply_fns=None)

    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
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
        (compile_fx, "_recursive_joint_graph_passes", take_graph),
        # Patterns of attention, which our functions have none of; PyTorch makes them of real tensors.
        (joint_graph, "lazy_init", lambda *_, **__: None),
        (post_grad, "lazy_init", lambda *_, **__: None),
        (GraphLowering, "_compile_to_module_lines", take_program),
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


def _never_runs(args: list[Any]) -> None:
    _made.append(args)
    raise NeverRuns


def _on_the_host(graph: GraphModule) -> GraphModule:
    """A copy that makes its tensors on the host."""
    graph = deepcopy(graph)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    graph.recompile()
    return graph


@dataclass(frozen=True)
class Program:
    """What Inductor makes of a function for a GPU: one program in Python, which launches kernels."""

    code: str
    args: list[Any]
    """Of the program, with their values on the host."""
    graph: GraphModule
    """The operations that Inductor made the program of, on the host."""

    @property
    def launches(self) -> int:
        """Kernels and copies."""
        return len(LAUNCH.findall(self.code))

    def results(self) -> tuple[list[Any], list[Any]]:
        """What the program is to return, and its arguments after that."""
        args = deepcopy(self.args)
        with torch.inference_mode():
            return list(self.graph(*args)), args


def program_of(function: Callable[..., Any], args: Any) -> Program:
    """The program for arguments with `DeviceTensor`, and objects that have some; within ``compiling_for``.

    It serves other numbers of requests, groups and rows, too, as the programs of an engine do.

    Raises:
        torch._inductor.exc.InductorError: Inductor cannot make a program.
    """
    mode = FakeTensorMode()
    values: dict[int, Tensor] = {}
    fakes: list[Tensor] = []

    def fake(tensor: DeviceTensor) -> Tensor:
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)
        fakes.append(made)
        values[id(made)] = tensor.values
        return made

    replaced = Replaced(fake)
    function, args = replaced(function), replaced(args)
    torch._dynamo.reset()
    _made.clear()
    try:
        mark_sizes(list(inspect.signature(function).parameters), args)
        with torch.inference_mode(), any_sizes():
            torch.compile(function, fullgraph=True, options=GPU_OPTIONS)(*args)
    except NeverRuns:
        graph, code, given = _made
        return Program(code, [values.get(id(value), value) for value in given], graph)
    raise AssertionError(f"{function} has nothing to run")
