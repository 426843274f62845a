"""How one request was denoised, as plain values: all of its forwards, and what follows from them.

``record`` decodes a request and makes a ``Trace`` of what ``BlockDiffusionSampler.recorder`` is told.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vllm_dllm.methods import BY_KIND

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

    from vllm_dllm.observe.recorder import Round

Source = Literal["policy", "draft", "edit", "prefill"]
"""What put a token in its place: the policy, an accepted draft, token editing, or the forward before the first block
(families with shifted logits)."""


@dataclass(frozen=True)
class Branch:
    """A state of the block that a forward saw, W positions wide."""

    tokens: tuple[int, ...]
    """[W], with mask tokens."""
    predicted: tuple[int, ...]
    """[W]: token that each position would get."""
    confidence: tuple[float, ...]
    """[W]: its probability."""
    reached: bool
    """On the accepted path."""


@dataclass(frozen=True)
class Forward:
    """One forward of the request after its prefill."""

    block_start: int
    """Absolute position of column 0."""
    first: int
    """First column that is not prompt."""
    denoised: bool
    """False where the forward only wrote a finished block to the K/V cache."""
    branches: tuple[Branch, ...]
    """The block as it stood, then the drafts."""
    accepted: int
    """Index in ``branches`` of the one whose logits were used."""
    chosen: tuple[bool, ...]
    """[W]: positions unmasked from those logits."""
    tokens: tuple[int, ...]
    """[W]: the block afterwards."""


@dataclass(frozen=True)
class Trace:
    """All forwards of one request, and what is needed to show them."""

    model: str
    prompt: str
    settings: tuple[tuple[str, str], ...]
    """Names and values of the options that the request was decoded with."""
    prompt_length: int
    """Tokens of the prompt, those of the chat template included."""
    output_length: int
    """Tokens that were returned. What was denoised behind them was dropped."""
    mask_token_id: int
    special_token_ids: frozenset[int]
    texts: Mapping[int, str]
    """Text of every token that occurs."""
    forwards: tuple[Forward, ...]


class Change(NamedTuple):
    """A position that a forward gave a token."""

    position: int
    token: int
    source: Source


class Totals(NamedTuple):
    """Counts up to and including a forward."""

    tokens: int
    """Positions of the answer that hold a token."""
    drafts: int
    """Drafts that were forwarded."""
    accepted: int
    """Those on the accepted path."""


def record(llm: "LLM", prompt: str, params: "SamplingParams", model: str) -> Trace:
    """Decode one prompt and keep every forward of it.

    The prompt is a user's message; where the tokenizer has no chat template, it is text to go on from.

    Args:
        llm: an engine in this process, without other requests.
        model: what to call it.

    Raises:
        RuntimeError: the engine did not report all forwards.
    """
    from vllm_dllm.observe.recorder import recording

    forwards: list[Forward] = []
    with recording(llm, lambda round_: forwards.append(read_round(round_, 0))):
        if llm.get_tokenizer().chat_template:
            (output,) = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
        else:
            (output,) = llm.generate(prompt, params, use_tqdm=False)
    return _make_trace(llm, prompt, params, model, output, forwards)


def read_round(round_: "Round", request: int) -> Forward:
    """What a round says of the request with this index in it."""
    present = round_.present[request].nonzero().flatten().tolist()
    branches = tuple(
        Branch(
            tokens=tuple(round_.branches[request, branch].tolist()),
            predicted=tuple(round_.predicted[request, branch].tolist()),
            confidence=tuple(round_.confidence[request, branch].tolist()),
            reached=bool(round_.reached[request, branch]),
        )
        for branch in present
    )
    return Forward(
        block_start=int(round_.block_start[request]),
        first=int(round_.first[request]),
        denoised=bool(round_.denoised[request]),
        branches=branches,
        accepted=present.index(int(round_.accepted[request])),
        chosen=tuple(round_.chosen[request].tolist()),
        tokens=tuple(round_.tokens[request].tolist()),
    )


def token_texts(tokenizer: Any, token_ids: Iterable[int]) -> dict[int, str]:
    """Text of each token as it reads behind another one.

    A token that is part of a character only has no text; its name in the vocabulary stands in for it.
    """
    texts = {}
    for token in sorted(set(token_ids)):
        # SentencePiece drops the space before the first token of a text: take the second of two.
        text = tokenizer.decode([token, token])[len(tokenizer.decode([token])) :]
        if not text or "\N{REPLACEMENT CHARACTER}" in text:
            text = tokenizer.convert_ids_to_tokens(token) or f"<{token}>"
        texts[token] = text
    return texts


def _make_trace(
    llm: "LLM",
    prompt: str,
    params: "SamplingParams",
    model: str,
    output: "RequestOutput",
    forwards: list[Forward],
) -> Trace:
    from vllm_dllm import request_stats

    nfe = request_stats(output).nfe
    if len(forwards) < nfe:
        raise RuntimeError(f"the request took {nfe} forwards, but only {len(forwards)} were recorded")
    # With asynchronous scheduling a step may already be on its way when the request turns out to have ended.
    del forwards[nfe:]
    tokenizer = llm.get_tokenizer()
    occurring = itertools.chain.from_iterable(
        itertools.chain(forward.tokens, *((*branch.tokens, *branch.predicted) for branch in forward.branches))
        for forward in forwards
    )
    return Trace(
        model=model,
        prompt=prompt,
        settings=_settings(llm, params),
        prompt_length=len(output.prompt_token_ids or ()),
        output_length=len(output.outputs[0].token_ids),
        mask_token_id=llm.model_config.hf_config.mask_token_id,
        special_token_ids=frozenset(tokenizer.all_special_ids),
        texts=token_texts(tokenizer, occurring),
        forwards=tuple(forwards),
    )


def _settings(llm: "LLM", params: "SamplingParams") -> tuple[tuple[str, str], ...]:
    from vllm_dllm.geometry import geometry_of
    from vllm_dllm.options.resolve import options_of

    geometry = geometry_of(llm.llm_engine.vllm_config)
    options = options_of(params, geometry)
    settings: dict[str, Any] = {"block length": geometry.block_length, "policy": options.policy}
    if "threshold" in BY_KIND[options.kind].options:
        settings["threshold"] = f"{options.threshold:g}"
    settings["verify"] = options.verify
    if options.verify != "none":
        settings["drafts per forward"] = f"at most {options.num_drafts}"
    settings["temperature"] = f"{params.temperature:g}"
    if params.seed is not None:
        settings["seed"] = params.seed
    return tuple((name, str(value)) for name, value in settings.items())


def changes(trace: Trace) -> list[list[Change]]:
    """The positions that each forward gave a token, from left to right."""
    known: dict[int, int] = {}
    return [list(_changes(forward, known, trace.mask_token_id)) for forward in trace.forwards]


def _changes(forward: Forward, known: dict[int, int], mask: int) -> Iterator[Change]:
    for column in range(forward.first, len(forward.tokens)):
        position, token = forward.block_start + column, forward.tokens[column]
        drafted = False
        if forward.denoised:
            before = forward.branches[0].tokens[column]
            if before != mask and position not in known:
                known[position] = before
                yield Change(position, before, "prefill")
            drafted = before == mask and forward.branches[forward.accepted].tokens[column] != mask
        if token not in (mask, known.get(position)):
            edited = position in known
            known[position] = token
            yield Change(position, token, "draft" if drafted else "edit" if edited else "policy")


def totals(trace: Trace) -> list[Totals]:
    """Running counts, one entry per forward."""
    end = trace.prompt_length + trace.output_length
    unmasked: set[int] = set()
    drafts = accepted = 0
    result = []
    for forward, changed in zip(trace.forwards, changes(trace), strict=True):
        unmasked.update(change.position for change in changed if change.position < end)
        if forward.denoised:
            drafts += len(forward.branches) - 1
            accepted += sum(branch.reached for branch in forward.branches[1:])
        result.append(Totals(len(unmasked), drafts, accepted))
    return result


def block_steps(trace: Trace) -> list[int]:
    """Number of each forward within its block, from 0. Forwards are coloured by it."""
    seen: Counter[int] = Counter()
    steps = []
    for forward in trace.forwards:
        steps.append(seen[forward.block_start])
        seen[forward.block_start] += 1
    return steps
