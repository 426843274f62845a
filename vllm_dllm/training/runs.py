"""What the fine-tuning commands share: their data, the order of the examples, the loop, and what a run writes."""

import contextlib
import importlib
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from vllm_dllm.training.arithmetic import make_problems
from vllm_dllm.training.layouts import layout_of, read_config
from vllm_dllm.training.network import Network

logger = logging.getLogger(__name__)


class TrainingError(Exception):
    """What the user has to put right; the message says how."""


# --- data ----------------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """A prompt and its response.

    Attributes:
        tokens: ``[L]`` int64, the response with its end token.
        prompt_length: tokens of the prompt, at least one.
    """

    tokens: torch.Tensor
    prompt_length: int


def read_records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSON lines file, each with its place in words.

    Raises:
        TrainingError: the file is missing or empty, or a line is no JSON object.
    """
    if not path.is_file():
        raise TrainingError(f"there is no file {path}")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TrainingError(f"{place} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise TrainingError(f"{place} must be an object, not {type(record).__name__}")
        records.append((place, record))
    if not records:
        raise TrainingError(f"{path} has no examples")
    return records


def pair_of(place: str, record: dict[str, Any]) -> tuple[str, str]:
    """Prompt and response of a record.

    Raises:
        TrainingError: the record is not ``{"prompt": str, "response": str}``.
    """
    if any(not isinstance(record.get(key), str) for key in ("prompt", "response")):
        raise TrainingError(f'{place} must be an object with strings "prompt" and "response"')
    return record["prompt"], record["response"]


def generated_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Arithmetic problems of the training split, as the tiny models know them."""
    return [(problem.question, problem.answer_text) for problem in make_problems(count, seed, "train")]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint in one of the layouts, as transformers has it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (folder / "tokenizer.json").is_file():  # AutoTokenizer would warn that transformers has no such model type
        return PreTrainedTokenizerFast.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def encode_prompts(tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Token ids of user messages in the tokenizer's chat template, up to the beginning of the response.

    Raises:
        TrainingError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise TrainingError("the checkpoint's tokenizer has no chat template to render prompts with")
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


def encode(tokenizer: Any, pairs: list[tuple[str, str]], end: str, max_length: int) -> list[Example]:
    """Tokenize prompts, in the tokenizer's chat template, and responses, each with ``end`` behind it.

    Examples that are longer than ``max_length`` are left out, with a warning that says how many.

    Raises:
        TrainingError: the tokenizer has no chat template, or all examples are too long.
    """
    prompts = encode_prompts(tokenizer, [prompt for prompt, _ in pairs])
    responses = tokenizer([response + end for _, response in pairs], add_special_tokens=False)["input_ids"]
    return short_enough(list(zip(prompts, responses, strict=True)), max_length)


def short_enough(tokenized: list[tuple[list[int], list[int]]], max_length: int) -> list[Example]:
    """Prompts and responses of at most ``max_length`` tokens together; a warning says how many are left out.

    Raises:
        TrainingError: all are longer.
    """
    examples = [
        Example(torch.tensor(prompt + response), len(prompt))
        for prompt, response in tokenized
        if len(prompt) + len(response) <= max_length
    ]
    if not examples:
        raise TrainingError(f"all {len(tokenized)} examples are longer than {max_length} tokens")
    if len(examples) < len(tokenized):
        left_out = len(tokenized) - len(examples)
        logger.warning("%d of %d examples are longer than %d tokens: left out", left_out, len(tokenized), max_length)
    return examples


def seeded_generator(kind: str, seed: int, number: int) -> torch.Generator:
    """Randomness of one part of a run, independent of what was drawn before it."""
    return torch.Generator().manual_seed(zlib.crc32(f"{kind}-{seed}-{number}".encode()))


class Order:
    """Which example comes when; every epoch has an order of its own."""

    def __init__(self, examples: int, seed: int):
        self._examples = examples
        self._seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def __getitem__(self, index: int) -> int:
        """Number of the ``index``-th example of the run."""
        epoch, place = divmod(index, self._examples)
        if epoch != self._epoch:
            generator = seeded_generator("epoch", self._seed, epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self._examples, generator=generator).tolist()
        return self._permutation[place]


# --- the loop ------------------------------------------------------------------------------------------------------


class RunSettings(Protocol):
    """What a run's weights depend on, beside the model and the examples' texts; a named tuple."""

    @property
    def steps(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup(self) -> int: ...
    def _asdict(self) -> dict[str, Any]: ...


class Processes:
    """The processes that train together: this one alone, or those that ``accelerate launch`` or torchrun started.

    As a context it ends the processes' group: threads of a group that nobody ended may abort a process at its exit.

    Attributes:
        count: processes.
        index: number of this one; 0 writes and prints.
        device: where this one computes.
    """

    def __init__(self, device: str):
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.index = 0
        self.device = device
        self._accelerator: Any = None
        if self.count > 1:
            try:
                accelerate = importlib.import_module("accelerate")
            except ImportError:
                message = f"{self.count} processes need the package accelerate (pip install accelerate)"
                raise TrainingError(message) from None
            self._accelerator = accelerate.Accelerator(cpu=device == "cpu")
            self.index = self._accelerator.process_index
            self.device = str(self._accelerator.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._accelerator is not None:
            if kind is None:  # The first process may still be writing.
                self._accelerator.wait_for_everyone()
            self._accelerator.end_training()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.index == 0

    def share(self, network: nn.Module) -> nn.Module:
        """The network to call: its gradients are the mean over the processes."""
        return network if self._accelerator is None else self._accelerator.prepare(network)

    def backward(self, network: nn.Module, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of ``loss``; the processes' are averaged after the ``last`` loss of a step."""
        if self._accelerator is None:
            loss.backward()
            return
        with contextlib.nullcontext() if last else self._accelerator.no_sync(network):
            self._accelerator.backward(loss)

    def mean(self, value: float) -> float:
        """Mean of each process's value."""
        if self._accelerator is None:
            return value
        return self._accelerator.reduce(torch.tensor(value, device=self.device), reduction="mean").item()


def schedule(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rate: linear warm-up, constant, then linear to 0.1 over the last tenth of the steps."""
    rising = min((step + 1) / max(min(warmup, steps), 1), 1.0)
    decay_steps = math.ceil(steps / 10)
    into_decay = max(step + 1 - (steps - decay_steps), 0) / decay_steps
    return rising * (1 - 0.9 * into_decay)


Forward = TypeVar("Forward")


def fit(
    network: nn.Module,
    settings: RunSettings,
    forwards: Callable[[int], Sequence[Forward]],
    loss_of: Callable[[nn.Module, Forward, str], torch.Tensor],
    *,
    processes: Processes,
    console: Console,
    factor: Callable[[int, int, int], float] = schedule,
    state: Path | None = None,
    save_every: int = 100,
    resume: bool = False,
    stop_after: int | None = None,
) -> list[float]:
    """Train in place: AdamW, bfloat16 autocast, gradients clipped to norm 1.

    The same arguments give the same weights on one machine, with or without an interruption.

    Args:
        forwards: this process's forwards of a step; a step's loss is the mean of theirs. They must depend on the step
            only, or a resumed run differs.
        loss_of: loss of a forward on a device.
        factor: of the learning rate, by step, steps and warm-up.
        state: file of the run's state, written every ``save_every`` steps and at the end.
        resume: continue from ``state``.
        stop_after: end after this step, as an interruption would.

    Returns:
        The loss of each step, from the first, also if the run was resumed.
    """
    network.to(processes.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, betas=(0.9, 0.999), weight_decay=0.1)
    losses: list[float] = []
    if resume:
        assert state is not None
        losses = _load_state(state, network, optimizer, settings)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    network.train()
    shared = processes.share(network)
    with Progress(*columns, console=console, disable=not processes.first) as progress:
        bar = progress.add_task("fine-tuning", total=settings.steps, completed=len(losses), loss=math.nan)
        for step in range(len(losses), min(settings.steps, stop_after or settings.steps)):
            total = 0.0
            batches = forwards(step)
            for number, batch in enumerate(batches, 1):
                with torch.autocast(torch.device(processes.device).type, torch.bfloat16):
                    loss = loss_of(shared, batch, processes.device) / len(batches)
                processes.backward(shared, loss, last=number == len(batches))
                total += loss.item()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * factor(step, settings.steps, settings.warmup)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(processes.mean(total))
            progress.update(bar, advance=1, loss=sum(losses[-20:]) / len(losses[-20:]))
            if not math.isfinite(losses[-1]):
                raise TrainingError(f"the loss of step {step + 1} is {losses[-1]}: training diverged; lower --lr")
            if processes.first and ((step + 1) % save_every == 0 or step + 1 == settings.steps):
                recent = losses[-save_every:]
                progress.console.print(f"step {step + 1}: loss {sum(recent) / len(recent):.4f}")
                if state is not None:
                    _save_state(state, network, optimizer, settings, losses)
    network.eval()
    return losses


def _load_state(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, settings: RunSettings) -> list[float]:
    """Restore a run that was cut off; returns the losses of its steps."""
    if not path.is_file():
        raise TrainingError(f"nothing to resume: there is no {path}")
    state = torch.load(path, weights_only=True)
    written = state["settings"]
    for key, value in settings._asdict().items():
        if written.get(key) != value:
            raise TrainingError(f"{path} was written with {key}={written.get(key)!r}, not {value!r}")
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return state["losses"]


def _save_state(
    path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, settings: RunSettings, losses: list[float]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    torch.save(
        {
            "settings": settings._asdict(),
            "network": network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "losses": losses,
        },
        unfinished,
    )
    unfinished.replace(path)  # a cut-off write leaves the state before it


# --- what a run writes ---------------------------------------------------------------------------------------------


def copy_other_files(source: Path, out: Path) -> None:
    """Copy what belongs to a checkpoint beside its weights; files that are there already stay as they are."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        is_weight = file.suffix in {".safetensors", ".bin"} or file.name.endswith(".index.json")
        if file.is_file() and not is_weight and file.name != "README.md" and not (out / file.name).exists():
            shutil.copy2(file, out / file.name)


def write_weights(network: Network, source: Path, out: Path) -> None:
    """Write weights with the layout and the dtypes of ``source``, in one file."""
    dtypes: dict[str, torch.dtype] = {}
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            dtypes.update({name: file.get_tensor(name).dtype for name in file.keys()})  # noqa: SIM118
    tensors = layout_of(read_config(source)).tensors(network.state_dict())
    converted = {name: tensor.to("cpu", dtypes[name]).contiguous() for name, tensor in tensors.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(converted, out / "model.safetensors", metadata={"format": "pt"})


def write_losses(losses: list[float], settings: RunSettings, label: str, folder: Path, console: Console) -> None:
    """Write ``losses.json``, and ``losses.png`` where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    log = {"settings": settings._asdict(), "losses": [round(loss, 6) for loss in losses]}
    (folder / "losses.json").write_text(json.dumps(log, indent=1) + "\n")
    try:
        import matplotlib
    except ImportError:
        console.print("no loss curve is drawn: it needs matplotlib (pip install 'vllm-dllm[train]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    span = max(1, len(losses) // 20)
    smoothed = torch.tensor(losses).unfold(0, span, 1).mean(1)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="#b8c7dc", linewidth=0.8, label="step")
    axes.plot(range(span, len(losses) + 1), smoothed, color="#1f4e8c", label=f"mean of {span} steps")
    axes.set(xlabel="step", ylabel=label)
    axes.legend()
    figure.savefig(folder / "losses.png", dpi=120)
    pyplot.close(figure)


def summary(out: Path, losses: list[float]) -> str:
    """A run in one line."""
    tenth = max(1, len(losses) // 10)
    return (
        f"{out}: {len(losses)} steps, loss {sum(losses[:tenth]) / tenth:.4f} in the first tenth of them, "
        f"{sum(losses[-tenth:]) / tenth:.4f} in the last"
    )
