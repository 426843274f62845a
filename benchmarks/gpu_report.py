"""What the GPU benchmark makes of its measurements: limits, ratios, equal tokens, targets, tables and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_cells import Cell, Dtype, Kind, KVDtype, Outcome, Status
from gpu_probe import Card
from gpu_shapes import Model, Shape
from gpu_steps import LevelResult, join
from sheet import Sheet, Target, times
from systems import System

BYTES = {Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2, Dtype.FLOAT32: 4}
BANDWIDTH_SHARE = 0.7
BUSY_CONCURRENCY = 64
SGLANG_TOKENS_PER_SECOND = 1750
"""Published for SDAR-8B on an H100 with 64 requests at a time."""
AUTOREGRESSIVE = "autoregressive"
PARTS = ("plan", "forward", "sampler", "rest")


@dataclass(frozen=True)
class Row:
    """One level of one engine. Times in milliseconds; None: not known.

    Attributes:
        variant: options of the engine that are not the model's first.
        plan_ms, forward_ms, sampler_ms: the parts of a step, logits being part of the forward.
        rest_ms: of a step, beside these parts: scheduling, preparation, output, waiting.
        host_ms: the same parts on the host's clock, by their names; empty: not known.
        kernels, calls, plan_calls, sampler_calls: launches per step, on the device and by the host.
        busy_ms: time of a step in which the device worked.
        limit_ms: what the device's bandwidth allows for the weights and K/V that a forward reads.
        arithmetic_ms: what its matrix units allow for the forward's products.
        bandwidth_share: ``limit_ms`` over the time of the forward.
        step_vs_ar, speed_vs_ar: over autoregression of the same shape at the same concurrency.
    """

    model: str
    variant: str
    dtype: str
    concurrency: int
    tokens_per_step: int
    rows: int
    graph: str
    step_ms: float
    tokens_per_forward: float
    tokens_per_second: float
    plan_ms: float | None
    forward_ms: float | None
    sampler_ms: float | None
    rest_ms: float | None
    host_ms: dict[str, float]
    kernels: float | None
    calls: float | None
    plan_calls: float | None
    sampler_calls: float | None
    busy_ms: float | None
    limit_ms: float | None
    arithmetic_ms: float | None
    bandwidth_share: float | None
    step_vs_ar: float | None
    speed_vs_ar: float | None
    samples: list[float]
    functions: list[dict[str, Any]]

    def share(self, part: str) -> float | None:
        """Of a step: ``plan``, ``forward``, ``sampler`` or ``rest``."""
        value: float | None = getattr(self, f"{part}_ms")
        return None if value is None else value / sum(getattr(self, f"{each}_ms") for each in PARTS)


@dataclass(frozen=True)
class Equality:
    """Requests with all tokens equal, of those compared with the requests of another engine or of golden data."""

    model: str
    variant: str
    drafts: int
    against: str
    equal: int
    compared: int


def levels_of(outcomes: Sequence[Outcome]) -> list[tuple[Cell, LevelResult]]:
    """Every level that was measured, those of cells that failed later too."""
    return [
        (outcome.cell, result)
        for outcome in outcomes
        if outcome.cell.kind == Kind.SPEED
        for result in join(outcome.results)
    ]


def make_rows(outcomes: Sequence[Outcome], shapes: dict[Model, Shape], card: Card | None) -> list[Row]:
    """Compare the levels with the device's limits and with autoregression."""
    levels = levels_of(outcomes)
    autoregressive = {
        (cell.model, cell.dtype, result.concurrency): result for cell, result in levels if cell.system == System.AR
    }
    return [
        make_row(
            cell,
            result,
            shapes[Model(cell.model)],
            card,
            autoregressive.get((cell.model, cell.dtype, result.concurrency)),
        )
        for cell, result in levels
    ]


def make_row(cell: Cell, result: LevelResult, shape: Shape, card: Card | None, ar: LevelResult | None) -> Row:
    """One level; ``ar``: the same concurrency autoregressively."""
    parts, host, launches = _with_rest(result.parts), _with_rest(result.host_parts), result.launches or {}
    limit = arithmetic = None
    if card is not None:
        limit, arithmetic = limits(cell, result, shape, card)
    if cell.system == System.AR:
        ar = None
    return Row(
        model=cell.model,
        variant=cell.variant,
        dtype=cell.dtype,
        concurrency=result.concurrency,
        tokens_per_step=result.tokens_per_step,
        rows=result.rows,
        graph=result.graph,
        step_ms=result.step_ms,
        tokens_per_forward=result.tokens_per_forward,
        tokens_per_second=result.tokens_per_second,
        plan_ms=parts.get("plan"),
        forward_ms=parts.get("forward"),
        sampler_ms=parts.get("sampler"),
        rest_ms=parts.get("rest"),
        host_ms={part: host[part] for part in PARTS if host},
        kernels=launches.get("kernels"),
        calls=launches.get("calls"),
        plan_calls=launches.get("plan_calls"),
        sampler_calls=launches.get("sampler_calls"),
        busy_ms=launches.get("busy_ms"),
        limit_ms=limit,
        arithmetic_ms=arithmetic,
        bandwidth_share=limit / parts["forward"] if limit is not None and parts else None,
        step_vs_ar=result.step_ms / ar.step_ms if ar else None,
        speed_vs_ar=result.tokens_per_second / ar.tokens_per_second if ar else None,
        samples=result.samples,
        functions=result.functions,
    )


def _with_rest(parts: dict[str, float] | None) -> dict[str, float]:
    """The parts of a step, and what is left of it."""
    if not parts:
        return {}
    rest = parts["total"] - parts["plan"] - parts["forward"] - parts["sampler"]
    return {**parts, "rest": max(rest, 0.0)}


def limits(cell: Cell, result: LevelResult, shape: Shape, card: Card) -> tuple[float, float]:
    """Milliseconds that a forward takes at least: for what it reads, and for what it multiplies.

    Rows that are not known are one per request. K/V of a request is read once, however many drafts see it.
    """
    rows = result.rows or result.concurrency
    kv_bytes = 1 if cell.kv_dtype == KVDtype.FP8 else BYTES[cell.dtype]
    read = shape.parameters.read(rows) * BYTES[cell.dtype]
    read += result.concurrency * result.context * shape.kv_entries * kv_bytes
    flops = 2 * shape.parameters.multiply_adds(rows, result.logits_rows or result.concurrency)
    return read / card.bytes_per_second * 1e3, flops / card.flops_per_second * 1e3


def make_equalities(outcomes: Sequence[Outcome]) -> list[Equality]:
    """Tokens of every engine beside those of the first one of the data type without drafts, and golden cases."""
    references: dict[str, tuple[Cell, list[list[int]]]] = {}
    found = []
    for cell, result in ((outcome.cell, result) for outcome in outcomes for result in outcome.results):
        if cell.kind == Kind.GOLDEN:
            variant = f"{_decoding(cell)}, blocks of {cell.block_length}"
            found.append(Equality(cell.model, variant, 0, "golden cases", result["equal"], result["compared"]))
        elif cell.kind == Kind.TOKENS and cell.dtype not in references:
            references[cell.dtype] = cell, result["tokens"]
        elif cell.kind == Kind.TOKENS:
            reference, expected = references[cell.dtype]
            against = "itself without drafts" if reference == cell else _decoding(reference)
            equal = sum(map(list.__eq__, result["tokens"], expected))
            found.append(Equality(cell.model, _decoding(cell), result["drafts"], against, equal, len(expected)))
    return found


def _decoding(cell: Cell) -> str:
    graphs = cell.graphs if cell.is_eager else f"{cell.graphs} graphs"
    return f"{cell.dtype}, {graphs}, {cell.scheduling}"


def first_engines(rows: Sequence[Row]) -> list[Row]:
    """Rows of the first diffusion engine of every model."""
    first: dict[str, str] = {}
    for row in rows:
        if row.variant != AUTOREGRESSIVE:
            first.setdefault(row.model, row.variant)
    return [row for row in rows if first.get(row.model) == row.variant]


def check_targets(rows: Sequence[Row], equalities: Sequence[Equality]) -> list[Target]:
    """The targets that these measurements can tell something about. Rounding may decide tokens in 16 bits."""
    targets = []
    for row in first_engines(rows):
        where = f"{row.model}, {row.variant}, {row.concurrency} concurrent, {row.tokens_per_step} tokens per step"
        if row.model == Model.SDAR_8B and row.concurrency == 1 and (value := row.bandwidth_share) is not None:
            name = "bandwidth limit over forward, at least"
            targets.append(Target(name, where, value, BANDWIDTH_SHARE, value >= BANDWIDTH_SHARE))
        if row.tokens_per_step != 3 or row.concurrency > BUSY_CONCURRENCY:
            continue
        if (value := row.speed_vs_ar) is not None:
            targets.append(Target("tokens/s over autoregression, more than", where, value, 1.0, value > 1.0))
        if row.model == Model.SDAR_8B and row.concurrency == BUSY_CONCURRENCY:
            name, bound = "tokens/s, more than SGLang's published", SGLANG_TOKENS_PER_SECOND
            targets.append(Target(name, where, row.tokens_per_second, bound, row.tokens_per_second > bound))
    for each in equalities:
        if Dtype.FLOAT32 in each.variant:
            where = f"{each.model}, {each.variant}, {each.drafts} drafts, against {each.against}"
            share = each.equal / each.compared
            targets.append(Target("requests with equal tokens, float32", where, share, 1.0, share == 1.0))
    return targets


def make_step_sheet(rows: Sequence[Row]) -> Sheet:
    """What steps take, and their parts."""
    return Sheet(
        "Steps (tokens: unmasked per step; rows: of the forward; graphs: CUDA graphs that ran the model)",
        ["model", "engine", "concurrent", "tokens", "rows", "graphs", "ms/step", *(f"{part} %" for part in PARTS)],
        [
            [
                *_labels(row),
                str(row.rows or ""),
                row.graph,
                f"{row.step_ms:.2f}",
                *(_percent(row.share(part)) for part in PARTS),
            ]
            for row in rows
        ],
    )


def make_launch_sheet(rows: Sequence[Row]) -> Sheet:
    """What steps launch, and how far their forwards are from what the device allows."""
    return Sheet(
        "Launches of a step, and a forward beside what the device's bandwidth and arithmetic allow",
        [
            "model",
            "engine",
            "concurrent",
            "tokens",
            "kernels",
            "calls",
            "plan + sampler",
            "idle %",
            "forward ms",
            "bandwidth ms",
            "share",
            "arithmetic ms",
        ],
        [
            [
                *_labels(row),
                _number(row.kernels),
                _number(row.calls),
                "" if row.plan_calls is None else f"{row.plan_calls:.0f} + {row.sampler_calls:.0f}",
                _percent(None if row.busy_ms is None else max(1 - row.busy_ms / row.step_ms, 0.0)),
                _number(row.forward_ms, 2),
                _number(row.limit_ms, 2),
                _percent(row.bandwidth_share),
                _number(row.arithmetic_ms, 2),
            ]
            for row in rows
        ],
    )


def make_host_sheet(rows: Sequence[Row]) -> Sheet:
    """What the host does in a step."""
    return Sheet(
        "Milliseconds of the host in a step (forward: launching it; rest: scheduling, preparation, output, waiting)",
        ["model", "engine", "concurrent", "tokens", "ms/step", *PARTS],
        [
            [*_labels(row), f"{sum(row.host_ms.values()):.2f}", *(f"{row.host_ms[part]:.2f}" for part in PARTS)]
            for row in rows
            if row.host_ms
        ],
    )


def _labels(row: Row) -> list[str]:
    return [row.model, row.variant, str(row.concurrency), str(row.tokens_per_step)]


def make_speed_sheet(rows: Sequence[Row]) -> Sheet:
    """Tokens per second, and autoregression beside them."""
    return Sheet(
        "Tokens per second",
        ["model", "engine", "concurrent", "tokens", "tokens/forward", "tokens/s", "step vs AR", "tokens/s vs AR"],
        [
            [
                *_labels(row),
                f"{row.tokens_per_forward:.2f}",
                f"{row.tokens_per_second:.0f}",
                times(row.step_vs_ar),
                times(row.speed_vs_ar),
            ]
            for row in rows
        ],
    )


def make_equality_sheet(equalities: Sequence[Equality]) -> Sheet:
    """Requests with equal tokens."""
    return Sheet(
        "Requests with every token equal",
        ["model", "engine", "against", "drafts", "equal"],
        [
            [each.model, each.variant, each.against, str(each.drafts), f"{each.equal}/{each.compared}"]
            for each in equalities
        ],
        num_labels=3,
    )


def make_gap_sheet(outcomes: Sequence[Outcome]) -> Sheet:
    """What was not measured, and why."""
    gaps = [[each.cell.name, each.status, each.message] for each in outcomes if each.status != Status.MEASURED]
    for cell, result in levels_of(outcomes):
        if result.note:
            gaps.append([f"{cell.name}, {result.concurrency} concurrent", "in part", result.note])
    return Sheet("Not measured", ["engine", "status", "why"], gaps, num_labels=3)


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Above: steps of each model's first engine by concurrency, their parts stacked; below: its tokens per second
    beside autoregression. False where there is nothing to draw."""
    diffusion = first_engines(rows)
    models = list(dict.fromkeys(row.model for row in diffusion))
    if not models:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (1 + 4 * len(models), 7)
    figure, axes = pyplot.subplots(2, len(models), figsize=size, squeeze=False, layout="constrained")
    for (above, below), model in zip(axes.T, models, strict=True):
        steps = [row for row in diffusion if row.model == model]
        baseline = [row for row in rows if row.model == model and row.variant == AUTOREGRESSIVE]
        _plot_steps(above, [row for row in steps if row.tokens_per_step == steps[0].tokens_per_step], baseline)
        _plot_speeds(below, steps, baseline)
        above.set_title(f"{model}, {steps[0].variant}")
        above.margins(y=0.5)  # The room of the legend.
        above.legend(fontsize="small", loc="upper left", ncols=2)
        below.legend(fontsize="small")
    axes[0, 0].set_ylabel("ms per step")
    axes[1, 0].set_ylabel("tokens per second")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _plot_steps(axis: Any, steps: Sequence[Row], baseline: Sequence[Row]) -> None:
    places = range(len(steps))
    bottom = [0.0] * len(steps)
    for part in PARTS:
        # Steps whose parts are timed are not the steps that are timed as a whole: their shares count.
        heights = [(row.share(part) or 0.0) * row.step_ms for row in steps]
        axis.bar(places, heights, bottom=bottom, label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    limits = {place: row.limit_ms for place, row in enumerate(steps) if row.limit_ms is not None}
    axis.scatter([*limits], [*limits.values()], marker="_", s=400, color="black", label="bandwidth limit", zorder=3)
    by_concurrency = {row.concurrency: row.step_ms for row in baseline}
    found = [(place, by_concurrency.get(row.concurrency)) for place, row in enumerate(steps)]
    times = {place: time for place, time in found if time is not None}
    axis.scatter([*times], [*times.values()], marker="x", color="black", label=AUTOREGRESSIVE, zorder=3)
    axis.set_xticks(places, [str(row.concurrency) for row in steps])
    axis.set_xlabel("concurrent requests")


def _plot_speeds(axis: Any, steps: Sequence[Row], baseline: Sequence[Row]) -> None:
    lines = {AUTOREGRESSIVE: baseline}
    for tokens in dict.fromkeys(row.tokens_per_step for row in steps):
        lines[f"{tokens} per step"] = [row for row in steps if row.tokens_per_step == tokens]
    for name, rows in lines.items():
        axis.plot([row.concurrency for row in rows], [row.tokens_per_second for row in rows], "o-", label=name)
    numbers = sorted({row.concurrency for rows in lines.values() for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(numbers, [str(number) for number in numbers])
    axis.set_yscale("log")
    axis.set_xlabel("concurrent requests")
    axis.grid(alpha=0.3)
