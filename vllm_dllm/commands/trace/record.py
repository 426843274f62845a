"""How one request was denoised, as plain values: all of its forwards, and what follows from them."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vllm_dllm.commands.live import Show, answer_here
from vllm_dllm.methods import BY_KIND
from vllm_dllm.observe.step_events import token_text

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

    from vllm_dllm.observe.recorder import Round

Source = Literal["policy", "draft", "edit", "prefill"]
"""What put a token in its place: the policy, an accepted draft, token editing, or the forward before the first block
(families with shifted logits)."""


@dataclass(frozen=True)
class Branch:
    """A state of the block that a forward saw; fields as of `Round`, which calls the tokens ``branches``."""

    tokens: Sequence[int]
    predicted: Sequence[int]
    confidence: Sequence[float]
    reached: bool


@dataclass(frozen=True)
class Forward:
    """One forward of the request after its prefill; fields without a text as of `Round`."""

    block_start: int
    first: int
    denoised: bool
    branches: Sequence[Branch]
    """The block as it stood, then the drafts."""
    accepted: int
    """Index in ``branches`` of the one whose logits were used."""
    chosen: Sequence[bool]
    tokens: Sequence[int]


@dataclass(frozen=True)
class Trace:
    """All forwards of one request, and what is needed to show them. ``page.html`` reads the fields by their names."""

    model: str
    prompt: str
    settings: Mapping[str, str]
    """Options that the request was decoded with."""
    prompt_length: int
    """Tokens of the prompt, those of the chat template included."""
    output_length: int
    """Tokens that were returned. What was denoised behind them was dropped."""
    mask_token_id: int
    special_token_ids: Sequence[int]
    texts: Mapping[int, str]
    """Text of every token that occurs."""
    forwards: Sequence[Forward]


class Change(NamedTuple):
    """A position that a forward gave a token."""

    position: int
    token: int
    source: Source


class Effect(NamedTuple):
    """What a forward did, and the counts up to and including it."""

    step: int
    """Number of the forward within its block, from 0. Forwards are coloured by it."""
    changes: list[Change]
    """From left to right."""
    tokens: int
    """Positions of the answer that hold a token."""
    drafts: int
    """Drafts that were forwarded."""
    accepted: int
    """Drafts on the accepted path."""


def record(llm: "LLM", prompt: str, params: "SamplingParams", model: str, show: Show | None = None) -> Trace:
    """Decode one prompt and keep every forward of it.

    The prompt is a user's message; where the tokenizer has no chat template, it is text to go on from.

    Args:
        llm: an engine in this process, without other requests.
        model: what to call it.
        show: told of every forward, if anybody wants to know.

    Raises:
        RuntimeError: the engine did not report all forwards.
    """
    from vllm_dllm import request_stats
    from vllm_dllm.observe.recorder import recording

    forwards: list[Forward] = []
    tokenizer = llm.get_tokenizer()
    with recording(llm, lambda round_: forwards.append(read_round(round_, 0))):
        (output,) = answer_here(llm, [prompt], params, show)
    nfe = request_stats(output).nfe
    if len(forwards) < nfe:
        raise RuntimeError(f"the request took {nfe} forwards, but only {len(forwards)} were recorded")
    # With asynchronous scheduling a step may already be on its way when the request turns out to have ended.
    del forwards[nfe:]
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
        special_token_ids=sorted(tokenizer.all_special_ids),
        texts={token: token_text(tokenizer, token) for token in sorted(set(occurring))},
        forwards=forwards,
    )


def read_round(round_: "Round", request: int) -> Forward:
    """What a round says of the request with this index in it."""
    present = round_.present[request].nonzero().flatten().tolist()
    branches = zip(
        round_.branches[request, present].tolist(),
        round_.predicted[request, present].tolist(),
        [[round(value, 4) for value in row] for row in round_.confidence[request, present].tolist()],
        round_.reached[request, present].tolist(),
        strict=True,
    )
    return Forward(
        block_start=int(round_.block_start[request]),
        first=int(round_.first[request]),
        denoised=bool(round_.denoised[request]),
        branches=[Branch(*branch) for branch in branches],
        accepted=present.index(int(round_.accepted[request])),
        chosen=round_.chosen[request].tolist(),
        tokens=round_.tokens[request].tolist(),
    )


def _settings(llm: "LLM", params: "SamplingParams") -> dict[str, str]:
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
    return {name: str(value) for name, value in settings.items()}


def effects(trace: Trace) -> list[Effect]:
    """What each forward did."""
    end = trace.prompt_length + trace.output_length
    known: dict[int, int] = {}
    steps: Counter[int] = Counter()
    drafts = accepted = 0
    result = []
    for forward in trace.forwards:
        changes = list(_changes(forward, known, trace.mask_token_id))
        if forward.denoised:
            drafts += len(forward.branches) - 1
            accepted += sum(branch.reached for branch in forward.branches[1:])
        tokens = sum(position < end for position in known)
        result.append(Effect(steps[forward.block_start], changes, tokens, drafts, accepted))
        steps[forward.block_start] += 1
    return result


def _changes(forward: Forward, known: dict[int, int], mask: int) -> Iterator[Change]:
    """Changes of a forward; ``known`` has the tokens by position, and is brought up to date."""
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
