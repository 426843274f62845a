"""vLLM's own Triton kernels in the steps of an engine on a CPU, where every address that they use is looked at.

A CPU engine has fallbacks in the place of these kernels. A fallback asks a tensor for its entries. A kernel reads them
as they should lie in memory, and on a GPU reads or writes beyond the tensor where they do not.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime import interpreter
from vllm.triton_utils import dispatcher
from vllm.triton_utils.dispatcher import KernelOverride


@dataclass
class Bounds:
    """What kernels did meanwhile.

    Attributes:
        launches: of every kernel.
        beyond: accesses beyond the tensors that a kernel was given: kernel, ``load`` or ``store``, nearest argument.
    """

    launches: Counter[str] = field(default_factory=Counter)
    beyond: Counter[tuple[str, str, str]] = field(default_factory=Counter)


@contextmanager
def bounded_kernels() -> Iterator[Bounds]:
    """Run vLLM's kernels, not their fallbacks, and look at their addresses. What is beyond a tensor is left out."""
    found, kernel = Bounds(), ""
    tensors: list[tuple[int, int, str]] = []
    originals = {id(impl): original for original, impl in dispatcher._registry.values()}
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    arguments_of = interpreter.GridExecutor._init_args_hst

    def launch(override: KernelOverride, grid: Any) -> Callable[..., Any]:
        return originals[id(override._impl)][grid]

    def note_arguments(self: Any, args: Any, kwargs: Any) -> Any:
        nonlocal kernel
        args, kwargs = arguments_of(self, args, kwargs)
        kernel = self.fn.__name__
        found.launches[kernel] += 1
        tensors[:] = [
            (values.data_ptr(), values.data_ptr() + extent(values), name)
            for name, values in [*zip(self.arg_names, args, strict=False), *kwargs.items()]
            if hasattr(values, "data_ptr") and values.numel()
        ]
        return args, kwargs

    def within(access: str, pointers: Any, mask: Any) -> Any:
        addresses = pointers.data.astype(np.int64)
        inside = np.zeros(addresses.shape, dtype=bool)
        for begin, end, _ in tensors:
            inside |= (begin <= addresses) & (addresses < end)
        wanted = np.broadcast_to(mask.data, addresses.shape).astype(bool)
        for address in addresses[wanted & ~inside].flatten():
            name = min(tensors, key=lambda each: min(abs(address - each[0]), abs(address - each[1])))[2]
            found.beyond[kernel, access, name] += 1
        return interpreter.TensorHandle(wanted & inside, mask.dtype)

    def checked_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        return load(self, pointers, within("load", pointers, mask), *more)

    def checked_store(self: Any, pointers: Any, values: Any, mask: Any, *more: Any) -> Any:
        return store(self, pointers, values, within("store", pointers, mask), *more)

    with ExitStack() as stack:
        for owner, name, new in (
            (KernelOverride, "__getitem__", launch),
            (interpreter.GridExecutor, "_init_args_hst", note_arguments),
            (builder, "create_masked_load", checked_load),
            (builder, "create_masked_store", checked_store),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield found


def extent(values: Any) -> int:
    """Bytes from the first entry of a tensor to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    return (last + 1) * values.element_size()
