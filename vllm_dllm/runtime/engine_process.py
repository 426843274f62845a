"""An engine's process ends with the process that started it, and so frees its memory and devices."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import connection

from vllm_dllm.observe.vllm_log import module_logger

logger = module_logger(__name__)

ENGINE_PROCESS = "EngineCore"
"""vLLM's name of an engine's process, followed by its number where there are several."""


def exit_with_parent() -> None:
    """End this engine's process as soon as the process that started the engine is gone.

    A server that ends in order ends its engine itself. A server that was killed leaves its engine behind, and vLLM does
    not end the engine then.
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
