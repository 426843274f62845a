"""The same tokens where there is too little of everything: pages, rows in a step, places, context.

``test_invariance`` and its likes have a page too few here and a step too short there. Here several run short at once,
so often that what rarely happens does.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.harness import (
    COMMITS,
    MASK,
    assert_nothing_left,
    bundled,
    drafting_engine,
    free_pages,
    generate,
    greedy,
    place_commits,
    preemptions,
    reference_model,
    request_options,
    scheduler_of,
    skipping_options,
    tokens_of,
)
from tests.paths import BENCHMARKS
from tests.reference.decode import Options, StepSkipping, decode
from tests.reference.drafts import PSD, FreeDave, Spiffy

sys.path.insert(0, str(BENCHMARKS))

from soak_oracle import noise

FAMILY, LENGTH, PAGE = "sdar", 8, 32
MAX_DRAFTS, MAX_NUM_SEQS, MAX_MODEL_LEN = 7, 8, 256
SCRATCH_PAGES = MAX_DRAFTS * MAX_NUM_SEQS
LONGEST = MAX_MODEL_LEN // PAGE
"""Pages of the longest text."""
LEAST_ROWS = (1 + MAX_DRAFTS) * LENGTH + 1
"""Fewest that a step may have room for: those of one request with its drafts, and vLLM's one more."""

POLICIES: list[Options] = [
    Options(block_length=LENGTH, mask_id=MASK, policy="static"),
    Options(block_length=LENGTH, mask_id=MASK, policy="threshold", threshold=0.5),
    Options(block_length=LENGTH, mask_id=MASK, policy="sequential", tokens_per_step=2),
    Options(block_length=LENGTH, mask_id=MASK, policy="entropy", entropy_bound=1.0),
    Options(block_length=LENGTH, mask_id=MASK, policy="localleap"),
]
SKIPPING: list[StepSkipping | None] = [None, FreeDave(8), Spiffy([], 3), PSD(3), FreeDave(5, "subset")]
EXACT = (0, 1, 2)
"""Those of them that change no token."""
FEF: dict[str, Any] = {"dllm_verify": "fef", "dllm_window": 6}


class Request(NamedTuple):
    """A prompt with all that its tokens depend on.

    Attributes:
        skipping: of ``SKIPPING``; None: ``FEF``, without a policy.
        sampling: fields that say how tokens are drawn.
    """

    prompt: list[int]
    max_tokens: int | None
    policy: int
    skipping: int | None
    sampling: dict[str, Any]

    @property
    def params(self) -> SamplingParams:
        args = FEF
        if self.skipping is not None:
            args = {**request_options(POLICIES[self.policy]), **skipping_options(SKIPPING[self.skipping])}
        return greedy(max_tokens=self.max_tokens, extra_args=args, **self.sampling)


def requests_of(count: int) -> list[Request]:
    """All verifiers in turn, every third request drawn; prompts and answers of many lengths."""
    prompts = [case.prompt for case in bundled(FAMILY).cases]
    longest = max(prompts, key=len)
    requests = []
    for i in range(count):
        # From a few tokens to several pages, on and beside the borders of blocks and pages.
        length = (3, 31, 32, 33, 64, 70, 13, 100)[i % 8] + i // 8
        prompt = [(token + i) % 500 + 1 for token in (longest * 4)[:length]]
        sampling = {"temperature": 0.7, "seed": i} if i % 3 == 2 else {}
        skipping = (*range(len(SKIPPING)), None)[i % (1 + len(SKIPPING))]
        requests.append(
            Request(prompt, min(90 + 37 * i % 140, MAX_MODEL_LEN - length), i % len(POLICIES), skipping, sampling)
        )
    return requests


def engine(**options: Any) -> LLM:
    return drafting_engine(
        FAMILY,
        POLICIES[0],
        **{"max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN, "block_size": PAGE, **options},
    )


def run(llm: LLM, requests: Sequence[Request]) -> list[list[int]]:
    outputs = generate(llm, [request.prompt for request in requests], [request.params for request in requests])
    return [tokens_of(output) for output in outputs]


DISTINCT, TIMES = 24, 2


class Expected(NamedTuple):
    request: Request
    tokens: list[int]


@functools.cache
def roomy() -> list[Expected]:
    """Requests with the tokens that each gets from an engine with room for all, alone.

    Without those whose tokens rounding decides, as noise on the logits shows.
    """
    llm, requests = engine(), requests_of(DISTINCT)
    alone = [run(llm, [request])[0] for request in requests]
    with noise(llm, seed=0):
        shaken = run(llm, requests)
    kept = [
        Expected(request, ours) for request, ours, other in zip(requests, alone, shaken, strict=True) if ours == other
    ]
    assert len(kept) >= DISTINCT - 3
    return kept * TIMES


def assert_as_expected(llm: LLM, expected: Sequence[Expected]) -> None:
    outcomes = run(llm, [each.request for each in expected])
    assert [each.request for each, tokens in zip(expected, outcomes, strict=True) if tokens != each.tokens] == []


def test_the_roomy_engine_gives_the_references_tokens() -> None:
    """What the others are compared with."""
    compared = 0
    for request, tokens in roomy()[: DISTINCT // 2]:
        if request.sampling or request.skipping not in EXACT:
            continue
        assert request.max_tokens is not None
        expected = decode(reference_model(FAMILY), request.prompt, request.max_tokens, POLICIES[request.policy])
        assert tokens == expected.tokens, request
        compared += 1
    assert compared >= 3


@pytest.fixture(params=[False, True], ids=["", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of an engine that schedules as on a GPU, or as on a CPU."""
    return {"async_scheduling": request.param}


@contextmanager
def most_running(llm: LLM) -> Iterator[list[int]]:
    """Requests that run in each step meanwhile."""
    scheduler = scheduler_of(llm)
    schedule, running = scheduler.schedule, list[int]()

    def note(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        running.append(len(scheduler.running))
        return output

    scheduler.schedule = note
    try:
        yield running
    finally:
        del scheduler.schedule


@pytest.mark.slow
def test_where_every_request_is_preempted_again_and_again(asynchronous: dict[str, Any]) -> None:
    """Hardly more pages than one text needs, hardly more rows in a step than one request has, no place left."""
    expected = roomy()
    budget = LEAST_ROWS + LENGTH
    assert any(len(each.request.prompt) > budget for each in expected)
    llm = engine(num_gpu_blocks_override=SCRATCH_PAGES + LONGEST + 3, max_num_batched_tokens=budget, **asynchronous)
    llm.reset_prefix_cache()
    before = free_pages(llm)
    with preemptions(llm) as preempted, most_running(llm) as running:
        assert_as_expected(llm, expected)
    assert len(preempted) >= 200
    assert len(set(preempted)) > len(expected) // 2
    assert max(running) > 3
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.slow
def test_where_all_places_are_taken_and_each_step_is_shorter_than_a_prompt() -> None:
    llm = engine(max_num_batched_tokens=LEAST_ROWS, enable_prefix_caching=False)
    before = free_pages(llm)
    with most_running(llm) as running:
        assert_as_expected(llm, roomy()[::-1])
    assert running.count(MAX_NUM_SEQS) > 10
    assert_nothing_left(llm, before)


def test_answers_of_one_request_do_not_displace_each_other_for_ever() -> None:
    """They came at the same time and have the same priority, so neither goes before the other by vLLM's rule."""
    llm = engine(num_gpu_blocks_override=SCRATCH_PAGES + LONGEST + 2, scheduling_policy="priority")
    core, before = llm.llm_engine, free_pages(llm)
    prompts = [request.prompt for request in requests_of(3)]
    params = [
        greedy(POLICIES[0], max_tokens=150, temperature=0.7, seed=seed, n=3, output_kind=RequestOutputKind.FINAL_ONLY)
        for seed in range(len(prompts))
    ]
    for name, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
        core.add_request(str(name), {"prompt_token_ids": prompt}, asked, priority=1)
    finished: dict[str, list[list[int]]] = {}
    with preemptions(llm) as preempted:
        # As many steps as if each answer had the engine to itself and began anew once per block.
        for _ in range(sum(asked.n * 150 * 2 for asked in params)):
            for output in core.step():
                if output.finished:
                    finished[output.request_id.split("-")[0]] = [list(choice.token_ids) for choice in output.outputs]
            if not core.has_unfinished_requests():
                break
        else:
            core.abort_request([str(name) for name in range(len(prompts))])
            raise AssertionError("they go on for ever")
    assert preempted
    for name, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
        (alone,) = generate(engine(), [prompt], asked)
        assert finished[str(name)] == [list(choice.token_ids) for choice in alone.outputs]
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


# The end of the context.

SHORT = 72
"""Block borders are here and 8 further on; the limits lie between them."""


def at_the_limit(limit: int) -> list[Request]:
    """Requests that go on until the context ends, with prompts that end at every place of a block, the last one too."""
    requests = []
    source = max((case.prompt for case in bundled(FAMILY).cases), key=len) * 2
    ways = (*range(len(SKIPPING)), None)
    for offset in range(LENGTH):
        for place, length in enumerate((limit - 2 * LENGTH - offset, limit - 1 - offset)):
            skipping = ways[(offset + place) % len(ways)]
            prompt = source[offset : offset + length]
            sampling = {"temperature": 0.8, "seed": offset} if (offset + place) % 3 == 2 else {}
            requests.append(Request(prompt, None, (offset + place) % len(POLICIES), skipping, sampling))
    return requests


@pytest.mark.parametrize("phase", range(LENGTH))
def test_the_context_may_end_at_any_place_of_a_block(phase: int) -> None:
    """The tokens are those of an engine whose context goes on, up to the limit."""
    limit = SHORT + phase
    requests = at_the_limit(limit)
    assert {len(request.prompt) % LENGTH for request in requests} == set(range(LENGTH))
    llm = engine(max_model_len=limit)
    before = free_pages(llm)
    ends = [request._replace(max_tokens=limit - len(request.prompt)) for request in requests]
    expected = run(engine(), ends)
    with noise(engine(), seed=0):
        stable = [ours == theirs for ours, theirs in zip(run(engine(), ends), expected, strict=True)]
    assert sum(stable) >= len(requests) - 2
    for request, got, tokens, is_stable in zip(ends, run(llm, requests), expected, stable, strict=True):
        assert len(got) == request.max_tokens
        if not is_stable:
            continue
        assert got == tokens, request
        if not request.sampling and request.skipping in EXACT:
            policy = POLICIES[request.policy]
            assert got == decode(reference_model(FAMILY), request.prompt, len(got), policy).tokens, request
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("commits", [None, *COMMITS])
@pytest.mark.parametrize("phase", [1, 6])
def test_what_is_known_of_a_block_is_looked_up_where_it_ends_beyond_the_context(
    phase: int, commits: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad words and penalties, up to the end of the context and of the block, with asynchronous scheduling too."""
    limit = SHORT + phase
    request = at_the_limit(limit)[0]
    most = limit - len(request.prompt)

    def asked(max_tokens: int | None) -> SamplingParams:
        params = greedy(POLICIES[0], max_tokens=max_tokens, presence_penalty=0.5, repetition_penalty=1.2)
        params._bad_words_token_ids = [[77], [5, 6], [40, 41, 42]]
        return params

    (expected,) = generate(engine(), [request.prompt], asked(most))
    own: dict[str, Any] = {"max_model_len": limit}
    if commits is not None:
        # A step of the block after the last one has been scheduled when the last block ends.
        place_commits(monkeypatch, commits)
        own |= {"async_scheduling": True, "max_num_batched_tokens": 512}
    (got,) = generate(engine(**own), [request.prompt], asked(None))
    assert tokens_of(got) == tokens_of(expected)
    assert len(tokens_of(got)) == most


@pytest.mark.parametrize("phase", [1, 6])
def test_the_context_may_end_where_drafts_reach_into_later_blocks(phase: int) -> None:
    limit = SHORT + phase
    requests = [r for r in at_the_limit(limit) if r.skipping in EXACT and "temperature" not in r.sampling]
    assert len(requests) > 4
    llm = engine(max_model_len=limit, dllm={"eager": True, "max_drafts": MAX_DRAFTS})
    for request, tokens in zip(requests, run(llm, requests), strict=True):
        most = limit - len(request.prompt)
        assert tokens == decode(reference_model(FAMILY), request.prompt, most, POLICIES[request.policy]).tokens, request
