"""K/V offloading without a GPU: vLLM's own connector and manager, with pages that are copied on the host."""

from collections import deque
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

LATE_STEPS = 2
"""Steps after which a transfer is done. It copies then, as late as a GPU may."""


class Transfer(NamedTuple):
    job_id: int
    pages: list[int]
    places: list[tuple[int, int]]
    """Of each page: its chunk, and its place in the chunk."""
    is_store: bool


class HostWorker(OffloadingWorker):
    """Copies pages to and from chunks in a dictionary."""

    def __init__(self, kv_caches: CanonicalKVCaches, pages_per_chunk: int) -> None:
        self._tensors = [each.tensor for each in kv_caches.tensors]
        self.pages_per_chunk = pages_per_chunk
        self.chunks: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._transfers: deque[tuple[int, Transfer]] = deque()
        self._step = 0
        self._done: list[TransferResult] = []

    def _submit(self, job_id: int, pages: GPULoadStoreSpec, chunks: CPULoadStoreSpec, *, is_store: bool) -> bool:
        (first,) = pages.block_indices
        numbers = range(first % self.pages_per_chunk, first % self.pages_per_chunk + len(pages.block_ids))
        places = [(int(chunks.chunk_ids[n // self.pages_per_chunk]), n % self.pages_per_chunk) for n in numbers]
        self._transfers.append((self._step + LATE_STEPS, Transfer(job_id, pages.block_ids.tolist(), places, is_store)))
        return True

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, **_: Any) -> bool:
        return self._submit(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        self._step += 1
        while self._transfers and self._transfers[0][0] <= self._step:
            self._copy(self._transfers.popleft()[1])
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        # A stream copies in order.
        while any(transfer.job_id in job_ids for _, transfer in self._transfers):
            self._copy(self._transfers.popleft()[1])

    def _copy(self, transfer: Transfer) -> None:
        for page, place in zip(transfer.pages, transfer.places, strict=True):
            if transfer.is_store:
                self.chunks[place] = [tensor[page].clone() for tensor in self._tensors]
            else:
                for tensor, kept in zip(self._tensors, self.chunks[place], strict=True):
                    tensor[page] = kept
        self._done.append(TransferResult(transfer.job_id, True))


class HostOffloadingSpec(CPUOffloadingSpec):
    """Named in ``kv_connector_extra_config``, as ``spec_name`` with ``spec_module_path``."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return HostWorker(kv_caches, self.blocks_per_chunk)
