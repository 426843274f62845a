"""Diffusion-to-autoregressive (D2A) alignment: train a diffusion drafter to continue the texts of an AR target.

Source: DEER (arXiv 2512.15176), Section 3.1 and Appendix A. The steps, each ``python -m vllm_dllm.training.d2a STEP``:
``convert`` makes a drafter of an autoregressive checkpoint, ``pretrain`` makes it a diffusion model, ``generate``
writes the target's answers, ``distill`` is stage I, ``refine`` stage II, ``evaluate`` counts the drafts that the target
accepts, ``regenerate`` shows what a drafter completes. ``docs/deer-training.md`` describes them.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.nn import functional as F
from transformers.trainer_utils import SchedulerType

from vllm_dllm.tiny.arithmetic import HELD_OUT_SEED, make_problems
from vllm_dllm.training.alignment import (
    Context,
    DrafterIds,
    Draw,
    draw_distill,
    draw_pretrain,
    draw_refine,
    lay_out,
)
from vllm_dllm.training.answers import write_answers
from vllm_dllm.training.conversion import convert_checkpoint
from vllm_dllm.training.data import (
    Example,
    TrainingError,
    encode_prompts,
    generated_pairs,
    load_tokenizer,
    pad_token_id_of,
    read_records,
)
from vllm_dllm.training.evaluation import parse_engine, speculate
from vllm_dllm.training.layouts import load_network, read_config
from vllm_dllm.training.regeneration import regenerate as regenerate_answer
from vllm_dllm.training.trainer import TuneArguments, clear_errors, default_of, parse_arguments, tune

logger = logging.getLogger(__name__)

Stage = Literal["pretrain", "distill", "refine"]
NOISY_ALPHA = 1.02
"""From here on the paper saw noise and upward drift in the loss of stage II (Figure 6)."""
MAX_ALPHA = 1.05
"""Here the paper saw it diverge."""


# --- a run ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class DistillArguments(TuneArguments):
    """Options of stage I. Learning rate and epochs are the paper's, which states no schedule and no batch size."""

    LEAST: ClassVar[dict[str, int]] = {**TuneArguments.LEAST, "draws": 1}

    model: str = field(metadata={"help": "Folder of the drafter, from `convert` or another stage."})
    draws: int = field(
        default=4,
        metadata={"help": "Truncations and masks per example; with causal context they share the prefix."},
    )
    per_device_train_batch_size: int = default_of("per_device_train_batch_size", 16)
    learning_rate: float = default_of("learning_rate", 1e-4)
    lr_scheduler_type: SchedulerType | str = field(default="cosine", metadata={"help": "Of the learning rate."})


@dataclass(kw_only=True)
class PretrainArguments(DistillArguments):
    """Options of diffusion training before stage I, with the paper's epochs; its learning rate is stage I's."""

    num_train_epochs: float = default_of("num_train_epochs", 40.0)


@dataclass(kw_only=True)
class RefineArguments(DistillArguments):
    """Options of stage II."""

    alpha: float = field(
        default=1.01, metadata={"help": "Base of the weights alpha^(R-i); 1.02 and more is unstable, 1.05 diverges."}
    )
    allow_diverging_alpha: bool = field(
        default=False, metadata={"help": f"Take an --alpha of {MAX_ALPHA} and more, as the paper's Figure 6 does."}
    )
    max_masked: int = field(default=96, metadata={"help": "R is uniform up to this; paper: 96."})
    learning_rate: float = default_of("learning_rate", 5e-5)

    def __post_init__(self) -> None:
        check_alpha(self.alpha, self.allow_diverging_alpha)
        if self.max_masked < 1:
            raise TrainingError(f"--max-masked={self.max_masked} must be at least 1")
        super().__post_init__()


ARGUMENTS: dict[str, type[DistillArguments]] = {
    "pretrain": PretrainArguments,
    "distill": DistillArguments,
    "refine": RefineArguments,
}
"""By stage."""


def check_alpha(alpha: float, allow_diverging: bool = False) -> None:
    """Refuse or warn of bases of stage II's weights that the paper found unstable.

    Raises:
        TrainingError: below 1, or :data:`MAX_ALPHA` and above without ``allow_diverging``.
    """
    if alpha < 1:
        raise TrainingError(f"--alpha={alpha} must be at least 1: the tokens nearest to the prefix weigh most")
    if alpha >= MAX_ALPHA and not allow_diverging:
        raise TrainingError(
            f"--alpha={alpha} must be below {MAX_ALPHA}, where DEER's authors saw training diverge; "
            "--allow-diverging-alpha runs it nevertheless"
        )
    if alpha >= NOISY_ALPHA:
        logger.warning("--alpha=%s: from %s on DEER's authors saw a noisy, rising loss", alpha, NOISY_ALPHA)


def draw_visit(
    example: Example,
    generator: torch.Generator,
    *,
    args: DistillArguments,
    pad_token_id: int,
    end_token_ids: Collection[int] | None = None,
) -> list[Draw]:
    """The draws of one visit of an example.

    Args:
        end_token_ids: answers that end in one of these are padded; the others were cut off and go on. ``None``: all.
    """
    is_whole = end_token_ids is None or int(example.tokens[-1]) in end_token_ids
    padded = Example(F.pad(example.tokens, (0, args.padding * is_whole), value=pad_token_id), example.prompt_length)
    if isinstance(args, RefineArguments):
        return [draw_refine(padded, args.alpha, args.max_masked, generator) for _ in range(args.draws)]
    draw = draw_pretrain if isinstance(args, PretrainArguments) else draw_distill
    return [draw(padded, generator) for _ in range(args.draws)]


def align(args: DistillArguments, stage: Stage) -> None:
    """Read drafter and data, train, and write the drafter.

    Raises:
        TrainingError: drafter or data cannot be used; the message says why.
    """
    model = Path(args.model)
    ids = DrafterIds.of(model)
    if stage == "pretrain":
        ids = replace(ids, sep=None)  # nothing is cut off
    tokenizer = load_tokenizer(model)
    examples = args.read_examples(tokenizer, read_config(model)["vocab_size"])
    pad = pad_token_id_of(tokenizer)
    draw = partial(draw_visit, args=args, pad_token_id=pad, end_token_ids={tokenizer.eos_token_id, pad})
    tune(args, stage, examples, draw, partial(lay_out, ids=ids))


# --- the commands --------------------------------------------------------------------------------------------------


app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train a diffusion drafter for an AR target (DEER).")
_console = Console()
_clear_errors = partial(clear_errors, "d2a")


@app.command()
def convert(
    model: Annotated[Path, typer.Option(help="Autoregressive checkpoint folder in Qwen2's layout, or Open-dCoder.")],
    out: Annotated[Path, typer.Option(help="Folder of the drafter.")],
    target: Annotated[
        Path | None, typer.Option(help="Checkpoint folder of the target, whose tokenizer the drafter gets.")
    ] = None,
    context: Annotated[
        Context,
        typer.Option(
            help="causal: the prefix sees only what is before it, as in the autoregressive model, so its K/V can be "
            "kept from round to round. full: everything sees everything, as in Open-dCoder."
        ),
    ] = "causal",
    sep: Annotated[bool, typer.Option(help="Put [SEP] behind the masks, as the paper does.")] = True,
    mask_token_id: Annotated[
        int | None,
        typer.Option(help="Id of a mask that the model knows (Open-dCoder: 151665); default: a spare row."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the new rows.")] = 0,
) -> None:
    """Make a drafter of an autoregressive checkpoint: rows for the mask and [SEP], and Open-dCoder's layout.

    The new ids are rows of the embedding that the tokenizer does not use. Where there are none, rows are added, and
    vocab_mapping.json says which ids drafter and target share.
    """
    with _clear_errors():
        ids = convert_checkpoint(
            model, out, target=target, context=context, sep=sep, mask_token_id=mask_token_id, seed=seed
        )
        added = "rows were added, see vocab_mapping.json" if (out / "vocab_mapping.json").exists() else "no row added"
        _console.print(f"{out}: mask {ids.mask}, [SEP] {ids.sep}, {ids.context} context, {added}")


Prompts = Annotated[Path | None, typer.Option(help='JSON lines with "prompt": user messages.')]
Engine = Annotated[
    str, typer.Option(help="Further arguments of vllm.LLM as JSON, such as '{\"tensor_parallel_size\": 2}'.")
]


def _read_prompts(path: Path) -> list[str]:
    records = read_records(path)
    for place, record in records:
        if not isinstance(record.get("prompt"), str):
            raise TrainingError(f'{place} must be an object with a string "prompt"')
    return [record["prompt"] for _, record in records]


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="The target: a folder or a name that vLLM knows.")],
    out: Annotated[Path, typer.Option(help="JSON lines file of the answers.")],
    prompts: Prompts = None,
    problems: Annotated[int | None, typer.Option(min=1, help="So many generated arithmetic problems instead.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: the target's greedy answers.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the problems and of the draws.")] = 0,
    engine: Engine = "{}",
) -> None:
    """Let the target answer prompts, with vLLM offline. Token ids are kept, so that nothing is tokenized again.

    An answer that --max-tokens cut off is written without an end token. Answers are written in portions of 1000; if OUT
    has some already, the run goes on behind them.
    """
    with _clear_errors():
        if (prompts is None) == (problems is None):
            raise TrainingError("give either --prompts or --problems")
        questions = [question for question, _ in generated_pairs(problems or 0, seed)]
        if prompts is not None:
            questions = _read_prompts(prompts)
        options: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        _console.print(write_answers(model, questions, out, **options, engine=parse_engine(engine)))


def _add_stage(stage: Stage, description: str) -> None:
    @app.command(
        stage,
        help=description,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},  # of transformers' parser
        add_help_option=False,
    )
    def run(context: typer.Context) -> None:
        with clear_errors(stage):
            align(parse_arguments(ARGUMENTS[stage], context.args, description), stage)


_add_stage(
    "pretrain",
    "Before stage I: whole answers, tokens masked at a random rate, for a model that is no diffusion model yet.",
)
_add_stage("distill", "Stage I: truncated answers, [SEP] behind them, answer tokens masked at a random rate.")
_add_stage(
    "refine", "Stage II: the last R tokens of truncated answers masked, those nearest to the prefix weighing most."
)


@app.command()
def evaluate(
    target: Annotated[str, typer.Option(help="The target: a folder or a name that vLLM knows.")],
    drafter: Annotated[list[str], typer.Option(help="A drafter or an autoregressive draft model; may be repeated.")],
    k: Annotated[
        list[int] | None, typer.Option(min=1, help="Drafts per round; may be repeated. Default: 4 8 16 32.")
    ] = None,
    prompts: Prompts = None,
    problems: Annotated[int, typer.Option(min=1, help="Held-out arithmetic problems without --prompts.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="Of the answers.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    engine: Engine = "{}",
) -> None:
    """Count the drafts that the target accepts, in the engine."""
    with _clear_errors():
        questions = [problem.question for problem in make_problems(problems, HELD_OUT_SEED, "test")]
        if prompts is not None:
            questions = _read_prompts(prompts)
        options = {"temperature": temperature, "max_tokens": max_tokens, **parse_engine(engine)}
        table = Table(title=f"{len(questions)} prompts, temperature {temperature}")
        for column in ("drafter", "k", "accepted per round", "target forwards per token", ">= 8"):
            table.add_column(column, justify="left" if column == "drafter" else "right")
        for name in drafter:
            for length in k or (4, 8, 16, 32):
                outcome = speculate(target, name, length, questions, **options)
                long = sum(rounds for count, rounds in outcome.histogram.items() if count >= 8)
                table.add_row(
                    Path(name).resolve().name if Path(name).is_dir() else name,
                    str(length),
                    f"{outcome.accepted:.2f}",
                    f"{outcome.target_forwards_per_token:.3f}",
                    f"{long / max(outcome.rounds, 1):.1%}",
                )
        _console.print(table)


@app.command()
def regenerate(
    drafter: Annotated[Path, typer.Option(help="Folder of the drafter.")],
    prompt: Annotated[str, typer.Option(help="A user message.")],
    answer: Annotated[str, typer.Option(help="The beginning of an answer, such as a block that the target wrote.")],
    masked: Annotated[
        list[int],
        typer.Option(min=1, help="Tokens at the end that a round masks and completes; repeated: one round each."),
    ],
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest tokens.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
) -> None:
    """Block regeneration (Figure 5): mask the end of an answer and let the drafter complete it, again and again."""
    with _clear_errors():
        ids, tokenizer, network = DrafterIds.of(drafter), load_tokenizer(drafter), load_network(drafter)
        (start,) = encode_prompts(tokenizer, [prompt])
        tokens = tokenizer(answer, add_special_tokens=False)["input_ids"]
        for count in masked:
            if count > len(tokens):
                raise TrainingError(f"--masked={count} is more than the answer's {len(tokens)} tokens")
        rounds = regenerate_answer(network, ids, start, tokens, masked, temperature=temperature, seed=seed)
        for count, after in zip(masked, rounds, strict=True):
            kept, new = tokenizer.batch_decode([after[:-count], after[-count:]])
            _console.print(f"{escape(kept)}[bold]{escape(new)}[/bold]", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
