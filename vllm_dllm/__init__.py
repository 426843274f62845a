"""vLLM plugin for diffusion language models."""

from importlib.metadata import version

from vllm_dllm.filled import Filled, filled
from vllm_dllm.observe.stats import RequestStats, StepMap, request_stats, response_stats

__all__ = ["Filled", "RequestStats", "StepMap", "filled", "request_stats", "response_stats"]
__version__ = version("vllm-dllm")
