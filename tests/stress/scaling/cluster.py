"""Ray on this machine, and engines whose ranks are Ray's workers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from vllm import LLM

from tests.engine.harness import tensor_parallel_engine

END_DEADLINE = 15.0
"""Seconds that Ray's processes may take to end."""

NODE: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 80 << 20}
"""Options of every node. Nothing here goes through the object store, so it may be as small as Ray allows."""


@contextmanager
def ray_nodes(number: int, num_cpus: int) -> Iterator[None]:
    """Ray's nodes, as many as there are to be, all on this machine; this process is on the first of them.

    Raises:
        RuntimeError: some of Ray's processes outlive it.
    """
    # Engines that ran in this process have bound its thread to one processor; Ray's processes would be, too.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    processes: set[psutil.Process] = set()
    nodes = Cluster()
    try:
        for _ in range(number):
            nodes.add_node(num_cpus=num_cpus, **NODE)
        ray.init(address=nodes.address, log_to_driver=False)
        yield
    finally:
        for node in nodes.list_all_nodes():
            for process in (info.process for infos in node.all_processes.values() for info in infos):
                processes |= {psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)}
        ray.shutdown()
        nodes.shutdown()
        _, alive = psutil.wait_procs(processes, timeout=END_DEADLINE)
    if alive or not processes:
        raise RuntimeError(f"left over after Ray's end: {alive}")


@contextmanager
def ray_engine(checkpoint: Path, *, dllm: dict[str, Any], **options: Any) -> Iterator[LLM]:
    """An engine of two ranks, each a Ray worker; its scheduler is in this process."""
    with tensor_parallel_engine(checkpoint, dllm=dllm, distributed_executor_backend="ray", **options) as llm:
        group = llm.llm_engine.vllm_config.parallel_config.placement_group
        yield llm
    # vLLM leaves it until Ray ends, and the next engine would wait for its processors.
    ray.util.remove_placement_group(group)
