"""Options that several benchmarks have."""

from pathlib import Path
from typing import Annotated

import typer
from record import CHECKPOINTS, RESULTS, ROOT

TINY_SDAR = CHECKPOINTS / "tiny-sdar"

Sdar = Annotated[Path, typer.Option(help="Trained model, in SDAR's layout.")]
Eager = Annotated[bool, typer.Option(help="Run the model without torch.compile.")]
Repetitions = Annotated[int, typer.Option(min=1, help="Repetitions of a timing.")]
Out = Annotated[Path, typer.Option(help="Folder for the result.")]
OutOrBuild = Annotated[
    Path | None, typer.Option(help="Folder for the result. Default: benchmarks/results, or build quickly.")
]
Docs = Annotated[Path | None, typer.Option(help="Page whose marked place gets the tables.")]
Tables = Annotated[bool, typer.Option("--tables", help="Measure nothing: the tables of the last result.")]


def folder_of(out: Path | None, *, quick: bool) -> Path:
    """Folder for the result: where nothing else is asked for, quick runs leave the results in git alone."""
    return out or (ROOT / "build" if quick else RESULTS)


def check_checkpoint(path: Path, option: str = "--checkpoint") -> None:
    """Raises:
    typer.BadParameter: the folder holds no checkpoint.
    """
    if not (path / "config.json").is_file():
        raise typer.BadParameter(f"{path} holds no checkpoint", param_hint=option)
