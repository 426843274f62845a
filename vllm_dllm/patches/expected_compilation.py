"""Kernels that a start compiles once vLLM's warm-up is over (``patches/022-expected-compilation.diff``).

vLLM's monitor takes every kernel that is compiled after the warm-up for one that a request waits for. A scheduler's
first steps, of requests that nobody sent, compile kernels so that no request has to wait. The monitor would warn of
each of them, and with ``--jit-monitor-mode error`` the engine would not start.
"""

import functools
from typing import Any

from vllm_dllm.patches.original import of_vllm

MARKER = "expect"


def apply() -> bool:
    """Give the monitor ``expect``; False where vLLM has it."""
    from vllm.utils import jit_monitor

    if hasattr(jit_monitor, MARKER):
        return False
    original = of_vllm(jit_monitor, "_handle_jit_event", ())
    is_expected = False

    @functools.wraps(original)
    def handle(**event: Any) -> None:
        if not is_expected:
            original(**event)

    def expect(expected: bool) -> None:
        nonlocal is_expected
        is_expected = expected

    jit_monitor._handle_jit_event = handle
    setattr(jit_monitor, MARKER, expect)
    return True
