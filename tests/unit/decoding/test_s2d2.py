"""S2D2's spans, routes and acceptance, by hand and as a distribution."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from vllm_dllm.decoding.distributions import Distributions
from vllm_dllm.decoding.rejection import RejectionSampler, accept
from vllm_dllm.decoding.s2d2 import (
    Beliefs,
    Routing,
    Span,
    accept_greedily,
    acceptances,
    expected_accepted,
    filled,
    first_span,
    score,
    switch_after,
    switch_is_on,
    switch_when_began,
    verifies,
    verifying_branches,
)
from vllm_dllm.methods import ESTIMATORS, ROUTES

MASK = 9


def routing_of(route: str = "always", estimator: str = "soft_entropy_negexp", **more: float) -> Routing:
    given: dict[str, float | bool] = {
        "route": [*ROUTES].index(route),
        "min_span": 2,
        "score_threshold": 0.0,
        "score_on": 1.0,
        "score_off": -1.0,
        "score_cost": 1.0,
        "per_token": False,
        "estimator": [*ESTIMATORS].index(estimator),
        "strength": ESTIMATORS[estimator],
        **more,
    }
    return Routing(**{name: torch.tensor([value]) for name, value in given.items()})


@pytest.mark.parametrize(
    ("masked", "start", "length"),
    [("....", 0, 0), ("..#.", 2, 1), (".##.#", 1, 2), ("####", 0, 4), ("...#", 3, 1), ("#.##", 0, 1)],
)
def test_the_span_is_the_first_run_of_masks(masked: str, start: int, length: int) -> None:
    span = first_span(torch.tensor([[each == "#" for each in masked]]))
    assert (int(span.start), int(span.length)) == (start, length)


def test_each_estimator_guesses_as_its_formula_says() -> None:
    beliefs = Beliefs(*(torch.tensor([[value]]) for value in (0.7, 0.2, 0.4)))
    expected = {
        "soft_entropy_negexp": math.exp(-0.5 * 0.2),
        "hard_entropy_threshold": 1.0,
        "hard_margin_threshold": 0.0,
        "soft_clipped_linear_margin": 0.2,
        "soft_confidence_power": 0.7**0.5,
    }
    for name, guess in expected.items():
        found = acceptances(beliefs, routing_of(estimator=name, strength=0.5), {*range(len(ESTIMATORS))})
        assert float(found) == pytest.approx(guess), name


def test_the_score_is_the_expected_prefix_less_its_cost() -> None:
    guess = torch.tensor([[0.9, 0.5, 0.8, 0.25, 1.0]])
    expected = expected_accepted(guess, torch.tensor([[False, True, True, True, False]]))
    assert float(expected) == pytest.approx(0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.25)
    confident = torch.tensor([3])
    assert float(score(expected, confident, routing_of(score_cost=0.5))) == pytest.approx(float(expected) - 0.5)
    per_token = routing_of(score_cost=0.5, per_token=True)
    assert float(score(expected, confident, per_token)) == pytest.approx(float(expected) - 1.5)


@pytest.mark.parametrize(
    ("route", "run", "scores", "was_on", "expected"),
    [
        ("always", 1, -9.0, False, True),
        ("always", 0, 9.0, True, False),
        ("span", 1, 9.0, True, False),
        ("span", 2, -9.0, False, True),
        ("score", 1, 0.0, False, True),
        ("score", 9, -0.1, True, False),
        ("hysteresis", 1, 1.0, False, False),
        ("hysteresis", 1, 1.1, False, True),
        ("hysteresis", 1, -1.0, True, True),
        ("hysteresis", 1, -1.1, True, False),
    ],
)
def test_routes(route: str, run: int, scores: float, was_on: bool, expected: bool) -> None:
    found, is_on = verifies(torch.tensor([run]), torch.tensor([scores]), torch.tensor([was_on]), routing_of(route))
    assert bool(found) == expected
    assert route != "hysteresis" or bool(is_on) == expected


def test_the_switch_is_known_for_now_and_for_when_the_last_two_blocks_began() -> None:
    switch = torch.zeros(1, dtype=torch.int64)
    began = [False, False]
    # Two blocks of two steps each, and a step of a third block.
    for is_on, is_finished in ((True, False), (False, True), (True, False), (True, True), (False, False)):
        switch = switch_after(switch, torch.tensor([is_on]), torch.tensor([is_finished]))
        if is_finished:
            began.append(is_on)
        assert switch_is_on(switch).tolist() == [is_on]
        for before, expected in ((False, began[-1]), (True, began[-2])):
            again = switch_when_began(switch, before=torch.tensor([before]))
            assert switch_is_on(again).tolist() == [expected]
            assert switch_is_on(switch_when_began(again, before=torch.tensor([True]))).tolist() == [expected]


def test_branches_hold_the_tokens_before_each_position_of_the_span() -> None:
    span = Span(torch.tensor([1]), torch.tensor([2]))
    block = filled(torch.tensor([[5, MASK, MASK, MASK]]), span, torch.tensor([[1, 2, 3, 4]]))
    assert block.tolist() == [[5, 2, 3, MASK]]
    alone = verifying_branches(block, span, MASK, shifted=False, most=2)
    assert alone.tolist() == [[[5, MASK, MASK, MASK], [5, 2, MASK, MASK]]]
    assert verifying_branches(block, span, MASK, shifted=True, most=1).tolist() == [block.tolist()]


def test_acceptance_ends_at_the_first_draft_whose_draw_is_above_the_ratio() -> None:
    q, p = torch.tensor([[0.5, 0.2, 0.9]]).log(), torch.tensor([[0.25, 0.4, 0.9]]).log()
    present = torch.ones(1, 3, dtype=torch.bool)
    for uniform, count in (((0.99, 0.49, 0.99), 3), ((0.5, 0.51, 0.1), 1), ((0.99, 0.3, 0.99), 3)):
        assert int(accept(q, p, torch.tensor([uniform]).log(), present)) == count
    assert int(accept(q, p, torch.tensor([[0.1, 0.1, 0.1]]).log(), present & torch.tensor([True, True, False]))) == 2
    impossible = torch.tensor([[-torch.inf, 0.0, 0.0]])
    assert int(accept(impossible, torch.full((1, 3), -200.0), torch.full((1, 3), 1e-9).log(), present)) == 0
    span = Span(torch.tensor([1]), torch.tensor([2]))
    for said, agreed in (([9, 1, 2, 9], 2), ([9, 1, 3, 9], 1), ([9, 3, 2, 9], 0)):
        assert int(accept_greedily(torch.tensor([[0, 1, 2, 3]]), torch.tensor([said]), span)) == agreed


def test_what_is_written_has_the_verifiers_distribution() -> None:
    """Chi-square of the first token of a span over many draws, and of the second where the first was accepted."""
    generator, number, vocab = torch.Generator().manual_seed(0), 40_000, 6
    p = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1, 0.0], [0.1, 0.1, 0.6, 0.1, 0.1, 0.0]])
    q = torch.tensor([[0.1, 0.4, 0.1, 0.3, 0.1, 0.0], [0.3, 0.1, 0.2, 0.2, 0.2, 0.0]])
    rows, ones = torch.arange(2).expand(number, 2), torch.ones(number)
    drafts = torch.stack([each.multinomial(number, replacement=True, generator=generator) for each in p], dim=1)

    def noise(requests: slice, places: Tensor) -> Tensor:
        return torch.empty(len(places), vocab).exponential_(generator=generator).log()

    count, _, (token, _) = RejectionSampler().verify(
        drafts,
        rows,
        torch.ones(number, 2, dtype=torch.bool),
        Distributions(q.log(), rows, ones, mask_id=5),
        Distributions(p.log(), rows, ones, mask_id=5),
        torch.rand(number, 2, generator=generator).clamp(min=1e-7),
        noise,
    )
    for place in range(2):
        reached = count >= place
        written = torch.where(count > place, drafts[:, place], token)[reached].tolist()
        found, total = Counter(written), int(reached.sum())
        statistic = sum((found[k] - total * s) ** 2 / (total * s) for k, s in enumerate(q[place].tolist()) if s)
        assert statistic < 4 + 4.8 * 8**0.5, (place, found)
        assert not found[5]
