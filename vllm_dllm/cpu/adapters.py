"""Rows without a LoRA adapter stay as they are on a CPU, as in vLLM 0.33.

Rows without an adapter have the index -1. The torch operations of vLLM 0.32 look adapters up by that index and find the
adapter in the last slot, so that requests of the base model get that adapter wherever another row of the step has any.
"""

import functools
import inspect
from typing import Any

import torch
from vllm.config import VllmConfig

OPERATIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
PARAMETERS = ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor")
"""Of all three: vLLM calls either half of an adapter so."""


def mend(vllm_config: VllmConfig, device: torch.device) -> None:
    """Change the operations for an engine that computes with adapters on a CPU."""
    if vllm_config.lora_config is not None and device.type == "cpu":
        install()


@functools.cache
def install() -> bool:
    """Change the operations where vLLM keeps them, once per process; False where vLLM has the change.

    Raises:
        RuntimeError: the installed vLLM no longer has the operations, or they take other parameters.
    """
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    # `sgmv_shrink` and its like call these three.
    for name in OPERATIONS:
        original = getattr(lora_ops, name, None)
        if not callable(original) or tuple(inspect.signature(original).parameters)[:4] != PARAMETERS:
            raise RuntimeError(
                f"The installed vLLM has no vllm.lora.ops.torch_ops.lora_ops.{name}({', '.join(PARAMETERS)}, ...); "
                "vllm-dllm changes it on a CPU"
            )
        if "masked_fill" in original.__code__.co_names:
            return False
        for module in (lora_ops, torch_ops, punica_cpu):
            setattr(module, name, leaving_rows_alone(original))
    return True


def leaving_rows_alone(operation: Any) -> Any:
    """An operation that adds zeros to the rows whose index is negative."""

    @functools.wraps(operation)
    def of_adapters(
        inputs: torch.Tensor,
        lora_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        inputs = inputs.masked_fill((lora_indices_tensor < 0).unsqueeze(1), 0)
        operation(inputs, lora_weights, output_tensor, lora_indices_tensor, *args, **kwargs)

    return of_adapters
