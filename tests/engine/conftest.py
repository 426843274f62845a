"""What vLLM does once per process, and each engine in the process of the tests needs."""

import pytest
from vllm.distributed import model_parallel_is_initialized, parallel_state


@pytest.fixture(autouse=True)
def expert_parallel_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes this group with the first engine of a process, and only if that one is a mixture of experts."""
    if model_parallel_is_initialized() and parallel_state._EP is None:
        monkeypatch.setattr(parallel_state, "_EP", parallel_state.get_tp_group())
