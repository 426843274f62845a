"""Admission of a request, as vLLM's front end calls it."""

from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_dllm.geometry import Geometry
from vllm_dllm.options.admission import admit_request, validate_sampling_params
from vllm_dllm.options.schema import DllmConfig
from vllm_dllm.traits import FamilyTraits


def geometry_with(traits: FamilyTraits, *, step_rows: int = 1024, max_model_len: int = 512, **options: Any) -> Geometry:
    """An engine with these options, without vLLM's configuration."""
    if traits.sees_whole_text:
        options = {"cache": "dual", "generation_window": 8 * traits.block_length, **options}
    return Geometry(
        traits=traits,
        options=DllmConfig(**options),
        block_length=traits.block_length,
        max_drafts=options.get("max_drafts", 0),
        step_rows=step_rows,
        max_model_len=max_model_len,
        draft_rows=traits.block_length,
    )


def admit(params: SamplingParams, geometry: Geometry, prompt_length: int = 5) -> SamplingParams:
    """Both steps of admission; the request's own parameters, which carry the resolved options."""
    validate_sampling_params(params, geometry.traits.family)
    own = params.clone()
    own._bad_words_token_ids = own._bad_words_token_ids or []  # as a tokenizer leaves them
    admit_request(prompt_length, own, geometry)
    return own
