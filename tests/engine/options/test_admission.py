"""What a request may ask of a diffusion model, and how it is told what it may not."""

from dataclasses import replace
from http import HTTPStatus
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.worker.gpu.sample.logit_bias import (
    MAX_NUM_ALLOWED_TOKEN_IDS,
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
)

from tests.engine.options.admit import admit, geometry_with
from vllm_dllm.models.configs import LLaDAConfig
from vllm_dllm.models.sdar_configs import IDLMConfig
from vllm_dllm.options.admission import LIMITS, REFUSED_FIELDS, admit_request
from vllm_dllm.options.errors import OptionError
from vllm_dllm.options.infill import text_with_mask
from vllm_dllm.options.resolve import options_of, resolve
from vllm_dllm.options.schema import DecodingOptions, DllmConfig
from vllm_dllm.traits import FamilyTraits

MOST_DELAYED_STOP_TOKENS = next(limit.most for limit in LIMITS if limit.parameter == "stop_token_ids")

TRAITS = FamilyTraits(family="SDAR", block_length=4, mask_token_id=3)
TIMESTEPS = FamilyTraits(family="Dream", block_length=4, mask_token_id=3, timesteps=True)
EDITING = FamilyTraits(family="LLaDA2", block_length=32, mask_token_id=3, editing=True)

SUPPORTED_FIELDS: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "temperature": 0.7,
    "thinking_token_budget": 8,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["end"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "max_tokens": 32,
    "min_tokens": 4,
    "logprobs": 3,
    "logit_bias": {4: 1.0},
    "allowed_token_ids": [4, 5],
    "bad_words": ["no"],
    "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=2),
    "extra_args": {"dllm_policy": "static"},
}
"""What the sampler and the scheduler honour, with a value for each."""

FIELDS_OUTSIDE_OF_THE_MODEL = {
    # How outputs are returned, cached, cloned or routed.
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "stream_interval",
    "skip_clone",
    "output_text_buffer_length",
    "skip_reading_prefix_cache",
    # Only with an engine option that vLLM checks: watermarks fall back to none, with a warning.
    "watermarking",
    "routed_experts_prompt_start",
    # Only counts with prompt_logprob_token_ids, which vLLM demands beside it.
    "prompt_logprob_start",
    # vLLM checks it; what it means for our options is in `test_structured_outputs_have_drafts_of_their_own`.
    "structured_outputs",
    # Set by vLLM itself.
    "_eos_token_id",
    "_all_stop_token_ids",
    "_watermarking_skipped",
    "_bad_words_token_ids",
}

REFUSED_VALUES: dict[str, Any] = {
    "prompt_logprobs": 0,
    "prompt_logprob_token_ids": [[4]],
    "logprob_token_ids": [4],
    "trace_decode_token_ids": [4, 5],
}


def validate(traits: FamilyTraits = TRAITS, **params: Any) -> None:
    admit(SamplingParams(**params), geometry_with(traits))


def test_every_sampling_parameter_of_vllm_is_decided_upon() -> None:
    decided = [*SUPPORTED_FIELDS, *FIELDS_OUTSIDE_OF_THE_MODEL, *REFUSED_FIELDS]
    assert sorted(decided) == sorted(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", SUPPORTED_FIELDS)
def test_what_the_sampler_honours_is_admitted(name: str) -> None:
    validate(**{name: SUPPORTED_FIELDS[name]})


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_what_it_cannot_honour_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(VLLMValidationError) as error:
        validate(**{name: REFUSED_VALUES[name]})
    assert error.value.parameter == name
    assert error.value.value == REFUSED_VALUES[name]
    assert REFUSED_FIELDS[name] in str(error.value)


def test_all_logprobs_are_refused_with_the_range_that_is_allowed() -> None:
    validate(logprobs=0)
    with pytest.raises(VLLMValidationError, match=r"ask for 0 to --max-logprobs tokens") as error:
        validate(logprobs=-1)
    assert (error.value.parameter, error.value.value) == ("logprobs", -1)


@pytest.mark.parametrize(
    ("name", "value", "beside"),
    [
        ("allowed_token_ids", list(range(MAX_NUM_ALLOWED_TOKEN_IDS + 1)), {}),
        ("logit_bias", dict.fromkeys(range(MAX_NUM_LOGIT_BIAS_TOKENS + 1), 1.0), {}),
        ("stop_token_ids", list(range(MOST_DELAYED_STOP_TOKENS + 1)), {"min_tokens": 1}),
    ],
)
def test_more_than_the_sampler_has_room_for_is_refused_before_it_gets_there(
    name: str, value: Any, beside: dict[str, Any]
) -> None:
    with pytest.raises(VLLMValidationError, match="at most") as error:
        validate(**{name: value}, **beside)
    assert (error.value.parameter, error.value.value) == (name, len(value))


def test_room_is_left_for_the_stop_tokens_of_the_model() -> None:
    assert MOST_DELAYED_STOP_TOKENS < MAX_NUM_STOP_TOKEN_IDS
    validate(stop_token_ids=list(range(MOST_DELAYED_STOP_TOKENS)), min_tokens=1)
    validate(stop_token_ids=list(range(500)))


@pytest.mark.parametrize(
    ("options", "parameter", "value", "said"),
    [
        ({"dllm_polcy": "static"}, "dllm_polcy", "static", "allowed: dllm_policy"),
        ({"dllm_policy": "best"}, "dllm_policy", "best", "'static', 'threshold'"),
        ({"dllm_threshold": 1.5}, "dllm_threshold", 1.5, "less than or equal to 1"),
        ({"dllm_threshold": float("nan")}, "dllm_threshold", None, "less than or equal to 1"),
        ({"dllm_tokens_per_step": 2**40}, "dllm_tokens_per_step", 2**40, "less than or equal to 2147483647"),
        ({"dllm_max_post_edit_steps": 257}, "dllm_max_post_edit_steps", 257, "less than or equal to 256"),
        ({"dllm_tokens_per_step": [1, 2]}, "dllm_tokens_per_step", [1, 2], "valid integer"),
        ({"dllm_drafts": "many"}, "dllm_drafts", "many", "a valid integer, .*, or input should be 'auto'"),
        ({"dllm_drafts": 65}, "dllm_drafts", 65, "less than or equal to 64, or input should be 'auto'"),
        ({"dllm_edit_threshold": 0.5}, "dllm_edit_threshold", 0.5, "SDAR models do not edit tokens"),
        ({"dllm_alg_temp": 0.5}, "dllm_alg_temp", 0.5, "policy='threshold', .*; maskgit_plus and topk_margin do"),
        ({"dllm_policy": "origin", "dllm_alg_temp": 2}, "dllm_alg_temp", 2.0, "alg_temp=2.0 is not .* policy='origin'"),
        ({"dllm_policy": "entropy", "dllm_alg_temp": 0.5}, "dllm_alg_temp", 0.5, "policy='entropy'"),
        ({"diffusion_max_steps": 4}, "diffusion_max_steps", 4, "not for SDAR models"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_value(
    options: dict[str, Any], parameter: str, value: Any, said: str
) -> None:
    with pytest.raises(VLLMValidationError, match=said) as error:
        validate(extra_args=options)
    assert error.value.parameter == parameter
    assert value is None or error.value.value == value


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(VLLMValidationError, match="exclude each other"):
        validate(extra_args={"dllm_tokens_per_step": 2, "dllm_denoising_steps": 2})


def test_a_family_that_edits_takes_an_edit_threshold() -> None:
    validate(EDITING, extra_args={"dllm_edit_threshold": 0.5})


@pytest.mark.parametrize("policy", ["maskgit_plus", "topk_margin", "entropy"])
def test_policies_that_draw_positions_by_their_scores_take_an_alg_temp(policy: str) -> None:
    drawn = {"dllm_policy": policy, "dllm_alg_temp": 0.5}
    validate(TIMESTEPS, extra_args=drawn)
    if policy == "entropy":
        with pytest.raises(VLLMValidationError, match="without an entropy_bound"):
            validate(TIMESTEPS, extra_args={**drawn, "dllm_entropy_bound": 0.5})


def test_an_alg_temp_of_zero_is_none() -> None:
    validate(extra_args={"dllm_policy": "static", "dllm_alg_temp": 0})


def test_the_engines_alg_temp_is_for_policies_that_have_one() -> None:
    engine = DllmConfig(policy="maskgit_plus", alg_temp=0.5)

    def alg_temp(**request: Any) -> float:
        return resolve(DecodingOptions(**request), engine, TIMESTEPS, TIMESTEPS.block_length).alg_temp

    assert alg_temp() == alg_temp(policy="topk_margin") == alg_temp(policy="entropy") == 0.5
    assert alg_temp(alg_temp=0.1) == 0.1
    assert alg_temp(policy="static") == alg_temp(policy="entropy", entropy_bound=0.5) == 0
    with pytest.raises(OptionError, match=r"alg_temp=0\.1 is not allowed with policy='static'"):
        alg_temp(policy="static", alg_temp=0.1)
    with pytest.raises(OptionError, match=r"alg_temp=0\.5 is not allowed with policy='threshold'"):
        resolve(DecodingOptions(), DllmConfig(alg_temp=0.5), TIMESTEPS, TIMESTEPS.block_length)


def test_options_of_others_are_left_to_them() -> None:
    validate(extra_args={"session_id": "a", "kv_transfer_params": {"do_remote_prefill": False}})


def completion_params(**fields: Any) -> SamplingParams:
    return CompletionRequest(model="m", prompt="p", **fields).to_sampling_params(16, {})


def chat_params(**fields: Any) -> SamplingParams:
    return ChatCompletionRequest(model="m", messages=[], **fields).to_sampling_params(16, {})


@pytest.mark.parametrize("params_of", [completion_params, chat_params])
def test_options_over_http_reach_the_sampler(params_of: Any) -> None:
    xargs = {"dllm_policy": "threshold", "dllm_threshold": 0.8, "dllm_tokens_per_step": 2}
    params = params_of(vllm_xargs={**xargs, "dllm_eos_early_stop": True})
    # vLLM passes a boolean on as a number, which the option takes for one.
    assert params.extra_args == {**xargs, "dllm_eos_early_stop": 1}
    admit(params, geometry_with(TRAITS))


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        (completion_params(vllm_xargs={"dllm_threshold": 2}), "dllm_threshold"),
        (chat_params(vllm_xargs={"dllm_alg_temp": 0.5, "dllm_policy": "random"}), "dllm_alg_temp"),
        (completion_params(echo=True, logprobs=2), "prompt_logprobs"),
        (completion_params(prompt_logprobs=1), "prompt_logprobs"),
        (chat_params(vllm_xargs={"dllm_nonsense": "x"}), "dllm_nonsense"),
        (chat_params(echo=True, logprobs=True, top_logprobs=2), "prompt_logprobs"),
    ],
)
def test_a_refusal_over_http_is_a_bad_request_that_names_the_parameter(params: SamplingParams, parameter: str) -> None:
    with pytest.raises(VLLMValidationError) as error:
        admit(params, geometry_with(TRAITS))
    response = create_error_response(error.value).error
    assert (response.code, response.param) == (HTTPStatus.BAD_REQUEST, parameter)
    assert parameter in response.message


def test_an_echo_without_logprobs_is_admitted() -> None:
    admit(completion_params(echo=True), geometry_with(TRAITS))


STRUCTURED = StructuredOutputsParams(regex="a+")


def test_models_with_a_verifier_of_their_own_take_no_grammar() -> None:
    geometry = geometry_with(IDLMConfig.traits)
    with pytest.raises(VLLMValidationError, match="structured outputs are not supported with I-DLM models") as raised:
        admit(SamplingParams(max_tokens=4, structured_outputs=STRUCTURED), geometry)
    assert raised.value.parameter == "structured_outputs"


def test_structured_outputs_have_drafts_of_their_own() -> None:
    """The engine's verifier and editing are for the other requests."""
    geometry = geometry_with(EDITING, verify="freedave", drafts=3, max_drafts=3, edit_threshold=0.5)
    for asked, is_structured in ((STRUCTURED, True), (None, False)):
        options = options_of(SamplingParams(structured_outputs=asked), geometry)
        assert options.structured == is_structured
        assert (options.verify, options.num_drafts) == (("none", 0) if is_structured else ("freedave", 2))
        assert (options.edit_threshold == inf) == is_structured


@pytest.mark.parametrize(
    "args",
    [{"dllm_verify": "freedave"}, {"dllm_verify": "fef"}, {"dllm_edit_threshold": 0.5}, {"dllm_drafts": 2}],
    ids=str,
)
def test_a_structured_request_may_not_ask_for_other_drafts_or_editing(args: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError) as error:
        validate(EDITING, structured_outputs=STRUCTURED, extra_args=args)
    assert error.value.parameter == next(iter(args))
    validate(EDITING, structured_outputs=STRUCTURED, extra_args={"dllm_verify": "none"})


def test_what_no_step_has_room_for_is_refused_with_the_option_to_raise() -> None:
    """vLLM gives a step the smaller of ``max_num_batched_tokens`` and ``max_num_scheduled_tokens``."""
    geometry = geometry_with(LLaDAConfig.traits, step_rows=96, max_drafts=7)
    drafts = {"dllm_verify": "freedave", "dllm_match": "subset", "dllm_drafts": 7}
    too_long = SamplingParams(max_tokens=100)
    too_many = SamplingParams(max_tokens=32, extra_args=drafts)
    for option in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        limited = replace(geometry, rows_option=option)
        with pytest.raises(VLLMValidationError, match=rf"96 tokens \({option}\); .* or raise {option}\."):
            admit(too_long, limited)
        with pytest.raises(VLLMValidationError, match=rf"\({option}=96\)\. .* or raise {option}\."):
            admit(too_many, limited)


def test_a_suffix_needs_a_mask_that_the_tokenizer_knows() -> None:
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda ids: [None for _ in ids])
    with pytest.raises(VLLMValidationError, match="the tokenizer has no text for the mask token 151665"):
        text_with_mask("a", "b", tokenizer, 151665, LLaDAConfig.traits)


def test_a_streaming_session_has_no_structured_outputs() -> None:
    geometry = geometry_with(TRAITS)
    with pytest.raises(VLLMValidationError, match="not supported in streaming sessions"):
        admit_request(5, SamplingParams(structured_outputs=STRUCTURED), geometry, resumable=True)
    admit_request(5, SamplingParams(structured_outputs=STRUCTURED), geometry)
    admit_request(5, SamplingParams(), geometry, resumable=True)


@pytest.mark.parametrize(
    "option", [{"dllm_edit_threshold": 0.5}, {"dllm_edit_threshold": 0.5, "dllm_max_post_edit_steps": 2}]
)
def test_fef_edits_no_tokens(option: dict[str, Any]) -> None:
    """The engine's editing is for the other requests."""
    fef = {"dllm_verify": "fef", "dllm_window": 4}
    for engine, request in (({}, {**fef, **option}), ({"verify": "fef", "window": 4}, option)):
        with pytest.raises(VLLMValidationError, match="not allowed with verify='fef'") as error:
            admit(SamplingParams(extra_args=request), geometry_with(EDITING, max_drafts=7, **engine))
        assert error.value.parameter == "dllm_edit_threshold"
    geometry = geometry_with(EDITING, max_drafts=7, edit_threshold=0.5)
    assert options_of(SamplingParams(extra_args=fef), geometry).edit_threshold == inf
    assert options_of(SamplingParams(), geometry).edit_threshold == 0.5


def test_a_step_unmasks_no_more_than_the_policy_says() -> None:
    def most(**args: Any) -> int | None:
        asked = {f"dllm_{name}": value for name, value in args.items()}
        return options_of(SamplingParams(extra_args=asked), geometry_with(TIMESTEPS)).most_unmasked

    assert most(policy="static") == 1
    assert most(policy="sequential", tokens_per_step=3) == 3
    assert most(policy="random", denoising_steps=3) == 2
    assert most(policy="threshold") is most(policy="entropy") is most(policy="origin") is None
