"""The two objectives of D2A alignment, and what a diffusion drafter sees.

Source: DEER (arXiv 2512.15176), Section 3.1. A drafter's input is a prompt, an answer cut off somewhere, some of its
tokens masked, and [SEP]. Row ``i`` predicts token ``i + 1``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.nn import functional as F

from vllm_dllm.training.data import Example, TrainingError
from vllm_dllm.training.layouts import read_config
from vllm_dllm.training.objectives import IGNORE, MIN_RATE, TrainingBatch

Context = Literal["causal", "full"]
CONTEXTS: tuple[Context, ...] = get_args(Context)


@dataclass(frozen=True, kw_only=True)
class DrafterIds:
    """What a drafter's ``config.json`` says beyond its architecture.

    Attributes:
        mask: id of the mask.
        sep: id of [SEP], which follows the last mask; ``None``: the drafter has none.
        context: what rows before the first mask see. ``causal``: themselves and what is before them, as in the
            autoregressive model that the drafter was made of. ``full``: everything. All later rows see everything.
    """

    mask: int
    sep: int | None
    context: Context

    @classmethod
    def of(cls, folder: Path) -> "DrafterIds":
        """Read them from a checkpoint.

        Raises:
            TrainingError: it is no drafter.
        """
        config = read_config(folder)
        if config.get("model_type") != "open_dcoder" or not isinstance(config.get("mask_token_id"), int):
            raise TrainingError(
                f"{folder} is no drafter (model_type={config.get('model_type')!r}): make one of it with `convert`"
            )
        context = config.get("context_attention", "full")
        if context not in CONTEXTS:
            raise TrainingError(f"context_attention={context!r} of {folder} is not one of {', '.join(CONTEXTS)}")
        return cls(mask=config["mask_token_id"], sep=config.get("sep_token_id"), context=context)

    @property
    def excluded(self) -> list[int]:
        """Ids that are never drafted."""
        return [self.mask] if self.sep is None else [self.mask, self.sep]


class Draw(NamedTuple):
    """A truncated answer with some of its tokens masked.

    Attributes:
        tokens: ``[n]`` int64, the prompt and the truncated answer, clean.
        masked: ``[n]`` bool.
        weights: ``[n]`` float32, factor of each token's -log p; 0 where nothing is masked.
    """

    tokens: torch.Tensor
    masked: torch.Tensor
    weights: torch.Tensor


def truncate(example: Example, generator: torch.Generator, least: int = 1) -> Example:
    """Keep the first L tokens of the answer, L uniform from ``least`` to all of them."""
    answer = len(example.tokens) - example.prompt_length
    kept = int(torch.randint(least, answer + 1, (), generator=generator))
    return Example(example.tokens[: example.prompt_length + kept], example.prompt_length)


def draw_pretrain(example: Example, generator: torch.Generator) -> Draw:
    """Masked diffusion (LLaDA, Eq. 5): draw t; mask each answer token with probability t; weigh each by 1 / (t L).

    t is uniform on (:data:`~.objectives.MIN_RATE`, 1), so that 1 / t is bounded. A draw may mask nothing; it then
    adds 0 to the loss, as the equation says.
    """
    tokens, start = example
    rate = MIN_RATE + (1 - MIN_RATE) * torch.rand((), generator=generator)
    masked = torch.rand(len(tokens), generator=generator) < rate
    masked[:start] = False
    return Draw(tokens, masked, masked / (rate * (len(tokens) - start)))


def draw_distill(example: Example, generator: torch.Generator) -> Draw:
    """Stage I (Eq. 1): truncate, then as :func:`draw_pretrain`."""
    return draw_pretrain(truncate(example, generator), generator)


def draw_refine(example: Example, alpha: float, max_masked: int, generator: torch.Generator) -> Draw:
    """Stage II (Eq. 3 and 4): truncate; mask the last R answer tokens; weigh the i-th of them by alpha^(R-i) / R.

    i = 1 is nearest to the prefix. R is uniform from 1 to ``max_masked``, or to the whole answer where that is shorter,
    and the cut leaves R tokens or more: a cut that was drawn first would make R smaller than the paper's. 1 / R is
    stage I's 1 / (t L) at the rate t = R / L that is masked here.
    """
    longest = min(max_masked, len(example.tokens) - example.prompt_length)
    count = int(torch.randint(1, longest + 1, (), generator=generator))
    tokens = truncate(example, generator, count).tokens
    masked = torch.arange(len(tokens)) >= len(tokens) - count
    weights = torch.zeros(len(tokens))
    weights[-count:] = alpha ** (count - torch.arange(1, count + 1, dtype=torch.float64)).float() / count
    return Draw(tokens, masked, weights)


def lay_out(examples: Sequence[Sequence[Draw]], ids: DrafterIds) -> TrainingBatch:
    """One forward of the drafter over all draws; its loss is the mean of the draws' weighted sums.

    With ``full`` context every draw is a sequence of its own. With ``causal`` context rows before the first mask do not
    see what follows them, so the draws of an example share these rows: the sequence is the clean prefix up to the last
    first mask, then from each draw the rows from its first mask on. A draw's rows see the prefix before its first mask
    and each other.

    Args:
        examples: the draws of each example, all of the same clean text (truncated in different places).
    """
    draws = sum(map(len, examples))
    sequences = [
        _sequence(list(group), ids)
        for example in examples
        for group in ([example] if ids.context == "causal" else [[draw] for draw in example])
    ]

    def pad(name: str, value: float) -> torch.Tensor:
        tensors = [getattr(sequence, name) for sequence in sequences]
        return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    positions, views, starts = pad("positions", 0), pad("views", -1), pad("starts", 0)
    query, key = views.unsqueeze(2), views.unsqueeze(1)
    row, column = positions.unsqueeze(2), positions.unsqueeze(1)
    # Views: 0 for the shared prefix, 1.. for the draws, -1 for padding, which sees itself only.
    own = (query == key) & ((query != 0) | (column <= row))
    prefix = (query > 0) & (key == 0) & (column < starts.unsqueeze(2))
    return TrainingBatch(
        input_ids=pad("input_ids", 0),
        positions=positions,
        mask=own | prefix,
        targets=pad("targets", IGNORE),
        weights=pad("weights", 0.0) / draws,
    )


class _Sequence(NamedTuple):
    """Rows of :func:`lay_out`, each ``[S]``; ``starts`` is the first masked position of a row's draw."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    views: torch.Tensor
    starts: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def _sequence(draws: list[Draw], ids: DrafterIds) -> _Sequence:
    """The draws of one clean text, behind the part that they share (which with ``full`` context is empty)."""
    sep = torch.tensor([] if ids.sep is None else [ids.sep], dtype=torch.long)
    present = [draw for draw in draws if draw.masked.any()]
    firsts = [int(draw.masked.int().argmax()) for draw in present]
    causal = ids.context == "causal"
    shared = max(firsts, default=1) if causal else 0
    text = max(draws, key=lambda draw: len(draw.tokens)).tokens[: shared + 1]
    targets = torch.full((shared,), IGNORE)
    weights = torch.zeros(shared)
    parts: list[tuple[torch.Tensor, ...]] = []
    for view, (draw, first) in enumerate(zip(present, firsts, strict=True), 1):
        begin = first if causal else 0
        if causal:  # the first mask is predicted by the shared row before it
            targets[first - 1] = draw.tokens[first]
            weights[first - 1] += draw.weights[first]
        noisy = torch.cat((draw.tokens.masked_fill(draw.masked, ids.mask)[begin:], sep))
        wanted = draw.tokens.masked_fill(~draw.masked, IGNORE)
        padding = len(noisy) - (len(wanted) - begin - 1)
        parts.append(
            (
                noisy,
                begin + torch.arange(len(noisy)),
                torch.full_like(noisy, view),
                torch.full_like(noisy, begin),
                F.pad(wanted[begin + 1 :], (0, padding), value=IGNORE),
                F.pad(draw.weights[begin + 1 :], (0, padding)),
            )
        )
    if not causal and not parts:  # nothing masked: a sequence without a loss
        parts.append((*(torch.full((1,), value) for value in (0, 0, 1, 0, IGNORE)), torch.zeros(1)))
    places = torch.arange(shared)
    zeros = torch.zeros_like(places)
    return _Sequence(*map(torch.cat, zip((text[:shared], places, zeros, zeros, targets, weights), *parts, strict=True)))
