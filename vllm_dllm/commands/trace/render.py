"""A trace as a page that plays the forwards (HTML), and as a picture (PNG)."""

import json
import warnings
from collections import Counter
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dllm.commands.trace.record import Source, Trace, effects

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LABELS = 110
"""Positions whose tokens still can be read below the picture."""


def render_html(trace: Trace) -> str:
    """A page that plays the trace, without anything outside of it."""
    page = files("vllm_dllm.commands.trace").joinpath("page.html").read_text(encoding="utf-8")
    data = asdict(trace)
    for forward, effect in zip(data["forwards"], effects(trace), strict=True):
        forward["effect"] = effect._asdict()
    # Inside a script element only "<" can end the data; in JSON it can be written without it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return page.replace("@DATA@", text)


def render_png(trace: Trace, path: Path) -> None:
    """Draw ``make_figure`` into a file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = make_figure(trace)
    with warnings.catch_warnings():
        # A character that matplotlib's font lacks becomes a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(path, dpi=100, format="png")


def make_figure(trace: Trace) -> "Figure":
    """Positions of the answer against forwards, each coloured by the forward of its block that unmasked it."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_forwards, start, length = len(trace.forwards), trace.prompt_length, trace.output_length
    done = effects(trace)
    # [forwards, positions]: state after each forward. NaN: the block has not begun; -1: masked.
    grid = np.full((num_forwards, length), np.nan)
    tokens = [trace.mask_token_id] * length
    drafted: list[tuple[int, int]] = []
    by_source: list[Counter[Source]] = []
    for index, (forward, effect) in enumerate(zip(trace.forwards, done, strict=True)):
        block_end = forward.block_start + len(forward.tokens) - start
        rest = grid[index:, :block_end]
        rest[np.isnan(rest)] = -1
        inside = [change for change in effect.changes if change.position - start < length]
        for position, token, source in inside:
            grid[index:, position - start] = effect.step
            tokens[position - start] = token
            if source == "draft":
                drafted.append((position - start, index + 1))
        by_source.append(Counter(change.source for change in inside))

    width = min(max(0.15 * length + 2.5, 9.0), 14.0)
    height = min(max(0.13 * num_forwards + 2.6, 4.2), 12.0)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes, bars = figure.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    extent = (-0.5, length - 0.5, num_forwards + 0.5, 0.5)
    layers: dict[str, Any] = {"extent": extent, "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(np.ma.masked_where(grid != -1, grid), cmap="Greys", vmin=-2, vmax=4, **layers)
    most_steps = 1 + max((effect.step for effect in done), default=0)
    unmasked = np.ma.masked_where(~(grid >= 0), grid + 1)
    image = axes.imshow(unmasked, cmap="viridis", vmin=1, vmax=most_steps, **layers)
    if drafted:
        axes.scatter(*zip(*drafted, strict=True), s=9, color="white", edgecolors="black", linewidths=0.6)
    axes.set_ylabel("forward")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if length <= MOST_LABELS:
        labels = [_visible(trace.texts[token]) for token in tokens]
        for label in axes.set_xticks(range(length), labels, rotation=90, fontsize=7, family="monospace", va="top"):
            label.label1.set_parse_math(False)
    else:
        axes.set_xlabel("position in the answer")
    figure.colorbar(
        image,
        ax=axes,
        location="top",
        label="colour: forward of the block that unmasked the position; grey: masked",
        aspect=40,
        shrink=0.5,
        ticks=MaxNLocator(integer=True),
    )

    forwards = range(1, num_forwards + 1)
    by_draft = [counts["draft"] for counts in by_source]
    by_policy = [counts.total() - counts["draft"] for counts in by_source]
    bars.barh(forwards, by_policy, color="tab:gray", label="policy")
    bars.barh(forwards, by_draft, left=by_policy, color="tab:orange", label="accepted draft (dot)")
    bars.set_xlabel("tokens unmasked")
    bars.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    bars.tick_params(labelleft=False)
    bars.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, frameon=False)
    settings = ", ".join(f"{name} {value}" for name, value in trace.settings.items())
    figure.suptitle(f"{trace.model}\n{settings}", fontsize=9, parse_math=False)
    figure.supxlabel(caption(trace), fontsize=10)
    return figure


def caption(trace: Trace) -> str:
    """The totals in words."""
    forwards, counts = len(trace.forwards), effects(trace)[-1]
    words = f"{trace.output_length} tokens in {forwards} forwards, {trace.output_length / forwards:.2f} per forward"
    if counts.drafts:
        words += f"; {counts.accepted} of {counts.drafts} drafts accepted"
    return words


def _visible(text: str) -> str:
    """One line without blanks that cannot be seen."""
    return "".join({"\n": "⏎", "\t": "⇥", " ": "·"}.get(c, c if c.isprintable() else "?") for c in text)
