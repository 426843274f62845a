"""Which requests may have windows of several blocks, and which need them."""

from dataclasses import replace
from typing import Any

import pytest

from vllm_dllm.options.errors import OptionError
from vllm_dllm.options.resolve import resolve
from vllm_dllm.options.schema import DecodingOptions, DllmConfig
from vllm_dllm.traits import FamilyTraits

SDAR = FamilyTraits(family="SDAR", block_length=8, mask_token_id=3)
MULTI_BLOCK = DecodingOptions(policy="multi_block")


def test_the_published_thresholds_are_the_defaults() -> None:
    resolved = resolve(MULTI_BLOCK, DllmConfig(eager=3), SDAR, 8)
    found = resolved.threshold, resolved.block_add_threshold, resolved.decoded_token_threshold, resolved.most_unmasked
    assert found == (0.9, 0.1, 0.95, None)


@pytest.mark.parametrize(
    ("traits", "engine", "more", "message"),
    [
        (SDAR, {}, {}, "policy='multi_block' is not allowed: .* windows of one block; .* eager, .* such as eager=4"),
        (replace(SDAR, family="LLaDA", attention="full"), {}, {}, "policy='multi_block' .*: LLaDA models compute"),
        (replace(SDAR, family="Fast-dLLM v2", commit_predicts=True), {}, {}, "policy='multi_block' .* Fast-dLLM v2"),
        (replace(SDAR, family="openPangu", attention="causal-context"), {}, {}, "policy='multi_block' .* openPangu"),
        (SDAR, {"eager": 3}, {"structured": True}, "policy='multi_block' .* with structured outputs"),
    ],
)
def test_where_windows_cannot_be_the_policy_is_refused_by_name(
    traits: FamilyTraits, engine: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as error:
        resolve(MULTI_BLOCK, DllmConfig(**engine), traits, 8, **more)
    assert error.value.key == "policy"
    # As the engine's own policy it stops the start.
    with pytest.raises(OptionError, match=message):
        resolve(DecodingOptions(), DllmConfig(policy="multi_block", **engine), traits, 8, **more)


@pytest.mark.parametrize("verify", ["freedave", "spiffy", "psd", "fef"])
def test_every_verifier_is_refused_beside_it(verify: str) -> None:
    with pytest.raises(OptionError):
        resolve(DecodingOptions(policy="multi_block", verify=verify), DllmConfig(eager=3, max_drafts=32), SDAR, 8)
    defaults = DllmConfig(eager=3, max_drafts=32, verify="freedave")
    with pytest.raises(OptionError, match=r"verify='freedave' .* with policy='multi_block'.*give verify='none'"):
        resolve(MULTI_BLOCK, defaults, SDAR, 8)
    assert resolve(DecodingOptions(policy="multi_block", verify="none"), defaults, SDAR, 8).num_drafts == 0


def test_of_all_policies_it_alone_edits_in_windows() -> None:
    traits = replace(SDAR, editing=True)
    resolved = resolve(DecodingOptions(policy="multi_block", edit_threshold=0.5), DllmConfig(eager=3), traits, 8)
    assert (resolved.edit_threshold, resolved.max_post_edit_steps) == (0.5, 16)
    with pytest.raises(OptionError, match=r"edit_threshold=0\.5 is not allowed with the engine option eager"):
        resolve(DecodingOptions(policy="threshold", edit_threshold=0.5), DllmConfig(eager=3), traits, 8)


@pytest.mark.parametrize(("given", "kept"), [(True, True), (False, False), (2, 2), (64, 64), ("true", True)])
def test_eager_is_a_boolean_or_a_number_of_blocks(given: Any, kept: Any) -> None:
    eager = DllmConfig(eager=given).eager
    assert (eager, type(eager)) == (kept, type(kept))


@pytest.mark.parametrize("given", [0.5, -1, 0, 1, 1.0, "1", 65, "many"])
def test_another_eager_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="eager"):
        DllmConfig(eager=given)
