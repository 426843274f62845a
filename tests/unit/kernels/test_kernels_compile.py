"""Every Triton kernel of the project compiles for NVIDIA's GPUs, launched as the project launches it.

The tests of what kernels compute run in Triton's interpreter, which takes what the compiler refuses. Here the public
function around a kernel runs with a driver that names a GPU as its device: Triton binds and specialises the
arguments, compiles the kernel to a cubin, and hands the cubin to a launcher that does nothing.
"""

import ast
import multiprocessing
import os
import re
import subprocess
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

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


# Data type, entropy, margin, draws, and whether logits are divided by the temperature already.
ROW_STATS: dict[str, tuple[torch.dtype, bool, bool, bool, bool]] = {
    "greedy": (torch.bfloat16, False, False, False, False),
    "margin": (torch.bfloat16, False, True, False, False),
    "entropy": (torch.bfloat16, True, False, False, False),
    "sampling": (torch.bfloat16, False, False, True, False),
    "all": (torch.bfloat16, True, True, True, False),
    "float16": (torch.float16, True, False, True, True),
    "float32": (torch.float32, False, False, True, False),
}


def launch_row_stats() -> None:
    """All variants, in the order of the table."""
    from vllm_dllm.kernels.confidence import Draws
    from vllm_dllm.kernels.confidence_triton import row_stats_triton

    rows = 2
    keys = [torch.zeros(rows, dtype=torch.int64)] * 3
    for dtype, entropy, margin, sampling, applied in ROW_STATS.values():
        row_stats_triton(
            torch.zeros(rows, 151936, dtype=dtype),
            Draws(torch.zeros(rows), *keys, temperature_applied=applied) if sampling else None,
            forbidden_token=151669,
            with_entropy=entropy,
            with_margin=margin,
        )


def launch_row_stats_of_batches(vocab: int) -> None:
    """Batches of many sizes, cut from logits that are padded to 64 columns and from logits that are not."""
    from vllm_dllm.kernels.confidence_triton import row_stats_triton

    storage = torch.empty(520, -(-vocab // 64) * 64, dtype=torch.bfloat16)
    for logits in (storage[:, :vocab], torch.empty(520, vocab, dtype=torch.bfloat16)):
        for begin, end in ((0, 1), (3, 4), (0, 8), (5, 21), (0, 500), (1, 520)):
            row_stats_triton(logits[begin:end], None, forbidden_token=7, with_entropy=False, with_margin=False)


def launch_copy_pages() -> None:
    from vllm_dllm.kernels.page_copy_triton import copy_pages_triton

    pages = torch.arange(8)
    copy_pages_triton(pages, pages, pages, torch.ones(8, dtype=torch.bool), page_bytes=131072, stride_bytes=131072)


LAUNCHES: dict[str, Callable[[], None]] = {
    "kernels.confidence_triton._part_kernel": launch_row_stats,
    "kernels.confidence_triton._merge_kernel": launch_row_stats,
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


class Variant(NamedTuple):
    """What the compiler made of one variant of a kernel."""

    ptx: str
    ttgir: str
    cubin: bytes


Compiler = Callable[..., list[Variant]]
"""`compile_kernel` in a process of its own."""


def compile_kernel(kernel: str, gpu: str, launch: Callable[..., None] | None = None, *args: Any) -> list[Variant]:
    """Every variant of the kernel that its launches compile, or that ``launch(*args)`` compiles."""
    import triton

    assert not triton.knobs.runtime.interpret
    triton.runtime.driver.set_active(Driver(gpu))
    (launch or LAUNCHES[kernel])(*args)
    module, name = f"vllm_dllm.{kernel}".rsplit(".", 1)
    functions = vars(__import__(module, fromlist=[name]))
    compiled = list(functions[name].device_caches[0][0].values())
    for function in functions.values():
        if isinstance(function, triton.runtime.JITFunction):
            function.device_caches.clear()
    assert compiled
    assert all(variant.asm["cubin"] for variant in compiled)
    return [Variant(*(variant.asm[name] for name in Variant._fields)) for variant in compiled]


def prepare_process(cache: str) -> None:
    # Triton reads both when it is imported, and the tests' process may have done that long ago.
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ["TRITON_INTERPRET"] = "0"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    import triton

    try:
        _ = triton.knobs.nvidia.ptxas
    except RuntimeError:
        pytest.skip("this build of Triton comes without NVIDIA's assembler ptxas, and TRITON_PTXAS_PATH names none")
    cache = str(tmp_path_factory.mktemp("triton"))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare_process, (cache,)) as pool:
        yield lambda *args: pool.submit(compile_kernel, *args).result()


def test_every_kernel_of_the_package_is_launched_here() -> None:
    assert kernels_of_the_package() == set(LAUNCHES)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kernel", LAUNCHES)
def test_a_kernel_compiles_for_a_gpu(compiler: Compiler, kernel: str, gpu: str) -> None:
    _, target, _ = GPUS[gpu]
    assert all(f".target {target}" in variant.ptx for variant in compiler(kernel, gpu))


PART = "kernels.confidence_triton._part_kernel"
MERGE = "kernels.confidence_triton._merge_kernel"


def row_stats_variants(compiler: Compiler, kernel: str, gpu: str = "H100") -> dict[str, Variant]:
    """By their names in `ROW_STATS`. Two names have the same variant where a kernel does not tell them apart."""
    return dict(zip(ROW_STATS, compiler(kernel, gpu), strict=True))


@pytest.mark.parametrize("gpu", GPUS)
def test_row_stats_load_logits_16_bytes_at_a_time(compiler: Compiler, gpu: str) -> None:
    for name, variant in row_stats_variants(compiler, PART, gpu).items():
        entry_bytes = ROW_STATS[name][0].itemsize
        loads = re.findall(r"ld\.global[.\w]*", variant.ptx)
        # A thread has 32 columns of its part. What else is loaded are temperature, seed, position and round.
        assert loads.count("ld.global.v4.b32") == 32 * entry_bytes // 16
        assert {"ld.global.b16", "ld.global.v2.b32"}.isdisjoint(loads)
        assert loads.count("ld.global.b32") <= 2


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kernel", LAUNCHES)
def test_a_kernel_keeps_its_values_in_registers(compiler: Compiler, kernel: str, gpu: str, tmp_path: Path) -> None:
    import triton

    for variant in compiler(kernel, gpu):
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(variant.cubin)
        command = (triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin))
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert re.findall(r"(STACK|LOCAL):(\d+)", usage) == [("STACK", "0"), ("LOCAL", "0")], usage


def layouts_of_reductions(variant: Variant) -> set[str]:
    """How the operands of the variant's reductions lie in threads, which decides the order of additions."""
    named = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", variant.ttgir, re.MULTILINE))
    operands = re.findall(r"^ *\}\) : \(tensor<\w+, (#\w+)>\) -> ", variant.ttgir, re.MULTILINE)
    assert len(operands) == variant.ttgir.count('"tt.reduce"') > 0
    return {named[layout] for layout in operands}


@pytest.mark.parametrize("kernel", [PART, MERGE])
def test_row_stats_add_up_in_one_order_whatever_else_is_asked_for(compiler: Compiler, kernel: str) -> None:
    variants = row_stats_variants(compiler, kernel)
    of_bfloat16 = [layouts_of_reductions(variants[name]) for name in ROW_STATS if ROW_STATS[name][0] == torch.bfloat16]
    assert len(of_bfloat16[0]) == 1
    assert all(layouts == of_bfloat16[0] for layouts in of_bfloat16)


@pytest.mark.parametrize("kernel", [PART, MERGE])
@pytest.mark.parametrize("vocab", [12000, 12001])
def test_row_stats_add_up_in_one_order_whatever_the_number_of_rows(compiler: Compiler, vocab: int, kernel: str) -> None:
    layouts = [
        layouts_of_reductions(variant) for variant in compiler(kernel, "H100", launch_row_stats_of_batches, vocab)
    ]
    assert len(layouts[0]) == 1
    assert all(other == layouts[0] for other in layouts)


def test_row_stats_round_every_product_before_they_add_it(compiler: Compiler) -> None:
    # The logarithms of draws and of the entropy have fused operations of their own.
    parts, merges = (row_stats_variants(compiler, kernel) for kernel in (PART, MERGE))
    without_logarithms = [parts[name] for name in ("greedy", "margin", "entropy")]
    without_logarithms += [merges[name] for name in ("greedy", "margin", "sampling")]
    assert not any("fma." in variant.ptx for variant in without_logarithms)
    for variants in (parts, merges):
        with_logarithms = {variant.ptx.count("fma.") for variant in variants.values()} - {0}
        assert len(with_logarithms) == 1
