"""What the engine's benchmark makes of its measurements: ratios, targets, a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from sheet import Sheet, Target, times
from systems import Measured, Policy, Run, System
from workload import ModelName, Workload, until_block_end

ONE_TOKEN_PER_STEP = Policy("static, k=1", None)
STEP_BOUND = 2.0
SPEED_BOUND = 5.0
SPEED_CONCURRENCY = 16


class Execution(StrEnum):
    """How vLLM runs the model."""

    COMPILED = "compiled"
    """Its default, ``torch.compile``."""
    EAGER = "eager"
    """``enforce_eager``."""


@dataclass(frozen=True)
class Spread:
    """Median and extremes over the repetitions."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Measurement:
    """One run of one system, as it came back."""

    model: ModelName
    system: System
    execution: Execution
    run: Run
    measured: Measured


@dataclass(frozen=True)
class Row:
    """One run of one system, compared.

    Attributes:
        policy: ``None`` for autoregressive decoding.
        tokens: generated, by all requests together.
        positions: decided: ``tokens``, and those that a stop token cut off the ends of blocks.
        nfe: model forwards after prefill, summed over the requests.
        step_ms: of a step at full concurrency, with everything around the model.
        compared, equal: requests compared with the Transformers loop under the same policy, and those with
            all tokens equal.
        accuracy: share of right answers.
        speed_vs_hf: tokens per second over those of the Transformers loop under the same policy.
        step_vs_ar: step time over that of autoregressive vLLM without the plugin at the same concurrency.
    """

    model: ModelName
    system: System
    execution: Execution
    policy: str | None
    concurrency: int
    repetitions: int
    requests: int
    tokens: int
    positions: int
    nfe: int
    tokens_per_forward: float
    tokens_per_second: Spread
    step_ms: Spread
    compared: int = 0
    equal: int = 0
    accuracy: float | None = None
    speed_vs_hf: float | None = None
    step_vs_ar: float | None = None


def make_rows(measurements: Sequence[Measurement], workload: Workload) -> list[Row]:
    """Compare the measurements of one model; ratios are between medians."""
    hf = {m.run.policy: m.measured for m in measurements if m.system == System.HF_LOOP}
    ar = {(m.execution, m.run.concurrency): m.measured for m in measurements if m.system == System.AR}
    rows = []
    for m in measurements:
        tokens = m.measured.tokens
        total, nfe = sum(map(len, tokens)), sum(m.measured.nfe)
        positions = total
        if m.run.policy is not None:
            positions = sum(
                until_block_end(len(request.prompt), len(made), workload.block_length)
                for request, made in zip(workload.requests, tokens, strict=True)
            )
        speed = Spread.of([total / seconds for seconds in m.measured.seconds])
        step = Spread.of([seconds * 1e3 for seconds in m.measured.step_seconds])
        baseline, backbone = hf.get(m.run.policy), ar.get((m.execution, m.run.concurrency))
        rows.append(
            Row(
                model=m.model,
                system=m.system,
                execution=m.execution,
                policy=m.run.policy.name if m.run.policy else None,
                concurrency=m.run.concurrency,
                repetitions=len(m.measured.seconds),
                requests=len(tokens),
                tokens=total,
                positions=positions,
                nfe=nfe,
                tokens_per_forward=total / nfe,
                tokens_per_second=speed,
                step_ms=step,
                compared=len(tokens) if baseline else 0,
                equal=sum(map(list.__eq__, tokens, baseline.tokens)) if baseline else 0,
                accuracy=workload.accuracy(tokens) if m.run.policy else None,
                speed_vs_hf=(
                    speed.median * median(baseline.seconds) / sum(map(len, baseline.tokens)) if baseline else None
                ),
                step_vs_ar=step.median / 1e3 / median(backbone.step_seconds) if backbone else None,
            )
        )
    return rows


def check_targets(rows: Sequence[Row]) -> list[Target]:
    """The targets that these rows can tell something about."""
    targets = []
    for row in rows:
        if row.system != System.DLLM:
            continue
        where = f"{row.model}, {row.policy}, {row.concurrency} concurrent, {row.execution}"
        if row.model == ModelName.TINY and row.concurrency == 1 and row.step_vs_ar is not None:
            reached = row.step_vs_ar <= STEP_BOUND
            name = "step time over an autoregressive step, at most"
            targets.append(Target(name, where, row.step_vs_ar, STEP_BOUND, reached))
        if row.model == ModelName.TINY and row.concurrency == SPEED_CONCURRENCY and row.speed_vs_hf is not None:
            reached = row.speed_vs_hf >= SPEED_BOUND and row.equal == row.compared
            name = "throughput over the Transformers loop, tokens equal, at least"
            targets.append(Target(name, where, row.speed_vs_hf, SPEED_BOUND, reached))
        if row.model == ModelName.RANDOM and row.concurrency == 1 and row.speed_vs_hf is not None:
            name = "throughput over the Transformers loop, one at a time, at least"
            targets.append(Target(name, where, row.speed_vs_hf, 1.0, row.speed_vs_hf >= 1.0))
        if row.policy == ONE_TOKEN_PER_STEP.name:
            name = "forwards per generated token, commits included, at most"
            targets.append(Target(name, where, row.nfe / row.positions, 1.0, row.nfe <= row.positions))
    return targets


def make_sheet(rows: Sequence[Row], model: str) -> Sheet:
    """Rows of one model."""
    several = len({row.execution for row in rows if row.system != System.HF_LOOP}) > 1
    return Sheet(
        f"{model}: medians (extremes); NFE: model forwards after prefill",
        [
            "system",
            "policy",
            "conc.",
            "tokens/s",
            "NFE",
            "tokens\n/forward",
            "ms/step",
            "equal",
            "accuracy",
            "speed vs\nhf-loop",
            "step vs\nvllm-ar",
        ],
        [
            [
                f"{row.system} ({row.execution})" if several and row.system != System.HF_LOOP else row.system,
                row.policy or "autoregressive",
                str(row.concurrency),
                format_spread(row.tokens_per_second, 0),
                str(row.nfe),
                f"{row.tokens_per_forward:.2f}",
                format_spread(row.step_ms, 2),
                f"{row.equal}/{row.compared}" if row.compared else "",
                "" if row.accuracy is None else f"{row.accuracy:.0%}",
                times(row.speed_vs_hf),
                times(row.step_vs_ar),
            ]
            for row in rows
        ],
    )


def format_spread(spread: Spread, digits: int) -> str:
    """``median (min-max)``, or the one value there is."""
    text = f"{spread.median:.{digits}f}"
    if spread.min == spread.max:
        return text
    return f"{text} ({spread.min:.{digits}f}-{spread.max:.{digits}f})"
