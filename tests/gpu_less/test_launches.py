"""Kernels and copies that a step launches on a GPU, beside those of the model: no more than docs/gpu.md says."""

from typing import Any

import pytest

from tests.gpu_less.test_steps import PROMPTS, S2D2, SAMPLING, SCORED, VERIFIERS, engine_for, params, replay

TOP_P: dict[str, Any] = {"temperature": 0.8, "seed": 1, "top_p": 0.9}
ROLLOUT: dict[str, Any] = {"temperature": 0.8, "seed": 1, "logprobs": 0}
BUDGETS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "greedy": ({}, {}, (40, 75)),
    "temperature": ({}, SAMPLING["seeded"], (40, 95)),
    "top-p": ({}, TOP_P, (40, 127)),
    "rollout": ({"dllm_step_map": True}, ROLLOUT, (40, 154)),
    "all sampling parameters": ({}, SAMPLING["reshaped"], (40, 174)),
    "FreeDave": (VERIFIERS["freedave"], {}, (103, 163)),
    "Spiffy": (VERIFIERS["spiffy"], {}, (104, 214)),
    "PSD": (VERIFIERS["psd"], {}, (103, 163)),
    "FeF": (VERIFIERS["fef"], {}, (103, 488)),
    "S2D2": (S2D2, {}, (112, 221)),
    "S2D2, temperature, by a score": (SCORED, SAMPLING["seeded"], (112, 478)),
}
"""Options and sampling parameters of all requests of a step, and the launches of the row plan and of the sampler."""


@pytest.mark.parametrize(
    ("engine", "name"),
    # Models with full attention do not go with S2D2.
    [("sdar", name) for name in BUDGETS] + [("llada", name) for name in BUDGETS if not name.startswith("S2D2")],
)
def test_launches_of_a_step(engine: str, name: str) -> None:
    options, sampling, (plan, sampler) = BUDGETS[name]
    found = replay(engine_for(options, engine), params(options, **sampling))
    steps = [step.launches() for step in found.steps if step.num_decodes == len(PROMPTS)]
    assert steps
    assert max(of_plan for of_plan, _ in steps) <= plan
    assert max(of_sampler for _, of_sampler in steps) <= sampler
