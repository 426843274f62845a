"""vLLM plugin for diffusion language models."""

from importlib.metadata import version

__version__ = version("vllm-dllm")
