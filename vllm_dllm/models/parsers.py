"""Readers of checkpoints whose ``config.json`` is that of another kind of model, for vLLM's ``--config-format``."""

from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from vllm.transformers_utils.config_parser_base import ConfigParserBase
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dllm.models.configs import BlockDiffusionConfig, OpenDCoderConfig, PanguDiffusionConfig
from vllm_dllm.models.sdar_configs import IDLMConfig


class _AdaptingConfigParser(ConfigParserBase):
    """Reads a checkpoint of ``stored_model_type`` as one of ours.

    Nothing in such a checkpoint tells it from one of another kind, so the user has to. (``--hf-overrides`` comes too
    late: Transformers chooses the configuration's class by the ``model_type`` on disk.)
    """

    config_format: ClassVar[str]
    stored_model_type: ClassVar[str]
    architecture: ClassVar[str]
    config_class: ClassVar[type[BlockDiffusionConfig]]

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        """The configuration as stored and as ours; remote code is never used.

        Raises:
            ValueError: the checkpoint is of another ``model_type``.
        """
        kwargs.pop("hf_overrides", None)  # vLLM applies them to what this returns
        stored, _ = PreTrainedConfig.get_config_dict(model, revision=revision, **kwargs)
        model_type = stored.get("model_type")
        if model_type not in (self.stored_model_type, self.config_class.model_type):
            raise ValueError(
                f"--config-format {self.config_format} reads checkpoints of model_type {self.stored_model_type!r}, "
                f"not {model_type!r}"
            )
        adapted = {**stored, "architectures": [self.architecture], "name_or_path": str(model)}
        del adapted["model_type"]
        return stored, self.config_class.from_dict(adapted)


class OpenDCoderConfigParser(_AdaptingConfigParser):
    """Reads a ``qwen2`` checkpoint as Open-dCoder, for ``--config-format open_dcoder``."""

    config_format = "open_dcoder"
    stored_model_type = "qwen2"
    architecture = "OpenDCoderModel"
    config_class = OpenDCoderConfig


class PanguDiffusionConfigParser(_AdaptingConfigParser):
    """Reads a ``PanguEmbedded`` checkpoint as openPangu-Diffusion, for ``--config-format pangu_diffusion``."""

    config_format = "pangu_diffusion"
    stored_model_type = "PanguEmbedded"
    architecture = "PanguDiffusionForCausalLM"
    config_class = PanguDiffusionConfig


class IDLMConfigParser(_AdaptingConfigParser):
    """Reads an ``sdar`` checkpoint, whatever its name is, as I-DLM, for ``--config-format i_dlm``; or one of ``qwen3``,
    whose masks have an adapter (`vllm_dllm.models.draft_adapter`)."""

    config_format = "i_dlm"
    stored_model_type = "qwen3"
    architecture = "SDARForCausalLM"
    config_class = IDLMConfig


class DrafterConfigParser(ConfigParserBase):
    """Reads a drafter: a checkpoint of a diffusion family, or one in an autoregressive layout that has a mask token."""

    config_format: ClassVar[str] = "diffusion_drafter"

    def parse(
        self, model: str | Path, trust_remote_code: bool, revision: str | None = None, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        """The configuration as stored and as ours.

        Raises:
            ValueError: the checkpoint does not say that it is a diffusion model.
        """
        stored, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
        for parser in _ADAPTING:
            if stored.get("model_type") == parser.stored_model_type:
                _check_mask_token(stored, model, revision, parser.config_format)
                return parser().parse(model, trust_remote_code, revision, *args, **kwargs)
        from vllm.transformers_utils.config import HFConfigParser

        return HFConfigParser().parse(model, trust_remote_code, revision, *args, **kwargs)


def _check_mask_token(stored: dict[str, Any], model: str | Path, revision: str | None, config_format: str) -> None:
    """Tell a diffusion model from an autoregressive one of the same layout: only a diffusion model has a mask token."""
    if stored.get("mask_token_id") is not None:
        return
    tokenizer = get_hf_file_to_dict("tokenizer_config.json", model, revision) or {}
    if tokenizer.get("mask_token") is None:
        raise ValueError(
            f"{model} cannot draft: it is an autoregressive model (model_type={stored['model_type']!r}, no "
            "mask_token_id in config.json, no mask_token in tokenizer_config.json), which knows no masks. If "
            f'it was trained for diffusion all the same, add "config_format": "{config_format}" to speculative_config'
        )


_ADAPTING = (OpenDCoderConfigParser, PanguDiffusionConfigParser)

CONFIG_PARSERS = (*_ADAPTING, IDLMConfigParser, DrafterConfigParser)
"""By ``config_format``."""
