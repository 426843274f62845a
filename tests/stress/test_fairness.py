"""No request takes rows, places or turns from others beyond its share. Counted in steps of the scheduler."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.engine.harness import MASK, assert_nothing_left, drafting_engine, engine_of, free_pages, greedy, runner_of
from tests.engine.harness import scheduler_of as _scheduler_of
from tests.reference.decode import Options
from tests.reference.drafts import PSD, FreeDave

LENGTH, MAX_DRAFTS = 8, 7
STATIC = Options(block_length=LENGTH, mask_id=MASK, policy="static")
PROMPT = [354, 206, 479, 4, 198, 387, 187, 162]
ALL_ROWS = (1 + MAX_DRAFTS) * LENGTH
"""Rows of a request with as many drafts as there may be."""


class Steps(list[dict[str, int]]):
    """Rows of every request in each step, by the request's name."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: dict[str, int] = {}
        """Steps that passed from each request's arrival to its first rows."""
        self.waited: dict[str, int] = defaultdict(int)
        """Most steps in a row that it went without rows thereafter."""
        self._waiting: dict[str, int] = defaultdict(int)

    def note(self, rows: dict[str, int], alive: list[str]) -> None:
        """A step with these rows, in which these requests had arrived and not ended."""
        self.append(rows)
        for name in alive:
            if rows.get(name):
                self.begun.setdefault(name, self._waiting[name])
                self._waiting[name] = 0
            else:
                self._waiting[name] += 1
            if name in self.begun:
                self.waited[name] = max(self.waited[name], self._waiting[name])


@contextmanager
def watched(llm: LLM) -> Iterator[Steps]:
    """Steps that the engine takes meanwhile."""
    runner, scheduler, steps = runner_of(llm), _scheduler_of(llm), Steps()
    original = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.num_scheduled_tokens:
            rows = {_name(req_id): number for req_id, number in scheduler_output.num_scheduled_tokens.items()}
            steps.note(rows, [_name(req_id) for req_id in scheduler.requests])
        return original(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    try:
        yield steps
    finally:
        del runner.execute_model


def _name(req_id: str) -> str:
    return req_id.rsplit("-", 1)[0]


def run(
    llm: LLM,
    requests: Mapping[str, SamplingParams],
    *,
    later: Mapping[str, SamplingParams] | None = None,
    after: int = 0,
) -> tuple[dict[str, list[list[int]]], Steps]:
    """Tokens of the answers of every request, and the steps they took.

    Args:
        later: requests that come ``after`` so many steps.
    """
    core, answers = llm.llm_engine, dict[str, list[list[int]]]()
    with watched(llm) as steps:
        for name, params in requests.items():
            core.add_request(name, {"prompt_token_ids": PROMPT}, params)
        while core.has_unfinished_requests() or later:
            if later and len(steps) >= after:
                for name, params in later.items():
                    core.add_request(name, {"prompt_token_ids": PROMPT[:-1]}, params)
                later = None
            for output in core.step():
                if output.finished:
                    answers[output.request_id] = [list(each.token_ids) for each in output.outputs]
    return answers, steps


def small(**params: Any) -> SamplingParams:
    """A short request without drafts."""
    return greedy(STATIC, max_tokens=2 * LENGTH, **params)


def test_all_that_decode_have_their_turn_where_a_step_has_rows_for_few() -> None:
    llm = engine_of("sdar", STATIC, max_num_batched_tokens=3 * LENGTH, max_num_seqs=8)
    requests = {f"r{i}": greedy(STATIC, max_tokens=48) for i in range(8)}
    alone, _ = run(llm, {"r0": requests["r0"]})
    before = free_pages(llm)
    answers, steps = run(llm, requests)
    # One to three of them in a step, or a prompt: each has a turn before another one has its third.
    assert max(steps.waited.values()) <= 2 * len(requests)
    assert max(steps.begun.values()) <= 2 * len(requests)
    # The first of them does not end before the last has had a third of its steps.
    first_end = min(max(i for i, rows in enumerate(steps) if name in rows) for name in requests)
    assert sum("r7" in rows for rows in steps[:first_end]) > 48 // 3
    assert all(sum(rows.values()) <= 3 * LENGTH for rows in steps)
    assert all(answers[name] == alone["r0"] for name in requests)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("greedy_first", [True, False])
def test_many_drafts_that_must_come_all_do_not_keep_small_requests_waiting(greedy_first: bool) -> None:
    llm = drafting_engine("sdar", STATIC, max_num_batched_tokens=ALL_ROWS + 2 * LENGTH, max_num_seqs=8)
    greedy_ones = {f"psd{i}": greedy(STATIC, PSD(MAX_DRAFTS), max_tokens=64) for i in range(3)}
    small_ones = {f"small{i}": small() for i in range(5)}
    alone, _ = run(llm, {"small0": small_ones["small0"]})
    greedy_alone, _ = run(llm, {"psd0": greedy_ones["psd0"]})
    together = greedy_ones | small_ones if greedy_first else small_ones | greedy_ones
    before = free_pages(llm)
    answers, steps = run(llm, together)
    for name in small_ones:
        assert answers[name] == alone["small0"]
        assert steps.begun[name] <= len(together), name
        assert steps.waited[name] <= 3, name
    for name in greedy_ones:
        assert answers[name] == greedy_alone["psd0"]
        # Nor do the small ones keep them waiting: all others have a turn before they have a second one.
        assert steps.waited[name] <= len(together), name
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_a_request_that_comes_while_others_take_all_rows_begins_soon() -> None:
    llm = engine_of("sdar", STATIC, max_num_batched_tokens=3 * LENGTH, max_num_seqs=8)
    requests = {f"r{i}": greedy(STATIC, max_tokens=96) for i in range(5)}
    answers, steps = run(llm, requests, later={"late": small()}, after=20)
    assert steps.begun["late"] <= 8
    assert steps.waited["late"] <= 8
    ends = {name: max(i for i, rows in enumerate(steps) if name in rows) for name in answers}
    assert ends["late"] < min(ends[name] for name in requests)


def test_drafts_that_may_be_fewer_leave_each_request_the_same_share() -> None:
    budget = 6 * 2 * LENGTH
    llm = drafting_engine("sdar", STATIC, max_num_batched_tokens=budget, max_num_seqs=8)
    requests = {f"greedy{i}": greedy(STATIC, FreeDave(8), max_tokens=64) for i in range(5)}
    requests["modest"] = greedy(STATIC, FreeDave(2), max_tokens=64)
    alone, _ = run(llm, {"modest": requests["modest"]})
    answers, steps = run(llm, requests)
    assert answers["modest"] == alone["modest"]
    assert max(steps.waited.values()) <= 1
    whole = [rows for rows in steps if len(rows) == len(requests)]
    assert len(whole) > 5
    for rows in whole:
        # One draft is less than an equal share of the rows, so nobody may take it.
        most = max(rows[name] for name in requests if name != "modest")
        assert rows["modest"] >= min(most, LENGTH)


def test_long_prompts_do_not_stop_those_that_decode() -> None:
    llm = engine_of("sdar", STATIC, max_num_batched_tokens=4 * LENGTH, max_num_seqs=8, enable_prefix_caching=False)
    core = llm.llm_engine
    with watched(llm) as steps:
        for i in range(3):
            core.add_request(f"small{i}", {"prompt_token_ids": PROMPT}, greedy(STATIC, max_tokens=48))
        for _ in range(6):
            core.step()
        for i in range(4):
            core.add_request(f"long{i}", {"prompt_token_ids": PROMPT * 24}, greedy(STATIC, max_tokens=8))
        while core.has_unfinished_requests():
            core.step()
    assert max(steps.waited[f"small{i}"] for i in range(3)) <= 4
    # And they begin, one after the other.
    begun = [next(i for i, rows in enumerate(steps) if f"long{number}" in rows) for number in range(4)]
    assert begun == sorted(begun)
    assert begun[0] <= 6 + 4
