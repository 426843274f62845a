"""Every option of a request has bounds, and what lies outside of them is refused by its name, value and bounds."""

import json
import math
import pickle
from typing import Any, get_args

import pytest
from annotated_types import Ge, Gt, Le
from hypothesis import given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.engine.options.admit import admit, geometry_with
from vllm_dllm.options.admission import MOST_BAD_WORD_TOKENS, admit_request, check_prompt
from vllm_dllm.options.errors import MOST_SHOWN, OptionError
from vllm_dllm.options.resolve import options_of, resolve
from vllm_dllm.options.schema import REQUEST_PREFIX, DecodingOptions, DllmConfig, parse_request_options
from vllm_dllm.traits import FamilyTraits

LENGTH = 4
TRAITS = FamilyTraits(family="SDAR", block_length=LENGTH, mask_token_id=3, editing=True, timesteps=True)
FULL = FamilyTraits(family="LLaDA", block_length=LENGTH, mask_token_id=3, attention="full", timesteps=True)
ENGINE = {"max_drafts": 64}

ENDS: dict[str, tuple[float, float]] = {
    "tokens_per_step": (1, 2**31 - 1),
    "denoising_steps": (1, 65536),
    "steps": (1, 65536),
    "threshold": (0.0, 1.0),
    "entropy_bound": (1e-6, 1e6),
    "edit_threshold": (0.0, 1e6),
    "max_post_edit_steps": (0, 256),
    "relaxed_threshold": (0.0, 1.0),
    "block_add_threshold": (1e-6, 1.0),
    "decoded_token_threshold": (0.0, 1.0),
    "radius": (0, 2**31 - 1),
    "factor": (1e-6, 1e6),
    "alg_temp": (0.0, 1e6),
    "cfg_scale": (0.0, 1e3),
    "confidence_top_k": (1, 2**31 - 1),
    "drafts": (0, 64),
    "window": (1, 64),
    "resample_steps": (1, 64),
    "remask": (1e-6, 1.0),
    "min_span": (1, 2**31 - 1),
    "score_threshold": (-1e6, 1e6),
    "score_on": (-1e6, 1e6),
    "score_off": (-1e6, 1e6),
    "score_cost": (0.0, 1e6),
    "estimator_parameter": (0.0, 1e6),
}
"""Least and largest value of every option that is a number."""

WORDS = {"policy", "verify", "match", "eos_early_stop", "step_map", "step_events", "infill", "route"}
WORDS |= {"estimator", "score_cost_per"}
"""Options that are one of a few words."""

ENGINE_ONLY = sorted(set(DllmConfig.model_fields) - set(DecodingOptions.model_fields))

NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 1e308, -1e308, math.inf, -math.inf, math.nan, 1e-320]),
)
VALUES = st.one_of(
    NUMBERS,
    st.booleans(),
    st.text(max_size=5),
    st.sampled_from(["auto", "nan", "inf", "1e400", "0x10", "", "\ud800", "../../etc/passwd", "__import__('os')"]),
    st.lists(NUMBERS, max_size=3),
)


def parse(**options: Any) -> DecodingOptions:
    return parse_request_options({REQUEST_PREFIX + key: value for key, value in options.items()})


def validate(**params: Any) -> None:
    admit(SamplingParams(**params), geometry_with(TRAITS, **ENGINE))


def test_every_option_of_a_request_is_a_word_or_bounded_on_both_sides() -> None:
    assert {*ENDS, *WORDS} == set(DecodingOptions.model_fields)
    for name in ENDS:
        field = DecodingOptions.model_fields[name]
        kinds = [field, *get_args(field.annotation)]
        bounds = [bound for kind in kinds for bound in getattr(kind, "metadata", getattr(kind, "__metadata__", ()))]
        bounds += [part for bound in bounds for part in getattr(bound, "metadata", ())]
        assert any(isinstance(bound, Le) for bound in bounds), name
        assert any(isinstance(bound, (Ge, Gt)) for bound in bounds), name


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_its_range_are_allowed_and_what_lies_beyond_is_not(name: str) -> None:
    least, largest = ENDS[name]
    assert getattr(parse(**{name: least}), name) == least
    assert getattr(parse(**{name: largest}), name) == largest
    above = largest + 1 if isinstance(largest, int) else math.nextafter(largest, math.inf)
    below = -1 if least >= 0 else math.nextafter(least, -math.inf)
    for beyond in (below, above, -math.inf, math.inf, math.nan, 2**63, -(2**64), 1e308, True, False):
        with pytest.raises(OptionError) as error:
            parse(**{name: beyond})
        assert error.value.key == f"dllm_{name}"
        assert f"dllm_{name}=" in str(error.value)
        assert str(beyond) in str(error.value)


def test_an_alg_temp_that_would_make_all_scores_infinite_is_refused() -> None:
    assert parse(alg_temp=1e-4).alg_temp == 1e-4
    for tiny in (9e-5, 1e-40, 1e-320):
        with pytest.raises(OptionError, match=r"dllm_alg_temp=.* is not allowed: it must be 0, or at least 0\.0001"):
            parse(alg_temp=tiny)


@given(name=st.sampled_from(sorted(DecodingOptions.model_fields)), value=VALUES)
def test_whatever_is_asked_for_is_taken_within_its_bounds_or_refused(name: str, value: Any) -> None:
    try:
        taken = getattr(parse(**{name: value}), name)
    except OptionError as error:
        # Whatever was in it, it can be sent and logged.
        assert f"dllm_{name}=".encode() in str(error).encode()  # noqa: PT017
        return
    if taken is None or isinstance(taken, (str, bool)):
        return
    least, largest = ENDS[name]
    assert (0 if least == 1e-6 else least) <= taken <= largest


@given(st.dictionaries(st.sampled_from(sorted(DecodingOptions.model_fields)), VALUES, max_size=4))
def test_options_together_are_resolved_or_refused_and_nothing_else_happens(options: dict[str, Any]) -> None:
    args = {REQUEST_PREFIX + key: value for key, value in options.items()}
    for traits in (TRAITS, FULL):
        params = SamplingParams(max_tokens=8, extra_args=args) if _sendable(args) else None
        if params is None:
            continue
        try:
            params = admit(params, geometry_with(traits, **ENGINE))
        except VLLMValidationError as error:
            str(error).encode()
            continue
        resolved = options_of(params, geometry_with(traits, **ENGINE))
        # What the scheduler and the worker do with it must not fail: there is nobody to tell.
        assert resolved.num_drafts <= 64
        assert resolved.num_steps <= 65536
        assert resolved.quota + (resolved.quota_remainder > 0) >= 1


def _sendable(args: dict[str, Any]) -> bool:
    """vLLM itself refuses integers beyond 64 bits."""
    try:
        SamplingParams(extra_args=args)
    except VLLMValidationError:
        return False
    return True


@pytest.mark.parametrize("name", ENGINE_ONLY)
def test_options_of_the_engine_are_none_of_a_request(name: str) -> None:
    assert "draft_graph" in ENGINE_ONLY
    with pytest.raises(
        OptionError, match=rf"'dllm_{name}' \({name} is an option of the engine\); allowed: dllm_policy, "
    ):
        parse(**{name: "/etc/passwd"})


def test_no_option_of_a_request_is_free_text() -> None:
    for name in DecodingOptions.model_fields:
        with pytest.raises(OptionError, match=f"dllm_{name}='/tmp/graph.json' is not allowed"):
            parse(**{name: "/tmp/graph.json"})


# Effort.


@pytest.mark.parametrize("policy", ["origin", "maskgit_plus", "topk_margin", "entropy"])
def test_a_schedule_of_timesteps_is_bounded_by_the_positions_of_a_block(policy: str) -> None:
    validate(extra_args={"dllm_policy": policy, "dllm_denoising_steps": 8 * LENGTH})
    with pytest.raises(
        VLLMValidationError, match=r"denoising_steps=33 .* 33 timesteps per block of 4.* may be 32"
    ) as error:
        validate(extra_args={"dllm_policy": policy, "dllm_denoising_steps": 8 * LENGTH + 1})
    assert error.value.parameter == "dllm_denoising_steps"


def test_steps_over_all_blocks_are_bounded_by_all_their_positions() -> None:
    def request(steps: int) -> None:
        params = SamplingParams(max_tokens=12, extra_args={"dllm_policy": "origin", "dllm_steps": steps})
        admit(params, geometry_with(FULL, max_drafts=0, step_rows=64, max_model_len=64))

    request(3 * 8 * LENGTH)
    with pytest.raises(VLLMValidationError, match="33 timesteps per block of 4"):
        request(3 * (8 * LENGTH + 1))


@pytest.mark.parametrize("policy", ["static", "threshold", "sequential", "random", "paced"])
@pytest.mark.parametrize("steps", [LENGTH, LENGTH + 1, 65536])
def test_steps_beyond_the_positions_of_a_block_are_no_steps_at_all(policy: str, steps: int) -> None:
    options = resolve(parse(policy=policy, denoising_steps=steps), DllmConfig(), TRAITS, LENGTH)
    # One position in each of the first LENGTH steps, which is all of them.
    quotas = [options.quota + (step < options.quota_remainder) for step in range(LENGTH)]
    assert quotas == [1] * LENGTH


# Sampling parameters of vLLM.


@pytest.mark.parametrize(
    ("seed", "n", "allowed"),
    [
        (2**63 - 1, 1, True),
        (2**63 - 1, 2, False),
        (2**63 - 4, 4, True),
        (2**63 - 3, 4, False),
        (2**63, 1, False),
        (-(2**63), 8, True),
        (-(2**63) - 1, 1, False),
    ],
)
def test_the_seeds_of_all_answers_are_64_bit_integers(seed: int, n: int, allowed: bool) -> None:
    if allowed:
        validate(seed=seed, n=n)
        return
    with pytest.raises(VLLMValidationError, match=rf"seed={seed} is not allowed with n={n}") as error:
        validate(seed=seed, n=n)
    assert error.value.parameter == "seed"


def test_a_min_tokens_that_makes_a_length_beyond_32_bits_is_refused() -> None:
    validate(min_tokens=1 << 30, max_tokens=1 << 40)
    with pytest.raises(VLLMValidationError, match="min_tokens may be 1073741824 at most"):
        validate(min_tokens=(1 << 30) + 1, max_tokens=1 << 40)


def test_the_search_for_repetitions_is_bounded() -> None:
    validate(repetition_detection=RepetitionDetectionParams(max_pattern_size=256, min_count=2))
    with pytest.raises(VLLMValidationError, match="max_pattern_size of repetition_detection may be 256 at most"):
        validate(repetition_detection=RepetitionDetectionParams(max_pattern_size=257, min_count=2))


def test_bad_words_are_refused_where_no_tokenizer_has_seen_them() -> None:
    with pytest.raises(VLLMValidationError, match="bad_words need a tokenizer"):
        admit_request(5, SamplingParams(bad_words=["x"]), geometry_with(TRAITS, **ENGINE))


def test_a_prompt_has_tokens_of_the_model() -> None:
    check_prompt([0, 511], 512)
    check_prompt([], 512)
    for token in (512, -1, 1 << 70):
        with pytest.raises(VLLMValidationError, match=f"token id {token} is out of vocabulary: the model has 0 to 511"):
            check_prompt([1, token, 2], 512)


def test_long_bad_words_are_refused_by_their_tokens() -> None:
    def request(length: int) -> None:
        params = SamplingParams(bad_words=["x"])
        params._bad_words_token_ids = [[5], [6] * length]
        admit_request(5, params, geometry_with(TRAITS, **ENGINE))

    request(MOST_BAD_WORD_TOKENS)
    with pytest.raises(VLLMValidationError, match="a bad word may have 64 tokens at most, and the longest has 65"):
        request(MOST_BAD_WORD_TOKENS + 1)


def _nest(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"top_k": 2**64, "temperature": 1.0}, "top_k"),
        ({"stream_interval": 2**70}, "stream_interval"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"bad_words": ["\udfff"]}, "bad_words"),
        ({"repetition_detection": RepetitionDetectionParams(4, 1, 2**64)}, "repetition_detection"),
        ({"extra_args": {"other": "\ud800"}}, "extra_args"),
        ({"extra_args": {"kv_transfer_params": {"deep": _nest(5000)}}}, "extra_args"),
        ({"extra_args": {"kv_transfer_params": {"deep": _nest(14)}}}, "extra_args"),
        ({"extra_args": {"kv_transfer_params": "text"}}, "kv_transfer_params"),
        ({"extra_args": {"ec_transfer_params": [1]}}, "ec_transfer_params"),
        ({"extra_args": {"kv_transfer_params": {"do_remote_prefill": 1}}}, "kv_transfer_params"),
    ],
)
def test_what_cannot_be_sent_to_the_engine_is_refused(params: dict[str, Any], parameter: str) -> None:
    with pytest.raises(VLLMValidationError) as error:
        validate(**params)
    assert error.value.parameter == parameter
    str(error.value).encode()


def test_what_is_admitted_is_nested_as_deep_as_pickle_can_follow() -> None:
    params = SamplingParams(extra_args={"kv_transfer_params": {"deep": _nest(13)}})
    pickle.dumps(admit(params, geometry_with(TRAITS, **ENGINE)))


def test_what_is_admitted_can_be_sent_to_the_engine() -> None:
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(SamplingParams)
    params = SamplingParams(
        top_k=2**63, temperature=1.0, extra_args={"other": {"a": [1, "b", None]}, "dllm_tokens_per_step": 3}
    )
    params = admit(params, geometry_with(TRAITS, **ENGINE))
    assert decoder.decode(encoder.encode(params)) == params


def test_an_object_of_another_plugin_is_left_to_it() -> None:
    validate(extra_args={"other": object(), "more": {(1, 2): 3}, 7: "x"})


# Messages.


@pytest.mark.parametrize("value", ["x" * 100_000, [1] * 100_000, "\ud800", "line\nbreak", "\x1b[31m"])
def test_a_message_repeats_no_more_of_a_value_than_can_be_read_and_nothing_unprintable(value: Any) -> None:
    for key in ("dllm_threshold", "dllm_unknown"):
        with pytest.raises(VLLMValidationError) as error:
            validate(extra_args={key: value})
        message = str(error.value)
        assert key in message
        assert message.isprintable()
        assert len(message) < 4 * MOST_SHOWN + 1000
        json.dumps(message, ensure_ascii=False).encode()


def test_a_name_is_repeated_in_the_same_way() -> None:
    for name in ("dllm_" + "x" * 100_000, "dllm_\ud800", "diffusion_\udfff\n"):
        with pytest.raises(VLLMValidationError) as error:
            validate(extra_args={name: 1})
        message = str(error.value)
        assert message.isprintable()
        assert len(message) < 4 * MOST_SHOWN + 1000
