"""Train a tiny language model from scratch and write it in a released checkpoint's layout.

``python -m vllm_dllm.tiny.train --recipe tiny-sdar --output-dir DIR`` takes minutes to more than an hour on a CPU.
``docs/tiny-models.md`` describes the recipes and the checkpoints made with them.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from vllm_dllm.tiny.arithmetic import HELD_OUT_ADD_UNTIL, HELD_OUT_SEED, Form, Wording, make_problems
from vllm_dllm.tiny.evaluation import solve
from vllm_dllm.tiny.forms import in_forms
from vllm_dllm.tiny.muon import MuonAndAdamW
from vllm_dllm.tiny.objectives import corrupt_blocks, corrupt_responses, next_tokens
from vllm_dllm.tiny.text import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IM_END,
    SPECIAL_TOKENS,
    TOOLS_CHAT_TEMPLATE,
    read_standard_library,
    render_prompt,
    save_tokenizer,
    tokenize_chats,
    train_tokenizer,
)
from vllm_dllm.training.data import TrainingError
from vllm_dllm.training.layouts import layout_of, network_config, released_tensors
from vllm_dllm.training.network import Network, build_network
from vllm_dllm.training.objectives import TrainingBatch
from vllm_dllm.training.trainer import DiffusionTrainer, RunArguments, clear_errors, default_of, parse_arguments


@dataclass(frozen=True, kw_only=True)
class Text:
    """What a model learns from.

    Attributes:
        chats: arithmetic chats per batch.
        length: tokens per sequence, with block diffusion a multiple of the block length.
        window: of block diffusion, noisy tokens per sequence and copy, from the block on that the answer starts in.
        long_every: every so many batches, sequences may be as long as ``long_length`` (and are fewer), and answers of
            all batches are followed by a random number of ``<|endoftext|>``, so that the model ends in windows of any
            length; ``None``: answers are filled up to ``length``.
        long_length: see above.
        library_modules: modules of Python's standard library that the tokenizer is trained on; ``None``: all.
        tokenizer_problems: problems that the tokenizer is trained on, beside the modules.
        fill_answers: without ``long_every``, the ``<|endoftext|>`` behind an answer are learned as well.
        wording: of the answers.
        add_until: of the problems, see :func:`make_problems`.
        forms: of the answers, in turns; all but ``"words"`` are of the short wording.
        spare_rows: rows of the embedding that no token has, such as a drafter needs for its own ids.
    """

    chats: int = 16
    length: int = 80
    window: int = 48
    long_every: int | None = None
    long_length: int = 320
    library_modules: int | None = None
    tokenizer_problems: int = 20_000
    fill_answers: bool = True
    wording: Wording = "short"
    add_until: int = HELD_OUT_ADD_UNTIL
    forms: Sequence[Form] = ("words",)
    spare_rows: int = 0


class Batches(Dataset):
    """The training text, tokenized once, and ``count`` batches drawn from it.

    Args:
        config: ``config.json`` of the model, whose ``model_type`` decides the objective.
    """

    def __init__(self, text: Text, config: dict[str, Any], seed: int, count: int):
        self.text, self.config, self.count = text, config, count
        self.generator = torch.Generator()
        self._seed, self._drawn = seed, count
        # Whatever the seed, the tokenizer is the same, so that models of several seeds understand each other.
        problems = in_forms(make_problems(text.tokenizer_problems, 0, "train", text.wording), text.forms)
        samples = [render_prompt(problem.question, problem.tools) + problem.answer_text for problem in problems]
        special = SPECIAL_TOKENS if "mask_token_id" in config else SPECIAL_TOKENS[:-1]
        self.tokenizer = train_tokenizer(
            read_standard_library(text.library_modules) + samples, config["vocab_size"] - text.spare_rows, special
        )
        problems = make_problems(count * text.chats, seed, "train", text.wording, text.add_until)
        self.chats = tokenize_chats(self.tokenizer, in_forms(problems, text.forms), text.length)
        self.end_of_text: int = self.tokenizer.token_to_id(END_OF_TEXT)  # type: ignore[assignment]

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
        text = self.text
        length, count = text.length, text.chats
        if text.long_every is not None and step % text.long_every == text.long_every - 1:
            length, count = text.long_length, max(1, text.chats * text.length // text.long_length)
        positions = torch.arange(length)
        chosen = slice(step * text.chats, step * text.chats + count)
        chats, prompt_lengths = self.chats.tokens[chosen], self.chats.prompt_lengths[chosen]
        chats = F.pad(chats, (0, length - text.length), value=self.end_of_text)
        answers = positions >= prompt_lengths.unsqueeze(1)
        if text.long_every is not None:
            ends = (chats != self.end_of_text).sum(1)
            ends += (torch.rand(count, generator=self.generator) * (length + 1 - ends)).long()
            answers &= positions < ends.unsqueeze(1)
        elif not text.fill_answers:
            answers &= chats != self.end_of_text
        mask: int | None = self.config.get("mask_token_id")
        if mask is None:
            return next_tokens(chats, answers)
        block: int | None = self.config.get("block_size")
        if block is None:
            shift = int(layout_of(self.config).traits.shifted)
            return corrupt_responses(chats, answers, mask_token_id=mask, generator=self.generator, shift=shift)
        return corrupt_blocks(
            chats,
            answers,
            (prompt_lengths // block * block).clamp(max=length - text.window),
            window_length=text.window,
            block_length=block,
            mask_token_id=mask,
            generator=self.generator,
        )


@dataclass(kw_only=True)
class TinyArguments(RunArguments):
    """Options of the command. A recipe of this package has values for all that has no default."""

    config: dict[str, Any] | str | None = field(metadata={"help": "config.json of the checkpoint, as JSON."})
    text: dict[str, Any] | str | None = field(metadata={"help": "Text as JSON: fields of `vllm_dllm.tiny.train.Text`."})
    max_new_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Default length of an answer, for models that see the masks of the whole answer: with many more "
            "masks than in training they answer with nothing."
        },
    )
    matrix_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak of the layers' matrices; default: --learning-rate."}
    )
    embedding_deviation: float | None = field(
        default=None,
        metadata={"help": "Deviation of the new embeddings; default: 0.02. Tokens stand out more in the first layers."},
    )
    held_out: int = field(default=200, metadata={"help": "Held-out problems to evaluate on, by the engine; 0: none."})
    per_device_train_batch_size: int = default_of("per_device_train_batch_size", 1)

    def __post_init__(self) -> None:
        self.config, self.text = (
            json.loads(value) if isinstance(value, str) else value for value in (self.config, self.text)
        )
        if self.max_steps <= 0 or self.per_device_train_batch_size != 1:
            raise TrainingError("--max-steps must be given, and --per-device-train-batch-size is 1: a visit is a batch")
        if self.embedding_deviation is not None and self.embedding_deviation <= 0:
            raise TrainingError(f"--embedding-deviation={self.embedding_deviation} must be above 0")
        super().__post_init__()

    @property
    def text_and_config(self) -> tuple[Text, dict[str, Any]]:
        """Text, and ``config.json``.

        Raises:
            TrainingError: a key of ``--text`` is none of :class:`Text`.
            ValueError: ``--config`` is of no layout.
        """
        assert isinstance(self.text, dict)
        assert isinstance(self.config, dict)
        layout_of(self.config)
        known = [each.name for each in fields(Text)]
        for key in self.text.keys() - set(known):
            raise TrainingError(f"{key!r} of text is not one of {', '.join(known)}")
        return Text(**self.text), self.config


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
    (text, config), count = args.text_and_config, args.fix_steps(args.max_steps)
    batches = Batches(text, config, args.seed, count)
    torch.manual_seed(args.seed)
    network = build_network(network_config(config))
    if args.embedding_deviation is not None:
        nn.init.normal_(network.model.embed_tokens.weight, std=args.embedding_deviation)
    trainer = TinyTrainer(network, args, batches, lambda batch: batch[0], count)
    trainer.run()
    network = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())
    return network.eval(), batches.tokenizer


def save_checkpoint(
    config: dict[str, Any],
    network: Network,
    tokenizer: Tokenizer,
    folder: Path,
    max_new_tokens: int | None = None,
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """Write ``config.json``, weights (bfloat16) and tokenizer in the released layout."""
    folder.mkdir(parents=True, exist_ok=True)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    generation: dict[str, Any] = {
        "bos_token_id": end_of_text,
        "eos_token_id": [tokenizer.token_to_id(IM_END), end_of_text],
        "pad_token_id": end_of_text,
    }
    if max_new_tokens is not None:
        generation["max_new_tokens"] = max_new_tokens
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = released_tensors(network.state_dict(), config)
    tensors = {name: tensor.bfloat16().cpu() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    positions = config.get("max_position_embeddings") or config["max_sequence_length"]
    save_tokenizer(tokenizer, folder, positions, chat_template)


def make(args: TinyArguments) -> None:
    """Train a model, write its checkpoint and let the engine solve held-out arithmetic with it."""
    text, config = args.text_and_config
    network, tokenizer = train(args)
    if args.process_index != 0:
        return
    folder = Path(args.output_dir)
    template = TOOLS_CHAT_TEMPLATE if "call" in text.forms else CHAT_TEMPLATE
    save_checkpoint(config, network, tokenizer, folder, args.max_new_tokens, template)
    print(f"{folder}: {network.num_parameters():,} parameters, {args.max_steps} steps")
    if args.held_out:
        problems = make_problems(args.held_out, HELD_OUT_SEED, "test")
        for form in text.forms:
            for policy, (accuracy, speed) in solve(folder, in_forms(problems, (form,))).items():
                print(f"{form}, {policy}: accuracy {accuracy:.3f}, {speed:.2f} tokens per forward")


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    with clear_errors("tiny"):
        make(parse_arguments(TinyArguments, sys.argv[1:] if words is None else words, __doc__))


if __name__ == "__main__":
    main()
