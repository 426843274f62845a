"""Engines and requests of the tests of structured outputs."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import xgrammar
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.utils import choice_as_grammar

from tests.engine.harness import EOS, MASK, engine
from tests.paths import BUNDLED

REASONING = ("<think>", "</think>")
"""The two tokens before the last two."""

SAMPLE = """{"name": "Ada", "age": 36, "tags": ["math", "engines"]} [1, 2.5, -3e2, true, false, null]
The answer is 17 apples and 4 pens. SELECT name FROM fruit WHERE n > 12; add(a=12, b=7)"""

CHOICES = [
    *("yes", "no", "maybe later", "Ada has 12 apples", "Ada has 12 pens and a book", "Ada has 120 apples"),
    *(f"answer {n}: {'ab' * n}." for n in range(12)),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 40},
        "unit": {"enum": ["apples", "pens", "books"]},
        "checked": {"type": "boolean"},
    },
    "required": ["answer", "unit", "checked"],
    "additionalProperties": False,
}
REGEX = r"First, [0-9]{1,2} [+\-] [0-9]{1,2} = [0-9]{1,2} (apples|pens)\. (a|bc){2,6}#"
EBNF = """root ::= "SELECT " col (", " col)? " FROM fruit WHERE n " op " " num ";"
col ::= "name" | "count" | "owner"
op ::= ">" | "<" | "="
num ::= [1-9] [0-9]?"""
SQL = r"SELECT (name|count|owner)(, (name|count|owner))? FROM fruit WHERE n [><=] [1-9][0-9]?;"


def _is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@dataclass(frozen=True)
class Constraint:
    """What a request asks for, and whether a text is that."""

    name: str
    asked: dict[str, Any]
    holds: Callable[[str], object]


CONSTRAINTS = (
    Constraint("choice", {"choice": CHOICES}, CHOICES.__contains__),
    Constraint("json", {"json": SCHEMA}, _is_json),
    Constraint("regex", {"regex": REGEX}, re.compile(REGEX).fullmatch),
    Constraint("grammar", {"grammar": EBNF}, re.compile(SQL).fullmatch),
)


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer for the checkpoints in ``tests/golden``: 512 tokens, the last two end a text and mask."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=EOS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=1)
    tokenizer.train_from_iterator([SAMPLE, *CHOICES], trainer)
    more = [f"<|unused {n}|>" for n in range(EOS - len(REASONING) - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([*more, *REASONING, "<|end|>", "<|MASK|>"])
    assert (tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|MASK|>")) == (EOS, MASK)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


class Compiled:
    """A constraint's grammar for ``tests.reference.grammar``, asked anew about every text.

    xgrammar is asked, since its bitmasks leave out tokens that it would accept: "ook" behind "a b", where the text goes
    on with "book" and "ok" is a token, too.
    """

    def __init__(self, constraint: Constraint, tokenizer: Path):
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            PreTrainedTokenizerFast.from_pretrained(tokenizer), vocab_size=MASK + 1
        )
        compiler = xgrammar.GrammarCompiler(vocabulary)
        self._never: set[int] = set()
        match constraint.asked:
            case {"choice": choices}:
                self._grammar = compiler.compile_grammar(choice_as_grammar(choices))
            case {"json": schema}:
                self._grammar = compiler.compile_json_schema(json.dumps(schema))
                texts = enumerate(vocabulary.decoded_vocab)
                self._never = {token for token, text in texts if any(b < 32 and b not in b"\r\n" for b in text)}
            case {"regex": regex}:
                self._grammar = compiler.compile_regex(regex)
            case {"grammar": grammar}:
                self._grammar = compiler.compile_grammar(grammar)

    def allowed(self, tokens: Sequence[int]) -> set[int]:
        """As ``tests.reference.grammar.Grammar``."""
        if EOS in tokens:
            return {*range(MASK)}
        matcher = xgrammar.GrammarMatcher(self._grammar, override_stop_tokens=[EOS])
        assert all(matcher.accept_token(token) for token in tokens)
        bitmask = xgrammar.allocate_token_bitmask(1, MASK + 1)
        matcher.fill_next_token_bitmask(bitmask)
        bits = np.unpackbits(bitmask[0].numpy().view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist()) - self._never


def structured_engine(family: str, tokenizer: Path, dllm: dict[str, Any], **options: Any) -> LLM:
    """An engine that knows the texts of its tokens."""
    options = {"skip_tokenizer_init": False, "tokenizer": str(tokenizer), "max_num_seqs": 32, **options}
    return engine(BUNDLED / family / "checkpoint", dllm=dllm, **options)


def params(asked: dict[str, Any] | None, *, args: dict[str, Any] | None = None, **more: Any) -> SamplingParams:
    """Parameters of a request with a constraint, or none."""
    constraint = None if asked is None else StructuredOutputsParams(**asked)
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 96, "stop_token_ids": [EOS], "extra_args": args or {}}
    return SamplingParams(**{**given, "structured_outputs": constraint, **more})
