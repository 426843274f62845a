"""Entry points: what this plugin registers with vLLM."""

from importlib.metadata import entry_points
from typing import Any

from vllm_dllm.versions import ALLOW_UNTESTED, is_allowed, untested_vllm

FAMILIES = {
    "SDARForCausalLM": "SDARConfig",
    "SDARMoeForCausalLM": "SDARMoeConfig",
    "LLaDA2MoeModelLM": "LLaDA2MoeConfig",
    "Fast_dLLM_QwenForCausalLM": "FastDLLMQwenConfig",
    "LLaDAModelLM": "LLaDAConfig",
    "LLaDAMoEModelLM": "LLaDAConfig",
    "DreamModel": "DreamConfig",
    "OpenDCoderModel": "OpenDCoderConfig",
    "PanguDiffusionForCausalLM": "PanguDiffusionConfig",
    "NemotronLabsDiffusionModel": "NemotronLabsDiffusionConfig",
    "NemotronLabsDiffusionEncoderModel": "NemotronLabsDiffusionConfig",
    "MinistralDiffEncoderModel": "NemotronLabsDiffusionConfig",
}
"""Entry of ``architectures`` in a checkpoint's ``config.json``, which is the model class in `vllm_dllm.models.families`
too, and the configuration class in `vllm_dllm.models.configs`. Named, not imported: most processes need no layers."""


GROUP, FORMER_NAME = "vllm.general_plugins", "dllm"
"""Of an entry point of this plugin that keeps ``VLLM_PLUGINS=dllm`` working."""


class UntestedVllmError(RuntimeError):
    """A diffusion model was asked for in a vLLM that this plugin was not tested with."""


def register() -> None:
    """Entry point ``vllm.general_plugins``; runs in every process of vLLM, in some more than once.

    In a vLLM that is not tested this changes nothing in vLLM and makes every diffusion model an error at start. So does
    a vLLM in which something else has replaced what a patch changes.
    """
    from vllm_dllm.observe.vllm_log import IN_EVERY_PROCESS, leave_out, module_logger

    if reason := untested_vllm():
        logger = module_logger(__name__)
        if not is_allowed():
            logger.warning("%s", reason)
            refuse_models(reason)
            return
        logger.warning("%s. Going on, because %s=1", reason, ALLOW_UNTESTED)
    from vllm_dllm import patches
    from vllm_dllm.cpu import install as cpu
    from vllm_dllm.patches.original import VllmChangedError

    leave_out(IN_EVERY_PROCESS)
    cpu.install()  # must precede any model
    try:
        patches.apply_all()
    except VllmChangedError as error:
        module_logger(__name__).warning("%s", error)
        refuse_models(str(error))
        return
    fill_registries_of_patches()
    register_models()


def register_by_former_name() -> None:
    """Entry point for ``VLLM_PLUGINS=dllm``.

    vLLM calls one plugin of a name. Another distribution with a plugin of this name gets the call, whichever of the two
    vLLM has found last.
    """
    others = [each for each in entry_points(group=GROUP, name=FORMER_NAME) if not each.value.startswith("vllm_dllm.")]
    if not others:
        return register()
    for each in others:
        each.load()()


def refuse_models(reason: str) -> None:
    """Let every checkpoint of the model families raise `UntestedVllmError` when its configuration is read.

    An exception of `register` itself would stop autoregressive models too, which do without this plugin.
    """
    from transformers import AutoConfig, PreTrainedConfig

    class Refusal(PreTrainedConfig):
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            raise UntestedVllmError(reason)

    for model_type in model_types():
        AutoConfig.register(model_type, type("Refusal", (Refusal,), {"model_type": model_type}), exist_ok=True)


def model_types() -> set[str]:
    """``model_type`` of the configurations of all families."""
    from vllm_dllm.models import configs

    return {getattr(configs, config).model_type for config in FAMILIES.values()}


def fill_registries_of_patches() -> None:
    """Tell vLLM of ``--speculative-config dllm`` for autoregressive targets, and of the prefix of our request options,
    which vLLM then refuses where nobody reads them."""
    from vllm import sampling_params
    from vllm.config import speculative

    from vllm_dllm.options.schema import REQUEST_PREFIX
    from vllm_dllm.patches import misplaced_options, speculative_methods
    from vllm_dllm.patches.sampling_params import MARKER

    # Where patches are off, a vLLM may be without the registries.
    getattr(speculative, speculative_methods.REGISTRY, {})["dllm"] = _create_speculative_config
    getattr(sampling_params, misplaced_options.REGISTRY, {})[REQUEST_PREFIX] = MARKER


def _create_speculative_config(*args: Any) -> Any:
    from vllm_dllm.models.drafter import create_speculative_config

    return create_speculative_config(*args)


def register_models() -> None:
    """Make vLLM and Transformers know the model families, without remote code.

    An architecture that another plugin has registered stays that plugin's, configuration and all.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import get_config_parser, register_config_parser

    from vllm_dllm.models import configs, parsers
    from vllm_dllm.models.hook import BlockDiffusionModelConfig
    from vllm_dllm.models.registry import MODELS, other_server
    from vllm_dllm.models.tokenizers import register_tokenizers
    from vllm_dllm.observe.vllm_log import module_logger

    for architecture, name in FAMILIES.items():
        if other := other_server(architecture):
            module_logger(__name__).warning("%s", other)
            continue
        config = getattr(configs, name)
        AutoConfig.register(config.model_type, config, exist_ok=True)
        config.served.setdefault(config.model_type, set()).add(architecture)
        MODELS_CONFIG_MAP[architecture] = BlockDiffusionModelConfig
        if architecture not in ModelRegistry.models:
            ModelRegistry.register_model(architecture, f"{MODELS}:{architecture}")
    register_tokenizers()
    for parser in parsers.CONFIG_PARSERS:
        try:
            get_config_parser(parser.config_format)
        except ValueError:  # not yet registered
            register_config_parser(parser.config_format)(parser)
