"""The order of a text with holes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.decoding.holes import Holes

MASKS = st.lists(st.booleans(), min_size=1, max_size=40).filter(any)


def test_the_example_of_the_module():
    holes = Holes.of(np.array([2, 3, 5]))
    assert holes.runs == ((2, 2), (5, 1))
    assert holes.order(7).tolist() == [4, 6, 0, 1, 2, 3, 5]
    # c is predicted by the mask before it, d by the mask at position 5, a by itself; the mask at 5 by c.
    assert holes.predictors(7).tolist() == [5, 6, 2, 2, 3, 4, 0]


@given(MASKS)
def test_every_position_has_one_place_and_masks_have_the_last_ones_in_the_order_of_the_text(is_mask):
    positions = np.flatnonzero(is_mask)
    holes = Holes.of(positions)
    assert holes.positions.tolist() == positions.tolist()
    order = holes.order(len(is_mask))
    assert sorted(order.tolist()) == list(range(len(is_mask)))
    assert order[len(is_mask) - len(positions) :].tolist() == positions.tolist()


@given(MASKS)
def test_the_place_that_predicts_a_place_is_that_of_the_position_before(is_mask):
    holes = Holes.of(np.flatnonzero(is_mask))
    order, predictors = holes.order(len(is_mask)), holes.predictors(len(is_mask))
    assert order[predictors].tolist() == np.maximum(order - 1, 0).tolist()


@given(MASKS)
def test_the_token_before_the_first_hole_stands_before_the_first_mask(is_mask):
    holes = Holes.of(np.flatnonzero(is_mask))
    known = holes.known(len(is_mask))
    if holes.runs[0][0] > 0:
        assert known[-1] == holes.runs[0][0] - 1


def test_each_hole_ends_at_its_first_end_of_the_text():
    holes = Holes(((2, 3), (8, 2), (12, 2)))
    assert holes.cut([5, 9, 6, 7, 8, 9, 4], frozenset({9})) == [[5], [7, 8], []]
