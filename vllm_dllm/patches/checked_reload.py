"""A model may check a checkpoint before it takes the place of the weights (``patches/024-checked-reload.diff``).

``reload_weights`` takes the old weights away before it opens the first file. If there is no file, or one of another
model, nothing puts the old weights back, and the next request ends the engine.
"""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

CHECK = "check_checkpoint"


def apply() -> bool:
    """Change ``GPUModelRunner.reload_weights``; False where vLLM has the change."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    reload = of_vllm(GPUModelRunner, "reload_weights", ("self", "weights_iterator", "weights_path"))
    if mentions(reload, CHECK):
        return False

    @functools.wraps(reload)
    def reload_weights(
        self: "GPUModelRunner",
        weights_iterator: "Iterable[tuple[str, torch.Tensor]] | None" = None,
        weights_path: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        check = getattr(self.get_model(), CHECK, None)
        if check is not None and weights_iterator is None:
            check(weights_path or self.vllm_config.model_config.model)
        reload(self, weights_iterator, weights_path, *args, **kwargs)

    GPUModelRunner.reload_weights = reload_weights
    return True
