"""Which of vLLM's attention backends can attend in groups of rows, each a request to the backend."""

from collections.abc import Iterable

from vllm import envs
from vllm.config import AttentionConfig, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig, is_quantized_kv_cache

from vllm_dllm.options.drafter import UNFIT_BACKENDS

WITHOUT_FLAGS = (
    "attention backend FLASH_ATTN is not allowed: some rows of a step see what follows them and others do not, which "
    "FlashAttention can from version 4 on, on Hopper, without flash_attn_version=2 and VLLM_BATCH_INVARIANT=1; allowed "
    "here: TRITON_ATTN"
)


def choose_backend(
    given: AttentionBackendEnum | None, attention: AttentionConfig, cache_dtype: str, *, masks_differ: bool
) -> AttentionBackendEnum | None:
    """The backend to run on; None: vLLM's own choice will do.

    It will not on a GPU where

    - masks differ and vLLM would not take FlashAttention 4 on Hopper. Beside that one, only Triton's attention takes a
      causal flag of every group;
    - the K/V cache is quantized. vLLM would mostly take FlashInfer, whose buffers hold no more groups than requests can
      run.

    Args:
        given: what the user asks for.
        attention: options beside the backend.
        cache_dtype: of the K/V cache, as vLLM calls it.
        masks_differ: some rows of a step see what follows them in their group, and others do not.

    Raises:
        ValueError: no backend can, or not the one that the user asks for.
    """
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        allowed = CPUAttentionBackend.supported_kv_cache_dtypes
        if cache_dtype not in allowed:
            # vLLM 0.32 takes such a type, and its attention reads other numbers than were written.
            raise ValueError(
                f"kv_cache_dtype={cache_dtype!r} is not allowed: attention on a CPU has no such K/V cache; allowed "
                f"here: {', '.join(allowed)}"
            )
    if not current_platform.is_cuda():
        if not masks_differ or current_platform.is_cpu():
            return given
        # Other backends of other makers' GPUs may take the flag of the first group for that of all.
        if given not in (None, AttentionBackendEnum.TRITON_ATTN):
            raise ValueError(
                f"attention backend {given.name} is not allowed: some rows of a step see what follows them and others "
                "do not, for which only Triton's attention has been read on this platform; allowed here: TRITON_ATTN"
            )
        return AttentionBackendEnum.TRITON_ATTN
    is_quantized = is_quantized_kv_cache(cache_dtype)
    if is_quantized and given is None:
        old = cache_dtype.startswith("fp8") and not current_platform.has_device_capability(89)
        if old or cache_dtype.startswith("int4"):
            needs = "a GPU of capability 8.9 or above" if old else "causal attention"
            raise ValueError(
                f"kv_cache_dtype={cache_dtype!r} is not allowed: Triton's attention, the one with groups of rows and a "
                f"quantized K/V cache, needs {needs} for it; allowed here: auto"
            )
    takes_flags = not masks_differ or _takes_flags(attention)
    if given == AttentionBackendEnum.FLASH_ATTN and not takes_flags:
        raise ValueError(WITHOUT_FLAGS)
    return AttentionBackendEnum.TRITON_ATTN if given is None and (is_quantized or not takes_flags) else given


def _takes_flags(attention: AttentionConfig) -> bool:
    """Whether FlashAttention, as vLLM would take it here, has a causal flag of every request."""
    if not current_platform.is_device_capability_family(90) or envs.VLLM_BATCH_INVARIANT:
        return False
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported  # is not there on a CPU

    # vLLM takes version 4 in the place of 3 for diffusion models.
    return attention.flash_attn_version in (None, 3, 4) and is_fa_version_supported(4)


def check_backends(
    backends: Iterable[type[AttentionBackend]], attention: AttentionConfig, *, masks_differ: bool
) -> None:
    """Refuse a backend that vLLM chose in the end and that cannot do what `choose_backend` is about.

    Raises:
        ValueError: names the backend.
    """
    names = {backend.get_name() for backend in backends}
    for name in sorted(names & {*UNFIT_BACKENDS}):
        raise ValueError(
            f"vLLM chose the attention backend {name}, whose buffers hold no more groups of rows than requests can "
            "run; set another one (TRITON_ATTN), or leave out --kv-cache-dtype"
        )
    if "FLASH_ATTN" in names and masks_differ and current_platform.is_cuda() and not _takes_flags(attention):
        raise ValueError(WITHOUT_FLAGS)


def attention_layers(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, masks_differ: bool
) -> list[AttentionLayerBase]:
    """The model's layers of attention, in the order of the configuration; raises as `check_backends`."""
    every = vllm_config.compilation_config.static_forward_context
    layers = [every[name] for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    backends = (layer.get_attn_backend() for layer in layers)
    check_backends(backends, vllm_config.attention_config, masks_differ=masks_differ)
    return layers
