"""What the soak makes of its run: whether the server held, tables, a plot."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from sheet import Sheet, Wanted, wanted_sheet
from soak_client import VERDICTS, Outcome, Wrong
from soak_oracle import Case
from soak_traffic import Manner

LEAK = 0.02
"""By how much the last tenth of a run may take more memory than the second tenth."""
LEAST_SAMPLES = 20
LEAST_REQUESTS = 5000
"""Fewer say nothing of a leak: CPU kernels remember each number of rows that a step has had, up to some hundreds."""

MOST_SAMPLES = 300
"""Kept in the JSON file of a run."""

PAGES = {"KV pages in use": "vllm:kv_cache_usage_perc", "scratch pages in use": "vllm_dllm:scratch_pages_used"}
"""Gauges that must be back where they began."""


@dataclass(frozen=True)
class Sample:
    """A look at the server.

    Attributes:
        at: seconds since the first request.
        memory: resident bytes, by process.
        metrics: of Prometheus, by name.
    """

    at: float
    memory: dict[str, int]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Run:
    """A family's run.

    Attributes:
        left_out: requests whose answer rounding decides, not part of the pool.
        seconds: from the first request to the last answer.
        samples: while it ran.
        before, after: looks at the idle server.
        died: the server was not there any more.
    """

    family: str
    cases: Sequence[Case]
    left_out: int
    outcomes: Sequence[Outcome]
    wrong: Sequence[Wrong]
    seconds: float
    samples: Sequence[Sample]
    before: Sample
    after: Sample | None
    died: bool

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(outcome.verdict for outcome in self.outcomes)

    @property
    def errors(self) -> dict[str, int]:
        """What went wrong, wrong answers apart, and how often."""
        good = (*VERDICTS, "wrong")
        return {verdict: count for verdict, count in sorted(self.verdicts.items()) if verdict not in good}

    @property
    def preemptions(self) -> float:
        last = self.after or self.samples[-1]
        return last.metrics["vllm:num_preemptions_total"] - self.before.metrics["vllm:num_preemptions_total"]

    @property
    def features(self) -> Counter[str]:
        """How many requests with a right answer, or a right beginning of one, asked for what."""
        counts: Counter[str] = Counter()
        for outcome in self.outcomes:
            counts[str(outcome.sending.manner)] += 1
            if outcome.verdict in ("right", "left"):
                counts.update(self.cases[outcome.sending.index].request.features)
        return counts

    def growth(self) -> dict[str, float] | None:
        """Memory of each process in the last tenth of the run over that in the second; None: too short a run."""
        if len(self.samples) < LEAST_SAMPLES:
            return None
        tenth = len(self.samples) // 10
        growths = {}
        for process in self.before.memory:
            early = mean(sample.memory.get(process, 0) for sample in self.samples[tenth : 2 * tenth])
            late = mean(sample.memory.get(process, 0) for sample in self.samples[-tenth:])
            growths[process] = late / early - 1
        return growths

    def leaks(self) -> dict[str, float] | None:
        """Of ``growth`` what is too much; None: too short a run."""
        growths = self.growth()
        if growths is None or len(self.outcomes) < LEAST_REQUESTS:
            return None
        return {process: growth for process, growth in growths.items() if growth > LEAK}

    def held(self) -> dict[str, tuple[float, float | None]]:
        """Gauges of pages that the server has: before the run and after it."""
        return {
            name: (self.before.metrics[gauge], self.after.metrics.get(gauge) if self.after else None)
            for name, gauge in PAGES.items()
            if gauge in self.before.metrics
        }

    @property
    def failures(self) -> list[str]:
        """Why the run failed; empty where it did not."""
        failures = []
        if count := self.verdicts["wrong"]:
            failures.append(f"{count} wrong answers")
        failures += [f"{count} times {error}" for error, count in self.errors.items()]
        if self.died:
            failures.append("the server died")
        for process, growth in (self.leaks() or {}).items():
            failures.append(f"{process} grew by {100 * growth:.1f} %")
        failures += [f"{name}: {new} after, {old} before" for name, (old, new) in self.held().items() if new != old]
        return failures


def _targets(run: Run) -> Sheet:
    rows: list[Wanted] = []

    def target(name: str, wanted: str, value: str, *, passed: bool | None) -> None:
        rows.append((name, wanted, value, passed))

    wrong, errors = run.verdicts["wrong"], sum(run.errors.values())
    target("wrong answers", "0", str(wrong), passed=not wrong)
    target("errors", "0", str(errors), passed=not errors)
    target("dead engines", "0", str(int(run.died)), passed=not run.died)
    leaks, growths = run.leaks(), run.growth() or {}
    for process in run.before.memory:
        shown = f"{100 * growths[process]:+.2f} %" if process in growths else ""
        shown += " (too short a run)" if leaks is None else ""
        name = f"memory of the {process}, last tenth over second tenth"
        target(name, f"at most +{100 * LEAK:g} %", shown, passed=None if leaks is None else process not in leaks)
    for name, (old, new) in run.held().items():
        target(
            f"{name}, before and after", "equal", f"{old:g}, {'?' if new is None else f'{new:g}'}", passed=old == new
        )
    return wanted_sheet(rows, f"{run.family}: targets")


def _percentiles(seconds: Sequence[float]) -> list[str]:
    if not seconds:
        return ["", ""]
    return [f"{value:.2f} s" for value in np.percentile(seconds, (50, 99))]


def _requests(run: Run) -> Sheet:
    rows = []
    for manner in Manner:
        own = [outcome for outcome in run.outcomes if outcome.sending.manner is manner]
        verdicts = Counter(outcome.verdict for outcome in own)
        firsts = [outcome.first for outcome in own if outcome.first is not None]
        rows.append(
            [
                str(manner),
                str(len(own)),
                *(str(verdicts[verdict]) for verdict in (*VERDICTS, "wrong")),
                str(sum(count for verdict, count in verdicts.items() if verdict not in (*VERDICTS, "wrong"))),
                *_percentiles([outcome.seconds for outcome in own]),
                *_percentiles(firsts),
            ]
        )
    headings = [
        "sent",
        "requests",
        "right to the end",
        "right until left",
        "refused as they must be",
        "wrong",
        "errors",
    ]
    headings += ["latency p50", "p99", "first chunk p50", "p99"]
    return Sheet(f"{run.family}: requests", headings, rows, num_labels=1)


def _load(run: Run) -> Sheet:
    tokens = [sample.metrics["vllm:generation_tokens_total"] for sample in (run.before, *run.samples)]
    running = [sample.metrics["vllm:num_requests_running"] for sample in run.samples]
    usage = [sample.metrics["vllm:kv_cache_usage_perc"] for sample in run.samples]
    rows = [
        ["distinct requests", str(len(run.cases))],
        ["left out, as rounding decides their answers", str(run.left_out)],
        ["minutes", f"{run.seconds / 60:.1f}"],
        ["requests per second", f"{len(run.outcomes) / run.seconds:.1f}"],
        ["tokens per second", f"{(tokens[-1] - tokens[0]) / run.seconds:.0f}"],
        ["requests that run together, mean", f"{mean(running):.1f}"],
        ["KV pages in use, mean and most", f"{100 * mean(usage):.0f} %, {100 * max(usage):.0f} %"],
        ["preemptions", f"{run.preemptions:.0f}"],
    ]
    for process in run.before.memory:
        at = [run.before, run.samples[len(run.samples) // 2], run.samples[-1]]
        sizes = ", ".join(f"{sample.memory.get(process, 0) / 2**20:.0f}" for sample in at)
        rows.append([f"memory of the {process}, MiB: idle, half-way, at the end", sizes])
    return Sheet(f"{run.family}: load", ["", ""], rows, num_labels=1)


def _features(run: Run) -> Sheet:
    rows = []
    rest = dict(run.features.most_common())
    for group in ("verify", "policy"):
        own = {name: rest.pop(name) for name in list(rest) if name.startswith(f"{group} ")}
        rows.append([group, ", ".join(f"{name.removeprefix(f'{group} ')} {count}" for name, count in own.items())])
    rows.append(["other", ", ".join(f"{name} {count}" for name, count in rest.items())])
    return Sheet(f"{run.family}: what was asked for", ["", "requests"], rows, num_labels=2)


def sheets_of(run: Run) -> list[Sheet]:
    """The tables of a run."""
    sheets = [_targets(run), _requests(run), _load(run), _features(run)]
    if run.errors:
        rows = [[error, str(count)] for error, count in run.errors.items()]
        sheets.insert(1, Sheet(f"{run.family}: errors", ["error", "requests"], rows, num_labels=1))
    return sheets


def result_of(run: Run) -> dict[str, Any]:
    """A run for the JSON file."""
    return {
        "family": run.family,
        "distinct": len(run.cases),
        "left_out": run.left_out,
        "seconds": run.seconds,
        "verdicts": dict(run.verdicts),
        "failures": run.failures,
        "growth": run.growth(),
        "held": run.held(),
        "preemptions": run.preemptions,
        "features": dict(sorted(run.features.items())),
        "latency": {
            str(manner): dict(zip(("p50", "p99"), np.percentile(seconds, (50, 99)).tolist(), strict=True))
            for manner in Manner
            if (seconds := [o.seconds for o in run.outcomes if o.sending.manner is manner])
        },
        "wrong": [asdict(wrong) for wrong in run.wrong],
        "samples": [
            {
                "at": round(sample.at, 1),
                "memory": sample.memory,
                **{name: sample.metrics.get(name) for name in (*SHOWN, *PAGES.values())},
            }
            for sample in run.samples[:: 1 + len(run.samples) // MOST_SAMPLES]
        ],
    }


SHOWN = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
)


def plot(run: Run, path: Path) -> None:
    """Tokens per second, latency, memory and pages over the time of a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(9, 9), sharex=True, layout="constrained")
    speed, latency, memory, pages = axes
    at = np.array([sample.at for sample in run.samples])
    tokens = np.array([sample.metrics["vllm:generation_tokens_total"] for sample in run.samples])
    # Over windows, or every step of the engine would be a spike.
    step = max(len(at) // 100, 1)
    if len(at) > step:
        rates = (tokens[step:] - tokens[:-step]) / (at[step:] - at[:-step])
        speed.plot((at[step:] + at[:-step]) / 2, rates, linewidth=1)
    speed.set_ylabel("tokens per second")
    speed.set_ylim(bottom=0)

    asked = [outcome for outcome in run.outcomes if outcome.sending.manner is not Manner.MALFORMED]
    ended = sorted((outcome.began + outcome.seconds, outcome.seconds) for outcome in asked)
    windows = np.array_split(np.array(ended), min(100, len(ended)))
    middles = [window[:, 0].mean() for window in windows]
    for percentile in (50, 99):
        latency.plot(
            middles,
            [np.percentile(window[:, 1], percentile) for window in windows],
            linewidth=1,
            label=f"p{percentile}",
        )
    latency.set_ylabel("latency, s")
    latency.set_yscale("log")
    latency.legend(fontsize="small", loc="upper right")

    for process in run.before.memory:
        sizes = [sample.memory.get(process, 0) / 2**20 for sample in run.samples]
        memory.plot(at, sizes, linewidth=1, label=process)
    memory.set_ylabel("resident memory, MiB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize="small", loc="lower right")

    usage = [100 * sample.metrics["vllm:kv_cache_usage_perc"] for sample in run.samples]
    pages.plot(at, usage, linewidth=0.6, label="KV pages in use, %")
    preempted = np.array([sample.metrics["vllm:num_preemptions_total"] for sample in run.samples])
    beside = pages.twinx()
    beside.plot(at, preempted, color="C1", linewidth=1, label="preemptions so far")
    beside.set_ylabel("preemptions so far", color="C1")
    beside.set_ylim(bottom=0)
    pages.set_ylabel("KV pages in use, %", color="C0")
    pages.set_ylim(0, 100)
    pages.set_xlabel("seconds")
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.suptitle(f"tiny model ({run.family}), {len(run.outcomes)} requests")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
