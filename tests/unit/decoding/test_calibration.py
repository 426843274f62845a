"""Calibration of draft graphs: what is counted, and the best connected subgraph."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.decoding.calibration import (
    NODES_PER_LEVEL,
    Candidate,
    Step,
    Trajectory,
    candidates,
    forwards,
    select,
    states,
    trajectory,
)
from vllm_dllm.decoding.draft_graph import Node


def node(*pairs: tuple[int, int]) -> Node:
    return frozenset(pairs)


def best(*ranks: int) -> Node:
    """The best tokens of these positions."""
    return frozenset((rank, 1) for rank in ranks)


def step(unmasked: dict[int, int], left: dict[int, list[int]], edited: bool = False) -> Step:
    """A step; ``left``: the best tokens of the columns that it left masked, the most confident column first."""
    return Step(unmasked, edited, {column: rank for rank, column in enumerate(left, 1)}, left)


# What was unmasked after a step.


def test_ranks_are_those_of_the_step_that_made_the_root() -> None:
    steps = [
        step({0: 9}, {3: [50, 51], 1: [60, 61], 2: [70, 71]}),
        step({1: 61}, {2: [71, 70], 3: [50, 51]}),
        step({2: 71}, {3: [50, 51]}),
        step({3: 50}, {}),
    ]
    # The last step fills the block: nothing follows that a draft could skip.
    assert trajectory(steps, lookahead=5) == ((node((2, 2)), node((3, 2))), (node((1, 1)),), ())


def test_a_lookahead_is_no_longer_than_asked() -> None:
    left = {column: [7] for column in range(6)}
    steps = []
    for column in range(5):
        del left[column]
        steps.append(step({column: 7}, dict(left)))
    assert [len(lookahead) for lookahead in trajectory(steps, lookahead=2)] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    "undraftable",
    [
        step({1: 99}, {2: [70]}),
        step({1: 60}, {2: [70]}, edited=True),
        step({65: 60}, {1: [60]}),
        step({1: 60, 2: 70}, {}),
    ],
    ids=["a token that is not among the best", "token editing", "a position beyond the ranks", "no mask left"],
)
def test_a_lookahead_ends_before_what_no_draft_can_say(undraftable: Step) -> None:
    root = step({0: 9}, {column: [60, 70] for column in range(1, 66)})
    later = step({}, {5: [1]})
    assert trajectory([root, undraftable, later], lookahead=5)[0] == ()


def test_a_block_of_one_step_has_nothing_to_draft() -> None:
    assert trajectory([step({0: 1}, {})], lookahead=5) == ()
    assert trajectory([], lookahead=5) == ()


# The graph of all possibilities.


def test_a_level_has_its_most_frequent_states() -> None:
    often, rarely = (best(1), best(2)), (best(4),)
    found = candidates([(often, often, (best(2), best(1))), ((best(3), best(1)), (best(3),), rarely)])
    assert found == [
        Candidate(best(1), 1, 2),
        Candidate(best(3), 1, 2),
        # Fourth by its text, though as frequent as (4,1).
        Candidate(best(2), 1, 1),
        Candidate(best(1, 2), 2, 3),
        Candidate(best(1, 3), 2, 1),
    ]


def test_a_state_of_several_levels_is_one_node_with_all_its_occurrences() -> None:
    found = candidates([((best(1, 2),), (best(1), best(2)), (best(2), best(1)))])
    assert Candidate(best(1, 2), 1, 3) in found
    assert len(found) == 3


def test_a_step_that_unmasks_nothing_counts_once() -> None:
    assert candidates([((node(), best(1), node()),)]) == [Candidate(best(1), 2, 1)]


@given(
    st.lists(
        st.lists(
            st.lists(st.frozensets(st.tuples(st.integers(1, 5), st.just(1)), max_size=2), max_size=4).map(tuple),
            max_size=4,
        ).map(tuple),
        max_size=5,
    )
)
def test_candidates_are_distinct_counted_and_few_per_level(trajectories: list[Trajectory]) -> None:
    found = candidates(trajectories)
    lookaheads = [states(lookahead) for t in trajectories for lookahead in t]
    assert len({candidate.node for candidate in found}) == len(found)
    for candidate in found:
        assert candidate.node
        assert candidate.count == sum(candidate.node in reached for reached in lookaheads) > 0
        assert sum(other.level == candidate.level for other in found) <= NODES_PER_LEVEL
        assert any(candidate.node in reached[candidate.level - 1 : candidate.level] for reached in lookaheads)


# The best connected subgraph.


def connected(chosen: tuple[Candidate, ...]) -> bool:
    """Equations 24 and 25 of the paper."""
    return all(c.level <= 2 or any(other.node < c.node for other in chosen) for c in chosen)


graphs = st.dictionaries(
    st.frozensets(st.tuples(st.integers(1, 5), st.integers(1, 2)), min_size=1, max_size=4),
    st.tuples(st.integers(1, 5), st.integers(1, 12)),
    max_size=10,
).map(lambda found: [Candidate(node, level, count) for node, (level, count) in found.items()])


@given(graphs, st.integers(1, 8))
def test_the_selected_subgraph_is_the_best_of_all_connected_ones(found: list[Candidate], size: int) -> None:
    selected = select(found, size)
    # With fewer nodes only where no connected subgraph has more.
    rivals = [()]
    for n in range(1, size + 1):
        rivals = [*filter(connected, combinations(found, n))] or rivals
    assert connected(tuple(selected))
    assert len(selected) == len(rivals[0])
    assert sum(c.count for c in selected) == max(sum(c.count for c in rival) for rival in rivals)
    assert set(selected) <= set(found)


def test_a_frequent_node_brings_a_rare_parent_along() -> None:
    deep, parent = Candidate(best(1, 2, 3), 3, 100), Candidate(best(1, 2), 3, 1)
    found = [deep, parent, Candidate(best(1), 2, 1), Candidate(best(4), 1, 50), Candidate(best(5), 1, 40)]
    assert select(found, 2) == [Candidate(best(1), 2, 1), deep]
    assert select(found, 3) == [Candidate(best(1), 2, 1), Candidate(best(4), 1, 50), deep]


def test_a_node_that_nothing_connects_is_left_out_and_so_is_what_hangs_on_it() -> None:
    found = [Candidate(best(1, 2), 3, 9), Candidate(best(1, 2, 3), 4, 9), Candidate(best(4), 1, 1)]
    assert select(found, 3) == [Candidate(best(4), 1, 1)]


def test_selection_does_not_depend_on_the_order_of_the_candidates() -> None:
    found = [Candidate(best(i, j), 1, 5) for i in range(1, 5) for j in range(i + 1, 6)]
    assert select(found, 4) == select(found[::-1], 4)


def test_forty_five_candidates_are_no_work() -> None:
    # Fifteen levels of the states of a decoding that takes the first positions in nearly any order.
    found = [
        Candidate(best(*range(1, level), level + skip), level, 1000 // level - skip)
        for level in range(1, 16)
        for skip in range(3)
    ]
    selected = select(found, 10)
    assert len(selected) == 10
    assert sum(c.count for c in selected) == sum(sorted(c.count for c in found)[-10:])


# What a graph would have saved.


def test_forwards_without_drafts_are_the_steps() -> None:
    assert forwards([((best(1),), ()), (), ((),)], []) == 3 + 1 + 2


def test_an_accepted_draft_saves_a_forward_and_what_follows_it_may_be_accepted_too() -> None:
    block: Trajectory = ((best(1), best(2), best(3)), (best(1), best(2)), (best(1),), ())
    assert forwards([block], [best(1)]) == 3
    assert forwards([block], [best(1), best(1, 2)]) == 3
    assert forwards([block], [best(1), best(1, 2), best(1, 2, 3)]) == 2


def test_a_draft_is_reached_through_the_states_before_it_only() -> None:
    block: Trajectory = ((best(1), best(2)), (best(1),), ())
    assert forwards([block], [best(1, 2)]) == 4
