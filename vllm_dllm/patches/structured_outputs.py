"""Structured outputs of diffusion models whose sampler honours them
(``patches/016-diffusion-structured-outputs.diff``).

vLLM refuses them for every diffusion model, since the one that it ships samples a canvas all at once. Here the model's
configuration names the backends whose grammars its sampler honours, and the model's state puts the masks on the logits.
"""

import functools
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.config import ModelConfig, StructuredOutputsConfig
    from vllm.sampling_params import SamplingParams

MARKER = "diffusion_structured_output_backends"

_active = False


class _NotADiffusionModel:
    """A model's configuration as vLLM's check would see it of another model."""

    is_diffusion = False

    def __init__(self, model_config: "ModelConfig") -> None:
        self._model_config = model_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model_config, name)


def apply() -> bool:
    """Change ``SamplingParams._validate_structured_outputs``; False where vLLM has the change."""
    global _active
    from vllm.sampling_params import SamplingParams

    parameters = ("self", "model_config", "structured_outputs_config", "tokenizer")
    original = of_vllm(SamplingParams, "_validate_structured_outputs", parameters)
    if mentions(original, MARKER):
        return False

    @functools.wraps(original)
    def validate(
        self: "SamplingParams",
        model_config: "ModelConfig",
        structured_outputs_config: "StructuredOutputsConfig | None",
        tokenizer: Any,
    ) -> None:
        backends = getattr(model_config.hf_config, MARKER, None)
        if not model_config.is_diffusion or backends is None or self.structured_outputs is None:
            return original(self, model_config, structured_outputs_config, tokenizer)
        original(self, _NotADiffusionModel(model_config), structured_outputs_config, tokenizer)
        backend = self.structured_outputs._backend
        if structured_outputs_config is not None and backend not in backends:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(
                f"This constraint needs the structured output backend {backend!r}, and this diffusion model can have "
                f"{' or '.join(backends)}: a block is denoised ahead of its grammar, which must be able to go back.",
                parameter="structured_outputs",
            )

    SamplingParams._validate_structured_outputs = validate
    _active = True
    return True


def give_to_runner(worker: Any) -> None:
    """Have the runner that is loading a model take ``worker`` in the place of its ``StructuredOutputsWorker``.

    A model's state calls this when the runner asks for its sampler, just before the runner makes the other. Not patched
    in every process, because the front end does without the runner's modules.
    """
    if not _active:
        return
    from vllm.v1.worker.gpu import model_runner

    original = of_vllm(model_runner, "StructuredOutputsWorker", ("max_num_logits", "vocab_size"))

    def make(*args: Any, **kwargs: Any) -> Any:
        model_runner.StructuredOutputsWorker = original
        return worker

    model_runner.StructuredOutputsWorker = make
