"""How many rows the scheduler gives to requests with drafts."""

import math
from collections import defaultdict
from typing import Any, Literal
from unittest import mock

import pytest
from vllm import LLM

from tests.engine.harness import MASK, drafting_engine, greedy, runner_of, scheduler_of
from tests.reference.decode import Options
from tests.reference.drafts import PSD, FreeDave, Spiffy

LENGTH, MAX_DRAFTS = 8, 7
STATIC = Options(block_length=LENGTH, mask_id=MASK, policy="static")
PROMPT = [354, 206, 479, 4, 198, 387, 187, 162]


class Step(dict[str, int]):
    """Rows of every request in a step."""


def steps_of(llm: LLM, requests: dict[str, Any]) -> list[Step]:
    """Run requests of this name and these parameters; every step's rows, prefills left out."""
    runner, core, steps = runner_of(llm), llm.llm_engine, list[Step]()
    original = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafting = scheduler_output.scheduled_spec_decode_tokens
        steps.append(
            Step(
                (req_id.split("-")[0], number)
                for req_id, number in scheduler_output.num_scheduled_tokens.items()
                if req_id in drafting
            )
        )
        return original(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    try:
        for name, params in requests.items():
            core.add_request(name, {"prompt_token_ids": PROMPT}, params)
        while core.has_unfinished_requests():
            core.step()
    finally:
        del runner.execute_model
    return [step for step in steps if step]


def test_a_step_has_the_rows_of_the_block_and_of_the_drafts_that_wait_or_of_a_commit() -> None:
    llm = drafting_engine("sdar", STATIC)
    drafts = 3
    steps = steps_of(llm, {"a": greedy(STATIC, FreeDave(drafts + 1), max_tokens=40)})
    rows = [step["a"] for step in steps]
    # A block's first forward has no drafts, and the first block has no block before it to commit.
    assert rows[0] == LENGTH
    assert rows[1] == (1 + drafts) * LENGTH
    assert rows.count(2 * LENGTH) >= 40 // LENGTH - 1
    # No more drafts than leave a mask: 7 masks have three, 3 have two, 2 have one, 1 has none.
    assert set(rows) <= {LENGTH * n for n in range(1, 2 + drafts)}
    assert max(rows) == (1 + drafts) * LENGTH


def test_a_request_without_drafts_has_no_rows_for_them() -> None:
    llm = drafting_engine("sdar", STATIC)
    steps = steps_of(llm, {"a": greedy(STATIC, max_tokens=40), "b": greedy(STATIC, FreeDave(1), max_tokens=40)})
    assert {rows for step in steps for rows in step.values()} == {LENGTH, 2 * LENGTH}


def test_drafts_share_the_rows_that_are_left_and_psd_keeps_its_own() -> None:
    budget = 2 * (1 + MAX_DRAFTS) * LENGTH
    llm = drafting_engine("sdar", STATIC, max_num_batched_tokens=budget)
    skipping = {
        "freedave": FreeDave(7),
        "freedave2": FreeDave(7),
        "spiffy": Spiffy([], 3),
        "psd": PSD(4),
        "subset": FreeDave(5, "subset"),
    }
    alone = {
        name: [step[name] for step in steps_of(llm, {name: greedy(STATIC, how, max_tokens=40)})]
        for name, how in skipping.items()
    }
    together = steps_of(llm, {name: greedy(STATIC, how, max_tokens=40) for name, how in skipping.items()})
    assert all(sum(step.values()) <= budget for step in together)
    rows = defaultdict(list)
    for step in together:
        for name, number in step.items():
            rows[name].append(number)
    for name in ("psd", "subset"):
        assert rows[name] == alone[name], name
    assert rows["freedave"] != alone["freedave"]
    # Nobody waits for rows while others draft.
    first_to_end = min(len(numbers) for numbers in rows.values())
    begun = next(i for i, step in enumerate(together) if len(step) == len(skipping))
    assert all(len(step) == len(skipping) for step in together[begun:first_to_end])


def test_drafts_take_no_pages_from_the_pool() -> None:
    llm = drafting_engine("sdar", STATIC)
    manager, core = scheduler_of(llm).kv_cache_manager, llm.llm_engine
    most = {}
    for drafts in (1, 8):
        core.add_request("a", {"prompt_token_ids": PROMPT}, greedy(STATIC, FreeDave(drafts), max_tokens=60))
        pages: dict[int, int] = {}
        while core.has_unfinished_requests():
            core.step()
            for req_id, request in scheduler_of(llm).requests.items():
                held = len(manager.get_block_ids(req_id)[0])
                pages[request.num_tokens] = max(held, pages.get(request.num_tokens, 0))
        most[drafts] = pages
    # By the length of the text.
    assert most[8] == most[1]


@pytest.mark.parametrize("match", ["exact", "subset"])
def test_a_step_with_room_for_the_drafts_of_one_request_serves_all(match: Literal["exact", "subset"]) -> None:
    budget = (1 + MAX_DRAFTS) * LENGTH + LENGTH
    llm = drafting_engine("sdar", STATIC, max_num_batched_tokens=budget)
    steps = steps_of(llm, {str(i): greedy(STATIC, FreeDave(8, match), max_tokens=24) for i in range(4)})
    assert all(sum(step.values()) <= budget for step in steps)
    served = {req_id for step in steps for req_id in step}
    assert served == {str(i) for i in range(4)}


def test_a_prompt_comes_before_the_drafts_of_others() -> None:
    budget = 2 * (1 + MAX_DRAFTS) * LENGTH
    llm = drafting_engine("sdar", STATIC, max_num_batched_tokens=budget)
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    runner, scheduled = runner_of(llm), list[dict[str, int]]()
    original = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled.append({key.split("-")[0]: n for key, n in scheduler_output.num_scheduled_tokens.items()})
        return original(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    try:
        # Their drafts fill every step, whatever is left of their blocks.
        drafting = "abcdefg"
        for index, name in enumerate(drafting):
            core.add_request(
                name, {"prompt_token_ids": PROMPT * 3 + PROMPT[:index]}, greedy(STATIC, FreeDave(8), max_tokens=64)
            )
        for _ in range(12):
            core.step()
        before = len(scheduled)
        assert max(sum(step.values()) for step in scheduled[before - 3 : before]) > budget - 2 * LENGTH
        core.add_request("last", {"prompt_token_ids": PROMPT * 4}, greedy(STATIC, max_tokens=8))
        while core.has_unfinished_requests():
            core.step()
    finally:
        del runner.execute_model
    assert scheduled[before]["last"] == len(PROMPT) * 4
    assert set(scheduled[before]) == {*drafting, "last"}
    assert not scheduler.requests


def test_requests_of_one_moment_are_set_apart_in_steps_that_are_as_many_as_they() -> None:
    llm = drafting_engine("sdar", STATIC, scheduling_policy="priority")
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    with mock.patch.object(math, "nextafter", wraps=math.nextafter) as later:
        for group, moment in enumerate((7.0, 8.0)):
            for index in range(50):
                name = f"{group} {index}"
                core.add_request(name, {"prompt_token_ids": PROMPT}, greedy(STATIC, max_tokens=1), arrival_time=moment)
    assert later.call_count == 2 * 49
    times = [request.arrival_time for request in scheduler.requests.values()]
    assert times == sorted({*times})
    assert len(times) == 100
    while core.has_unfinished_requests():
        core.step()
    assert not scheduler._arrival_times
