"""What the runs of ``examples/rl.py`` learned: a table, and their curves in one file.

``python benchmarks/rl.py --help``; ``docs/rl.md`` says how the runs are made.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from arguments import Out
from record import RESULTS, write_result
from rich.console import Console
from sheet import Sheet


def main(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `examples/rl.py train` wrote.")],
    out: Out = RESULTS,
) -> None:
    """Collect the curves of several runs."""
    runs = [json.loads((folder / "curve.json").read_text()) for folder in folders]
    rows = []
    for run in runs:
        curve = run["curve"]
        before, after = (f"{accuracy:.1%}" for accuracy in (run["start"], curve[-1]["held_out"]))
        rows.append([str(run["seed"]), str(len(curve)), before, after, f"{run['minutes']:.1f}"])
    headings = ["seed", "iterations", "held out before", "held out after", "minutes"]
    Console().print(Sheet("Runs", headings, rows, num_labels=1).rich())
    write_result({"runs": runs}, out / "rl.json")


if __name__ == "__main__":
    typer.run(main)
