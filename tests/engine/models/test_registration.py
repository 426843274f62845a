"""What the plugin registers with vLLM, alone and beside a plugin that wants the same."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, Qwen2Config
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.transformers_utils.config import get_config_parser

from tests import warm
from vllm_dllm.decoding.draft_graph import default_graph
from vllm_dllm.models.hook import BlockDiffusionModelConfig
from vllm_dllm.models.parsers import OpenDCoderConfigParser, PanguDiffusionConfigParser
from vllm_dllm.models.registry import MODELS
from vllm_dllm.plugin import FAMILIES, register, register_models


def test_registering_again_changes_nothing() -> None:
    before = {name: ModelRegistry.models[name] for name in FAMILIES}
    register()
    assert {name: ModelRegistry.models[name] for name in FAMILIES} == before


def test_every_architecture_has_its_configuration_its_hook_and_a_text_generation_model() -> None:
    for architecture, config in FAMILIES.items():
        assert AutoConfig.for_model(_model_type(config)).__class__.__name__ == config
        assert MODELS_CONFIG_MAP[architecture] is BlockDiffusionModelConfig
        model = ModelRegistry._try_load_model_cls(architecture)
        assert model is not None
        assert hasattr(model, "get_model_state_cls")


def test_every_family_has_a_default_draft_graph() -> None:
    for config in FAMILIES.values():
        name = AutoConfig.for_model(_model_type(config)).traits.family
        assert default_graph(name).family == name


def test_open_dcoder_has_a_configuration_format_and_leaves_qwen2_alone() -> None:
    assert type(get_config_parser("open_dcoder")) is OpenDCoderConfigParser
    assert type(AutoConfig.for_model("qwen2")) is Qwen2Config
    assert "Qwen2ForCausalLM" not in FAMILIES


def test_pangu_diffusion_has_a_configuration_format_and_leaves_the_autoregressive_models_alone() -> None:
    assert type(get_config_parser("pangu_diffusion")) is PanguDiffusionConfigParser
    assert "PanguEmbedded" not in CONFIG_MAPPING
    assert "PanguEmbeddedForCausalLM" not in FAMILIES
    assert "PanguEmbeddedForCausalLM" not in MODELS_CONFIG_MAP
    stock = ModelRegistry._try_load_model_cls("PanguEmbeddedForCausalLM")
    assert stock is not None
    assert stock.__module__.startswith("vllm.")


OTHERS = "LLaDA2MoeModelLM"
"""Architecture of the other plugin below."""


@pytest.fixture
def other_plugin(tmp_path: Path) -> Path:
    """A folder with another distribution, whose plugin has the name that ours had and registers a model of ours."""
    metadata = tmp_path / "other_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ndllm = other_plugin:register\n")
    (tmp_path / "other_plugin.py").write_text(
        "def register():\n"
        "    from vllm import ModelRegistry\n"
        f"    ModelRegistry.register_model({OTHERS!r}, 'other_plugin:Model')\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("plugins", "with_other", "ours", "theirs"),
    [
        ("dllm", False, True, False),
        ("vllm_dllm", True, True, False),
        ("dllm", True, False, True),
        (None, True, True, True),
    ],
)
def test_a_plugin_of_the_former_name_may_stand_beside(
    plugins: str | None, with_other: bool, ours: bool, theirs: bool, other_plugin: Path
) -> None:
    path = [str(other_plugin)] if with_other else []
    code = (
        f"import sys; sys.path[:0] = {path}\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm import ModelRegistry\n"
        f"names = {['SDARForCausalLM', OTHERS]!r}\n"
        "print('registered', [getattr(ModelRegistry.models.get(name), 'module_name', None) for name in names])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    done = warm.run(["-c", code], env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("registered"))
    expected = [MODELS if ours else None, "other_plugin" if theirs else MODELS if ours else None]
    assert line == f"registered {expected}"


def test_an_architecture_that_another_plugin_registered_first_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ModelRegistry.models, OTHERS, ModelRegistry.models["Qwen3ForCausalLM"])
    monkeypatch.delitem(MODELS_CONFIG_MAP, OTHERS)
    configurations: list[str] = []
    monkeypatch.setattr(AutoConfig, "register", lambda _, config, exist_ok: configurations.append(config.__name__))
    register_models()
    assert OTHERS not in MODELS_CONFIG_MAP
    assert configurations == [config for architecture, config in FAMILIES.items() if architecture != OTHERS]


def test_an_architecture_that_another_plugin_registered_last_is_refused_at_the_start(
    engine_config: Callable[..., VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ModelRegistry.models, "SDARForCausalLM", ModelRegistry.models["Qwen3ForCausalLM"])
    message = (
        "SDARForCausalLM has a model class of vllm.model_executor.models.qwen3, and not vllm-dllm's; "
        "VLLM_PLUGINS=vllm_dllm loads vllm-dllm alone"
    )
    with pytest.raises(ValueError, match=message):
        engine_config()


def _model_type(config: str) -> str:
    from vllm_dllm.models import configs

    return getattr(configs, config).model_type
