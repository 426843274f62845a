"""Train a tiny language model from scratch and write it in a released checkpoint's layout.

``python -m vllm_dllm.training.tiny --recipe tiny-sdar --output-dir DIR`` takes minutes to an hour on a CPU.
``docs/tiny-models.md`` describes the recipes and the checkpoints made with them.
"""

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from torch.utils.data import Dataset

from vllm_dllm.training.arithmetic import HELD_OUT_ADD_UNTIL, HELD_OUT_SEED, Form, Problem, Wording, make_problems
from vllm_dllm.training.autoregressive import decode_greedily, next_tokens
from vllm_dllm.training.data import TrainingError
from vllm_dllm.training.diffusion import Decoded, TrainingBatch, corrupt_blocks, decode_blocks
from vllm_dllm.training.forms import in_forms, is_right
from vllm_dllm.training.full_attention import corrupt_responses, decode_windows
from vllm_dllm.training.layouts import LAYOUTS, MAX_POSITIONS, Layout, SpecialIds
from vllm_dllm.training.muon import MuonAndAdamW
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
from vllm_dllm.training.trainer import (
    DiffusionTrainer,
    RunArguments,
    default_of,
    parse_arguments,
    read_recipe,
    run_command,
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Text and shape of a model.

    Attributes:
        chats: arithmetic chats per batch.
        documents: standard library excerpts per batch.
        length: tokens per sequence.
        window: noisy tokens per sequence and copy; a chat's window starts at the block its answer starts in.
        long_every: every so many batches, sequences may be as long as ``long_length`` (and are fewer), and answers of
            all batches are followed by a random number of ``<|endoftext|>``, so that the model ends in windows of any
            length; ``None``: answers are filled up to ``length``.
        long_length: see above.
        library_modules: modules of the standard library that are read, in alphabetical order; ``None``: all.
        tokenizer_problems: problems the tokenizer is trained on, beside the modules.
        fill_answers: without ``long_every``, the ``<|endoftext|>`` behind an answer are learned as well.
        wording: of the answers.
        add_until: of the problems, see :func:`make_problems`.
        forms: of the answers, in turns; all but ``"words"`` are of the short wording.
        spare_rows: rows of the embedding that no token has, such as a drafter needs for its own ids.
        network: shape of the network; its vocabulary size is the tokenizer's with the spare rows.
    """

    chats: int = 14
    documents: int = 2
    length: int = 80
    window: int = 48
    long_every: int | None = None
    long_length: int = 320
    library_modules: int | None = None
    tokenizer_problems: int = 20_000
    fill_answers: bool = True
    wording: Wording = "short"
    add_until: int = HELD_OUT_ADD_UNTIL
    forms: tuple[Form, ...] = ("words",)
    spare_rows: int = 0
    network: NetworkConfig

    @classmethod
    def of(cls, text: dict[str, Any], network: dict[str, Any]) -> "Recipe":
        """Of a recipe's keys ``text`` and ``network``.

        Raises:
            TrainingError: a key is none of them.
        """
        for name, given, known in (("text", text, cls), ("network", network, NetworkConfig)):
            for key in given.keys() - {each.name for each in fields(known)}:
                raise TrainingError(f"{key!r} of {name} is not one of {', '.join(each.name for each in fields(known))}")
        forms = {"forms": tuple(text["forms"])} if "forms" in text else {}
        return cls(**{**text, **forms}, network=NetworkConfig(**network))


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """What a model family changes; another family is another value of this type.

    Attributes:
        name: its recipe is ``recipes/tiny-NAME.yaml``.
        block_length: diffusion block length of the checkpoint, or of its evaluation if the layout states none;
            with block diffusion, sequences are a multiple of it.
        corrupt: turns clean sequences into a batch of the family's objective: which rows are noisy, what they
            see and which row predicts which token. Called like :func:`corrupt_blocks`.
        decode: the family's plain decoding loop. Called like :func:`decode_blocks`.
        layout: ``config.json`` and tensor names of the released checkpoints.
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
    evaluation_length: int
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS
    chat_template: str = CHAT_TEMPLATE
    policies: tuple[tuple[str, float | None], ...] = (("static, one token per step", None), ("threshold 0.9", 0.9))
    max_new_tokens: int | None = None

    @property
    def recipe(self) -> Recipe:
        """Text and shape of the bundled checkpoint."""
        values = read_recipe(f"tiny-{self.name}")
        return Recipe.of(values["text"], values["network"])


SDAR = TinyFamily(
    name="sdar",
    block_length=16,
    corrupt=corrupt_blocks,
    decode=decode_blocks,
    layout=LAYOUTS["sdar"],
    evaluation_length=80,
)
SDAR_JSON = replace(SDAR, name="sdar-json", chat_template=TOOLS_CHAT_TEMPLATE, evaluation_length=112)
"""Knows the arithmetic task as JSON and as the call of a tool, too."""
LLADA = TinyFamily(
    name="llada",
    block_length=16,
    corrupt=corrupt_responses,
    decode=decode_windows,
    layout=LAYOUTS["llada"],
    evaluation_length=96,
    max_new_tokens=64,
)
DREAM = TinyFamily(
    name="dream",
    block_length=16,
    corrupt=partial(corrupt_responses, shift=1),
    decode=partial(decode_windows, shift=1),
    layout=LAYOUTS["Dream"],
    evaluation_length=96,
    max_new_tokens=64,
)
QWEN2 = TinyFamily(
    name="qwen2",
    block_length=1,
    corrupt=next_tokens,
    decode=decode_greedily,
    layout=LAYOUTS["qwen2"],
    evaluation_length=192,
    special_tokens=AUTOREGRESSIVE_SPECIAL_TOKENS,
    policies=(("greedy", None),),
)
QWEN2_SMALL = replace(QWEN2, name="qwen2-small")
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


class _Batches(Dataset):
    """The training text, tokenized once, and ``count`` batches drawn from it."""

    def __init__(self, recipe: Recipe, family: TinyFamily, seed: int, count: int):
        self.recipe = recipe
        self.family = family
        self.count = count
        self.generator = torch.Generator()
        self._seed, self._drawn = seed, count
        library = read_standard_library(recipe.library_modules)
        # Whatever the seed, the tokenizer is the same, so that models of several seeds understand each other.
        problems = in_forms(make_problems(recipe.tokenizer_problems, 0, "train", recipe.wording), recipe.forms)
        samples = [render_prompt(problem.question, problem.tools) + problem.answer_text for problem in problems]
        tokens = recipe.network.vocab_size - recipe.spare_rows
        self.tokenizer = train_tokenizer(library + samples, tokens, family.special_tokens)
        problems = make_problems(count * recipe.chats, seed, "train", recipe.wording, recipe.add_until)
        problems = in_forms(problems, recipe.forms)
        self.chats = tokenize_chats(self.tokenizer, problems, recipe.length)
        self.documents = tokenize_documents(self.tokenizer, library) if library else torch.zeros(0, dtype=torch.long)
        self.ids = SpecialIds.of(self.tokenizer)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, step: int) -> TrainingBatch:
        """Batch of one step. One generator draws them in order: those before it are drawn again if need be."""
        if step < self._drawn:
            self.generator.manual_seed(self._seed)
            self._drawn = 0
        while self._drawn <= step:
            batch = self._draw(self._drawn)
            self._drawn += 1
        return batch

    def _draw(self, step: int) -> TrainingBatch:
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


@dataclass(kw_only=True)
class TinyArguments(RunArguments):
    """Options of the command. A recipe of this package has values for all that has no default."""

    family: str = field(metadata={"help": f"Model family: {', '.join(FAMILIES)}."})
    text: dict[str, Any] | str | None = field(metadata={"help": "Text of the run, as JSON: fields of `tiny.Recipe`."})
    network: dict[str, Any] | str | None = field(metadata={"help": "Shape of the network, as JSON: `NetworkConfig`."})
    matrix_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak of the layers' matrices; default: --learning-rate."}
    )
    held_out: int = field(default=200, metadata={"help": "Held-out problems to evaluate on."})
    per_device_train_batch_size: int = default_of("per_device_train_batch_size", 1)

    def __post_init__(self) -> None:
        self.text, self.network = (
            json.loads(value) if isinstance(value, str) else value for value in (self.text, self.network)
        )
        if self.family not in FAMILIES:
            raise TrainingError(f"--family={self.family!r} is not one of {', '.join(FAMILIES)}")
        if self.max_steps <= 0 or self.per_device_train_batch_size != 1:
            raise TrainingError("--max-steps must be given, and --per-device-train-batch-size is 1: a visit is a batch")
        super().__post_init__()

    @property
    def text_and_shape(self) -> Recipe:
        """What the batches and the network are made by."""
        assert isinstance(self.text, dict)
        assert isinstance(self.network, dict)
        return Recipe.of(self.text, self.network)


class TinyTrainer(DiffusionTrainer):
    """Trains with :class:`MuonAndAdamW`."""

    def create_optimizer(self, model: Network | None = None) -> torch.optim.Optimizer:
        rate, matrix_rate = self.args.learning_rate, self.args.matrix_learning_rate
        self.optimizer = MuonAndAdamW(self.model, rate, rate if matrix_rate is None else matrix_rate)
        return self.optimizer


def train(args: TinyArguments) -> tuple[Network, Tokenizer]:
    """Train a network, whose weights end with bfloat16's values, and its tokenizer.

    On one machine the same arguments give the same weights.
    """
    recipe, count = args.text_and_shape, args.fix_steps(args.max_steps)
    batches = _Batches(recipe, FAMILIES[args.family], args.seed, count)
    torch.manual_seed(args.seed)
    trainer = TinyTrainer(build_network(recipe.network), args, batches, lambda batch: batch[0], count)
    trainer.run()
    network = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())
    return network.eval(), batches.tokenizer


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


def make(args: TinyArguments) -> None:
    """Train a model, write its checkpoint and evaluate it on held-out arithmetic."""
    family = FAMILIES[args.family]
    network, tokenizer = train(args)
    if args.process_index != 0:
        return
    save_checkpoint(family, network, tokenizer, Path(args.output_dir))
    console = Console()
    console.print(f"{args.output_dir}: {network.num_parameters():,} parameters, {args.max_steps} steps")
    problems = make_problems(args.held_out, HELD_OUT_SEED, "test")
    for form, (policy, threshold) in itertools.product(args.text_and_shape.forms, family.policies):
        outcome = evaluate(family, network, tokenizer, in_forms(problems, (form,)), threshold=threshold)
        console.print(
            f"{form}, {policy}: accuracy {outcome.accuracy:.3f}, {outcome.tokens_per_forward:.2f} tokens per forward, "
            f"confidences in tenths {' '.join(f'{share:.3f}' for share in outcome.histogram)}"
        )


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    arguments = sys.argv[1:] if words is None else words
    run_command("tiny", lambda: make(parse_arguments(TinyArguments, arguments, __doc__)))


if __name__ == "__main__":
    main()
