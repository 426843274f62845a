"""What the benchmarks of drafts make of their measurements; no engine is started."""

import sys

import pytest
import torch

from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import draft_graphs
import fef
import psd
import short_blocks
from answers import Answers, interval

from vllm_dllm.decoding.calibration import Step
from vllm_dllm.observe.recorder import Round
from vllm_dllm.observe.stats import RequestStats


def step(unmasked: list[int], left: list[int]) -> Step:
    """A step that unmasked some columns and left others masked, the most confident first."""
    ranks = {column: rank for rank, column in enumerate(left, 1)}
    return Step(dict.fromkeys(unmasked, 7), edited=False, ranks=ranks, top_tokens={})


def test_precision_is_of_the_most_confident_positions_and_its_bound_of_the_best() -> None:
    block = [step([0], [3, 1, 2, 4]), step([1, 4], [2, 3]), step([3, 2], [])]
    found = {(each.candidates, each.horizon): each for each in psd.precisions("model", [block])}
    # Columns 3, 1 and 2 are the three most confident; 1 and 4 come next, then 3 and 2.
    assert found[3, 1].precision == pytest.approx(1 / 3)
    assert found[3, 1].oracle == pytest.approx(2 / 3)
    assert (found[3, 2].precision, found[3, 2].oracle) == (1, 1)
    assert {each.steps for each in found.values()} == {1}  # the second step leaves two masks only
    assert not [key for key in found if key[0] > 3]


def test_a_profile_tells_tokens_of_the_policy_from_those_of_drafts() -> None:
    mask = 99
    before = torch.tensor([[[1, mask, mask, mask], [1, 5, mask, mask]]])
    profile = psd.Profile(mask)
    for start, first in ((0, 0), (4, 1), (8, 0)):
        profile(
            Round(
                req_ids=["a"],
                block_start=torch.tensor([start]),
                first=torch.tensor([first]),
                denoised=torch.tensor([True]),
                branches=before,
                present=torch.ones(1, 2, dtype=torch.bool),
                reached=torch.ones(1, 2, dtype=torch.bool),
                accepted=torch.tensor([1]),
                predicted=before,
                confidence=torch.ones(1, 2, 4),
                chosen=torch.tensor([[False, False, True, True]]),
                tokens=torch.tensor([[1, 5, 6, 7]]),
                top_tokens=lambda k: torch.zeros(1, 4, k),
            )
        )
    stages = {(each.block, each.stage): (each.policy, each.drafts) for each in profile.stages("model")}
    of_one_step = (pytest.approx(2 / 3), pytest.approx(1 / 3))
    # A quarter of the first and the last block was there before; of the block in the middle that was the prompt's.
    assert stages["first", 1] == stages["last", 1] == stages["middle", 0] == of_one_step
    assert stages["middle", 1] == (0, 0)


def test_accuracies_are_compared_problem_by_problem() -> None:
    one = fef.Graded("model", fef.ONE, [True, False, False, True], forwards=100)
    row = fef.compare("model", "FeF, 2 passes", [True, True, False, True], 50, one)
    assert (row.accuracy, row.difference, row.fewer_forwards) == (0.75, 0.25, 2)
    assert row.low < 0.25 < row.high
    assert (row.low, row.high) == pytest.approx(interval(0.25, 0.1875**0.5, 4))
    targets = fef.target_sheet([row], []).rows
    assert [each[-1] for each in targets] == ["pass"]
    assert targets[0][0] == "model: accuracy of FeF, 2 passes over one token per step, at 0.50 of its forwards"


def test_rows_of_windows_are_those_of_all_blocks_that_drafts_reach() -> None:
    answers = Answers([[1] * 9], [RequestStats(nfe=5, committed_tokens=9, denoising_steps=5, drafted=10)])
    assert short_blocks.Windows(8, eager=True).rows(answers) == (5 + 10) * 12
    assert short_blocks.Windows(4, eager=True).rows(answers) == (5 + 10) * 8
    # Two of the three blocks were committed, each in 4 further rows.
    assert short_blocks.Windows(8, eager=False).rows(answers) == (5 + 10 + 2) * 4


def test_a_graph_reaches_its_target_only_with_equal_tokens() -> None:
    def row(equal: int, saved: float) -> draft_graphs.Row:
        return draft_graphs.Row("tiny-llada", draft_graphs.CALIBRATED, 3, 0.0, 10, 0.5, 100, saved, equal)

    assert [each[-1] for each in draft_graphs.target_sheet([row(10, 1.5)]).rows] == ["pass", "pass"]
    assert [each[-1] for each in draft_graphs.target_sheet([row(9, 1.5)]).rows] == ["miss", "miss"]
    assert [each[-1] for each in draft_graphs.target_sheet([row(10, 1.4)]).rows] == ["miss", "pass"]
