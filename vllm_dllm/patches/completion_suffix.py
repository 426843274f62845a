"""A model may say what a prompt with a ``suffix`` is as one text (``patches/017-diffusion-completion-suffix.diff``).

The completions API has a ``suffix`` for models that fill in the middle. vLLM asks the model's renderer for the text,
and one family's renderer has an answer. A diffusion model with full attention fills in masks, of which the request's
``max_tokens`` is the number, and reads from ``vllm_xargs`` that it is to do so.
"""

import functools
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers.base import BaseRenderer

RENDER = "diffusion_render_suffix"
ARGS = "diffusion_suffix_args"


def apply() -> bool:
    """Change ``BaseRenderer`` and ``CompletionRequest``; False where vLLM has the change."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.base import BaseRenderer

    render = of_vllm(BaseRenderer, "render_completion_suffix", ("self", "prompt", "suffix"))
    # The function of a request that vLLM calls with the model's configuration, before it makes sampling parameters.
    tokenize = of_vllm(CompletionRequest, "build_tok_params", ("self", "model_config"))
    if mentions(render, RENDER):
        return False

    @functools.wraps(render)
    def render_completion_suffix(self: "BaseRenderer", prompt: str, suffix: str) -> str | None:
        own = getattr(self.model_config.hf_config, RENDER, None)
        return render(self, prompt, suffix) if own is None else own(prompt, suffix, self.get_tokenizer())

    @functools.wraps(tokenize)
    def build_tok_params(self: "CompletionRequest", model_config: "ModelConfig") -> Any:
        own = getattr(model_config.hf_config, ARGS, None)
        if self.suffix is not None and own is not None:
            given = self.vllm_xargs or {}
            for key, value in own.items():
                if given.get(key, value) != value:
                    raise VLLMValidationError(
                        f"{key}={given[key]!r} does not go with suffix, which asks for {key}={value!r}.",
                        parameter=key,
                        value=given[key],
                    )
            self.vllm_xargs = {**given, **own}
        return tokenize(self, model_config)

    BaseRenderer.render_completion_suffix = render_completion_suffix
    CompletionRequest.build_tok_params = build_tok_params
    return True
