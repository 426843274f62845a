"""Every step of an engine on a CPU, run a second time on a GPU that is not there.

A replay copies what the step reads - model state, batch, sampler - with its tensors on the `Device`, runs the row plan
and the sampler there, and compares the answers with those of the engine's own step.
"""

import ctypes
import enum
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from vllm.triton_utils.dispatcher import KernelOverride

import vllm_dllm.kernels.confidence_triton
import vllm_dllm.kernels.page_copy_triton
import vllm_dllm.runtime.attention
from tests.gpu_less.device import CUDA, Device, DeviceTensor, device_world, on_values, values_of
from vllm_dllm.kernels.confidence import row_stats_torch
from vllm_dllm.runtime.logits.grammar import GrammarRows

EMPTY_LISTS = {"caches"}
"""Attributes that are empty lists where there is a GPU: a kernel copies pages by the addresses of the K/V caches."""
HOST_TENSORS = {"cpu", "seq_lens_cpu_upper_bound", "dcp_local_seq_lens_cpu_upper_bound", "_drafts_made"}
"""Attributes whose tensors stay on the host where there is a GPU."""
REPEATS = 3
"""Steps that are replayed of those in which the same requests have the same numbers of rows, which is what the host
decides by."""
COPIED = ("vllm_dllm.", "vllm.v1.worker.gpu.", __name__)
"""Packages whose objects a replay copies; all others are shared with the engine."""


class OnDevice:
    """Copies objects with their tensors on the device. Tensors that share memory still do in the copy."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._sources: list[Any] = []

    def __call__(self, source: Any, name: str = "") -> Any:
        """The copy of ``source``; ``name`` is that of the attribute which holds it."""
        if name in EMPTY_LISTS:
            return []
        if id(source) in self._made:
            return self._made[id(source)]
        copy = self._copy(source, name)
        # An id is good as long as its object lives.
        self._sources.append(source)
        return self._made.setdefault(id(source), copy)

    def let_go(self) -> None:
        """Empty the copies, which refer to each other: the garbage collector comes too late for their tensors."""
        for copy in self._made.values():
            if type(copy).__module__.startswith(COPIED) and hasattr(copy, "__dict__"):
                vars(copy).clear()
        self._made.clear()
        self._storages.clear()
        self._sources.clear()

    def _copy(self, source: Any, name: str) -> Any:
        match source:
            case Tensor():
                values = self._tensor(source)
                return values if name in HOST_TENSORS else DeviceTensor(values)
            case np.ndarray():
                return source.copy()
            case torch.device():
                return CUDA
            case nn.Module():
                return ModelOnDevice(source)
            case types.FunctionType() if source.__closure__ and source.__module__.startswith(COPIED):
                cells = tuple(types.CellType(self(cell.cell_contents)) for cell in source.__closure__)
                return types.FunctionType(
                    source.__code__, source.__globals__, source.__name__, source.__defaults__, cells
                )
            case types.MethodType():
                return types.MethodType(source.__func__, self(source.__self__))
            case functools.partial():
                return functools.partial(self(source.func), *map(self, source.args), **self(source.keywords))
            case tuple():
                items = [self(value, name) for value in source]
                return type(source)(*items) if hasattr(source, "_fields") else tuple(items)
            case list():
                return [self(value, name) for value in source]
            case dict() if type(source) is dict:
                return {key: self(value, str(key)) for key, value in source.items()}
        if isinstance(source, enum.Enum | type) or not type(source).__module__.startswith(COPIED):
            return source
        if not hasattr(source, "__dict__"):
            return source
        copy = object.__new__(type(source))
        self._made[id(source)] = copy
        for key, value in vars(source).items():
            object.__setattr__(copy, key, self(value, key))
        return copy

    def _tensor(self, source: Tensor) -> Tensor:
        storage = source.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = storage.clone()
        copied = torch.empty(0, dtype=source.dtype)
        return copied.set_(self._storages[storage.data_ptr()], source.storage_offset(), source.shape, source.stride())


class ModelOnDevice:
    """A model whose hidden states and logits are on the device."""

    def __init__(self, model: nn.Module):
        self._model = model

    @property
    def sampled_hidden_states(self) -> DeviceTensor:
        return DeviceTensor(self._model.sampled_hidden_states)

    @sampled_hidden_states.setter
    def sampled_hidden_states(self, value: DeviceTensor) -> None:
        self._model.sampled_hidden_states = value.values

    def compute_logits(self, hidden_states: DeviceTensor) -> DeviceTensor:
        before = self._model.sampled_hidden_states
        with torch.utils._python_dispatch._disable_current_modes():
            logits = self._model.compute_logits(hidden_states.values)
        self._model.sampled_hidden_states = before
        return DeviceTensor(logits)


@dataclass
class Step:
    """What one replayed step would have been on a GPU."""

    num_requests: int
    num_decodes: int
    num_branches: int
    plan: Device
    sampler: Device | None = None
    masks: Device | None = None
    """Of structured requests, on the logits."""

    def launches(self) -> tuple[int, int]:
        """Kernels and copies of the plan, and of the sampler."""
        assert self.sampler is not None
        return self.plan.launches.total(), self.sampler.launches.total()


@dataclass
class Replay:
    """The replayed steps of an engine."""

    steps: list[Step] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    """Results that differ from the engine's own."""

    def problems(self) -> Counter[str]:
        devices = [
            device for step in self.steps for device in (step.plan, step.masks, step.sampler) if device is not None
        ]
        return sum((device.problems for device in devices), Counter())


def stage(stages: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``Stages.stage`` of an engine whose compiled steps are to be counted: tells the device of every call."""

    def run(*args: Any) -> Any:
        device = _get_current_dispatch_mode()
        return device.stage(function, args) if isinstance(device, Device) else function(*args)

    return run


@contextmanager
def kernels(device: Device) -> Iterator[None]:
    """The kernels of vLLM and of the package run on the values of device tensors."""

    def launch(override: KernelOverride) -> Callable[..., Any]:
        return on_values(device, override.__name__, override._launch)

    patch = mock.patch.object
    with ExitStack() as stack:
        stack.enter_context(patch(KernelOverride, "__getitem__", lambda self, grid: launch(self)))
        stack.enter_context(
            patch(
                vllm_dllm.kernels.confidence_triton,
                "row_stats_triton",
                on_values(device, "row_stats", row_stats_torch, kernels=2),
            )
        )
        stack.enter_context(
            patch(vllm_dllm.kernels.page_copy_triton, "copy_pages_triton", on_values(device, "copy_pages", _copy_pages))
        )
        stack.enter_context(patch(vllm_dllm.runtime.attention, "build_attn_metadata", check_metadata))
        yield


def _copy_pages(
    addresses: Tensor, source: Tensor, target: Tensor, wanted: Tensor, *, page_bytes: int, stride_bytes: int
) -> None:
    """The kernel of ``kernels.page_copy_triton``. Its pages are the engine's own, whose step does the same again."""
    for address in addresses.tolist():
        for begin, end in zip(source[wanted].tolist(), target[wanted].tolist(), strict=True):
            ctypes.memmove(address + end * stride_bytes, address + begin * stride_bytes, page_bytes)


def check_metadata(**given: Any) -> dict[str, Any]:
    """What the attention backends of a GPU ask of the metadata.

    Raises:
        AssertionError: names what is not so.
    """
    num_reqs, causal = given["num_reqs"], given["causal"]
    location, lengths = given["query_start_loc_gpu"], given["seq_lens"]
    on_host = given["query_start_loc_cpu"]
    facts = {
        "query_start_loc is on the device": _is_on_device(location, torch.int32, num_reqs + 1),
        "seq_lens are on the device": _is_on_device(lengths, torch.int32, num_reqs),
        "slot_mappings are on the device": _is_on_device(given["slot_mappings"], torch.int64),
        "query_start_loc is on the host too": not isinstance(on_host, DeviceTensor)
        and _are_starts(on_host, values_of(location), isinstance(causal, bool)),
        "groups have all rows": int(on_host[-1]) == given["num_tokens"],
        "max_query_len is no less than the longest group": given["max_query_len"] >= int(on_host.diff().max()),
        "max_seq_len is no less than the longest text": given["max_seq_len"] >= int(values_of(lengths).max()),
        "block tables have the pages of the longest text": all(
            int(values_of(lengths).max()) <= table.shape[1] * group.kv_cache_spec.block_size
            for table, group in zip(given["block_tables"], given["kv_cache_config"].kv_cache_groups, strict=True)
        ),
        # Backends step over the pages of a row by one, and over rows by the table's own stride.
        "block tables are on the device": all(
            _is_on_device(table, torch.int32, num_reqs, contiguous=False) and table.stride(1) == 1
            for table in given["block_tables"]
        ),
        # FlashAttention 4 compiles one kernel for True and for flags, which serves the kind that came first alone. True
        # is for families all of whose rows are causal.
        "causal is a boolean, or flags on the device": isinstance(causal, bool)
        or _is_on_device(causal, torch.int32, num_reqs),
    }
    wrong = [fact for fact, holds in facts.items() if not holds]
    assert not wrong, f"not so: {wrong}"
    return {name: None for groups in given["attn_groups"] for group in groups for name in group.layer_names}


def _are_starts(on_host: Tensor, on_device: Tensor, exactly: bool) -> bool:
    """The host's first rows of views are the device's. Where a group has two views, their border may be another one."""
    differ = torch.nn.functional.pad(on_host != on_device, (1, 1))
    apart = not (differ[1:] & differ[:-1]).any() and not differ[[1, -2]].any()
    return not differ.any() if exactly else bool(apart)


def _is_on_device(tensor: Any, dtype: torch.dtype, length: int | None = None, *, contiguous: bool = True) -> bool:
    return (
        isinstance(tensor, DeviceTensor)
        and tensor.dtype == dtype
        and (length is None or tensor.shape[0] == length)
        and (not contiguous or tensor.is_contiguous())
    )


@contextmanager
def replayed(llm: Any) -> Iterator[Replay]:
    """Replays the steps of an engine, which must run in this process, until the block ends.

    Of steps in which the same requests have the same numbers of rows only the first ``REPEATS``.
    """
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    state, sampler = runner.model_state, runner.sampler
    replay = Replay()
    waiting: list[tuple[Step, OnDevice, Any, Any]] = []
    seen: Counter[tuple[str | int, ...]] = Counter()
    prepare, call = type(state).prepare_attn, type(sampler).__call__

    def prepare_attn(
        self: Any, batch: Any, mode: Any, tables: Any, slot_mappings: Any, *more: Any, **named: Any
    ) -> Any:
        rows = (*batch.req_ids, *batch.num_scheduled_tokens[: batch.num_reqs].tolist(), batch.num_draft_tokens)
        seen[rows] += 1
        if seen[rows] > REPEATS:
            return prepare(self, batch, mode, tables, slot_mappings, *more, **named)
        on_device = OnDevice()
        fake_state, fake_sampler, fake_batch = on_device(self), on_device(sampler), on_device(batch)
        fake_tables, fake_slots = on_device(tuple(tables)), on_device(slot_mappings)
        device = Device()
        with kernels(device), device_world(device):
            prepare(fake_state, fake_batch, mode, fake_tables, fake_slots, *more, **named)
        metadata = prepare(self, batch, mode, tables, slot_mappings, *more, **named)
        plan = fake_state.plan
        step = Step(batch.num_reqs, plan.num_decodes, plan.sight.present.shape[1], device)
        for _, unused, *_ in waiting:
            unused.let_go()
        waiting[:] = [(step, on_device, fake_sampler, fake_batch)]
        for name, mine, theirs in (
            ("ids", fake_batch.input_ids, batch.input_ids),
            ("positions", fake_batch.positions, batch.positions),
            ("K/V slots", fake_slots, slot_mappings),
            ("rows of logits", fake_batch.logits_indices, batch.logits_indices),
            # On a GPU, experts leave out rows that write no K/V. On a CPU nobody marks them.
            ("padding", fake_batch.is_padding, slot_mappings[0, : batch.num_tokens] < 0),
        ):
            if name == "padding" and not self.model_config.is_moe:
                continue
            if not torch.equal(values_of(mine), theirs):
                replay.different.append(f"{name} of step {len(replay.steps)}")
        if self.adapted_rows is not None and not torch.equal(values_of(fake_state.adapted_rows), self.adapted_rows):
            replay.different.append(f"rows with the adapter of step {len(replay.steps)}")
        return metadata

    def sample(self: Any, logits: Tensor, batch: Any, draft_logits: Any = None) -> Any:
        if not waiting:
            return call(self, logits, batch, draft_logits)
        step, on_device, fake_sampler, fake_batch = waiting.pop()
        device = step.sampler = Device()
        fake_logits = DeviceTensor(logits.clone())
        with kernels(device), device_world(device):
            mine = call(fake_sampler, fake_logits, fake_batch)
        theirs = call(self, logits, batch, draft_logits)
        replay.steps.append(step)
        for name in ("sampled_token_ids", "num_sampled", "num_rejected", "num_nans"):
            ours, own = getattr(mine, name), getattr(theirs, name)
            if (ours is None) != (own is None) or (own is not None and not torch.equal(values_of(ours), own)):
                replay.different.append(f"{name} of step {len(replay.steps)}")
        on_device.let_go()
        return theirs

    def mask(self: Any, logits: Tensor, batch: Any, req_ids: list[str], masks: Any) -> None:
        if not waiting:
            return apply(self, logits, batch, req_ids, masks)
        step, _, fake_sampler, fake_batch = waiting[0]
        device = step.masks = Device()
        fake_logits = DeviceTensor(logits.clone())
        with kernels(device), device_world(device):
            apply(fake_sampler.grammar, fake_logits, fake_batch, req_ids, masks)
        apply(self, logits, batch, req_ids, masks)
        if not torch.equal(values_of(fake_logits), logits):
            replay.different.append(f"masked logits of step {len(replay.steps)}")

    apply = GrammarRows.apply_grammar_bitmask
    with (
        mock.patch.object(GrammarRows, "apply_grammar_bitmask", mask),
        mock.patch.object(type(state), "prepare_attn", prepare_attn),
        # Python looks for `__call__` in the class.
        mock.patch.object(type(sampler), "__call__", sample),
    ):
        yield replay
    for _, unused, *_ in waiting:
        unused.let_go()


@contextmanager
def replayed_drafter(llm: Any) -> Iterator[Replay]:
    """Replays the rounds of an engine's drafter (DEER), whose forwards are the engine's own, until the block ends."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    kind = type(runner.speculator)
    replay = Replay()
    propose, run = kind.propose, kind._run
    forwards: list[Tensor] = []

    def noted(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        forwards.append(run(self, *args, **kwargs))
        return forwards[-1]

    def again(self: Any, ids: DeviceTensor, positions: DeviceTensor, *more: Any) -> DeviceTensor:
        assert (ids.dtype, positions.dtype) == (torch.int32, torch.int64)
        assert ids.shape == positions.shape
        return DeviceTensor(forwards.pop(0))

    def both(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        forwards.clear()
        on_device = OnDevice()
        fake, fake_args, fake_kwargs = on_device(self), on_device(args), on_device(kwargs)
        with mock.patch.object(kind, "_run", noted):
            theirs = propose(self, *args, **kwargs)
        device = Device()
        with mock.patch.object(kind, "_run", again), kernels(device), device_world(device):
            mine = propose(fake, *fake_args, **fake_kwargs)
        num_requests = len(theirs)
        replay.steps.append(Step(num_requests, 0, 1, device))
        for name, ours, own in (("drafts", mine, theirs), ("draft_logits", fake.draft_logits, self.draft_logits)):
            if own is not None and not torch.equal(values_of(ours)[:num_requests], own[:num_requests]):
                replay.different.append(f"{name} of round {len(replay.steps)}")
        on_device.let_go()
        return theirs

    with mock.patch.object(kind, "propose", both):
        yield replay
