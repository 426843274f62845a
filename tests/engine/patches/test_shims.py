"""How the shims find their place, and what they say when it is gone."""

import subprocess
import sys
from types import ModuleType

import pytest
import vllm
from vllm.config import SpeculativeConfig, VllmConfig, speculative
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import spec_decode

from vllm_dllm import patches
from vllm_dllm.patches import draft_model_speculators, ray_on_cpu, sampling_params
from vllm_dllm.patches.original import VllmChangedError, mentions, of_vllm, property_of_vllm


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
    with pytest.raises(VllmChangedError) as error:
        sampling_params.apply()
    assert "vllm.sampling_params.SamplingParams._validate_diffusion" in str(error.value)
    assert vllm.__version__ in str(error.value)


class Owner:
    def method(self, first: int, second: str = "needle") -> str:
        return second + "a string constant"


def test_a_symbol_that_takes_other_parameters_is_named_with_them() -> None:
    assert of_vllm(Owner, "method", ("self", "first")) is Owner.method
    with pytest.raises(
        VllmChangedError,
        match=rf"Owner.method, which takes \(self, first, second\) instead of \(self, x\) \(of the module {__name__}\)",
    ):
        of_vllm(Owner, "method", ("self", "x"))


class Properties:
    @property
    def read(self) -> int:
        return 3

    write_only = property(None, lambda self, value: None)

    def method(self) -> None: ...


def test_the_getter_of_a_property_is_found() -> None:
    assert property_of_vllm(Properties, "read")(Properties()) == 3


@pytest.mark.parametrize(
    ("name", "problem"), [("gone", "is gone"), ("method", "is no property"), ("write_only", "is no property")]
)
def test_a_property_that_is_none_is_named(name: str, problem: str) -> None:
    with pytest.raises(VllmChangedError, match=rf"Properties\.{name}, which {problem} in .* vLLM {vllm.__version__}"):
        property_of_vllm(Properties, name)


def test_draft_models_are_changed_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.apply_all()
    create, registry = EngineArgs.create_speculative_config, speculative.SPECULATIVE_METHODS
    monkeypatch.delattr(VllmConfig, "num_lookahead_tokens")
    with pytest.raises(VllmChangedError, match=r"VllmConfig\.num_lookahead_tokens, which is gone"):
        draft_model_speculators.apply()
    assert EngineArgs.create_speculative_config is create
    assert speculative.SPECULATIVE_METHODS is registry


def test_a_runner_that_was_loaded_before_gets_the_change_too(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.apply_all()
    runner = ModuleType("vllm.v1.worker.gpu.model_runner")
    runner.init_speculator = before = spec_decode.init_speculator
    monkeypatch.setitem(sys.modules, runner.__name__, runner)
    for owner, name in (
        (speculative, draft_model_speculators.REGISTRY),
        (EngineArgs, "create_speculative_config"),
        (SpeculativeConfig, "verify_equal_vocab_size_if_draft_model"),
        (SpeculativeConfig, "max_num_new_slots_for_drafting"),
        (VllmConfig, "num_lookahead_tokens"),
        (spec_decode, "init_speculator"),
    ):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # put back when this ends
    assert draft_model_speculators.apply()
    assert runner.init_speculator is spec_decode.init_speculator is not before


def test_a_change_is_recognised_by_a_name_or_a_string_in_the_code() -> None:
    assert mentions(Owner.method, "string constant")
    assert not mentions(Owner.method, "needle")
    assert mentions(sampling_params.apply, "_validate_diffusion")


def test_changing_the_platform_loads_neither_ray_nor_its_executor() -> None:
    code = (
        "import sys; from vllm.platforms.cpu import CpuPlatform; from vllm_dllm.patches import ray_on_cpu;"
        "print(ray_on_cpu.apply(), CpuPlatform.ray_device_key, {'ray', ray_on_cpu.EXECUTOR} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "True CPU set()"


def test_the_executor_is_changed_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor import ray_executor_v2, ray_utils

    ray_on_cpu.change_executor()
    worker, names = ray_executor_v2.RayWorkerProc, set(ray_utils.WORKER_SPECIFIC_ENV_VARS)
    monkeypatch.delattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name")
    with pytest.raises(VllmChangedError, match=r"_all_group_ranks_share_shm_group_name, which is gone"):
        ray_on_cpu.change_executor.__wrapped__()
    assert ray_executor_v2.RayWorkerProc is worker
    assert names == ray_utils.WORKER_SPECIFIC_ENV_VARS
