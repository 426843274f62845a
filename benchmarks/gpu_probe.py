"""How benchmarks look into steps and at the device: parts of a step, launches, bandwidth.

The parts are told by hooks on vLLM's Model Runner V2, which diffusion and autoregressive models share. On a GPU a part
lies between two CUDA events, which wait for nothing, so the measured steps overlap with the host as any others do.
"""

import cProfile
import pstats
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import torch
from torch.autograd import DeviceType

if TYPE_CHECKING:
    from vllm import LLM

ANNOTATION = "dllm "
"""What the names of profiled parts begin with."""
LAUNCHING = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch", "cudaMemcpy", "cuMemcpy", "cudaMemset")
"""What the names of those CUDA calls begin with that give the device work."""

REPEATS = 10
"""Timed runs of a copy, a read or a product, of which the fastest counts."""
UNTIMED_REPEATS = 3


class Clock(Protocol):
    """Moments, and the seconds between them."""

    def mark(self) -> Any:
        """This moment."""

    def wait(self) -> None:
        """Until all marked moments have passed."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to a later one."""


class HostClock:
    """The host's own clock."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        return None

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock:
    """Moments of the current CUDA stream: when the device gets there, not when the host does."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock that what runs on a device is timed with."""
    return CudaClock() if device.type == "cuda" else HostClock()


# Parts of a step.

Around = Callable[[str], AbstractContextManager[Any]]
"""What surrounds each call that belongs to a part."""

GRAPH_OF_CALL = {"run_fullgraph": "full", "run_pw_graph": "piecewise", "forward": "none"}
"""CUDA graphs by the call that a step makes to run the model."""


@dataclass
class StepFacts:
    """What one step was.

    Attributes:
        rows: of the model's forward, without padding.
        logits_rows: that went on to logits.
        graph: CUDA graphs that ran the model: ``full``, ``piecewise`` or ``none``.
    """

    rows: int = 0
    logits_rows: int = 0
    graph: str = ""


def runner_of(llm: "LLM") -> Any:
    """vLLM's model runner, of an engine in this process."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.worker.model_runner


@contextmanager
def watched(runner: Any, around: Around) -> Iterator[list[StepFacts]]:
    """Surround the parts of every step until the context ends; yields what each step was.

    Parts are ``plan`` (``prepare_attn``: rows and attention metadata), ``model``, ``logits`` and ``sample``, which
    contains ``logits``.

    Args:
        runner: vLLM's Model Runner V2, in this process.
    """
    steps: list[StepFacts] = []
    in_model = False

    def plan(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        steps.append(StepFacts(rows=args[0].num_tokens))
        with around("plan"):
            return original(*args, **kwargs)

    def model(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal in_model
        if in_model:  # piecewise graphs are run by the model's own forward
            return original(*args, **kwargs)
        steps[-1].graph = GRAPH_OF_CALL[name]
        in_model = True
        try:
            with around("model"):
                return original(*args, **kwargs)
        finally:
            in_model = False

    def logits(original: Callable[..., Any], hidden_states: torch.Tensor) -> Any:
        steps[-1].logits_rows = len(hidden_states)
        with around("logits"):
            return original(hidden_states)

    def sample(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with around("sample"):
            return original(*args, **kwargs)

    def hook(owner: Any, name: str, wrapper: Callable[..., Any], *bound: Any) -> None:
        original = getattr(owner, name)
        stack.enter_context(
            mock.patch.object(owner, name, lambda *args, **kwargs: wrapper(*bound, original, *args, **kwargs))
        )

    with ExitStack() as stack:
        hook(runner.model_state, "prepare_attn", plan)
        hook(runner.model, "forward", model, "forward")
        for name in ("run_pw_graph", "run_fullgraph"):
            hook(runner.cudagraph_manager, name, model, name)
        hook(runner.model, "compute_logits", logits)
        hook(runner, "sample", sample)
        yield steps


@dataclass(frozen=True)
class Parts:
    """Seconds of one step; ``total`` ends where the next step's row plan begins."""

    total: float
    plan: float
    forward: float
    sampler: float

    @classmethod
    def median(cls, steps: Sequence["Parts"]) -> "Parts":
        """Each part by itself."""
        names = ("total", "plan", "forward", "sampler")
        return cls(**{name: median(getattr(step, name) for step in steps) for name in names})


@dataclass
class Stopwatch:
    """Marks where the parts of steps begin and end; ``around`` is for `watched`."""

    clock: Clock
    spans: list[dict[str, tuple[Any, Any]]] = field(default_factory=list)

    @contextmanager
    def around(self, part: str) -> Iterator[None]:
        """Mark the beginning and the end of a part."""
        if part == "plan":
            self.spans.append({})
        begin = self.clock.mark()
        yield
        self.spans[-1][part] = (begin, self.clock.mark())

    def parts(self) -> list[Parts]:
        """Of every step but the last one, whose end nobody marked."""
        self.clock.wait()

        def seconds(spans: dict[str, tuple[Any, Any]], part: str) -> float:
            return self.clock.seconds(*spans[part]) if part in spans else 0.0

        return [
            Parts(
                total=self.clock.seconds(spans["plan"][0], following["plan"][0]),
                plan=seconds(spans, "plan"),
                forward=seconds(spans, "model") + seconds(spans, "logits"),
                sampler=seconds(spans, "sample") - seconds(spans, "logits"),
            )
            for spans, following in zip(self.spans, self.spans[1:], strict=False)
        ]


# The host.


@dataclass(frozen=True)
class FunctionCost:
    """What a function takes of the host in a step, as ``cProfile`` sees it, which slows down what is written in Python.

    Attributes:
        function: file, line and name.
        own_ms, whole_ms: without and with the functions that it calls.
    """

    function: str
    calls: float
    own_ms: float
    whole_ms: float


MOST_FUNCTIONS = 80


def costliest_functions(run: Callable[[], None], num_steps: int) -> list[FunctionCost]:
    """Of what ``run`` runs, which is ``num_steps`` steps; those first that take most without what they call."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    found: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    costs = [
        FunctionCost(f"{file}:{line}({name})", calls / num_steps, own * 1e3 / num_steps, whole * 1e3 / num_steps)
        for (file, line, name), (_, calls, own, whole, _) in found.items()
    ]
    return sorted(costs, key=lambda cost: -cost.own_ms)[:MOST_FUNCTIONS]


# Launches.


class ProfilerEvent(Protocol):
    """What is read of ``torch.autograd.profiler_util.FunctionEvent``; times in microseconds."""

    name: str
    device_type: Any
    is_user_annotation: bool | None
    time_range: Any


@dataclass(frozen=True)
class Launches:
    """Per step.

    Attributes:
        kernels: kernels, copies and fills on the device.
        calls: calls of the host that start some of these; a graph of many kernels is one call.
        plan_calls, sampler_calls: those of the row plan, and of the sampler without the logits.
        busy_ms: time in which the device ran any of these.
    """

    kernels: float
    calls: float
    plan_calls: float
    sampler_calls: float
    busy_ms: float


def count_launches(events: Iterable[ProfilerEvent], num_steps: int) -> Launches:
    """Count what ``num_steps`` profiled steps launched; their parts are annotated (`profiled`)."""
    device: list[tuple[float, float]] = []
    calls: list[float] = []
    parts: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.device_type == DeviceType.CUDA:
            # Annotations have a shadow on the device.
            if not event.is_user_annotation:
                device.append(span)
        elif event.name.startswith(ANNOTATION):
            parts.setdefault(event.name.removeprefix(ANNOTATION), []).append(span)
        elif event.name.startswith(LAUNCHING):
            calls.append(span[0])

    def calls_in(part: str) -> int:
        return sum(begin <= call <= end for begin, end in parts.get(part, []) for call in calls)

    return Launches(
        kernels=len(device) / num_steps,
        calls=len(calls) / num_steps,
        plan_calls=calls_in("plan") / num_steps,
        sampler_calls=(calls_in("sample") - calls_in("logits")) / num_steps,
        busy_ms=union_length(device) / 1e3 / num_steps,
    )


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the line the spans cover together."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return covered


def profiled(runner: Any, run: Callable[[], None], num_steps: int) -> Launches:
    """Profile what ``run`` runs, which is ``num_steps`` steps, on a CUDA device."""
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.cuda.synchronize()
    with (
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler,
        watched(runner, lambda part: record_function(ANNOTATION + part)),
    ):
        run()
        torch.cuda.synchronize()
    return count_launches(profiler.events(), num_steps)


# The device.


@dataclass(frozen=True)
class Card:
    """The device, measured.

    Attributes:
        memory_bytes: of the device; 0 for a CPU.
        bytes_per_second: the faster of a large copy (read and written) and a large read.
        flops_per_second: of a large product of matrices in the data type that is measured.
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float


def measure_card(device: torch.device, dtype: torch.dtype, *, num_bytes: int, size: int) -> Card:
    """Measure a device.

    Args:
        num_bytes: of what is copied and read; far more than any cache has.
        size: rows and columns of the matrices.
    """
    clock = clock_of(device)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copying = fastest(lambda: target.copy_(source), clock)
    reading = fastest(lambda: torch.sum(source), clock)
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    multiplying = fastest(lambda: torch.mm(left, right), clock)
    name, memory = "CPU", 0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    return Card(
        name=name,
        memory_bytes=memory,
        bytes_per_second=max(2 * source.nbytes / copying, source.nbytes / reading),
        flops_per_second=2 * size**3 / multiplying,
    )


def fastest(function: Callable[[], Any], clock: Clock) -> float:
    """Seconds of the fastest of some runs, after some that do not count."""
    marks = []
    for repeat in range(UNTIMED_REPEATS + REPEATS):
        begin = clock.mark()
        function()
        if repeat >= UNTIMED_REPEATS:
            marks.append((begin, clock.mark()))
    clock.wait()
    return min(clock.seconds(begin, end) for begin, end in marks)
