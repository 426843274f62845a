"""Diffusion-to-autoregressive (D2A) alignment: train a diffusion drafter to continue the texts of an AR target.

Source: DEER (arXiv 2512.15176), Section 3.1 and Appendix A. The steps, each ``python -m vllm_dllm.training.d2a STEP``:
``convert`` makes a drafter of an autoregressive checkpoint, ``generate`` writes the target's answers, ``distill`` is
stage I, ``refine`` stage II, ``evaluate`` counts the drafts that the target accepts.
``docs/deer-training.md`` describes them.
"""

import contextlib
import json
import logging
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.nn import functional as F
from transformers.trainer_utils import SchedulerType

from vllm_dllm.training.acceptance import load_drafter, speculate
from vllm_dllm.training.alignment import CONTEXTS, DrafterIds, Draw, draw_distill, draw_refine, lay_out
from vllm_dllm.training.arithmetic import HELD_OUT_SEED, make_problems
from vllm_dllm.training.autoregressive import decode_greedily
from vllm_dllm.training.conversion import convert_checkpoint
from vllm_dllm.training.data import (
    Example,
    TrainingError,
    Visits,
    encode,
    encode_prompts,
    generated_pairs,
    load_tokenizer,
    pair_of,
    read_records,
    short_enough,
)
from vllm_dllm.training.layouts import load_network
from vllm_dllm.training.trainer import DiffusionTrainer, RunArguments, default_of, parse_arguments, run_command

logger = logging.getLogger(__name__)

Stage = Literal["distill", "refine"]
NOISY_ALPHA = 1.02
"""From here on the paper saw noise and upward drift in the loss of stage II (Figure 6)."""
MAX_ALPHA = 1.05
"""Here the paper saw it diverge."""


# --- a run ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class DistillArguments(RunArguments):
    """Options of stage I. Learning rate and epochs are the paper's, which states no schedule and no batch size."""

    model: str = field(metadata={"help": "Folder of the drafter, from `convert` or another stage."})
    data: list[str] | None = field(
        default=None,
        metadata={"help": "JSON lines from `generate`, or with prompt and response; without: generated arithmetic."},
    )
    draws: int = field(
        default=4,
        metadata={"help": "Truncations and masks per example; with causal context they share the prefix."},
    )
    padding: int = field(
        default=0,
        metadata={"help": "Each answer is followed by so many padding tokens, for drafts that reach behind it."},
    )
    max_length: int = field(default=4096, metadata={"help": "Longer examples (before padding) are left out."})
    problems: int = field(default=3200, metadata={"help": "Generated problems where there are no --data."})
    per_device_train_batch_size: int = default_of("per_device_train_batch_size", 16)
    num_train_epochs: float = default_of("num_train_epochs", 1.0)
    learning_rate: float = default_of("learning_rate", 1e-4)
    warmup_steps: float = default_of("warmup_steps", 50)
    lr_scheduler_type: SchedulerType | str = field(default="cosine", metadata={"help": "Of the learning rate."})

    def __post_init__(self) -> None:
        for name, least in (("draws", 1), ("padding", 0), ("problems", 1)):
            if getattr(self, name) < least:
                raise TrainingError(f"--{name}={getattr(self, name)} must be at least {least}")
        super().__post_init__()


@dataclass(kw_only=True)
class RefineArguments(DistillArguments):
    """Options of stage II."""

    alpha: float = field(
        default=1.01, metadata={"help": "Base of the weights alpha^(R-i); 1.02 and more is unstable, 1.05 diverges."}
    )
    max_masked: int = field(default=96, metadata={"help": "R is uniform up to this; paper: 96."})
    learning_rate: float = default_of("learning_rate", 5e-5)

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        if self.max_masked < 1:
            raise TrainingError(f"--max-masked={self.max_masked} must be at least 1")
        super().__post_init__()


ARGUMENTS: dict[str, type[DistillArguments]] = {"distill": DistillArguments, "refine": RefineArguments}
"""By stage."""


def check_alpha(alpha: float) -> None:
    """Refuse or warn of bases of stage II's weights that the paper found unstable.

    Raises:
        TrainingError: below 1 or :data:`MAX_ALPHA` and above.
    """
    if alpha < 1:
        raise TrainingError(f"--alpha={alpha} must be at least 1: the tokens nearest to the prefix weigh most")
    if alpha >= MAX_ALPHA:
        raise TrainingError(f"--alpha={alpha} must be below {MAX_ALPHA}, where DEER's authors saw training diverge")
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
    return [draw_distill(padded, generator) for _ in range(args.draws)]


def read_answers(paths: list[Path], tokenizer: Any, max_length: int, vocab_size: int) -> list[Example]:
    """Teacher answers of JSON lines files.

    A line has ``prompt_token_ids`` and ``response_token_ids``, as ``generate`` writes them, which are taken as they
    are; or ``prompt`` and ``response``, which are rendered in the chat template and tokenized.

    Raises:
        TrainingError: a file or a line cannot be used; the message says which and why.
    """
    tokenized: list[tuple[list[int], list[int]]] = []
    pairs: list[tuple[str, str]] = []
    for path in paths:
        for place, record in read_records(path):
            if "response_token_ids" not in record:
                pairs.append(pair_of(place, record))
                continue
            for key in ("prompt_token_ids", "response_token_ids"):
                numbers = record.get(key)
                if not isinstance(numbers, list) or not numbers or any(type(number) is not int for number in numbers):
                    raise TrainingError(f'{place}: "{key}" must be a list of token ids that is not empty')
                if not all(0 <= number < vocab_size for number in numbers):
                    raise TrainingError(f'{place}: "{key}" has ids outside of the drafter\'s {vocab_size} rows')
            tokenized.append((record["prompt_token_ids"], record["response_token_ids"]))
    examples = short_enough(tokenized, max_length) if tokenized else []
    return examples + (encode(tokenizer, pairs, tokenizer.eos_token, max_length) if pairs else [])


# --- the command ---------------------------------------------------------------------------------------------------


app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train a diffusion drafter for an AR target (DEER).")
_console = Console()


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        yield
    except (TrainingError, FileNotFoundError, ValueError) as error:
        _console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@app.command()
def convert(
    model: Annotated[Path, typer.Option(help="Autoregressive checkpoint folder in Qwen2's layout, or Open-dCoder.")],
    out: Annotated[Path, typer.Option(help="Folder of the drafter.")],
    target: Annotated[
        Path | None, typer.Option(help="Checkpoint folder of the target, whose tokenizer the drafter gets.")
    ] = None,
    context: Annotated[
        str,
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
        if context not in CONTEXTS:
            raise TrainingError(f"--context={context!r} is not one of {', '.join(CONTEXTS)}")
        ids = convert_checkpoint(
            model, out, target=target, context=context, sep=sep, mask_token_id=mask_token_id, seed=seed
        )
        added = "rows were added, see vocab_mapping.json" if (out / "vocab_mapping.json").exists() else "no row added"
        _console.print(f"{out}: mask {ids.mask}, [SEP] {ids.sep}, {ids.context} context, {added}")


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="The target: a folder or a name that vLLM knows.")],
    out: Annotated[Path, typer.Option(help="JSON lines file of the answers.")],
    prompts: Annotated[Path | None, typer.Option(help='JSON lines with "prompt": user messages.')] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="So many generated arithmetic problems instead.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: the target's greedy answers.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the problems and of the draws.")] = 0,
    engine: Annotated[
        str, typer.Option(help="Further arguments of vllm.LLM as JSON, such as '{\"tensor_parallel_size\": 2}'.")
    ] = "{}",
) -> None:
    """Let the target answer prompts, with vLLM offline. Token ids are kept, so that nothing is tokenized again.

    An answer that --max-tokens cut off is written without an end token. Answers are written in portions of 1000; if OUT
    has some already, the run goes on behind them.
    """
    with _clear_errors():
        if (prompts is None) == (problems is None):
            raise TrainingError("give either --prompts or --problems")
        if prompts is not None:
            questions = [_prompt_of(*record) for record in read_records(prompts)]
        else:
            questions = [question for question, _ in generated_pairs(problems or 0, seed)]
        try:
            options = json.loads(engine)
        except json.JSONDecodeError as error:
            raise TrainingError(f"--engine is not JSON: {error}") from None
        write_answers(model, questions, out, temperature=temperature, max_tokens=max_tokens, seed=seed, engine=options)


def _prompt_of(place: str, record: dict[str, Any]) -> str:
    if not isinstance(record.get("prompt"), str):
        raise TrainingError(f'{place} must be an object with a string "prompt"')
    return record["prompt"]


_PORTION = 1000


def _drop_unfinished_line(path: Path) -> None:
    """Remove what a run that was cut off in the middle of its last line left of it."""
    if not path.is_file():
        return
    text = path.read_bytes()
    begin = text.rfind(b"\n") + 1
    try:
        json.loads(text[begin:] or b"{}")
    except ValueError:
        with path.open("r+b") as file:
            file.truncate(begin)


def write_answers(
    model: str,
    questions: list[str],
    out: Path,
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    engine: dict[str, Any],
) -> None:
    """See :func:`generate`."""
    _drop_unfinished_line(out)
    written = [record.get("prompt") for _, record in read_records(out)] if out.is_file() else []
    done = len(written)
    if written != questions[:done]:
        raise TrainingError(f"{out} has answers to other prompts: choose another --out or remove it")
    if done == len(questions):
        _console.print(f"{out} has all {len(questions)} answers already")
        return
    if temperature > 0:
        # vLLM's older runner, its default for such models on a CPU, dies of seeds there.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    from vllm import LLM, SamplingParams, TokensPrompt

    out.parent.mkdir(parents=True, exist_ok=True)
    llm = LLM(model, **{"seed": seed, **engine})
    encoded = encode_prompts(llm.get_tokenizer(), questions)
    cut_off = 0
    for start in range(done, len(questions), _PORTION):
        ids = encoded[start : start + _PORTION]
        params = [
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + start + i)
            for i in range(len(ids))
        ]
        answers = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in ids], params)
        with out.open("a", encoding="utf-8") as file:
            for question, prompt, answer in zip(questions[start:], ids, answers, strict=False):
                output = answer.outputs[0]
                cut_off += output.finish_reason == "length"
                record = {
                    "prompt": question,
                    "response": output.text,
                    "prompt_token_ids": prompt,
                    "response_token_ids": list(output.token_ids),
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    _console.print(f"{out}: {len(questions)} answers, {cut_off} of them cut off at {max_tokens} tokens")


def align(args: DistillArguments, stage: Stage) -> None:
    """Read drafter and data, train, and write the drafter.

    Raises:
        TrainingError: drafter or data cannot be used; the message says why.
    """
    model = Path(args.model)
    ids = DrafterIds.of(model)
    if Path(args.output_dir).resolve() == model.resolve():
        raise TrainingError("--output-dir is the folder of --model, whose weights would be overwritten")
    network = args.load_network(model)
    tokenizer = load_tokenizer(model)
    if args.data:
        paths = [Path(path) for path in args.data]
        examples = read_answers(paths, tokenizer, args.max_length, network.shape.vocab_size)
    else:
        pairs = generated_pairs(args.problems, args.seed)
        examples = encode(tokenizer, pairs, tokenizer.eos_token, args.max_length)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    draw = partial(draw_visit, args=args, pad_token_id=pad, end_token_ids={tokenizer.eos_token_id, pad})
    visits = Visits(examples, draw, stage, args.seed, args.fix_steps(len(examples)))
    trainer = DiffusionTrainer(network, args, visits, partial(lay_out, ids=ids), len(examples))
    trainer.run()
    trainer.write_released(model)


_OF_TRANSFORMERS = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_OF_TRANSFORMERS, add_help_option=False)
def distill(context: typer.Context) -> None:
    """Stage I: truncated answers, [SEP] behind them, answer tokens masked at a random rate."""
    run_command("distill", lambda: align(parse_arguments(DistillArguments, context.args, distill.__doc__), "distill"))


@app.command(context_settings=_OF_TRANSFORMERS, add_help_option=False)
def refine(context: typer.Context) -> None:
    """Stage II: the last R tokens of truncated answers masked, those nearest to the prefix weighing most."""
    run_command("refine", lambda: align(parse_arguments(RefineArguments, context.args, refine.__doc__), "refine"))


@app.command()
def evaluate(
    target: Annotated[Path, typer.Option(help="Autoregressive checkpoint folder in Qwen2's layout.")],
    drafter: Annotated[
        list[Path], typer.Option(help="Folder of a drafter or of an autoregressive draft model; may be repeated.")
    ],
    k: Annotated[
        list[int] | None, typer.Option(min=1, help="Drafts per round; may be repeated. Default: 4 8 16 32.")
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Held-out arithmetic problems.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
) -> None:
    """Count the drafts that the target accepts at temperature 0, with plain full forwards on the CPU."""
    with _clear_errors():
        tokenizer = load_tokenizer(target)
        network = load_network(target)
        questions = [problem.question for problem in make_problems(problems, HELD_OUT_SEED, "test")]
        prompts = encode_prompts(tokenizer, questions)
        stops = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        answers = decode_greedily(network, prompts, max_tokens=max_tokens, stop_token_ids=stops).tokens
        table = Table(title=f"{problems} held-out problems, {sum(map(len, answers))} tokens, temperature 0")
        for column in ("drafter", "k", "accepted per round", "tokens per round", "target forwards per token", ">= 8"):
            table.add_column(column, justify="left" if column == "drafter" else "right")
        for folder in drafter:
            draft = load_drafter(folder, network.config.vocab_size)
            for length in k or (4, 8, 16, 32):
                outcome = speculate(prompts, answers, draft, length)
                table.add_row(
                    folder.resolve().name,
                    str(length),
                    f"{outcome.accepted:.2f}",
                    f"{outcome.tokens_per_round:.2f}",
                    f"{outcome.target_forwards_per_token:.3f}",
                    f"{sum(outcome.histogram[8:]) / max(outcome.rounds, 1):.1%}",
                )
        _console.print(table)


if __name__ == "__main__":
    app()
