"""``vllm-dllm calibrate``: a draft graph for a model, from what it decodes.

The algorithm is in ``vllm_dllm.decoding.calibration``; here is what it needs: prompts, and a record of an engine's
steps. Nothing that loads torch is imported before the arguments are known to be right.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_dllm.commands.engine import (
    BUNDLED_MODEL,
    ModelOption,
    bundled_model,
    check_differ,
    file_to_write,
    load_engine,
    make_table,
    picture_to_write,
    refusals,
    request_options,
    writing,
)
from vllm_dllm.commands.problems import BUNDLED_QUESTIONS, train_questions
from vllm_dllm.commands.prompts import Prompt, read_prompts
from vllm_dllm.methods import BY_KIND, POLICIES, SCHEDULES, PolicyName
from vllm_dllm.options.resolved import ResolvedOptions

if TYPE_CHECKING:
    import torch
    from vllm import LLM

    from vllm_dllm.decoding.calibration import Candidate, Step, Trajectory
    from vllm_dllm.decoding.draft_graph import DraftGraph
    from vllm_dllm.observe.recorder import Round

DEFAULT_PROMPTS = 50
"""As many as the paper's."""

PROMPTS_AT_A_TIME = 8

POLICY_NUMBERS: dict[PolicyName, tuple[str, ...]] = {
    row.name: (*(name for name in row.options if name not in SCHEDULES), *({"tokens_per_step"} & {*row.options}))
    for row in POLICIES
    if row.orders_by in ("confidence", "position") and not row.counts_steps and not row.needs_windows
}
"""Options that each policy goes by. The recorder tells the confidence of positions, not their entropy or margin, and a
draft graph has no place for the number of a step."""


# Record.


class Recording:
    """Recorder of the steps of requests without drafts."""

    def __init__(self, mask_token_id: int, *, left_to_right: bool, sub_block_length: int | None):
        self.mask_token_id = mask_token_id
        self.left_to_right = left_to_right
        self.sub_block_length = sub_block_length
        self.blocks: list[list[Step]] = []
        """Steps of every block, finished or not."""
        # Of each request's last step: the block it belongs to, and the state it left.
        self._last: dict[str, tuple[list[Step], int, list[int]]] = {}

    def __call__(self, round_: "Round") -> None:
        from vllm_dllm.decoding.calibration import Step
        from vllm_dllm.decoding.draft_graph import MOST_VOCAB_RANK

        masked, ranks = self._ranks(round_)
        top_tokens = round_.top_tokens(MOST_VOCAB_RANK).tolist()
        predicted = round_.predicted[range(len(round_.req_ids)), round_.accepted].tolist()
        for d, req_id in enumerate(round_.req_ids):
            if not round_.denoised[d]:
                continue
            before, after = round_.branches[d, 0].tolist(), round_.tokens[d].tolist()
            start, first = int(round_.block_start[d]), int(round_.first[d])
            changed = [column for column in range(first, len(after)) if before[column] != after[column]]
            unmasked = {column: after[column] for column in changed if before[column] == self.mask_token_id}
            left = masked[d].nonzero().flatten().tolist()
            step = Step(
                unmasked=unmasked,
                edited=len(unmasked) < len(changed),
                ranks={column: int(ranks[d, column]) + 1 for column in left},
                # As drafts have them: among equally good tokens, the predicted one is the best.
                top_tokens={
                    column: list(dict.fromkeys((predicted[d][column], *top_tokens[d][column])))[:MOST_VOCAB_RANK]
                    for column in left
                },
            )
            last = self._last.get(req_id)
            # A request that was preempted starts its block again.
            if last is None or last[1:] != (start, before):
                self.blocks.append([])
                last = self.blocks[-1], start, before
            last[0].append(step)
            self._last[req_id] = last[0], start, after

    def _ranks(self, round_: "Round") -> "tuple[torch.Tensor, torch.Tensor]":
        """Positions that the step left masked, and their ranks from 0 as for drafts. [D, W] bool and int64."""
        import torch

        from vllm_dllm.decoding.drafters import ranks

        tokens = round_.tokens
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        masked = (tokens == self.mask_token_id) & (columns >= round_.first.unsqueeze(1))
        if self.left_to_right:
            scores = -columns.float().expand_as(tokens)
        else:
            requests = torch.arange(len(tokens), device=tokens.device)
            scores = round_.confidence[requests, round_.accepted]
        return masked, ranks(scores.where(masked, -torch.inf), self.sub_block_length)


def record(
    llm: "LLM", prompts: Sequence[Prompt], extra_args: dict[str, Any], max_tokens: int, console: Console
) -> tuple[list[list["Step"]], ResolvedOptions]:
    """Decode the prompts greedily and without drafts; the steps of every block, and the options that applied.

    Raises:
        ValueError: there are messages, and the model has no chat template.
    """
    from vllm import SamplingParams

    from vllm_dllm.geometry import geometry_of
    from vllm_dllm.observe.recorder import recording
    from vllm_dllm.options.resolve import options_of

    has_template = llm.get_tokenizer().chat_template is not None
    if not has_template and not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("the model has no chat template, and can take no messages; give prompts")
    geometry = geometry_of(llm.llm_engine.vllm_config)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, extra_args=extra_args)
    resolved = options_of(params, geometry)
    recorded = Recording(
        llm.model_config.hf_config.mask_token_id,
        left_to_right=BY_KIND[resolved.kind].orders_by == "position",
        sub_block_length=geometry.options.sub_block_length,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with recording(llm, recorded), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Decoding", total=len(prompts))
        for begin in range(0, len(prompts), PROMPTS_AT_A_TIME):
            some: list[Any] = [*prompts[begin : begin + PROMPTS_AT_A_TIME]]
            if has_template:
                chats = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in some]
                llm.chat(chats, params, use_tqdm=False)
            else:
                llm.generate(some, params, use_tqdm=False)
            progress.advance(task, len(some))
    return recorded.blocks, resolved


# Show.


def show(selected: Sequence["Candidate"], trajectories: Sequence["Trajectory"]) -> Table:
    """The graph's nodes, and what drafting them all would have saved."""
    from vllm_dllm.decoding.calibration import forwards
    from vllm_dllm.decoding.draft_graph import format_node

    steps = sum(len(trajectory) for trajectory in trajectories)
    without = forwards(trajectories, [])
    with_graph = forwards(trajectories, [candidate.node for candidate in selected])
    return make_table(
        ("node", "level", "count", "share of steps"),
        [(format_node(each.node), each.level, each.count, f"{each.count / steps:.1%}") for each in selected],
        caption=f"(i,j): best token number j of the masked position number i. Drafting all nodes: {with_graph} instead "
        f"of {without} denoising forwards ({without / with_graph:.2f}x)",
    )


def draw(graph: "DraftGraph", path: Path) -> None:
    """Draw a graph: nodes by size from left to right, each linked to its largest subsets, and what the signs mean."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from vllm_dllm.decoding.draft_graph import format_node

    columns = [list(column) for _, column in itertools.groupby(sorted(graph.nodes, key=len), key=len)]
    place = {
        node: (number, (len(column) - 1) / 2 - row)
        for number, column in enumerate(columns, 1)
        for row, node in enumerate(column)
    }
    height = max(len(column) for column in columns)
    tall = 1.1 * height + 1.1
    figure = Figure(figsize=(max(1.6 * (len(columns) + 1), 6.0), tall))
    # Room for the title above, and for what the signs mean below.
    axes = figure.add_axes((0.02, 0.6 / tall, 0.96, 1 - 1.0 / tall))
    axes.axis("off")
    title = f"Draft graph of {graph.model or graph.family or 'any model'}"
    if graph.policy is not None:
        title += f", policy {graph.policy['policy']}"
    if graph.counts is not None:
        title += ": nodes and how often they occurred"
    axes.set_title(title, fontsize=10)
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    box = {"boxstyle": "round", "ec": "0.4"}
    root = axes.text(0, 0, "the block\nas it stands", bbox={**box, "fc": "white"}, **style)
    drawn = {}
    most = max(graph.counts or (1,)) or 1
    for index, node in enumerate(graph.nodes):
        pairs = format_node(node).split()
        label = "\n".join(" ".join(pairs[i : i + 2]) for i in range(0, len(pairs), 2))
        count = graph.counts[index] if graph.counts is not None else 0
        if graph.counts is not None:
            label += f"\n{count}"
        colour = (0.75 - 0.45 * count / most, 0.87 - 0.2 * count / most, 1.0)
        drawn[node] = axes.text(*place[node], label, bbox={**box, "fc": colour}, **style)
    for node in graph.nodes:
        subsets = [other for other in graph.nodes if other < node]
        nearest = [other for other in subsets if not any(other < another for another in subsets)]
        for start in [drawn[other] for other in nearest] or [root]:
            # From the border of one box to that of the other.
            ends = {"patchA": start.get_bbox_patch(), "patchB": drawn[node].get_bbox_patch()}
            arrow = {"arrowstyle": "->", "color": "0.5", "shrinkA": 0, "shrinkB": 0, **ends}
            axes.annotate("", place[node], start.get_position(), arrowprops=arrow, zorder=4)
    notation = (
        "(i,j): the best token number j of the masked position number i, positions ordered as the policy orders them\n"
        "box: a draft, which fills these tokens into the block"
        + (" (and how often it occurred)" * bool(graph.counts))
        + "\narrow: the draft at its end fills in the same and more"
    )
    figure.text(0.5, 0, notation, fontsize=7, ha="center", va="bottom", color="0.35")
    axes.set_xlim(-0.5, len(columns) + 0.5)
    axes.set_ylim(-height / 2 - 0.2, height / 2 + 0.2)
    with rc_context({"svg.fonttype": "none"}), writing(path):
        figure.savefig(path, dpi=150)


# Command.


def _numbers(policy: PolicyName, given: dict[str, float | None]) -> tuple[str, ...]:
    """Return the options that the policy goes by.

    Raises:
        typer.BadParameter: the policy cannot be calibrated for, or has no such option.
    """
    numbers = POLICY_NUMBERS.get(policy)
    if numbers is None:
        raise typer.BadParameter(
            f"{policy!r} cannot be calibrated for; {', '.join(POLICY_NUMBERS)} can", param_hint="--policy"
        )
    for name, value in given.items():
        if value is not None and name not in numbers:
            raise typer.BadParameter(f"policy {policy!r} has none", param_hint=f"--{name.replace('_', '-')}")
    return numbers


def _picture_to_write(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in (".svg", ".png"):
        raise typer.BadParameter(f"{path} must end in .svg or .png")
    return picture_to_write(path)


def _prompts(model: str, path: Path | None, limit: int | None) -> tuple[list[Prompt], str]:
    """Return the prompts to decode, and what the draft graph says of them.

    Raises:
        typer.BadParameter: the file is wrong, or a model that is not the bundled one has no file.
    """
    if path is not None:
        try:
            return read_prompts(path)[:limit], path.name
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--prompts") from None
    if Path(model).resolve() == BUNDLED_MODEL.resolve():
        if limit is not None and limit > BUNDLED_QUESTIONS:
            raise typer.BadParameter(
                f"{limit} is more than the {BUNDLED_QUESTIONS} problems that there are without --prompts",
                param_hint="--limit",
            )
        return [*train_questions(limit or DEFAULT_PROMPTS)], "arithmetic problems of the training split"
    raise typer.BadParameter("is needed: prompts like those that the model will serve", param_hint="--prompts")


def calibrate(
    out: Annotated[Path, typer.Option(callback=file_to_write, help="JSON file to write the graph to.")],
    model: ModelOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A prompt per line; a file *.jsonl has objects with 'prompt' or 'messages'. "
            "Default, for the bundled model only: arithmetic problems.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Use only the first prompts. Default: all, or {DEFAULT_PROMPTS} problems."),
    ] = None,
    drafts: Annotated[int, typer.Option(min=1, max=64, help="Nodes of the graph.")] = 10,
    lookahead: Annotated[int, typer.Option(min=1, max=64, help="Steps to look ahead from every step.")] = 5,
    policy: Annotated[PolicyName, typer.Option(help="Decoding policy to calibrate for.")] = "threshold",
    threshold: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Confidence threshold. Default: the model family's.")
    ] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a step unmasks, at least. Default: 1.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate per prompt.")] = 256,
    picture: Annotated[
        Path | None, typer.Option(callback=_picture_to_write, help="File *.svg or *.png to draw the graph to.")
    ] = None,
) -> None:
    """Find out which drafts pay for a model, and write them as a draft graph for verify='spiffy' and 'psd'."""
    check_differ(out=out, picture=picture, prompts=prompts)
    given = {"threshold": threshold, "tokens_per_step": tokens_per_step}
    numbers = _numbers(policy, given)
    model = model or bundled_model()
    asked, data = _prompts(model, prompts, limit)

    console = Console()
    with console.status("Loading the model"):
        llm = load_engine(model)
    try:
        with refusals():
            blocks, resolved = record(llm, asked, request_options(policy=policy, **given), max_tokens, console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    from vllm_dllm.decoding.calibration import candidates, select, trajectory
    from vllm_dllm.decoding.draft_graph import DraftGraph, fingerprint

    trajectories = [trajectory(block, lookahead) for block in blocks]
    found = candidates(trajectories)
    selected = select(found, drafts)
    if not selected:
        raise typer.BadParameter("nothing to draft: blocks took a step or two; give more --prompts, another --policy")
    hf_config = llm.model_config.hf_config
    policy_numbers = {name: getattr(resolved, "quota" if name == "tokens_per_step" else name) for name in numbers}
    graph = DraftGraph(
        nodes=tuple(candidate.node for candidate in selected),
        counts=tuple(candidate.count for candidate in selected),
        model=Path(model).resolve().name if Path(model).exists() else model,
        fingerprint=fingerprint(hf_config),
        family=hf_config.traits.family,
        block_length=hf_config.block_length,
        policy={"policy": policy, **policy_numbers},
        data=data,
        prompts=len(asked),
        steps=sum(len(t) for t in trajectories),
        lookahead=lookahead,
    )
    with writing(out):
        graph.save(out)
    if picture is not None:
        draw(graph, picture)
    console.print(show(selected, trajectories))
    if len(selected) < drafts:
        console.print(
            f"Only {len(selected)} drafts, not {drafts}: there were no more among the most frequent of "
            f"{lookahead} levels. A longer --lookahead finds more."
        )
    console.print(f"Wrote {out}" + ("" if picture is None else f" and {picture}"))
