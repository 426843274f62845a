"""What Inductor makes of a step's stages computes what the stages say, to the last bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.harness import generate
from tests.gpu_less.inductor import Replaced, tensors_of
from tests.gpu_less.replay import OnDevice
from tests.gpu_less.test_steps import PROMPTS, SAMPLING, VERIFIERS, engine_called, params
from vllm_dllm.runtime.compiled import Stages

REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, SAMPLING["seeded"]),
    "FreeDave": (VERIFIERS["freedave"], SAMPLING["seeded"]),
    "Spiffy": (VERIFIERS["spiffy"], {}),
}


def copied(*values: Any) -> Any:
    """Copies of a stage and of its arguments, tensors included."""
    on_device = OnDevice()
    made = [on_device(value) for value in values]
    replaced = Replaced(lambda tensor: tensor.values)
    return [replaced(value) for value in made]


@pytest.mark.parametrize("name", REQUESTS)
def test_compiled_stages_equal_written_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, sampling = REQUESTS[name]
    calls: dict[str, tuple[Any, Any]] = {}
    sizes: dict[str, int] = {}

    def stage(stages: Stages, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            # The call with most requests, groups or drafts.
            name, size = function.__name__, sum(tensor.numel() for tensor in tensors_of(args))
            if size > sizes.get(name, -1):
                sizes[name], calls[name] = size, (copied(function, *args), copied(function, *args))
            return function(*args)

        return run

    monkeypatch.setattr(Stages, "stage", stage)
    # `seed` only sets these engines apart from those of other tests.
    seed = 12 + list(REQUESTS).index(name)
    generate(engine_called("sdar", drafts=bool(options), seed=seed), PROMPTS, [params(options, **sampling)] * 3)
    assert {"lay_out_step", "_decide", "_conclude", "_output"} <= calls.keys()
    for name, ((written, *theirs), (again, *mine)) in calls.items():
        torch._dynamo.reset()
        with torch.inference_mode():
            expected = written(*theirs)
            got = torch.compile(again, fullgraph=True)(*mine)
        # Results, and arguments that the stage may have changed.
        for kind, ours, own in (("result", got, expected), ("arguments", (again, mine), (written, theirs))):
            pairs: list[tuple[Tensor, Tensor]] = list(zip(tensors_of(ours), tensors_of(own), strict=True))
            assert pairs
            for at, (one, other) in enumerate(pairs):
                assert one.dtype == other.dtype
                assert torch.equal(one, other), f"{kind} of {name}: tensor {at}"
