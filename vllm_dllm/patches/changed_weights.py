"""A model checks new weights, and they empty the prefix cache (``patches/018-changed-weights.diff``).

K/V that old weights computed is wrong under new ones. vLLM leaves it to its user to say so (``reset_prefix_cache``, or
a pause that clears the caches), and until then serves old pages to new requests and goes on with old K/V of running
ones. A model whose configuration asks for it has its caches emptied as soon as its weights have changed. Running
requests then compute their text anew. A scheduler that keeps more than K/V empties its caches itself
(``reset_for_new_weights``).

``reload_weights`` takes the old weights away before it opens the first file. If there is no file, or one of another
model, nothing puts them back, and the next request ends the engine. So the model is asked first.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

MARKER = "diffusion_weights_empty_caches"
CHECK = "check_new_weights"
"""Method of a model. It takes the ``weights_path`` and whether weights are read from there, and raises an error."""


def apply() -> bool:
    """Change ``EngineCore.collective_rpc``; False where vLLM has the change."""
    from vllm.v1.engine.core import EngineCore

    call = of_vllm(EngineCore, "collective_rpc", ("self", "method", "timeout", "args", "kwargs"))
    if mentions(call, MARKER):
        return False

    @functools.wraps(call)
    def collective_rpc(
        self: "EngineCore",
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        hf_config = self.vllm_config.model_config.hf_config
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        if "weight" not in name or not getattr(hf_config, MARKER, False):
            return call(self, method, timeout, args, kwargs)
        if name == "reload_weights":
            given = dict(zip(("weights_iterator", "weights_path"), args, strict=False)) | (kwargs or {})
            from_disk = given.get("weights_iterator") is None
            reasons = call(self, reason_against, timeout, (given.get("weights_path"), from_disk))
            if any(reasons):
                raise ValueError(next(filter(None, reasons)))
        try:
            return call(self, method, timeout, args, kwargs)
        finally:
            # An update that fails may have changed some of them.
            scheduler: Any = self.scheduler
            if hasattr(scheduler, "reset_for_new_weights"):
                scheduler.reset_for_new_weights()
            else:
                scheduler.reset_prefix_cache(reset_running_requests=True)

    EngineCore.collective_rpc = collective_rpc
    return True


def reason_against(worker: Any, weights_path: str | None, from_disk: bool) -> str | None:
    """Why the model of a worker refuses new weights; ``None``: it does not.

    Where several workers raise an error, vLLM reads the first one's answer alone, and takes the others' for answers to
    later calls.
    """
    check = getattr(worker.get_model(), CHECK, None)
    if check is None:
        return None
    try:
        check(weights_path, from_disk)
    except Exception as error:
        return str(error)
    return None
