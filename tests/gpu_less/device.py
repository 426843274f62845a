"""A GPU that is not there: tensors that say that they are on a CUDA device, and hold their values on the host.

`Device` is a dispatch mode. An operation on `DeviceTensor` runs on their values, so results are the true ones, and the
mode notes what a GPU would have made of the operation: how many kernels it launches, whether the host waits for the
device, whether a host tensor meets a device tensor, how memory is copied. Tensors that are no `DeviceTensor` are the
host's.
"""

import ctypes
import functools
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA = torch.device("cuda", 0)

ALLOCATIONS = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "resize_"}
"""Operations that launch no kernel, beside views."""
WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations whose result, or its shape, the host needs."""
METADATA = {"device", "is_pinned", "lift_fresh", "detach", "alias", "sym_size", "sym_stride"}


class DeviceTensor(Tensor):
    """A tensor on the device; ``values`` is a host tensor of the same shape and strides."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "DeviceTensor":
        assert not isinstance(values, DeviceTensor)
        tensor = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=CUDA,
        )
        tensor.values = values
        return tensor

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a device tensor outside of a Device")


def values_of(tree: Any) -> Any:
    """``tree`` with the values of device tensors in their place."""
    # PyTorch's tree_map takes a third of the time of these tests.
    match tree:
        case DeviceTensor():
            return tree.values
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*map(values_of, tree))
        case list() | tuple():
            return type(tree)(map(values_of, tree))
        case dict():
            return {key: values_of(value) for key, value in tree.items()}
    return tree


class Replaced:
    """Copies objects that `OnDevice` made, with other tensors in the place of device tensors."""

    def __init__(self, make: Callable[[DeviceTensor], Tensor]):
        self._make = make
        self._made: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = self._copy(value)
        return self._made[id(value)]

    def _copy(self, value: Any) -> Any:
        match value:
            case DeviceTensor():
                return self._make(value)
            case torch.device():
                return self._make(DeviceTensor(torch.empty(0))).device
            case types.MethodType():
                return types.MethodType(value.__func__, self(value.__self__))
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(self, value))
            case list() | tuple():
                return type(value)(map(self, value))
            case dict() if type(value) is dict:
                return {key: self(item) for key, item in value.items()}
        is_ours = type(value).__module__.startswith(("vllm_dllm.", "vllm.v1.worker.gpu."))
        if not is_ours or isinstance(value, type | int) or not hasattr(value, "__dict__"):
            return value
        copy = object.__new__(type(value))
        self._made[id(value)] = copy
        for key, item in vars(value).items():
            object.__setattr__(copy, key, self(item))
        return copy


class Device(TorchDispatchMode):
    """While it is entered, operations on `DeviceTensor` run, and what they cost a GPU is noted.

    Attributes:
        launches: kernels and copies by (operation, place in the package).
        copies: transfers between host and device by (direction, place).
        problems: what no step may do on a GPU, by description.
        stages: functions that were called to be compiled, and their arguments before the call. Their launches are not
            counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[tuple[str, str]] = Counter()
        self.copies: Counter[tuple[str, str]] = Counter()
        self.problems: Counter[str] = Counter()
        self.stages: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._pinned: list[Tensor] = []

    # What `kernels` calls.

    def launch(self, name: str, *tensors: Any) -> None:
        """Note the launch of a kernel; a host tensor among its arguments is a problem."""
        self.launches[name, _place()] += 1
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not isinstance(tensor, DeviceTensor):
                self._problem(f"a host tensor is given to the kernel {name}")

    def stage(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a stage; see ``stages``."""
        copied = Replaced(lambda tensor: DeviceTensor(tensor.values.clone()))
        with torch.utils._python_dispatch._disable_current_modes():
            self.stages.append((copied(function), copied(args)))
        launches = self.launches.copy()
        try:
            return function(*args)
        finally:
            self.launches = launches

    def _problem(self, text: str) -> None:
        self.problems[f"{text} at {_place()}"] += 1

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == pinned.untyped_storage().data_ptr() for pinned in self._pinned)

    def pin(self, tensor: Tensor) -> Tensor:
        """A host tensor as if in pinned memory."""
        self._pinned.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        wanted = kwargs.get("device") or next((value for value in args if isinstance(value, torch.device)), None)
        makes = wanted is not None and torch.device(wanted).type == "cuda"
        if not on_device and not makes:
            return self._on_host(func, name, args, kwargs)
        if name in ("to", "cpu", "cuda") or not _is_composite(func):
            return self._on_device(func, name, args, kwargs, tensors, on_device, makes)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            return self._on_device(func, name, args, kwargs, tensors, on_device, makes)
        return result

    def _on_host(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pin_memory"):
            return self.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _on_device(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        on_device: list[DeviceTensor],
        makes: bool,
    ) -> Any:
        if name in ("to", "_to_copy", "copy_"):
            moved = self._move(func, name, args, kwargs)
            if moved is not None:
                return moved
        elif makes and not on_device and any(tensor.ndim for tensor in tensors):
            self._problem(f"{name} makes a device tensor of a host tensor")
        elif any(tensor.ndim and not isinstance(tensor, DeviceTensor) for tensor in tensors):
            self._problem(f"a host tensor meets a device tensor in {name}")
        self._check_waits(name, args, kwargs)
        if not func.is_view and name not in ALLOCATIONS | METADATA:
            self.launches[name, _place()] += 1
        kwargs.pop("pin_memory", None)
        if makes:
            kwargs["device"] = torch.device("cpu")
        # An operation in place returns its argument.
        owners = {id(tensor.values): tensor for tensor in on_device}
        result = func(*values_of(args), **values_of(kwargs))

        def on_device_too(made: Tensor) -> Tensor:
            return owners[id(made)] if id(made) in owners else DeviceTensor(made)

        return on_device_too(result) if isinstance(result, Tensor) else tree_map_only(Tensor, on_device_too, result)

    def _move(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Copy between host and device; ``None``: the copy stays on the device."""
        source = args[1] if name == "copy_" else args[0]
        from_device = isinstance(source, DeviceTensor)
        if name == "copy_":
            to_device, target = isinstance(args[0], DeviceTensor), args[0]
            is_async = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        else:
            wanted = kwargs.get("device")
            if wanted is None:
                wanted = next((value for value in args[1:] if isinstance(value, torch.device)), source.device)
            to_device, target = torch.device(wanted).type == "cuda", None
            is_async = bool(kwargs.get("non_blocking", any(value is True for value in args[1:2])))
        if from_device == to_device:
            return None
        if not from_device and source.ndim == 0 and name == "copy_":
            # A number that is filled in; no copy of memory.
            self.launches["fill_", _place()] += 1
            target.values.copy_(source)
            return target
        direction = "device to host" if from_device else "host to device"
        self.copies[direction, _place()] += 1
        self.launches[f"copy {direction}", _place()] += 1
        if not is_async:
            self._problem(f"the host waits for a copy from {direction}")
        elif from_device and target is None:
            self._problem(f"the host may read a copy from {direction} before it is there")
        elif to_device and not self._is_pinned(source):
            self._problem("the host waits for a copy from memory that is not pinned")
        if target is not None:
            values_of(target).copy_(values_of(source))
            return target
        dtype = kwargs.get("dtype") or next((value for value in args if isinstance(value, torch.dtype)), None)
        copied = values_of(source).to(dtype=dtype, copy=True)
        return DeviceTensor(copied) if to_device else copied

    def _check_waits(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        if name in WAITS:
            self._problem(f"the host waits in {name}")
        # A mask as an index becomes the list of its places first.
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        if any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices):
            self._problem(f"the host waits in {name} with a mask")
        if name == "repeat_interleave" and isinstance(args[-1], DeviceTensor) and kwargs.get("output_size") is None:
            self._problem("the host waits in repeat_interleave without output_size")


@functools.cache
def _is_composite(func: Any) -> bool:
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


def _place() -> str:
    """File and line of the innermost caller in the package, or else in vLLM."""
    frame, outside = sys._getframe(1), "?"
    while frame is not None:
        path = frame.f_code.co_filename
        if "/vllm_dllm/" in path:
            return f"{path.rpartition('/vllm_dllm/')[2]}:{frame.f_lineno}"
        if outside == "?" and "/vllm/" in path:
            outside = f"vllm/{path.rpartition('/vllm/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return outside


@functools.cache
def _load_guard() -> None:
    if torch.cuda.is_available():
        return
    torch_folder = Path(torch.__file__).parent
    folder = tempfile.TemporaryDirectory(prefix="vllm-dllm-guard")
    library = Path(folder.name) / "guard.so"
    subprocess.run(
        [
            *("g++", "-shared", "-fPIC", "-std=c++20", str(Path(__file__).with_name("guard.cpp")), "-o", str(library)),
            *(f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"),
        ],
        check=True,
    )
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    # The library stays loaded when its file is gone.
    folder.cleanup()


@contextmanager
def device_world(device: Device) -> Iterator[None]:
    """``torch`` as on a machine with a CUDA device, while the block runs."""
    _load_guard()
    make_tensor = torch.tensor

    def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        # It makes its copy without asking the dispatch mode.
        made = make_tensor(data, **options)
        if pin_memory:
            made = device_.pin(made)
        return made if device is None or torch.device(device).type == "cpu" else made.to(device)

    def async_tensor_h2d(data: Any, device: Any = None, dtype: Any = None, out: Tensor | None = None) -> Tensor:
        """vLLM's function of this name, which vLLM replaces on a CPU."""
        host = torch.as_tensor(data, dtype=dtype).pin_memory()
        return host.to(device, non_blocking=True) if out is None else out.copy_(host, non_blocking=True)

    device_ = device
    patch = mock.patch.object
    with ExitStack() as stack:
        stack.enter_context(patch(torch.cuda, "_lazy_init", lambda: None))
        stack.enter_context(patch(torch, "tensor", tensor))
        # vLLM's CPU worker leaves tensors where they are.
        stack.enter_context(patch(torch.Tensor, "pin_memory", lambda self: device_.pin(self.clone())))
        for module in _modules_with("async_tensor_h2d", len(sys.modules)):
            stack.enter_context(patch(module, "async_tensor_h2d", async_tensor_h2d))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(device)
        yield


@functools.cache
def _modules_with(name: str, loaded: int) -> list[Any]:
    """The modules of vLLM and of the package that have this name, while ``loaded`` modules are."""
    return [module for key, module in list(sys.modules.items()) if key.startswith("vllm") and name in vars(module)]


def on_values(device: Device, name: str, function: Callable[..., Any], *, kernels: int = 1) -> Callable[..., Any]:
    """``function`` of host tensors, as so many kernels of the device."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        for _ in range(kernels):
            device.launch(name, *args, *kwargs.values())
        with torch.utils._python_dispatch._disable_current_modes():
            result = function(*values_of(args), **values_of(kwargs))
        return tree_map_only(Tensor, DeviceTensor, result)

    return launch
