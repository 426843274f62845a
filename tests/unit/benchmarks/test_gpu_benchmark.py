"""The GPU benchmark without a GPU and engines: its plan, its limits, ratios and failures."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.paths import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

import gpu
import gpu_report as report
from gpu_cells import (
    CONCURRENCY,
    END,
    FULL_SCALE,
    QUICK_SCALE,
    Cell,
    Dtype,
    Graphs,
    Job,
    Kind,
    KVDtype,
    Level,
    Outcome,
    Scheduling,
    Selection,
    Status,
    Steps,
    make_plan,
)
from gpu_probe import Card
from gpu_shapes import SHAPES, Model, Shape
from gpu_steps import LevelResult
from record import RESULTS, script_marks
from systems import System

CELL = Cell(Model.SDAR_8B, levels=(Level(1, 1),))


# Shapes.


@pytest.mark.parametrize(
    ("model", "billions"),
    [(Model.SDAR_1_7B, 2.03), (Model.SDAR_8B, 8.19), (Model.SDAR_30B_A3B, 30.5), (Model.LLADA2_MINI, 16.26)],
)
def test_shapes_have_the_parameters_of_the_released_models(model: Model, billions: float) -> None:
    assert SHAPES[model].parameters.total == pytest.approx(billions * 1e9, rel=2e-3)


def test_a_row_of_a_mixture_reads_its_own_experts_and_many_rows_read_all() -> None:
    parameters = SHAPES[Model.SDAR_30B_A3B].parameters
    others = parameters.dense + parameters.head
    assert parameters.read(1) == pytest.approx(others + parameters.experts * 8 / 128)
    assert parameters.read(10_000) == pytest.approx(parameters.total - parameters.embedding)


def test_the_expected_number_of_experts_is_that_of_rows_that_choose_independently() -> None:
    parameters = SHAPES[Model.SDAR_30B_A3B].parameters
    choices = torch.rand(500, 32, 128, generator=torch.Generator().manual_seed(0)).topk(8).indices
    touched = torch.zeros(500, 128).scatter_(1, choices.flatten(1), 1.0).mean()
    expected = (parameters.read(32) - parameters.dense - parameters.head) / parameters.experts
    assert expected == pytest.approx(float(touched), rel=0.01)


def test_a_dense_model_reads_all_but_its_embedding_and_multiplies_rows_by_it() -> None:
    parameters = SHAPES[Model.SDAR_8B].parameters
    assert parameters.read(1) == parameters.read(4096) == parameters.total - parameters.embedding
    assert parameters.multiply_adds(64, 32) == 64 * parameters.dense + 32 * parameters.head


def test_kv_of_a_position() -> None:
    assert SHAPES[Model.SDAR_8B].kv_entries == 2 * 36 * 8 * 128


@pytest.mark.parametrize("model", Model)
def test_a_written_shape_is_a_configuration_of_its_family_and_of_its_backbone(model: Model, tmp_path: Path) -> None:
    SHAPES[model].write(tmp_path / "dllm", autoregressive=False)
    SHAPES[model].write(tmp_path / "ar", autoregressive=True)
    ours, other = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("dllm", "ar"))
    assert ours["architectures"] != other["architectures"]
    assert ours["model_type"] != other["model_type"]
    assert {key for key in ours if ours[key] != other[key]} == {"architectures", "model_type"}


# The plan.


def test_the_first_shape_comes_first_at_1_and_32_and_autoregression_follows() -> None:
    first, second, *_ = make_plan(Selection(), FULL_SCALE, quick=False, is_gpu=True)
    assert (first.model, first.variant) == (Model.SDAR_8B, "diffusion")
    assert first.levels[:4] == (Level(1, 1), Level(1, 3), Level(32, 1), Level(32, 3))
    assert (second.model, second.system) == (Model.SDAR_8B, System.AR)


def test_the_plan_has_all_that_the_benchmark_is_about() -> None:
    plan = make_plan(Selection(), FULL_SCALE, quick=False, is_gpu=True)
    assert len(set(plan)) == len(plan)
    for model in Model:
        for variant in ("diffusion", "autoregressive"):
            (base,) = [cell for cell in plan if (cell.model, cell.variant) == (model, variant)]
            assert {level.concurrency for level in base.levels} == {*CONCURRENCY}
    own = [cell for cell in plan if cell.model == Model.SDAR_8B and cell.system == System.DLLM]
    assert {cell.drafts for cell in own} == {0, 3, 7}
    assert {cell.graphs for cell in own} == {*Graphs}
    assert {cell.scheduling for cell in own} == {*Scheduling}
    assert {cell.steps for cell in own} == {Steps.DEFAULT, Steps.WRITTEN}
    assert {cell.dtype for cell in own} == {Dtype.BFLOAT16, Dtype.FLOAT16}
    assert {cell.kv_dtype for cell in own} == {*KVDtype}
    checks = [cell for cell in plan if cell.kind == Kind.TOKENS and cell.dtype == Dtype.FLOAT32]
    assert (checks[0].graphs, checks[0].scheduling) == (Graphs.EAGER, Scheduling.SYNC)
    assert {cell.scheduling for cell in checks} == {Scheduling.SYNC, Scheduling.ASYNC}
    assert [cell.block_length for cell in plan if cell.kind == Kind.GOLDEN] == [4, 8, 16, 32]


def test_options_of_the_command_line_are_combined() -> None:
    selection = Selection(
        models=[Model.SDAR_1_7B],
        drafts=[0, 7],
        graphs=[Graphs.EAGER, Graphs.FULL],
        concurrency=[8],
        tokens_per_step=[2],
    )
    *ours, baseline = make_plan(selection, FULL_SCALE, quick=False, is_gpu=True)
    assert {(cell.drafts, cell.graphs) for cell in ours} == {
        (drafts, graphs) for drafts in (0, 7) for graphs in (Graphs.EAGER, Graphs.FULL)
    }
    assert {cell.levels for cell in ours} == {(Level(8, 2),)}
    assert (baseline.system, baseline.levels) == (System.AR, (Level(8, 1),))


def test_parts_and_shapes_can_be_chosen() -> None:
    def names(**options: Any) -> set[tuple[str, str]]:
        plan = make_plan(Selection(**options), FULL_SCALE, quick=False, is_gpu=True)
        return {(cell.model, cell.kind) for cell in plan}

    assert names(kinds=[Kind.GOLDEN]) == {("sdar", "golden")}
    assert names(models=[Model.LLADA2_MINI], kinds=[Kind.SPEED]) == {("llada2-mini", "speed")}


def test_nothing_is_compiled_on_a_cpu() -> None:
    plan = make_plan(Selection(), QUICK_SCALE, quick=True, is_gpu=False)
    assert {cell.graphs for cell in plan} == {Graphs.EAGER}
    assert len(plan) < len(make_plan(Selection(), QUICK_SCALE, quick=True, is_gpu=True))


def test_a_job_survives_the_way_to_its_process() -> None:
    cell = replace(CELL, kv_dtype=KVDtype.FP8, drafts=3, scheduling=Scheduling.ASYNC)
    job = Job(cell, "here", prompt_tokens=32, steps=6, requests=4, dummy=True)
    assert Job.from_json(job.to_json()) == job


# Rows.


def outcome(cell: Cell, *results: LevelResult, status: Status = Status.MEASURED) -> Outcome:
    return Outcome(cell, status, results=[vars(result) for result in results])


def level(concurrency: int = 1, tokens: int = 1, **values: Any) -> LevelResult:
    defaults: dict[str, Any] = {
        "step_ms": 10.0,
        "tokens_per_second": 100.0,
        "tokens_per_forward": float(tokens),
        "context": 600.0,
        "rows": 32,
        "logits_rows": 32,
        "parts": {"total": 12.0, "plan": 1.0, "forward": 6.0, "sampler": 2.0},
    }
    return LevelResult(concurrency, tokens, **{**defaults, **values})


CARD = Card("H100", 80 << 30, bytes_per_second=3e12, flops_per_second=6e14)
BASELINE = replace(CELL, system=System.AR)


def test_a_row_is_compared_with_bandwidth_arithmetic_and_autoregression() -> None:
    ar = level(step_ms=5.0, tokens_per_second=200.0, rows=0, logits_rows=0, parts=None)
    diffusion, baseline = report.make_rows([outcome(CELL, level()), outcome(BASELINE, ar)], SHAPES, CARD)
    shape = SHAPES[Model.SDAR_8B]
    expected = (2 * shape.parameters.read(32) + 2 * 600 * shape.kv_entries) / 3e12 * 1e3
    assert diffusion.limit_ms == pytest.approx(expected)
    assert diffusion.bandwidth_share == pytest.approx(expected / 6.0)
    assert diffusion.arithmetic_ms == pytest.approx(2 * shape.parameters.multiply_adds(32, 32) / 6e14 * 1e3)
    assert (diffusion.rest_ms, diffusion.share("forward")) == (3.0, 0.5)
    assert (diffusion.step_vs_ar, diffusion.speed_vs_ar) == (2.0, 0.5)
    assert (baseline.step_vs_ar, baseline.forward_ms, baseline.share("plan")) == (None, None, None)


def test_what_the_host_takes_stands_beside_the_step() -> None:
    host = {"total": 9.0, "plan": 1.0, "forward": 0.5, "sampler": 2.0}
    measured = outcome(CELL, level(host_parts=host), level(8))
    rows = report.make_rows([measured], SHAPES, CARD)
    assert report.make_host_sheet(rows).rows == [
        ["sdar-8b", "diffusion", "1", "1", "9.00", "1.00", "0.50", "2.00", "5.50"]
    ]


def test_kv_in_8_bits_is_half_as_much_to_read() -> None:
    def limit(cell: Cell, context: float) -> float:
        (row,) = report.make_rows([outcome(cell, level(context=context))], SHAPES, CARD)
        assert row.limit_ms is not None
        return row.limit_ms

    halved = replace(CELL, kv_dtype=KVDtype.FP8)
    assert limit(halved, 600.0) == pytest.approx(limit(CELL, 300.0))
    assert limit(CELL, 300.0) < limit(CELL, 600.0)


def test_levels_of_a_cell_that_failed_later_count() -> None:
    rows = report.make_rows([outcome(CELL, level(32), level(8), status=Status.FAILED)], SHAPES, None)
    assert [row.concurrency for row in rows] == [8, 32]
    assert rows[0].limit_ms is None


def test_what_is_missing_is_listed_with_its_reason() -> None:
    refused = Outcome(replace(CELL, graphs=Graphs.FULL), Status.REFUSED, "no such graphs")
    partly = outcome(CELL, level(8, parts=None, note="no profiler"), level())
    assert report.make_gap_sheet([refused, partly]).rows == [
        ["sdar-8b: full graphs", "refused", "no such graphs"],
        ["sdar-8b: diffusion, 8 concurrent", "in part", "no profiler"],
    ]


def test_targets_say_whether_they_are_reached() -> None:
    fast = level(64, 3, tokens_per_second=2000.0)
    ar = level(64, tokens_per_second=1999.0)
    alone = level(1, 3, parts={"total": 7.0, "plan": 0.5, "forward": 5.1, "sampler": 0.5})
    rows = report.make_rows([outcome(CELL, alone, fast), outcome(BASELINE, ar, level(1))], SHAPES, CARD)
    wrong = report.Equality("tiny-sdar", "float32, eager, async", 7, "float32, eager, sync", 31, 32)
    rounded = replace(wrong, variant="bfloat16, eager, async")
    targets = report.check_targets(rows, [wrong, rounded])
    assert [(target.name.split(",")[0], round(target.value, 2), target.reached) for target in targets] == [
        ("bandwidth limit over forward", 1.0, True),
        ("tokens/s over autoregression", 1.0, False),
        ("tokens/s over autoregression", 1.0, True),
        ("tokens/s", 2000.0, True),
        ("requests with equal tokens", 0.97, False),
    ]


def test_tokens_are_compared_with_the_first_engine_of_the_data_type() -> None:
    def check(dtype: Dtype, scheduling: Scheduling, *tokens: list[list[int]]) -> Outcome:
        cell = Cell("tiny-sdar", Kind.TOKENS, dtype=dtype, scheduling=scheduling, graphs=Graphs.EAGER)
        results = [{"drafts": drafts, "tokens": each} for drafts, each in zip((0, 7), tokens, strict=False)]
        return Outcome(cell, Status.MEASURED, results=results)

    golden = Outcome(
        Cell("sdar", Kind.GOLDEN, dtype=Dtype.FLOAT32, graphs=Graphs.EAGER, block_length=4),
        Status.MEASURED,
        results=[{"equal": 46, "compared": 47, "wrong": ["oc-1"]}],
    )
    found = report.make_equalities(
        [
            check(Dtype.FLOAT32, Scheduling.SYNC, [[1, 2], [3]], [[1, 2], [4]]),
            check(Dtype.FLOAT32, Scheduling.ASYNC, [[1, 2], [3]]),
            check(Dtype.BFLOAT16, Scheduling.SYNC, [[1, 9], [3]]),
            golden,
        ]
    )
    assert [(each.variant, each.drafts, each.against, each.equal, each.compared) for each in found] == [
        ("float32, eager, sync", 7, "itself without drafts", 1, 2),
        ("float32, eager, async", 0, "float32, eager, sync", 2, 2),
        ("float32, eager, default, blocks of 4", 0, "golden cases", 46, 47),
    ]


def test_the_picture_is_drawn_with_and_without_autoregression(tmp_path: Path) -> None:
    rows = report.make_rows([outcome(CELL, level(), level(8), level(1, 3))], SHAPES, None)
    assert report.plot(rows, tmp_path / "alone.png")
    rows = report.make_rows([outcome(CELL, level()), outcome(BASELINE, level(parts=None))], SHAPES, CARD)
    assert report.plot(rows, tmp_path / "both.png")
    assert (tmp_path / "alone.png").read_bytes()[:4] == (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    assert not report.plot([], tmp_path / "none.png")


# Processes.

JOB = Job(CELL, "here", prompt_tokens=32, steps=6, requests=4, dummy=True)
RESULT = json.dumps(vars(level()))


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a script take the place of the cells' process."""

    def write(script: str) -> None:
        path = tmp_path / "worker.py"
        path.write_text(script)
        monkeypatch.setattr(gpu, "WORKER", path)

    return write


def test_a_process_that_does_its_job_is_measured(worker: Callable[[str], None]) -> None:
    worker(f"import sys; assert sys.stdin.readline(); print('{{}}'); print('{RESULT}'); print('{json.dumps(END)}')")
    found = gpu.run_cell(JOB, 30.0)
    assert (found.status, found.message) == (Status.MEASURED, "")
    assert [LevelResult(**result) for result in found.results] == [level()]


def test_a_crash_is_a_failure_with_the_last_lines_and_what_was_measured_before(worker: Callable[[str], None]) -> None:
    worker(
        f"import sys; print('{{}}'); print('{RESULT}')\n"
        "for number in range(50): print(number, file=sys.stderr)\n"
        "raise MemoryError('no room')"
    )
    found = gpu.run_cell(JOB, 30.0)
    assert (found.status, found.message) == (Status.FAILED, "exit status 1: MemoryError: no room")
    assert len(found.results) == 1
    assert len(found.tail) == gpu.TAIL_LINES
    assert found.tail[-1] == "MemoryError: no room"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["[rank0]: ValueError: too long", "[rank0]:[W1126 05:24:54] Warning: not destroyed", ""],
            "ValueError: too long",
        ),
        (["torch.OutOfMemoryError: no room", "at the end"], "torch.OutOfMemoryError: no room"),
        (["one", "Killed", " "], "Killed"),
        ([], ""),
    ],
)
def test_a_crash_is_told_by_its_exception(lines: list[str], reason: str) -> None:
    assert gpu.last_error(lines) == reason


def test_a_process_that_takes_too_long_is_ended_with_all_that_it_started(
    worker: Callable[[str], None], tmp_path: Path
) -> None:
    child = tmp_path / "child"
    worker(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "print('{}'); print('{\"half\": ', end='', flush=True); time.sleep(60)"
    )
    begin = time.monotonic()
    found = gpu.run_cell(JOB, 3.0)
    assert time.monotonic() - begin < 30
    assert (found.status, found.message, found.results) == (Status.FAILED, "took longer than 3 s", [])
    status = subprocess.run(["ps", "-o", "stat=", "-p", child.read_text()], capture_output=True, text=True).stdout
    assert not status.strip() or status.startswith("Z")


def test_what_an_engine_refuses_is_no_failure(worker: Callable[[str], None]) -> None:
    worker('print(\'{"refused": "no such graphs"}\')')
    found = gpu.run_cell(JOB, 30.0)
    assert (found.status, found.message) == (Status.REFUSED, "no such graphs")


def test_what_does_not_fit_into_the_time_is_listed_as_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, kept = [], []

    def run_cell(job: Job, seconds: float) -> Outcome:
        ran.append(seconds)
        return Outcome(job.cell, Status.FAILED, "[broken]")

    monkeypatch.setattr(gpu, "run_cell", run_cell)
    now = iter([0.0, 100.0, 190.0])
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(now))
    plan = make_plan(Selection(), FULL_SCALE, quick=False, is_gpu=True)[:3]
    outcomes = gpu.run_plan(
        plan, FULL_SCALE, SHAPES, 200.0, 150.0, Console(quiet=True), lambda found: kept.append(len(found))
    )
    assert ran == [150.0, 100.0]
    assert [each.status for each in outcomes] == [Status.FAILED, Status.FAILED, Status.NOT_RUN]
    assert kept == [1, 2]


# The command.


def test_without_a_gpu_the_command_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(gpu.app, [])
    assert done.exit_code == 1
    assert done.output.strip().splitlines() == ["There is no CUDA device here; --quick runs the same program on a CPU."]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", str(RESULTS)], "figures of GPUs"),
        (["--docs", "docs/gpu.md"], "belongs into the"),
        (["--part", "golden"], "no engine of the plan"),
        (["--model", "sdar-9b"], "sdar-9b"),
        (["--graphs", "some"], "some"),
        (["--concurrency", "0"], "greater than or equal to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(gpu.app, ["--quick", *arguments])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_the_page_has_a_place_for_the_figures() -> None:
    begin, end = script_marks("gpu.py")
    assert begin in (ROOT / "docs" / "gpu.md").read_text().split(end)[0]


def test_a_tiny_shape_has_the_layers_of_the_large_one() -> None:
    for model in Model:
        large, tiny = SHAPES[model], SHAPES[model].tiny()
        assert isinstance(tiny, Shape)
        assert tiny.parameters.total < 10e6
        assert large.config.keys() == tiny.config.keys()
        assert bool(tiny.parameters.num_experts) == bool(large.parameters.num_experts)
