"""CUDA implementation of :class:`vllm_dllm.kernels.page_copy.PageCopy`."""

import torch
import triton
import triton.language as tl

# Triton evaluates the annotations of a kernel as part of the kernel, so an annotation may name nothing but Triton's own
# types. Triton's interpreter does not evaluate annotations.


@triton.jit
def _copy_pages_kernel(
    addresses_ptr: tl.tensor,  # [layers] int64: address of each layer's cache
    source_ptr: tl.tensor,  # [N] int64
    target_ptr: tl.tensor,  # [N] int64
    wanted_ptr: tl.tensor,  # [N] bool
    stride_words: tl.tensor,
    page_words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    candidate = tl.program_id(0)
    if tl.load(wanted_ptr + candidate):
        base = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int32))
        source = base + tl.load(source_ptr + candidate) * stride_words
        target = base + tl.load(target_ptr + candidate) * stride_words
        for begin in range(0, page_words, BLOCK):
            offsets = begin + tl.arange(0, BLOCK)
            inside = offsets < page_words
            tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


def copy_pages_triton(
    addresses: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    wanted: torch.Tensor,
    *,
    page_bytes: int,
    stride_bytes: int,
) -> None:
    """Copy pages in all layers, [N] candidates at a time, as 32-bit words."""
    if page_bytes % 4 or stride_bytes % 4:
        raise ValueError(f"pages of {page_bytes} bytes, {stride_bytes} apart, are not whole 32-bit words")
    grid = (source.numel(), addresses.numel())
    _copy_pages_kernel[grid](addresses, source, target, wanted, stride_bytes // 4, page_bytes // 4, BLOCK=1024)
