"""How the shims find their place, and what they say when it is gone."""

import pytest
import vllm
from vllm.sampling_params import SamplingParams

from vllm_dllm import patches
from vllm_dllm.patches import sampling_params
from vllm_dllm.patches.seam import SeamMovedError, mentions, seam


def test_all_patches_are_applied_to_stock_vllm_once() -> None:
    assert patches.apply_all() == patches.PATCHES
    validate = SamplingParams._validate_diffusion
    assert patches.apply_all() == patches.PATCHES
    assert SamplingParams._validate_diffusion is validate


def test_an_environment_variable_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patches.DISABLE, "1")
    assert patches.apply_all.__wrapped__() == ()


def test_a_symbol_that_is_gone_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SamplingParams, "_validate_diffusion")
    with pytest.raises(SeamMovedError) as error:
        sampling_params.apply()
    assert "vllm.sampling_params.SamplingParams._validate_diffusion" in str(error.value)
    assert vllm.__version__ in str(error.value)


class Owner:
    def method(self, first: int, second: str = "needle") -> str:
        return second + "a string constant"


def test_a_symbol_that_takes_other_parameters_is_named_with_them() -> None:
    assert seam(Owner, "method", ("self", "first")) is Owner.method
    with pytest.raises(
        SeamMovedError, match=r"Owner.method, which takes \(self, first, second\) instead of \(self, x\)"
    ):
        seam(Owner, "method", ("self", "x"))


def test_a_change_is_recognised_by_a_name_or_a_string_in_the_code() -> None:
    assert mentions(Owner.method, "string constant")
    assert not mentions(Owner.method, "needle")
    assert mentions(sampling_params.apply, "_validate_diffusion")
