"""Inductor's programs for a GPU: compiles their kernels, and runs the programs on the host.

For processes of their own, since Triton reads ``TRITON_INTERPRET`` when it is imported: ``0`` to compile, ``1`` to run.
"""

import ast
import importlib.util
import inspect
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.unit.kernels.test_kernels_compile import Driver

BLOCK = 8
"""Elements that a program of a kernel takes at a time, in each dimension. Inductor's own number depends on the GPU."""

_compiled: set[str] = set()
"""Sources of the kernels that this process compiled."""


def load_program(code: str, make_kernel: Callable[[str, str], Any]) -> dict[str, Any]:
    """The names that a program defines. ``make_kernel`` takes the name and the source of each of its kernels."""

    class Compile:
        """In the place of ``AsyncCompile``."""

        def triton(self, name: str, source: str, device_str: str) -> Any:
            return make_kernel(name, source)

        def wait(self, scope: Any) -> None:
            """Nothing is under way."""

    names: dict[str, Any] = {
        "__name__": "program",
        "AsyncCompile": Compile,
        "get_raw_stream": lambda device: 0,
        "copy_if_misaligned": lambda tensor: tensor,
        "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    }
    for pattern in (
        r"from .* import (_cuda_getCurrentRawStream as get_raw_stream|AsyncCompile|copy_if_misaligned)",
        r"empty_strided_cuda = .*",
        r" +torch\.cuda\.set_device\(0\)",
    ):
        code = re.sub(f"^{pattern}$", "", code, flags=re.MULTILINE)
    code = code.replace("with torch.cuda._DeviceGuard(0):", "if True:")
    exec(compile(code, "program", "exec"), names)
    return names


def prepare_compiler(gpu: str, cache: str) -> None:
    """Make this process one that compiles for a GPU (a key of ``GPUS``) without one."""
    os.environ.update(TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache, TORCHINDUCTOR_CACHE_DIR=cache)
    import triton
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    assert not triton.knobs.runtime.interpret
    triton.runtime.driver.set_active(Driver(gpu))
    config.use_static_triton_launcher = False  # It keeps no cubin.
    triton_helpers.set_driver_to_gpu = lambda: None
    CachingAutotuner._make_launchers = lambda self: None


def compile_program(code: str) -> int:
    """Compile each kernel of a program to a cubin, in each configuration that Inductor times it in.

    Returns:
        Number of kernels.

    Raises:
        triton.compiler.errors.CompilationError: Triton refuses a kernel.
    """
    from torch._inductor.async_compile import _load_triton_kernel_from_source

    kernels = []

    def make_kernel(name: str, source: str) -> None:
        kernels.append(name)
        if source in _compiled:
            return
        kernel = _load_triton_kernel_from_source(name, source)
        kernel.precompile()
        assert kernel.compile_results
        assert all(result.kernel.asm["cubin"] for result in kernel.compile_results)
        _compiled.add(source)

    load_program(code, make_kernel)
    return len(kernels)


class Interpreted:
    """A kernel of a program; `run` launches it as Inductor's own object does."""

    def __init__(self, name: str, source: str, folder: Path):
        meta = re.search(r"^ +inductor_meta=(.*?),?$", source, re.MULTILINE)
        assert meta is not None
        self._meta = ast.literal_eval(meta[1])
        source = re.sub(r"@triton_heuristics\.\w+\((?:.|\n)*?\n\)\n@triton\.jit", "@triton.jit", source)
        # Names tell of all operations of a kernel, and end in its number. No file may be called that much.
        file = folder / f"{name[-100:]}.py"
        # Triton reads a kernel's source from its file.
        file.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._launch = getattr(module, name)
        self._parameters = list(inspect.signature(self._launch.fn).parameters)

    def run(self, *args: Any, stream: int) -> None:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        given = dict(zip(self._parameters, args, strict=False))
        blocks = {name: BLOCK for name in self._parameters if name.endswith("BLOCK")}
        assert given.keys() | blocks.keys() == set(self._parameters)
        grid = GridExpr.from_meta(self._meta, blocks).eval_slow(given)
        self._launch[grid](*args, **blocks)


def prepare_interpreter() -> None:
    """Make this process one that interprets kernels."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps

    ReduceOps.generic_reduce = _reduce
    InterpreterBuilder.set_grid_idx = _set_grid_idx


def _set_grid_idx(self: Any, *place: int) -> None:
    """``InterpreterBuilder.set_grid_idx``, from the last to the first: a GPU runs a kernel's programs in any order."""
    self.grid_idx = tuple(number - 1 - index for index, number in zip(place, self.grid_dim, strict=True))


def _reduce(self: Any, values: Any) -> list[Any]:
    """``ReduceOps.generic_reduce`` in whole arrays; the interpreter's own one combines two numbers at a time."""
    assert self.axis is not None
    arrays = [value.handle.data for value in values]
    while (size := arrays[0].shape[self.axis]) > 1:
        halves = [np.split(array, 2, self.axis) for array in arrays]
        first, second = (
            [self.to_tensor(half[side], value.dtype) for half, value in zip(halves, values, strict=True)]
            for side in (0, 1)
        )
        combined = self.combine_fn.fn(*first, *second)
        combined = combined if isinstance(combined, tuple) else (combined,)
        arrays = [each.handle.data for each in combined]
        assert arrays[0].shape[self.axis] == size // 2
    if not self.keep_dims:
        arrays = [array.squeeze(self.axis) for array in arrays]
    return [self.to_tensor(array, value.dtype) for array, value in zip(arrays, values, strict=True)]


def run_program(code: str, args: list[Any]) -> tuple[list[Any], list[Any]]:
    """What a program returns, and its arguments after that."""
    with tempfile.TemporaryDirectory(prefix="vllm-dllm-programs") as folder:
        names = load_program(code, lambda name, source: Interpreted(name, source, Path(folder)))
        with torch.inference_mode():
            results = names["call"](given := list(args))
        assert not given, "the program takes its arguments out of the list"
        return list(results), args
