"""Pipeline parallelism is refused before anything starts, whoever would start the workers."""

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine.speculators.test_start import configure, drafter
from vllm_dllm.commands.engine import BUNDLED_MODEL


@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_of_diffusion_models(backend: str) -> None:
    arguments = EngineArgs(str(BUNDLED_MODEL), pipeline_parallel_size=2, distributed_executor_backend=backend)
    with pytest.raises(ValueError, match=r"pipeline parallelism .*--pipeline-parallel-size"):
        arguments.create_engine_config()


@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_of_targets_with_a_diffusion_drafter(backend: str) -> None:
    with pytest.raises(ValueError, match=r"--pipeline-parallel-size"):
        configure(drafter("causal"), engine={"pipeline_parallel_size": 2, "distributed_executor_backend": backend})
