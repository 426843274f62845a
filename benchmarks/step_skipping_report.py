"""What the step-skipping benchmark makes of its measurements: ratios, targets, tables in the papers' layout, a plot."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import published
from engine import Target
from overhead import Overhead
from pydantic import TypeAdapter
from record import marks, replace_marked, write_result
from rich import box
from rich.console import Console
from rich.table import Table
from systems import Pass
from workload import Workload

from vllm_dllm.methods import PolicyName, VerifierName

POLICIES: dict[str, dict[str, PolicyName | int | float]] = {
    "static, k=1": {"dllm_policy": "static", "dllm_tokens_per_step": 1},
    "threshold 0.9": {"dllm_policy": "threshold", "dllm_threshold": 0.9},
    "localleap": {"dllm_policy": "localleap"},
    "entropy": {"dllm_policy": "entropy"},
    "sequential": {"dllm_policy": "sequential", "dllm_tokens_per_step": 1},
}
"""Request options of each policy."""

STATIC, THRESHOLD, LOCALLEAP = "static, k=1", "threshold 0.9", "localleap"

Drafts = int | Literal["auto"]

FREEDAVE_GAIN = 2.0
SPIFFY_GAIN = 1.25
PSD_GAIN = 1.2
PSD_ACCURACY_LOSS = 0.01
PSD_FLATNESS = 1.1
"""The paper's 4.9 tokens per forward at d=7 are 1.07 times its 4.6 at d=3."""
OVERHEAD_BOUND = 0.08
AUTO_AT_HIGH_LOAD = 0.97
AUTO_AT_LOW_LOAD = 0.95


@dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
        drafts: as the verifier's paper counts them.
    """

    policy: str
    verify: VerifierName = "none"
    drafts: Drafts = 0
    match: Literal["exact", "subset"] = "exact"

    @property
    def name(self) -> str:
        """Of the verifier with its number of drafts."""
        if self.verify == "none":
            return "none"
        # As the papers write it.
        sign = "D*" if self.verify == "spiffy" else "d"
        return f"{self.verify} {sign}={self.drafts}" + (", subset" if self.match == "subset" else "")

    @property
    def alone(self) -> "Setting":
        """The same policy without drafts."""
        return Setting(self.policy)

    @property
    def lossless(self) -> bool:
        """Whether the verifier promises the policy's own tokens."""
        return self.verify != "psd" and self.match == "exact"

    def extra_args(self) -> dict[str, str | int | float]:
        """As options of a request."""
        options = {**POLICIES[self.policy], "dllm_verify": self.verify}
        if self.verify != "none":
            options |= {"dllm_drafts": self.drafts}
        if self.match != "exact":
            options |= {"dllm_match": self.match}
        return options


@dataclass(frozen=True)
class Quality:
    """What a setting makes of the problems, and what it costs.

    Attributes:
        tokens: returned, by all requests together.
        nfe: model forwards after prefill, summed over the requests.
        forwards_saved: forwards of the same policy without drafts, over ``nfe``.
        equal: requests with every token equal to those of the same policy without drafts.
        accuracy: share of right answers.
    """

    setting: Setting
    requests: int
    tokens: int
    nfe: int
    tokens_per_forward: float
    forwards_saved: float
    equal: int
    accuracy: float

    @property
    def equal_share(self) -> float:
        """Of all requests."""
        return self.equal / self.requests


@dataclass(frozen=True)
class Speed:
    """How fast a setting is.

    Attributes:
        tokens_per_second: median over the repetitions.
        ratio: to the same policy without drafts in the same repetition; the median.
        ratios: of all repetitions.
    """

    setting: Setting
    concurrency: int
    requests: int
    tokens_per_second: float
    ratio: float
    ratios: list[float]


def make_qualities(passes: Mapping[Setting, Pass], workload: Workload) -> list[Quality]:
    """Compare each setting with its policy alone, which must be among them."""
    qualities = []
    for setting, done in passes.items():
        alone = passes[setting.alone]
        tokens, nfe = sum(map(len, done.tokens)), sum(done.nfe)
        accuracy = workload.accuracy(done.tokens)
        assert accuracy is not None
        qualities.append(
            Quality(
                setting=setting,
                requests=len(done.tokens),
                tokens=tokens,
                nfe=nfe,
                tokens_per_forward=tokens / nfe,
                forwards_saved=sum(alone.nfe) / nfe,
                equal=sum(map(list.__eq__, done.tokens, alone.tokens)),
                accuracy=accuracy,
            )
        )
    return qualities


def make_speeds(passes: Mapping[Setting, Sequence[Pass]], concurrency: int) -> list[Speed]:
    """Compare interleaved repetitions, those of the same index with each other."""
    rates = {
        setting: [sum(map(len, done.tokens)) / done.seconds for done in repetitions]
        for setting, repetitions in passes.items()
    }
    speeds = []
    for setting, own in rates.items():
        ratios = [rate / alone for rate, alone in zip(own, rates[setting.alone], strict=True)]
        speeds.append(
            Speed(
                setting=setting,
                concurrency=concurrency,
                requests=len(passes[setting][0].tokens),
                tokens_per_second=median(own),
                ratio=median(ratios),
                ratios=ratios,
            )
        )
    return speeds


@dataclass(frozen=True)
class Duel:
    """``auto`` and what it has to hold its own against, by turns, one right after the other.

    Attributes:
        rival: the policy alone, or the fixed number of drafts that was fastest among all speeds. Its own speed there is
            not what ``auto`` is compared with: the best of several noisy figures is too good.
        ratios: of ``auto``'s tokens per second to the rival's, of every turn.
    """

    setting: Setting
    rival: Setting
    concurrency: int
    requests: int
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """The median."""
        return median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between which half of the turns are."""
        low, _, high = quantiles(self.ratios, n=4, method="inclusive") if len(self.ratios) > 1 else self.ratios * 3
        return low, high


def make_duel(setting: Setting, rival: Setting, concurrency: int, turns: Sequence[tuple[Pass, Pass]]) -> Duel:
    """Compare the passes of each turn: ``setting``'s and the rival's."""
    rates = [[sum(map(len, done.tokens)) / done.seconds for done in turn] for turn in turns]
    return Duel(setting, rival, concurrency, len(turns[0][0].tokens), [own / other for own, other in rates])


def rival_of(setting: Setting, concurrency: int, speeds: Sequence[Speed]) -> Setting:
    """What ``auto`` is to be compared with: one request at a time the fastest fixed number, else no drafts."""
    if concurrency > 1:
        return setting.alone
    fixed = [
        row
        for row in speeds
        if row.concurrency == concurrency
        and isinstance(row.setting.drafts, int)
        and (row.setting.policy, row.setting.verify, row.setting.match)
        == (setting.policy, setting.verify, setting.match)
    ]
    return max(fixed, key=lambda row: row.ratio).setting


@dataclass(frozen=True)
class Results:
    """Everything that was measured.

    Attributes:
        low_precision: quality in bfloat16, each compared with its policy alone at the same concurrency.
        alone_equal: requests that the policies alone decode to the same tokens in bfloat16 one at a time and together,
            by policy: what changes without any drafts.
    """

    qualities: list[Quality]
    speeds: list[Speed]
    duels: list[Duel]
    low_precision: list[Quality]
    alone_equal: dict[str, int]
    overheads: list[Overhead]

    def quality(self, setting: Setting) -> Quality | None:
        """Of a setting, if it was measured."""
        return next((row for row in self.qualities if row.setting == setting), None)

    def speed(self, setting: Setting, concurrency: int) -> Speed | None:
        """Of a setting, if it was measured."""
        return next((row for row in self.speeds if (row.setting, row.concurrency) == (setting, concurrency)), None)


def read_results(values: Any) -> Results:
    """What ``asdict`` made of results."""
    return TypeAdapter(Results).validate_python(values)


def check_targets(results: Results) -> list[Target]:
    """The targets that the results can tell something about."""
    return [
        *_check_lossless(results),
        *_check_psd(results),
        *_check_overheads(results.overheads),
        *_check_auto(results),
    ]


def _check_lossless(results: Results) -> Iterable[Target]:
    static, freedave = Setting(STATIC), Setting(STATIC, "freedave", 8)
    alone, drafted = results.quality(static), results.quality(freedave)
    if alone and drafted:
        gain = drafted.tokens_per_forward / alone.tokens_per_forward
        yield Target(
            "tokens per forward over static, tokens equal, at least",
            _where(freedave),
            gain,
            FREEDAVE_GAIN,
            gain >= FREEDAVE_GAIN and drafted.equal == drafted.requests,
        )
    if drafted := results.quality(Setting(THRESHOLD, "spiffy", 3)):
        yield Target(
            "times fewer forwards than the policy alone, tokens equal, at least",
            _where(drafted.setting),
            drafted.forwards_saved,
            SPIFFY_GAIN,
            drafted.forwards_saved >= SPIFFY_GAIN and drafted.equal == drafted.requests,
        )
    rows = [row for row in results.qualities if row.setting.lossless and row.setting.verify != "none"]
    if rows:
        worst = min(rows, key=lambda row: row.equal_share)
        yield Target(
            "requests equal to the policy alone, exact match, at least",
            f"{len(rows)} settings; worst: {_where(worst.setting)}",
            worst.equal_share,
            1.0,
            worst.equal_share == 1.0,
        )


def _check_psd(results: Results) -> Iterable[Target]:
    for policy in (THRESHOLD, LOCALLEAP):
        alone, three, seven = (
            results.quality(setting)
            for setting in (Setting(policy), Setting(policy, "psd", 3), Setting(policy, "psd", 7))
        )
        if not alone or not three:
            continue
        gain = three.tokens_per_forward / alone.tokens_per_forward
        where = _where(three.setting)
        yield Target("tokens per forward over the policy alone, at least", where, gain, PSD_GAIN, gain >= PSD_GAIN)
        loss = alone.accuracy - three.accuracy
        # Shares of whole requests: what rounds to the bound is the bound.
        reached = round(loss, 9) <= PSD_ACCURACY_LOSS
        yield Target("loss of accuracy against the policy alone, at most", where, loss, PSD_ACCURACY_LOSS, reached)
        if seven:
            further = seven.tokens_per_forward / three.tokens_per_forward
            yield Target(
                "tokens per forward over d=3, at most (flat)",
                _where(seven.setting),
                further,
                PSD_FLATNESS,
                further <= PSD_FLATNESS,
            )


def _check_overheads(overheads: Sequence[Overhead]) -> Iterable[Target]:
    for overhead in overheads:
        where = f"{overhead.verify} with {overhead.drafts} drafts, 100 M parameters, 1 concurrent"
        reached = overhead.share < OVERHEAD_BOUND
        yield Target("drafting and acceptance over a forward, below", where, overhead.share, OVERHEAD_BOUND, reached)


def _check_auto(results: Results) -> Iterable[Target]:
    for duel in results.duels:
        where = f"{_where(duel.setting)}, {duel.concurrency} concurrent"
        if duel.concurrency == 1:
            name, bound = f"throughput over the best fixed number ({duel.rival.drafts}), at least", AUTO_AT_LOW_LOAD
        else:
            name, bound = "throughput over no drafts, at least", AUTO_AT_HIGH_LOAD
        yield Target(name, where, duel.ratio, bound, duel.ratio >= bound)


def _where(setting: Setting) -> str:
    return f"{setting.policy}, {setting.name}"


@dataclass(frozen=True)
class Sheet:
    """A table, for the terminal and for the documentation; its last columns are figures."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    num_labels: int = 2
    """Columns that say what a row is about."""

    def rich(self) -> Table:
        """For the terminal."""
        table = Table(title=self.title, box=box.SIMPLE_HEAD, pad_edge=False)
        for i, heading in enumerate(self.headings):
            if i < self.num_labels:
                table.add_column(heading)
            else:
                width = max((len(row[i]) for row in self.rows), default=0)
                table.add_column(heading, justify="right", min_width=width)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For the documentation."""
        lines = [
            self.headings,
            ["---"] * self.num_labels + ["---:"] * (len(self.headings) - self.num_labels),
            *self.rows,
        ]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"**{self.title}**\n\n{body}\n"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def make_grid(results: Results) -> Sheet:
    """Every setting."""
    levels = sorted({speed.concurrency for speed in results.speeds})
    rows = []
    for row in results.qualities:
        speeds = [results.speed(row.setting, level) for level in levels]
        rows.append(
            [
                row.setting.policy,
                row.setting.name,
                f"{row.accuracy:.1%}",
                str(row.nfe),
                f"{row.tokens_per_forward:.2f}",
                _times(row.forwards_saved),
                f"{row.equal}/{row.requests}",
                *(_times(speed.ratio if speed else None) for speed in speeds),
            ]
        )
    return Sheet(
        "Policies and verifiers (tokens/s over the policy alone, in the same repetition)",
        [
            "policy",
            "verifier",
            "accuracy",
            "NFE",
            "tokens/forward",
            "fewer forwards",
            "equal",
            *(f"tokens/s at {level}" for level in levels),
        ],
        rows,
    )


def make_freedave_sheet(results: Results) -> Sheet:
    """Tables 1 to 3 of FreeDave."""
    rows = []
    ours = [
        ("Static", Setting(STATIC)),
        ("Dynamic", Setting(THRESHOLD)),
        ("FreeDave, d=8", Setting(STATIC, "freedave", 8)),
        ("FreeDave on dynamic, d=8", Setting(THRESHOLD, "freedave", 8)),
    ]
    baseline, baseline_speed = results.quality(ours[0][1]), results.speed(ours[0][1], 1)
    for name, setting in ours:
        row, speed = results.quality(setting), results.speed(setting, 1)
        if row and baseline:
            per_second = "" if speed is None else f"{speed.tokens_per_second:.1f}"
            if speed and baseline_speed:
                per_second += f" ({_times(speed.tokens_per_second / baseline_speed.tokens_per_second)})"
            rows.append(
                [
                    "tiny-sdar (ours), arithmetic",
                    name,
                    f"{row.accuracy:.1%}",
                    per_second,
                    f"{row.tokens_per_forward:.2f} ({_times(row.tokens_per_forward / baseline.tokens_per_forward)})",
                ]
            )
    for (model, data), sampling in published.FREEDAVE.items():
        static = sampling.static
        for name, sampled in zip(("Static", "Dynamic", "FreeDave"), sampling, strict=True):
            faster = sampled.tokens_per_second / static.tokens_per_second
            fewer = sampled.tokens_per_forward / static.tokens_per_forward
            rows.append(
                [
                    f"{model}, {data}",
                    name,
                    f"{sampled.accuracy:.1f}%",
                    f"{sampled.tokens_per_second:.1f} ({_times(faster)})",
                    f"{sampled.tokens_per_forward:.2f} ({_times(fewer)})",
                ]
            )
    return Sheet(
        "FreeDave, as in its tables 1 and 2", ["model", "sampling", "accuracy", "tokens/s", "tokens/forward"], rows
    )


def make_spiffy_sheet(results: Results) -> Sheet:
    """Table 1 of Spiffy: NFE reduction (tokens/s), accuracy, the first two over one token per step."""
    rows = []
    ours = [
        ("Baseline", Setting(STATIC)),
        ("+ Dynamic", Setting(THRESHOLD)),
        *((f"+ Spiffy, D*={drafts}", Setting(THRESHOLD, "spiffy", drafts)) for drafts in (1, 3, 5, 7, 10)),
    ]
    baseline, baseline_speed = results.quality(ours[0][1]), results.speed(ours[0][1], 1)
    for name, setting in ours:
        row, speed = results.quality(setting), results.speed(setting, 1)
        if row is None or baseline is None:
            continue
        faster = speed.tokens_per_second / baseline_speed.tokens_per_second if speed and baseline_speed else None
        over_dynamic = _times(row.forwards_saved) if setting.verify == "spiffy" else ""
        speedup = "" if faster is None else f"({_times(faster)}) "
        cell = f"{_times(baseline.nfe / row.nfe)} {speedup}{row.accuracy:.2f}"
        rows.append(["tiny-sdar (ours)", name, cell, "", "", "", over_dynamic])
    for model, (dynamic, drafted) in published.SPIFFY.items():
        gains = [cell.nfe / other.nfe for cell, other in zip(drafted, dynamic, strict=True)]
        over_dynamic = f"{min(gains):.2f}-{max(gains):.2f}×"
        for name, cells, gain in (("+ Dynamic", dynamic, ""), ("+ Spiffy, D*=3", drafted, over_dynamic)):
            texts = (f"{_times(cell.nfe)} ({_times(cell.speed)}) {cell.accuracy:.2f}" for cell in cells)
            rows.append([model, name, *texts, gain])
    first, *others = published.SPIFFY_TASKS
    return Sheet(
        "Spiffy, as in its table 1: NFE reduction (speedup) accuracy, over one token per step",
        ["model", "sampling", f"arithmetic / {first}", *others, "over dynamic"],
        rows,
    )


def make_psd_sheet(results: Results) -> Sheet:
    """Tokens per forward and accuracy over d, which PSD shows in figures 2 to 4."""
    depths = (0, 1, 3, 5, 7)
    rows = []
    for policy in POLICIES:
        cells = []
        for depth in depths:
            row = results.quality(Setting(policy, "psd", depth) if depth else Setting(policy))
            cells.append(f"{row.tokens_per_forward:.2f}, {row.accuracy:.1%}" if row else "")
        if any(cells[1:]):
            rows.append([f"tiny-sdar (ours), arithmetic, {policy}", *cells])
    for name, points in published.PSD.items():
        cells = []
        for depth in depths:
            tokens_per_forward, accuracy = points.get(depth, (None, None))
            cell = "" if tokens_per_forward is None else f"{tokens_per_forward:.1f}"
            cells.append(cell if accuracy is None else f"{cell}, {accuracy:.1f}%")
        rows.append([name, *cells])
    return Sheet(
        "PSD over its depth d: tokens/forward, accuracy (d=0: the policy alone)",
        ["", *(f"d={depth}" for depth in depths)],
        rows,
        num_labels=1,
    )


def make_load_sheet(results: Results) -> Sheet:
    """``auto`` beside fixed numbers, over load."""
    kinds = {(row.setting.policy, row.setting.verify) for row in results.speeds if row.setting.drafts == "auto"}
    levels = sorted({row.concurrency for row in results.speeds})
    settings = dict.fromkeys(row.setting for row in results.speeds if row.setting.match == "exact")
    settings = [setting for setting in settings if (setting.policy, setting.verify) in kinds]
    rows = []
    for setting in settings:
        speeds = [results.speed(setting, level) for level in levels]
        rows.append([setting.policy, setting.name, *(_times(speed.ratio if speed else None) for speed in speeds)])
    return Sheet(
        "Load: tokens/s over the policy alone, by concurrent requests",
        ["policy", "verifier", *map(str, levels)],
        rows,
    )


def make_duel_sheet(duels: Sequence[Duel]) -> Sheet:
    """``auto`` against the best of the others."""
    return Sheet(
        "Auto by turns with what it is to match: tokens/s over the rival's",
        ["policy", "verifier", "concurrent", "rival", "turns", "median", "half of the turns"],
        [
            [
                duel.setting.policy,
                duel.setting.name,
                str(duel.concurrency),
                duel.rival.name,
                str(len(duel.ratios)),
                f"{duel.ratio:.3f}",
                "{:.3f} to {:.3f}".format(*duel.quartiles),
            ]
            for duel in duels
        ],
    )


def make_overhead_sheet(overheads: Sequence[Overhead]) -> Sheet:
    """Table 3 of Spiffy."""
    paper = dict(published.SPIFFY_OVERHEADS)
    model = paper.pop("Model")
    nothing = [""] * len(overheads)
    rows = [
        ["Model", *(f"{overhead.forward:.1%}" for overhead in overheads), f"{model:.1f}%"],
        ["Row plan", *(f"{overhead.plan:.1%}" for overhead in overheads), ""],
        ["Tokens and confidences of the drafts", *(f"{overhead.row_stats:.1%}" for overhead in overheads), ""],
        ["Acceptance, drafting, pruning", *(f"{overhead.decision:.1%}" for overhead in overheads), ""],
        *([name, *nothing, f"{value:.1f}%"] for name, value in paper.items()),
        ["All but the model", *(f"{overhead.share:.1%}" for overhead in overheads), f"{sum(paper.values()):.1f}%"],
    ]
    return Sheet(
        "Overheads, as in Spiffy's table 3: per cent of the forward without drafts",
        [
            "",
            *(f"{overhead.verify}, {overhead.drafts} drafts (ours)" for overhead in overheads),
            "Spiffy, LLaDA-8B, A100",
        ],
        rows,
        num_labels=1,
    )


def make_low_precision_sheet(results: Results) -> Sheet:
    """Requests equal in bfloat16."""
    rows = []
    for row in results.low_precision:
        alone = row.setting.verify == "none"
        equal = results.alone_equal[row.setting.policy] if alone else row.equal
        name = "none, one at a time" if alone else row.setting.name
        rows.append([row.setting.policy, name, f"{equal}/{row.requests}", f"{row.accuracy:.1%}"])
    return Sheet(
        "bfloat16: requests equal to the policy alone, all requests together",
        ["policy", "verifier", "equal", "accuracy"],
        rows,
    )


def make_target_sheet(targets: Sequence[Target]) -> Sheet:
    """Targets and whether they were reached."""
    return Sheet(
        "Targets",
        ["target", "where", "bound", "measured", "result"],
        [
            [
                target.name,
                target.where,
                f"{target.bound:g}",
                f"{target.value:.3f}",
                "pass" if target.reached else "miss",
            ]
            for target in targets
        ],
    )


def docs_marks(script: str) -> tuple[str, str]:
    """What stands on a page before and behind the place that a script writes to."""
    return marks(writer(script))


def writer(script: str) -> str:
    """What the marks call a script."""
    return f"benchmarks/{Path(script).name}"


def write_docs(page: Path, text: str, script: str) -> None:
    """Replace what stands between the two marks of a script on a page.

    Raises:
        ValueError: the page lacks them.
    """
    page.write_text(replace_marked(page.read_text(), text, writer(script)))


def publish(
    console: Console, sheets: Sequence[Sheet], result: dict[str, Any], folder: Path, docs: Path | None, script: str
) -> None:
    """Print the tables, write the result (``write_result``) under the script's name, and the tables into ``docs``.

    Args:
        result: has the ``environment`` of the run.
        script: ``__file__`` of the benchmark.
    """
    for sheet in sheets:
        console.print(sheet.rich())
    write_result(result, folder / Path(script).with_suffix(".json").name)
    console.print(f"Written to {folder}")
    if docs:
        environment = result["environment"]
        made = f"{environment['date'][:10]}, {environment['cpu']}, {environment['cores']} cores"
        write_docs(docs, "\n".join([f"Measured {made}.\n", *(sheet.markdown() for sheet in sheets)]), script)
        console.print(f"Figures written to {docs}")


def pareto_front(qualities: Sequence[Quality]) -> list[Quality]:
    """Settings that no other beats in both accuracy and tokens per forward, the fastest last."""
    front: list[Quality] = []
    for row in sorted(qualities, key=lambda row: (row.tokens_per_forward, row.accuracy), reverse=True):
        if not front or row.accuracy > front[-1].accuracy:
            front.append(row)
    return front[::-1]


def plot_pareto(qualities: Sequence[Quality], path: Path) -> None:
    """Tokens per forward and accuracy: a panel per policy with a line per verifier, so that no two lines lie upon each
    other. Settings that keep the accuracy of the policy alone would in a plain plot of the two numbers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, dict[str, list[Quality]]] = {}
    for row in qualities:
        verifier = row.setting.verify + (", subset" if row.setting.match == "subset" else "")
        panels.setdefault(row.setting.policy, {}).setdefault(verifier, []).append(row)
    front = pareto_front(qualities)
    heights = [len(lines) for lines in panels.values()]
    figure, all_axes = pyplot.subplots(
        len(panels),
        figsize=(9, 0.9 + 0.42 * sum(heights)),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    for number, ((policy, lines), axes) in enumerate(zip(panels.items(), all_axes[:, 0], strict=True)):
        for place, rows in enumerate(lines.values()):
            rows = sorted(rows, key=lambda row: row.tokens_per_forward)
            speeds = [row.tokens_per_forward for row in rows]
            axes.plot(speeds, [place] * len(rows), color=f"C{number}", marker="o", markersize=5, linewidth=1.2)
            accuracies = sorted({f"{100 * row.accuracy:.1f}" for row in rows}, key=float)
            text = " to ".join(dict.fromkeys((accuracies[0], accuracies[-1]))) + " %"
            axes.annotate(text, (1.01, place), xycoords=axes.get_yaxis_transform(), va="center", fontsize=8)
            best = [row.tokens_per_forward for row in rows if row in front]
            axes.plot(best, [place] * len(best), "o", markersize=11, markerfacecolor="none", markeredgecolor="black")
        axes.set_yticks(range(len(lines)), ["policy alone" if name == "none" else name for name in lines], fontsize=8)
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.set_title(policy, loc="left", fontsize=9, fontweight="bold", color=f"C{number}", pad=3)
        axes.grid(axis="x", alpha=0.3)
    all_axes[-1, 0].set_xlabel("tokens per forward: a point per number of drafts")
    figure.suptitle(
        f"tiny-sdar, {qualities[0].requests} held-out problems, greedy. On the right: accuracy. "
        "Circled: no setting beats both.",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
