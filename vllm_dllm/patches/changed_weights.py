"""New weights empty the prefix cache (``patches/018-changed-weights.diff``).

K/V that old weights computed is wrong under new ones. vLLM leaves it to its user to say so (``reset_prefix_cache``, or
a pause that clears the caches), and until then serves old pages to new requests and goes on with old K/V of running
ones. A model whose configuration asks for it has its caches emptied as soon as its weights have changed. Running
requests then compute their text anew. A scheduler that keeps more than K/V empties its caches itself
(``reset_for_new_weights``).
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

MARKER = "diffusion_weights_empty_caches"


def apply() -> bool:
    """Change ``EngineCore.collective_rpc``; False where vLLM has the change."""
    from vllm.v1.engine.core import EngineCore

    call = of_vllm(EngineCore, "collective_rpc", ("self", "method", "timeout", "args", "kwargs"))
    if mentions(call, MARKER):
        return False

    @functools.wraps(call)
    def collective_rpc(self: "EngineCore", method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        hf_config = self.vllm_config.model_config.hf_config
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        if "weight" not in name or not getattr(hf_config, MARKER, False):
            return call(self, method, *args, **kwargs)
        try:
            return call(self, method, *args, **kwargs)
        finally:
            # An update that fails may have changed some of them.
            scheduler: Any = self.scheduler
            if hasattr(scheduler, "reset_for_new_weights"):
                scheduler.reset_for_new_weights()
            else:
                scheduler.reset_prefix_cache(reset_running_requests=True)

    EngineCore.collective_rpc = collective_rpc
    return True
