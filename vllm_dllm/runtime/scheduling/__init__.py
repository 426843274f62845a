"""vLLM's scheduler for diffusion models. A scheduler class of a user derives from one of the two classes here."""

from vllm_dllm.runtime.scheduling.asynchronous import DllmAsyncScheduler
from vllm_dllm.runtime.scheduling.scheduler import DllmScheduler

__all__ = ["DllmAsyncScheduler", "DllmScheduler"]
