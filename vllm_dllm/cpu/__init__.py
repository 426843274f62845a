"""What Model Runner V2 lacks on vLLM's CPU build, which comes without a CPU backend for Triton.

Two changes to vLLM will end this package: pull request #55847 (torch fallbacks for the kernels of a step) replaces
``batch``, ``sampling``, ``rejection``, ``launch`` and ``fallbacks``; #52092 (triton-cpu in the CPU images) replaces
``interpreter`` and ``install``.

`activate` is the entry point ``vllm.platform_plugins``. vLLM calls it in every process while it resolves its platform,
and looks for Triton right after that, so that nothing here may import what looks for Triton.
"""

from vllm_dllm.cpu import distribution, interpreter
from vllm_dllm.versions import is_allowed, untested_vllm


def activate() -> None:
    """Let Triton's interpreter run the kernels where no CPU Triton is; returns None, because this is no platform."""
    distribution.install()
    if untested_vllm() is None or is_allowed():
        interpreter.register_backend()
