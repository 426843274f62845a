"""How much memory torch operators take, on any device."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Peak of the bytes held by tensors that operators allocated inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
                if address not in given and address not in self._live and storage.nbytes():
                    self._live[address] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, address, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result
