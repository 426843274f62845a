"""Fine-tune a diffusion language model for FeF-DLLM: each token given the clean prefix and the corrupted rest.

Source: paper 000 (FeF-DLLM), Algorithm 1, Eq. 4, Section 4.1. ``python -m vllm_dllm.training.prefix_conditioned
--model DIR --out DIR`` fine-tunes a checkpoint in LLaDA's or Dream's layout; ``docs/tiny-models.md`` describes it.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import torch
import typer
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from vllm_dllm.training.full_attention import MIN_RATE, visible_keys
from vllm_dllm.training.layouts import layout_of, load_network, read_config
from vllm_dllm.training.network import Network, xformers_attention
from vllm_dllm.training.runs import (
    Example,
    Order,
    Processes,
    TrainingError,
    copy_other_files,
    encode,
    fit,
    generated_pairs,
    load_tokenizer,
    pair_of,
    read_records,
    seeded_generator,
    summary,
    write_losses,
    write_weights,
)

Packing = Literal["padded", "blocks", "xformers"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)


class Conditioned(NamedTuple):
    """The inputs of one example for one draw of t and X_t.

    Attributes:
        inputs: ``[n, L]`` int64, X^(j) for each of the n positions.
        positions: ``[n]`` int64, j, ascending.
        targets: ``[n]`` int64, X_0 at j.
    """

    inputs: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor


def corrupt(example: Example, mask_token_id: int, generator: torch.Generator) -> torch.Tensor:
    """Draw t and X_t (Algorithm 1, lines 5 and 6): ``[L]`` int64.

    t is uniform on (:data:`~.full_attention.MIN_RATE`, 1), and each response token is masked with probability t. If
    that masks none, one drawn uniformly is masked: an example without a mask has nothing to learn from.
    """
    tokens, start = example
    rate = MIN_RATE + (1 - MIN_RATE) * torch.rand((), generator=generator)
    masked = torch.rand(len(tokens), generator=generator) < rate
    masked[:start] = False
    if not masked.any():
        masked[torch.randint(start, len(tokens), (), generator=generator)] = True
    return tokens.masked_fill(masked, mask_token_id)


def condition(
    clean: torch.Tensor, corrupted: torch.Tensor, max_positions: int | None, generator: torch.Generator
) -> Conditioned:
    """Prefix-conditioned inputs (Algorithm 1, lines 7 to 12).

    Args:
        clean: ``[L]`` int64, X_0.
        corrupted: ``[L]`` int64, X_t.
        max_positions: with more masked positions than this, as many are drawn from them uniformly; ``None``: all.
    """
    positions = (clean != corrupted).nonzero().squeeze(1)
    if max_positions is not None and len(positions) > max_positions:
        chosen = torch.randperm(len(positions), generator=generator)[:max_positions]
        positions = positions[chosen].sort().values
    in_prefix = torch.arange(len(clean)) < positions.unsqueeze(1)
    return Conditioned(torch.where(in_prefix, clean, corrupted), positions, clean[positions])


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Inputs of several examples as one forward.

    Attributes:
        input_ids, positions, mask, rows: arguments of :class:`Network`; the rows are in the examples' order.
        targets: ``[n]`` int64, of all examples.
        weights: ``[n]`` float32, 1 / (examples x positions of the example): the loss is the mean over the examples of
            the mean over an example's positions.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def pack(examples: list[Conditioned], packing: Packing, shift: int, device: str) -> Packed:
    """Lay out the inputs of several examples for one forward.

    Args:
        packing: ``padded``: a batch of sequences, the shorter ones padded. ``blocks``: one sequence of all inputs, with
            a block-diagonal mask as a dense tensor. ``xformers``: the same with xformers' block-diagonal attention,
            which computes only the blocks; needs CUDA.
        shift: row ``i`` predicts token ``i + shift``.
    """
    inputs = [row for example in examples for row in example.inputs]
    predicting = torch.cat([example.positions for example in examples]) - shift
    counts = torch.tensor([len(example.positions) for example in examples])
    lengths = torch.tensor([len(row) for row in inputs])
    mask: torch.Tensor
    if packing == "padded":
        input_ids = nn.utils.rnn.pad_sequence(inputs, batch_first=True)
        positions = torch.arange(input_ids.shape[1]).unsqueeze(0)
        rows = positions == predicting.unsqueeze(1)
        mask = visible_keys(lengths, input_ids.shape[1]).to(device)
    else:
        input_ids = torch.cat(inputs).unsqueeze(0)
        positions = torch.cat([torch.arange(len(row)) for row in inputs]).unsqueeze(0)
        rows = torch.zeros_like(input_ids, dtype=torch.bool)
        rows[0, lengths.cumsum(0) - lengths + predicting] = True
        if packing == "blocks":
            sequence = torch.arange(len(inputs)).repeat_interleave(lengths)
            mask = (sequence.unsqueeze(1) == sequence).unsqueeze(0).to(device)
        else:
            mask = xformers_attention().BlockDiagonalMask.from_seqlens(lengths.tolist(), device=torch.device(device))
    return Packed(
        input_ids=input_ids.to(device),
        positions=positions.to(device),
        mask=mask,
        rows=rows.to(device),
        targets=torch.cat([example.targets for example in examples]).to(device),
        weights=(1.0 / (len(examples) * counts)).repeat_interleave(counts).to(device),
    )


def prefix_conditioned_loss(network: nn.Module, packed: Packed) -> torch.Tensor:
    """Eq. 4 with an example's positions averaged: Algorithm 1 sums them, which differs by a factor per example.

    Returns:
        A scalar, float32.
    """
    logits = network(packed.input_ids, packed.positions, packed.mask, packed.rows).float()
    return (F.cross_entropy(logits, packed.targets, reduction="none") * packed.weights).sum()


class ReleasedNetwork(nn.Module):
    """A checkpoint that brings its own code (``auto_map``), called like :class:`Network`.

    The code is not told of padding or packing, so a forward takes inputs of one length: those of one example.
    """

    def __init__(self, folder: Path):
        super().__init__()
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        # Not through AutoModel, which prefers a configuration registered for the model_type, as this plugin's is.
        own_class = get_class_from_dynamic_module(read_config(folder)["auto_map"]["AutoModel"], str(folder))
        self.model = own_class.from_pretrained(folder, dtype=torch.float32)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        if not mask.all():
            raise ValueError("inputs of different lengths in one forward")
        return self.model(input_ids=input_ids).logits[rows]


class Settings(NamedTuple):
    """What a run's weights depend on, beside the model and the examples' texts."""

    steps: int
    examples: int
    batch_size: int
    accumulate: int
    positions: int
    padding: int
    learning_rate: float
    warmup: int
    seed: int
    packing: Packing


class Batches:
    """The examples of every step: those of a step depend on the seed and the step's number only."""

    def __init__(self, examples: list[Example], mask_token_id: int, pad_token_id: int, settings: Settings):
        self.examples = examples
        self.mask_token_id = mask_token_id
        self.pad_token_id = pad_token_id
        self.settings = settings
        self._order = Order(len(examples), settings.seed)

    def __getitem__(self, step: int) -> list[list[Conditioned]]:
        """The step's forwards: ``accumulate`` of ``batch_size`` examples."""
        settings = self.settings
        generator = seeded_generator("step", settings.seed, step)
        per_step = settings.batch_size * settings.accumulate
        first = step * per_step
        chosen = [self.examples[self._order[index]] for index in range(first, first + per_step)]
        drawn = [self._draw(example, generator) for example in chosen]
        return [drawn[start : start + settings.batch_size] for start in range(0, per_step, settings.batch_size)]

    def _draw(self, example: Example, generator: torch.Generator) -> Conditioned:
        padding = int(torch.randint(self.settings.padding + 1, (), generator=generator))
        padded = Example(F.pad(example.tokens, (0, padding), value=self.pad_token_id), example.prompt_length)
        corrupted = corrupt(padded, self.mask_token_id, generator)
        return condition(padded.tokens, corrupted, self.settings.positions or None, generator)


def fine_tune(
    network: nn.Module,
    batches: Batches,
    *,
    shift: int,
    device: str,
    console: Console,
    state: Path | None = None,
    save_every: int = 100,
    resume: bool = False,
    stop_after: int | None = None,
) -> list[float]:
    """Train in place. The same arguments give the same weights on one machine, with or without an interruption.

    Args:
        state: file of the run's state, written every ``save_every`` steps and at the end.
        resume: continue from ``state``.
        stop_after: end after this step, as an interruption would.

    Returns:
        The loss of each step, from the first, also if the run was resumed.
    """
    settings = batches.settings
    processes = Processes(device)
    if processes.count > 1:
        raise TrainingError("prefix-conditioned fine-tuning runs in one process")

    def loss_of(network: nn.Module, examples: list[Conditioned], device: str) -> torch.Tensor:
        return prefix_conditioned_loss(network, pack(examples, settings.packing, shift, device))

    return fit(
        network,
        settings,
        batches.__getitem__,
        loss_of,
        processes=processes,
        console=console,
        state=state,
        save_every=save_every,
        resume=resume,
        stop_after=stop_after,
    )


def choose_packing(wanted: str, network: nn.Module, device: str) -> Packing:
    """What ``--packing`` means here.

    Raises:
        TrainingError: ``xformers`` is asked for and cannot run.
    """
    if wanted == "auto":
        available = device.startswith("cuda") and isinstance(network, Network) and xformers_attention() is not None
        return "xformers" if available else "padded"
    if wanted not in PACKINGS:
        raise TrainingError(f"--packing={wanted!r} is not one of auto, {', '.join(PACKINGS)}")
    if wanted == "xformers" and (xformers_attention() is None or not device.startswith("cuda")):
        raise TrainingError("--packing=xformers needs the package xformers and a CUDA device")
    return wanted


def write_checkpoint(network: nn.Module, source: Path, out: Path) -> None:
    """Write a fine-tuned checkpoint with the layout, the tokenizer and the dtype of its source."""
    out.mkdir(parents=True, exist_ok=True)
    if isinstance(network, ReleasedNetwork):
        network.model.save_pretrained(out)
    copy_other_files(source, out)
    if isinstance(network, Network):
        write_weights(network, source, out)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder in LLaDA's or Dream's layout.")],
    out: Annotated[Path, typer.Option(help="Folder of the fine-tuned checkpoint; training/ in it has log and state.")],
    data: Annotated[
        Path | None,
        typer.Option(help='JSON lines with "prompt" and "response"; without it, generated arithmetic problems.'),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; by default one epoch of --data, or 200.")
    ] = None,
    learning_rate: Annotated[
        float,
        typer.Option("--lr", min=0, help="Peak learning rate; the default suits tiny models, paper: 1e-5."),
    ] = 1e-4,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per forward; always 1 with a model's own code.")] = 4,
    accumulate: Annotated[int, typer.Option(min=1, help="Forwards per optimizer step.")] = 4,
    positions: Annotated[
        int,
        typer.Option(min=0, help="Positions per example, each an input of its own, drawn from the masked; 0: all."),
    ] = 16,
    padding: Annotated[
        int, typer.Option(min=0, help="Each response is followed by up to so many padding tokens, drawn anew.")
    ] = 32,
    end: Annotated[
        str | None, typer.Option(help="End of each response; by default the tokenizer's end-of-sequence token.")
    ] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Longer examples (before padding) are left out.")] = 4096,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up.")] = 50,
    packing: Annotated[str, typer.Option(help=f"auto, {', '.join(PACKINGS)}: how examples share a forward.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the generated problems, the order and the masks.")] = 0,
    device: Annotated[str, typer.Option(help="Torch device, such as cpu or cuda.")] = "cpu",
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints of the run's state.")] = 100,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run of --out that was cut off.")] = False,
) -> None:
    """Fine-tune a diffusion language model for FeF-DLLM (paper 000, Algorithm 1).

    AdamW with weight decay 0.1, bfloat16 autocast; warm-up, constant learning rate, linear decay to a tenth over the
    last 10 % of the steps. A checkpoint with code of its own (auto_map in its config.json, as LLaDA-8B's and Dream-7B's
    have) is run by that code, in float32 on one device.
    """
    console = Console()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        _run(
            console,
            model=model,
            out=out,
            pairs=None if data is None else [pair_of(*record) for record in read_records(data)],
            settings=Settings(
                steps=steps or 0,
                examples=0,
                batch_size=batch_size,
                accumulate=accumulate,
                positions=positions,
                padding=padding,
                learning_rate=learning_rate,
                warmup=warmup,
                seed=seed,
                packing="padded",
            ),
            packing=packing,
            end=end,
            max_length=max_length,
            device=device,
            save_every=save_every,
            resume=resume,
        )
    except (TrainingError, FileNotFoundError, ValueError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


_DEFAULT_STEPS = 200


def _run(
    console: Console,
    *,
    model: Path,
    out: Path,
    pairs: list[tuple[str, str]] | None,
    settings: Settings,
    packing: str,
    end: str | None,
    max_length: int,
    device: str,
    save_every: int,
    resume: bool,
) -> None:
    from transformers import AutoTokenizer

    config = read_config(model)
    layout = layout_of(config)
    if config["model_type"] not in ("llada", "Dream"):
        raise TrainingError(f"model_type={config['model_type']!r}: only models with full attention, llada and Dream")
    if out.resolve() == model.resolve():
        raise TrainingError("--out is the folder of --model, whose weights would be overwritten")
    own_code = "auto_map" in config
    network = (ReleasedNetwork(model) if own_code else load_network(model)).to(device)
    if own_code:
        settings = settings._replace(batch_size=1, accumulate=settings.accumulate * settings.batch_size)
    per_step = settings.batch_size * settings.accumulate
    if pairs is None:
        pairs = generated_pairs((settings.steps or _DEFAULT_STEPS) * per_step, settings.seed)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True) if own_code else load_tokenizer(model)
    examples = encode(tokenizer, pairs, tokenizer.eos_token if end is None else end, max_length)
    settings = settings._replace(
        steps=settings.steps or math.ceil(len(examples) / per_step),
        examples=len(examples),
        packing=choose_packing(packing, network, device),
    )
    mask_token_id = config["mask_token_id"]
    batches = Batches(examples, mask_token_id, tokenizer.pad_token_id, settings)
    losses = fine_tune(
        network,
        batches,
        shift=layout.shift,
        device=device,
        console=console,
        state=out / "training" / "state.pt",
        save_every=save_every,
        resume=resume,
    )
    write_checkpoint(network, model, out)
    write_losses(losses, settings, "prefix-conditioned cross-entropy", out / "training", console)
    console.print(summary(out, losses))


if __name__ == "__main__":
    app()
