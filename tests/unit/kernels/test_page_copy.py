"""Copying pages: the torch path, and the Triton kernel in the interpreter."""

import gc
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.kernels.page_copy import PageCopy

PAGES = 12
Copy = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor], list[torch.Tensor]]
"""Caches, source, target, wanted; returns the caches after the copy."""


def copy_with_torch(
    caches: list[torch.Tensor], source: torch.Tensor, target: torch.Tensor, wanted: torch.Tensor
) -> list[torch.Tensor]:
    PageCopy(caches)(source, target, wanted)
    return caches


def copy_with_triton(
    caches: list[torch.Tensor], source: torch.Tensor, target: torch.Tensor, wanted: torch.Tensor
) -> list[torch.Tensor]:
    from vllm_dllm.kernels.page_copy_triton import copy_pages_triton

    first = caches[0]
    copy_pages_triton(
        torch.tensor([cache.data_ptr() for cache in caches]),
        source.flatten(),
        target.flatten(),
        wanted.flatten(),
        page_bytes=first[0].numel() * first.element_size(),
        stride_bytes=first.stride(0) * first.element_size(),
    )
    return caches


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def test_on_a_gpu_caches_that_their_owner_lets_go_of_are_free() -> None:
    """vLLM makes the real caches after those of its profiling run are gone: there may be no room for both."""
    caches: list[torch.Tensor] = [cache.as_subclass(OnCuda) for cache in random_caches((2, 4, 8), torch.float32)]
    kept = PageCopy(caches)
    memory = [weakref.ref(cache) for cache in caches]
    del caches
    gc.collect()
    assert [cache() for cache in memory] == [None] * len(memory)
    assert kept.caches == []


def interpret() -> None:
    # Triton reads it when it is imported, and the tests' process may have done that long ago.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Copy]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), interpret) as pool:
        yield lambda *arguments: pool.submit(copy_with_triton, *arguments).result()


def random_caches(shape: tuple[int, ...], dtype: torch.dtype, layers: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(PAGES, *shape, generator=generator).to(dtype) for _ in range(layers)]


def expected(
    caches: list[torch.Tensor], source: torch.Tensor, target: torch.Tensor, wanted: torch.Tensor
) -> list[torch.Tensor]:
    after = [cache.clone() for cache in caches]
    triples = zip(source.flatten().tolist(), target.flatten().tolist(), wanted.flatten().tolist(), strict=True)
    for from_, to, copy in triples:
        for cache, old in zip(after, caches, strict=True):
            if copy:
                cache[to] = old[from_]
    return after


SOURCE = torch.tensor([[0, 0, 0], [3, 3, 3]])
TARGET = torch.tensor([[6, 7, 8], [9, 10, 11]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# The last has more 32-bit words than a program of the kernel takes at a time.
@pytest.mark.parametrize("shape", [(2, 4, 8), (2, 32, 6), (2, 32, 40)])
def test_the_kernel_copies_what_is_wanted_and_nothing_else(
    interpreted: Copy, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    caches = random_caches(shape, dtype)
    for wanted in ([[1, 0, 1], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]], [[1, 1, 1], [1, 1, 1]]):
        arguments = SOURCE, TARGET, torch.tensor(wanted).bool()
        # Before the kernel runs: processes may share the tensors.
        after = expected(caches, *arguments)
        for got, cache in zip(interpreted(caches, *arguments), after, strict=True):
            assert torch.equal(got, cache)


def test_the_kernel_leaves_what_lies_between_pages_alone(interpreted: Copy) -> None:
    """Where keys and values of all pages are stored one after the other in one tensor, pages are apart."""
    storage = torch.arange(PAGES * 40.0).view(PAGES, 40)
    after = storage.clone()
    after[7, :24] = storage[1, :24]
    (got,) = interpreted([storage[:, :24]], torch.tensor([1]), torch.tensor([7]), torch.tensor([True]))
    assert torch.equal(got.as_strided((PAGES, 40), (40, 1)), after)


def test_the_kernel_refuses_pages_of_odd_sizes(interpreted: Copy) -> None:
    caches = [torch.zeros(PAGES, 3, dtype=torch.bfloat16)]
    with pytest.raises(ValueError, match="pages of 6 bytes, 6 apart, are not whole 32-bit words"):
        interpreted(caches, torch.tensor([1]), torch.tensor([7]), torch.tensor([True]))


@given(
    st.permutations(range(PAGES)),
    st.lists(st.tuples(st.integers(0, PAGES - 1), st.booleans()), max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_torch_copies_what_is_wanted_and_nothing_else(
    pages: list[int], candidates: list[tuple[int, bool]], dtype: torch.dtype
) -> None:
    caches = random_caches((2, 3), dtype)
    targets = pages[: len(candidates)]
    # What is copied to is not copied from: scratch pages and those of requests.
    source = torch.tensor([pages[6 + page % 6] for page, _ in candidates], dtype=torch.int64)
    arguments = source, torch.tensor(targets, dtype=torch.int64), torch.tensor([w for _, w in candidates]).bool()
    after = expected(caches, *arguments)
    for got, cache in zip(copy_with_torch(caches, *arguments), after, strict=True):
        assert torch.equal(got, cache)


def test_a_cache_that_layers_share_is_copied_once() -> None:
    cache = torch.zeros(PAGES, 4)
    assert len(PageCopy([cache, cache, torch.zeros(PAGES, 4)]).caches) == 2


def test_pages_with_gaps_inside_are_refused() -> None:
    with pytest.raises(ValueError, match="drafts need pages without gaps, not strides"):
        PageCopy([torch.zeros(PAGES, 4, 8)[:, :, :6]])


@pytest.mark.parametrize("other", [torch.zeros(PAGES, 5), torch.zeros(PAGES, 4, dtype=torch.bfloat16)])
def test_layers_with_different_pages_are_refused(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="drafts need the same page layout in all layers"):
        PageCopy([torch.zeros(PAGES, 4), other])


def test_pages_whose_dimensions_are_swapped_in_memory_are_whole() -> None:
    """A layout with the heads before the positions, seen the other way round."""
    cache = torch.arange(PAGES * 24.0).view(PAGES, 4, 6)
    PageCopy([cache.transpose(1, 2)])(torch.tensor([2]), torch.tensor([5]), torch.tensor([True]))
    assert torch.equal(cache[5], cache[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_copies_what_is_wanted_on_a_gpu(dtype: torch.dtype) -> None:
    caches = random_caches((2, 32, 40), dtype)
    arguments = SOURCE, TARGET, torch.tensor([[1, 0, 1], [0, 1, 0]]).bool()
    after = expected(caches, *arguments)
    on_gpu = [cache.cuda() for cache in caches]
    PageCopy(on_gpu)(*(argument.cuda() for argument in arguments))
    for got, cache in zip(on_gpu, after, strict=True):
        assert torch.equal(got.cpu(), cache)
