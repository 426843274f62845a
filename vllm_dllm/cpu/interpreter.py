"""Triton's interpreter instead of a CPU backend of Triton, for Model Runner V2 only.

Model Runner V2 is written in Triton, and vLLM asks once, when ``vllm.triton_utils`` is imported, whether a usable
Triton is there. On the CPU wheel the answer is no, and every kernel becomes a plain function that cannot be launched.
Two steps change the answer and nothing else:

1. ``register_backend`` (platform entry point) puts a backend named "cpu" into Triton's table and turns the
   interpreter on, so that vLLM imports the real ``triton`` and its kernels can be launched.
2. ``hide`` (general entry point) takes the backend out again and sets ``HAS_TRITON`` back to False wherever
   it was copied, so that code which chooses between Triton and another path (top-k sampling, slot mappings of
   runner V1, vision towers, inductor) chooses as it would without this plugin.
"""

import functools
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

_TRUE = {"1", "true", "yes", "on", "y"}  # as triton.knobs reads a flag

_registered = False


class _Compiler:
    """The compiler that Triton's table of backends asks for; the interpreter compiles nothing."""

    @staticmethod
    def supports_target(target: object) -> bool:
        return False


class _Driver:
    """The driver that Triton's table of backends asks for; vLLM only counts the active ones."""

    @staticmethod
    def is_active() -> bool:
        return True

    @staticmethod
    def get_current_target() -> object:
        # What Triton raises without a driver, upon which inductor goes on without a target.
        raise RuntimeError("there is no target: Triton's kernels are interpreted on this CPU")


def active() -> bool:
    """Whether this process runs Triton kernels in the interpreter."""
    return _registered


def register_backend() -> None:
    """Turn the interpreter on if vLLM is the CPU build and neither a CPU Triton nor a CUDA device is there.

    Sets ``TRITON_INTERPRET=1`` for this process and its children. Does nothing where the user has set
    ``TRITON_INTERPRET=0``.
    """
    global _registered
    import torch
    from vllm.platforms import vllm_version_matches_substr

    if (
        _registered
        or os.environ.get("TRITON_INTERPRET", "1").lower() not in _TRUE
        or not vllm_version_matches_substr("cpu")
        or find_spec("triton") is None
        or "cpu" in entry_points(group="triton.backends").names
        or torch.cuda.is_available()
    ):
        return
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends

    backends["cpu"] = Backend(_Compiler, _Driver)
    _interpret_device_functions()
    _registered = True


def _interpret_device_functions() -> None:
    """Let interpreted kernels call what Triton decorated before the interpreter was on.

    PyTorch has imported Triton by the time vLLM resolves its platform, so ``tl.max`` and the rest of Triton's
    own library wait to be compiled, and refuse to be called. ``libdevice`` has declarations only, which return
    None; of its functions Model Runner V2 calls one.
    """
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
    from triton.runtime.jit import JITFunction

    @functools.cache
    def interpreted(function: Callable[..., Any]) -> InterpretedFunction:
        return InterpretedFunction(function)

    def call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        return interpreted(self.fn)(*args, **kwargs)

    def log1p(value: tl.tensor) -> tl.tensor:
        return tl.tensor(interpreter_builder.unary_op(value.handle, np.log1p), value.type)

    JITFunction.__call__ = call
    libdevice.log1p = log1p


def hide() -> None:
    """Make Triton invisible again to everything that asks for it, except the choice of the model runner.

    Raises:
        RuntimeError: vLLM looked for Triton and did not find the backend of `register_backend`.
    """
    import vllm.triton_utils
    from triton.backends import backends

    if not vllm.triton_utils.HAS_TRITON:
        raise RuntimeError(
            "vllm-dllm registered a CPU backend with Triton, but vllm.triton_utils reports no Triton: "
            "the installed vLLM looks for Triton in another way (vllm/triton_utils/importing.py)."
        )
    for name, module in list(sys.modules.items()):
        # vllm.config.vllm validates Model Runner V2 with it; `install.choose_runner` makes the choice there.
        if name.startswith("vllm.") and name != "vllm.config.vllm" and "HAS_TRITON" in vars(module):
            vars(module)["HAS_TRITON"] = False
    backends.pop("cpu", None)
    # Blocks run one after the other in the interpreter, which knows no barrier. vLLM does the same for a
    # CPU Triton, but only where HAS_TRITON says so (vllm/v1/worker/cpu/shm.py).
    vllm.triton_utils.tl.debug_barrier = lambda: None
