"""Which of vLLM's attention backends can attend in groups of rows, each a request to the backend."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig, is_quantized_kv_cache

if TYPE_CHECKING:
    from vllm.config import AttentionConfig, VllmConfig
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionBackend

UNFIT = ("FLASHINFER", "FLEX_ATTENTION")
"""Backends whose buffers hold a batch of requests; the row plan makes several requests of one."""


def choose_backend(
    given: AttentionBackendEnum | None, attention: "AttentionConfig", cache_dtype: str, *, masks_differ: bool
) -> AttentionBackendEnum | None:
    """The backend to run on; None: vLLM's own choice will do.

    It will not on a GPU where

    - masks differ and vLLM would not take FlashAttention 4 on Hopper. Beside that one, only Triton's attention takes a
      causal flag of every group;
    - the K/V cache is quantized. But for some Blackwells, vLLM would take FlashInfer, whose buffers hold no more groups
      than requests can run.

    Args:
        given: what the user asks for.
        attention: options beside the backend.
        cache_dtype: of the K/V cache, as vLLM calls it.
        masks_differ: some rows of a step see what follows them in their group, and others do not.

    Raises:
        ValueError: the user asks for a backend that cannot.
    """
    if not current_platform.is_cuda():
        return given
    takes_flags = not masks_differ or _takes_flags(attention)
    if given == AttentionBackendEnum.FLASH_ATTN and not takes_flags:
        raise ValueError(
            "attention backend FLASH_ATTN is not allowed: some rows of a step see what follows them and others do not, "
            "which FlashAttention can from version 4 on, on Hopper, without flash_attn_version=2 and "
            "VLLM_BATCH_INVARIANT=1; allowed here: TRITON_ATTN"
        )
    takes_cache = not is_quantized_kv_cache(cache_dtype) or current_platform.is_device_capability_family(100)
    return AttentionBackendEnum.TRITON_ATTN if given is None and not (takes_flags and takes_cache) else given


def _takes_flags(attention: "AttentionConfig") -> bool:
    """Whether FlashAttention, as vLLM would take it here, has a causal flag of every request."""
    if not current_platform.is_device_capability_family(90) or envs.VLLM_BATCH_INVARIANT:
        return False
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported  # is not there on a CPU

    # vLLM takes version 4 in the place of 3 for diffusion models.
    return attention.flash_attn_version in (None, 3, 4) and is_fa_version_supported(4)


def check_backends(backends: Iterable[type["AttentionBackend"]]) -> None:
    """Refuse a backend that vLLM chose in the end and that cannot attend in groups of rows.

    Raises:
        ValueError: names the backend.
    """
    for name in (backend.get_name() for backend in backends):
        if name in UNFIT:
            raise ValueError(
                f"vLLM chose the attention backend {name}, whose buffers hold no more groups of rows than requests can "
                "run; set another one (TRITON_ATTN), or leave out --kv-cache-dtype"
            )


def attention_layers(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> "list[AttentionLayerBase]":
    """The model's layers of attention, in the order of the configuration."""
    layers = vllm_config.compilation_config.static_forward_context
    return [layers[name] for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
