"""The engine's benchmark: its baseline, its prompts, its comparisons and its tables. No timings."""

import json
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner

from tests.paths import BENCHMARKS, BUNDLED, GOLDEN

sys.path.insert(0, str(BENCHMARKS))

import engine
import engine_report as report
import environment
import hf_loop
import workload
from engine_report import Execution, Measurement
from sheet import target_sheet
from systems import Job, Measured, Pass, Policy, Request, Run, System, repeat
from workload import ModelName

from tests.reference.golden import Case, golden_or_skip, load

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
    measurement(System.HF_LOOP, report.ONE_TOKEN_PER_STEP, 1, seconds=6.0, step=0.3, nfe=9),
    measurement(System.HF_LOOP, THRESHOLD, 1, seconds=4.0, step=0.3, nfe=4),
    measurement(System.DLLM, report.ONE_TOKEN_PER_STEP, 1, seconds=3.0, step=0.3),
    measurement(System.DLLM, report.ONE_TOKEN_PER_STEP, 16, seconds=1.0, step=0.5),
    measurement(System.DLLM, THRESHOLD, 16, seconds=1.0, step=0.5, nfe=3),
    measurement(System.AR, None, 1, seconds=2.0, step=0.2),
    measurement(System.AR_PLUGIN, None, 1, seconds=2.0, step=0.2),
]


def rows() -> list[report.Row]:
    return report.make_rows(MEASUREMENTS, prompts([[0], [0]]))


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
    by_system = {system: environment.child_environment(system, 3) for system in System}
    assert by_system.pop(System.AR)["VLLM_PLUGINS"] == ""
    for variables in by_system.values():
        assert "VLLM_PLUGINS" not in variables
        assert variables["OMP_NUM_THREADS"] == "3"


def test_ratios_are_between_medians_of_comparable_runs() -> None:
    by_run = {(row.system, row.policy, row.concurrency): row for row in rows()}
    one = by_run[System.DLLM, "static, k=1", 1]
    assert one.tokens_per_second == report.Spread(14 / 3, 14 / 27, 14 / 3)
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
    row = report.make_rows([MEASUREMENTS[0], changed], prompts([[0], [0]]))[1]
    assert (row.equal, row.compared) == (1, 2)


def test_targets_say_whether_they_are_reached() -> None:
    targets = {(target.name.split(",")[0], target.where): target for target in report.check_targets(rows())}
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
    throughput = [t for t in report.check_targets(wrong) if t.name.startswith("throughput")]
    assert throughput
    assert not any(target.reached for target in throughput)


def test_tables_show_every_row_and_every_target() -> None:
    console = Console(width=environment.FILE_WIDTH, file=StringIO(), record=True)
    console.print(report.make_sheet(rows(), "tiny").rich())
    console.print(target_sheet(report.check_targets(rows())).rich())
    text = console.export_text()
    for system in System:
        assert system in text
    assert "300.00" in text
    assert "pass" in text
    assert "miss" in text


def test_autoregression_gets_as_many_tokens_as_diffusion_made() -> None:
    requests = [Request([1], 8), Request([2], 8)]
    assert engine.with_lengths(requests, {0: 5}) == [Request([1], 5), Request([2], 8)]


def test_without_its_checkpoint_the_tiny_model_is_refused(tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--checkpoint", str(tmp_path)]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(engine.app, arguments)
    assert result.exit_code == 2
    assert f"--checkpoint: {tmp_path} holds no checkpoint" in result.output
