"""Processors and memory nodes for the ranks of an engine on a CPU."""

import os
from typing import TYPE_CHECKING

from vllm_dllm.versions import ranks_name_memory_nodes

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

BIND = "VLLM_CPU_OMP_THREADS_BIND"
VISIBLE_NODES = "CPU_VISIBLE_MEMORY_NODES"
SIMULATED_NODES = "VLLM_CPU_SIM_MULTI_NUMA"

_bound: str | None = None
"""What ``bind_ranks`` last wrote, so that the next engine of this process can tell it from the user's choice."""


def bind_ranks(parallel_config: "ParallelConfig") -> None:
    """Share the processors out evenly where vLLM would give up: with more ranks than memory nodes.

    Leaves alone what the user has bound, and what vLLM can bind by itself, a memory node to a rank.
    """
    global _bound
    from vllm import envs
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_visible_memory_node

    num_ranks = parallel_config.local_world_size * parallel_config.data_parallel_size_local
    is_short = num_ranks > len(get_visible_memory_node())
    if (
        is_short
        and parallel_config.data_parallel_size_local > 1
        and VISIBLE_NODES not in os.environ
        and ranks_name_memory_nodes()
    ):
        os.environ.setdefault(SIMULATED_NODES, "0")
    if os.environ.get(BIND) not in (None, _bound):
        return
    before, _bound = _bound, None
    os.environ.pop(BIND, None)
    processors = [str(cpu.id) for cpu in get_allowed_cpu_list()]
    if is_short and num_ranks <= len(processors):
        share = len(processors) // num_ranks
        _bound = "|".join(",".join(processors[rank * share : (rank + 1) * share]) for rank in range(num_ranks))
        os.environ[BIND] = _bound
    if _bound != before:
        # An engine that ran in this process before has made vLLM remember the environment as it was.
        envs.disable_envs_cache()
