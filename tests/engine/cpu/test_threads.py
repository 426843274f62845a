"""Binding of tensor-parallel ranks to processors."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.utils import cpu_resource_utils as resources

from vllm_dllm.cpu import threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processors on one memory node, nothing bound."""
    monkeypatch.setattr(resources, "get_allowed_cpu_list", lambda: [SimpleNamespace(id=i) for i in (0, 1, 4, 5)])
    monkeypatch.setattr(resources, "get_visible_memory_node", lambda: [0])
    monkeypatch.setattr(threads, "_bound", None)
    monkeypatch.setenv(threads.SIMULATED_NODES, "to be restored")
    monkeypatch.delenv(threads.SIMULATED_NODES)
    monkeypatch.setenv(threads.BIND, "to be restored")
    monkeypatch.delenv(threads.BIND)


def ranks(number: int, engines: int = 1) -> Any:
    return SimpleNamespace(local_world_size=number, data_parallel_size_local=engines)


@pytest.mark.usefixtures("machine")
def test_more_ranks_than_memory_nodes_share_the_processors() -> None:
    threads.bind_ranks(ranks(2))
    assert os.environ[threads.BIND] == "0,1|4,5"


@pytest.mark.usefixtures("machine")
def test_one_engine_after_another_is_bound_anew() -> None:
    threads.bind_ranks(ranks(2))
    threads.bind_ranks(ranks(1))
    assert threads.BIND not in os.environ
    threads.bind_ranks(ranks(4))
    assert os.environ[threads.BIND] == "0|1|4|5"


@pytest.mark.usefixtures("machine")
def test_vllm_does_not_remember_how_an_earlier_engine_was_bound() -> None:
    threads.bind_ranks(ranks(2))
    envs.enable_envs_cache()  # as an engine does when it starts
    assert envs.VLLM_CPU_OMP_THREADS_BIND == "0,1|4,5"
    threads.bind_ranks(ranks(1))
    assert envs.VLLM_CPU_OMP_THREADS_BIND == "auto"


@pytest.mark.usefixtures("machine")
def test_what_the_user_bound_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(threads.BIND, "2|3")
    threads.bind_ranks(ranks(2))
    assert os.environ[threads.BIND] == "2|3"


@pytest.mark.usefixtures("machine")
def test_too_few_processors_are_left_to_vllm_to_refuse() -> None:
    threads.bind_ranks(ranks(8))
    assert threads.BIND not in os.environ


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("bound", [None, "nobind"])
def test_ranks_of_data_parallelism_are_no_memory_nodes(bound: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if bound is not None:
        monkeypatch.setenv(threads.BIND, bound)
    monkeypatch.setattr(threads, "ranks_name_memory_nodes", lambda: False)
    threads.bind_ranks(ranks(1, engines=2))
    assert threads.SIMULATED_NODES not in os.environ
    monkeypatch.setattr(threads, "ranks_name_memory_nodes", lambda: True)
    threads.bind_ranks(ranks(2))
    assert threads.SIMULATED_NODES not in os.environ
    threads.bind_ranks(ranks(1, engines=2))
    assert os.environ[threads.SIMULATED_NODES] == "0"
