"""Tokenizer and training text of the tiny models: arithmetic chats."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vllm_dllm.tiny.arithmetic import Problem

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
MASK = "<|MASK|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, MASK)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's chat format without tools and without a default system message."""

TOOLS_CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:"
    "{% for tool in tools %} {{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n"""
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
""":data:`CHAT_TEMPLATE` with tools: their names and parameters in a line, and calls as Qwen's models write them."""

_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen splits text before the byte-pair merges; each digit is a word, so numbers become digits."""


class ChatText(NamedTuple):
    """Tokenized chats.

    Attributes:
        tokens: ``[n, length]`` int64, prompt, answer, ``<|im_end|>``, then ``<|endoftext|>`` to the end.
        prompt_lengths: ``[n]`` int64, tokens before the answer.
    """

    tokens: torch.Tensor
    prompt_lengths: torch.Tensor


def render_prompt(question: str, tools: Sequence[str] = ()) -> str:
    """What the chat template makes of one user message, up to the beginning of the answer.

    Args:
        tools: names of tools, each with the parameters ``a`` and ``b``; :data:`TOOLS_CHAT_TEMPLATE` renders them.
    """
    offered = f"{IM_START}system\nTools:{''.join(f' {name}(a, b)' for name in tools)}{IM_END}\n" if tools else ""
    return f"{offered}{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"


def read_standard_library(modules: int | None = None) -> list[str]:
    """The sources of the running Python's top-level modules by name, the first ``modules`` or all."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:modules]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def train_tokenizer(texts: list[str], vocab_size: int, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
    """Train a byte-level BPE tokenizer; the special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, chat_template: str = CHAT_TEMPLATE) -> None:
    """Write the files that ``AutoTokenizer.from_pretrained`` reads."""
    special = {"eos_token": IM_END, "pad_token": END_OF_TEXT}
    if tokenizer.token_to_id(MASK) is not None:
        special["mask_token"] = MASK
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length, chat_template=chat_template, **special
    ).save_pretrained(folder)


def tokenize_chats(tokenizer: Tokenizer, problems: list[Problem], length: int) -> ChatText:
    """Tokenize problems with their answers.

    Raises:
        ValueError: a chat is longer than ``length``.
    """
    prompts = tokenizer.encode_batch([render_prompt(problem.question, problem.tools) for problem in problems])
    answers = tokenizer.encode_batch([problem.answer_text + IM_END for problem in problems])
    end_of_text: int = tokenizer.token_to_id(END_OF_TEXT)  # type: ignore[assignment]
    tokens = torch.full((len(problems), length), end_of_text)
    for row, prompt, answer in zip(tokens, prompts, answers, strict=True):
        chat = prompt.ids + answer.ids
        if len(chat) > length:
            raise ValueError(f"a chat of {len(chat)} tokens does not fit into {length}")
        row[: len(chat)] = torch.tensor(chat)
    return ChatText(tokens, torch.tensor([len(prompt.ids) for prompt in prompts]))
