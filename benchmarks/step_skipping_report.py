"""Step-skipping: tables in the papers' layout, and a picture."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import published
from overhead import Overhead
from sheet import Sheet, Target, target_sheet, times
from step_skipping_results import Duel, Quality, Results
from step_skipping_settings import POLICIES, STATIC, THRESHOLD, Setting


def make_sheets(results: Results, targets: Sequence[Target], *, of_one_run: bool) -> tuple[Sheet, list[Sheet]]:
    """A table of everything, and those of the page.

    Args:
        of_one_run: qualities and speeds are. Else speeds may be of another checkpoint, and do not stand in one row with
            forwards.
    """
    in_one_row = results if of_one_run else replace(results, speeds=[])
    return make_grid(in_one_row), [
        target_sheet(targets),
        make_freedave_sheet(in_one_row),
        make_spiffy_sheet(in_one_row),
        make_psd_sheet(results),
        make_overhead_sheet(results.overheads),
        make_load_sheet(results),
        make_duel_sheet(results.duels),
        make_low_precision_sheet(results),
    ]


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
                times(row.forwards_saved),
                f"{row.equal}/{row.requests}",
                *(times(speed.ratio if speed else None) for speed in speeds),
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
                per_second += f" ({times(speed.tokens_per_second / baseline_speed.tokens_per_second)})"
            rows.append(
                [
                    "tiny-sdar (ours), arithmetic",
                    name,
                    f"{row.accuracy:.1%}",
                    per_second,
                    f"{row.tokens_per_forward:.2f} ({times(row.tokens_per_forward / baseline.tokens_per_forward)})",
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
                    f"{sampled.tokens_per_second:.1f} ({times(faster)})",
                    f"{sampled.tokens_per_forward:.2f} ({times(fewer)})",
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
        over_dynamic = times(row.forwards_saved) if setting.verify == "spiffy" else ""
        speedup = "" if faster is None else f"({times(faster)}) "
        cell = f"{times(baseline.nfe / row.nfe)} {speedup}{row.accuracy:.2f}"
        rows.append(["tiny-sdar (ours)", name, cell, "", "", "", over_dynamic])
    for model, (dynamic, drafted) in published.SPIFFY.items():
        gains = [cell.nfe / other.nfe for cell, other in zip(drafted, dynamic, strict=True)]
        over_dynamic = f"{min(gains):.2f}-{max(gains):.2f}×"
        for name, cells, gain in (("+ Dynamic", dynamic, ""), ("+ Spiffy, D*=3", drafted, over_dynamic)):
            texts = (f"{times(cell.nfe)} ({times(cell.speed)}) {cell.accuracy:.2f}" for cell in cells)
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
    rows = []
    for setting in dict.fromkeys(row.setting for row in results.speeds if row.setting.match == "exact"):
        if (setting.policy, setting.verify) not in kinds:
            continue
        speeds = [results.speed(setting, level) for level in levels]
        rows.append([setting.policy, setting.name, *(times(speed.ratio if speed else None) for speed in speeds)])
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
        ["Sampler", *(f"{overhead.sampler:.1%}" for overhead in overheads), ""],
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
