"""Every Triton kernel of the project compiles for NVIDIA's GPUs, launched as the project launches it.

The tests of what kernels compute run in Triton's interpreter, which takes what the compiler refuses. Here the public
function around a kernel runs with a driver that names a GPU as its device: Triton binds and specialises the
arguments, compiles the kernel to a cubin, and hands the cubin to a launcher that does nothing.
"""

import ast
import multiprocessing
import os
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import vllm_dllm

PACKAGE = Path(vllm_dllm.__file__).parent

GPUS: dict[str, tuple[int, str, dict[str, int]]] = {
    "A100": (80, "sm_80", {"max_shared_mem": 166912, "multiprocessor_count": 108}),
    "H100": (90, "sm_90a", {"max_shared_mem": 232448, "multiprocessor_count": 132}),
    "B200": (100, "sm_100a", {"max_shared_mem": 232448, "multiprocessor_count": 148}),
}
"""Compute capability, target of the PTX, and what CUDA reports of each GPU."""


class Driver:
    """As much of a Triton driver for a GPU as a launch asks for. Nothing runs."""

    def __init__(self, gpu: str):
        self.capability, _, properties = GPUS[gpu]
        self.utils = types.SimpleNamespace(
            load_binary=lambda *_: (None, None, 0, 0, 1024),  # module, function, registers, spills, threads of a block
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"warpSize": 32, "max_num_regs": 65536, **properties},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: None


def launch_row_stats() -> None:
    from vllm_dllm.kernels.confidence import Draws
    from vllm_dllm.kernels.confidence_triton import row_stats_triton

    rows = 2
    keys = [torch.zeros(rows, dtype=torch.int64)] * 3
    for dtype, entropy, margin, sampling, applied in (
        (torch.bfloat16, False, False, False, False),
        (torch.bfloat16, False, True, False, False),
        (torch.bfloat16, True, True, True, False),
        (torch.float16, True, False, True, True),
        (torch.float32, False, False, True, False),
    ):
        row_stats_triton(
            torch.zeros(rows, 151936, dtype=dtype),
            Draws(torch.zeros(rows), *keys, temperature_applied=applied) if sampling else None,
            forbidden_token=151669,
            with_entropy=entropy,
            with_margin=margin,
        )


def launch_copy_pages() -> None:
    from vllm_dllm.kernels.page_copy_triton import copy_pages_triton

    pages = torch.arange(8)
    copy_pages_triton(pages, pages, pages, torch.ones(8, dtype=torch.bool), page_bytes=131072, stride_bytes=131072)


LAUNCHES: dict[str, Callable[[], None]] = {
    "kernels.confidence_triton._row_stats_kernel": launch_row_stats,
    "kernels.page_copy_triton._copy_pages_kernel": launch_copy_pages,
}
"""How each kernel is launched, by module and name below ``vllm_dllm``."""


def is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).split(".")[-1] == "jit" and "torch" not in ast.unparse(called)


def kernels_of_the_package() -> set[str]:
    """Functions of the package with Triton's decorator, less those that another one of their module calls."""
    kernels = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        compiled = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list))
        ]
        called = {node.id for function in compiled for node in ast.walk(function) if isinstance(node, ast.Name)}
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        kernels |= {f"{module}.{function.name}" for function in compiled if function.name not in called}
    return kernels


def ptx_of(kernel: str, gpu: str) -> list[str]:
    """PTX of every variant of the kernel that its launches compile to a cubin. Runs in a process of its own."""
    import triton

    assert not triton.knobs.runtime.interpret
    triton.runtime.driver.set_active(Driver(gpu))
    LAUNCHES[kernel]()
    module, name = f"vllm_dllm.{kernel}".rsplit(".", 1)
    function = getattr(__import__(module, fromlist=[name]), name)
    compiled = list(function.device_caches[0][0].values())
    function.device_caches.clear()
    assert compiled
    assert all(variant.asm["cubin"] for variant in compiled)
    return [variant.asm["ptx"] for variant in compiled]


def prepare_process(cache: str) -> None:
    # Triton reads both when it is imported, and the tests' process may have done that long ago.
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ["TRITON_INTERPRET"] = "0"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], list[str]]]:
    import triton

    try:
        _ = triton.knobs.nvidia.ptxas
    except RuntimeError:
        pytest.skip("this build of Triton comes without NVIDIA's assembler ptxas, and TRITON_PTXAS_PATH names none")
    cache = str(tmp_path_factory.mktemp("triton"))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare_process, (cache,)) as pool:
        yield lambda kernel, gpu: pool.submit(ptx_of, kernel, gpu).result()


def test_every_kernel_of_the_package_is_launched_here() -> None:
    assert kernels_of_the_package() == set(LAUNCHES)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kernel", LAUNCHES)
def test_a_kernel_compiles_for_a_gpu(compiler: Callable[[str, str], list[str]], kernel: str, gpu: str) -> None:
    _, target, _ = GPUS[gpu]
    assert all(f".target {target}" in ptx for ptx in compiler(kernel, gpu))


def test_the_confidence_kernel_loads_bfloat16_logits_16_bytes_at_a_time(
    compiler: Callable[[str, str], list[str]],
) -> None:
    greedy, with_margin, sampling, *_ = compiler("kernels.confidence_triton._row_stats_kernel", "H100")
    assert all("ld.global.v4.b32" in ptx for ptx in (greedy, with_margin, sampling))
