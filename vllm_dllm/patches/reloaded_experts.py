"""Experts that are loaded anew on a CPU are packed anew (``patches/019-reloaded-experts-on-cpu.diff``).

A CPU's kernel for mixtures of experts reads packed weights. vLLM packs them when it sets the kernel up, which it does
once: weights that ``reload_weights`` loads stay as they are in the checkpoint, and the kernel reads nonsense.
"""

import functools
from typing import Any

from vllm_dllm.patches.original import mentions, of_vllm


def apply() -> bool:
    """Change ``UnquantizedFusedMoEMethod``; False on other platforms, and where vLLM has the change."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    set_up = of_vllm(UnquantizedFusedMoEMethod, "_setup_kernel", ("self", "layer", "w13", "w2"))
    if mentions(set_up, "is_cpu"):
        return False

    @functools.wraps(set_up)
    def _setup_kernel(self: UnquantizedFusedMoEMethod, layer: Any, *args: Any, **kwargs: Any) -> None:
        is_set_up = self.moe_kernel is not None
        set_up(self, layer, *args, **kwargs)
        if is_set_up and self.moe_kernel is not None:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = _setup_kernel
    return True
