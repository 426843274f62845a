"""The CPU stand-in: Model Runner V2 on the CPU build of vLLM, which comes without a CPU Triton.

Entry point ``vllm.platform_plugins``. vLLM runs it in every process while it resolves its platform, and only
then looks for Triton, so nothing here may import what looks for Triton itself.
"""

from vllm_dllm.cpu import distribution, stand_in
from vllm_dllm.versions import is_allowed, untested_vllm


def activate() -> None:
    """Let Triton's interpreter stand in for a CPU Triton where there is none; never a platform of its own."""
    distribution.install()
    if untested_vllm() is None or is_allowed():
        stand_in.register_backend()
