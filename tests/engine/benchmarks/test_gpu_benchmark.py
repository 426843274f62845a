"""The GPU benchmark on a CPU: the command with tiny shapes, and its cells on engines in this process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm import LLM

from tests.engine.harness import no_form_is_missing, schedule_asynchronously
from tests.engine.shared import shared_engine
from tests.paths import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

import gpu
import gpu_worker
from gpu_cells import QUICK_SCALE, Cell, Graphs, Job, KVDtype, Scheduling, Selection, Steps, golden, make_levels
from gpu_shapes import SHAPES, Model
from gpu_steps import LevelResult, join
from systems import System

from vllm_dllm.runtime.compiled import Stages

TINY = {model: shape.tiny() for model, shape in SHAPES.items()}
LEVELS = make_levels(Selection(), QUICK_SCALE)


@pytest.fixture(autouse=True)
def _experts_are_chosen_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "")


def job_of(cell: Cell, folder: Path) -> Job:
    return gpu.make_job(cell, QUICK_SCALE, TINY, folder)


def run(job: Job) -> list[dict[str, Any]]:
    """What the cell's process would tell, of an engine in this process."""

    def start() -> LLM:
        return gpu_worker.start(job)[0]

    return list(gpu_worker.run(shared_engine(job, start), job))


def results_of(job: Job) -> list[LevelResult]:
    results = join(run(job))
    assert {result.note for result in results} == {""}
    return results


def cell_of(model: Model, **options: Any) -> Cell:
    return Cell(model, graphs=Graphs.EAGER, block_length=QUICK_SCALE.block_length, levels=LEVELS, **options)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, the quick plan has more engines")
def test_the_quick_command_measures_steps_autoregression_and_equal_tokens(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "--quick", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu-quick.json").read_text())
    assert [(cell["status"], cell["message"]) for cell in result["cells"]] == [("measured", "")] * 3
    diffusion = [row for row in result["rows"] if row["variant"] == "eager"]
    baseline = [row for row in result["rows"] if row["variant"] == "autoregressive"]
    assert [(row["concurrency"], row["tokens_per_step"]) for row in diffusion] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert [row["concurrency"] for row in baseline] == [1, 2]
    for row in diffusion:
        # A block of 8 takes 8 steps, or 3 of at most 3 tokens.
        assert row["tokens_per_forward"] == pytest.approx(8 / (8 if row["tokens_per_step"] == 1 else 3))
        assert row["rows"] == 8 * row["concurrency"]
        assert min(row[f"{part}_ms"] for part in ("plan", "forward", "sampler", "limit", "arithmetic")) > 0
        assert row["kernels"] is None
        assert row["speed_vs_ar"] > 0
    (plugins,) = {cell["facts"]["plugin_loaded"] for cell in result["cells"] if cell["cell"]["system"] == "vllm-ar"}
    assert not plugins
    equal = [(each["drafts"], each["equal"], each["compared"]) for each in result["equalities"]]
    assert equal == [(3, 4, 4), (7, 4, 4)]
    assert (tmp_path / "gpu-quick.png").is_file()
    for title in ("Steps", "Launches of a step", "Tokens per second", "Requests with every token equal"):
        assert title in done.stdout


@pytest.mark.parametrize("system", [System.DLLM, System.AR])
@pytest.mark.parametrize("model", [Model.LLADA2_MINI, Model.SDAR_30B_A3B])
def test_mixtures_of_experts_run_with_and_without_diffusion(model: Model, system: System, tmp_path: Path) -> None:
    results = results_of(job_of(cell_of(model, system=system), tmp_path))
    assert [(result.concurrency, result.tokens_per_step) for result in results] == [
        (level.concurrency, level.tokens_per_step) for level in LEVELS
    ]
    assert min(result.tokens_per_second for result in results) > 0


def test_steps_with_drafts_have_their_rows_and_no_request_is_left_between_levels(tmp_path: Path) -> None:
    length, drafts = QUICK_SCALE.block_length, 3
    results = results_of(job_of(cell_of(Model.SDAR_8B, drafts=drafts), tmp_path))
    assert [result.concurrency for result in results] == [1, 1, 2, 2]
    for result in results:
        assert length < result.rows / result.concurrency <= length * (1 + drafts)
        assert result.tokens_per_forward >= 1.0


def test_asynchronous_steps_give_as_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_asynchronously(monkeypatch)
    results = results_of(job_of(cell_of(Model.SDAR_1_7B, scheduling=Scheduling.ASYNC), tmp_path))
    for result in results:
        assert result.tokens_per_forward == pytest.approx(8 / (8 if result.tokens_per_step == 1 else 3))
        assert result.rows >= QUICK_SCALE.block_length * result.concurrency
        for parts in (result.parts, result.host_parts):
            assert parts is not None
            assert parts["total"] > parts["plan"] + parts["forward"] + parts["sampler"] > 0
    functions = [cost["function"] for cost in results[0].functions]
    assert any("(execute_model)" in each for each in functions)


@pytest.mark.slow
def test_the_steps_that_are_measured_are_of_forms_that_the_engine_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch runs what it has traced, which takes little time to compile.
    monkeypatch.setattr(Stages, "backend", "eager")
    job = job_of(cell_of(Model.SDAR_8B, steps=Steps.COMPILED), tmp_path)
    llm, facts = gpu_worker.start(job)
    assert facts["compile_steps"]
    shared_engine(job, lambda: llm)
    with no_form_is_missing(llm):
        assert len(results_of(job)) == len(LEVELS)
    torch._dynamo.reset()


def test_golden_cases_give_the_official_tokens(tmp_path: Path) -> None:
    (found,) = run(job_of(golden(4), tmp_path))
    assert found["equal"] == found["compared"] != 0


def test_an_engine_that_does_not_start_as_it_is_asked_to_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts_with(error: Exception) -> None:
        def start(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(vllm, "LLM", start)
        gpu_worker.start(job_of(cell_of(Model.SDAR_8B), tmp_path))

    with pytest.raises(gpu_worker.Refused, match="no such graphs"):
        starts_with(ValueError("no such graphs"))
    with pytest.raises(ValueError, match="No available memory"):
        starts_with(ValueError("No available memory for the cache blocks"))
    with pytest.raises(RuntimeError, match="broken"):
        starts_with(RuntimeError("broken"))


@pytest.mark.parametrize(
    ("options", "facts", "said"),
    [
        ({"graphs": Graphs.FULL}, {"graphs": "PIECEWISE"}, "full CUDA graphs, .* cudagraph_mode=PIECEWISE"),
        ({"graphs": Graphs.PIECEWISE}, {"graphs": "FULL_AND_PIECEWISE"}, "piecewise CUDA graphs"),
        ({"scheduling": Scheduling.ASYNC}, {"async_scheduling": False}, "async scheduling, .* async_scheduling=False"),
        ({"scheduling": Scheduling.SYNC}, {"async_scheduling": True}, "sync scheduling"),
        ({"kv_dtype": KVDtype.FP8}, {"kv_dtype": "auto"}, "K/V in fp8, .* keeps them in auto"),
    ],
)
def test_an_engine_with_other_options_than_it_was_asked_for_refuses(
    options: dict[str, Any], facts: dict[str, Any], said: str
) -> None:
    taken = {"graphs": "FULL_AND_PIECEWISE", "async_scheduling": True, "kv_dtype": "fp8_e4m3"}
    all_options = Cell(Model.SDAR_8B, graphs=Graphs.FULL, scheduling=Scheduling.ASYNC, kv_dtype=KVDtype.FP8)
    assert gpu_worker.refusal(all_options, taken) == ""
    assert re.match(f"asked for {said}", gpu_worker.refusal(Cell(Model.SDAR_8B, **options), {**taken, **facts}))
