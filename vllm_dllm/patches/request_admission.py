"""A model may say what an open ``max_tokens`` comes to, and refuse a request whose prompt and parameters do not go
together (``patches/007-diffusion-request-admission.diff``).

A model with full attention computes a prompt and all positions to be filled in one step, which must have room for them.
vLLM validates sampling parameters before it knows the prompt's length, and an open ``max_tokens`` is the rest of the
context to vLLM.
"""

import functools
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM

VALIDATE = "diffusion_validate_request"
MAX_TOKENS = "diffusion_default_max_tokens"
SESSIONS = "_validate_resumable_request"


def apply() -> bool:
    """Change ``ModelConfig``, ``InputProcessor`` and ``AsyncLLM``; False where vLLM has the change."""
    from vllm.config import ModelConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    process = of_vllm(InputProcessor, "process_inputs", ("self", "request_id", "prompt", "params"))
    defaults = of_vllm(ModelConfig, "get_diff_sampling_param", ("self",))
    if mentions(process, VALIDATE):
        return False

    @functools.wraps(process)
    def process_inputs(
        self: "InputProcessor", request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> "EngineCoreRequest":
        request = process(self, request_id, prompt, params, *args, **kwargs)
        resolved = request.sampling_params
        if resolved is None:
            return request
        if params.max_tokens is None:
            _fill_in(resolved, self.model_config)
        validate = getattr(self.model_config.hf_config, VALIDATE, None)
        if validate is not None and request.prompt_token_ids is not None:
            validate(request.prompt_token_ids, resolved, request.resumable)
        return request

    @functools.wraps(defaults)
    def get_diff_sampling_param(self: "ModelConfig") -> dict[str, Any]:
        params: dict[str, Any] = defaults(self)
        default = getattr(self.hf_config, MAX_TOKENS, None)
        # Servers take max_tokens of a folder that --generation-config names for the most that a request may ask for.
        if default is not None and self.generation_config in ("auto", "vllm"):
            params.setdefault("max_tokens", default)
        return params

    InputProcessor.process_inputs = process_inputs
    ModelConfig.get_diff_sampling_param = get_diff_sampling_param
    if hasattr(AsyncLLM, SESSIONS):
        _let_the_model_decide_about_sessions(AsyncLLM)
    return True


def _let_the_model_decide_about_sessions(engine: type["AsyncLLM"]) -> None:
    """vLLM refuses streaming sessions of all diffusion models, from 0.33 on. A model that validates requests is told
    of sessions, too."""
    refuse = of_vllm(engine, SESSIONS, ("self",))

    @functools.wraps(refuse)
    def validate_resumable_request(self: "AsyncLLM") -> None:
        if self.vllm_config.is_mm_encoder_only or not hasattr(self.model_config.hf_config, VALIDATE):
            refuse(self)

    setattr(engine, SESSIONS, validate_resumable_request)


def _fill_in(params: "SamplingParams", model_config: "ModelConfig") -> None:
    """Lower a ``max_tokens`` that is the rest of the context to the model's default."""
    if getattr(model_config.hf_config, MAX_TOKENS, None) is not None:
        default = model_config.get_diff_sampling_param().get("max_tokens", params.max_tokens)
        params.max_tokens = min(params.max_tokens, max(default, params.min_tokens))
