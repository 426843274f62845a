"""A stream, and a response in the background, is refused before it begins
(``patches/023-validation-before-streams.diff``).

vLLM validates a request when somebody waits for its first output. The response of a stream has begun by then, so its
status cannot say that the request is refused. Chats and completions have the refusal as an event, the Responses API
breaks the connection off, and the Messages API tells of an error of the server. A response in the background stays
queued for ever.
"""

import functools
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import of_vllm

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

VALIDATE = "validate_before_stream"
"""Method that ``AsyncLLM`` gets."""


def apply() -> bool:
    """Change ``AsyncLLM.generate`` and the turns of the Responses API; False where vLLM has the change."""
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    outputs = of_vllm(AsyncLLM, "generate", ("self", "prompt", "sampling_params", "request_id"))
    turns = of_vllm(
        OpenAIServingResponses,
        "_generate_with_builtin_tools",
        ("self", "request_id", "engine_input", "sampling_params"),
    )
    if hasattr(AsyncLLM, VALIDATE):
        return False

    @functools.wraps(outputs)
    def generate(
        self: "AsyncLLM", prompt: Any, sampling_params: "SamplingParams", request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        if sampling_params.output_kind == RequestOutputKind.DELTA:
            validate_before_stream(self, prompt, sampling_params, request_id, **_validated(options))
        return outputs(self, prompt, sampling_params, request_id, **options)

    @functools.wraps(turns)
    def generate_with_builtin_tools(
        self: Any, request_id: str, engine_input: Any, sampling_params: "SamplingParams", *args: Any, **options: Any
    ) -> AsyncGenerator[Any, None]:
        getattr(self.engine_client, VALIDATE)(engine_input, sampling_params, request_id, **_validated(options))
        return turns(self, request_id, engine_input, sampling_params, *args, **options)

    setattr(AsyncLLM, VALIDATE, validate_before_stream)
    AsyncLLM.generate = generate
    OpenAIServingResponses._generate_with_builtin_tools = generate_with_builtin_tools
    return True


def _validated(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request that are validated."""
    return {name: options.get(name) for name in ("lora_request", "session_id")}


def validate_before_stream(
    self: "AsyncLLM",
    prompt: Any,
    params: "SamplingParams",
    request_id: str,
    *,
    lora_request: "LoRARequest | None",
    session_id: str | None,
) -> None:
    """Raise now what waiting for the first output would raise.

    Prompts that are still to be tokenized, and those with images, are validated when they are processed.
    """
    if isinstance(prompt, dict) and prompt.get("type") == "token":
        tasks = getattr(self, "_supported_tasks", ("generate",))
        self.input_processor.process_inputs(
            request_id, prompt, params, tasks, lora_request=lora_request, session_id=session_id
        )
