"""A model checks new weights, and they empty the prefix cache (``patches/018-changed-weights.diff``).

K/V of old weights is wrong under new weights. vLLM goes on using that K/V until a user resets the prefix cache. A model
whose configuration asks for it has its caches emptied as soon as the weights change, and running requests compute their
text anew. A scheduler that keeps more than K/V empties its caches itself (``reset_for_new_weights``).

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
CHANGES_NONE = {
    "compute_weight_checksums",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "supports_draft_weight_updates",
}
"""vLLM's calls to the workers that are about weights, and leave them as they are."""
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
        name = called(method, args)
        if "weight" not in name or name in CHANGES_NONE or not getattr(hf_config, MARKER, False):
            return call(self, method, timeout, args, kwargs)
        if method == "reload_weights":
            given = arguments_of_reload(args, kwargs)
            from_disk = given.get("weights_iterator") is None
            # Without the timeout: vLLM takes an answer that comes too late for that to a later call.
            reasons = call(self, reason_against, None, (given.get("weights_path"), from_disk))
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


def called(method: str | Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The name of what a call to the workers calls; "weights" for an object without a name, which may change some."""
    if method == "apply_model" and args and callable(args[0]):
        method = args[0]
    while isinstance(method, functools.partial):
        method = method.func
    return method if isinstance(method, str) else getattr(method, "__name__", "weights")


def arguments_of_reload(args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of ``reload_weights`` by their names.

    Raises:
        ValueError: they are of a kind that vLLM would fail at, with the old weights gone.
    """
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs or {}, dict):
        raise ValueError(f"args={args!r} and kwargs={kwargs!r} of reload_weights must be a list and an object")
    given = dict(zip(("weights_iterator", "weights_path"), args, strict=False)) | (kwargs or {})
    if isinstance(given.get("weights_iterator"), str):
        raise ValueError(
            "weights_iterator of reload_weights must be tensors with their names; a folder is weights_path"
        )
    if not isinstance(given.get("weights_path"), (str, type(None))):
        raise ValueError(f"weights_path={given['weights_path']!r} of reload_weights must be the path of a folder")
    return given


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
