"""vLLM plugin for diffusion language models."""

from importlib.metadata import version

from vllm_dllm.filled import Filled, filled
from vllm_dllm.observe.stats import RequestStats, StepMap, request_stats, response_stats
from vllm_dllm.observe.step_events import StepEvent, step_event

__all__ = [
    "Filled",
    "RequestStats",
    "StepEvent",
    "StepMap",
    "filled",
    "request_stats",
    "response_stats",
    "step_event",
]
__version__ = version("vllm-dllm")
