"""What changes in vLLM on a CPU without Triton: the only caller of the rest of this package."""

import functools
import gc
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm_dllm.cpu import interpreter

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@functools.cache
def install() -> None:
    """Finish what the platform entry point began; does nothing where the interpreter is not in use.

    The general entry point calls it, after ``vllm.triton_utils`` was imported and before any model is. The fallbacks
    come in each worker, where vLLM's CPU platform registers its own.

    Raises:
        RuntimeError: the installed vLLM no longer has what is changed here.
    """
    if not interpreter.active():
        return
    interpreter.hide()
    choose_runner()
    inspect_models_here()
    ask_for_amx()
    keep_int8_of_floats_off_amx()
    scale_fp8_by_rows()

    from vllm.platforms.cpu import CpuPlatform

    register_vllm_kernels = CpuPlatform.register_triton_kernel_overrides

    @functools.cache
    def register_all() -> None:
        from vllm_dllm.cpu import fallbacks

        fallbacks.install(_registered_by(register_vllm_kernels))
        # What was imported stays. The five collections of garbage in an engine's start would search it for 0.3 s each.
        gc.freeze()

    def register_triton_kernel_overrides(cls: type[CpuPlatform]) -> None:
        register_all()

    CpuPlatform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)


def _registered_by(register: Callable[[], None]) -> dict[str, Callable[..., Any]]:
    """The kernels that a function of vLLM registers, and their fallbacks; they are not registered yet.

    For each registration vLLM looks through every module that is loaded, for half a second.
    """
    from vllm.triton_utils import dispatcher

    kernels: dict[str, Callable[..., Any]] = {}
    register_kernels, dispatcher.register_kernels = dispatcher.register_kernels, kernels.update
    try:
        register()
    finally:
        dispatcher.register_kernels = register_kernels
    return kernels


def inspect_models_here() -> None:
    """Save the process that vLLM starts to look at a model class: 10 s once per class and machine.

    That process is to keep CUDA out of this one.
    """
    from vllm.model_executor.models import registry

    if not hasattr(registry, "_run_in_subprocess"):
        raise RuntimeError(
            "The installed vLLM has no _run_in_subprocess in its registry of models; vllm-dllm changes it."
        )
    registry._run_in_subprocess = lambda look: look()


def ask_for_amx() -> None:
    """Ask Linux for AMX on processors that have it, once for all threads of this process.

    vLLM's kernels for quantised weights use AMX without asking. The first of them would end a process in which oneDNN
    has not asked before, with an illegal instruction.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def keep_int8_of_floats_off_amx() -> None:
    """Compute INT8 weights with oneDNN where activations are float32, as processors without AMX do.

    vLLM's kernel for AMX takes 16-bit activations only, but vLLM chooses the kernel by the weights alone, and the
    engine would die in its first step.
    """
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    if not hasattr(cpu, "check_cpu_sgl_kernel"):
        raise RuntimeError("The installed vLLM has no check_cpu_sgl_kernel for INT8 weights; vllm-dllm changes it.")
    fits_amx = cpu.check_cpu_sgl_kernel

    def check_cpu_sgl_kernel(n: int, k: int, dtype: torch.dtype) -> bool:
        # While a model is loaded, the default is the dtype of its activations.
        return torch.get_default_dtype() != torch.float32 and fits_amx(n, k, dtype)

    cpu.check_cpu_sgl_kernel = check_cpu_sgl_kernel


def scale_fp8_by_rows() -> None:
    """Multiply FP8 matrices with a scale for each row and each output, which PyTorch has a kernel for everywhere.

    vLLM gives PyTorch one scale for a matrix and multiplies by the others later. On processors with AMX that takes 250
    times as long, because oneDNN has nothing but its reference for it.
    """
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as Kernel

    if "apply_scaled_mm" not in vars(Kernel):
        raise RuntimeError("The installed vLLM has no apply_scaled_mm for FP8 weights; vllm-dllm changes it.")

    def apply_scaled_mm(
        self: Kernel,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        num_rows = math.prod(output_shape[:-1])
        # vLLM pads few rows to 17.
        rows = torch.ones(len(A), 1)
        rows[:num_rows] = As.reshape(-1, 1)
        outputs = Bs.reshape(1, -1).expand(1, B.shape[1]).contiguous()
        product = torch._scaled_mm(A, B, scale_a=rows, scale_b=outputs, out_dtype=out_dtype, bias=bias)
        return product[:num_rows].view(output_shape)

    Kernel.apply_scaled_mm = apply_scaled_mm


def choose_runner() -> None:
    """Give Model Runner V2 to diffusion models and leave every other model on V1, as on any CPU without Triton.

    An explicit ``VLLM_USE_V2_MODEL_RUNNER`` decides as always.
    """
    import vllm.envs as envs
    from vllm.config import VllmConfig

    vllm_choice = vars(VllmConfig).get("use_v2_model_runner")
    if not isinstance(vllm_choice, property) or vllm_choice.fget is None:
        raise RuntimeError("VllmConfig.use_v2_model_runner is no property in the installed vLLM; vllm-dllm changes it.")
    choose = vllm_choice.fget

    def use_v2_model_runner(config: "VllmConfig") -> bool:
        if envs.VLLM_USE_V2_MODEL_RUNNER is None and not needs_v2(config):
            return False
        return choose(config)

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)


def needs_v2(config: "VllmConfig") -> bool:
    """Whether only Model Runner V2 serves this configuration: a diffusion target, a diffusion drafter, or a
    feature that vLLM gives to V2 with or without Triton (HiSparse, watermarking)."""
    speculative = config.speculative_config
    models = (config.model_config, speculative and speculative.draft_model_config)
    return (
        any(model is not None and model.is_diffusion for model in models)
        or config.attention_config.hisparse_config is not None
        or config.watermark_config is not None
    )
