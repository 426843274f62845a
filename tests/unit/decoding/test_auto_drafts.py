"""What ``drafts="auto"`` learns and decides, alone and against every fixed number of drafts in the simulation."""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import auto_drafts as simulation

from vllm_dllm.decoding.adaptive import DRAFTING_INTERVAL, MARGIN, DraftController, Drafting
from vllm_dllm.decoding.step_cost import StepCost

ROWS = 32


def seconds_of(cost: StepCost, rows: Iterable[float], *, drafts: bool = False) -> list[float]:
    return cost.seconds(np.array([*rows], dtype=float), drafts).tolist()


class Engine:
    """A controller with the machine and the requests around it. Of all requests ``available`` drafts are made."""

    def __init__(self, machine: simulation.Machine, chances: list[float], available: int = 4, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.controller = DraftController(simulation.timed(machine, self.rng))
        self.drafting, self.was_drafting = Drafting(), False
        self.chances = chances
        self.names = [f"request {i}" for i in range(len(chances))]
        self.available = available
        for name in self.names:
            self.controller.add(name)

    def step(self) -> list[int]:
        there = self.available if self.was_drafting else 0
        count = len(self.names)
        drafts = self.controller.allot([(name, there) for name in self.names], ROWS * count, ROWS, count)
        self.was_drafting = self.drafting.decide(there > 0, any(drafts))
        for name, drafted, chance in zip(self.names, drafts, self.chances, strict=True):
            accepted = int((self.rng.random(drafted) < chance).cumprod().sum())
            self.controller.observe(name, drafted, accepted, accepted)
        return drafts

    def run(self, steps: int) -> np.ndarray:
        """[steps, requests]: drafts."""
        return np.array([self.step() for _ in range(steps)])


# What a step costs.


def test_steps_of_an_accelerator_are_flat_up_to_the_knee_and_linear_from_there() -> None:
    cost = StepCost([(rows, False, 0.01 * max(1, rows / 512)) for rows in (32, 64, 128, 256, 512, 1024, 2048)])
    assert seconds_of(cost, [48, 300, 512, 1500, 4096]) == pytest.approx([0.01, 0.01, 0.01, 0.0293, 0.08], rel=0.01)


def test_two_sizes_suffice_for_a_machine_that_is_linear() -> None:
    cost = StepCost([(rows, False, 0.002 + 1e-4 * rows) for rows in (64, 96)])
    assert seconds_of(cost, [32, 320]) == pytest.approx([0.0052, 0.034])


def test_what_drafts_take_beside_their_rows_is_told_from_what_rows_take() -> None:
    rng = np.random.default_rng(0)
    timed = [
        (rows, drafts, (0.002 + 1e-4 * rows + 0.005 * drafts) * np.exp(0.1 * rng.standard_normal()))
        for _ in range(9)
        for rows in (64, 96, 128, 192, 256)
        for drafts in (False, True)
    ]
    cost = StepCost(timed)
    assert seconds_of(cost, [64, 160]) == pytest.approx([0.0084, 0.018], rel=0.1)
    assert seconds_of(cost, [64, 160], drafts=True) == pytest.approx([0.0134, 0.023], rel=0.1)


def test_a_step_that_something_held_up_changes_nothing() -> None:
    steps = [(rows, False, 0.002 + 1e-4 * rows) for rows in (64, 96) for _ in range(5)]
    held_up = StepCost([(64, False, 9.0), *steps, (96, False, 9.0)])
    assert seconds_of(held_up, [32, 96, 320]) == pytest.approx(seconds_of(StepCost(steps), [32, 96, 320]))


@given(st.lists(st.tuples(st.integers(1, 20_000), st.booleans(), st.floats(1e-5, 10.0)), max_size=60))
@settings(deadline=None)
def test_whatever_was_timed_more_rows_never_take_less_time_nor_ever_less_per_row(
    timed: list[tuple[int, bool, float]],
) -> None:
    cost, rows = StepCost(timed), np.linspace(1, 30_000, 500)
    plain, drafting = cost.seconds(rows, drafts=False), cost.seconds(rows, drafts=True)
    for seconds in (plain, drafting):
        assert np.isfinite(seconds).all()
        assert (seconds >= 0).all()
        slopes, tolerance = np.diff(seconds), 1e-6 * seconds.max()
        assert (slopes >= -tolerance).all()
        assert (np.diff(slopes) >= -tolerance).all()
    assert (drafting >= plain).all()


# Which step makes drafts.


def test_drafts_are_made_as_long_as_they_are_used() -> None:
    drafting = Drafting()
    assert [drafting.decide(are_there=step > 0, are_used=step > 0) for step in range(5)] == [True] * 5


def test_a_step_that_does_not_use_its_drafts_makes_none_and_the_next_one_does() -> None:
    drafting = Drafting()
    for _ in range(3):
        assert drafting.decide(are_there=True, are_used=True)
        assert not drafting.decide(are_there=True, are_used=False)
        assert drafting.decide(are_there=False, are_used=False)


def test_drafts_that_are_not_used_are_made_now_and_then_until_they_are() -> None:
    drafting = Drafting()

    def made(steps: int, *, are_used: bool) -> list[int]:
        """The steps that make drafts."""
        numbers, there = [], False
        for step in range(steps):
            there = drafting.decide(there, there and are_used)
            if there:
                numbers.append(step)
        return numbers

    assert made(10 * DRAFTING_INTERVAL, are_used=False) == [0, 2, *range(2 + DRAFTING_INTERVAL, 160, DRAFTING_INTERVAL)]
    # A lone use, to learn whether they gain anything, is followed by one more try.
    assert drafting.decide(are_there=True, are_used=True)
    assert not drafting.decide(are_there=True, are_used=False)
    assert len(made(DRAFTING_INTERVAL, are_used=False)) == 1
    first, *rest = made(3 * DRAFTING_INTERVAL, are_used=True)
    assert first < DRAFTING_INTERVAL
    assert rest == [*range(first + 1, 3 * DRAFTING_INTERVAL)]


# How many drafts.


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_no_request_gets_more_drafts_than_it_has_whatever_happens(data: st.DataObject) -> None:
    cost = StepCost([(32, False, 0.01), (512, False, data.draw(st.floats(0.01, 1.0))), (512, True, 1.0)])
    controller, again = DraftController(cost), DraftController(cost)
    alive: list[str] = []
    for step in range(data.draw(st.integers(1, 40))):
        for name in data.draw(st.lists(st.sampled_from([*alive, "unknown"]), max_size=2)):
            for each in (controller, again):
                each.remove(name)
            alive = [other for other in alive if other != name]
        for number in range(data.draw(st.integers(0, 3))):
            alive.append(f"{step}.{number}")
            for each in (controller, again):
                each.add(alive[-1], number % 2)
        available = data.draw(st.lists(st.integers(0, 70), min_size=len(alive), max_size=len(alive)))
        candidates = list(zip(alive, available, strict=True))
        base_rows = ROWS * (1 + len(alive))
        drafts = controller.allot(candidates, base_rows, ROWS, len(alive))
        assert drafts == again.allot(candidates, base_rows, ROWS, len(alive))
        assert len(drafts) == len(alive)
        assert all(0 <= allotted <= had for allotted, had in zip(drafts, available, strict=True))
        for name, drafted in zip([*alive, "unknown"], [*drafts, 3], strict=True):
            deepest = data.draw(st.integers(0, drafted))
            accepted = data.draw(st.integers(min(deepest, 1), deepest))
            for each in (controller, again):
                each.observe(name, drafted, accepted, deepest)


def test_a_request_that_was_not_added_is_an_error() -> None:
    controller = DraftController()
    controller.add("a")
    controller.remove("a")
    controller.remove("a")
    with pytest.raises(KeyError, match="a"):
        controller.allot([("a", 3)], ROWS, ROWS, 1)


def test_where_rows_are_free_all_drafts_are_made_and_where_they_are_dear_none() -> None:
    free = simulation.Machine(overhead=0.01, floor=0, per_row=0, sharpness=1, noise=0)
    assert np.mean([Engine(free, [0.5], seed=seed).run(400)[200:].mean() for seed in range(4)]) > 3.8
    dear = simulation.Machine(overhead=0, floor=0, per_row=1e-3, sharpness=1)
    assert Engine(dear, [0.5]).run(400)[200:].mean() < 0.1


def test_how_fast_the_machine_is_changes_nothing() -> None:
    slow = replace(simulation.GPU, overhead=1.0, floor=4.0, per_row=4.0 / 512, noise=0)
    fast = replace(slow, overhead=slow.overhead / 500, floor=slow.floor / 500, per_row=slow.per_row / 500)
    assert (Engine(slow, [0.7] * 8).run(300) == Engine(fast, [0.7] * 8).run(300)).all()


def test_drafts_that_take_more_time_on_the_host_than_they_save_are_not_made() -> None:
    dear = replace(simulation.TINY, noise=0.03)
    cheap = replace(dear, verifying=0.0, drafting=0.0)
    drafted = [
        np.mean(Engine(machine, [0.9] * 8, available=1).run(1500)[500:].sum(axis=1) > 0) for machine in (cheap, dear)
    ]
    assert drafted[0] > 0.5
    assert drafted[1] < 0.1


def test_the_request_that_accepts_more_gets_more_drafts() -> None:
    drafts = Engine(simulation.GPU, [0.2] * 8 + [0.95] * 8).run(600)[300:].mean(axis=0)
    assert drafts[8:].mean() > 3 * drafts[:8].mean()


def test_steps_of_the_others_count_for_what_drafts_delay() -> None:
    def allotted(base_steps: int) -> int:
        engine = Engine(simulation.CPU, [0.9])
        engine.run(300)
        candidates = [(engine.names[0], 4)]
        return sum(engine.controller.allot(candidates, 2 * ROWS, ROWS, base_steps)[0] for _ in range(40))

    assert allotted(base_steps=1) > allotted(base_steps=8)


def test_requests_without_drafts_get_some_now_and_then_in_turn() -> None:
    dear = simulation.Machine(overhead=0, floor=0, per_row=1e-3, sharpness=1)
    drafts = Engine(dear, [0.3] * 16).run(3000)[200:]
    assert 0.0001 < drafts.sum() / drafts.size < 0.01
    assert (drafts.sum(axis=0) > 0).all()


def test_drafts_come_back_when_acceptance_does() -> None:
    engine = Engine(simulation.CPU, [0.1])
    assert engine.run(600)[300:].mean() < 0.1
    engine.chances = [1.0]
    engine.run(4000)
    assert engine.run(300).mean() > 0.5


def test_of_a_drafter_as_many_drafts_are_verified_as_are_worth_their_rows() -> None:
    """Each draft is a row of the target; the drafter makes all of them in any case."""
    target = StepCost([(rows, False, 0.004 + 0.0005 * rows) for rows in (1, 2, 4, 8, 16, 32)])

    def verified(chance: float) -> float:
        rng, controller, drafts = np.random.default_rng(0), DraftController(target), []
        controller.add("a")
        for _ in range(600):
            (number,) = controller.allot([("a", 16)], 1, 1, 1)
            accepted = int((rng.random(number) < chance).cumprod().sum())
            controller.observe("a", number, accepted, accepted)
            drafts.append(number)
        return float(np.mean(drafts[300:]))

    few, some, many = (verified(chance) for chance in (0.2, 0.7, 0.97))
    assert few < 2 < some < 8 < many


# Against every fixed number.

UNSTEADY = ["gpu, noisy", "cpu, noisy", "tiny, drifts"]
PROFILES = ["0.3", "0.85", "0.95", "0.3 or 0.95", "drifting", "jumps"]


@pytest.mark.parametrize("acceptance", PROFILES)
@pytest.mark.parametrize("machine", UNSTEADY)
def test_at_high_load_throughput_stays_that_of_no_drafts(machine: str, acceptance: str) -> None:
    row = simulation.compare(machine, acceptance, batch=64, steps=1000, seed=1)
    assert row.vs_none >= simulation.HIGH_LOAD_BOUND


@pytest.mark.parametrize("acceptance", PROFILES)
@pytest.mark.parametrize("machine", UNSTEADY[:2])
def test_a_single_request_is_nearly_as_fast_as_with_the_best_fixed_number(machine: str, acceptance: str) -> None:
    row = simulation.compare(machine, acceptance, batch=1, steps=3000, seed=1)
    assert row.vs_best >= simulation.SINGLE_BOUND


@pytest.mark.parametrize("acceptance", ["0.7", "0.85"])
@pytest.mark.parametrize("machine", ["tiny, noisy", "tiny, drifts"])
def test_a_request_alone_does_not_pay_for_chance(machine: str, acceptance: str) -> None:
    """Where drafts gain little over none, and a request that is like all others seems better or worse for a while."""
    ratios = [simulation.compare(machine, acceptance, batch=1, steps=3000, seed=seed).vs_best for seed in range(3)]
    assert np.mean(ratios) >= simulation.SINGLE_BOUND


def test_a_machine_that_halves_its_speed_costs_little_more_than_that() -> None:
    for batch in (1, 64):
        assert simulation.compare("cpu, slows", "0.7", batch, steps=2000, seed=1).vs_none >= 0.95


def test_the_table_has_a_cell_for_every_simulation(tmp_path: Path) -> None:
    app = Typer()
    app.command()(simulation.main)
    out = tmp_path / "out.json"
    options = {"--machine": ["gpu"], "--acceptance": ["0.3", "jumps"], "--batch": ["1", "2"], "--steps": ["20"]}
    arguments = [word for option, values in options.items() for value in values for word in (option, value)]
    result = CliRunner().invoke(app, [*arguments, "--processes", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "batch 1" in result.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["acceptance"], row["batch"]) for row in rows] == [("0.3", 1), ("0.3", 2), ("jumps", 1), ("jumps", 2)]


@given(
    seen=st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=10), min_size=1, max_size=4),
    per_row=st.floats(0.0, 0.01),
    of_drafts=st.floats(0.0, 0.01),
)
@settings(deadline=None)
def test_the_drafts_are_those_that_save_most_and_as_many_as_make_the_most_steps_per_second(
    seen: list[list[tuple[int, int]]], per_row: float, of_drafts: float
) -> None:
    timed = [(rows, drafts, 0.01 + per_row * rows + of_drafts * drafts) for rows in (1, 50) for drafts in (False, True)]
    controller, count = DraftController(StepCost(timed)), len(seen)
    names = [str(index) for index in range(count)]
    for name, forwards in zip(names, seen, strict=True):
        controller.add(name)
        for drafted, accepted in forwards:
            controller.allot([(name, 5)], count, 1, count)
            controller.observe(name, drafted, min(drafted, accepted), min(drafted, accepted))
    drafts = controller.allot([(name, 5) for name in names], count, 1, count)
    gains = [controller._requests[name].gains(5) for name in names]
    best_first = sorted((gain for each in gains for gain in each), reverse=True)
    rates = [
        (count + sum(best_first[:number])) / (0.01 + per_row * (count + number) + of_drafts * (number > 0))
        for number in range(len(best_first) + 1)
    ]
    if max(rates) <= rates[0] * (1 + MARGIN):
        assert sum(drafts) <= 2 * count  # none, or a probe
    else:
        assert rates[sum(drafts)] == pytest.approx(max(rates))
        given = sorted((gain for each, n in zip(gains, drafts, strict=True) for gain in each[:n]), reverse=True)
        assert given == pytest.approx(best_first[: sum(drafts)])


def test_what_one_policy_gains_says_nothing_of_another() -> None:
    controller = DraftController(StepCost([(rows, False, 0.005 + 0.005 * rows / ROWS) for rows in (ROWS, 8 * ROWS)]))
    controller.add("static", "static")
    numbers = []
    for _ in range(400):
        (drafted,) = controller.allot([("static", 4)], ROWS, ROWS, 1)
        controller.observe("static", drafted, 0, 0)
        numbers.append(drafted)
    assert np.mean(numbers[200:]) < 0.4
    controller.add("threshold", "threshold")
    # Of a kind that nothing is known of as many drafts are tried as pay if they are good.
    assert controller.allot([("threshold", 4)], ROWS, ROWS, 1)[0] >= 2
