"""What the runs of ``examples/rl.py`` learned: a table, and their curves in one file.

``python benchmarks/rl.py --help``; ``docs/rl.md`` says how the runs are made.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from record import RESULTS, write_result
from rich.console import Console
from rich.table import Table


def main(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `examples/rl.py train` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the result.")] = RESULTS,
) -> None:
    """Collect the curves of several runs."""
    runs = [json.loads((folder / "curve.json").read_text()) for folder in folders]
    table = Table("seed", "iterations", "held out before", "held out after", "minutes")
    for run in runs:
        curve = run["curve"]
        before, after = (f"{accuracy:.1%}" for accuracy in (run["start"], curve[-1]["held_out"]))
        table.add_row(str(run["seed"]), str(len(curve)), before, after, f"{run['minutes']:.1f}")
    Console().print(table)
    write_result({"runs": runs}, out / "rl.json")


if __name__ == "__main__":
    typer.run(main)
