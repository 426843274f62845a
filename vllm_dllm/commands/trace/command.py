"""``vllm-dllm trace``: decode one prompt and write a page that plays the denoising."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_dllm.commands.engine import (
    check_differ,
    check_policy_is_used,
    file_to_write,
    load_engine,
    picture_to_write,
    refusals,
    request_options,
    writing,
)
from vllm_dllm.commands.live import shown, waiting
from vllm_dllm.commands.trace.record import record
from vllm_dllm.commands.trace.render import caption, render_html, render_png
from vllm_dllm.methods import VERIFIER_ROWS, PolicyName, VerifierName, policy_row
from vllm_dllm.options.resolve import drafts_beside_block
from vllm_dllm.options.schema import MOST_DRAFTS


def make_options(
    policy: PolicyName | None,
    threshold: float | None,
    verify: VerifierName,
    drafts: int | None,
    draft_graph: Path | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine options and ``extra_args`` of a traced request.

    Raises:
        typer.BadParameter: an option is given that nothing would use.
    """
    if None not in (threshold, policy) and "threshold" not in policy_row(str(policy), timesteps=False).options:
        raise typer.BadParameter(f"policy {policy!r} has none", param_hint="--threshold")
    row = VERIFIER_ROWS[verify]
    if row.is_autoregressive or row.verifies_causally:
        raise typer.BadParameter(f"{verify!r} writes tokens that no denoising step does", param_hint="--verify")
    if verify == "none" and drafts is not None:
        raise typer.BadParameter("nothing is drafted without --verify", param_hint="--drafts")
    check_policy_is_used(verify, policy, threshold)
    if drafts is not None and "drafts" not in row.options:
        raise typer.BadParameter(f"verify {verify!r} has none", param_hint="--drafts")
    if verify not in ("spiffy", "psd") and draft_graph is not None:
        raise typer.BadParameter("it goes with --verify spiffy or psd", param_hint="--draft-graph")
    engine = {"max_drafts": drafts_beside_block(verify, drafts), "draft_graph": draft_graph and str(draft_graph)}
    request = request_options(policy=policy, threshold=threshold, verify=verify, drafts=drafts)
    return {key: value for key, value in engine.items() if value is not None}, request


def trace(
    model: Annotated[str, typer.Option(help="Path or hub name of a diffusion language model.")],
    prompt: Annotated[str, typer.Option(help="What to answer.")],
    out: Annotated[Path, typer.Option(callback=file_to_write, help="Page to write; it needs no other file.")],
    png: Annotated[Path | None, typer.Option(callback=picture_to_write, help="Picture to write beside it.")] = None,
    verify: Annotated[VerifierName, typer.Option(help="Skip denoising steps with drafts.")] = "none",
    drafts: Annotated[
        int | None,
        typer.Option(min=0, max=MOST_DRAFTS, help="Drafts per forward, counted as the method's paper does."),
    ] = None,
    draft_graph: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of 'vllm-dllm calibrate'.")
    ] = None,
    policy: Annotated[PolicyName | None, typer.Option(help="Decoding policy. Default: the model's.")] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Of the policies that have one, such as 'threshold'.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most probable token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the noise at temperatures above 0.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Redraw the text while it is denoised.")] = False,
) -> None:
    """Decode one prompt and write a page that plays the denoising, forward by forward."""
    check_differ(out=out, png=png, draft_graph=draft_graph)
    engine_options, extra_args = make_options(policy, threshold, verify, drafts, draft_graph)
    if seed is not None and temperature == 0:
        raise typer.BadParameter("nothing is drawn without --temperature", param_hint="--seed")
    console = Console()
    with console.status("Loading the model"):
        llm = load_engine(model, engine_options)
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, extra_args=extra_args)
    with refusals(), shown(console, model, [prompt]) if live else waiting(console, "Decoding") as show:
        recorded = record(llm, prompt, params, model, show)
    with writing(out):
        out.write_text(render_html(recorded), encoding="utf-8")
    if png is not None:
        with writing(png):
            render_png(recorded, png)
    console.print(caption(recorded), highlight=False)
