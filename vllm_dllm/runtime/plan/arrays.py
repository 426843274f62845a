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
    # Floats go as their bits.
    is_float = [array.dtype.kind == "f" for array in arrays.values()]
    pairs = zip(arrays.values(), is_float, strict=True)
    flat = [(array.astype(np.float64).view(np.int64) if bits else array).ravel() for array, bits in pairs]
    host = torch.from_numpy(np.concatenate(flat, dtype=np.int64, casting="unsafe"))
    # Only a copy from pinned memory leaves the host free. PyTorch reuses the pinned memory when the copy is done.
    sent = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
    parts = sent.split([array.size for array in arrays.values()])
    return {
        name: (part.view(torch.float64) if bits else part).view(array.shape)
        for part, bits, (name, array) in zip(parts, is_float, arrays.items(), strict=True)
    }


@lru_cache(maxsize=256)
def iota(size: int, device: torch.device) -> torch.Tensor:
    """[size] int64: 0, 1, 2, ... All callers share the tensor and must not change it."""
    return torch.arange(size, device=device)
