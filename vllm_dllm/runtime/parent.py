"""An engine that outlives the process that started it would hold its memory and devices for nobody."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import connection

from vllm.logger import init_logger

# Below vllm's namespace, or its log configuration drops the messages.
logger = init_logger("vllm.vllm_dllm.runtime.parent")

ENGINE_PROCESS = "EngineCore"
"""vLLM's name of an engine's process, followed by its number where there are several."""


def end_with_parent() -> None:
    """End this engine's process when the one that started it is gone, which vLLM leaves to whoever finds it.

    A server or program that ends in order ends its engine itself, and one that has the engine inside cannot leave it.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(ENGINE_PROCESS):
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        logger.error("Process %d, which started this engine, is gone: the engine ends too", parent.pid)
        # As it ends on request: requests are dropped, and the workers end.
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="ParentMonitor").start()
