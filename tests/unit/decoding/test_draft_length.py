"""How many drafts of a request are verified follows what was accepted of its last ones."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.decoding.draft_length import DraftLength


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, list[float]]:
    """k, and in every round the share of its drafts that are accepted."""
    return draw(st.integers(1, 64)), draw(st.lists(st.floats(0, 1), max_size=40))


@given(rounds())
def test_there_is_always_a_draft_and_never_more_than_the_drafter_makes(case: tuple[int, list[float]]) -> None:
    most, shares = case
    length = DraftLength(most)
    assert length.length == most
    for share in shares:
        length.observe(length.length, round(share * length.length))
        assert 1 <= length.length <= most
        assert 0 <= length.mean <= most


@given(st.integers(2, 64), st.integers(1, 5))
def test_rejected_drafts_shrink_it_to_one_and_accepted_ones_bring_it_back(most: int, drafted: int) -> None:
    length = DraftLength(most)
    for _ in range(30):
        before = length.length
        length.observe(min(drafted, before), 0)
        assert length.length <= before
    assert length.length == 1
    for _ in range(60):
        before = length.length
        length.observe(before, before)
        assert length.length >= before
    assert length.length == most


@given(st.integers(4, 64), st.integers(0, 64))
def test_it_settles_with_some_room_over_what_is_accepted(most: int, accepted: int) -> None:
    length = DraftLength(most)
    for _ in range(80):
        length.observe(length.length, min(accepted, length.length))
    if accepted >= most:
        assert length.length == most
    else:
        assert min(most, accepted + 1) <= length.length <= min(most, 2 * accepted + 2)


def test_a_bad_round_is_forgiven() -> None:
    length = DraftLength(16)
    length.observe(16, 0)
    assert length.length == 16
    length.observe(16, 0)
    assert 8 < length.length < 16
