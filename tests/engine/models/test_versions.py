"""A vLLM that is not tested: diffusion models are refused, everything else is left as it is."""

import json
import tomllib

import pytest
import vllm.version
from packaging.requirements import Requirement

from tests.engine.cpu.processes import run
from tests.paths import ROOT
from vllm_dllm import patches, plugin
from vllm_dllm.patches.original import VllmChangedError
from vllm_dllm.versions import ALLOW_UNTESTED, TESTED, untested_vllm


@pytest.mark.parametrize("installed", [*TESTED, "0.32.0+cpu", "0.32.0+cu129", "0.32.1", "0.33.2+cu130"])
def test_local_versions_and_patch_releases_count_as_tested(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.version, "__version__", installed)
    assert untested_vllm() is None


@pytest.mark.parametrize("installed", ["0.31.0", "0.34.0", "0.32.0rc1", "0.32.1.dev3+g1234567", "0.3.2", "dev"])
def test_another_version_is_named_with_the_tested_ones_and_the_way_around(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm.version, "__version__", installed)
    reason = untested_vllm()
    assert reason is not None
    assert all(said in reason for said in (f"vLLM {installed}:", "0.32.0", f"{ALLOW_UNTESTED}=1"))


def test_the_extras_install_a_tested_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (cpu,), (cuda,) = ([Requirement(line).specifier for line in extras[name]] for name in ("cpu", "cuda"))
    assert TESTED[0] in cpu
    assert [version for version in ("0.31.9", *TESTED, "0.33.7", "0.34.0") if version in cuda] == [*TESTED, "0.33.7"]


def test_the_variable_loads_the_plugin_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.version, "__version__", "0.34.0")
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    monkeypatch.setattr(plugin, "refuse_models", lambda reason: pytest.fail("refused"))
    plugin.register()


def test_a_vllm_that_patches_do_not_fit_is_an_error_of_diffusion_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply_all() -> None:
        raise VllmChangedError("somebody wrapped it")

    refused: list[str] = []
    monkeypatch.setattr(patches, "apply_all", apply_all)
    monkeypatch.setattr(plugin, "refuse_models", refused.append)
    plugin.register()
    assert refused == ["somebody wrapped it"]


PROBE = f"""
import json
import vllm.version
vllm.version.__version__ = "0.34.0+cpu"
from vllm.engine.arg_utils import EngineArgs
import vllm.triton_utils
from vllm import SamplingParams
stock = SamplingParams.verify
autoregressive = EngineArgs(model={str(ROOT / "checkpoints" / "tiny-qwen2")!r}).create_engine_config()
try:
    EngineArgs(model={str(ROOT / "checkpoints" / "tiny-sdar")!r}).create_engine_config()
    error = None
except Exception as raised:
    error = str(raised)
print(json.dumps({{
    "error": error,
    "autoregressive": autoregressive.model_config.architecture,
    "triton": vllm.triton_utils.HAS_TRITON,
    "untouched": SamplingParams.verify is stock,
}}))
"""


@pytest.mark.slow
def test_in_an_untested_version_a_diffusion_model_is_an_error_and_an_autoregressive_one_is_not() -> None:
    seen = json.loads(run("-c", PROBE, **{ALLOW_UNTESTED: ""}))
    assert "it is tested with 0.32.0 and 0.33.0" in seen.pop("error")
    assert seen == {"autoregressive": "Qwen2ForCausalLM", "triton": False, "untouched": True}
