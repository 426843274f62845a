"""The benchmark of step-skipping: its plan, its comparisons, its targets and its tables; that steps can be timed."""

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.engine.harness import bundled, drafting_engine
from tests.engine.runtime.test_golden import options_with
from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import overhead
import step_skipping
import step_skipping_report as report
import workload
from environment import FILE_WIDTH
from gpu_probe import Parts
from in_process import decode
from overhead import Overhead, Step
from record import script_marks
from sheet import Target, target_sheet
from step_skipping_results import (
    Duel,
    Quality,
    Results,
    Speed,
    check_targets,
    make_duel,
    make_qualities,
    make_speeds,
    read_results,
    rival_of,
)
from step_skipping_settings import (
    LOCALLEAP,
    LOW_PRECISION,
    MAX_DRAFTS,
    OVERHEAD_DRAFTS,
    OVERHEAD_VERIFIERS,
    POLICIES,
    STATIC,
    SUBSET,
    Setting,
    make_plan,
)
from step_skipping_settings import THRESHOLD as DYNAMIC
from systems import Pass

from vllm_dllm.options.resolve import resolve
from vllm_dllm.options.schema import DllmConfig, parse_request_options
from vllm_dllm.traits import FamilyTraits


class Graded(workload.Workload):
    """Requests whose first token says whether the answer is right."""

    def accuracy(self, tokens: list[list[int]]) -> float | None:
        return sum(made[0] == 1 for made in tokens) / len(tokens)


def quality(setting: Setting, nfe: int, *, equal: int = 10, accuracy: float = 0.7) -> Quality:
    """Of 10 requests with 20 tokens each; the policy alone takes 100 forwards."""
    return Quality(setting, 10, 200, nfe, 200 / nfe, 100 / nfe, equal, accuracy)


def speed(setting: Setting, concurrency: int, ratio: float) -> Speed:
    return Speed(setting, concurrency, 10, 50 * ratio, ratio, [ratio])


TRAITS = FamilyTraits(family="SDAR", block_length=4, mask_token_id=151669)
AUTO = Setting(DYNAMIC, "freedave", "auto")

RESULTS = Results(
    qualities=[
        quality(Setting(STATIC), 100),
        quality(Setting(STATIC, "freedave", 8), 40),
        quality(Setting(DYNAMIC), 100),
        quality(Setting(DYNAMIC, "spiffy", 3), 80),
        quality(Setting(DYNAMIC, "psd", 3), 80, equal=4, accuracy=0.69),
        quality(Setting(DYNAMIC, "psd", 7), 75, equal=3, accuracy=0.71),
        quality(SUBSET, 60, equal=9),
    ],
    speeds=[
        speed(Setting(DYNAMIC), 1, 1.0),
        speed(Setting(DYNAMIC, "freedave", 3), 1, 1.4),
        speed(Setting(DYNAMIC, "freedave", 8), 1, 1.5),
        speed(Setting(DYNAMIC, "spiffy", 3), 1, 1.9),
        speed(AUTO, 1, 1.45),
        speed(AUTO, 16, 0.5),
        speed(SUBSET, 1, 9.0),
        speed(AUTO, 64, 0.96),
    ],
    duels=[
        Duel(AUTO, Setting(DYNAMIC, "freedave", 8), 1, 10, [0.5, 0.96, 1.2]),
        Duel(AUTO, Setting(DYNAMIC), 64, 10, [0.96]),
    ],
    low_precision=[quality(Setting(DYNAMIC), 100), quality(Setting(DYNAMIC, "freedave", 8), 40, equal=8)],
    alone_equal={DYNAMIC: 9},
    overheads=[Overhead("freedave", 3, 2.0, 0.01, 0.06, 5), Overhead("psd", 3, 2.0, 0.01, 0.07, 5)],
)


def reached(targets: list[Target]) -> dict[tuple[str, str], bool]:
    return {(target.name, target.where): target.reached for target in targets}


def test_a_setting_says_what_the_request_is_to_ask_for() -> None:
    assert Setting(STATIC).extra_args() == {
        "dllm_policy": "static",
        "dllm_tokens_per_step": 1,
        "dllm_verify": "none",
    }
    assert Setting(LOCALLEAP, "psd", 5).extra_args() == {
        "dllm_policy": "localleap",
        "dllm_verify": "psd",
        "dllm_drafts": 5,
    }
    assert SUBSET.extra_args()["dllm_match"] == "subset"


@pytest.mark.parametrize("quick", [True, False])
def test_every_planned_setting_is_one_the_engine_admits(quick: bool) -> None:
    plan = make_plan(list(POLICIES), quick=quick, requests=10, repetitions=1)
    options = DllmConfig(max_drafts=MAX_DRAFTS)
    for setting in {*plan.settings, *LOW_PRECISION}:
        resolved = resolve(parse_request_options(setting.extra_args()), options, TRAITS, block_length=16)
        assert resolved.verify == setting.verify
        assert resolved.auto_drafts == (setting.drafts == "auto")
    for verify, drafts in OVERHEAD_VERIFIERS.items():
        request = parse_request_options(Setting(DYNAMIC, verify, drafts).extra_args())
        assert resolve(request, options, TRAITS, block_length=16).num_drafts == OVERHEAD_DRAFTS


def test_every_planned_setting_is_measured_beside_its_policy_alone() -> None:
    plan = make_plan(list(POLICIES), quick=False, requests=10, repetitions=1)
    for settings in (plan.settings, LOW_PRECISION, *plan.timed.values()):
        assert len(settings) == len(set(settings))
        assert all(setting.alone in settings for setting in settings)
    assert {row.drafts for row in plan.timed[64]} >= {0, 8, "auto"}


def test_requests_are_compared_with_those_of_the_same_policy_without_drafts() -> None:
    alone, drafted = Setting(DYNAMIC), Setting(DYNAMIC, "spiffy", 3)
    passes = {
        Setting(STATIC): Pass(1.0, 0.1, [[1, 9], [1, 9]], [8, 8]),
        alone: Pass(1.0, 0.1, [[1, 2], [1, 3]], [2, 4]),
        drafted: Pass(1.0, 0.1, [[1, 2], [0, 3]], [1, 2]),
    }
    row = make_qualities(passes, Graded("tiny", Path(), 4, 63, [], []))[2]
    assert (row.equal, row.requests, row.nfe, row.tokens) == (1, 2, 3, 4)
    assert (row.forwards_saved, row.accuracy) == (2.0, 0.5)


def test_speeds_are_compared_within_a_repetition() -> None:
    """The machine is slow in the second one, for both."""
    alone, drafted = Setting(STATIC), Setting(STATIC, "psd", 3)
    passes = {
        alone: [Pass(seconds, 0.1, [[1] * 10], [10]) for seconds in (1.0, 10.0, 1.0)],
        drafted: [Pass(seconds, 0.1, [[1] * 10], [5]) for seconds in (0.5, 5.0, 1.0)],
    }
    row = make_speeds(passes, 16)[1]
    assert row.ratios == [2.0, 2.0, 1.0]
    assert (row.ratio, row.tokens_per_second, row.concurrency) == (2.0, 10.0, 16)


def test_auto_is_compared_with_the_fastest_fixed_number_of_its_verifier_or_with_no_drafts() -> None:
    assert rival_of(AUTO, 1, RESULTS.speeds) == Setting(DYNAMIC, "freedave", 8)
    assert rival_of(AUTO, 64, RESULTS.speeds) == Setting(DYNAMIC)


def test_passes_are_compared_within_a_turn() -> None:
    """The machine is slow in the second one, for both."""
    fast, slow = ([Pass(seconds, 0.1, [[1] * 10], [10]) for seconds in each] for each in ((1.0, 10.0), (2.0, 30.0)))
    duel = make_duel(AUTO, AUTO.alone, 64, list(zip(fast, slow, strict=True)))
    assert (duel.ratios, duel.ratio, duel.requests) == ([2.0, 3.0], 2.5, 1)
    assert duel.quartiles == (2.25, 2.75)
    assert replace(duel, ratios=[2.0]).quartiles == (2.0, 2.0)


def test_a_result_can_be_read_again() -> None:
    assert read_results(json.loads(json.dumps(asdict(RESULTS)))) == RESULTS


def test_kept_results_make_the_tables_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"date": "2026-01-02T03:04", "cpu": "a processor", "cores": 2}
    kept = {"environments": dict.fromkeys(step_skipping.Part, environment), "plans": {}, "results": asdict(RESULTS)}
    file, page = tmp_path / step_skipping.RESULT, tmp_path / "page.md"
    file.write_text(json.dumps(kept))
    page.write_text("\n".join(script_marks("step_skipping.py")))
    monkeypatch.setattr(step_skipping, "begin", lambda: (Console(file=StringIO()), {}))
    arguments = ["--tables", "--out", str(tmp_path), "--docs", str(page)]
    done = CliRunner().invoke(step_skipping.app, arguments)
    assert done.exit_code == 0, done.output
    assert "Measured 2026-01-02 03:04, a processor, 2 cores.\n\n**Targets**" in page.read_text()
    assert f"]({step_skipping.PICTURE})" in page.read_text()
    assert json.loads(file.read_text()) == kept
    file.unlink()
    assert (
        "holds no step_skipping.json" in CliRunner(env={"COLUMNS": "300"}).invoke(step_skipping.app, arguments).output
    )


def test_step_skipping_targets_say_whether_they_are_reached() -> None:
    threshold = "threshold 0.9"
    where = "with 3 drafts, 100 M parameters, 1 concurrent"
    assert reached(check_targets(RESULTS)) == {
        ("tokens per forward over static, tokens equal, at least", "static, k=1, freedave d=8"): True,
        ("times fewer forwards than the policy alone, tokens equal, at least", f"{threshold}, spiffy D*=3"): True,
        (
            "requests equal to the policy alone, exact match, at least",
            "2 settings; worst: static, k=1, freedave d=8",
        ): True,
        ("tokens per forward over the policy alone, at least", f"{threshold}, psd d=3"): True,
        ("loss of accuracy against the policy alone, at most", f"{threshold}, psd d=3"): True,
        ("tokens per forward over d=3, at most (flat)", f"{threshold}, psd d=7"): True,
        ("drafting and acceptance over a forward, below", f"freedave {where}"): True,
        ("drafting and acceptance over a forward, below", f"psd {where}"): False,
        ("throughput over the best fixed number (8), at least", f"{threshold}, freedave d=auto, 1 concurrent"): True,
        ("throughput over no drafts, at least", f"{threshold}, freedave d=auto, 64 concurrent"): False,
    }


def test_fewer_forwards_with_other_tokens_reach_no_target() -> None:
    wrong = [replace(row, equal=9) if row.setting.lossless else row for row in RESULTS.qualities]
    targets = [t for t in check_targets(replace(RESULTS, qualities=wrong)) if "equal" in t.name]
    assert len(targets) == 3
    assert not any(target.reached for target in targets)


def test_psd_that_loses_accuracy_or_goes_on_growing_reaches_no_target() -> None:
    changed = [
        replace(row, accuracy=0.68) if row.setting.drafts == 3 else replace(row, tokens_per_forward=5.0)
        for row in RESULTS.qualities
    ]
    misses = {t.name for t in check_targets(replace(RESULTS, qualities=changed)) if not t.reached}
    assert {
        "loss of accuracy against the policy alone, at most",
        "tokens per forward over d=3, at most (flat)",
    } <= misses


def test_published_gains_are_those_that_the_papers_print() -> None:
    freedave = report.make_freedave_sheet(RESULTS).markdown()
    for gain in ("30.0 (1.30×) | 2.63 (2.89×)", "16.4 (2.25×) | 0.67 (2.58×)", "6.9 (2.03×) | 0.28 (2.33×)"):
        assert gain in freedave
    spiffy = report.make_spiffy_sheet(RESULTS).markdown()
    assert "8.25× (6.28×) 0.88" in spiffy
    assert "1.23-1.33×" in spiffy
    assert "9.6%" in report.make_overhead_sheet(RESULTS.overheads).markdown()


def test_step_skipping_tables_show_what_was_measured() -> None:
    grid = report.make_grid(RESULTS).markdown()
    assert "| threshold 0.9 | spiffy D*=3 | 70.0% | 80 | 2.50 | 1.25× | 10/10 | 1.90× |  |  |" in grid
    assert "freedave d=8, subset" in grid
    assert "| 2.00, 70.0% |  | 2.50, 69.0% |  | 2.67, 71.0% |" in report.make_psd_sheet(RESULTS).markdown()
    load = report.make_load_sheet(RESULTS).markdown()
    assert "| threshold 0.9 | freedave d=auto | 1.45× | 0.50× | 0.96× |" in load
    assert "subset" not in load
    assert "spiffy" not in load
    duels = report.make_duel_sheet(RESULTS.duels).markdown()
    assert "| threshold 0.9 | freedave d=auto | 1 | freedave d=8 | 3 | 0.960 | 0.730 to 1.080 |" in duels
    low_precision = report.make_low_precision_sheet(RESULTS).markdown()
    assert "| none, one at a time | 9/10 |" in low_precision
    assert "| freedave d=8 | 8/10 |" in low_precision
    console = Console(width=FILE_WIDTH, file=StringIO(), record=True)
    console.print(target_sheet(check_targets(RESULTS)).rich())
    assert console.export_text().count("miss") == 2


def test_overhead_is_what_steps_with_all_drafts_add_over_a_forward_without() -> None:
    alone = [Step(4, Parts(0.0, 1.0, 100.0, 2.0)), Step(8, Parts(0.0, 9.0, 900.0, 99.0))]
    drafted = [Step(16, Parts(0.0, 2.0, 300.0, 10.0)), Step(8, Parts(0.0, 9.0, 9.0, 9.0))]
    measured = overhead.compare("psd", 3, alone, drafted, block_length=4)
    assert measured == Overhead("psd", 3, forward=3.0, plan=0.01, sampler=0.08, steps=1)
    assert measured.share == pytest.approx(0.09)
    with pytest.raises(ValueError, match="psd: no step with 3 drafts"):
        overhead.compare("psd", 3, alone, alone, block_length=4)


def test_the_parts_of_steps_are_timed_with_drafts_and_without() -> None:
    golden = bundled("sdar")
    llm = drafting_engine(golden, options_with(golden, 8))
    requests = workload.random_prompts("random", golden.checkpoint, 1, 32, 8).requests
    for setting in (Setting(DYNAMIC), Setting(DYNAMIC, "freedave", 4)):
        steps = overhead.timed_steps(llm, partial(decode, llm, setting, requests, [], 1))
        assert {step.rows for step in steps} >= ({8} if setting == setting.alone else {32})
        assert all(min(step.parts.plan, step.parts.forward, step.parts.sampler) > 0 for step in steps)


def test_the_pareto_front_holds_what_nothing_beats_in_both() -> None:
    points = [(1.0, 0.7), (2.0, 0.7), (3.0, 0.6), (2.5, 0.5), (4.0, 0.1), (1.0, 0.8)]
    rows = [replace(quality(Setting(STATIC), 100), tokens_per_forward=x, accuracy=y) for x, y in points]
    front = [(row.tokens_per_forward, row.accuracy) for row in report.pareto_front(rows)]
    assert front == [(1.0, 0.8), (2.0, 0.7), (3.0, 0.6), (4.0, 0.1)]


def test_the_pareto_plot_is_small(tmp_path: Path) -> None:
    report.plot_pareto(RESULTS.qualities, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plot.png").stat().st_size < 150_000


def test_step_skipping_refuses_an_unknown_policy_before_it_starts() -> None:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(step_skipping.app, ["--policy", "best"])
    assert result.exit_code == 2
    assert "--policy: best: not one of static, k=1, threshold 0.9" in result.output
