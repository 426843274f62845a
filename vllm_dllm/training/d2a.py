"""Diffusion-to-autoregressive (D2A) alignment: train a diffusion drafter to continue the texts of an AR target.

Source: DEER (arXiv 2512.15176), Section 3.1 and Appendix A. The steps, each ``python -m vllm_dllm.training.d2a STEP``:
``convert`` makes a drafter of an autoregressive checkpoint, ``generate`` writes the target's answers, ``distill`` is
stage I, ``refine`` stage II, ``evaluate`` counts the drafts that the target accepts.
``docs/deer-training.md`` describes them.
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from vllm_dllm.training.acceptance import load_drafter, speculate
from vllm_dllm.training.alignment import CONTEXTS, DrafterIds, Draw, aligned_loss, draw_distill, draw_refine, lay_out
from vllm_dllm.training.arithmetic import HELD_OUT_SEED, make_problems
from vllm_dllm.training.autoregressive import decode_greedily
from vllm_dllm.training.conversion import convert_checkpoint
from vllm_dllm.training.layouts import load_network
from vllm_dllm.training.network import Network
from vllm_dllm.training.runs import (
    Example,
    Order,
    Processes,
    TrainingError,
    copy_other_files,
    encode,
    encode_prompts,
    fit,
    generated_pairs,
    load_tokenizer,
    pair_of,
    read_records,
    seeded_generator,
    short_enough,
    summary,
    write_losses,
    write_weights,
)

logger = logging.getLogger(__name__)

Stage = Literal["distill", "refine"]
NOISY_ALPHA = 1.02
"""From here on the paper saw noise and upward drift in the loss of stage II (Figure 6)."""
MAX_ALPHA = 1.05
"""Here the paper saw it diverge."""


# --- a run ---------------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """What a run's weights depend on, beside the model and the examples' texts."""

    stage: Stage
    steps: int
    examples: int
    batch_size: int
    accumulate: int
    processes: int
    draws: int
    padding: int
    max_masked: int
    alpha: float
    learning_rate: float
    warmup: int
    seed: int


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


class Batches:
    """The draws of every step: those of a step depend on the seed and the step's number only.

    Args:
        end_token_ids: answers that end in one of these are padded; the others were cut off and go on. ``None``: all.
    """

    def __init__(
        self,
        examples: list[Example],
        pad_token_id: int,
        settings: Settings,
        process: int = 0,
        end_token_ids: Collection[int] | None = None,
    ):
        self.examples = examples
        self.end_token_ids = end_token_ids
        self.pad_token_id = pad_token_id
        self.settings = settings
        self.process = process
        self._order = Order(len(examples), settings.seed)

    def __getitem__(self, step: int) -> list[list[list[Draw]]]:
        """This process's forwards: ``accumulate`` of ``batch_size`` examples of ``draws`` draws."""
        settings = self.settings
        own = settings.batch_size * settings.accumulate
        first = (step * settings.processes + self.process) * own
        drawn = [self._draw(index) for index in range(first, first + own)]
        return [drawn[start : start + settings.batch_size] for start in range(0, own, settings.batch_size)]

    def _draw(self, index: int) -> list[Draw]:
        """Draws of the ``index``-th example of the run."""
        settings = self.settings
        generator = seeded_generator(settings.stage, settings.seed, index)
        tokens, start = self.examples[self._order[index]]
        is_whole = self.end_token_ids is None or int(tokens[-1]) in self.end_token_ids
        padded = Example(F.pad(tokens, (0, settings.padding * is_whole), value=self.pad_token_id), start)
        if settings.stage == "distill":
            return [draw_distill(padded, generator) for _ in range(settings.draws)]
        return [draw_refine(padded, settings.alpha, settings.max_masked, generator) for _ in range(settings.draws)]


def align(
    network: Network, ids: DrafterIds, batches: Batches, *, processes: Processes, console: Console, **options: Any
) -> list[float]:
    """Train in place; ``options`` are those of :func:`~.runs.fit`. Returns the loss of each step."""

    def loss_of(network: nn.Module, examples: list[list[Draw]], device: str) -> torch.Tensor:
        return aligned_loss(network, lay_out(examples, ids, device))

    return fit(
        network,
        batches.settings,
        batches.__getitem__,
        loss_of,
        processes=processes,
        console=console,
        factor=warmup_and_cosine,
        **options,
    )


def warmup_and_cosine(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine to 5 %. The paper states no schedule."""
    rising = min((step + 1) / max(min(warmup, steps), 1), 1.0)
    return rising * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


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


Model = Annotated[Path, typer.Option(help="Folder of the drafter, from `convert` or another stage.")]
Out = Annotated[Path, typer.Option(help="Folder of the trained drafter; training/ in it has log and state.")]
Data = Annotated[
    list[Path] | None,
    typer.Option(help="JSON lines from `generate`, or with prompt and response; may be repeated. Without: arithmetic."),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Optimizer steps; by default one epoch of --data, or 200.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples per forward and process.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Forwards per optimizer step and process.")]
Draws = Annotated[
    int, typer.Option(min=1, help="Truncations and masks drawn per example; with causal context they share the prefix.")
]
Padding = Annotated[
    int,
    typer.Option(min=0, help="Each answer is followed by so many padding tokens, for drafts that reach behind it."),
]
MaxLength = Annotated[int, typer.Option(min=2, help="Longer examples (before padding) are left out.")]
Warmup = Annotated[int, typer.Option(min=0, help="Steps of linear warm-up; a cosine follows.")]
Seed = Annotated[int, typer.Option(help="Seed of the order, the truncations and the masks.")]
Device = Annotated[str, typer.Option(help="Torch device, such as cpu or cuda.")]
SaveEvery = Annotated[int, typer.Option(min=1, help="Steps between checkpoints of the run's state.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue a run of --out that was cut off.")]


@app.command()
def distill(
    model: Model,
    out: Out,
    data: Data = None,
    steps: Steps = None,
    learning_rate: Annotated[
        float, typer.Option("--lr", min=0, help="Peak; the default suits tiny models, paper: 1e-4.")
    ] = 2e-3,
    batch_size: BatchSize = 16,
    accumulate: Accumulate = 1,
    draws: Draws = 4,
    padding: Padding = 0,
    max_length: MaxLength = 4096,
    warmup: Warmup = 50,
    seed: Seed = 0,
    device: Device = "cpu",
    save_every: SaveEvery = 100,
    resume: Resume = False,
) -> None:
    """Stage I: truncated answers, [SEP] behind them, answer tokens masked at a random rate.

    AdamW with weight decay 0.1, bfloat16 autocast, gradients clipped to norm 1. Several GPUs: start it with
    `accelerate launch -m vllm_dllm.training.d2a distill ...`.
    """
    settings = Settings(
        stage="distill",
        steps=steps or 0,
        examples=0,
        batch_size=batch_size,
        accumulate=accumulate,
        processes=1,
        draws=draws,
        padding=padding,
        max_masked=0,
        alpha=1.0,
        learning_rate=learning_rate,
        warmup=warmup,
        seed=seed,
    )
    with _clear_errors():
        _run(model, out, data or [], settings, max_length, device, save_every, resume)


@app.command()
def refine(
    model: Model,
    out: Out,
    data: Data = None,
    alpha: Annotated[
        float, typer.Option(help="Base of the weights alpha^(R-i); 1.02 and more is unstable, 1.05 diverges.")
    ] = 1.01,
    max_masked: Annotated[int, typer.Option(min=1, help="R is uniform up to this; paper: 96.")] = 96,
    steps: Steps = None,
    learning_rate: Annotated[
        float, typer.Option("--lr", min=0, help="Peak; the default suits tiny models, paper: 5e-5 to 1e-4.")
    ] = 1e-3,
    batch_size: BatchSize = 16,
    accumulate: Accumulate = 1,
    draws: Draws = 4,
    padding: Padding = 0,
    max_length: MaxLength = 4096,
    warmup: Warmup = 50,
    seed: Seed = 0,
    device: Device = "cpu",
    save_every: SaveEvery = 100,
    resume: Resume = False,
) -> None:
    """Stage II: the last R tokens of truncated answers masked, those nearest to the prefix weighing most.

    Trained like stage I.
    """
    settings = Settings(
        stage="refine",
        steps=steps or 0,
        examples=0,
        batch_size=batch_size,
        accumulate=accumulate,
        processes=1,
        draws=draws,
        padding=padding,
        max_masked=max_masked,
        alpha=alpha,
        learning_rate=learning_rate,
        warmup=warmup,
        seed=seed,
    )
    with _clear_errors():
        check_alpha(alpha)
        _run(model, out, data or [], settings, max_length, device, save_every, resume)


_DEFAULT_STEPS = 200


def _run(
    model: Path,
    out: Path,
    data: list[Path],
    settings: Settings,
    max_length: int,
    device: str,
    save_every: int,
    resume: bool,
) -> None:
    ids = DrafterIds.of(model)
    if out.resolve() == model.resolve():
        raise TrainingError("--out is the folder of --model, whose weights would be overwritten")
    with Processes(device) as processes:
        per_step = settings.batch_size * settings.accumulate * processes.count
        network = load_network(model)
        tokenizer = load_tokenizer(model)
        if data:
            examples = read_answers(data, tokenizer, max_length, network.config.vocab_size)
        else:
            pairs = generated_pairs((settings.steps or _DEFAULT_STEPS) * per_step, settings.seed)
            examples = encode(tokenizer, pairs, tokenizer.eos_token, max_length)
        settings = settings._replace(
            steps=settings.steps or math.ceil(len(examples) / per_step),
            examples=len(examples),
            processes=processes.count,
        )
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        losses = align(
            network,
            ids,
            Batches(examples, pad, settings, processes.index, {tokenizer.eos_token_id, pad}),
            processes=processes,
            console=_console,
            state=out / "training" / "state.pt",
            save_every=save_every,
            resume=resume,
        )
        if processes.first:
            copy_other_files(model, out)
            write_weights(network, model, out)
            write_losses(losses, settings, f"loss ({settings.stage})", out / "training", _console)
            _console.print(summary(out, losses))


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
