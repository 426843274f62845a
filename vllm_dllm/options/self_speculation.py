"""Verifiers that draft a window of positions (FeF, S2D2): how many drafts that makes, and what S2D2 refuses."""

from vllm_dllm.methods import ROUTES, VERIFIER_ROWS, VerifierRow
from vllm_dllm.options.resolution import Resolution
from vllm_dllm.options.resolved import OPTION_DEFAULTS
from vllm_dllm.options.schema import MOST_DRAFTS
from vllm_dllm.traits import FamilyTraits

VERIFYING_ROWS = 128
"""Rows that verify drafts of S2D2 in a forward of a request, where nobody gives a ``window``."""


def default_window(verifier: VerifierRow, traits: FamilyTraits, block_length: int) -> int:
    """The ``window`` where nobody gives one."""
    if verifier.name != "s2d2":
        return VERIFIER_ROWS["fef"].default_drafts
    window = block_length if traits.shifted else max(VERIFYING_ROWS // block_length, 1)
    return min(window, MOST_DRAFTS)


def fef_drafts(window: int, block_length: int) -> int:
    """Drafts of FeF beside the block: the first position of a window is no draft, nor is a block without masks."""
    return max(min(window - 1, block_length - 2), 0)


def window_drafts(verifier: VerifierRow, window: int, traits: FamilyTraits, block_length: int) -> int:
    """Drafts beside the block that a forward has.

    S2D2 has a draft for each position that it verifies, or one for all where the row before predicts a position.
    """
    if verifier.name == "s2d2":
        return min(window, 1) if traits.shifted else window
    return fef_drafts(window, block_length)


def check_s2d2(asked: Resolution) -> None:
    engine, traits, values = asked.engine, asked.traits, asked.values
    if traits.attention != "block-causal":
        raise asked.refusal(
            "verify",
            f": in {traits.family} models blocks do not see the blocks before them block by block (it is an option of "
            "SDAR, Fast-dLLM v2 and LLaDA2 models)",
        )
    if engine.verify != "s2d2":
        raise asked.refusal(
            "verify",
            f": this engine was started with verify={engine.verify or 'none'!r}; start it with verify='s2d2', for "
            "which it takes a backend of attention that can verify",
        )
    if asked.row.needs_windows:
        raise asked.refusal("policy", " with verify='s2d2': it drafts one block at a time; give another policy")
    if asked.quota != (1, 0):
        key = next(name for name in ("steps", "denoising_steps", "tokens_per_step") if values[name] is not None)
        raise asked.refusal(
            key,
            f" with verify='s2d2': a step that verifies may unmask one position only; give a {key} that makes one "
            "position a step",
        )
    used = {**OPTION_DEFAULTS, **{name: value for name, value in values.items() if value is not None}}
    if used["score_on"] <= used["score_off"]:
        key, other = ("score_on", "score_off") if values["score_on"] is not None else ("score_off", "score_on")
        raise asked.refusal(key, f" with {other}={used[other]!r}: score_on must be above score_off")
    route = used["route"]
    for name in dict.fromkeys(name for names in ROUTES.values() for name in names):
        if getattr(asked.request, name) is not None and name not in ROUTES[route]:
            raise asked.unread(name, f"route={route!r}", (each for each, names in ROUTES.items() if name in names))
