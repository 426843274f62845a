"""Malformed requests that vLLM fails over are refused (``patches/011-malformed-requests.diff``).

``structured_outputs`` that is no object was asked for a key before its type was checked, and a ``request_id`` or
``session_id`` with half a surrogate pair, which JSON allows, cannot be encoded for the engine. Both ended with status
500, the second without a message.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import of_vllm, wrap_validator

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

VALIDATOR = "check_structured_outputs_count"


def apply() -> bool:
    """Change both request models and ``InputProcessor.process_inputs``; False where vLLM has the change."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.engine import input_processor

    if hasattr(input_processor, "_validate_ids"):
        return False
    original = of_vllm(input_processor.InputProcessor, "process_inputs", ("self", "request_id", "prompt", "params"))
    for model in (ChatCompletionRequest, CompletionRequest):
        wrap_validator(model, VALIDATOR, _check_type_first)

    @functools.wraps(original)
    def process_inputs(self: "InputProcessor", *args: Any, **kwargs: Any) -> "EngineCoreRequest":
        request = original(self, *args, **kwargs)
        for name in ("request_id", "session_id"):
            _refuse_unless_unicode(name, getattr(request, name))
        return request

    input_processor.InputProcessor.process_inputs = process_inputs
    return True


def _check_type_first(check: Callable[[Any], Any], data: Any) -> Any:
    """Leave what is no object to the check of the field's type, which says so."""
    from vllm.sampling_params import StructuredOutputsParams

    outputs = data.get("structured_outputs") if isinstance(data, dict) else None
    return data if not isinstance(outputs, dict | StructuredOutputsParams | None) else check(data)


def _refuse_unless_unicode(name: str, value: str | None) -> None:
    from vllm.exceptions import VLLMValidationError

    try:
        (value or "").encode()
    except UnicodeEncodeError:
        # Escaped: the message has to be encoded, too.
        raise VLLMValidationError(
            f"{name}={value!a} has half of a surrogate pair; it must be Unicode text", parameter=name
        ) from None
