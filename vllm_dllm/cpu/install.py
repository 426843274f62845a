"""What changes in vLLM on a CPU without Triton: the only caller of the rest of this package."""

import functools

from vllm_dllm.cpu import interpreter, runner


@functools.cache
def install() -> None:
    """Finish what the platform entry point began; does nothing where the interpreter is not in use. Idempotent.

    The general entry point calls it, after ``vllm.triton_utils`` was imported and before any model is. The fallbacks
    come in each worker, where vLLM's CPU platform registers its own.

    Raises:
        RuntimeError: the installed vLLM no longer has what is changed here.
    """
    if not interpreter.active():
        return
    interpreter.hide()
    runner.install()

    from vllm.platforms.cpu import CpuPlatform

    register_vllm_kernels = CpuPlatform.register_triton_kernel_overrides.__func__

    def register_triton_kernel_overrides(cls: type[CpuPlatform]) -> None:
        register_vllm_kernels(cls)
        from vllm_dllm.cpu import fallbacks

        fallbacks.install()

    CpuPlatform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)
