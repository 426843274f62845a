"""What the soak's requests get when each has an engine to itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from soak_traffic import Family, Pool, Request

if TYPE_CHECKING:
    from vllm import LLM

NOISE = 1e-4
"""Standard deviation of what is added to logits, some ten times what float32 makes of them in another batch."""
SHAKES = 2


class Choice(NamedTuple):
    """An answer, or one of several."""

    text: str
    tokens: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


Answer = list[Choice]
"""The choices of a request."""


def answer(llm: "LLM", request: Request) -> Answer:
    """Of a request that is alone in an engine without a memory of others."""
    from vllm import SamplingParams

    params = SamplingParams(**request.fields, extra_args=dict(request.options))
    llm.reset_prefix_cache()
    prompt: Any = request.prompt
    if request.chat:
        outputs = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
    else:
        outputs = llm.generate(
            {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt, params, use_tqdm=False
        )
    return [
        Choice(choice.text, list(choice.token_ids), choice.finish_reason, choice.stop_reason)
        for choice in outputs[0].outputs
    ]


@contextmanager
def noise(llm: "LLM", seed: int, scale: float = NOISE) -> Iterator[None]:
    """Add normal noise to all logits of an engine in this process."""
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    generator = torch.Generator().manual_seed(seed)
    compute_logits = model.compute_logits

    def noisy(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits = compute_logits(*args, **kwargs)
        return logits + scale * torch.randn(logits.shape, generator=generator).to(logits)

    model.compute_logits = noisy
    try:
        yield
    finally:
        del model.compute_logits


class Case(NamedTuple):
    """A request and what it must be answered with."""

    request: Request
    expected: Answer


def cases_of(
    llm: "LLM",
    requests: Iterator[Request],
    count: int,
    *,
    shakes: int = SHAKES,
    tick: Callable[[], None] = lambda: None,
) -> tuple[list[Case], int]:
    """The first ``count`` requests whose answers rounding does not decide; and how many were left out.

    Two tokens, or two positions, that are as likely as one another to the last digits come in an order that depends on
    how many rows a matrix has. No engine answers such a request alike in every batch, so one whose answer changes with
    a little noise on the logits, still alone in the engine, is of no use as a test.
    """
    cases: list[Case] = []
    left_out = 0
    while len(cases) < count:
        request = next(requests)
        expected = answer(llm, request)
        shaken = []
        for shake in range(shakes):
            with noise(llm, seed=shake):
                shaken.append(answer(llm, request))
        if any(other != expected for other in shaken):
            left_out += 1
            continue
        cases.append(Case(request, expected))
        tick()
    return cases, left_out


def make_cases(family: Family, count: int, seed: int) -> tuple[list[Case], int]:
    """The same with an engine of the family's own, in this process. For a process of its own."""
    from vllm import LLM

    # One request at a time needs no other's pages.
    llm = LLM(str(family.checkpoint), enforce_eager=True, use_tqdm_on_load=False, **family.engine)
    return cases_of(llm, iter(Pool(family, seed)), count)


def matches(got: Sequence[Choice], expected: Sequence[Choice], *, whole: bool) -> bool:
    """Whether an answer is the expected one; if not ``whole``, whether what came of it is how that begins."""
    if whole:
        return list(got) == list(expected)
    return len(got) <= len(expected) and all(
        theirs.text.startswith(ours.text) and theirs.tokens[: len(ours.tokens)] == ours.tokens
        for ours, theirs in zip(got, expected, strict=False)
    )
