"""Loads what processes of vLLM need, plugins apart; for the process that `tests.warm` forks."""

import gc

import setproctitle
import vllm.entrypoints.cli.serve
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker
import vllm.v1.worker.gpu_worker
from vllm import LLM

from tests.warm import sleep_between_looks

sleep_between_looks()
# vLLM collects garbage several times when an engine starts or ends, which would search all that was loaded here.
gc.collect()
gc.freeze()
gc.unfreeze = lambda: None
setproctitle.getproctitle()  # It looks for its place in memory, which it finds in the environment that was there first.

__all__ = ["LLM", "vllm"]
