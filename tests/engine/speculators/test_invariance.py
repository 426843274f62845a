"""The battery: the same tokens whatever happens around a request.

Sampled texts depend on which tokens were drafted together, so they stay the same only where the rounds do; greedy ones
are the target's own always.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.engine.harness import (
    assert_nothing_left,
    free_pages,
    generate,
    greedy,
    preemptions,
    schedule_asynchronously,
    scheduler_of,
    tokens_of,
)
from tests.engine.speculators.engines import (
    CACHES,
    CONTEXTS,
    EXACT,
    assert_distributions,
    drafted,
    engine,
    plain_engine,
    reference_drafter,
    sampled,
    share_accepted,
    tensor_parallel_engine,
    verified,
    with_known_costs,
)
from tests.engine.speculators.test_distributions import prompt
from vllm_dllm.speculators.scheduler import DrafterAsyncScheduler, DrafterScheduler

REQUESTS = 8
PROMPTS = [prompt(length, seed=1) for length in (3, 40, 8, 33, 70, 1, 64, 17)]
NEIGHBOURS = [prompt(length, seed=2) for length in (50, 5, 90, 31, 2, 66, 9)]

GROWING = {"draft_length": "failfast", "draft_length_start": 2, "draft_length_step": 2, "sub_block_length": 2}

exactly = pytest.mark.parametrize(("context", "cache"), EXACT)
modes = pytest.mark.parametrize(("context", "cache"), [(c, cache) for c in CONTEXTS for cache in CACHES])


def params_of(index: int, **params: Any) -> SamplingParams:
    """Every third request is greedy."""
    return greedy(max_tokens=16, **params) if index % 3 == 0 else sampled(index, 16, **params)


def run(llm: LLM, indices: list[int]) -> list[list[int]]:
    llm.reset_prefix_cache()
    return [tokens_of(o) for o in generate(llm, [PROMPTS[i] for i in indices], [params_of(i) for i in indices])]


@functools.cache
def alone(context: str, cache: str) -> list[list[int]]:
    llm = engine(context, cache, seed=0)
    return [run(llm, [index])[0] for index in range(REQUESTS)]


@functools.cache
def targets_own(max_tokens: int) -> list[list[int]]:
    """Greedy, without a drafter."""
    return [tokens_of(output) for output in generate(plain_engine(), PROMPTS, greedy(max_tokens=max_tokens))]


@modes
def test_alone_and_among_other_neighbours(context: str, cache: str) -> None:
    llm = engine(context, cache, seed=0)
    expected = alone(context, cache)
    assert run(llm, list(range(REQUESTS))) == expected
    assert run(llm, list(range(REQUESTS))[::-1]) == expected[::-1]
    llm.reset_prefix_cache()
    for index in range(0, REQUESTS, 3):
        inputs = [*NEIGHBOURS[:4], PROMPTS[index], *NEIGHBOURS[4:]]
        params = [sampled(90 + place, 5 + 4 * place) for place in range(len(inputs))]
        params[4] = params_of(index)
        assert tokens_of(generate(llm, inputs, params)[4]) == expected[index]


@pytest.mark.parametrize("context", ["causal", "block-causal"])
def test_with_hits_in_the_prefix_cache(context: str) -> None:
    llm = engine(context, seed=0)
    expected = alone(context, "keep")
    run(llm, list(range(REQUESTS)))
    outputs = generate(llm, PROMPTS, [params_of(index) for index in range(REQUESTS)])
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 0, 32, 64, 0, 32, 0]
    assert [tokens_of(output) for output in outputs] == expected


def test_no_prefix_is_shared_where_every_round_computes_the_text_anew() -> None:
    llm = engine("full", "recompute", seed=0)
    first, again = (generate(llm, [PROMPTS[4]], greedy(max_tokens=4)) for _ in range(2))
    assert first[0].num_cached_tokens == again[0].num_cached_tokens == 0


@exactly
def test_with_prompts_computed_in_chunks(context: str, cache: str) -> None:
    budget = {"max_num_batched_tokens": 48} if cache == "keep" else {"long_prefill_token_threshold": 20}
    llm = engine(context, cache, seed=0, max_num_seqs=3, enable_prefix_caching=False, **budget)
    assert run(llm, list(range(REQUESTS))) == alone(context, cache)


@modes
def test_after_preemption(context: str, cache: str) -> None:
    llm = engine(context, cache, seed=0, num_gpu_blocks_override=14)
    before = free_pages(llm)
    llm.reset_prefix_cache()
    with preemptions(llm) as preempted:
        outputs = generate(llm, PROMPTS, greedy(max_tokens=48))
    assert preempted
    assert [tokens_of(output) for output in outputs] == targets_own(48)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.fixture
def asynchronously(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Engines with asynchronous scheduling, which vLLM does without on CPUs."""
    schedule_asynchronously(monkeypatch)
    # The limit on requests only sets these engines apart from those of other tests.
    return functools.partial(engine, seed=0, max_num_seqs=9)


@exactly
def test_with_asynchronous_scheduling(asynchronously: Callable[..., LLM], context: str, cache: str) -> None:
    llm = asynchronously(context, cache)
    assert type(scheduler_of(llm)) is DrafterAsyncScheduler
    before = free_pages(llm)
    assert run(llm, list(range(REQUESTS))) == alone(context, cache)
    assert run(llm, [4])[0] == alone(context, cache)[4]
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("context", CONTEXTS)
def test_with_fewer_drafts_of_requests_whose_last_ones_were_rejected(context: str) -> None:
    llm = engine(context, seed=0, num_drafts=12, speculative={"adaptive": True}, async_scheduling=False)
    scheduler = scheduler_of(llm)
    assert type(scheduler) is DrafterScheduler
    controller = with_known_costs(llm)
    with verified(llm) as rounds:
        outputs = generate(llm, PROMPTS, greedy(max_tokens=48))
    assert [tokens_of(output) for output in outputs] == targets_own(48)
    drafted = [[round_.drafted for round_ in own] for own in rounds.values()]
    assert max(own[0] for own in drafted) == 12
    assert min(min(own) for own in drafted) < 6
    assert not controller._requests


def test_with_fewer_drafts_and_asynchronous_scheduling(asynchronously: Callable[..., LLM]) -> None:
    llm = asynchronously("causal", num_drafts=12, speculative={"adaptive": True})
    scheduler = scheduler_of(llm)
    assert type(scheduler) is DrafterAsyncScheduler
    controller = with_known_costs(llm)
    with verified(llm) as rounds:
        outputs = generate(llm, PROMPTS, greedy(max_tokens=48))
    assert [tokens_of(output) for output in outputs] == targets_own(48)
    assert min(round_.drafted for own in rounds.values() for round_ in own) < 6
    assert not controller._requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "ranks", "speculative"), [("block-causal", 2, GROWING), ("causal", 1, {})], ids=["growing", "fixed"]
)
def test_with_a_tensor_parallel_target(context: str, ranks: int, speculative: dict[str, Any]) -> None:
    """The drafter spread over the target's ranks, or whole on each."""
    expected = run(engine(context, seed=0, speculative=speculative), list(range(REQUESTS)))
    with tensor_parallel_engine(context, draft_tensor_parallel_size=ranks, **speculative) as llm:
        assert run(llm, list(range(REQUESTS))) == expected


@modes
def test_requests_that_end_in_the_middle_of_drafts(context: str, cache: str) -> None:
    llm = engine(context, cache, seed=0)
    before = free_pages(llm)
    for index, tokens in enumerate(targets_own(48)):
        for stop in {tokens[place] for place in (2, 3, 5, 9)}:
            params = greedy(max_tokens=48, stop_token_ids=[stop])
            output = generate(llm, [PROMPTS[index]], params)[0]
            assert tokens_of(output) == tokens[: tokens.index(stop) + 1]
            assert output.outputs[0].finish_reason == "stop"
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@modes
def test_requests_that_reach_the_end_of_the_context(context: str, cache: str) -> None:
    llm = engine(context, cache, seed=0, max_model_len=100, max_num_batched_tokens=256)
    outputs = generate(llm, PROMPTS, greedy(max_tokens=None))
    expected = generate(plain_engine(max_model_len=100), PROMPTS, greedy(max_tokens=None))
    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in expected]
    assert [len(tokens_of(output)) for output in outputs] == [100 - len(prompt) for prompt in PROMPTS]


@modes
def test_texts_beyond_the_drafters_own_context(context: str, cache: str) -> None:
    limit = 50
    # Asynchronous scheduling takes a step to learn how long a text has become, and asks for fewer drafts near its end.
    llm = engine(context, cache, seed=0, speculative={"max_model_len": limit}, async_scheduling=False)
    with drafted(llm) as seen, verified(llm) as rounds:
        outputs = generate(llm, PROMPTS, greedy(max_tokens=48))
    assert [tokens_of(output) for output in outputs] == targets_own(48)
    for output in outputs:
        length = len(output.prompt_token_ids) + 1
        for round_ in rounds.get(output.request_id, ()):
            assert round_.drafted == min(4, limit - length)
            length += round_.accepted + 1
        assert length >= min(limit, len(output.prompt_token_ids) + 48)
    within = [round_ for round_ in seen if len(round_.text) < limit]
    assert len(within) < len(seen)
    if (context, cache) in EXACT:
        assert_distributions(within, reference_drafter(context, 4, seed=0, limit=limit))
    assert share_accepted(rounds) > 0


@modes
def test_aborted_requests_leave_nothing(context: str, cache: str) -> None:
    llm = engine(context, cache, seed=0)
    before = free_pages(llm)
    core = llm.llm_engine
    for steps in range(1, 8, 2):
        for name, index in (("aborted", 4), ("kept", 1), ("aborted too", 5)):
            core.add_request(name, {"prompt_token_ids": PROMPTS[index]}, greedy(max_tokens=48))
        for _ in range(steps):
            core.step()
        core.abort_request(["aborted", "aborted too"])
        finished = []
        while core.has_unfinished_requests():
            finished += [output for output in core.step() if output.finished]
        assert [tokens_of(o) for o in finished if o.request_id == "kept"] == [targets_own(48)[1]]
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logprobs": 3},
        {"bad_words": None, "allowed_token_ids": list(range(0, 48, 2))},
        {"min_tokens": 6, "stop_token_ids": list(range(0, 48, 3))},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_else_a_request_may_ask_for(params: dict[str, Any]) -> None:
    """As without a drafter."""
    mine, expected = (
        generate(llm, PROMPTS, greedy(max_tokens=12, **params)) for llm in (engine("causal", seed=0), plain_engine())
    )
    assert [tokens_of(output) for output in mine] == [tokens_of(output) for output in expected]
    if "logprobs" in params:
        for output, other in zip(mine, expected, strict=True):
            for place, entry in zip(output.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
                assert place.keys() == entry.keys()
                for token in place:
                    assert place[token].logprob == pytest.approx(entry[token].logprob, abs=1e-3)


def test_vllms_metrics_tell_how_drafts_fare() -> None:
    llm = engine("causal", seed=0, max_num_seqs=10)  # the latest engine is the one that they are of
    with verified(llm) as rounds:
        outputs = generate(llm, PROMPTS, greedy(max_tokens=24))
    of_all = [round_ for own in rounds.values() for round_ in own]
    metrics = {m.name.removeprefix("vllm:spec_decode_"): m for m in llm.get_metrics() if "spec_decode" in m.name}
    assert metrics["num_drafts"].value == len(of_all)
    assert metrics["num_draft_tokens"].value == sum(round_.drafted for round_ in of_all) == 4 * len(of_all)
    assert metrics["num_accepted_tokens"].value == sum(round_.accepted for round_ in of_all)
    at_least = [sum(round_.accepted > place for round_ in of_all) for place in range(4)]
    assert metrics["num_accepted_tokens_per_pos"].values == at_least
    # A round gives one token more than it accepts; the last one's may be cut.
    assert len(of_all) + sum(at_least) >= sum(len(tokens_of(output)) - 1 for output in outputs)
