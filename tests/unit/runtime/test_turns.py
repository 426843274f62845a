"""Who sits out of a step with too few rows, and whose drafts are taken back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.runtime.turns import Turns, serve, share

LENGTH = 8
ROWS = st.lists(st.integers(1, 64), min_size=1, max_size=12)


@given(ROWS, st.data())
def test_a_step_never_serves_more_rows_than_it_has(rows: list[int], data: st.DataObject) -> None:
    missed = data.draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)))
    budget = data.draw(st.integers(0, 128))
    served = serve(rows, missed, budget)
    assert sum(number for number, is_served in zip(rows, served, strict=True) if is_served) <= budget
    # Whoever sits out would not have fitted in beside those that come first.
    for index, number in enumerate(rows):
        ahead = [
            other
            for other in range(len(rows))
            if served[other] and (-missed[other], rows[other], other) < (-missed[index], number, index)
        ]
        assert served[index] == (sum(rows[other] for other in ahead) + number <= budget)


def test_those_that_missed_more_come_first_and_of_equals_those_with_fewer_rows() -> None:
    assert serve([8, 8, 8], [0, 2, 1], 16) == [False, True, True]
    assert serve([24, 8, 16], [1, 1, 1], 24) == [False, True, True]
    # Equal in both: in the order in which they came.
    assert serve([8, 8, 8], [0, 0, 0], 16) == [True, True, False]


@given(ROWS, st.integers(0, 64), st.integers(0, 64))
def test_nobody_that_fits_into_a_step_waits_longer_than_for_everybody_else(
    rows: list[int], prompts: int, spare: int
) -> None:
    budget = max(*rows, prompts) + spare
    requests = {str(index): number for index, number in enumerate(rows)}
    turns, waiting, prompts_waiting = Turns(), dict.fromkeys(requests, 0), 0
    for _ in range(6 * len(rows)):
        turns.take(requests, prompts, budget)
        served = [req_id for req_id in requests if req_id not in turns.sitting_out]
        left = budget - sum(requests[req_id] for req_id in served)
        assert left >= 0
        if prompts:
            assert turns.prompt_rows == left
            prompts_waiting = 0 if left >= prompts else prompts_waiting + 1
        else:
            assert turns.prompt_rows is None
        turns.end_step(served)
        for req_id in requests:
            waiting[req_id] = 0 if req_id in served else waiting[req_id] + 1
        assert max(waiting.values()) <= len(rows)
        assert prompts_waiting <= len(rows)


def test_a_request_that_found_no_pages_in_its_turn_comes_first_in_the_next_step() -> None:
    turns = Turns()
    turns.take({"a": 8, "b": 8}, 0, 8)
    assert turns.sitting_out == {"b"}
    turns.end_step([])
    turns.take({"a": 8, "b": 8}, 0, 8)
    assert turns.sitting_out == {"b"}
    turns.end_step(["a"])
    turns.take({"a": 8, "b": 8}, 0, 8)
    assert turns.sitting_out == {"a"}


def test_once_there_is_room_for_all_who_waited_before_no_longer_matters() -> None:
    turns = Turns()
    turns.take({"a": 8, "b": 8}, 0, 8)
    turns.end_step(["a"])
    turns.all_have_room()
    assert not turns.sitting_out
    assert turns.prompt_rows is None
    turns.take({"a": 8, "b": 8}, 0, 8)
    assert turns.sitting_out == {"b"}


@pytest.mark.parametrize("budget", [8, 16, 40])
def test_prompts_take_turns_with_those_that_decode(budget: int) -> None:
    turns, steps = Turns(), []
    for _ in range(24):
        turns.take({"a": 8, "b": 8, "c": 8}, 8, budget)
        steps.append((turns.prompt_rows or 0) >= 8)
        turns.end_step([req_id for req_id in "abc" if req_id not in turns.sitting_out])
    assert sum(steps) == 24 * min(budget, 32) // 32


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 40))
def test_rows_that_do_not_suffice_are_taken_from_those_with_most_drafts(drafts: list[int], room: int) -> None:
    units = [LENGTH] * len(drafts)
    if sum(drafts) <= room:
        assert share(drafts, units, max(room, 1) * LENGTH) == drafts
        return
    shared = share(drafts, units, room * LENGTH)
    assert sum(shared) == room
    assert all(ours <= wanted for ours, wanted in zip(shared, drafts, strict=True))
    # Who got fewer than another could not have used more, but for one that the first get of what is left.
    least_cut = min(ours for ours, wanted in zip(shared, drafts, strict=True) if ours < wanted)
    assert max(shared) <= least_cut + 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=8), st.integers(0, 100))
def test_drafts_of_unlike_rows_share_them_too(requests: list[tuple[int, int]], room: int) -> None:
    drafts, units = map(list, zip(*requests, strict=True))
    wanted = sum(number * unit for number, unit in requests)
    shared = share(drafts, units, room)
    assert sum(number * unit for number, unit in zip(shared, units, strict=True)) <= room
    assert all(ours <= all_ for ours, all_ in zip(shared, drafts, strict=True))
    if wanted <= room:
        assert shared == drafts


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 200))
def test_requests_keep_the_order_of_their_numbers(drafts: list[int], room: int) -> None:
    shared = share(drafts, [LENGTH] * len(drafts), room)
    for wanted, got in zip(drafts, shared, strict=True):
        for other_wanted, other_got in zip(drafts, shared, strict=True):
            if wanted > other_wanted:
                assert got >= other_got or got == other_got - 1
