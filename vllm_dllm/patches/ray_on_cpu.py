"""Ray workers on CPUs (``patches/009-ray-on-cpu.diff``).

vLLM's CPU platform has no device to ask Ray for. Its Ray executor needs none: after the start it is the multi-process
executor, with workers in Ray's actors.

Only engines with Ray load the executor's module, so loading the plugin does not. What is changed there is changed when
the platform sees the configuration of such an engine, or at once where the module is loaded already, as in the
processes of such an engine.
"""

import functools
import sys
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import VllmChangedError, of_vllm
from vllm_dllm.versions import has_legacy_ray_executor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

EXECUTOR = "vllm.v1.executor.ray_executor_v2"

OF_A_NODE = frozenset({"CPU_VISIBLE_MEMORY_NODES", "VLLM_CPU_OMP_THREADS_BIND"})
"""Variables that name processors or memory nodes of one machine."""


def apply() -> bool:
    """Change the CPU platform, and the executor once it is needed; False where vLLM has the change."""
    from vllm.platforms.cpu import CpuPlatform

    if CpuPlatform.ray_device_key:
        return False
    check = of_vllm(CpuPlatform, "check_and_update_config", ("vllm_config",))

    @functools.wraps(check)
    def check_and_update_config(cls: type[CpuPlatform], vllm_config: "VllmConfig") -> None:
        _refuse_what_does_not_work(vllm_config)
        check(vllm_config)
        if vllm_config.parallel_config.use_ray:
            change_executor()

    CpuPlatform.ray_device_key = "CPU"
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    if EXECUTOR in sys.modules:
        change_executor()
    return True


def _refuse_what_does_not_work(vllm_config: "VllmConfig") -> None:
    from vllm import envs

    parallel = vllm_config.parallel_config
    is_ray = parallel.distributed_executor_backend == "ray"
    if is_ray and has_legacy_ray_executor() and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        raise ValueError("The legacy Ray executor does not run on CPUs. Leave out VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0.")
    if parallel.data_parallel_backend == "ray":
        raise ValueError(
            "--data-parallel-backend ray does not run on CPUs. Leave it out; engines of data parallelism are then "
            "processes of vLLM."
        )


@functools.cache
def change_executor() -> None:
    """Let vLLM's Ray executor start its workers on CPUs. Idempotent; imports Ray.

    Raises:
        VllmChangedError: the installed vLLM no longer has what is changed.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms import current_platform
    from vllm.v1.executor import ray_executor_v2, ray_utils

    if not current_platform.is_cpu() or ray_utils.ray is None:
        return
    resources = of_vllm(ray_executor_v2.RayExecutorV2, "_get_actor_resource_kwargs", ())
    share_a_name = of_vllm(CpuCommunicator, "_all_group_ranks_share_shm_group_name", ("self",))
    if not isinstance(getattr(ray_utils, "WORKER_SPECIFIC_ENV_VARS", None), set):
        raise VllmChangedError("vllm-dllm adds to vllm.v1.executor.ray_utils.WORKER_SPECIFIC_ENV_VARS, which is no set")
    from vllm_dllm.patches.ray_worker import CpuRayWorkerProc

    @functools.wraps(resources)
    def get_actor_resource_kwargs() -> dict[str, Any]:
        return {"num_gpus": 0}  # the bundle has reserved the CPU

    @functools.wraps(share_a_name)
    def all_group_ranks_share_memory(self: "CpuCommunicator") -> bool:
        from vllm.distributed.parallel_state import in_the_same_node_as

        # Ranks on several nodes have one name where they met over TCP, as Ray's do.
        return share_a_name(self) and all(in_the_same_node_as(self.cpu_group))

    ray_utils.WORKER_SPECIFIC_ENV_VARS.update(OF_A_NODE)
    CpuCommunicator._all_group_ranks_share_shm_group_name = all_group_ranks_share_memory
    ray_executor_v2.RayExecutorV2._get_actor_resource_kwargs = staticmethod(get_actor_resource_kwargs)
    ray_executor_v2.RayWorkerProc = CpuRayWorkerProc
