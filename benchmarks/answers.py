"""Answers of an engine to a workload: their tokens, and their costs in forwards and rows, which no machine changes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from workload import Workload

from vllm_dllm.commands.problems import grade
from vllm_dllm.observe.stats import RequestStats, request_stats

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Answers:
    """What one way of decoding made of all requests of a workload.

    Attributes:
        tokens: of each request.
        stats: of each request.
    """

    tokens: list[list[int]]
    stats: list[RequestStats]

    @cached_property
    def forwards(self) -> int:
        """After the prefill, of all requests."""
        return sum(stats.nfe for stats in self.stats)

    @cached_property
    def drafted(self) -> int:
        """Branches beside the blocks themselves, of all requests."""
        return sum(stats.drafted for stats in self.stats)

    @cached_property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_forward(self) -> float:
        return self.num_tokens / self.forwards

    def equal(self, other: "Answers") -> int:
        """Requests with all tokens of the other's."""
        return sum(map(list.__eq__, self.tokens, other.tokens))


def first(workload: Workload, count: int) -> Workload:
    """The first requests alone."""
    answers = None if workload.answers is None else workload.answers[:count]
    return replace(workload, requests=workload.requests[:count], answers=answers)


def answer(
    llm: "LLM",
    workload: Workload,
    extra_args: dict[str, Any],
    *,
    temperature: float = 0.0,
    seed: int | None = None,
) -> Answers:
    """All requests of a workload in one way, as many at a time as the engine has room for.

    Args:
        seed: of the first request. The seed of each further one is one more, so that no two requests draw alike.
    """
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = [
        SamplingParams(
            temperature=temperature,
            seed=None if seed is None else seed + index,
            max_tokens=request.max_tokens,
            stop_token_ids=workload.stop_token_ids,
            ignore_eos=not workload.stop_token_ids,
            extra_args=extra_args,
            detokenize=False,
        )
        for index, request in enumerate(workload.requests)
    ]
    prompts: Sequence[Any] = [{"prompt_token_ids": request.prompt} for request in workload.requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return Answers(
        [list(output.outputs[0].token_ids) for output in outputs],
        [request_stats(output) for output in outputs],
    )


def of_length(workload: Workload, max_tokens: int) -> Workload:
    """The same requests with as many tokens each, for models whose blocks begin where the prompt ends."""
    return replace(workload, requests=[replace(request, max_tokens=max_tokens) for request in workload.requests])


def right_answers(workload: Workload, answers: Answers) -> list[bool]:
    """Of each request, whether its answer is right."""
    assert workload.tokenizer is not None
    assert workload.answers is not None
    texts = workload.tokenizer.batch_decode(answers.tokens, skip_special_tokens=True)
    return [grade(text, answer) for text, answer in zip(texts, workload.answers, strict=True)]


def interval(mean: float, deviation: float, count: int) -> tuple[float, float]:
    """95 % interval of a mean of ``count`` values with this standard deviation."""
    reach = 1.96 * deviation / count**0.5
    return mean - reach, mean + reach
