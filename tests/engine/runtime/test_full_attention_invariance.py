"""The battery for models with full attention: the same tokens, forwards and drafts whatever happens around a request.

Two entries of the other batteries are missing, because these models cannot have them: their text is computed anew as a
whole, so there is no prefix caching and no chunked prefill; and where a request is must be known on the host before its
next step, so scheduling is synchronous. ``test_what_these_models_cannot_have_is_off`` holds the engine to that.

The generation window is shorter than most of the texts: it slides, and a request needs more pages as it goes on.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from vllm import LLM, SamplingParams

from tests.engine.full_attention import FAMILIES, bundled
from tests.engine.harness import (
    Forward,
    assert_nothing_left,
    engine,
    free_pages,
    generate,
    greedy,
    nfe_of,
    preemptions,
    read_by_policy,
    recorded,
    runner_of,
    scheduler_of,
    tensor_parallel_engine,
    tokens_of,
)
from vllm_dllm.runtime.scheduling.full import FullAttentionScheduler

CACHES = ("none", "prefix", "dual")
PLACES = [("llada", "none"), ("llada", "prefix"), ("dream", "dual")]
"""Families and caches for what the scheduler does: there the families do not differ, and the caches in rows alone."""
LENGTH, WINDOW, PAGE = 8, 40, 32
MAX_DRAFTS, MAX_NUM_SEQS, MAX_MODEL_LEN = 3, 8, 256
POLICIES: list[dict[str, Any]] = [
    {"dllm_policy": "static"},
    {"dllm_policy": "threshold", "dllm_threshold": 0.5},
    {"dllm_policy": "factor", "dllm_factor": 0.9},
    {"dllm_policy": "maskgit_plus", "dllm_denoising_steps": 5},
    {"dllm_policy": "entropy", "dllm_denoising_steps": 6},
]
SKIPPING: list[dict[str, Any]] = [
    {"dllm_verify": "none"},
    {"dllm_verify": "freedave", "dllm_drafts": 4},
    {"dllm_verify": "psd", "dllm_drafts": 2},
    {"dllm_verify": "spiffy", "dllm_drafts": 3},  # of the graph that ships
    {"dllm_verify": "freedave", "dllm_drafts": 3, "dllm_match": "subset"},
]
EXACT = (0, 1, 3)
"""Those of them that change no token."""
MAX_TOKENS = (20, 33, 48, 9, 64, 40, 27)


class Request(NamedTuple):
    prompt: list[int]
    policy: int
    skipping: int
    max_tokens: int
    timesteps: bool
    """The family's ``entropy`` goes by timesteps."""

    @property
    def params(self) -> SamplingParams:
        args = read_by_policy({**POLICIES[self.policy], **SKIPPING[self.skipping]}, timesteps=self.timesteps)
        return greedy(max_tokens=self.max_tokens, extra_args=args)

    @property
    def key(self) -> str:
        return repr(self)


class Outcome(NamedTuple):
    tokens: list[int]
    nfe: int
    forwards: list[Forward]


@functools.cache
def requests_of(family: str) -> list[Request]:
    """Each policy with three of the verifiers; prompts that end before, on and behind the border of a page."""
    by_length = {len(case.prompt): case.prompt for case in bundled(family).cases}
    lengths = [1, 13, 131, 22, 37, 70, 24]
    prompts = [by_length[length] for length in lengths] + [by_length[70][:32], by_length[70][:31], by_length[131][:65]]
    pairs = [(i % len(POLICIES), (i + i // len(POLICIES)) % len(SKIPPING)) for i in range(15)]
    return [
        Request(prompts[i % len(prompts)], policy, skipping, MAX_TOKENS[i % len(MAX_TOKENS)], family == "dream")
        for i, (policy, skipping) in enumerate(pairs)
    ]


def options_of(cache: str) -> dict[str, Any]:
    return {"block_length": LENGTH, "cache": cache, "generation_window": WINDOW, "max_drafts": MAX_DRAFTS}


def engine_for(family: str, cache: str, **options: Any) -> LLM:
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 8192}
    return engine(bundled(family).checkpoint, dllm=options_of(cache), **{**sizes, **options})


def run(llm: LLM, requests: Sequence[Request]) -> list[Outcome]:
    with recorded(llm) as forwards:
        outputs = generate(llm, [r.prompt for r in requests], [r.params for r in requests])
    return [Outcome(tokens_of(o), nfe_of(o), forwards[o.request_id]) for o in outputs]


_alone: dict[tuple[str, str, str], Outcome] = {}


def alone(family: str, cache: str, requests: Sequence[Request]) -> list[Outcome]:
    """What each request gets when it has an engine to itself."""
    for request in requests:
        if (family, cache, request.key) not in _alone:
            _alone[family, cache, request.key] = run(engine_for(family, cache), [request])[0]
    return [_alone[family, cache, request.key] for request in requests]


@contextmanager
def steps_of(llm: LLM) -> Iterator[list[dict[str, int]]]:
    """Rows of every request in every step meanwhile, those left out that only enter."""
    runner, steps = runner_of(llm), list[dict[str, int]]()
    original = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        decoding = scheduler_output.scheduled_spec_decode_tokens
        rows = scheduler_output.num_scheduled_tokens
        steps.append({req_id: number for req_id, number in rows.items() if req_id in decoding})
        return original(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    try:
        yield steps
    finally:
        del runner.execute_model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_these_models_cannot_have_is_off(family: str) -> None:
    llm = engine_for(family, "dual")
    config = llm.llm_engine.vllm_config
    assert not config.cache_config.enable_prefix_caching
    assert not config.scheduler_config.async_scheduling
    assert type(scheduler_of(llm)) is FullAttentionScheduler
    assert all(o.num_cached_tokens == 0 for _ in range(2) for o in generate(llm, [[*range(64)]], greedy(max_tokens=8)))


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_batches_of_eight(family: str, cache: str) -> None:
    requests = requests_of(family)
    llm = engine_for(family, cache)
    before = free_pages(llm)
    expected = alone(family, cache, requests)
    assert sum(f.accepted > 0 for outcome in expected for f in outcome.forwards), "drafts that are never of use"
    for request, got, theirs in zip(requests, run(llm, requests), expected, strict=True):
        assert got == theirs, request
    for request, got, theirs in zip(requests[::-1], run(llm, requests[::-1]), expected[::-1], strict=True):
        assert got == theirs, request
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_verifiers_that_change_no_token_change_none_and_take_no_more_forwards(family: str, cache: str) -> None:
    requests = [r._replace(skipping=0) for r in requests_of(family) if r.skipping in EXACT]
    skipping = [r for r in requests_of(family) if r.skipping in EXACT]
    llm = engine_for(family, cache)
    fewer = 0
    for request, got, plain in zip(skipping, run(llm, skipping), run(llm, requests), strict=True):
        assert got.tokens == plain.tokens, request
        assert got.nfe <= plain.nfe, request
        fewer += got.nfe < plain.nfe
    assert fewer


@pytest.mark.slow
@pytest.mark.parametrize(("family", "cache"), PLACES)
def test_after_preemption(family: str, cache: str) -> None:
    """A preempted request does its current block again, with forwards of its own."""
    requests = [r._replace(max_tokens=96) for r in requests_of(family)]
    expected = run(engine_for(family, cache), requests)
    scratch = runner_of(engine_for(family, cache)).model_state.layout.scratch
    reserved = scratch.max_drafts * MAX_NUM_SEQS * scratch.pages_per_draft
    # Too few pages for all of them to the end.
    llm = engine_for(family, cache, num_gpu_blocks_override=reserved + 15)
    before = free_pages(llm)
    with preemptions(llm) as preempted:
        outcomes = run(llm, requests)
    assert len(preempted) >= 5
    for request, got, theirs in zip(requests, outcomes, expected, strict=True):
        assert got.tokens == theirs.tokens, request
    assert_nothing_left(llm, before)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "cache"), PLACES)
def test_with_few_rows_in_a_step(family: str, cache: str) -> None:
    """Refreshes wait for a step that has room for all of their rows. Load takes drafts from exact verifiers alone."""
    requests = [r for r in requests_of(family) if len(r.prompt) + r.max_tokens <= 160]
    expected = alone(family, cache, requests)
    # A text, or that and the drafts of a request that must have them.
    budget = 3 * 160 if cache == "none" else 200
    llm = engine_for(family, cache, max_num_batched_tokens=budget)
    scheduler = scheduler_of(llm)
    with steps_of(llm) as steps:
        outcomes = run(llm, requests)
    assert all(sum(step.values()) <= budget for step in steps)
    for request, got, theirs in zip(requests, outcomes, expected, strict=True):
        assert got.tokens == theirs.tokens, request
        if request.skipping not in EXACT:
            assert got == theirs, request
    assert not scheduler._turns.sitting_out
    running = [len(step) for step in steps]
    assert min(running[5 : len(running) // 2]) < MAX_NUM_SEQS, "somebody waits"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "cache"), [("llada", "prefix"), ("dream", "dual")])
def test_with_tensor_parallel_two(family: str, cache: str) -> None:
    requests = requests_of(family)
    expected = alone(family, cache, requests)
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 8192}
    with tensor_parallel_engine(bundled(family).checkpoint, dllm=options_of(cache), **sizes) as llm:
        outputs = generate(llm, [r.prompt for r in requests], [r.params for r in requests])
        for request, output, theirs in zip(requests, outputs, expected, strict=True):
            assert (tokens_of(output), nfe_of(output)) == (theirs.tokens, theirs.nfe), request
