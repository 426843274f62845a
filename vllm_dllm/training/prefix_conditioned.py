"""Fine-tune a diffusion language model for FeF-DLLM: each token given the clean prefix and the corrupted rest.

Source: FeF-DLLM (arXiv 2605.14305), Algorithm 1, Eq. 4, Section 4.1.
``python -m vllm_dllm.training.prefix_conditioned --model DIR --output-dir DIR`` fine-tunes a checkpoint
in LLaDA's or Dream's layout; ``docs/training.md`` describes it.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch.nn import functional as F
from transformers.trainer_utils import SchedulerType

from vllm_dllm.training.data import Example, TrainingError, load_tokenizer, pad_token_id_of
from vllm_dllm.training.layouts import layout_of, read_config
from vllm_dllm.training.objectives import IGNORE, MIN_RATE, TrainingBatch
from vllm_dllm.training.trainer import TuneArguments, clear_errors, default_of, parse_arguments, tune


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

    t is uniform on (:data:`~.objectives.MIN_RATE`, 1), and each response token is masked with probability t. If
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


def pack(examples: list[Conditioned], shift: int) -> TrainingBatch:
    """One row of all inputs, end to end, in which each input sees itself only.

    The loss is Eq. 4's mean over the examples, with an example's positions averaged. Algorithm 1 sums an example's
    positions, which differs by a factor per example.

    Args:
        shift: row ``i`` predicts token ``i + shift``.
    """
    inputs = [row for example in examples for row in example.inputs]
    lengths = torch.tensor([len(row) for row in inputs])
    predicting = torch.cat([example.positions for example in examples]) - shift + lengths.cumsum(0) - lengths
    counts = torch.tensor([len(example.positions) for example in examples])
    input_ids = torch.cat(inputs)
    return TrainingBatch(
        input_ids=input_ids.unsqueeze(0),
        positions=torch.cat([torch.arange(len(row)) for row in inputs]).unsqueeze(0),
        mask=lengths,
        targets=torch.full_like(input_ids, IGNORE)
        .scatter(0, predicting, torch.cat([example.targets for example in examples]))
        .unsqueeze(0),
        weights=torch.zeros(len(input_ids))
        .scatter(0, predicting, (1.0 / (len(examples) * counts)).repeat_interleave(counts))
        .unsqueeze(0),
    )


def draw(
    example: Example,
    generator: torch.Generator,
    *,
    mask_token_id: int,
    pad_token_id: int,
    padding: int,
    positions: int | None,
) -> Conditioned:
    """The inputs of one visit of an example, with up to ``padding`` tokens of padding behind the response."""
    added = int(torch.randint(padding + 1, (), generator=generator))
    padded = Example(F.pad(example.tokens, (0, added), value=pad_token_id), example.prompt_length)
    corrupted = corrupt(padded, mask_token_id, generator)
    return condition(padded.tokens, corrupted, positions, generator)


@dataclass(kw_only=True)
class FefArguments(TuneArguments):
    """Options of the command; the defaults are the paper's, whose 8 GPUs make batches of 16 examples."""

    LEAST: ClassVar[dict[str, int]] = {**TuneArguments.LEAST, "positions": 0}

    model: str = field(metadata={"help": "Checkpoint folder in LLaDA's or Dream's layout."})
    positions: int = field(
        default=16,
        metadata={
            "help": "Positions per example, each an input of its own, drawn from the masked; 0: all, as in the paper."
        },
    )
    padding: int = field(
        default=32, metadata={"help": "Each response is followed by up to so many padding tokens, drawn anew."}
    )
    end: str | None = field(
        default=None, metadata={"help": "End of each response; default: the tokenizer's end-of-sequence token."}
    )
    per_device_train_batch_size: int = default_of("per_device_train_batch_size", 1)
    gradient_accumulation_steps: int = default_of("gradient_accumulation_steps", 2)
    learning_rate: float = default_of("learning_rate", 1e-5)
    lr_scheduler_type: SchedulerType | str = field(
        default="warmup_stable_decay",
        metadata={"help": "The paper's: constant, and a linear decay to a tenth over the last tenth of the steps."},
    )


def decay_over_last_tenth(args: FefArguments, steps: int) -> None:
    """Complete the default schedule: transformers wants the steps of the decay, not their share."""
    if args.lr_scheduler_type == SchedulerType.WARMUP_STABLE_DECAY and not args.lr_scheduler_kwargs:
        decay = {"num_decay_steps": math.ceil(steps / 10), "decay_type": "linear", "min_lr_ratio": 0.1}
        args.lr_scheduler_kwargs = decay
        args.warmup_steps = min(args.get_warmup_steps(steps), steps - math.ceil(steps / 10))


def fine_tune(args: FefArguments) -> None:
    """Read model and data, train, and write the checkpoint.

    Raises:
        TrainingError: model or data cannot be used; the message says why.
    """
    config = read_config(Path(args.model))
    layout = layout_of(config)
    if config["model_type"] not in ("llada", "Dream"):
        raise TrainingError(f"model_type={config['model_type']!r}: only models with full attention, llada and Dream")
    tokenizer = load_tokenizer(Path(args.model))
    examples = args.read_examples(tokenizer, config["vocab_size"], args.end)
    draw_visit = partial(
        draw,
        mask_token_id=config["mask_token_id"],
        pad_token_id=pad_token_id_of(tokenizer),
        padding=args.padding,
        positions=args.positions or None,
    )
    args.fix_steps(len(examples))  # which the schedule goes by
    decay_over_last_tenth(args, args.max_steps)
    tune(args, "prefix-conditioned", examples, draw_visit, partial(pack, shift=int(layout.traits.shifted)))


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    with clear_errors("prefix_conditioned"):
        fine_tune(parse_arguments(FefArguments, sys.argv[1:] if words is None else words, __doc__))


if __name__ == "__main__":
    main()
