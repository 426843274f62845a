"""Training data: prompts and responses, tokenized, and the order in which a run visits them."""

import json
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from vllm_dllm.tiny.arithmetic import make_problems

logger = logging.getLogger(__name__)


class TrainingError(Exception):
    """What the user has to put right; the message says how."""


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
    records = parse_records(path, path.read_bytes())
    if not records:
        raise TrainingError(f"{path} has no examples")
    return records


def parse_records(path: Path, lines: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The same of ``lines`` of the file.

    Raises:
        TrainingError: a line is no JSON object.
    """
    records = []
    # JSON has strings with U+2028 and others at which `str.splitlines` would part lines.
    for number, line in enumerate(lines.split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TrainingError(f"{place} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise TrainingError(f"{place} must be an object, not {type(record).__name__}")
        records.append((place, record))
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

    from vllm_dllm.models.tokenizers import register_tokenizers

    if (folder / "tokenizer.json").is_file():  # AutoTokenizer would warn that transformers has no such model type
        return PreTrainedTokenizerFast.from_pretrained(folder)
    register_tokenizers()
    # Another may have code of its own, beside the weights that the user has chosen.
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def pad_token_id_of(tokenizer: Any) -> int:
    """What follows an answer.

    Raises:
        TrainingError: the tokenizer has neither padding nor an end.
    """
    for found in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    raise TrainingError("the checkpoint's tokenizer has neither a pad_token nor an eos_token, which follow an answer")


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


class Visits(Dataset):
    """What a run trains on, in its order: every epoch takes each example once, in an order of its own.

    A visit depends on the seed and its number only, not on the process or the batch that has it.

    Args:
        draw: what a visit makes of an example, such as a draw of masks.
        kind: of the run; runs of another kind draw otherwise.
        count: visits of the run.
    """

    def __init__(
        self, examples: list[Example], draw: Callable[[Example, torch.Generator], Any], kind: str, seed: int, count: int
    ):
        self.examples = examples
        self.seed = seed
        self._draw = draw
        self._kind = kind
        self._count = count
        self._epoch = -1
        self._permutation: list[int] = []

    def __len__(self) -> int:
        return self._count

    def example(self, visit: int) -> int:
        """Number of the example that is visited."""
        epoch, place = divmod(visit, len(self.examples))
        if epoch != self._epoch:
            generator = seeded_generator("epoch", self.seed, epoch)
            self._epoch, self._permutation = epoch, torch.randperm(len(self.examples), generator=generator).tolist()
        return self._permutation[place]

    def __getitem__(self, visit: int) -> Any:
        return self._draw(self.examples[self.example(visit)], seeded_generator(self._kind, self.seed, visit))
