"""The probes of the GPU benchmark, on fakes: parts of steps, launches, what a device is capable of."""

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import gpu_probe
from gpu_probe import (
    HostClock,
    Launches,
    Parts,
    Stopwatch,
    costliest_functions,
    count_launches,
    profiled,
    union_length,
    watched,
)


class Ticks:
    """A clock whose moments are what it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def wait(self) -> None:
        return None

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class Runner:
    """A model runner whose parts take 1 (plan), 10 (model), 2 (logits) and 3 (the rest of the sampler) seconds."""

    def __init__(self, clock: Ticks, graph: str) -> None:
        self.clock = clock
        self.model_state = SimpleNamespace(prepare_attn=lambda batch: self.take(1))
        self.model = SimpleNamespace(forward=lambda: self.take(10), compute_logits=lambda hidden: self.take(2))
        self.cudagraph_manager = SimpleNamespace(
            run_pw_graph=lambda: self.model.forward(), run_fullgraph=lambda: self.take(10)
        )
        self.call: Callable[[], Any] = {
            "none": lambda: self.model.forward(),
            "piecewise": lambda: self.cudagraph_manager.run_pw_graph(),
            "full": lambda: self.cudagraph_manager.run_fullgraph(),
        }[graph]

    def take(self, seconds: float) -> None:
        self.clock.now += seconds

    def sample(self) -> None:
        self.take(3)
        self.model.compute_logits(torch.zeros(5, 1))

    def step(self) -> None:
        self.take(100)
        self.model_state.prepare_attn(SimpleNamespace(num_tokens=7))
        self.call()
        self.sample()

    def two_steps(self) -> None:
        self.step()
        self.step()


def test_functions_are_told_by_what_they_take_of_a_step_by_themselves() -> None:
    def work() -> int:
        return sum(index * index for index in range(20_000))

    def four_steps() -> None:
        for _ in range(4):
            work()

    functions = costliest_functions(four_steps, 4)
    assert functions == sorted(functions, key=lambda cost: cost.own_ms, reverse=True)
    costs = {cost.function.rsplit("(", 1)[1].rstrip(")"): cost for cost in functions}
    assert (costs["work"].calls, costs["four_steps"].calls) == (1.0, 0.25)
    assert costs["four_steps"].whole_ms >= costs["work"].whole_ms > costs["work"].own_ms
    assert costs["<genexpr>"].own_ms > costs["work"].own_ms


@pytest.mark.parametrize("graph", ["none", "piecewise", "full"])
def test_parts_of_a_step_are_told_apart_whatever_runs_the_model(graph: str) -> None:
    clock = Ticks()
    runner, stopwatch = Runner(clock, graph), Stopwatch(clock)
    with watched(runner, stopwatch.around) as steps:
        for _ in range(3):
            runner.step()
    assert stopwatch.parts() == [Parts(total=116, plan=1, forward=12, sampler=3)] * 2
    assert {(step.rows, step.logits_rows, step.graph) for step in steps} == {(7, 5, graph)}


def test_hooks_are_gone_afterwards() -> None:
    runner = Runner(Ticks(), "full")
    with watched(runner, lambda part: nullcontext()) as steps:
        runner.step()
    runner.step()
    assert len(steps) == 1


def test_cuda_events_tell_the_devices_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([5.0, 7.5])

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(moments)

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = gpu_probe.clock_of(torch.device("cuda"))
    begin, end = clock.mark(), clock.mark()
    # PyTorch counts milliseconds.
    assert clock.seconds(begin, end) == pytest.approx(2.5e-3)
    assert isinstance(gpu_probe.clock_of(torch.device("cpu")), HostClock)


def event(name: str, begin: float, end: float, device: Any = DeviceType.CPU, annotation: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=device,
        is_user_annotation=annotation,
        time_range=SimpleNamespace(start=begin, end=end),
    )


def test_launches_are_counted_by_part_and_annotations_are_none() -> None:
    events = [
        event("dllm plan", 0, 10, annotation=True),
        event("aten::add", 1, 3),
        event("cudaLaunchKernel", 2, 3),
        event("cudaMemcpyAsync", 5, 6),
        event("dllm model", 20, 30, annotation=True),
        event("cudaGraphLaunch", 21, 22),
        event("dllm sample", 40, 60, annotation=True),
        event("dllm logits", 41, 45, annotation=True),
        event("cuLaunchKernelEx", 42, 43),
        event("cudaEventRecord", 50, 51),
        event("cudaLaunchKernel", 52, 53),
        event("cudaMemsetAsync", 90, 91),
        event("dllm plan", 100, 110, DeviceType.CUDA, annotation=True),
        event("add_kernel", 1000, 3000, DeviceType.CUDA),
        event("Memcpy HtoD", 2000, 4000, DeviceType.CUDA),
        event("gemm", 6000, 7000, DeviceType.CUDA),
        event("gemm", 8000, 8000, DeviceType.CUDA),
    ]
    assert count_launches(events, 2) == Launches(kernels=2, calls=3, plan_calls=1, sampler_calls=0.5, busy_ms=2.0)


def test_overlapping_kernels_keep_the_device_busy_once() -> None:
    assert union_length([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_the_profiler_tells_parts_and_device_as_the_count_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own profiler, which finds no launches on a CPU: here sorting stands for a launch."""
    synchronized = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(True))
    monkeypatch.setattr(gpu_probe, "LAUNCHING", ("aten::sort",))
    runner = Runner(Ticks(), "none")
    runner.model_state.prepare_attn = lambda batch: torch.arange(9).sort()
    runner.model.compute_logits = lambda hidden: hidden.sort()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA is not available")
        launches = profiled(runner, runner.two_steps, 2)
    assert (launches.kernels, launches.busy_ms) == (0, 0)
    assert launches.plan_calls >= 1
    assert launches.sampler_calls == 0
    assert launches.calls >= 2
    assert len(synchronized) == 2


def test_bandwidth_and_arithmetic_are_those_of_the_fastest_timed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, durations = Ticks(), []

    def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # The runs before those that count are the fastest, and the last one of all is the slowest.
            durations.append(seconds)
            clock.now += seconds if len(durations) > 3 else 0.0
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(gpu_probe, "clock_of", lambda device: clock)
    monkeypatch.setattr(torch.Tensor, "copy_", taking(4.0, torch.Tensor.copy_))
    monkeypatch.setattr(torch, "sum", taking(1.0, torch.sum))
    monkeypatch.setattr(torch, "mm", taking(2.0, torch.mm))
    card = gpu_probe.measure_card(torch.device("cpu"), torch.float32, num_bytes=4000, size=10)
    # A copy reads and writes: 8000 bytes in 4 seconds, against 4000 read in 1.
    assert card.bytes_per_second == 4000
    assert card.flops_per_second == 2 * 10**3 / 2.0


def test_the_device_is_measured_for_real() -> None:
    card = gpu_probe.measure_card(torch.device("cpu"), torch.float32, num_bytes=1 << 22, size=64)
    assert 1e8 < card.bytes_per_second < 1e13
    assert 1e7 < card.flops_per_second < 1e15
