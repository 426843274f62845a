"""Command line ``vllm-dllm``."""

import typer

app = typer.Typer(help="Tools for diffusion language models in vLLM.", no_args_is_help=True)
