"""What ``drafts="auto"`` learns and decides, alone and against every fixed number of drafts in the simulation."""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from tests.paths import BENCHMARKS
from tests.profiles import examples

sys.path.insert(0, str(BENCHMARKS))

import auto_drafts as simulation

from vllm_dllm.decoding import adaptive as auto_drafts
from vllm_dllm.decoding.adaptive import (
    CONTROL_SHARE,
    DRAFTING_INTERVAL,
    ENGINE_WINDOW,
    MARGIN,
    PROBE_SHARE,
    DraftController,
    DraftGain,
    Drafting,
    StepCost,
)

ROWS = 32


def learned_cost(steps: list[tuple[int, float]]) -> StepCost:
    cost = StepCost()
    for rows, seconds in steps:
        cost.observe(rows, seconds)
    cost.fit()
    return cost


def seconds_of(cost: StepCost, counts: Iterable[float]) -> list[float]:
    """Of steps of so many rows each."""
    return [cost.seconds(rows) for rows in counts]


def learned_gain(forwards: list[tuple[int, int, int]]) -> DraftGain:
    gain = DraftGain()
    for drafted, accepted, deepest in forwards:
        gain.observe(drafted, accepted, deepest)
    gain.fit(max(drafted for drafted, _, _ in forwards))
    return gain


class Engine:
    """A controller with the machine and the requests around it. Of all requests ``available`` drafts are made."""

    def __init__(self, machine: simulation.Machine, chances: list[float], available: int = 4, seed: int = 0):
        self.controller = DraftController()
        self.drafting, self.was_drafting = Drafting(), False
        self.machine = machine
        self.chances = chances
        self.names = [f"request {i}" for i in range(len(chances))]
        self.available = available
        self.rng = np.random.default_rng(seed)
        for name in self.names:
            self.controller.add(name)

    def step(self) -> list[int]:
        base = ROWS * len(self.names)
        there = self.available if self.was_drafting else 0
        drafts = self.controller.allot([(name, there) for name in self.names], base, ROWS)
        rows = base + ROWS * sum(drafts)
        noise = np.exp(self.machine.noise * self.rng.standard_normal())
        self.was_drafting = self.drafting.decide(there > 0, any(drafts))
        does = (any(drafts), self.was_drafting)
        self.controller.observe_step(rows, self.machine.seconds(rows, *does) * noise, *does)
        for name, drafted, chance in zip(self.names, drafts, self.chances, strict=True):
            accepted = int((self.rng.random(drafted) < chance).cumprod().sum())
            self.controller.observe(name, drafted, accepted, accepted)
        return drafts

    def run(self, steps: int) -> np.ndarray:
        """[steps, requests]: drafts."""
        return np.array([self.step() for _ in range(steps)])


def test_steps_of_an_accelerator_are_flat_up_to_the_knee_and_linear_from_there() -> None:
    counts = (32, 64, 128, 256, 512, 1024, 2048)
    cost = learned_cost([(rows, 0.01 * max(1, rows / 512)) for rows in counts for _ in range(5)])
    assert seconds_of(cost, [48, 300, 512, 1500, 4096]) == pytest.approx([0.01, 0.01, 0.01, 0.0293, 0.08], rel=0.01)
    assert cost.largest == 2048


def test_two_row_counts_suffice_for_a_machine_that_is_linear() -> None:
    cost = learned_cost([(rows, 0.002 + 1e-4 * rows) for rows in (64, 96) for _ in range(5)])
    assert seconds_of(cost, [32, 320]) == pytest.approx([0.0052, 0.034])


def test_noise_around_a_flat_cost_makes_no_row_cost_anything_much() -> None:
    rng = np.random.default_rng(0)
    counts = [32 * blocks for blocks in range(1, 10)]
    cost = learned_cost([(rows, 0.01 * np.exp(0.2 * rng.standard_normal())) for _ in range(40) for rows in counts])
    seconds = seconds_of(cost, counts)
    assert seconds == pytest.approx([0.01] * len(counts), rel=0.1)


@pytest.mark.parametrize(
    "kinds",
    [
        [(False, False), (False, True), (True, False), (True, True)],
        [(False, False), (False, True), (True, True)],
        [(False, False), (True, True)],
    ],
)
def test_what_drafts_take_beside_their_rows_is_told_from_what_rows_take(kinds: list[tuple[bool, bool]]) -> None:
    cost = StepCost()
    rng = np.random.default_rng(0)
    for _ in range(40):
        for rows in (64, 96, 128, 192):
            for verifies, drafts in kinds:
                seconds = 0.002 + 1e-4 * rows + 0.002 * verifies + 0.003 * drafts
                cost.observe(rows, seconds * np.exp(0.1 * rng.standard_normal()), verifies, drafts)
    for _ in range(4):
        cost.fit()
    assert seconds_of(cost, [64, 160]) == pytest.approx([0.0084, 0.018], rel=0.05)
    assert cost.of_verifying + cost.of_drafting == pytest.approx(0.005, rel=0.15)
    if len(kinds) > 2:
        assert cost.of_drafting == pytest.approx(0.003, rel=0.15)


def test_where_steps_with_drafts_have_more_rows_it_is_the_rows_that_take_the_time() -> None:
    cost = StepCost()
    for _ in range(40):
        cost.observe(32, 0.0052)
        cost.observe(64, 0.0084, verifies=True, drafts=True)
    cost.fit()
    assert [cost.of_verifying, cost.of_drafting] == pytest.approx([0.0, 0.0], abs=1e-5)
    assert seconds_of(cost, [64]) == pytest.approx([0.0084], rel=0.01)


def test_drafts_that_take_more_time_on_the_host_than_they_save_are_not_made() -> None:
    dear = replace(simulation.TINY, noise=0.03)
    cheap = replace(dear, verifying=0.0, drafting=0.0)
    drafted = [
        np.mean(Engine(machine, [0.9] * 8, available=1).run(1500)[500:].sum(axis=1) > 0) for machine in (cheap, dear)
    ]
    assert drafted[0] > 0.5
    assert drafted[1] < 0.1


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


def test_drafts_are_charged_for_every_step_that_makes_some() -> None:
    """Also for those that find no masks left, of which blocks that end early have many."""

    def share_drafted(in_vain: int) -> float:
        controller = DraftController()
        controller.add("a")
        steps = []
        for number in range(600):
            is_usable = number % (1 + in_vain) == 0
            (drafts,) = controller.allot([("a", 1 if is_usable else 0)], ROWS, ROWS)
            controller.observe_step(ROWS * (1 + drafts), 0.005 + 0.0015, bool(drafts), True)
            if number % 7 == 0:
                controller.observe_step(ROWS, 0.005)
            controller.observe("a", drafts, number % 2 * drafts)
            if is_usable:
                steps.append(drafts)
        return float(np.mean(steps[len(steps) // 2 :]))

    assert share_drafted(in_vain=0) > 0.9
    assert share_drafted(in_vain=3) < 0.5


def test_drafting_of_others_while_a_request_cannot_have_any_is_not_charged_to_it() -> None:
    controller = DraftController()
    controller.add("a")

    def step(available: int) -> int:
        (drafts,) = controller.allot([("a", available)], ROWS, ROWS)
        controller.observe_step(ROWS * (1 + drafts), 0.0055, bool(drafts), True)
        controller.observe("a", drafts, drafts)
        return drafts

    for number in range(200):
        step(1)
        if number % 7 == 0:
            controller.observe_step(ROWS, 0.005)
            step(0)
    for _ in range(1000):
        step(0)
    assert sum(step(1) for _ in range(20)) >= 18


def test_steps_that_were_seen_at_another_pace_are_compared_at_one() -> None:
    cost = StepCost()
    # A machine that many share: half as fast while steps of both kinds come, then only small ones.
    steps = [(rows, 2.0) for _ in range(200) for rows in (16, 64)] + [(16, 1.0)] * 300
    for number, (rows, pace) in enumerate(steps):
        cost.observe(rows, pace * (0.004 + 1e-4 * rows))
        if number % 8 == 0:
            cost.fit()
    small, large = seconds_of(cost, [16, 64])
    assert large / small == pytest.approx(0.0104 / 0.0056, rel=0.15)


def test_a_step_that_something_held_up_changes_nothing() -> None:
    steps = [(rows, 0.002 + 1e-4 * rows) for rows in (64, 96) for _ in range(5)]
    held_up = learned_cost([(64, 9.0), *steps, (96, 9.0), (700, 30.0)])
    assert seconds_of(held_up, [32, 96, 320]) == pytest.approx(seconds_of(learned_cost(steps), [32, 96, 320]))


def test_hours_at_one_load_do_not_wash_out_what_another_costs() -> None:
    high = [(2048, 0.2) for _ in range(20)]
    low = [(32 * (1 + n % 4), 0.01) for n in range(5000)]
    assert seconds_of(learned_cost(high + low), [2048]) == pytest.approx([0.2], rel=0.01)


def test_a_machine_that_became_slower_is_believed() -> None:
    before = [(32 * (1 + n % 4), 0.01) for n in range(1000)]
    after = [(32 * (1 + n % 4), 0.02) for n in range(300)]
    assert seconds_of(learned_cost(before + after), [32, 128]) == pytest.approx([0.02, 0.02])


@given(
    steps=st.lists(st.tuples(st.integers(1, 20_000), st.floats(1e-6, 100.0)), max_size=60).map(
        # Row counts that lie close together, and enough of each to count.
        lambda steps: [(rows + offset, seconds) for rows, seconds in steps for offset in (0, 1, 1, 0)]
    )
)
@examples(200)
def test_whatever_is_observed_more_rows_never_take_less_time_nor_ever_less_per_row(
    steps: list[tuple[int, float]],
) -> None:
    seconds = np.array(seconds_of(learned_cost(steps), np.linspace(1, 30_000, 500)))
    assert np.isfinite(seconds).all()
    assert (seconds > 0).all()
    slopes = np.diff(seconds)
    tolerance = 1e-6 * seconds.max()
    assert (slopes >= -tolerance).all()
    assert (np.diff(slopes) >= -tolerance).all()


def test_nothing_observed_makes_drafts_worth_trying() -> None:
    gain = DraftGain()
    gain.fit(3)
    assert gain.of_draft == pytest.approx([0.8, 0.64, 0.512])
    assert len(set(seconds_of(StepCost(), [32, 3200]))) == 1


def test_a_draft_gains_what_was_accepted_of_it() -> None:
    gain = learned_gain([(3, 3, 3)] * 250 + [(3, 1, 1)] * 250 + [(3, 0, 0)] * 500)
    assert gain.of_draft == pytest.approx([0.5, 0.25, 0.25], abs=0.02)
    assert gain.total == pytest.approx([0, 0.5, 0.75, 1.0], abs=0.05)


def test_forwards_with_few_drafts_say_nothing_of_later_drafts() -> None:
    gain = learned_gain([(2, 1, 1)] * 200 + [(1, 1, 1)] * 2000)
    assert gain.of_draft == pytest.approx([1.0, 0.0], abs=0.05)


def test_drafts_that_only_gain_together_share_the_gain() -> None:
    gain = learned_gain([(2, 1, 2)] * 800 + [(2, 0, 0)] * 200)
    assert gain.of_draft == pytest.approx([0.4, 0.4], abs=0.02)
    untold = learned_gain([(2, 1, 1)] * 800 + [(2, 0, 0)] * 200)
    assert untold.of_draft[0] > 0.75


def test_the_engine_forgets() -> None:
    gain = learned_gain([(1, 1, 1)] * 5 * ENGINE_WINDOW)
    for _ in range(3 * ENGINE_WINDOW):
        gain.observe(1, 0, 0)
    gain.fit(1)
    assert gain.of_draft[0] < 0.1


forwards = st.integers(1, 12).flatmap(
    lambda drafted: st.integers(0, drafted).flatmap(
        lambda deepest: st.tuples(st.just(drafted), st.integers(min(deepest, 1), deepest), st.just(deepest))
    )
)


def test_requests_that_are_alike_count_with_the_average_and_others_with_what_they_did() -> None:
    rng = np.random.default_rng(0)

    def prior(factors: list[float]) -> float:
        """After a while with requests that skip so many times the steps of the average."""
        gain = learned_gain([(4, 2, 2)] * 200)
        for request in range(60):
            steps = rng.poisson(gain.total[4] * factors[request % len(factors)], 64)
            gain.observe_request(steps.sum(), gain.total[4] * len(steps))
        return gain.prior

    assert prior([1.0]) > 50
    assert prior([0.3, 1.7]) < 5
    assert 5 < prior([0.7, 1.3]) < 50


@pytest.mark.parametrize("acceptance", ["0.7", "0.85"])
@pytest.mark.parametrize("machine", ["tiny, noisy", "tiny, drifts"])
def test_a_request_alone_does_not_pay_for_chance(machine: str, acceptance: str) -> None:
    """Where drafts gain little over none, and a request that is like all others seems better or worse for a while."""
    ratios = [simulation.compare(machine, acceptance, batch=1, steps=3000, seed=seed).vs_best for seed in range(3)]
    assert np.mean(ratios) >= simulation.SINGLE_BOUND


@given(seen=st.lists(forwards, min_size=1, max_size=80))
def test_no_draft_gains_more_than_a_step_or_more_than_the_draft_before(seen: list[tuple[int, int, int]]) -> None:
    gain = np.array(learned_gain(seen).of_draft)
    assert (gain > 0).all()
    assert (gain <= 1).all()
    assert (np.diff(gain) <= 1e-12).all()


@given(data=st.data())
@examples(50)
def test_no_request_gets_more_drafts_than_it_has_whatever_happens(data: st.DataObject) -> None:
    controller, again = DraftController(), DraftController()
    alive: list[str] = []
    for step in range(data.draw(st.integers(1, 40))):
        for name in data.draw(st.lists(st.sampled_from([*alive, "unknown"]), max_size=2)):
            for each in (controller, again):
                each.remove(name)
            alive = [other for other in alive if other != name]
        for number in range(data.draw(st.integers(0, 3))):
            alive.append(f"{step}.{number}")
            for each in (controller, again):
                each.add(alive[-1])
        available = data.draw(st.lists(st.integers(0, 70), min_size=len(alive), max_size=len(alive)))
        candidates = list(zip(alive, available, strict=True))
        base_rows = ROWS * (1 + len(alive))
        drafts = controller.allot(candidates, base_rows, ROWS)
        assert drafts == again.allot(candidates, base_rows, ROWS)
        assert len(drafts) == len(alive)
        assert all(0 <= allotted <= had for allotted, had in zip(drafts, available, strict=True))
        seconds = data.draw(st.floats(0, 10))
        accepted = [data.draw(st.integers(0, allotted)) for allotted in drafts]
        for each in (controller, again):
            each.observe_step(base_rows + ROWS * sum(drafts), seconds)
            for name, drafted, passed in zip([*alive, "unknown"], [*drafts, 3], [*accepted, 2], strict=True):
                each.observe(name, drafted, passed)


def test_a_request_that_was_not_added_is_an_error() -> None:
    controller = DraftController()
    controller.add("a")
    controller.remove("a")
    controller.remove("a")
    with pytest.raises(KeyError, match="a"):
        controller.allot([("a", 3)], ROWS, ROWS)


def test_where_rows_are_free_all_drafts_are_made_and_where_they_are_dear_none() -> None:
    free = simulation.Machine(overhead=0.01, floor=0, per_row=0, sharpness=1)
    assert np.mean([Engine(free, [0.5], seed=seed).run(400)[200:].mean() for seed in range(4)]) > 3.8
    dear = simulation.Machine(overhead=0, floor=0, per_row=1e-3, sharpness=1)
    assert Engine(dear, [0.5]).run(400)[200:].mean() < 0.1


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


def test_probes_of_requests_without_drafts_cost_about_a_hundredth_of_all_rows() -> None:
    dear = simulation.Machine(overhead=0, floor=0, per_row=1e-3, sharpness=1)
    drafts = Engine(dear, [0.3] * 16).run(2000)[200:]
    share = drafts.sum() / (len(drafts) * 16)
    assert PROBE_SHARE / 2 < share < 1.2 * PROBE_SHARE
    # In turn: nobody is left out.
    assert (drafts.sum(axis=0) > 0).all()


def test_steps_without_drafts_to_learn_their_cost_are_rare_where_drafts_gain_much() -> None:
    free = simulation.Machine(overhead=0.01, floor=0, per_row=0, sharpness=1)
    drafts = Engine(free, [0.9]).run(1200)[200:]
    assert 0 < (drafts == 0).mean() < 2 * CONTROL_SHARE


def test_drafts_come_back_when_acceptance_does() -> None:
    engine = Engine(simulation.CPU, [0.1])
    assert engine.run(600)[300:].mean() < 0.1
    engine.chances = [1.0]
    engine.run(8000)
    assert engine.run(300).mean() > 0.5


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


def test_steps_with_more_drafts_than_pay_are_tried_now_and_then_and_show_what_rows_take() -> None:
    # Many rows take less than in proportion, which steps with few cannot show.
    class Concave(simulation.Machine):
        def seconds(self, rows: int, verifies: bool = False, drafts: bool = False) -> float:
            return 3.5e-3 + 1.5e-3 * (rows / ROWS) ** 0.75

    machine = Concave(overhead=0, floor=0, per_row=0, sharpness=1)
    with mock.patch.object(auto_drafts, "STRETCH_SHARE", 0.0):
        never = Engine(machine, [0.8], available=8).run(1500)[750:]
    tried = Engine(machine, [0.8], available=8).run(1500)[750:]
    assert never.mean() < tried.mean()
    # Of steps with drafts, most have the number that pays.
    usual = np.bincount(tried[tried > 0]).argmax()
    assert 0.002 < (tried > usual + 1).mean() < 0.1


@given(
    chances=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6),
    available=st.integers(1, 5),
    costs=st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 2.0)), min_size=1, max_size=6),
    of_drafts=st.floats(0.0, 1.0),
)
def test_no_other_number_of_the_most_promising_drafts_makes_more_steps_per_second(
    chances: list[float], available: int, costs: list[tuple[int, float]], of_drafts: float
) -> None:
    controller = DraftController()
    names = [str(index) for index in range(len(chances))]
    for name, chance in zip(names, chances, strict=True):
        controller.add(name, kind=name)
        for _ in range(200):
            controller.observe(name, available, round(chance * available))
    # Of 0, 1, 2, ... rows, each adding at least what the one before did. A draft is one row.
    slopes = sorted(slope for rows, slope in costs for _ in range(rows))
    seconds = np.cumsum([1.0, *slopes, *([slopes[-1]] * 200)]).tolist()
    with mock.patch.multiple(StepCost, fit=mock.DEFAULT, seconds=lambda _, rows: seconds[int(rows)]):
        controller._cost.largest, controller._cost.of_verifying = 1e6, of_drafts
        drafts = controller.allot([(name, available) for name in names], len(names), 1)
        gains = [[controller._requests[name].gain_of(k) for k in range(available)] for name in names]
        best_first = sorted((gain for each in gains for gain in each), reverse=True)
        rates = [
            (len(names) + sum(best_first[:count])) / (seconds[len(names) + count] + of_drafts * (count > 0))
            for count in range(len(best_first) + 1)
        ]
        chosen = sum(drafts)
    if max(rates) * (1 - MARGIN) <= rates[0]:
        assert chosen == 0
    else:
        assert rates[chosen] == pytest.approx(max(rates))
        given = sorted((gain for each, n in zip(gains, drafts, strict=True) for gain in each[:n]), reverse=True)
        assert given == pytest.approx(best_first[:chosen])


def test_what_one_policy_gains_says_nothing_of_another() -> None:
    controller = DraftController()
    controller.add("static", "static")
    numbers = []
    for _ in range(400):
        (drafted,) = controller.allot([("static", 4)], ROWS, ROWS)
        controller.observe_step(ROWS * (1 + drafted), 0.005 + 0.005 * (1 + drafted))
        controller.observe("static", drafted, 0)
        numbers.append(drafted)
    assert np.mean(numbers[200:]) < 0.1
    controller.add("threshold", "threshold")
    # The first decision of a kind that nothing is known of is to try, as many as pay if they are good.
    assert controller.allot([("threshold", 4)], ROWS, ROWS) == [2]
