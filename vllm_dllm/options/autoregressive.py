"""What does not go with verifiers that write an autoregressive model's text, and what families do with one alone."""

from typing import Any

from vllm_dllm.options.errors import OptionError
from vllm_dllm.options.resolution import Resolution
from vllm_dllm.options.schema import MOST_DRAFTS
from vllm_dllm.traits import FamilyTraits

_READ = ("block_length", "verify", "draft_adapter", "compile_steps")
"""Engine options of families with a verifier of their own."""


def check_engine_options(given: dict[str, Any], traits: FamilyTraits) -> None:
    """Refuse engine options that no request of the family would read.

    Raises:
        ValueError: names one.
    """
    if traits.verifier is None:
        return
    # First what says why others are there.
    for name in sorted(given, key=lambda name: name != "verify"):
        value = given[name]
        if name == "verify" and value != traits.verifier:
            raise ValueError(
                f"verify={value!r} is not allowed: {traits.family} models decode with {traits.verifier!r} alone; leave "
                "it out"
            )
        is_off = value is False or (name == "max_drafts" and value == 0)
        if name not in _READ and not is_off:
            raise ValueError(
                f"{name}={value!r} is not allowed: {traits.family} models decode with verify={traits.verifier!r} "
                f"alone, which does not read it; allowed: {', '.join(_READ)}"
            )


def check_verifier_of_family(asked: Resolution) -> None:
    """Refuse a verifier that is another family's, or not the family's own."""
    traits, name = asked.traits, asked.verifier.name
    if traits.verifier not in (None, name):
        raise asked.refusal("verify", f": {traits.family} models decode with {traits.verifier!r} alone; leave it out")
    if name == "isd" and traits.verifier is None:
        raise asked.refusal(
            "verify",
            f": {traits.family} models see what is behind a position of a block (it is how I-DLM models decode)",
        )


def check_autoregressive(asked: Resolution) -> None:
    """The model has an autoregressive mode, and the drafts of a block can be counted."""
    reason, length = None, asked.block_length
    if asked.verifier.name == "isd":
        if length % 2 == 0 or not 3 <= length <= 2 * MOST_DRAFTS + 1:
            raise OptionError(
                f"block_length={length} is not allowed: a forward of {asked.traits.family} models has 2N - 1 positions "
                f"to write N tokens at most; allowed: an odd number from 3 to {2 * MOST_DRAFTS + 1}",
                "block_length",
                length,
            )
    elif asked.engine.first_token == "denoised":
        reason = " with the engine option first_token='denoised'; allowed: 'autoregressive'"
    elif not asked.traits.may_denoise_first_tokens:
        reason = (
            f": {asked.traits.family} models do not decode a text from left to right as well (it is an option of "
            "Nemotron-Labs-Diffusion models)"
        )
    elif length > MOST_DRAFTS + 1:
        reason = f" with block_length={length}: a block may have {MOST_DRAFTS + 1} positions at most"
    if reason is not None:
        raise asked.refusal("verify", reason)
    for name in ("step_map", "step_events"):
        if asked.values[name]:
            raise asked.refusal(name, f" with verify={asked.verifier.name!r}: no denoising step writes its tokens")
    if asked.values["confidence_top_k"] and asked.verifier.name == "isd":
        # It would limit the tokens that are drawn, as `top_k` does.
        raise asked.refusal("confidence_top_k", " with verify='isd': nothing goes by a confidence; leave it out")
