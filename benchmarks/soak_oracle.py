"""What the soak's requests get when each has an engine to itself."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from soak_families import Family
from soak_traffic import Pool, Request

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


def answers(llm: "LLM", requests: Sequence[Request]) -> list[Answer]:
    """The answer of each request. The engine has no other requests, and no K/V page of an earlier request."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    found: dict[int, Answer] = {}
    for is_chat, ask in ((True, llm.chat), (False, llm.generate)):
        which = [index for index, request in enumerate(requests) if request.chat == is_chat]
        prompts: list[Any] = [_prompt(requests[index]) for index in which]
        params = [SamplingParams(**requests[i].fields, extra_args=dict(requests[i].options)) for i in which]
        outputs = ask(prompts, params, use_tqdm=False) if which else []
        for index, output in zip(which, outputs, strict=True):
            found[index] = [
                Choice(choice.text, list(choice.token_ids), choice.finish_reason, choice.stop_reason)
                for choice in output.outputs
            ]
    return [found[index] for index in range(len(requests))]


def _prompt(request: Request) -> Any:
    if request.chat:
        return [{"role": "user", "content": request.prompt}]
    return {"prompt_token_ids": request.prompt} if isinstance(request.prompt, list) else request.prompt


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
) -> tuple[list[Case], int]:
    """The first ``count`` requests whose answers rounding does not decide; and how many were left out.

    Two tokens, or two positions, that are as likely as one another to the last digits come in an order that depends on
    how many rows a matrix has. No engine answers such a request alike in every batch, so one whose answer changes with
    a little noise on the logits, still alone in the engine, is of no use as a test.
    """
    cases: list[Case] = []
    left_out = 0
    while len(cases) < count:
        asked = list(itertools.islice(requests, count - len(cases)))
        expected = [answers(llm, [request])[0] for request in asked]
        steady = [True] * len(asked)
        for shake in range(shakes):
            with noise(llm, seed=shake):
                shaken = answers(llm, asked)
            for index, request in enumerate(asked):
                # Together they are shaken in a fraction of the time; what another batch makes of one proves nothing.
                if shaken[index] != expected[index]:
                    with noise(llm, seed=shake):
                        steady[index] &= answers(llm, [request]) == [expected[index]]
        cases += [Case(asked[index], expected[index]) for index, is_steady in enumerate(steady) if is_steady]
        left_out += steady.count(False)
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
