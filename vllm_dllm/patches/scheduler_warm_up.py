"""A scheduler may take steps before the engine takes requests (``patches/014-scheduler-warm-up.diff``).

vLLM's scheduler gets no executor, so a scheduler that decides by what steps cost could time none before the first
request.
"""

import functools
from typing import TYPE_CHECKING

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

MARKER = "warm_up"


def apply() -> bool:
    """Change ``EngineCore``; False where vLLM has the change.

    ``EngineCore.__init__`` itself loads the plugin, too late to be wrapped. What is wrapped is the first method that
    ``EngineCore.__init__`` calls once it has made the scheduler.
    """
    from vllm.v1.engine.core import EngineCore

    original = of_vllm(EngineCore, "_initialize_effective_attention_block_size", ("self",))
    if mentions(of_vllm(EngineCore, "__init__", ("self", "vllm_config", "executor_class")), MARKER):
        return False

    @functools.wraps(original)
    def initialize(self: "EngineCore") -> None:
        original(self)
        if warm_up := getattr(self.scheduler, MARKER, None):
            warm_up(self.model_executor)

    EngineCore._initialize_effective_attention_block_size = initialize
    return True
