"""The benchmark's own parts: its baseline, its prompts, its comparisons and its tables. No timings."""

import json
import sys
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner

from tests.paths import BENCHMARKS, BUNDLED, GOLDEN

sys.path.insert(0, str(BENCHMARKS))

import deer_report
import engine
import hf_loop
import overhead
import step_skipping
import step_skipping_report as report
import workload
from engine import Execution, Measurement, ModelName, Target
from overhead import Overhead, Step
from step_skipping_report import LOCALLEAP, STATIC, Duel, Quality, Results, Setting, Speed
from systems import Job, Measured, Pass, Policy, Request, Run, System, repeat

from tests.reference.golden import Case, golden_or_skip, load
from vllm_dllm.options.resolve import resolve
from vllm_dllm.options.schema import DllmConfig, parse_request_options
from vllm_dllm.traits import FamilyTraits

THRESHOLD = Policy("threshold 0.9", 0.9)

SMALL = {
    **workload.RANDOM_MODEL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "mask_token_id": 63,
    "block_size": 4,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    workload.write_random_checkpoint(folder, SMALL)
    return folder


def prompts(tokens: list[list[int]]) -> workload.Workload:
    """Prompts of 5 tokens, blocks of 4, as many as there are lists of tokens."""
    return workload.Workload(
        model="tiny",
        checkpoint=Path(),
        block_length=4,
        mask_token_id=63,
        stop_token_ids=[],
        requests=[Request([1, 2, 3, 4, 5], 7) for _ in tokens],
    )


def measurement(
    system: System, policy: Policy | None, concurrency: int, seconds: float, step: float, nfe: int = 7
) -> Measurement:
    """Two requests of 7 tokens each."""
    return Measurement(
        model=ModelName.TINY,
        system=system,
        execution=Execution.EAGER if system == System.HF_LOOP else Execution.COMPILED,
        run=Run(policy, concurrency),
        measured=Measured([seconds, seconds, 9 * seconds], [step] * 3, [[7] * 7, [8] * 7], [nfe, nfe]),
    )


MEASUREMENTS = [
    measurement(System.HF_LOOP, engine.ONE_TOKEN_PER_STEP, 1, seconds=6.0, step=0.3, nfe=9),
    measurement(System.HF_LOOP, THRESHOLD, 1, seconds=4.0, step=0.3, nfe=4),
    measurement(System.DLLM, engine.ONE_TOKEN_PER_STEP, 1, seconds=3.0, step=0.3),
    measurement(System.DLLM, engine.ONE_TOKEN_PER_STEP, 16, seconds=1.0, step=0.5),
    measurement(System.DLLM, THRESHOLD, 16, seconds=1.0, step=0.5, nfe=3),
    measurement(System.AR, None, 1, seconds=2.0, step=0.2),
    measurement(System.AR_PLUGIN, None, 1, seconds=2.0, step=0.2),
]


def rows() -> list[engine.Row]:
    return engine.make_rows(MEASUREMENTS, prompts([[0], [0]]))


def _official_cases() -> list[Case]:
    """Cases of SDAR's own script with a constant quota, which is what the loop implements."""
    return [
        case
        for case in golden_or_skip(load, "sdar").cases
        if case.name.startswith("gen-")
        and case.options.policy in ("static", "threshold")
        and case.options.block_length % (case.options.denoising_steps or 1) == 0
    ]


def test_the_baseline_makes_the_tokens_and_the_forwards_of_the_official_script(tmp_path: Path) -> None:
    golden = golden_or_skip(load, "sdar")
    workload.write_backbone(golden.checkpoint, tmp_path)
    model = hf_loop.load(tmp_path, "float32")
    cases = _official_cases()
    assert cases or GOLDEN != BUNDLED
    for case in cases:
        options = case.options
        steps = options.denoising_steps or options.block_length
        decoded = hf_loop.generate(
            model,
            case.prompt,
            case.max_new_tokens,
            block_length=options.block_length,
            mask_token_id=options.mask_id,
            stop_token_ids=options.stop_ids,
            threshold=options.threshold if options.policy == "threshold" else None,
            quota=options.block_length // steps,
        )
        assert decoded.tokens == case.tokens, case.name
        assert decoded.denoising_forwards == case.nfe, case.name


def test_a_block_costs_the_baseline_one_forward_more_than_it_denoises(checkpoint: Path, tmp_path: Path) -> None:
    workload.write_backbone(checkpoint, tmp_path)
    decoded = hf_loop.generate(
        hf_loop.load(tmp_path, "float32"),
        [1, 2, 3, 4, 5],
        7,
        block_length=4,
        mask_token_id=63,
        stop_token_ids=frozenset(),
    )
    assert len(decoded.tokens) == decoded.denoising_forwards == 7
    assert decoded.store_forwards == 2
    assert decoded.nfe == 9


def test_a_random_checkpoint_is_the_same_for_the_same_seed_and_never_predicts_the_mask(
    checkpoint: Path, tmp_path: Path
) -> None:
    parameters = workload.write_random_checkpoint(tmp_path, SMALL)
    first, second = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path))
    assert parameters == sum(tensor.size for tensor in first.values())
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not first["lm_head.weight"][SMALL["mask_token_id"]].any()


def test_the_backbone_has_the_same_weights_under_another_architecture(checkpoint: Path, tmp_path: Path) -> None:
    workload.write_backbone(checkpoint, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Qwen3ForCausalLM"], "qwen3")
    assert (tmp_path / "model.safetensors").samefile(checkpoint / "model.safetensors")


@pytest.mark.parametrize(("prompt", "tokens", "expected"), [(5, 7, 7), (5, 4, 7), (8, 4, 4), (8, 1, 4), (3, 1, 1)])
def test_requests_end_on_a_block_border(prompt: int, tokens: int, expected: int) -> None:
    assert workload.until_block_end(prompt, tokens, block_length=4) == expected


def test_random_prompts_hold_no_mask_and_end_on_block_borders(checkpoint: Path) -> None:
    made = workload.random_prompts("random", checkpoint, 20, 8, None)
    assert len(made.requests) == 20
    for request in made.requests:
        assert SMALL["mask_token_id"] not in request.prompt
        assert (len(request.prompt) + request.max_tokens) % 4 == 0
    assert made.requests[:5] == workload.random_prompts("random", checkpoint, 5, 8, None).requests


def test_a_job_survives_the_way_to_its_process() -> None:
    job = Job(
        system=System.DLLM,
        checkpoint="here",
        block_length=4,
        mask_token_id=63,
        stop_token_ids=[1],
        requests=[Request([1, 2], 3)],
        runs=[Run(THRESHOLD, 4), Run(None, 1)],
        dtype="float32",
        eager=False,
        repetitions=3,
        seconds_per_run=1.0,
    )
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize(("limit", "repetitions"), [(100.0, 3), (15.0, 2), (5.0, 1), (0.0, 1)])
def test_a_run_that_takes_long_is_repeated_less_often(limit: float, repetitions: int) -> None:
    measured = repeat(lambda: Pass(10.0, 0.1, [[1]], [1]), 3, limit)
    assert len(measured.seconds) == repetitions


def test_only_autoregression_without_the_plugin_runs_without_plugins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "something")
    environments = {system: engine.child_environment(system, 3) for system in System}
    assert environments.pop(System.AR)["VLLM_PLUGINS"] == ""
    for environment in environments.values():
        assert "VLLM_PLUGINS" not in environment
        assert environment["OMP_NUM_THREADS"] == "3"


def test_ratios_are_between_medians_of_comparable_runs() -> None:
    by_run = {(row.system, row.policy, row.concurrency): row for row in rows()}
    one = by_run[System.DLLM, "static, k=1", 1]
    assert one.tokens_per_second == engine.Spread(14 / 3, 14 / 27, 14 / 3)
    assert one.speed_vs_hf == pytest.approx(2.0)
    assert one.step_vs_ar == pytest.approx(1.5)
    assert (one.equal, one.compared, one.tokens_per_forward) == (2, 2, 1.0)
    loaded = by_run[System.DLLM, "threshold 0.9", 16]
    assert loaded.speed_vs_hf == pytest.approx(4.0)
    assert loaded.step_vs_ar is None
    assert by_run[System.AR, None, 1].speed_vs_hf is None


def test_a_request_counts_as_equal_only_if_all_its_tokens_are() -> None:
    other = MEASUREMENTS[2]
    tokens = [[7] * 7, [8] * 6 + [9]]
    changed = replace(other, measured=replace(other.measured, tokens=tokens))
    row = engine.make_rows([MEASUREMENTS[0], changed], prompts([[0], [0]]))[1]
    assert (row.equal, row.compared) == (1, 2)


def test_targets_say_whether_they_are_reached() -> None:
    targets = {(target.name.split(",")[0], target.where): target for target in engine.check_targets(rows())}
    static = "tiny, static, k=1, 1 concurrent, compiled"
    static16 = "tiny, static, k=1, 16 concurrent, compiled"
    threshold16 = "tiny, threshold 0.9, 16 concurrent, compiled"
    assert {key: target.reached for key, target in targets.items()} == {
        ("step time over an autoregressive step", static): True,
        ("forwards per generated token", static): True,
        ("forwards per generated token", static16): True,
        ("throughput over the Transformers loop", static16): True,
        ("throughput over the Transformers loop", threshold16): False,
    }


def test_throughput_with_other_tokens_reaches_no_target() -> None:
    wrong = [replace(row, equal=1) for row in rows()]
    throughput = [t for t in engine.check_targets(wrong) if t.name.startswith("throughput")]
    assert throughput
    assert not any(target.reached for target in throughput)


def test_tables_show_every_row_and_every_target() -> None:
    console = Console(width=engine.FILE_WIDTH, file=StringIO(), record=True)
    console.print(engine.make_table(rows(), "tiny"))
    console.print(engine.make_target_table(engine.check_targets(rows())))
    text = console.export_text()
    for system in System:
        assert system in text
    assert "300.00" in text
    assert "yes" in text
    assert "no" in text


def test_autoregression_gets_as_many_tokens_as_diffusion_made() -> None:
    requests = [Request([1], 8), Request([2], 8)]
    assert engine.with_lengths(requests, {0: 5}) == [Request([1], 5), Request([2], 8)]


def test_without_its_checkpoint_the_tiny_model_is_refused(tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--checkpoint", str(tmp_path)]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(engine.app, arguments)
    assert result.exit_code == 2
    assert f"--checkpoint: {tmp_path} holds no checkpoint" in result.output


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
DYNAMIC = report.THRESHOLD
AUTO = Setting(DYNAMIC, "freedave", "auto")

RESULTS = Results(
    qualities=[
        quality(Setting(STATIC), 100),
        quality(Setting(STATIC, "freedave", 8), 40),
        quality(Setting(DYNAMIC), 100),
        quality(Setting(DYNAMIC, "spiffy", 3), 80),
        quality(Setting(DYNAMIC, "psd", 3), 80, equal=4, accuracy=0.69),
        quality(Setting(DYNAMIC, "psd", 7), 75, equal=3, accuracy=0.71),
        quality(step_skipping.SUBSET, 60, equal=9),
    ],
    speeds=[
        speed(Setting(DYNAMIC), 1, 1.0),
        speed(Setting(DYNAMIC, "freedave", 3), 1, 1.4),
        speed(Setting(DYNAMIC, "freedave", 8), 1, 1.5),
        speed(Setting(DYNAMIC, "spiffy", 3), 1, 1.9),
        speed(AUTO, 1, 1.45),
        speed(AUTO, 16, 0.5),
        speed(step_skipping.SUBSET, 1, 9.0),
        speed(AUTO, 64, 0.96),
    ],
    duels=[
        Duel(AUTO, Setting(DYNAMIC, "freedave", 8), 1, 10, [0.5, 0.96, 1.2]),
        Duel(AUTO, Setting(DYNAMIC), 64, 10, [0.96]),
    ],
    low_precision=[quality(Setting(DYNAMIC), 100), quality(Setting(DYNAMIC, "freedave", 8), 40, equal=8)],
    alone_equal={DYNAMIC: 9},
    overheads=[Overhead("freedave", 3, 2.0, 0.01, 0.02, 0.04, 5), Overhead("psd", 3, 2.0, 0.01, 0.02, 0.05, 5)],
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
    assert step_skipping.SUBSET.extra_args()["dllm_match"] == "subset"


@pytest.mark.parametrize("quick", [True, False])
def test_every_planned_setting_is_one_the_engine_admits(quick: bool) -> None:
    plan = step_skipping.make_plan(list(report.POLICIES), quick=quick, requests=10, repetitions=1)
    options = DllmConfig(max_drafts=step_skipping.MAX_DRAFTS)
    for setting in {*plan.settings, *step_skipping.LOW_PRECISION}:
        resolved = resolve(parse_request_options(setting.extra_args()), options, TRAITS, block_length=16)
        assert resolved.verify == setting.verify
        assert resolved.auto_drafts == (setting.drafts == "auto")
    for verify, drafts in step_skipping.OVERHEAD_VERIFIERS.items():
        request = parse_request_options(Setting(DYNAMIC, verify, drafts).extra_args())
        assert resolve(request, options, TRAITS, block_length=16).num_drafts == step_skipping.OVERHEAD_DRAFTS


def test_every_planned_setting_is_measured_beside_its_policy_alone() -> None:
    plan = step_skipping.make_plan(list(report.POLICIES), quick=False, requests=10, repetitions=1)
    for settings in (plan.settings, step_skipping.LOW_PRECISION, *plan.timed.values()):
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
    row = report.make_qualities(passes, Graded(**vars(prompts([[0], [0]]))))[2]
    assert (row.equal, row.requests, row.nfe, row.tokens) == (1, 2, 3, 4)
    assert (row.forwards_saved, row.accuracy) == (2.0, 0.5)


def test_speeds_are_compared_within_a_repetition() -> None:
    """The machine is slow in the second one, for both."""
    alone, drafted = Setting(STATIC), Setting(STATIC, "psd", 3)
    passes = {
        alone: [Pass(seconds, 0.1, [[1] * 10], [10]) for seconds in (1.0, 10.0, 1.0)],
        drafted: [Pass(seconds, 0.1, [[1] * 10], [5]) for seconds in (0.5, 5.0, 1.0)],
    }
    row = report.make_speeds(passes, 16)[1]
    assert row.ratios == [2.0, 2.0, 1.0]
    assert (row.ratio, row.tokens_per_second, row.concurrency) == (2.0, 10.0, 16)


def test_auto_is_compared_with_the_fastest_fixed_number_of_its_verifier_or_with_no_drafts() -> None:
    assert report.rival_of(AUTO, 1, RESULTS.speeds) == Setting(DYNAMIC, "freedave", 8)
    assert report.rival_of(AUTO, 64, RESULTS.speeds) == Setting(DYNAMIC)


def test_passes_are_compared_within_a_turn() -> None:
    """The machine is slow in the second one, for both."""
    fast, slow = ([Pass(seconds, 0.1, [[1] * 10], [10]) for seconds in each] for each in ((1.0, 10.0), (2.0, 30.0)))
    duel = report.make_duel(AUTO, AUTO.alone, 64, list(zip(fast, slow, strict=True)))
    assert (duel.ratios, duel.ratio, duel.requests) == ([2.0, 3.0], 2.5, 1)
    assert duel.quartiles == (2.25, 2.75)
    assert replace(duel, ratios=[2.0]).quartiles == (2.0, 2.0)


def test_a_result_can_be_read_again() -> None:
    assert report.read_results(json.loads(json.dumps(asdict(RESULTS)))) == RESULTS


def test_step_skipping_targets_say_whether_they_are_reached() -> None:
    threshold = "threshold 0.9"
    where = "with 3 drafts, 100 M parameters, 1 concurrent"
    assert reached(report.check_targets(RESULTS)) == {
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
    targets = [t for t in report.check_targets(replace(RESULTS, qualities=wrong)) if "equal" in t.name]
    assert len(targets) == 3
    assert not any(target.reached for target in targets)


def test_psd_that_loses_accuracy_or_goes_on_growing_reaches_no_target() -> None:
    changed = [
        replace(row, accuracy=0.68) if row.setting.drafts == 3 else replace(row, tokens_per_forward=5.0)
        for row in RESULTS.qualities
    ]
    misses = {t.name for t in report.check_targets(replace(RESULTS, qualities=changed)) if not t.reached}
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
    console = Console(width=engine.FILE_WIDTH, file=StringIO(), record=True)
    console.print(report.make_target_sheet(report.check_targets(RESULTS)).rich())
    assert console.export_text().count("miss") == 2


def test_overhead_is_what_steps_with_all_drafts_add_over_a_forward_without() -> None:
    alone = [Step(4, 1.0, 100.0, 1.0, 2.0), Step(8, 9.0, 900.0, 9.0, 99.0), Step(0, 9.0, 9.0, 9.0, 9.0)]
    drafted = [Step(16, 2.0, 300.0, 4.0, 10.0), Step(8, 9.0, 9.0, 9.0, 9.0)]
    measured = overhead.compare("psd", 3, alone, drafted, block_length=4)
    assert measured == Overhead("psd", 3, forward=3.0, plan=0.01, row_stats=0.03, decision=0.05, steps=1)
    assert measured.share == pytest.approx(0.09)
    with pytest.raises(ValueError, match="psd: no step with 3 drafts"):
        overhead.compare("psd", 3, alone, alone, block_length=4)


def test_the_pareto_front_holds_what_nothing_beats_in_both() -> None:
    points = [(1.0, 0.7), (2.0, 0.7), (3.0, 0.6), (2.5, 0.5), (4.0, 0.1), (1.0, 0.8)]
    rows = [replace(quality(Setting(STATIC), 100), tokens_per_forward=x, accuracy=y) for x, y in points]
    front = [(row.tokens_per_forward, row.accuracy) for row in report.pareto_front(rows)]
    assert front == [(1.0, 0.8), (2.0, 0.7), (3.0, 0.6), (4.0, 0.1)]


def test_the_pareto_plot_is_small(tmp_path: Path) -> None:
    report.plot_pareto(RESULTS.qualities, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plot.png").stat().st_size < 150_000


def test_figures_go_between_the_marks_of_a_page_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = report.docs_marks("step_skipping.py")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    for text in ("new", "newer"):
        report.write_docs(page, text, "/somewhere/step_skipping.py")
        assert page.read_text() == f"before\n{begin}\n\n{text}\n\n{end}\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="no place for the figures"):
        report.write_docs(page, "new", "step_skipping.py")


@pytest.mark.parametrize(
    ("page", "script"),
    [
        ("step-skipping", "step_skipping.py"),
        ("step-skipping", "short_blocks.py"),
        ("step-skipping", "psd.py"),
        ("draft-graphs", "draft_graphs.py"),
        ("fef", "fef.py"),
        ("full-attention", "full_attention.py"),
        ("deer", "deer.py"),
        ("s2d2", "s2d2.py"),
    ],
)
def test_the_documentation_has_a_place_for_the_figures(page: str, script: str) -> None:
    text = (engine.ROOT / "docs" / f"{page}.md").read_text()
    begin, end = report.docs_marks(script)
    assert text.index(begin) < text.index(end)


def outcome(system: str, drafts: int, accepted: dict[int, int], *, temperature: float = 0.0) -> deer_report.Outcome:
    """Two requests of 20 tokens."""
    rounds = sum(accepted.values())
    return deer_report.Outcome(
        system=system,
        drafts=drafts,
        temperature=temperature,
        concurrency=1,
        requests=2,
        seconds=2.0,
        num_tokens=40,
        equal=None if temperature else 2,
        forwards=rounds + 2 if accepted else 40,
        accepted=accepted,
        accuracy=0.5,
    )


def test_drafters_are_judged_by_what_they_save_the_target() -> None:
    outcomes = [
        outcome("target alone", 0, {}),
        outcome("autoregressive draft model small", 16, {2: 4, 3: 4}),
        outcome("DEER", 4, {2: 12}),
        outcome("DEER", 16, {0: 2, 6: 6}),
        outcome("DEER, stage I only", 16, {4: 8}),
    ]
    assert [one.tau for one in outcomes] == [None, 2.5, 2.0, 4.5, 4.0]
    targets = deer_report.make_target_sheet(outcomes, (4, 16)).rows
    assert [row[-1] for row in targets] == ["pass"] * 5
    table = deer_report.make_tau_sheet(outcomes).markdown()
    assert "| 0 | DEER | 16 | 4.50 | 4.00 | 0.25 | 1.00× | 2/2 | 50% |" in table
    assert (
        "| DEER | 16 | 25.0% | 0.0% | 75.0% | 0.0% | 0.0% | 0.0% | 6 |"
        in deer_report.make_histogram_sheet(outcomes).markdown()
    )
    drawn = [
        outcome("autoregressive draft model small", 16, {9: 4}, temperature=0.6),
        outcome("DEER", 16, {4: 8}, temperature=0.6),
    ]
    both = {row[0]: row[-1] for row in deer_report.make_target_sheet(outcomes + drawn, (4, 16)).rows}
    assert both["accepted per round (τ), k=16, temperature 0.6, the paper's of Qwen3-30B-A3B"] == "miss"
    assert both["accepted per round over the autoregressive draft model small's, k=16, temperature 0.6"] == "miss"
    assert both["accepted per round over the autoregressive draft model small's, k=16, temperature 0"] == "pass"
    falling = [replace(one, accepted={1: 8}) if one.drafts == 16 else one for one in outcomes]
    assert [row[-1] for row in deer_report.make_target_sheet(falling, (4, 16)).rows].count("miss") >= 3


def test_step_skipping_refuses_an_unknown_policy_before_it_starts() -> None:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(step_skipping.app, ["--policy", "best"])
    assert result.exit_code == 2
    assert "--policy: best: not one of static, k=1, threshold 0.9" in result.output


def test_a_result_is_published_in_all_three_places(tmp_path: Path) -> None:
    page = tmp_path / "deer.md"
    page.write_text("\n".join(report.docs_marks("deer.py")))
    sheet = report.Sheet("Speeds", ["system", "k", "speed"], [["DEER", "4", "2.00×"]])
    environment = {"date": "2026-01-02T03:04", "cpu": "a processor", "cores": 2}
    console = Console(width=engine.FILE_WIDTH, file=StringIO(), record=True)
    report.publish(console, [sheet], {"environment": environment, "x": 1}, tmp_path / "out", page, "/a/deer.py")
    assert "2.00×" in console.export_text()
    assert json.loads((tmp_path / "out" / "deer.json").read_text())["x"] == 1
    assert "Measured 2026-01-02, a processor, 2 cores.\n\n**Speeds**" in page.read_text()
