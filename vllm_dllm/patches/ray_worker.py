"""The worker that vLLM's Ray executor starts on CPUs, see `ray_on_cpu`.

A class of its own, because Ray loads it by its name in the actor's process, before vLLM loads any plugin there.
"""

import os
from types import SimpleNamespace
from typing import Any, cast

import ray
import torch
from vllm.config import VllmConfig
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

from vllm_dllm.cpu.threads import bind_ranks
from vllm_dllm.patches.original import of_vllm

of_vllm(RayWorkerProc, "get_node_and_physical_gpu_ids", ("self",))
of_vllm(
    RayWorkerProc,
    "initialize_worker",
    ("self", "local_rank", "env_vars", "distributed_init_method", "driver_env_vars", "assigned_physical_gpu_ids"),
)


class CpuRayWorkerProc(RayWorkerProc):
    """A worker without an accelerator, on the processors of its rank."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Ray hands out no ids of CPUs. The rank stands for the worker, so that those that share a node are known."""
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]

    def initialize_worker(
        self,
        local_rank: int,
        env_vars: dict[str, str],
        distributed_init_method: str,
        driver_env_vars: dict[str, str] | None = None,
        assigned_physical_gpu_ids: list[int] | None = None,
    ) -> None:
        """Bind the threads, then start.

        Args:
            local_rank: among the workers of the node.
            env_vars: replace the node's own.
            distributed_init_method: where the ranks meet.
            driver_env_vars: fill in what the node's own leave open.
            assigned_physical_gpu_ids: ranks of all workers of the node.
        """
        assert assigned_physical_gpu_ids is not None
        os.environ.update({**(driver_env_vars or {}), **os.environ, **env_vars})
        bind_process(self._init_kwargs["vllm_config"], local_rank, len(assigned_physical_gpu_ids))
        super().initialize_worker(local_rank, env_vars, distributed_init_method, driver_env_vars)


def bind_process(vllm_config: VllmConfig, local_rank: int, num_local_ranks: int) -> None:
    """Bind the calling thread, and those it starts from now on, to the processors of a rank.

    The variables that do it for other workers are read when a process starts, before Ray has said where it is.

    Args:
        num_local_ranks: workers of the engine on this node.
    """
    parallel = vllm_config.parallel_config
    of_this_node = SimpleNamespace(
        local_world_size=num_local_ranks,
        data_parallel_size_local=parallel.data_parallel_size_local,
        data_parallel_rank_local=parallel.data_parallel_rank_local,
        _api_process_count=parallel._api_process_count,
        assigned_physical_gpu_ids=None,  # would be memory nodes from vLLM 0.33 on, and Ray's are ranks
    )
    bind_ranks(cast(Any, of_this_node))
    manager = OMPProcessManager(
        cast(Any, SimpleNamespace(parallel_config=of_this_node, kv_transfer_config=vllm_config.kv_transfer_config))
    )
    if manager.skip_setup:
        return
    processors = manager.cpu_lists[local_rank]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)
    torch.set_num_threads(len(processors))
