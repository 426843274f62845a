"""Tables of benchmarks: for the terminal, for the documentation, and those of targets."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import write_docs, write_result
from rich import box
from rich.console import Console
from rich.table import Table


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


def times(value: float | None) -> str:
    """A ratio; empty where there is none."""
    return "" if value is None else f"{value:.2f}×"


def verdict(reached: bool | None) -> str:
    """Of a target; empty where the measurement is too short to tell."""
    return {True: "pass", False: "miss", None: ""}[reached]


Wanted = tuple[str, str, str, bool | None]
"""A target in words: its name, what is wanted, what was measured, and whether the target was reached."""


def wanted_sheet(rows: Sequence[Wanted], title: str = "Targets") -> Sheet:
    """Targets in words."""
    table = [[name, wanted, measured, verdict(reached)] for name, wanted, measured, reached in rows]
    return Sheet(title, ["target", "wanted", "measured", "result"], table, num_labels=1)


@dataclass(frozen=True)
class Target:
    """A target that is a bound, and the value that was measured."""

    name: str
    where: str
    value: float
    bound: float
    reached: bool


def target_sheet(targets: Sequence[Target]) -> Sheet:
    """Targets with a bound each."""
    return Sheet(
        "Targets",
        ["target", "where", "bound", "measured", "result"],
        [
            [target.name, target.where, f"{target.bound:g}", f"{target.value:.3f}", verdict(target.reached)]
            for target in targets
        ],
    )


def publish(
    console: Console, sheets: Sequence[Sheet], result: dict[str, Any], folder: Path, docs: Path | None, script: str
) -> None:
    """Write the result (``write_result``) under the script's name, print the tables, and write them into ``docs``.

    Args:
        result: has the ``environment`` of the run.
        script: ``__file__`` of the benchmark.
    """
    write_result(result, folder / Path(script).with_suffix(".json").name)
    environment = result["environment"]
    measured = f"{environment['date'][:10]}, {environment['cpu']}, {environment['cores']} cores"
    show(console, sheets, docs, script, measured=measured)
    console.print(f"Written to {folder}")


def show(
    console: Console,
    sheets: Sequence[Sheet],
    docs: Path | None,
    script: str,
    *,
    measured: str,
    picture: tuple[str, Path] | None = None,
) -> None:
    """Print the tables, and write them into ``docs``.

    Args:
        measured: when and on what.
        picture: what it shows, and its file; it stands below the tables in ``docs``.
    """
    for sheet in sheets:
        console.print(sheet.rich())
    if docs:
        texts = [f"Measured {measured}.\n", *(sheet.markdown() for sheet in sheets)]
        if picture:
            text, file = picture
            texts.append(f"![{text}]({os.path.relpath(file, docs.parent)})")
        write_docs(docs, "\n".join(texts), script)
        console.print(f"Figures written to {docs}")
