"""Index arrays that plans are made of, on the host and on the device."""

from functools import lru_cache

import numpy as np
import torch


def runs(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whose the elements of consecutive runs of ``counts`` elements are, and the place of each in its run; int64."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def to_device(device: torch.device, **arrays: np.ndarray) -> dict[str, torch.Tensor]:
    """Copies of arrays on the device, int64 or float64, in one transfer; the host does not wait."""
    # Compiled kernels load 16 bytes at a time, and would copy an array that does not begin at a multiple of that.
    sizes = [array.size + array.size % 2 for array in arrays.values()]
    flat, begin = np.empty(sum(sizes), dtype=np.int64), 0
    for array, size in zip(arrays.values(), sizes, strict=True):
        # Floats go as their bits.
        bits = array.astype(np.float64).view(np.int64) if array.dtype.kind == "f" else array
        flat[begin : begin + array.size] = bits.ravel()
        begin += size
    host = torch.from_numpy(flat)
    # Only a copy from pinned memory leaves the host free. PyTorch reuses the pinned memory when the copy is done.
    sent = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
    return {
        name: (part.view(torch.float64) if array.dtype.kind == "f" else part)[: array.size].view(array.shape)
        for part, (name, array) in zip(sent.split(sizes), arrays.items(), strict=True)
    }


def iota(size: int, device: torch.device) -> torch.Tensor:
    """[size] int64: 0, 1, 2, ... All callers share the tensor and must not change it."""
    if torch.compiler.is_compiling():
        # Part of a kernel, and no memory.
        return torch.arange(size, device=device)
    return _iota(size, device)


@lru_cache(maxsize=256)
def _iota(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, device=device)
