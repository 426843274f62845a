"""Training on ``transformers.Trainer``: the loop, its arguments and checkpoints are transformers', the loss is ours.

A command's options are the fields of a subclass of ``TrainingArguments``; a recipe is a YAML file with values for them.
"""

import logging
import math
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import yaml
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import nn
from torch.utils.data import Dataset
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from vllm_dllm.training.answers import read_answers
from vllm_dllm.training.data import Example, TrainingError, Visits, encode, generated_pairs
from vllm_dllm.training.layouts import load_network, read_config, released_tensors
from vllm_dllm.training.network import Network
from vllm_dllm.training.objectives import IGNORE, TrainingBatch

RECIPES = Path(__file__).parent / "recipes"

# --- arguments -------------------------------------------------------------------------------------------------------


def default_of(name: str, value: Any) -> Any:
    """A field of ``TrainingArguments`` with its help and another default."""
    return field(default=value, metadata=dict(TrainingArguments.__dataclass_fields__[name].metadata))


@dataclass(kw_only=True)
class RunArguments(TrainingArguments):
    """transformers' arguments with our defaults. Values of a recipe come before them, options before both.

    Attributes:
        recipe: see :func:`parse_arguments`.
    """

    recipe: str | None = field(
        default=None, metadata={"help": "Name of a recipe of this package, or a YAML file: values of these options."}
    )
    output_dir: str = field(metadata={"help": "Folder of the trained checkpoint; checkpoint-N in it are states."})
    max_steps: int = default_of("max_steps", -1)
    weight_decay: float = default_of("weight_decay", 0.1)
    bf16: bool = field(default=True, metadata={"help": "bfloat16 autocast; the weights stay in float32."})
    logging_steps: float = default_of("logging_steps", 10)
    logging_nan_inf_filter: bool = default_of("logging_nan_inf_filter", False)
    report_to: str | None = field(
        default="none", metadata={"help": "tensorboard, wandb and others; none: only the console."}
    )
    save_total_limit: int | None = default_of("save_total_limit", 2)
    seed: int = field(default=0, metadata={"help": "Seed of the order and of all draws."})
    ddp_find_unused_parameters: bool | None = default_of("ddp_find_unused_parameters", False)
    remove_unused_columns: bool = default_of("remove_unused_columns", False)
    train_sampling_strategy: str = default_of("train_sampling_strategy", "sequential")  # Visits have an order.

    @property
    def visits_per_step(self) -> int:
        """Examples of an optimizer step, in all processes."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.world_size

    def fix_steps(self, examples: int) -> int:
        """Turn epochs of so many examples into ``max_steps``; returns the visits of the run.

        Raises:
            TrainingError: there are none.
        """
        if self.max_steps == 0:
            raise TrainingError("--max-steps=0 must be above 0, or left out for --num-train-epochs")
        if self.max_steps < 0:
            if self.num_train_epochs <= 0:
                raise TrainingError(f"--num-train-epochs={self.num_train_epochs} must be above 0, or give --max-steps")
            self.max_steps = math.ceil(examples * self.num_train_epochs / self.visits_per_step)
        return self.max_steps * self.visits_per_step

    def load_network(self, folder: Path) -> Network:
        """Load a checkpoint. FSDP may send all processes the first one's weights, and then no other reads them."""
        plugin = self.fsdp_plugin_args or {}
        return load_network(folder, weights=self.process_index == 0 or not plugin.get("cpu_ram_efficient_loading"))


@dataclass(kw_only=True)
class TuneArguments(RunArguments):
    """Arguments of a run that trains a checkpoint further, on prompts and responses.

    Raises:
        TrainingError: a value is out of its range, or the weights would be overwritten.
    """

    LEAST: ClassVar[dict[str, int]] = {"padding": 0, "problems": 1}
    """Least value of each option that has one."""

    model: str = field(metadata={"help": "Checkpoint folder."})
    data: list[str] | None = field(
        default=None,
        metadata={
            "help": 'JSON lines with "prompt" and "response", or from `d2a generate`; without: generated arithmetic.'
        },
    )
    padding: int = field(
        default=0,
        metadata={"help": "Each answer is followed by so many padding tokens, for drafts that reach behind it."},
    )
    max_length: int = field(default=4096, metadata={"help": "Longer examples (before padding) are left out."})
    problems: int = field(default=3200, metadata={"help": "Generated problems where there are no --data."})
    num_train_epochs: float = default_of("num_train_epochs", 1.0)
    warmup_steps: float = default_of("warmup_steps", 50)

    def __post_init__(self) -> None:
        for name, least in self.LEAST.items():
            if getattr(self, name) < least:
                raise TrainingError(f"--{name}={getattr(self, name)} must be at least {least}")
        if Path(self.output_dir).resolve() == Path(self.model).resolve():
            raise TrainingError("--output-dir is the folder of --model, whose weights would be overwritten")
        super().__post_init__()

    def read_examples(self, tokenizer: Any, vocab_size: int, end: str | None = None) -> list[Example]:
        """The examples of ``data``, or generated ones; ``end`` follows each response, by default the end of a text.

        Raises:
            TrainingError: a file or a line cannot be used; the message says which and why.
        """
        end = tokenizer.eos_token if end is None else end
        if not self.data:
            return encode(tokenizer, generated_pairs(self.problems, self.seed), end, self.max_length)
        return read_answers([Path(path) for path in self.data], tokenizer, end, self.max_length, vocab_size)


Arguments = TypeVar("Arguments", bound=RunArguments)


def read_recipe(name: str) -> dict[str, Any]:
    """Values of a recipe of this package, or of a YAML file.

    Raises:
        TrainingError: there is none, or it is no mapping.
    """
    path = Path(name) if Path(name).is_file() else RECIPES / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in RECIPES.glob("*.yaml")))
        raise TrainingError(f"--recipe={name!r} is no file and not one of {known}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise TrainingError(f"{path} must be a mapping of options to values")
    return values


def make_parser(kind: type[RunArguments], words: Sequence[str], description: str | None = None) -> HfArgumentParser:
    """The parser of a command's options, with the values of the ``--recipe`` that ``words`` name as defaults.

    Raises:
        TrainingError: the recipe is missing or has keys that are no options.
    """
    parser = HfArgumentParser(kind, description=description, allow_abbrev=False)
    recipe = ArgumentParser(add_help=False, allow_abbrev=False)
    recipe.add_argument("--recipe")
    name = recipe.parse_known_args(list(words))[0].recipe
    values = {} if name is None else read_recipe(name)
    known = {each.name: each for each in fields(kind) if each.init}
    for key in values:
        if key not in known:
            raise TrainingError(f"{key!r} of --recipe={name} is no option of this command")
    for action in parser._actions:
        if action.dest in values:
            action.required = False
            if action.nargs == "+" and not isinstance(values[action.dest], list):
                values[action.dest] = [values[action.dest]]
    parser.set_defaults(**values)
    return parser


def parse_arguments(kind: type[Arguments], words: Sequence[str], description: str | None = None) -> Arguments:
    """A command's arguments: options, then values of ``--recipe``, then defaults."""
    return make_parser(kind, words, description).parse_args_into_dataclasses(list(words))[0]


def _refusal_of_vllm() -> type[Exception]:
    """What vLLM raises where it refuses a request; most commands do without vLLM."""
    return getattr(sys.modules.get("vllm.exceptions"), "VLLMValidationError", TrainingError)


@contextmanager
def clear_errors(name: str) -> Iterator[None]:
    """Print what the user of a command has to put right, and end it with status 2."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        yield
    except (TrainingError, OSError, ValueError, _refusal_of_vllm()) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


# --- the loop --------------------------------------------------------------------------------------------------------


def batch_loss(network: nn.Module, batch: TrainingBatch) -> torch.Tensor:
    """The weighted sum, or the mean, of the targets' cross-entropies: a scalar, float32."""
    rows = batch.targets != IGNORE
    losses = network(batch.input_ids, batch.positions, batch.mask, rows, batch.targets[rows])
    return losses.mean() if batch.weights is None else (losses * batch.weights[rows]).sum()


class DiffusionTrainer(Trainer):
    """A Trainer whose batches are :class:`TrainingBatch`.

    A step's loss is the mean over its forwards and processes, so each must have as many examples as the others.

    Raises:
        TrainingError: the process has several GPUs.

    Args:
        visits: all that the run trains on, in its order; a multiple of ``args.visits_per_step``.
        collate: makes a batch of several visits.
        epoch: visits of an epoch, for the log.
    """

    def __init__(
        self,
        network: nn.Module,
        args: RunArguments,
        visits: Dataset,
        collate: Callable[[list[Any]], TrainingBatch],
        epoch: int,
    ):
        if args.n_gpu > 1:
            # transformers would divide a batch, whose rows belong together, among them.
            raise TrainingError(
                f"one process sees {args.n_gpu} GPUs: start one for each (torchrun --nproc-per-node {args.n_gpu} ...), "
                "or choose one with CUDA_VISIBLE_DEVICES"
            )
        super().__init__(network, args, lambda each: vars(collate(each)), visits)
        self._epoch = epoch

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        return batch_loss(model, TrainingBatch(**inputs))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the epochs of the examples (to transformers, the run is one epoch), and end a run that diverged."""
        self.state.epoch = self.state.global_step * self.args.visits_per_step / self._epoch
        super().log(logs, start_time)
        if not math.isfinite(logs.get("loss", 0.0)):
            loss, step = logs["loss"], self.state.global_step
            raise TrainingError(f"the loss of step {step} is {loss}: training diverged; lower --learning-rate")

    def run(self) -> None:
        """Train, from the state that ``--resume-from-checkpoint`` names: a folder, or ``last``.

        Raises:
            TrainingError: there is no such state.
        """
        resume = self.args.resume_from_checkpoint
        if resume == "last":
            out = Path(self.args.output_dir)
            resume = get_last_checkpoint(self.args.output_dir) if out.is_dir() else None
            if resume is None:
                raise TrainingError(f"nothing to resume: there is no checkpoint-N in {out}")
        self.train(resume_from_checkpoint=resume)
        self.save_state()

    def write_released(self, source: Path) -> None:
        """Write weights, config and tokenizer in the layout of ``source`` to ``output_dir``. All processes call it."""
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if self.is_world_process_zero():
            copy_other_files(source, Path(self.args.output_dir))
            write_weights(state, source, Path(self.args.output_dir))
        self.accelerator.wait_for_everyone()


def tune(
    args: TuneArguments,
    kind: str,
    examples: list[Example],
    draw: Callable[[Example, torch.Generator], Any],
    collate: Callable[[list[Any]], TrainingBatch],
) -> None:
    """Train ``args.model`` on what ``draw`` makes of the examples (see :class:`Visits`), and write the checkpoint."""
    visits = Visits(examples, draw, kind, args.seed, args.fix_steps(len(examples)))
    trainer = DiffusionTrainer(args.load_network(Path(args.model)), args, visits, collate, len(examples))
    trainer.run()
    trainer.write_released(Path(args.model))


# --- checkpoints in the released layouts -----------------------------------------------------------------------------


def copy_other_files(source: Path, out: Path) -> None:
    """Copy what belongs to a checkpoint beside its weights."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        is_weight = file.suffix in {".safetensors", ".bin"} or file.name.endswith(".index.json")
        is_record = file.name in {"README.md", "trainer_state.json"}
        if file.is_file() and not is_weight and not is_record:
            shutil.copy2(file, out / file.name)


def write_weights(state: dict[str, torch.Tensor], source: Path, out: Path) -> None:
    """Write a network's state with the names and the dtypes of ``source``, in files of at most 5 GB."""
    dtypes: dict[str, torch.dtype] = {}
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            dtypes.update({name: file.get_slice(name)[:0].dtype for name in file.keys()})  # noqa: SIM118
    config = read_config(source)
    tensors = released_tensors(state, config)
    converted = {name: tensor.to("cpu", dtypes[name]).contiguous() for name, tensor in tensors.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(converted, out, metadata={"format": "pt"})
