"""Copying K/V pages where a tensor on the device says so.

Which pages are to be copied is known on the device only. On CUDA one kernel goes over all layers and candidates, and
leaves at once where nothing is wanted, so the host never waits to know. Elsewhere torch copies what is wanted.
"""

from collections.abc import Sequence

import torch


class PageCopy:
    """Copies pages in the K/V caches of all layers.

    Args:
        caches: one tensor per layer, pages along dimension 0, each page dense in memory, all layers alike. The caller
            keeps them alive.

    Raises:
        ValueError: the caches differ in their pages, or a page has gaps.
    """

    def __init__(self, caches: Sequence[torch.Tensor]):
        # Layers may share a cache.
        caches = list({cache.data_ptr(): cache for cache in caches}.values())
        first = caches[0]
        for cache in caches:
            if cache[0].numel() != first[0].numel() or cache.stride(0) != first.stride(0) or cache.dtype != first.dtype:
                raise ValueError("drafts need the same page layout in all layers")
            extent = 1 + sum(
                (size - 1) * stride for size, stride in zip(cache[0].shape, cache[0].stride(), strict=True)
            )
            if extent != cache[0].numel():
                raise ValueError(f"drafts need pages without gaps, not strides {cache.stride()}")
        self._addresses = torch.tensor([cache.data_ptr() for cache in caches], device=first.device)
        self._page_bytes = first[0].numel() * first.element_size()
        self._stride_bytes = first.stride(0) * first.element_size()
        # On CUDA the addresses are enough. vLLM frees the caches of its profiling run before it makes the real ones,
        # which a reference here would prevent.
        self.caches = [] if first.is_cuda else caches

    def __call__(self, source: torch.Tensor, target: torch.Tensor, wanted: torch.Tensor) -> None:
        """Copy page ``source`` to page ``target`` where ``wanted``. All of one shape; targets are distinct."""
        if self._addresses.is_cuda:
            # Imported here because Triton is absent from CPU-only installations.
            from vllm_dllm.kernels.page_copy_triton import copy_pages_triton

            copy_pages_triton(
                self._addresses,
                source.flatten().contiguous(),
                target.flatten().contiguous(),
                wanted.flatten().contiguous(),
                page_bytes=self._page_bytes,
                stride_bytes=self._stride_bytes,
            )
            return
        indices = wanted.nonzero(as_tuple=True)
        if indices[0].numel():
            pages, copies = source[indices], target[indices]
            for cache in self.caches:
                cache[copies] = cache[pages]
