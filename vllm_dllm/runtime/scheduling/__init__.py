"""vLLM's scheduler for diffusion models. A scheduler class of a user derives from one of the two classes here.

The classes are imported when they are first asked for: ``turns`` and ``draft_budget`` work without vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_dllm.runtime.scheduling.scheduler import DllmAsyncScheduler, DllmScheduler

__all__ = ["DllmAsyncScheduler", "DllmScheduler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_dllm.runtime.scheduling import scheduler

    return getattr(scheduler, name)
