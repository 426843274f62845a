"""A model may refuse a request whose prompt and parameters do not go together
(``patches/007-diffusion-request-admission.diff``).

vLLM validates sampling parameters before it knows the prompt's length and ``max_tokens``. A model with full attention
computes a prompt and all positions to be filled in one step, which must have room for them.
"""

import functools
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.seam import mentions, seam

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

MARKER = "validate_request"


def apply() -> bool:
    """Change ``InputProcessor.process_inputs``; False where vLLM has the change."""
    from vllm.v1.engine.input_processor import InputProcessor

    original = seam(InputProcessor, "process_inputs", ("self", "request_id", "prompt", "params"))
    if mentions(original, f"diffusion_{MARKER}"):
        return False

    @functools.wraps(original)
    def process_inputs(self: "InputProcessor", *args: Any, **kwargs: Any) -> "EngineCoreRequest":
        request = original(self, *args, **kwargs)
        validate = getattr(self.model_config.hf_config, f"diffusion_{MARKER}", None)
        if validate is not None and request.sampling_params is not None and request.prompt_token_ids is not None:
            validate(len(request.prompt_token_ids), request.sampling_params, request.resumable)
        return request

    InputProcessor.process_inputs = process_inputs
    return True
