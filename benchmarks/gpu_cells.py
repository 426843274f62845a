"""What the GPU benchmark measures: engines, what each of them decodes, and in which order.

A cell is one engine in a process of its own. ``benchmarks/gpu_worker.py`` runs cells.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import product
from typing import Any

from gpu_shapes import Model
from pydantic import TypeAdapter
from systems import System

BLOCK_LENGTH = 32
"""Of all models here: that of SDAR-8B-Chat-b32 and of LLaDA2."""
CONCURRENCY = (1, 8, 32, 64, 128)
FIRST_CONCURRENCY = (1, 32)
"""What is measured first of an engine, and all that is measured of those that differ from the model's first in one
option."""
TOKENS_PER_STEP = (1, 3)
DRAFTS = (0, 3, 7)
"""Beside the block; FreeDave's d is one more."""
CHECKED = "tiny-sdar"
"""The bundled model, whose tokens are compared."""
GOLDEN_BLOCK_LENGTHS = (4, 8, 16, 32)
"""Of SDAR's golden cases."""


END = {"end": True}
"""What a cell's process tells last."""


class Graphs(StrEnum):
    """CUDA graphs that run the model."""

    DEFAULT = "default"
    EAGER = "eager"
    PIECEWISE = "piecewise"
    FULL = "full"


class Steps(StrEnum):
    """Whether the tensor functions of a step around the model are compiled (``compile_steps``)."""

    DEFAULT = "default"
    COMPILED = "compiled"
    WRITTEN = "written"


class Scheduling(StrEnum):
    """Whether a step is scheduled while the one before it runs (``async``)."""

    DEFAULT = "default"
    SYNC = "sync"
    ASYNC = "async"


class Dtype(StrEnum):
    """Of weights and activations."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class KVDtype(StrEnum):
    """Of keys and values."""

    AUTO = "auto"
    """That of the weights."""
    FP8 = "fp8"


class Kind(StrEnum):
    """What is done with a cell's engine."""

    SPEED = "speed"
    """Steps are timed at several loads."""
    TOKENS = "tokens"
    """Problems are answered, with and without drafts."""
    GOLDEN = "golden"
    """Golden cases are decoded."""


class Status(StrEnum):
    """What became of a cell."""

    MEASURED = "measured"
    REFUSED = "refused"
    """The engine does not do what the cell asks for, and says so."""
    FAILED = "failed"
    NOT_RUN = "not run"
    """No time was left."""


@dataclass(frozen=True)
class Level:
    """How many requests decode at a time, and how many tokens a denoising step of the policy ``static`` unmasks."""

    concurrency: int
    tokens_per_step: int


@dataclass(frozen=True)
class Cell:
    """One engine.

    Attributes:
        model: a `Model`, or ``CHECKED``, or the golden cases' family.
        drafts: most drafts of a request beside the block.
        levels: of ``Kind.SPEED``, in the order in which they are measured.
    """

    model: str
    kind: Kind = Kind.SPEED
    system: System = System.DLLM
    dtype: Dtype = Dtype.BFLOAT16
    kv_dtype: KVDtype = KVDtype.AUTO
    drafts: int = 0
    graphs: Graphs = Graphs.DEFAULT
    scheduling: Scheduling = Scheduling.DEFAULT
    steps: Steps = Steps.DEFAULT
    block_length: int = BLOCK_LENGTH
    levels: tuple[Level, ...] = ()

    @property
    def variant(self) -> str:
        """What sets the cell apart from the others of its model."""
        if self.system == System.AR:
            return "autoregressive"
        parts = [
            "" if self.dtype == Dtype.BFLOAT16 else self.dtype,
            "" if self.kv_dtype == KVDtype.AUTO else f"K/V {self.kv_dtype}",
            f"{self.drafts} drafts" if self.drafts else "",
            "" if self.graphs == Graphs.DEFAULT else self.graphs if self.is_eager else f"{self.graphs} graphs",
            "" if self.scheduling == Scheduling.DEFAULT else self.scheduling,
            "" if self.steps == Steps.DEFAULT else f"steps {self.steps}",
        ]
        return ", ".join(filter(None, parts)) or "diffusion"

    @property
    def name(self) -> str:
        """For people."""
        golden = f", blocks of {self.block_length}" if self.kind == Kind.GOLDEN else ""
        return f"{self.model}: {self.variant if self.kind == Kind.SPEED else self.kind + ', ' + self.variant}{golden}"

    @property
    def is_eager(self) -> bool:
        """No CUDA graphs, no ``torch.compile``."""
        return self.graphs == Graphs.EAGER


@dataclass(frozen=True)
class Job:
    """A cell, and what its process must know to run it.

    Attributes:
        checkpoint: a folder.
        prompt_tokens: of a request whose steps are timed, a multiple of the block length.
        steps: timed at least.
        requests: problems of ``Kind.TOKENS``.
        dummy: the checkpoint has no weights.
        kv_bytes: of the engine's K/V cache on a GPU that it shares; 0: as much as vLLM takes.
        lock: a file that engines lock which share a GPU; empty: this one is alone.
    """

    cell: Cell
    checkpoint: str
    prompt_tokens: int
    steps: int
    requests: int
    dummy: bool
    kv_bytes: int = 0
    lock: str = ""

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Job":
        """The inverse of :meth:`to_json`."""
        return TypeAdapter(cls).validate_json(line)


@dataclass(frozen=True)
class Selection:
    """What of the plan is asked for. Empty: everything of the plan.

    Where any of ``drafts``, ``graphs``, ``scheduling``, ``steps``, ``dtypes`` and ``kv_dtypes`` is given, all
    combinations of the given values are measured, and nothing else of the diffusion models.
    """

    models: Sequence[Model] = ()
    kinds: Sequence[Kind] = ()
    concurrency: Sequence[int] = ()
    tokens_per_step: Sequence[int] = ()
    drafts: Sequence[int] = ()
    graphs: Sequence[Graphs] = ()
    scheduling: Sequence[Scheduling] = ()
    steps: Sequence[Steps] = ()
    dtypes: Sequence[Dtype] = ()
    kv_dtypes: Sequence[KVDtype] = ()

    @property
    def combines(self) -> bool:
        """Whether the engines are those that the command line combines."""
        return any((self.drafts, self.graphs, self.scheduling, self.steps, self.dtypes, self.kv_dtypes))


@dataclass(frozen=True)
class Scale:
    """How much is measured of every engine."""

    concurrency: tuple[int, ...]
    first_concurrency: tuple[int, ...]
    tokens_per_step: tuple[int, ...]
    block_length: int
    prompt_tokens: int
    steps: int
    requests: int
    graphs: Graphs
    """Of engines that are not about graphs."""


FULL_SCALE = Scale(CONCURRENCY, FIRST_CONCURRENCY, TOKENS_PER_STEP, BLOCK_LENGTH, 512, 20, 32, Graphs.DEFAULT)
QUICK_SCALE = Scale((1, 2), (1, 2), TOKENS_PER_STEP, 8, 32, 6, 4, Graphs.DEFAULT)


def make_plan(selection: Selection, scale: Scale, *, quick: bool, is_gpu: bool) -> list[Cell]:
    """The cells that are asked for, the most important ones first."""
    if not is_gpu:
        # Compiling takes a CPU longer than all that is measured there.
        scale = replace(scale, graphs=Graphs.EAGER)
    if selection.combines:
        cells = combined(selection, scale, selection.models or Model)
    elif quick:
        cells = quickly(selection, scale, selection.models or [Model.SDAR_8B], is_gpu=is_gpu)
    else:
        cells = thoroughly(selection, scale, selection.models or [*Model])
    return [cell for cell in cells if not selection.kinds or cell.kind in selection.kinds]


def combined(selection: Selection, scale: Scale, models: Iterable[Model]) -> Iterator[Cell]:
    """All combinations of the given options, then autoregression of the same shapes."""
    dtypes = selection.dtypes or [Dtype.BFLOAT16]
    for model in models:
        for dtype, kv_dtype, drafts, graphs, scheduling, steps in product(
            dtypes,
            selection.kv_dtypes or [KVDtype.AUTO],
            selection.drafts or [0],
            selection.graphs or [scale.graphs],
            selection.scheduling or [Scheduling.DEFAULT],
            selection.steps or [Steps.DEFAULT],
        ):
            yield replace(
                diffusion(model, selection, scale),
                dtype=dtype,
                kv_dtype=kv_dtype,
                drafts=drafts,
                graphs=graphs,
                scheduling=scheduling,
                steps=steps,
            )
        for dtype in dtypes:
            yield autoregressive(model, dtype, selection, scale)


def quickly(selection: Selection, scale: Scale, models: Iterable[Model], *, is_gpu: bool) -> Iterator[Cell]:
    """Something of everything."""
    for model in models:
        one = diffusion(model, selection, scale)
        yield one
        yield autoregressive(model, Dtype.BFLOAT16, selection, scale)
        if is_gpu:
            # On a CPU, vLLM schedules synchronously and has no graphs.
            yield replace(one, drafts=DRAFTS[1], scheduling=Scheduling.ASYNC)
            yield replace(one, graphs=Graphs.FULL)
    yield from checks(Dtype.FLOAT32, [Graphs.EAGER], Scheduling.SYNC)


def thoroughly(selection: Selection, scale: Scale, models: Sequence[Model]) -> Iterator[Cell]:
    """The first model by itself, then what can be wrong, the other models, and one option after the other."""
    first, *others = models
    fewer = replace(
        selection,
        concurrency=selection.concurrency or scale.first_concurrency,
        tokens_per_step=selection.tokens_per_step[:1] or scale.tokens_per_step[:1],
    )
    yield diffusion(first, selection, scale)
    yield autoregressive(first, Dtype.BFLOAT16, selection, scale)
    one = diffusion(first, fewer, scale)
    yield from checks(Dtype.FLOAT32, [Graphs.EAGER, Graphs.DEFAULT], Scheduling.SYNC)
    yield from checks(Dtype.FLOAT32, [Graphs.DEFAULT], Scheduling.ASYNC)
    yield golden(GOLDEN_BLOCK_LENGTHS[0])
    yield replace(one, drafts=DRAFTS[-1])
    for model in others:
        yield diffusion(model, selection, scale)
        yield autoregressive(model, Dtype.BFLOAT16, selection, scale)
    yield replace(one, graphs=Graphs.FULL)
    yield replace(one, graphs=Graphs.PIECEWISE)
    yield replace(one, steps=Steps.WRITTEN)
    yield replace(one, scheduling=Scheduling.SYNC)
    yield replace(one, scheduling=Scheduling.ASYNC)
    yield replace(one, kv_dtype=KVDtype.FP8)
    yield replace(one, drafts=DRAFTS[1])
    yield replace(one, graphs=Graphs.EAGER)
    yield replace(one, dtype=Dtype.FLOAT16)
    yield from checks(Dtype.BFLOAT16, [Graphs.EAGER, Graphs.DEFAULT, Graphs.FULL, Graphs.PIECEWISE], Scheduling.SYNC)
    yield from checks(Dtype.BFLOAT16, [Graphs.DEFAULT], Scheduling.ASYNC)
    yield from map(golden, GOLDEN_BLOCK_LENGTHS[1:])
    for model in others:
        yield replace(diffusion(model, fewer, scale), drafts=DRAFTS[-1])


def make_levels(asked: Selection, scale: Scale) -> tuple[Level, ...]:
    """The levels of an engine: those of the first concurrencies before the others."""
    concurrency = asked.concurrency or scale.concurrency
    ordered = sorted(concurrency, key=lambda number: number not in scale.first_concurrency)
    tokens_per_step = asked.tokens_per_step or scale.tokens_per_step
    return tuple(Level(number, tokens) for number in ordered for tokens in tokens_per_step)


def diffusion(model: Model, selection: Selection, scale: Scale) -> Cell:
    """The plugin, with its defaults."""
    return Cell(model, graphs=scale.graphs, block_length=scale.block_length, levels=make_levels(selection, scale))


def autoregressive(model: Model, dtype: Dtype, selection: Selection, scale: Scale) -> Cell:
    """vLLM without the plugin, which decodes the same shape a token at a time."""
    levels = tuple(dict.fromkeys(Level(level.concurrency, 1) for level in make_levels(selection, scale)))
    return Cell(model, system=System.AR, dtype=dtype, graphs=scale.graphs, levels=levels)


def checks(dtype: Dtype, graphs: Iterable[Graphs], scheduling: Scheduling) -> Iterator[Cell]:
    """Engines whose tokens are compared. The others of a data type are compared with the first."""
    drafts = DRAFTS[-1]
    for each in graphs:
        yield Cell(
            CHECKED, Kind.TOKENS, dtype=dtype, drafts=drafts, graphs=each, scheduling=scheduling, block_length=16
        )


def golden(block_length: int) -> Cell:
    """SDAR's golden cases of a block length, which are float32."""
    return Cell(
        "sdar",
        Kind.GOLDEN,
        dtype=Dtype.FLOAT32,
        graphs=Graphs.EAGER,
        scheduling=Scheduling.SYNC,
        block_length=block_length,
    )


@dataclass
class Outcome:
    """What became of a cell.

    Attributes:
        message: why it was refused, failed or not run.
        facts: about the engine.
        results: of each level, set of drafts or golden run, as far as the process got.
        tail: the last lines that a failed process wrote.
    """

    cell: Cell
    status: Status
    message: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)
