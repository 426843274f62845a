"""Train a tiny language model from scratch and write it in a released checkpoint's layout.

``python -m vllm_dllm.training.tiny --out DIR`` takes minutes on two CPU cores. ``docs/tiny-models.md``
describes the recipe and the checkpoints made with it.
"""

import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional as F

from vllm_dllm.training.arithmetic import HELD_OUT_SEED, Form, Problem, Wording, make_problems
from vllm_dllm.training.autoregressive import decode_greedily, next_tokens
from vllm_dllm.training.diffusion import IGNORE, Decoded, TrainingBatch, corrupt_blocks, decode_blocks
from vllm_dllm.training.forms import in_forms, is_right
from vllm_dllm.training.full_attention import corrupt_responses, decode_windows
from vllm_dllm.training.layouts import LAYOUTS, MAX_POSITIONS, Layout, SpecialIds
from vllm_dllm.training.network import Network, NetworkConfig, build_network
from vllm_dllm.training.text import (
    AUTOREGRESSIVE_SPECIAL_TOKENS,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    TOOLS_CHAT_TEMPLATE,
    read_standard_library,
    render_prompt,
    save_tokenizer,
    tokenize_chats,
    tokenize_documents,
    train_tokenizer,
)

_WARMUP_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of a training run.

    Attributes:
        steps: optimizer steps.
        chats: arithmetic chats per step.
        documents: standard library excerpts per step.
        length: tokens per sequence.
        window: noisy tokens per sequence and copy; a chat's window starts at the block its answer starts in.
        long_every: every so many steps, sequences may be as long as ``long_length`` (and are fewer), and answers of
            all steps are followed by a random number of ``<|endoftext|>``, so that the model ends in windows of any
            length; ``None``: answers are filled up to ``length``.
        long_length: see above.
        learning_rate: peak of the schedule: linear warm-up, then a cosine to 5 %.
        matrix_learning_rate: the same for the layers' matrices; ``None``: the same value.
        library_modules: modules of the standard library that are read, in alphabetical order; ``None``: all.
        tokenizer_problems: problems the tokenizer is trained on, beside the modules.
        fill_answers: without ``long_every``, the ``<|endoftext|>`` behind an answer are learned as well.
        wording: of the answers.
        forms: of the answers, in turns; all but ``"words"`` are of the short wording.
        spare_rows: rows of the embedding that no token has, such as a drafter needs for its own ids.
        network: shape of the network; its vocabulary size is the tokenizer's with the spare rows.
    """

    steps: int
    chats: int = 14
    documents: int = 2
    length: int = 80
    window: int = 48
    long_every: int | None = None
    long_length: int = 320
    learning_rate: float = 4e-3
    matrix_learning_rate: float | None = None
    library_modules: int | None = None
    tokenizer_problems: int = 20_000
    fill_answers: bool = True
    wording: Wording = "short"
    forms: tuple[Form, ...] = ("words",)
    spare_rows: int = 0
    network: NetworkConfig


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """What a model family changes in the recipe; another family is another value of this type.

    Attributes:
        name: the name on the command line.
        block_length: diffusion block length of the checkpoint, or of its evaluation if the layout states none;
            with block diffusion, sequences are a multiple of it.
        corrupt: turns clean sequences into a batch of the family's objective: which rows are noisy, what they
            see and which row predicts which token. Called like :func:`corrupt_blocks`.
        decode: the family's plain decoding loop. Called like :func:`decode_blocks`.
        layout: ``config.json`` and tensor names of the released checkpoints.
        recipe: how the bundled checkpoint is trained.
        evaluation_length: prompt and answer end here when the checkpoint is evaluated.
        special_tokens: tokens that the tokenizer begins with.
        policies: names and thresholds of the policies that the checkpoint is evaluated with.
        chat_template: of the tokenizer.
        max_new_tokens: default length of an answer, for models that see the masks of the whole answer: with many
            more masks than in training they answer with nothing.
    """

    name: str
    block_length: int
    corrupt: Callable[..., TrainingBatch]
    decode: Callable[..., Decoded]
    layout: Layout
    recipe: Recipe
    evaluation_length: int
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS
    chat_template: str = CHAT_TEMPLATE
    policies: tuple[tuple[str, float | None], ...] = (("static, one token per step", None), ("threshold 0.9", 0.9))
    max_new_tokens: int | None = None


SDAR = TinyFamily(
    name="sdar",
    block_length=16,
    corrupt=corrupt_blocks,
    decode=decode_blocks,
    layout=LAYOUTS["sdar"],
    recipe=Recipe(steps=1300, network=NetworkConfig(vocab_size=2048)),
    evaluation_length=80,
)
SDAR_JSON = replace(
    SDAR,
    name="sdar-json",
    chat_template=TOOLS_CHAT_TEMPLATE,
    recipe=Recipe(
        steps=1500,
        documents=0,
        library_modules=0,
        length=96,
        forms=("words", "json", "call"),
        network=NetworkConfig(vocab_size=608),
    ),
    evaluation_length=112,
)
"""Knows the arithmetic task as JSON and as the call of a tool, too."""
_FULL_ATTENTION = Recipe(
    steps=2500,
    chats=16,
    documents=0,
    long_every=12,
    learning_rate=4e-3,
    matrix_learning_rate=5e-3,
    network=NetworkConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        qk_norm=False,
    ),
)
LLADA = TinyFamily(
    name="llada",
    block_length=16,
    corrupt=corrupt_responses,
    decode=decode_windows,
    layout=LAYOUTS["llada"],
    recipe=_FULL_ATTENTION,
    evaluation_length=96,
    max_new_tokens=64,
)
DREAM = TinyFamily(
    name="dream",
    block_length=16,
    corrupt=partial(corrupt_responses, shift=1),
    decode=partial(decode_windows, shift=1),
    layout=LAYOUTS["Dream"],
    recipe=replace(
        _FULL_ATTENTION,
        network=replace(
            _FULL_ATTENTION.network,
            num_key_value_heads=2,
            rope_theta=1_000_000.0,
            rms_norm_eps=1e-6,
            qkv_bias=True,
        ),
    ),
    evaluation_length=96,
    max_new_tokens=64,
)
QWEN2 = TinyFamily(
    name="qwen2",
    block_length=1,
    corrupt=next_tokens,
    decode=decode_greedily,
    layout=LAYOUTS["qwen2"],
    recipe=Recipe(
        steps=1000,
        chats=12,
        documents=0,
        length=144,
        library_modules=0,
        fill_answers=False,
        wording="long",
        spare_rows=4,
        network=NetworkConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            qk_norm=False,
            qkv_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    evaluation_length=192,
    special_tokens=AUTOREGRESSIVE_SPECIAL_TOKENS,
    policies=(("greedy", None),),
)
QWEN2_SMALL = replace(
    QWEN2,
    name="qwen2-small",
    recipe=replace(
        QWEN2.recipe,
        network=replace(
            QWEN2.recipe.network,
            hidden_size=96,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=1,
        ),
    ),
)
"""What a drafter starts from, and the autoregressive draft model to compare it with; its tokenizer is QWEN2's."""

FAMILIES = {family.name: family for family in (SDAR, SDAR_JSON, LLADA, DREAM, QWEN2, QWEN2_SMALL)}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Greedy decoding of held-out problems under one policy.

    Attributes:
        accuracy: share of exact final answers.
        tokens_per_forward: positions unmasked per denoising forward.
        histogram: share of masked positions by confidence, in tenths from 0 to 1.
    """

    accuracy: float
    tokens_per_forward: float
    histogram: list[float]


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Outcome of :func:`train`; the weights have bfloat16 values in float32 tensors."""

    network: Network
    tokenizer: Tokenizer
    final_loss: float
    seconds: float


class _Batches:
    """The training text, tokenized once, and the batches drawn from it."""

    def __init__(self, recipe: Recipe, family: TinyFamily, seed: int):
        self.recipe = recipe
        self.family = family
        self.generator = torch.Generator().manual_seed(seed)
        library = read_standard_library(recipe.library_modules)
        # Whatever the seed, the tokenizer is the same, so that models of several seeds understand each other.
        problems = in_forms(make_problems(recipe.tokenizer_problems, 0, "train", recipe.wording), recipe.forms)
        samples = [render_prompt(problem.question, problem.tools) + problem.answer_text for problem in problems]
        tokens = recipe.network.vocab_size - recipe.spare_rows
        self.tokenizer = train_tokenizer(library + samples, tokens, family.special_tokens)
        problems = make_problems(recipe.steps * recipe.chats, seed, "train", recipe.wording)
        problems = in_forms(problems, recipe.forms)
        self.chats = tokenize_chats(self.tokenizer, problems, recipe.length)
        self.documents = tokenize_documents(self.tokenizer, library) if library else torch.zeros(0, dtype=torch.long)
        self.ids = SpecialIds.of(self.tokenizer)

    def __getitem__(self, step: int) -> TrainingBatch:
        """Batch of one step; drawn in order, each once."""
        recipe, block = self.recipe, self.family.block_length
        length, count = recipe.length, recipe.chats
        if recipe.long_every is not None and step % recipe.long_every == recipe.long_every - 1:
            length, count = recipe.long_length, max(1, recipe.chats * recipe.length // recipe.long_length)
        positions = torch.arange(length)
        last_window = length - recipe.window
        chosen = slice(step * recipe.chats, step * recipe.chats + count)
        chats, prompt_lengths = self.chats.tokens[chosen], self.chats.prompt_lengths[chosen]
        chats = F.pad(chats, (0, length - recipe.length), value=self.ids.end_of_text)
        answers = positions >= prompt_lengths.unsqueeze(1)
        if recipe.long_every is not None:
            ends = (chats != self.ids.end_of_text).sum(1)
            ends += (torch.rand(count, generator=self.generator) * (length + 1 - ends)).long()
            answers &= positions < ends.unsqueeze(1)
        elif not recipe.fill_answers:
            answers &= chats != self.ids.end_of_text
        last_offset = max(len(self.documents) - length, 1)
        offsets = torch.randint(last_offset, (recipe.documents, 1), generator=self.generator)
        documents = self.documents[offsets + positions]
        starts = torch.randint(last_window // block + 1, (recipe.documents,), generator=self.generator)
        return self.family.corrupt(
            torch.cat((chats, documents)),
            torch.cat((answers, torch.ones_like(documents, dtype=torch.bool))),
            torch.cat(((prompt_lengths // block * block).clamp(max=last_window), starts * block)),
            window_length=recipe.window,
            block_length=block,
            mask_token_id=self.ids.mask,
            generator=self.generator,
        )


def _optimizers(network: Network, learning_rate: float, matrix_learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, which needs about half of AdamW's steps here, and AdamW for the rest."""
    matrices = [p for p in network.model.layers.parameters() if p.dim() == 2]
    in_layers = {id(p) for p in matrices}
    rest = [p for p in network.parameters() if id(p) not in in_layers]
    return [
        torch.optim.Muon(matrices, lr=matrix_learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def _schedule(step: int, steps: int) -> float:
    """Factor of the learning rate."""
    warmup = min((step + 1) / min(_WARMUP_STEPS, steps), 1.0)
    return warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(family: TinyFamily, recipe: Recipe, seed: int, device: str, console: Console) -> TrainedModel:
    """Train a network and its tokenizer. On one machine the same arguments give the same weights."""
    torch.manual_seed(seed)
    batches = _Batches(recipe, family, seed)
    network = build_network(recipe.network).to(device)
    peaks = (recipe.matrix_learning_rate or recipe.learning_rate, recipe.learning_rate)
    optimizers = _optimizers(network, matrix_learning_rate=peaks[0], learning_rate=peaks[1])
    smoothed = 0.0
    started = time.monotonic()
    columns = (
        *Progress.get_default_columns(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=recipe.steps, loss=math.nan)
        for step in range(recipe.steps):
            batch = batches[step]
            targets = batch.targets.to(device)
            rows = targets != IGNORE
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                logits = network(batch.input_ids.to(device), batch.positions.to(device), batch.mask.to(device), rows)
            losses = F.cross_entropy(logits.float(), targets[rows], reduction="none")
            loss = losses.mean() if batch.weights is None else (losses * batch.weights.to(device)[rows]).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * _schedule(step, recipe.steps)
                optimizer.step()
                optimizer.zero_grad()
            smoothed += (loss.item() - smoothed) / min(step + 1, 50)
            progress.update(bar, advance=1, loss=smoothed)
            if (step + 1) % 100 == 0:
                progress.console.print(f"step {step + 1}: loss {smoothed:.3f}, {time.monotonic() - started:.0f} s")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())
    return TrainedModel(
        network=network,
        tokenizer=batches.tokenizer,
        final_loss=smoothed,
        seconds=time.monotonic() - started,
    )


def evaluate(
    family: TinyFamily,
    network: Network,
    tokenizer: Tokenizer,
    problems: list[Problem],
    *,
    threshold: float | None,
    length: int | None = None,
) -> Evaluation:
    """Decode problems greedily with the family's plain loop and grade the answers.

    Args:
        threshold: confidence threshold of the unmasking policy; ``None``: one token per step.
        length: prompt and answer together end here; ``None``: at the family's ``evaluation_length``.
    """
    ids = SpecialIds.of(tokenizer)
    decoded = family.decode(
        network,
        [tokenizer.encode(render_prompt(problem.question, problem.tools)).ids for problem in problems],
        length=length or family.evaluation_length,
        block_length=family.block_length,
        mask_token_id=ids.mask,
        stop_token_ids=[ids.im_end, ids.end_of_text],
        threshold=threshold,
    )
    texts = tokenizer.decode_batch(decoded.tokens)
    right = sum(is_right(text, problem) for text, problem in zip(texts, problems, strict=True))
    counts = torch.histc(decoded.confidences, bins=10, min=0.0, max=1.0)
    return Evaluation(
        accuracy=right / len(problems),
        tokens_per_forward=sum(map(len, decoded.tokens)) / sum(decoded.forwards),
        histogram=(counts / counts.sum()).tolist(),
    )


def save_checkpoint(family: TinyFamily, network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights (bfloat16) and tokenizer in the family's released layout."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = SpecialIds.of(tokenizer)
    config = family.layout.config(network.shape, ids, family.block_length)
    generation = {
        "bos_token_id": ids.end_of_text,
        "eos_token_id": [ids.im_end, ids.end_of_text],
        "pad_token_id": ids.end_of_text,
    }
    if family.max_new_tokens is not None:
        generation["max_new_tokens"] = family.max_new_tokens
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {name: tensor.bfloat16().cpu() for name, tensor in family.layout.tensors(network.state_dict()).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tokenizer, folder, MAX_POSITIONS, family.chat_template)


def _report(console: Console, policy: str, outcome: Evaluation) -> None:
    histogram = " ".join(f"{share:.3f}" for share in outcome.histogram)
    console.print(
        f"{policy}: accuracy {outcome.accuracy:.3f}, {outcome.tokens_per_forward:.2f} tokens per forward, "
        f"confidences in tenths {histogram}"
    )


app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint.")],
    family: Annotated[str, typer.Option(help=f"Model family: {', '.join(FAMILIES)}.")] = SDAR.name,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; the default is the family's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the problems and the noise.")] = 0,
    device: Annotated[str, typer.Option(help="Torch device, such as cpu or cuda.")] = "cpu",
    held_out: Annotated[int, typer.Option(min=1, help="Held-out problems to evaluate on.")] = 200,
) -> None:
    """Train a tiny language model, write its checkpoint and evaluate it on held-out arithmetic."""
    if family not in FAMILIES:
        raise typer.BadParameter(f"{family!r} is not one of {', '.join(FAMILIES)}", param_hint="--family")
    console = Console()
    recipe = FAMILIES[family].recipe
    if steps is not None:
        recipe = replace(recipe, steps=steps)
    model = train(FAMILIES[family], recipe, seed, device, console)
    save_checkpoint(FAMILIES[family], model.network, model.tokenizer, out)
    parameters = sum(p.numel() for p in model.network.parameters())
    console.print(
        f"{out}: {parameters:,} parameters, {recipe.steps} steps in {model.seconds:.0f} s, "
        f"final loss {model.final_loss:.3f}"
    )
    problems = make_problems(held_out, HELD_OUT_SEED, "test")
    for form, (policy, threshold) in itertools.product(recipe.forms, FAMILIES[family].policies):
        outcome = evaluate(
            FAMILIES[family], model.network, model.tokenizer, in_forms(problems, (form,)), threshold=threshold
        )
        _report(console, policy if recipe.forms == ("words",) else f"{form}, {policy}", outcome)


if __name__ == "__main__":
    app()
