"""Sampling parameters of diffusion models whose sampler honours them
(``patches/001-diffusion-sampling-params.diff``).

vLLM refuses temperature, seed and their like for every diffusion model, because the one it ships denoises
with a temperature schedule of its own. Here the model's configuration says otherwise, and validates the
rest itself.
"""

import functools
from typing import TYPE_CHECKING

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.sampling_params import SamplingParams

MARKER = "diffusion_supports_sampling_params"


def apply() -> bool:
    """Change ``SamplingParams._validate_diffusion``; False where vLLM has the change."""
    from vllm.sampling_params import SamplingParams

    original = of_vllm(SamplingParams, "_validate_diffusion", ("self", "model_config"))
    if mentions(original, MARKER):
        return False

    @functools.wraps(original)
    def validate(self: "SamplingParams", model_config: "ModelConfig") -> None:
        if model_config.is_diffusion and getattr(model_config.hf_config, MARKER, False):
            model_config.hf_config.validate_sampling_params(self)
        else:
            original(self, model_config)

    SamplingParams._validate_diffusion = validate
    return True
