"""Drafts that a step has no rows for are taken back."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.runtime.scheduling.draft_budget import share

LENGTH = 8


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
