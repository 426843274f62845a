"""Kernels of a step whose stages are compiled for a GPU, beside those of the model: no more than docs/gpu.md says.

Inductor compiles each stage for an H100, and each of its kernels to a cubin.
"""

from typing import Any

import pytest

from tests.gpu_less.inductor import compiling_for, count_kernels
from tests.gpu_less.replay import stage
from tests.gpu_less.test_launches import TOP_P
from tests.gpu_less.test_steps import PROMPTS, SAMPLING, VERIFIERS, engine_called, params, replay
from vllm_dllm.runtime.compiled import Stages

BUDGETS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "greedy": ({}, {}, 35),
    "temperature": ({}, SAMPLING["seeded"], 36),
    "top-p": ({}, TOP_P, 77),
    "all sampling parameters": ({}, SAMPLING["reshaped"], 129),
    "FreeDave": (VERIFIERS["freedave"], {}, 51),
    "FreeDave, temperature": (VERIFIERS["freedave"], SAMPLING["seeded"], 74),
    "PSD": (VERIFIERS["psd"], {}, 49),
    "Spiffy": (VERIFIERS["spiffy"], {}, 61),
}
"""Options and sampling parameters of all requests of a step, and its launches, the row plan's included."""


@pytest.mark.parametrize("name", BUDGETS)
def test_launches_of_a_compiled_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, sampling, most = BUDGETS[name]
    monkeypatch.setattr(Stages, "stage", stage)
    # `seed` only sets these engines apart from those of other tests.
    found = replay(engine_called("sdar", drafts=bool(options), seed=11), params(options, **sampling))
    assert found.problems() == {}
    steps = [step for step in found.steps if step.num_decodes == len(PROMPTS)]
    step = max(steps, key=lambda step: (step.num_branches, sum(step.launches())))
    assert step.sampler is not None
    with compiling_for("H100"):
        compiled = {f.__name__: count_kernels(f, *args) for f, args in (*step.plan.stages, *step.sampler.stages)}
    assert {"lay_out_step", "_decide", "_conclude", "_output"} <= compiled.keys()
    assert sum(step.launches()) + sum(compiled.values()) <= most
