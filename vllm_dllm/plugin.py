"""Entry points: what this plugin registers with vLLM."""

from typing import Any, NamedTuple

from vllm_dllm.versions import ALLOW_UNTESTED, is_allowed, untested_vllm


class Family(NamedTuple):
    """One registration. Classes are named, not imported: a process that needs none of them imports none."""

    architecture: str
    """Entry of ``architectures`` in the checkpoint's ``config.json``."""
    model: str
    """Model class, ``module:Class``."""
    config: str
    """Configuration class in ``vllm_dllm.models.configs``; carries the ``model_type``."""


FAMILIES = (
    Family("SDARForCausalLM", "vllm_dllm.models.qwen3:SDARForCausalLM", "SDARConfig"),
    Family("SDARMoeForCausalLM", "vllm_dllm.models.qwen3:SDARMoeForCausalLM", "SDARMoeConfig"),
    Family("LLaDA2MoeModelLM", "vllm_dllm.models.llada2_moe:LLaDA2MoeModelLM", "LLaDA2MoeConfig"),
    Family(
        "Fast_dLLM_QwenForCausalLM",
        "vllm_dllm.models.qwen2:FastDLLMQwenForCausalLM",
        "FastDLLMQwenConfig",
    ),
    Family("LLaDAModelLM", "vllm_dllm.models.llada:LLaDAModelLM", "LLaDAConfig"),
    Family("LLaDAMoEModelLM", "vllm_dllm.models.qwen3:LLaDAMoEModelLM", "LLaDAConfig"),
    Family("DreamModel", "vllm_dllm.models.qwen2:DreamModel", "DreamConfig"),
    Family("OpenDCoderModel", "vllm_dllm.models.qwen2:OpenDCoderModel", "OpenDCoderConfig"),
    Family(
        "PanguDiffusionForCausalLM",
        "vllm_dllm.models.pangu:PanguDiffusionForCausalLM",
        "PanguDiffusionConfig",
    ),
)


def register() -> None:
    """Entry point ``vllm.general_plugins``; runs in every process of vLLM, in some more than once.

    In a vLLM that is not tested this changes nothing in vLLM and makes every diffusion model an error at start.
    """
    if reason := untested_vllm():
        from vllm.logger import init_logger

        # Below vllm's namespace, or its log configuration drops the message.
        logger = init_logger("vllm.vllm_dllm.plugin")
        if not is_allowed():
            logger.warning("%s", reason)
            refuse_models(reason)
            return
        logger.warning("%s. Going on, because %s=1", reason, ALLOW_UNTESTED)
    change_vllm()
    register_speculative_methods()
    register_request_options()
    register_models()


class UntestedVllmError(RuntimeError):
    """A diffusion model was asked for in a vLLM that this plugin was not tested with."""


def refuse_models(reason: str) -> None:
    """Let every checkpoint of the model families raise `UntestedVllmError` when its configuration is read.

    An exception of `register` itself would stop autoregressive models too, which do without this plugin.
    """
    from transformers import AutoConfig, PreTrainedConfig

    from vllm_dllm.models import configs

    class Refusal(PreTrainedConfig):
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            raise UntestedVllmError(reason)

    for model_type in {getattr(configs, family.config).model_type for family in FAMILIES}:
        AutoConfig.register(model_type, type("Refusal", (Refusal,), {"model_type": model_type}), exist_ok=True)


def change_vllm() -> None:
    """All that this plugin changes in vLLM itself begins here. The changes for a CPU must precede any model."""
    from vllm_dllm import patches
    from vllm_dllm.cpu import install as cpu

    cpu.install()
    patches.apply_all()


def register_speculative_methods() -> None:
    """Make vLLM know ``--speculative-config dllm`` for autoregressive targets."""
    from vllm.config import speculative

    from vllm_dllm.patches.speculative_methods import REGISTRY

    methods = getattr(speculative, REGISTRY, None)
    if methods is None:  # patches are off, in a vLLM without them
        return
    methods["dllm"] = _create_speculative_config


def _create_speculative_config(*args: Any) -> Any:
    from vllm_dllm.models.drafter import create_speculative_config

    return create_speculative_config(*args)


def register_request_options() -> None:
    """Make vLLM refuse options of ours where nobody reads them."""
    from vllm import sampling_params

    from vllm_dllm.options.schema import REQUEST_PREFIX
    from vllm_dllm.patches.misplaced_options import REGISTRY
    from vllm_dllm.patches.sampling_params import MARKER

    prefixes = getattr(sampling_params, REGISTRY, None)
    if prefixes is None:  # patches are off, in a vLLM without them
        return
    prefixes[REQUEST_PREFIX] = MARKER


def register_models() -> None:
    """Make vLLM and Transformers know the model families, without remote code."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import get_config_parser, register_config_parser

    from vllm_dllm.models import configs, parsers
    from vllm_dllm.models.hook import BlockDiffusionModelConfig

    for family in FAMILIES:
        config = getattr(configs, family.config)
        AutoConfig.register(config.model_type, config, exist_ok=True)
        MODELS_CONFIG_MAP[family.architecture] = BlockDiffusionModelConfig
        if family.architecture not in ModelRegistry.models:
            ModelRegistry.register_model(family.architecture, family.model)
    for parser in parsers.CONFIG_PARSERS:
        try:
            get_config_parser(parser.config_format)
        except ValueError:  # not yet registered
            register_config_parser(parser.config_format)(parser)
