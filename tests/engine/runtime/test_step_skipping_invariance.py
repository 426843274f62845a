"""The battery with drafts: the same tokens, and the same drafts, whatever happens around a request.

Requests of all verifiers and policies share the batches. Golden cases serve, as all of them are known to be stable
under small numerical noise.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from vllm import LLM, SamplingParams

from tests.engine.harness import (
    Forward,
    assert_nothing_left,
    configuration_of,
    drafting_engine,
    free_pages,
    generate,
    golden,
    greedy,
    nfe_of,
    preemptions,
    recorded,
    scheduler_of,
    tensor_parallel_engine,
    tokens_of,
)
from tests.reference.decode import StepSkipping
from tests.reference.drafts import PSD, FreeDave, Spiffy
from tests.reference.golden import Case
from vllm_dllm.runtime.scheduling import DllmAsyncScheduler

FAMILIES = {
    "sdar": configuration_of("sdar", (8, None)),
    "llada2_moe": configuration_of("llada2_moe", (16, None)),
    "fast_dllm_v2": configuration_of("fast_dllm_v2", (8, 4)),
}
"""Engine configuration of each family: block length, sub-block length."""

SKIPPING: list[StepSkipping | None] = [
    None,
    FreeDave(8),
    Spiffy([], 3),  # of the graph that ships
    PSD(3),
    FreeDave(5, "subset"),
]
EXACT = FreeDave(8), Spiffy([], 3), None
MAX_DRAFTS, MAX_NUM_SEQS = 7, 8
SCRATCH_PAGES = MAX_DRAFTS * MAX_NUM_SEQS


class Request(NamedTuple):
    case: Case
    skipping: StepSkipping | None

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.skipping}"

    @property
    def params(self) -> SamplingParams:
        return greedy(self.case.options, self.skipping, max_tokens=self.case.max_new_tokens)


class Outcome(NamedTuple):
    tokens: list[int]
    nfe: int
    forwards: list[Forward]


@functools.cache
def requests_of(family: str, *, at_least: int = 0) -> list[Request]:
    """Cases of as many kinds of options and prompt lengths as there are, with the verifiers in turn."""
    kinds: dict[tuple[object, ...], Case] = {}
    for case in golden(family).cases:
        fixed = case.options.block_length, case.options.sub_block_length
        if fixed == FAMILIES[family] and len(case.prompt) >= at_least:
            kinds.setdefault((case.options, len(case.prompt)), case)
    cases = list(kinds.values())
    count = 15
    chosen = [cases[i * len(cases) // count] for i in range(count)]
    return [Request(case, SKIPPING[i % len(SKIPPING)]) for i, case in enumerate(chosen)]


def engine_for(family: str, **options: Any) -> LLM:
    return drafting_engine(golden(family), requests_of(family)[0].case.options, **options)


def run(llm: LLM, requests: Sequence[Request]) -> list[Outcome]:
    with recorded(llm) as forwards:
        outputs = generate(llm, [r.case.prompt for r in requests], [r.params for r in requests])
    return [Outcome(tokens_of(o), nfe_of(o), forwards[o.request_id]) for o in outputs]


_alone: dict[str, Outcome] = {}


def alone(family: str, requests: Sequence[Request]) -> list[Outcome]:
    """What each request gets when it has an engine to itself."""
    for request in requests:
        if request.name not in _alone:
            _alone[request.name] = run(engine_for(family), [request])[0]
    return [_alone[request.name] for request in requests]


def assert_as_alone(llm: LLM, family: str, requests: Sequence[Request]) -> None:
    for request, got, expected in zip(requests, run(llm, requests), alone(family, requests), strict=True):
        assert got == expected, request.name


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_verifiers_give_the_golden_tokens_and_no_verifier_takes_more_forwards(family: str) -> None:
    requests = requests_of(family)
    accepted = 0
    for request, outcome in zip(requests, alone(family, requests), strict=True):
        if request.skipping in EXACT:
            assert outcome.tokens == request.case.tokens, request.name
            assert outcome.nfe <= request.case.nfe, request.name
        accepted += sum(forward.accepted > 0 for forward in outcome.forwards)
    assert accepted


@pytest.mark.parametrize("family", FAMILIES)
def test_in_batches_of_eight(family: str) -> None:
    requests = requests_of(family)
    llm = engine_for(family)
    before = free_pages(llm)
    assert_as_alone(llm, family, requests)
    assert_as_alone(llm, family, requests[::-1])
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_hits_in_the_prefix_cache(family: str) -> None:
    requests = requests_of(family, at_least=33)
    llm = engine_for(family)
    llm.reset_prefix_cache()
    assert_as_alone(llm, family, requests)
    again = generate(llm, [r.case.prompt for r in requests], [r.params for r in requests])
    assert all(output.num_cached_tokens > 0 for output in again)
    assert_as_alone(llm, family, requests)


def assert_as_alone_after_preemption(llm: LLM, family: str) -> None:
    """A preempted request does its current block again, with forwards of its own."""
    requests = [r for r in requests_of(family) if len(r.case.prompt) + r.case.max_new_tokens <= 256] * 2
    expected = alone(family, requests)
    before = free_pages(llm)
    with preemptions(llm) as preempted:
        outcomes = run(llm, requests)
    assert preempted
    for request, got, theirs in zip(requests, outcomes, expected, strict=True):
        assert got.tokens == theirs.tokens, request.name
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_preemption(family: str) -> None:
    # Too few pages for all of them to the end.
    assert_as_alone_after_preemption(
        engine_for(family, num_gpu_blocks_override=SCRATCH_PAGES + 12, max_model_len=256), family
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_with_chunked_prefill_and_drafts_that_must_share_the_rows_of_a_step(family: str) -> None:
    """Load takes drafts from exact verifiers, whose tokens stay, and from no others."""
    requests = requests_of(family, at_least=33)
    # The long prompts do not fit in a step, nor do the drafts of eight requests.
    budget = (1 + MAX_DRAFTS) * FAMILIES[family][0] + 16
    llm = engine_for(family, max_num_batched_tokens=budget, enable_prefix_caching=False)
    assert any(len(r.case.prompt) > budget for r in requests)
    lowered = False
    for request, got, expected in zip(requests, run(llm, requests), alone(family, requests), strict=True):
        assert got.tokens == expected.tokens, request.name
        if request.skipping in EXACT:
            assert got.nfe <= request.case.nfe, request.name
            lowered |= got.forwards != expected.forwards
        else:
            assert (got.nfe, got.forwards) == (expected.nfe, expected.forwards), request.name
    assert lowered


def async_engine(family: str, **options: Any) -> LLM:
    llm = engine_for(family, async_scheduling=True, **options)
    assert isinstance(scheduler_of(llm), DllmAsyncScheduler)
    return llm


@pytest.mark.parametrize("family", FAMILIES)
def test_with_asynchronous_scheduling(family: str) -> None:
    requests = requests_of(family)
    llm = async_engine(family)
    before = free_pages(llm)
    for request, got, expected in zip(requests, run(llm, requests), alone(family, requests), strict=True):
        assert (got.tokens, got.nfe) == (expected.tokens, expected.nfe), request.name
        # Steps that were in flight when the request ended come behind.
        assert got.forwards[: len(expected.forwards)] == expected.forwards, request.name
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_asynchronous_scheduling_after_preemption(family: str) -> None:
    assert_as_alone_after_preemption(
        async_engine(family, num_gpu_blocks_override=SCRATCH_PAGES + 12, max_model_len=256), family
    )


@pytest.mark.slow
def test_with_tensor_parallel_two() -> None:
    """With drafts and without."""
    family = "sdar"
    requests = requests_of(family)
    expected = alone(family, requests)
    length, sub_block = FAMILIES[family]
    dllm = {"block_length": length, "max_drafts": MAX_DRAFTS} | ({"sub_block_length": sub_block} if sub_block else {})
    mask = {"mask_token_id": golden(family).mask_id}
    with tensor_parallel_engine(
        golden(family).checkpoint, dllm=dllm, max_num_seqs=MAX_NUM_SEQS, hf_overrides=mask
    ) as llm:
        outputs = generate(llm, [r.case.prompt for r in requests], [r.params for r in requests])
        for request, output, theirs in zip(requests, outputs, expected, strict=True):
            assert (tokens_of(output), nfe_of(output)) == (theirs.tokens, theirs.nfe), request.name
