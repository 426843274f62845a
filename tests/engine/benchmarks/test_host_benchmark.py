"""The benchmark of the host's work: its steps run the engine's own code around a forward that is none."""

import sys

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.engine.harness import schedule_asynchronously, scheduler_of
from tests.engine.shared import started_quickly
from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import host

from vllm_dllm.runtime.compiled import Stages


@pytest.mark.parametrize("diffusion", [True, False])
def test_steps_are_timed(diffusion: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_asynchronously(monkeypatch)
    # PyTorch runs what it has traced, which takes little time to compile.
    monkeypatch.setattr(Stages, "backend", "eager")
    with started_quickly():
        llm = host.start(diffusion=diffusion, concurrency=2)
    assert isinstance(scheduler_of(llm), AsyncScheduler)
    assert host.milliseconds(llm, 2, 5) > 0
    torch._dynamo.reset()
