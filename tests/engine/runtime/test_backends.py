"""Which attention backend an engine takes, by GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_dllm.runtime import backends
from vllm_dllm.runtime.backends import check_backends, choose_backend

AMPERE, ADA, HOPPER, BLACKWELL, THOR, RTX = 80, 89, 90, 100, 110, 120
TRITON, FLASH = AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.FLASH_ATTN


@contextmanager
def on_gpu(capability: int, *, supported: bool = True, batch_invariant: bool = False) -> Iterator[None]:
    """As on a GPU of this capability, with a FlashAttention 4 that is ``supported`` or not."""
    platform = SimpleNamespace(
        is_cpu=lambda: False,
        is_cuda=lambda: True,
        is_device_capability_family=lambda family: capability // 10 == family // 10,
        has_device_capability=lambda least: capability >= least,
    )
    # A vLLM for CPUs has no such module.
    interface = SimpleNamespace(is_fa_version_supported=lambda version: version < 4 or supported)
    modules = {
        "vllm.vllm_flash_attn": mock.MagicMock(),
        "vllm.vllm_flash_attn.flash_attn_interface": interface,
    }
    with (
        mock.patch.object(backends, "current_platform", platform),
        mock.patch.object(backends, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant)),
        mock.patch.dict("sys.modules", modules),
    ):
        yield


def choose(
    capability: int,
    *,
    given: AttentionBackendEnum | None = None,
    masks_differ: bool = False,
    cache_dtype: str = "auto",
    version: int | None = None,
    **world: bool,
) -> AttentionBackendEnum | None:
    """What is chosen on a GPU of this capability."""
    attention: Any = SimpleNamespace(flash_attn_version=version)
    with on_gpu(capability, **world):
        return choose_backend(given, attention, cache_dtype, masks_differ=masks_differ)


def test_gpus_of_other_makers_have_tritons_attention_where_masks_differ() -> None:
    other = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False)
    attention: Any = SimpleNamespace(flash_attn_version=None)
    with mock.patch.object(backends, "current_platform", other):
        for given in (None, TRITON):
            assert choose_backend(given, attention, "auto", masks_differ=True) == TRITON
            assert choose_backend(given, attention, "auto", masks_differ=False) == given
        assert choose_backend(FLASH, attention, "auto", masks_differ=False) == FLASH
        with pytest.raises(ValueError, match=r"backend FLASH_ATTN is not allowed: .* allowed here: TRITON_ATTN"):
            choose_backend(FLASH, attention, "auto", masks_differ=True)


@pytest.mark.parametrize("capability", [AMPERE, ADA, HOPPER, BLACKWELL, THOR, RTX])
def test_only_hopper_leaves_the_choice_to_vllm_where_masks_differ(capability: int) -> None:
    assert choose(capability) is None
    assert choose(capability, masks_differ=True) == (None if capability == HOPPER else TRITON)


@pytest.mark.parametrize("without", [{"version": 2}, {"supported": False}, {"batch_invariant": True}])
def test_not_where_vllm_would_not_take_flash_attention_4(without: dict[str, Any]) -> None:
    assert choose(HOPPER, **without) is None
    assert choose(HOPPER, masks_differ=True, **without) == TRITON
    with pytest.raises(ValueError, match=r"FLASH_ATTN is not allowed: .*; allowed here: TRITON_ATTN"):
        choose(HOPPER, masks_differ=True, given=FLASH, **without)
    assert choose(HOPPER, given=FLASH, **without) == FLASH


@pytest.mark.parametrize("version", [None, 3, 4])
def test_the_users_choice_stays(version: int | None) -> None:
    assert choose(HOPPER, masks_differ=True, given=FLASH, version=version) == FLASH
    assert choose(RTX, masks_differ=True, given=TRITON) == TRITON
    with pytest.raises(ValueError, match="FLASH_ATTN is not allowed"):
        choose(RTX, masks_differ=True, given=FLASH, version=version)


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_a_quantized_cache_does_not_lead_to_flashinfer(cache_dtype: str) -> None:
    for capability in (ADA, HOPPER, BLACKWELL, RTX):
        assert choose(capability, cache_dtype=cache_dtype) == TRITON
    with pytest.raises(ValueError, match=f"kv_cache_dtype='{cache_dtype}' is not allowed: .* capability 8.9 or above"):
        choose(AMPERE, cache_dtype=cache_dtype)
    assert choose(AMPERE, cache_dtype="int8_per_token_head") == TRITON
    with pytest.raises(ValueError, match=r"kv_cache_dtype='int4_per_token_head' is not allowed: .* causal attention"):
        choose(HOPPER, cache_dtype="int4_per_token_head")


def test_what_vllm_chose_in_the_end_is_checked() -> None:
    def check(*names: str, masks_differ: bool = False) -> None:
        chosen: Any = [SimpleNamespace(get_name=lambda name=name: name) for name in names]
        attention: Any = SimpleNamespace(flash_attn_version=None)
        with on_gpu(RTX):
            check_backends(chosen, attention, masks_differ=masks_differ)

    check("FLASH_ATTN", "TRITON_ATTN")
    check("TRITON_ATTN", masks_differ=True)
    with pytest.raises(ValueError, match=r"vLLM chose the attention backend FLASHINFER.* set another one"):
        check("FLASH_ATTN", "FLASHINFER")
    # By `backend_per_kind`, say.
    with pytest.raises(ValueError, match="FLASH_ATTN is not allowed"):
        check("FLASH_ATTN", masks_differ=True)


@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16", "int8_per_token_head", "nvfp4"])
def test_a_cpu_refuses_a_cache_that_its_attention_cannot_read(cache_dtype: str) -> None:
    attention: Any = SimpleNamespace(flash_attn_version=None)
    with mock.patch.object(backends, "current_platform", SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False)):
        for allowed in ("auto", "fp8"):
            assert choose_backend(None, attention, allowed, masks_differ=False) is None
        with pytest.raises(ValueError, match=rf"kv_cache_dtype='{cache_dtype}' is not allowed: .* auto, fp8, fp8_e4m3"):
            choose_backend(None, attention, cache_dtype, masks_differ=False)
