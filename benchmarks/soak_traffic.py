"""What the soak sends: for each model family a pool of distinct requests, and a seeded stream drawn from it."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from serving import MAX_MODEL_LEN
from soak_families import Family, Options
from transformers import PreTrainedTokenizerFast

from vllm_dllm.tiny.arithmetic import Problem, make_problems


@dataclass(frozen=True)
class Request:
    """One of the pool.

    Attributes:
        prompt: text, or tokens.
        chat: the text is a user's message, not the beginning of a text.
        fields: of ``vllm.SamplingParams``, by the names that the API has for them too.
        options: of ours.
        shared: begins as others do.
    """

    prompt: str | list[int]
    chat: bool
    fields: dict[str, Any]
    options: Options
    shared: bool = False

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str, *, stream: bool) -> dict[str, Any]:
        """As the server gets it."""
        asked = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        body = {"model": model, **asked, **self.fields, "return_token_ids": True, "stream": stream}
        return {**body, "vllm_xargs": dict(self.options)} if self.options else body

    @property
    def features(self) -> list[str]:
        """What of all that may be asked for it asks for."""
        verify = str(self.options.get("dllm_verify", "none"))
        names = [f"verify {verify}"]
        if self.options.get("dllm_drafts") == "auto":
            names.append("drafts auto")
        if self.options.get("dllm_match") == "subset":
            names.append("match subset")
        if verify != "fef" and "dllm_policy" in self.options:
            names.append(f"policy {self.options['dllm_policy']}")
        names.append("chat" if self.chat else "completion")
        names.append("temperature" if self.fields["temperature"] else "greedy")
        if self.fields.get("n", 1) > 1:
            names.append("n > 1")
        if self.fields.get("stop"):
            names.append("stop string")
        if self.fields["max_tokens"] == MAX_MODEL_LEN:
            names.append("up to max_model_len")
        if self.shared:
            names.append("shared prefix")
        names += [name for name in EXTRAS if name in self.fields]
        return names


EXTRAS: dict[str, Any] = {
    "presence_penalty": 0.7,
    "repetition_penalty": 1.3,
    "logit_bias": {20: 3.0, 21: -4.0},
    "bad_words": [" the", "1"],
    "min_tokens": 12,
}
"""Further fields, one of which a request may have."""

STOPS = ([" = "], ["\n"], [".", "####"], ["has", " no such string "])
MAX_TOKENS = (1, 3, 8, 16, 17, 30, 32, 48, 64, 64, 96)
CODE = ("def add(first, second):\n", "import os\n\n\nclass Reader:\n    ", "for index in range(")
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 161)
"""Of prompts that are tokens; others end just before ``max_model_len``."""


class Pool:
    """Makes the distinct requests of a family, always the same ones for a seed."""

    def __init__(self, family: Family, seed: int) -> None:
        self.family = family
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(family.checkpoint)
        config = json.loads((family.checkpoint / "config.json").read_text())
        special = {*family.special, config.get("mask_token_id")}
        self._ordinary = [token for token in range(config["vocab_size"] // 2) if token not in special]
        self._ways = itertools.cycle(_ways(family))
        self._rng = random.Random(f"{family.name}-{seed}")
        self._questions = itertools.cycle(make_problems(1000, seed=seed, split="test"))
        examples = make_problems(6, seed=seed, split="train")
        self._prefixes = ["".join(map(_worked, examples[:number])) for number in (1, 2, 3, 4)]

    def __iter__(self) -> Iterator[Request]:
        while True:
            yield self._request()

    def _request(self) -> Request:
        rng = self._rng
        prompt, chat, shared = self._prompt()
        fields: dict[str, Any] = {"max_tokens": rng.choice(MAX_TOKENS), "temperature": 0.0}
        length = len(prompt) if isinstance(prompt, list) else len(self.tokenizer.encode(prompt)) + 20 * chat
        if rng.random() < 0.05 or length + fields["max_tokens"] > MAX_MODEL_LEN:
            fields["max_tokens"] = MAX_MODEL_LEN
        if rng.random() < 0.5:
            fields |= {"temperature": rng.choice((0.5, 1.0))}
            fields |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}))
            if rng.random() < 0.2:
                fields["n"] = rng.choice((2, 3))
        # Without a temperature too: some policies draw positions.
        fields["seed"] = rng.randrange(1 << 31)
        if rng.random() < 0.12:
            fields["stop"] = rng.choice(STOPS)
        if rng.random() < 0.5:
            fields["ignore_eos"] = True
        if rng.random() < 0.15:
            name = rng.choice(list(EXTRAS))
            if name != "min_tokens" or fields["max_tokens"] > EXTRAS[name]:
                fields[name] = EXTRAS[name]
        fields = {name: value for name, value in fields.items() if name not in self.family.without}
        return Request(prompt, chat, fields, self._options(), shared)

    def _options(self) -> Options:
        way, options = next(self._ways), self._rng.choice(self.family.drafting or ({},))
        return {**options, **way} if way in self.family.verifiers else way

    def _prompt(self) -> tuple[str | list[int], bool, bool]:
        """Prompt, whether it is a chat, and whether others begin alike."""
        rng = self._rng
        kind = rng.choices(("chat", "shared", "code", "tokens", "end"), (35, 30, 10, 20, 5))[0]
        if kind == "code":
            return rng.choice(CODE), False, False
        if kind in ("tokens", "end"):
            length = rng.choice(LENGTHS) if kind == "tokens" else MAX_MODEL_LEN - rng.randrange(1, 40)
            return rng.choices(self._ordinary, k=length), False, False
        question = next(self._questions).question
        if kind == "chat":
            return question, True, False
        return f"{rng.choice(self._prefixes)}Question: {question}\nAnswer:", False, True


def _ways(family: Family) -> list[Options]:
    """All decodings of a family, those with drafts as often as those without."""
    drafting = (*family.verifiers, *family.own)
    times = -(-len(family.plain) // len(drafting)) if drafting else 0
    return [way for pair in itertools.zip_longest(family.plain, drafting * times) for way in pair if way is not None]


def _worked(problem: Problem) -> str:
    return f"Question: {problem.question}\nAnswer: {problem.answer_text}\n\n"


class Manner(StrEnum):
    """How a request is sent."""

    WHOLE = "whole"
    STREAM = "streamed"
    LEAVE = "cancelled"
    """Streamed, and the client goes away in the midst of it."""
    MALFORMED = "malformed"


@dataclass(frozen=True)
class Sending:
    """One request of the stream.

    Attributes:
        index: of the request in the pool; of a malformed one in ``malformed``.
        chunks: after which the client leaves.
    """

    number: int
    manner: Manner
    index: int
    chunks: int = 0


SHARES = {Manner.LEAVE: 0.10, Manner.MALFORMED: 0.05, Manner.STREAM: 0.45}
"""Of the stream; the others are sent whole."""


def stream_of(count: int, num_requests: int, num_malformed: int, seed: int) -> Iterator[Sending]:
    """``count`` requests, always the same ones for a seed."""
    rng = random.Random(seed)
    for number in range(count):
        kind, manner = rng.random(), Manner.WHOLE
        for name, share in SHARES.items():
            if kind < share:
                manner = name
                break
            kind -= share
        among = num_malformed if manner is Manner.MALFORMED else num_requests
        yield Sending(number, manner, rng.randrange(among), rng.randrange(4))


@dataclass(frozen=True)
class Malformed:
    """A request that must be refused."""

    name: str
    path: Literal["/v1/completions", "/v1/chat/completions"]
    content: bytes


def malformed(model: str, *, diffusion: bool) -> Sequence[Malformed]:
    """Requests that are wrong each in a way of its own, whole and streamed.

    Args:
        diffusion: the target is a diffusion model: it has options of ours, and no tokens without a seat in a block.
    """
    completion = {"model": model, "prompt": "Two and three", "max_tokens": 16, "temperature": 0}
    fields: dict[str, dict[str, Any]] = {
        "no prompt": {"prompt": None},
        "temperature of a wrong type": {"temperature": "hot"},
        "negative temperature": {"temperature": -1},
        "top_p above 1": {"top_p": 1.5},
        "no tokens": {"max_tokens": 0},
        "negative n": {"n": -1},
        "token that there is not": {"prompt": [1 << 30]},
        "negative token": {"prompt": [-1]},
        "prompt beyond the context": {"prompt": [20] * 10_000},
        "unknown model": {"model": "none"},
        "too many logprobs": {"logprobs": 1000},
        "seed beyond 64 bits": {"seed": 1 << 70},
    }
    options: dict[str, dict[str, Any]] = {
        "unknown option": {"dllm_polic": "static"},
        "unknown policy": {"dllm_policy": "best"},
        "threshold above 1": {"dllm_threshold": 2},
        "list for a number": {"dllm_tokens_per_step": [1, 2]},
        "two schedules": {"dllm_tokens_per_step": 1, "dllm_denoising_steps": 2},
        "more drafts than there is room for": {"dllm_verify": "psd", "dllm_drafts": 60},
        "option of the engine": {"dllm_draft_graph": "/etc/passwd"},
    }
    if diffusion:
        fields |= {name: {"vllm_xargs": wrong} for name, wrong in options.items()}
    bodies = []
    for name, wrong in fields.items():
        for stream in (False, True):
            content = json.dumps({**completion, **wrong, "stream": stream}).encode()
            bodies.append(Malformed(name, "/v1/completions", content))
    wrong_chats: dict[str, Any] = {
        "no messages": None,
        "a message without a role": [{"content": "Hello"}],
        "text for messages": "Hello",
    }
    for name, messages in wrong_chats.items():
        content = json.dumps({"model": model, "messages": messages, "max_tokens": 4}).encode()
        bodies.append(Malformed(name, "/v1/chat/completions", content))
    bodies.append(Malformed("no JSON", "/v1/completions", b'{"model": "tiny", "prompt": '))
    bodies.append(Malformed("no object", "/v1/chat/completions", b"[1, 2, 3]"))
    return bodies
