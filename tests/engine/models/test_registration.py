from transformers import CONFIG_MAPPING, AutoConfig, Qwen2Config
from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.transformers_utils.config import get_config_parser

from vllm_dllm.decoding.draft_graph import default_graph
from vllm_dllm.models.hook import BlockDiffusionModelConfig
from vllm_dllm.models.parsers import OpenDCoderConfigParser, PanguDiffusionConfigParser
from vllm_dllm.plugin import FAMILIES, register


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


def _model_type(config: str) -> str:
    from vllm_dllm.models import configs

    return getattr(configs, config).model_type
