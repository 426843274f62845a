"""Steps whose stages Inductor compiles for a GPU: their kernels are few, and compute what the stages say.

Inductor makes a program of each stage for an H100. Triton compiles each of the program's kernels to a cubin. The
program also runs in Triton's interpreter, and returns to the last bit what the stage's operations return on the host.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu_less.inductor import compiling_for, program_of
from tests.gpu_less.programs import compile_program, prepare_compiler, prepare_interpreter, run_program
from tests.gpu_less.replay import stage
from tests.gpu_less.test_launches import ROLLOUT, TOP_P
from tests.gpu_less.test_steps import (
    FULL_ATTENTION,
    PROMPTS,
    S2D2,
    SAMPLING,
    SCORED,
    VERIFIERS,
    engine_for,
    params,
    replay,
)
from vllm_dllm.runtime.compiled import Stages

BUDGETS: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "greedy": ("sdar", {}, {}, 16),
    "temperature": ("sdar", {}, SAMPLING["seeded"], 17),
    "top-p": ("sdar", {}, TOP_P, 34),
    "rollout": ("sdar", {"dllm_step_map": True}, ROLLOUT, 61),
    "all sampling parameters": ("sdar", {}, SAMPLING["reshaped"], 79),
    "FreeDave": ("sdar", VERIFIERS["freedave"], {}, 34),
    "FreeDave, temperature": ("sdar", VERIFIERS["freedave"], SAMPLING["seeded"], 44),
    "PSD": ("sdar", VERIFIERS["psd"], {}, 34),
    "Spiffy": ("sdar", VERIFIERS["spiffy"], {}, 41),
    "FeF": ("sdar", VERIFIERS["fef"], {}, 67),
    "FeF, top-p": ("sdar", VERIFIERS["fef"], TOP_P, 139),
    "S2D2": ("fast_dllm_v2", S2D2, {}, 26),
    "S2D2, top-p": ("sdar", S2D2, TOP_P, 107),
    "S2D2, temperature, by a score": ("sdar", SCORED, SAMPLING["seeded"], 72),
    "full attention": ("llada", {}, {}, 13),
    "I-DLM": ("idlm", {}, {}, 18),
    "full attention, FreeDave": ("llada", VERIFIERS["freedave"], {}, 31),
}
"""Engine, options and sampling parameters of all requests of a step, and the step's launches, row plan and sampler."""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    cache = str(tmp_path_factory.mktemp("triton"))
    with ProcessPoolExecutor(1, get_context("spawn"), prepare_compiler, ("H100", cache)) as process:
        yield process


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn"), prepare_interpreter) as process:
        yield process


@pytest.mark.parametrize("name", BUDGETS)
def test_a_compiled_step(
    name: str, compiler: ProcessPoolExecutor, interpreter: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, options, sampling, most = BUDGETS[name]
    monkeypatch.setattr(Stages, "stage", stage)
    # `seed` only sets these engines apart from those of other tests.
    found = replay(engine_for(options, engine, seed=11), params(options, **sampling))
    assert found.problems() == {}
    steps = [step for step in found.steps if step.num_decodes == len(PROMPTS)]
    step = max(steps, key=lambda step: (step.num_branches, sum(step.launches())))
    assert step.sampler is not None
    launches, stages = sum(step.launches()), [*step.plan.stages, *step.sampler.stages]
    lay_out = "lay_out_full_step" if engine in FULL_ATTENTION else "lay_out_step"
    names = {"_speculate", "_conclude"} if engine == "idlm" else {"_step"}
    if "dllm_verify" in options:
        names = {"_close" if options["dllm_verify"] in ("fef", "s2d2") else "decide", "_conclude"}
    assert {lay_out, *names} <= {function.__name__ for function, _ in stages}
    compiled = []
    for function, args in stages:
        with compiling_for("H100"):
            program = program_of(function, args)
        launches += program.launches
        compiled.append(compiler.submit(compile_program, program.code))
        # The other process has the memory of these tensors, and changes them.
        wanted = program.results()
        run = interpreter.submit(run_program, program.code, program.args)
        for values, wanted_values in zip(run.result(), wanted, strict=True):
            for one, other in zip(values, wanted_values, strict=True):
                if isinstance(other, Tensor):
                    assert one.dtype == other.dtype
                    assert torch.equal(one, other), function.__name__
    assert min(kernels.result() for kernels in compiled) > 0
    assert launches <= most
