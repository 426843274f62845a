"""How one request was denoised: recorded in the engine, played in a page, drawn in a picture.

``record`` runs a request in an engine and makes a ``Trace`` of what ``BlockDiffusionSampler.recorder`` is told: plain
values, no tensors. ``render_html`` and ``render_png`` need nothing but a ``Trace``.
"""

import importlib.util
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console

from vllm_dllm.methods import BY_KIND, PolicyName, VerifierName, policy_row
from vllm_dllm.options.drafts import drafts_beside_block
from vllm_dllm.options.schema import MOST_DRAFTS, REQUEST_PREFIX

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from vllm import LLM, RequestOutput, SamplingParams

    from vllm_dllm.observe.recorder import Round

Source = Literal["policy", "draft", "edit", "prefill"]
"""What put a token in its place: the policy, an accepted draft, token editing, or the forward before the first block
(families with shifted logits)."""

MOST_LABELS = 110
"""Positions whose tokens still can be read below the picture."""


@dataclass(frozen=True)
class Branch:
    """A state of the block that a forward saw, W positions wide."""

    tokens: tuple[int, ...]
    """[W], with mask tokens."""
    predicted: tuple[int, ...]
    """[W]: token that each position would get."""
    confidence: tuple[float, ...]
    """[W]: its probability."""
    reached: bool
    """On the accepted path."""


@dataclass(frozen=True)
class Forward:
    """One forward of the request after its prefill."""

    block_start: int
    """Absolute position of column 0."""
    first: int
    """First column that is not prompt."""
    denoised: bool
    """False where the forward only wrote a finished block to the K/V cache."""
    branches: tuple[Branch, ...]
    """The block as it stood, then the drafts."""
    accepted: int
    """Index in ``branches`` of the one whose logits were used."""
    chosen: tuple[bool, ...]
    """[W]: positions unmasked from those logits."""
    tokens: tuple[int, ...]
    """[W]: the block afterwards."""


@dataclass(frozen=True)
class Trace:
    """All forwards of one request, and what is needed to show them."""

    model: str
    prompt: str
    settings: tuple[tuple[str, str], ...]
    """Names and values of the options that the request was decoded with."""
    prompt_length: int
    """Tokens of the prompt, those of the chat template included."""
    output_length: int
    """Tokens that were returned. What was denoised behind them was dropped."""
    mask_token_id: int
    special_token_ids: frozenset[int]
    texts: Mapping[int, str]
    """Text of every token that occurs."""
    forwards: tuple[Forward, ...]


class Change(NamedTuple):
    """A position that a forward gave a token."""

    position: int
    token: int
    source: Source


class Totals(NamedTuple):
    """Counts up to and including a forward."""

    tokens: int
    """Positions of the answer that hold a token."""
    drafts: int
    """Drafts that were forwarded."""
    accepted: int
    """Those on the accepted path."""


# Recording.


def record(llm: "LLM", prompt: str, params: "SamplingParams", model: str) -> Trace:
    """Decode one prompt and keep every forward of it.

    The prompt is a user's message; where the tokenizer has no chat template, it is text to go on from.

    Args:
        llm: an engine in this process, without other requests.
        model: what to call it.

    Raises:
        RuntimeError: the engine did not report all forwards.
    """
    from vllm_dllm.observe.recorder import recording

    forwards: list[Forward] = []
    with recording(llm, lambda round_: forwards.append(read_round(round_, 0))):
        if llm.get_tokenizer().chat_template:
            (output,) = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
        else:
            (output,) = llm.generate(prompt, params, use_tqdm=False)
    return _make_trace(llm, prompt, params, model, output, forwards)


def read_round(round_: "Round", request: int) -> Forward:
    """What a round says of the request with this index in it."""
    present = round_.present[request].nonzero().flatten().tolist()
    branches = tuple(
        Branch(
            tokens=tuple(round_.branches[request, branch].tolist()),
            predicted=tuple(round_.predicted[request, branch].tolist()),
            confidence=tuple(round_.confidence[request, branch].tolist()),
            reached=bool(round_.reached[request, branch]),
        )
        for branch in present
    )
    return Forward(
        block_start=int(round_.block_start[request]),
        first=int(round_.first[request]),
        denoised=bool(round_.denoised[request]),
        branches=branches,
        accepted=present.index(int(round_.accepted[request])),
        chosen=tuple(round_.chosen[request].tolist()),
        tokens=tuple(round_.tokens[request].tolist()),
    )


def token_texts(tokenizer: Any, token_ids: Iterable[int]) -> dict[int, str]:
    """Text of each token as it reads behind another one.

    A token that is part of a character only has no text; its name in the vocabulary stands in for it.
    """
    texts = {}
    for token in sorted(set(token_ids)):
        # SentencePiece drops the space before the first token of a text: take the second of two.
        text = tokenizer.decode([token, token])[len(tokenizer.decode([token])) :]
        if not text or "\N{REPLACEMENT CHARACTER}" in text:
            text = tokenizer.convert_ids_to_tokens(token) or f"<{token}>"
        texts[token] = text
    return texts


def _make_trace(
    llm: "LLM",
    prompt: str,
    params: "SamplingParams",
    model: str,
    output: "RequestOutput",
    forwards: list[Forward],
) -> Trace:
    from vllm_dllm import request_stats

    nfe = request_stats(output).nfe
    if len(forwards) < nfe:
        raise RuntimeError(f"the request took {nfe} forwards, but only {len(forwards)} were recorded")
    # With asynchronous scheduling a step may already be on its way when the request turns out to have ended.
    del forwards[nfe:]
    tokenizer = llm.get_tokenizer()
    occurring = itertools.chain.from_iterable(
        itertools.chain(forward.tokens, *((*branch.tokens, *branch.predicted) for branch in forward.branches))
        for forward in forwards
    )
    return Trace(
        model=model,
        prompt=prompt,
        settings=_settings(llm, params),
        prompt_length=len(output.prompt_token_ids or ()),
        output_length=len(output.outputs[0].token_ids),
        mask_token_id=llm.model_config.hf_config.mask_token_id,
        special_token_ids=frozenset(tokenizer.all_special_ids),
        texts=token_texts(tokenizer, occurring),
        forwards=tuple(forwards),
    )


def _settings(llm: "LLM", params: "SamplingParams") -> tuple[tuple[str, str], ...]:
    from vllm_dllm.geometry import geometry_of
    from vllm_dllm.options.resolve import options_of

    geometry = geometry_of(llm.llm_engine.vllm_config)
    options = options_of(params, geometry)
    settings: dict[str, Any] = {"block length": geometry.block_length, "policy": options.policy}
    if "threshold" in BY_KIND[options.kind].options:
        settings["threshold"] = f"{options.threshold:g}"
    settings["verify"] = options.verify
    if options.verify != "none":
        settings["drafts per forward"] = f"at most {options.num_drafts}"
    settings["temperature"] = f"{params.temperature:g}"
    if params.seed is not None:
        settings["seed"] = params.seed
    return tuple((name, str(value)) for name, value in settings.items())


# What follows from the forwards.


def changes(trace: Trace) -> list[list[Change]]:
    """The positions that each forward gave a token, from left to right."""
    known: dict[int, int] = {}
    return [list(_changes(forward, known, trace.mask_token_id)) for forward in trace.forwards]


def _changes(forward: Forward, known: dict[int, int], mask: int) -> Iterator[Change]:
    for column in range(forward.first, len(forward.tokens)):
        position, token = forward.block_start + column, forward.tokens[column]
        drafted = False
        if forward.denoised:
            before = forward.branches[0].tokens[column]
            if before != mask and position not in known:
                known[position] = before
                yield Change(position, before, "prefill")
            drafted = before == mask and forward.branches[forward.accepted].tokens[column] != mask
        if token not in (mask, known.get(position)):
            edited = position in known
            known[position] = token
            yield Change(position, token, "draft" if drafted else "edit" if edited else "policy")


def totals(trace: Trace) -> list[Totals]:
    """Running counts, one entry per forward."""
    end = trace.prompt_length + trace.output_length
    unmasked: set[int] = set()
    drafts = accepted = 0
    result = []
    for forward, changed in zip(trace.forwards, changes(trace), strict=True):
        unmasked.update(change.position for change in changed if change.position < end)
        if forward.denoised:
            drafts += len(forward.branches) - 1
            accepted += sum(branch.reached for branch in forward.branches[1:])
        result.append(Totals(len(unmasked), drafts, accepted))
    return result


def block_steps(trace: Trace) -> list[int]:
    """Number of each forward within its block, from 0. Forwards are coloured by it."""
    seen: Counter[int] = Counter()
    steps = []
    for forward in trace.forwards:
        steps.append(seen[forward.block_start])
        seen[forward.block_start] += 1
    return steps


# Rendering.


def render_html(trace: Trace) -> str:
    """A page that plays the trace, without anything outside of it."""
    page = files("vllm_dllm.commands").joinpath("trace.html").read_text(encoding="utf-8")
    # Inside a script element only "<" can end the data; in JSON it can be written without it.
    data = json.dumps(_page_data(trace), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return page.replace("@DATA@", data)


def _page_data(trace: Trace) -> dict[str, Any]:
    return {
        "model": trace.model,
        "prompt": trace.prompt,
        "settings": trace.settings,
        "promptLength": trace.prompt_length,
        "outputLength": trace.output_length,
        "mask": trace.mask_token_id,
        "special": sorted(trace.special_token_ids),
        "texts": trace.texts,
        "forwards": [
            {
                "blockStart": forward.block_start,
                "denoised": forward.denoised,
                "step": step,
                "branches": [
                    {
                        "tokens": branch.tokens,
                        "predicted": branch.predicted,
                        "confidence": [round(value, 4) for value in branch.confidence],
                        "reached": branch.reached,
                    }
                    for branch in forward.branches
                ],
                "accepted": forward.accepted,
                "chosen": [column for column, chosen in enumerate(forward.chosen) if chosen],
                "changes": changed,
                "totals": counts._asdict(),
            }
            for forward, step, changed, counts in zip(
                trace.forwards, block_steps(trace), changes(trace), totals(trace), strict=True
            )
        ],
    }


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
    steps = block_steps(trace)
    # [forwards, positions]: state after each forward. NaN: the block has not begun; -1: masked.
    grid = np.full((num_forwards, length), np.nan)
    tokens = [trace.mask_token_id] * length
    drafted: list[tuple[int, int]] = []
    by_source: list[Counter[Source]] = []
    for index, (forward, changed) in enumerate(zip(trace.forwards, changes(trace), strict=True)):
        block_end = forward.block_start + len(forward.tokens) - start
        rest = grid[index:, :block_end]
        rest[np.isnan(rest)] = -1
        inside = [change for change in changed if change.position - start < length]
        for position, token, source in inside:
            grid[index:, position - start] = steps[index]
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
    image = axes.imshow(
        np.ma.masked_where(~(grid >= 0), grid + 1), cmap="viridis", vmin=1, vmax=max(steps, default=0) + 1, **layers
    )
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
    settings = ", ".join(f"{name} {value}" for name, value in trace.settings)
    figure.suptitle(f"{trace.model}\n{settings}", fontsize=9, parse_math=False)
    figure.supxlabel(caption(trace), fontsize=10)
    return figure


def caption(trace: Trace) -> str:
    """The totals in words."""
    forwards, counts = len(trace.forwards), totals(trace)[-1]
    words = f"{trace.output_length} tokens in {forwards} forwards, {trace.output_length / forwards:.2f} per forward"
    if counts.drafts:
        words += f"; {counts.accepted} of {counts.drafts} drafts accepted"
    return words


def _visible(text: str) -> str:
    """One line without blanks that cannot be seen."""
    return "".join({"\n": "⏎", "\t": "⇥", " ": "·"}.get(c, c if c.isprintable() else "?") for c in text)


# The command.


def _file_to_write(path: Path | None) -> Path | None:
    """Refuse a path that cannot be written, before anything expensive is done for it."""
    if path is None:
        return None
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


def make_options(
    policy: PolicyName | None,
    threshold: float | None,
    verify: VerifierName,
    drafts: int | None,
    draft_graph: Path | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine options and request options (without prefix) of a traced request.

    Raises:
        typer.BadParameter: an option is given that nothing would use.
    """
    if None not in (threshold, policy) and "threshold" not in policy_row(str(policy), timesteps=False).options:
        raise typer.BadParameter(f"policy {policy!r} has none", param_hint="--threshold")
    if verify == "none" and drafts is not None:
        raise typer.BadParameter("nothing is drafted without --verify", param_hint="--drafts")
    if verify not in ("spiffy", "psd") and draft_graph is not None:
        raise typer.BadParameter("it goes with --verify spiffy or psd", param_hint="--draft-graph")
    engine = {"max_drafts": drafts_beside_block(verify, drafts), "draft_graph": draft_graph and str(draft_graph)}
    request = {"policy": policy, "threshold": threshold, "verify": verify, "drafts": drafts}
    return (
        {key: value for key, value in engine.items() if value is not None},
        {key: value for key, value in request.items() if value is not None},
    )


def trace(
    model: Annotated[str, typer.Option(help="Path or hub name of a diffusion language model.")],
    prompt: Annotated[str, typer.Option(help="What to answer.")],
    out: Annotated[Path, typer.Option(callback=_file_to_write, help="Page to write; it needs no other file.")],
    png: Annotated[Path | None, typer.Option(callback=_file_to_write, help="Picture to write beside it.")] = None,
    verify: Annotated[VerifierName, typer.Option(help="Skip denoising steps with drafts.")] = "none",
    drafts: Annotated[
        int | None,
        typer.Option(min=0, max=MOST_DRAFTS, help="Drafts per forward, counted as the method's paper does."),
    ] = None,
    draft_graph: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of 'vllm-dllm calibrate'.")
    ] = None,
    policy: Annotated[PolicyName | None, typer.Option(help="Decoding policy. Default: the model's.")] = None,
    threshold: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of 'threshold' and 'localleap'.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most probable token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the noise at temperatures above 0.")] = None,
) -> None:
    """Decode one prompt and write a page that plays the denoising, forward by forward."""
    engine_options, request_options = make_options(policy, threshold, verify, drafts, draft_graph)
    if seed is not None and temperature == 0:
        raise typer.BadParameter("nothing is drawn without --temperature", param_hint="--seed")
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("it needs matplotlib: pip install 'vllm-dllm[bench]'", param_hint="--png")
    from vllm_dllm.commands.cli import load_engine  # that module imports this one

    console = Console()
    with console.status("Loading the model"):
        llm = load_engine(model, engine_options)
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        extra_args={f"{REQUEST_PREFIX}{key}": value for key, value in request_options.items()},
    )
    try:
        with console.status("Decoding"):
            recorded = record(llm, prompt, params, model)
    except VLLMValidationError as error:
        raise typer.BadParameter(str(error)) from error
    out.write_text(render_html(recorded), encoding="utf-8")
    if png is not None:
        render_png(recorded, png)
    console.print(caption(recorded), highlight=False)
