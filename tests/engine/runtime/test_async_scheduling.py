"""Asynchronous scheduling: a step is scheduled before the outcome of the one before it is known.

vLLM does without it on CPUs. Switched on here against its will, it schedules exactly as on a GPU; only the work itself
does not overlap.
"""

import collections
from dataclasses import replace
from typing import Any

import pytest
from vllm import LLM
from vllm.v1.core.sched.output import SchedulerOutput

from tests.engine.harness import (
    COMMITS,
    assert_nothing_left,
    case_params,
    engine_of,
    free_pages,
    generate,
    golden,
    greedy,
    place_commits,
    preemptions,
    scheduler_of,
    tokens_of,
)
from tests.engine.runtime.test_invariance import FAMILIES, cases_of
from vllm_dllm import request_stats
from vllm_dllm.decoding.step_cost import StepCost
from vllm_dllm.runtime.scheduling import DllmAsyncScheduler


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=COMMITS)
def commits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    place_commits(monkeypatch, request.param)
    return request.param


def asynchronous(family: str, **options: object) -> LLM:
    llm = engine_of(golden(family), cases_of(family, 1)[0].options, async_scheduling=True, **options)
    assert isinstance(scheduler_of(llm), DllmAsyncScheduler)
    return llm


def test_golden_cases_give_their_tokens_with_as_many_forwards(family: str, commits: str) -> None:
    cases = [
        c for c in golden(family).cases if (c.options.block_length, c.options.sub_block_length) == FAMILIES[family]
    ]
    llm = asynchronous(family, max_num_seqs=6)
    before = free_pages(llm)
    outputs = generate(llm, [c.prompt for c in cases], [case_params(c) for c in cases])
    assert [c.name for c, o in zip(cases, outputs, strict=True) if tokens_of(o) != c.tokens] == []
    costs = [request_stats(output) for output in outputs]
    shifted = family == "fast_dllm_v2"
    for case, cost in zip(cases, costs, strict=True):
        if shifted or commits == "beside":
            assert cost.nfe == case.nfe, case.name
        else:
            assert cost.denoising_steps == case.nfe, case.name
    # Every block but the last one of a request is committed.
    commits_of = [cost.nfe - cost.denoising_steps for cost in costs]
    if shifted:
        assert sum(commits_of) > 0
    elif commits == "beside":
        assert sum(commits_of) == 0
    elif commits == "apart":
        blocks = [
            -(-(len(case.prompt) + len(case.tokens)) // case.options.block_length)
            - len(case.prompt) // case.options.block_length
            for case in cases
        ]
        assert commits_of == [number - 1 for number in blocks]
    else:
        assert sum(commits_of) > 0
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("commits", ["in turn"], indirect=True)
@pytest.mark.usefixtures("commits")
def test_preempted_requests_go_on_where_they_were(family: str) -> None:
    cases = [c for c in cases_of(family, 8) if len(c.prompt) + c.max_new_tokens <= 256] * 3
    llm = asynchronous(family, block_size=32, num_gpu_blocks_override=12, max_model_len=256)
    before = free_pages(llm)
    with preemptions(llm) as preempted:
        outputs = generate(llm, [c.prompt for c in cases], [case_params(c) for c in cases])
    assert preempted
    for case, output in zip(cases, outputs, strict=True):
        assert tokens_of(output) == case.tokens, case.name
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_a_large_batch_commits_apart_and_a_small_one_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    options = cases_of("sdar", 1)[0].options
    length = options.block_length
    llm = asynchronous("sdar", max_num_seqs=6)
    scheduler, rows = scheduler_of(llm), collections.defaultdict[int, set[int]](set)
    assert isinstance(scheduler, DllmAsyncScheduler)
    # Rows are free up to those of three requests with two blocks each.
    knee = 6 * length
    scheduler.learn_costs(StepCost([(length << i, False, max(1.0, (length << i) / knee)) for i in range(6)]))
    update = scheduler.update_from_output

    def noting(output: SchedulerOutput, *args: Any) -> Any:
        # A step may have been in flight when the requests of another test ended.
        if not output.scheduled_new_reqs and output.num_scheduled_tokens.keys() <= scheduler.requests.keys():
            rows[len(output.num_scheduled_tokens)].update(output.num_scheduled_tokens.values())
        return update(output, *args)

    monkeypatch.setattr(scheduler, "update_from_output", noting)
    # They end one after the other.
    params = [greedy(options, max_tokens=12 * (index + 1)) for index in range(6)]
    for each in params:
        each.ignore_eos = True
        each.extra_args |= {"dllm_policy": "static", "dllm_denoising_steps": length}
    generate(llm, [[5, 6, 7, 8]] * 6, params)
    assert rows[1] == rows[2] == rows[3] == {2 * length}
    assert rows[5] == rows[6] == {length}
    # One position per step.
    assert scheduler.commit_rows.steps_per_block == pytest.approx(length, rel=0.1)


def test_prompts_that_wait_for_pages_take_no_rows_from_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    options = cases_of("sdar", 1)[0].options
    pages: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 12, "max_model_len": 256}
    llm = asynchronous("sdar", max_num_seqs=32, max_num_batched_tokens=512, **pages)
    scheduler, rows = scheduler_of(llm), set()
    place_commits(monkeypatch, "beside")
    schedule = scheduler.schedule

    def noting(*args: Any) -> SchedulerOutput:
        output = schedule(*args)
        if sum(request.num_tokens for request in scheduler.waiting) > 512:
            rows.update(map(len, output.scheduled_spec_decode_tokens.values()))
        return output

    monkeypatch.setattr(scheduler, "schedule", noting)
    prompts = [[5 + index, *range(10, 109)] for index in range(16)]
    generate(llm, prompts, greedy(options, max_tokens=24))
    assert rows == {2 * options.block_length}


def test_an_engine_without_drafts_starts_with_a_verifier_that_has_none() -> None:
    llm = asynchronous("sdar", dllm={"verify": "fef", "window": 1}, max_num_seqs=6)
    (output,) = generate(llm, [[5, 6, 7, 8]], greedy(max_tokens=9))
    assert len(tokens_of(output)) == 9


def test_what_steps_cost_is_known_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = asynchronous("sdar", max_num_seqs=6)
    scheduler, learned = scheduler_of(llm), []
    monkeypatch.setattr(scheduler, "learn_costs", learned.append)
    before = free_pages(llm)
    scheduler.warm_up(llm.llm_engine.engine_core.engine_core.model_executor)
    assert [cost.knows_sizes for cost in learned] == [True]
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("commits", ["in turn"], indirect=True)
@pytest.mark.usefixtures("commits")
def test_requests_aborted_with_a_step_in_flight_harm_nobody(family: str) -> None:
    case = cases_of(family, 8)[3]
    llm = asynchronous(family, max_num_seqs=6)
    before = free_pages(llm)
    core = llm.llm_engine
    for steps in range(2, 14, 3):
        for name in ("aborted", "kept"):
            core.add_request(name, {"prompt_token_ids": case.prompt}, case_params(case))
        for _ in range(steps):
            core.step()
        core.abort_request(["aborted"])
        finished = []
        while core.has_unfinished_requests():
            finished += [output for output in core.step() if output.finished]
        assert [tokens_of(o) for o in finished if o.request_id.startswith("kept")] == [case.tokens]
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_a_text_is_denoised_in_every_step_until_it_ends(family: str) -> None:
    """Of the last block one token may be asked for, or all; it is denoised whole."""
    llm, case = asynchronous(family, max_num_seqs=6), cases_of(family, 1)[0]
    length, steps = case.options.block_length, list[int]()
    params = greedy(replace(case.options, eos_early_stop=False), ignore_eos=True, stop_token_ids=[])
    for wanted in range(1, length + 1):
        params.max_tokens = 2 * length - len(case.prompt) % length + wanted
        llm.llm_engine.add_request(str(wanted), {"prompt_token_ids": case.prompt}, params)
        taken = 0
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            taken += 1
        steps.append(taken)
    # Where tokens are shifted, a block's first token comes with the block before.
    assert len(set(steps[1:])) == 1
    assert steps[0] <= steps[1]


def test_max_model_len_ends_a_request(family: str) -> None:
    case = next(c for c in cases_of(family, 24) if len(c.tokens) > 9)
    limit = len(case.prompt) + 9
    llm = asynchronous(family, max_model_len=limit)
    output = generate(llm, [case.prompt], greedy(case.options, max_tokens=None))[0]
    assert tokens_of(output) == case.tokens[:9]


@pytest.mark.parametrize("verify", ["fef", "freedave"])
def test_a_text_that_fills_the_context_has_all_its_rows_in_every_step(
    verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM counts the rows of a step in flight as computed, and they may reach beyond the longest text."""
    drafts, limit, prompt = 7, 224, [5, 6, 7, 8]
    options = replace(cases_of("sdar", 1)[0].options, block_length=32)
    llm = engine_of(
        "sdar", options, async_scheduling=True, dllm={"max_drafts": drafts}, max_model_len=limit, max_num_seqs=8
    )
    params = greedy(options, max_tokens=limit - len(prompt), ignore_eos=True)
    params.extra_args = {"dllm_verify": verify} | ({"dllm_drafts": 8} if verify == "freedave" else {"dllm_window": 8})
    llm.llm_engine.add_request("a", {"prompt_token_ids": prompt}, params)
    scheduler, rows = scheduler_of(llm), list[int]()
    schedule = scheduler.schedule

    def noted(*args: Any) -> SchedulerOutput:
        output = schedule(*args)
        rows.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", noted)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert set(rows[:-1]) == {len(prompt), (1 + drafts) * 32}


def test_a_step_in_flight_holds_pages_for_its_blocks_and_none_for_its_drafts(family: str) -> None:
    """vLLM counts all rows of a step in flight as text to come, drafts too."""
    options = cases_of(family, 1)[0].options
    llm = asynchronous(family, dllm={"max_drafts": 7}, max_num_seqs=8, block_size=32)
    scheduler, core = scheduler_of(llm), llm.llm_engine
    prompt = [5, 6, 7, 8]
    held: dict[int, dict[int, int]] = {}
    for drafts in (1, 8):
        params = greedy(options, max_tokens=96)
        params.extra_args |= {"dllm_verify": "freedave", "dllm_drafts": drafts}
        core.add_request("a", {"prompt_token_ids": prompt}, params)
        pages: dict[int, int] = {}
        while core.has_unfinished_requests():
            core.step()
            for req_id, request in scheduler.requests.items():
                number = len(scheduler.kv_cache_manager.get_block_ids(req_id)[0])
                pages[request.num_tokens] = max(number, pages.get(request.num_tokens, 0))
        held[drafts] = pages
    common = held[8].keys() & held[1].keys()
    assert len(common) > 3
    # A block of Fast-dLLM v2 fills a page, and with drafts a second block is reckoned with.
    more = 1 if family == "fast_dllm_v2" else 0
    assert {n: held[8][n] for n in common if held[8][n] > held[1][n] + more} == {}
