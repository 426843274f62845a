"""Where rows of commits go, by what steps cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.decoding.commits import PRIOR_STEPS, CommitRows
from vllm_dllm.decoding.step_cost import StepCost

LENGTH = 32
KNEE = 256
"""Rows of a step up to which the machine below reads weights, and beyond which it multiplies."""


def seconds(rows: float) -> float:
    return max(1.0, rows / KNEE)


COST = StepCost([(LENGTH << i, False, seconds(LENGTH << i)) for i in range(8)])


def decided(commits: CommitRows) -> list[bool]:
    """Of 1, 2, 4, ... 64 requests."""
    return [commits.beside(LENGTH << i, LENGTH << i) for i in range(7)]


def test_rows_of_commits_stand_beside_while_they_are_free_and_apart_once_they_cost() -> None:
    assert decided(CommitRows(COST)) == [True, True, True, False, False, False, False]


@pytest.mark.parametrize("cost", [None, StepCost(), StepCost([(8, False, 1.0), (8, False, 2.0), (64, True, 9.0)])])
def test_while_nobody_knows_what_rows_cost_they_stand_beside(cost: StepCost | None) -> None:
    assert all(decided(CommitRows(cost)))


@pytest.mark.parametrize(("steps", "beside"), [(1, True), (32, False)])
def test_the_fewer_steps_a_block_takes_the_more_a_step_of_its_own_costs(steps: int, beside: bool) -> None:
    commits = CommitRows(COST)
    commits.observe(1000 * steps, 1000)
    assert commits.steps_per_block == pytest.approx(steps, rel=0.05)
    # 1.4 times the seconds, or a step more.
    rows = round(0.7 * KNEE)
    assert commits.beside(rows, rows) == beside


def test_what_blocks_took_is_learned_and_forgotten() -> None:
    commits = CommitRows()
    assert commits.steps_per_block == PRIOR_STEPS
    for steps in (32, 2):
        for _ in range(8000):
            commits.observe(steps, 1)
        assert commits.steps_per_block == pytest.approx(steps, rel=0.05)


@given(
    points=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=8),
    blocks=st.lists(st.integers(1, 40), max_size=20),
    rows=st.integers(1, 8000),
    commit_rows=st.integers(1, 8000),
)
def test_what_is_decided_takes_fewer_seconds_for_a_block(
    points: list[float], blocks: list[int], rows: int, commit_rows: int
) -> None:
    cost = StepCost([(LENGTH << i, False, each) for i, each in enumerate(points)])
    commits = CommitRows(cost)
    for steps in blocks:
        commits.observe(steps, 1)
    steps = commits.steps_per_block
    beside, apart = cost.seconds(np.array([rows + commit_rows, rows], dtype=float), drafts=False).tolist()
    assert commits.beside(rows, commit_rows) == (steps * beside <= (steps + 1) * apart)
