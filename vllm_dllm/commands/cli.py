"""Command line ``vllm-dllm``."""

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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-dllm {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Tools for diffusion language models in vLLM."""
