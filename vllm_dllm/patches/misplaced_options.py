"""Options of a plugin are refused where nobody reads them (``patches/013-misplaced-plugin-options.diff``).

vLLM's request models keep unknown fields, so an option of ours beside ``vllm_xargs`` instead of in it has no effect. An
option in ``extra_args`` or ``additional_config`` of a model that does not know it has none either. All looked like
success.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import of_vllm, wrap_validator

if TYPE_CHECKING:
    from pydantic import BaseModel
    from vllm.config import ModelConfig, VllmConfig
    from vllm.sampling_params import SamplingParams

IN_XARGS = ("vllm_xargs",)
IN_EXTRA_ARGS = ("sampling_params", "extra_args")
"""Where a request has the options of plugins."""

OBJECTS = ("extra_body", "sampling_params", "extra_args", "vllm_xargs")
"""Where a request of another endpoint has them, or an argument of a client's library."""

REGISTRY = "PLUGIN_ARG_PREFIXES"
"""In ``vllm.sampling_params``: the prefix of a plugin's options, and an attribute that the configuration of each model
has that reads the options. The prefix without its underscore is the plugin's key in ``additional_config``."""


def apply() -> bool:
    """Change ``SamplingParams.verify``, ``VllmConfig.try_verify_and_update_config`` and the request models; False where
    vLLM has the change."""
    from vllm import sampling_params
    from vllm.config import VllmConfig
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    if hasattr(sampling_params, REGISTRY):
        return False
    original = of_vllm(sampling_params.SamplingParams, "verify", ("self", "model_config"))
    update_config = of_vllm(VllmConfig, "try_verify_and_update_config", ("self",))
    prefixes: dict[str, str] = {}
    setattr(sampling_params, REGISTRY, prefixes)

    @functools.wraps(original)
    def verify(self: "SamplingParams", model_config: "ModelConfig", *args: Any, **kwargs: Any) -> None:
        _refuse_without_reader(self.extra_args or {}, model_config, prefixes)
        objects = {name: each for name, each in (self.extra_args or {}).items() if name in OBJECTS}
        _refuse_elsewhere(objects, prefixes, ("extra_args",), ("extra_args",))
        original(self, model_config, *args, **kwargs)

    @functools.wraps(update_config)
    def try_verify_and_update_config(self: "VllmConfig") -> None:
        _refuse_key_without_reader(self.additional_config, self.model_config, prefixes)
        update_config(self)

    sampling_params.SamplingParams.verify = verify
    VllmConfig.try_verify_and_update_config = try_verify_and_update_config
    for model in (CompletionRequest, ChatCompletionRequest, ResponsesRequest):
        to_params = of_vllm(model, "to_sampling_params", ("self",))
        model.to_sampling_params = _checked(to_params, prefixes)
    _check_fields(AnthropicMessagesRequest, "apply_return_mm_kwargs_alias", IN_XARGS, prefixes)
    _check_fields(GenerateRequest, "_validate_cache_salt", IN_EXTRA_ARGS, prefixes)
    return True


def _check_fields(
    model: type["BaseModel"], validator: str, where: tuple[str, ...], prefixes: Mapping[str, str]
) -> None:
    """Look at the fields of a request before a model that drops unknown ones does.

    Args:
        validator: as for `wrap_validator`.
        where: requests of the model have options of plugins.
    """

    def checked(check: Callable[[Any], Any], data: Any) -> Any:
        _refuse_elsewhere(data if isinstance(data, dict) else {}, prefixes, where)
        return check(data)

    wrap_validator(model, validator, checked)


def _checked(to_params: Callable[..., Any], prefixes: Mapping[str, str]) -> Callable[..., Any]:
    @functools.wraps(to_params)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_elsewhere(self.model_extra or {}, prefixes, IN_XARGS)
        return to_params(self, *args, **kwargs)

    return to_sampling_params


def _refuse_elsewhere(
    fields: Mapping[str, Any],
    prefixes: Mapping[str, str],
    where: tuple[str, ...],
    found: tuple[str, ...] = (),
) -> None:
    """Refuse options of plugins among the fields that are ``found`` at a place of a request, and in their objects."""
    from vllm.exceptions import VLLMValidationError

    for name, value in fields.items():
        if f"{name}_".startswith(tuple(prefixes)):
            raise VLLMValidationError(
                f"{name[:200]!a} is not a field of {'.'.join(found) or 'a request'}: options of plugins belong in "
                f"{'.'.join(where)}",
                parameter=ascii(name[:200])[1:-1],
            )
        if name in OBJECTS and isinstance(value, dict) and (*found, name) != where:
            _refuse_elsewhere(value, prefixes, where, (*found, name))


def _refuse_without_reader(
    extra_args: Mapping[Any, Any], model_config: "ModelConfig", prefixes: Mapping[str, str]
) -> None:
    from vllm.exceptions import VLLMValidationError

    for name in extra_args:
        for prefix, attribute in prefixes.items():
            if isinstance(name, str) and name.startswith(prefix) and not hasattr(model_config.hf_config, attribute):
                raise VLLMValidationError(
                    f"{name[:200]!a} is an option of other models: {model_config.architecture} does not read options "
                    f"that begin with {prefix!r}",
                    parameter=ascii(name[:200])[1:-1],
                )


def _refuse_key_without_reader(
    additional_config: Any, model_config: "ModelConfig | None", prefixes: Mapping[str, str]
) -> None:
    if model_config is None or not isinstance(additional_config, dict):
        return
    for prefix, attribute in prefixes.items():
        key = prefix.removesuffix("_")
        if additional_config.get(key) and not hasattr(model_config.hf_config, attribute):
            raise ValueError(
                f"additional_config[{key!r}] is for other models: {model_config.architecture} does not read it; leave "
                "it out"
            )
