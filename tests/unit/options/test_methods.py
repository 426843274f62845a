"""The tables of policies and verifiers are complete: options, algorithms, references and documentation follow them."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from tests.reference import bidirectional, decode, multi_block
from vllm_dllm.decoding.policies import PolicyParams, unmask
from vllm_dllm.methods import (
    BY_KIND,
    POLICIES,
    POLICY_OPTIONS,
    ROUTES,
    SCHEDULES,
    VERIFIER_OPTIONS,
    VERIFIERS,
    Policy,
    PolicyRow,
    policy_row,
)
from vllm_dllm.models.sdar_configs import IDLMConfig
from vllm_dllm.options.errors import OptionError
from vllm_dllm.options.resolve import resolve
from vllm_dllm.options.resolved import OPTION_DEFAULTS, ResolvedOptions
from vllm_dllm.options.schema import DecodingOptions, DllmConfig
from vllm_dllm.traits import FamilyTraits

TRAITS = FamilyTraits(family="SDAR", block_length=8, mask_token_id=3)
TIMESTEPS = FamilyTraits(family="Dream", block_length=8, mask_token_id=3, timesteps=True)
REFERENCES = {
    multi_block.MultiBlock.policy,
    *get_args(decode.Options.__annotations__["policy"]),
    *get_args(bidirectional.Policy),
}
WITHOUT_REFERENCE = {"hierarchy", "random", "origin"}
"""``tests/unit/decoding/test_policies.py`` states the rules of these once more instead."""

VALUES: dict[str, Any] = {
    "match": "exact",
    "drafts": 3,
    "steps": 4,
    "denoising_steps": 4,
    "tokens_per_step": 2,
    "route": "always",
    "min_span": 3,
    "score_cost_per": "token",
    "estimator": "hard_margin_threshold",
}


def value_of(option: str) -> Any:
    return VALUES.get(option, 1 if option in ("radius", "window", "resample_steps") else 0.5)


def engine(row: PolicyRow | None = None) -> DllmConfig:
    """With windows of several blocks where the policy needs them."""
    return DllmConfig(max_drafts=32, eager=3 if row is not None and row.needs_windows else None)


def rows(table: tuple[Any, ...]) -> Any:
    return pytest.mark.parametrize("row", table, ids=lambda row: f"{row.name}, {row.paper}")


def test_every_policy_has_one_row() -> None:
    assert list(BY_KIND) == [row.kind for row in POLICIES]
    assert set(BY_KIND) == set(Policy)


@rows(POLICIES)
def test_a_policy_is_found_by_its_name(row: PolicyRow) -> None:
    assert policy_row(row.name, timesteps=row.timed) is row


@rows(POLICIES)
def test_a_policy_has_a_function(row: PolicyRow) -> None:
    """The most certain of four positions, or all of them, by the policy's own statistics."""
    certain = torch.tensor([[0.2, 0.9, 0.3, 0.4]])
    one = torch.ones(1)
    params = PolicyParams(
        policy=torch.tensor([int(row.kind)]),
        quota=torch.tensor([1]),
        threshold=one * 0.95,
        entropy_bound=one * 0.2,
        relaxed_threshold=one * 0.95,
        radius=torch.tensor([1]),
        factor=one * 0.2,
        ratio=one * 0.4,
        noise=1 - certain,
    )
    chosen = unmask(
        torch.ones(1, 4, dtype=torch.bool),
        certain,
        1 - certain,
        params,
        threshold_inclusive=False,
        present={row.kind},
        margin=certain,
    )
    assert chosen.any()
    if row.orders_by != "position":
        assert chosen[0, 1]


@rows(POLICIES)
def test_a_policy_has_a_reference(row: PolicyRow) -> None:
    assert (row.name in REFERENCES) != (row.name in WITHOUT_REFERENCE)


def test_options_of_policies_and_verifiers_are_options_of_a_request() -> None:
    assert set(DecodingOptions.model_fields) >= POLICY_OPTIONS | VERIFIER_OPTIONS
    assert POLICY_OPTIONS <= set(OPTION_DEFAULTS) | {"threshold", *SCHEDULES} <= set(DecodingOptions.model_fields)


@rows(POLICIES)
@pytest.mark.parametrize("option", sorted(POLICY_OPTIONS - {"steps"}))
def test_a_request_may_give_the_options_that_its_policy_reads_and_no_others(row: PolicyRow, option: str) -> None:
    traits = TIMESTEPS if row.timed else TRAITS
    request = DecodingOptions(policy=row.name, **{option: value_of(option)})
    if option in row.options:
        resolve(request, engine(row), traits, traits.block_length)
    elif (row.kind, option) == (Policy.TIMED_ENTROPY, "entropy_bound"):
        assert resolve(request, engine(row), traits, traits.block_length).kind == Policy.ENTROPY
    else:
        with pytest.raises(OptionError, match=rf"{option}=.* is not allowed with policy='{row.name}', which does not"):
            resolve(request, engine(row), traits, traits.block_length)


@rows(VERIFIERS)
@pytest.mark.parametrize("option", sorted(VERIFIER_OPTIONS))
def test_a_request_may_give_the_options_that_its_verifier_reads_and_no_others(row: Any, option: str) -> None:
    request = DecodingOptions(verify=row.name, **{option: value_of(option)})
    traits = replace(TRAITS, commit_predicts=True) if row.is_autoregressive else TRAITS
    if row.name == "isd":
        traits = IDLMConfig.traits
    if option in row.options:
        given = engine().model_copy(update={"verify": row.name})
        route = next((route for route, names in ROUTES.items() if option in names), None)
        if route is not None:
            request = request.model_copy(update={"route": route})
        resolve(request, given, traits, traits.block_length)
    else:
        with pytest.raises(OptionError, match=rf"{option}=.* is not allowed with verify='{row.name}'"):
            resolve(request, engine(), traits, traits.block_length)


def test_s2d2_verifies_as_many_positions_as_the_rows_are_for() -> None:
    shifted = replace(TRAITS, shifted=True, commit_predicts=True)
    for traits, length, window, drafts in (
        (TRAITS, 8, 8, 8),
        (TRAITS, 32, 4, 4),
        (shifted, 32, 32, 1),
        (shifted, 256, 64, 1),
    ):
        resolved = resolve(DecodingOptions(), DllmConfig(verify="s2d2"), traits, length)
        assert (resolved.window, resolved.num_drafts) == (window, drafts)
    for wrong, given, message in (
        (replace(TRAITS, attention="full"), DllmConfig(verify="s2d2"), "verify='s2d2' is not allowed: in SDAR models"),
        (TRAITS, DllmConfig(verify="s2d2", eager=2), "verify='s2d2' is not allowed with the engine option eager"),
        (TRAITS, DllmConfig(verify="s2d2", denoising_steps=3), "denoising_steps=3 is not allowed with verify='s2d2'"),
        (TRAITS, DllmConfig(verify="s2d2", score_off=2.0), "score_off=2.0 is not allowed with score_on=1.0"),
        (TRAITS, DllmConfig(verify="s2d2", max_drafts=3), "a window of 8 needs room for 8 drafts, and this engine has"),
    ):
        with pytest.raises(OptionError, match=message):
            resolve(DecodingOptions(), given, wrong, 8)


def test_linear_spec_drafts_by_any_policy_and_fills_the_block_at_once_by_default() -> None:
    traits = replace(TRAITS, commit_predicts=True)
    resolved = resolve(DecodingOptions(verify="linear_spec"), engine(), traits, 8)
    assert (resolved.policy, resolved.threshold, resolved.num_drafts) == ("threshold", 0.0, 0)
    given = resolve(DecodingOptions(verify="linear_spec", threshold=0.7), engine(), traits, 8)
    assert given.threshold == 0.7
    assert resolve(DecodingOptions(verify="linear_spec", policy="static"), engine(), traits, 8).policy == "static"
    for wrong, length, message in (
        (TRAITS, 8, r"verify='linear_spec' is not allowed: .* models do not decode a text from left to right"),
        (replace(traits, shifted=True), 8, "verify='linear_spec' is not allowed"),
        (traits, 66, "with block_length=66: a block may have 65 positions at most"),
    ):
        with pytest.raises(OptionError, match=message):
            resolve(DecodingOptions(verify="linear_spec"), engine(), wrong, length)
    with pytest.raises(OptionError, match="with the engine option first_token='denoised'"):
        resolve(DecodingOptions(), DllmConfig(verify="linear_spec", first_token="denoised"), traits, 8)
    with pytest.raises(OptionError, match="step_events=True is not allowed with verify='linear_spec'"):
        resolve(DecodingOptions(verify="linear_spec", step_events=True), engine(), traits, 8)


def test_engine_options_are_defaults_that_the_policy_of_a_request_need_not_read() -> None:
    defaults = DllmConfig(policy="localleap", radius=2, threshold=0.8, verify="freedave", drafts=4, match="exact")
    resolved: ResolvedOptions = resolve(DecodingOptions(policy="factor", verify="none"), defaults, TRAITS, 8)
    assert (resolved.policy, resolved.verify, resolved.num_drafts) == ("factor", "none", 0)


def test_numbers_of_the_engine_are_for_the_verifier_of_the_engine() -> None:
    defaults = DllmConfig(verify="s2d2", window=4, max_drafts=32)
    assert resolve(DecodingOptions(), defaults, TRAITS, 32).window == 4
    for asked, window in ((DecodingOptions(verify="fef"), 16), (DecodingOptions(verify="fef", window=6), 6)):
        assert resolve(asked, defaults, TRAITS, 32).window == window


def test_a_0_that_turns_something_off_is_allowed_everywhere() -> None:
    resolve(DecodingOptions(policy="static", alg_temp=0.0, drafts=0), engine(), TRAITS, 8)


def test_steps_of_editing_need_a_family_and_a_threshold_for_editing() -> None:
    with pytest.raises(OptionError, match="max_post_edit_steps=3 is not allowed without an edit_threshold"):
        resolve(DecodingOptions(max_post_edit_steps=3), engine(), TRAITS, 8)


@pytest.mark.parametrize(
    ("room", "request_options", "key", "message"),
    [
        (0, {}, "verify", "verify='fef' .* a window of 8 needs room for 6 drafts, .* no room .* with max_drafts=6"),
        (3, {}, "verify", "room for 3; start the engine with max_drafts=6, or ask for a window of 4"),
        (3, {"window": 6}, "window", "window=6 .* needs room for 5 .* max_drafts=5, or ask for a window of 4"),
    ],
)
def test_fef_without_room_names_what_the_user_can_change(
    room: int, request_options: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message) as error:
        resolve(DecodingOptions(verify="fef", **request_options), DllmConfig(max_drafts=room), TRAITS, 8)
    assert error.value.key == key
