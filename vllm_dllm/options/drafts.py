"""How many drafts a request may have beside its block, and how each verifier counts them."""

from typing import Literal

from vllm_dllm.methods import VERIFIER_ROWS, VerifierName, VerifierRow
from vllm_dllm.options.errors import not_allowed
from vllm_dllm.options.schema import MOST_DRAFTS, DecodingOptions, DllmConfig


def fef_drafts(window: int, block_length: int) -> int:
    """Drafts beside the block that FeF has in a forward: the first of a window is none, nor is what fills the block."""
    return max(min(window - 1, block_length - 2), 0)


def count_fef_drafts(request: DecodingOptions, window: int, engine: DllmConfig, block_length: int) -> int:
    """Drafts beside the block of a request with ``verify='fef'``.

    Raises:
        OptionError: the engine has no room for them. Names what the user can change: the option of the request that
            asked for so many, if there is one.
    """
    wanted = fef_drafts(window, block_length)
    room = engine.max_drafts
    if room is None:
        room = wanted if engine.verify == "fef" else 0
    if wanted > room:
        has = f"and this engine has room for {room}" if room else "and this engine has no room for drafts"
        remedy = f"start the engine with max_drafts={wanted}" + (f", or ask for a window of {room + 1}" if room else "")
        if request.window is not None and room:
            raise not_allowed("window", window, f": verify='fef' needs room for {wanted} drafts, {has}; {remedy}")
        raise not_allowed("verify", "fef", f": a window of {window} needs room for {wanted} drafts, {has}; {remedy}")
    return wanted


def drafts_beside_block(verify: VerifierName, drafts: int | None) -> int:
    """Drafts beside the block itself that a verifier's own count of ``drafts`` means."""
    row = VERIFIER_ROWS[verify]
    if not row.options:
        return 0
    return max((row.default_drafts if drafts is None else drafts) - row.block_is_a_draft, 0)


def count_drafts(
    verifier: VerifierRow, drafts: int | Literal["auto"] | None, engine: DllmConfig, block_length: int
) -> int:
    """Drafts beside the block; no more than the engine has room for where nobody gives a number."""
    verify = verifier.name
    if verify == "none":
        return 0
    useful = MOST_DRAFTS
    if not engine.eager and (verify == "freedave" or (verify == "psd" and engine.draft_graph is None)):
        # The block has one token more than nothing, each draft of a chain one more, and the last leaves a mask.
        useful = max(block_length - 2, 0)
    wanted = useful if drafts == "auto" else min(drafts_beside_block(verify, drafts), useful)
    room = engine.max_drafts
    if room is None:
        # An engine that does not say: room for its own drafts.
        own = engine.drafts if isinstance(engine.drafts, int) else None
        room = drafts_beside_block(engine.verify or "none", own)
    if wanted and not room:
        raise not_allowed(
            "verify",
            verify,
            ": this engine has no room for drafts; start it with max_drafts, or with verify as an engine option",
        )
    if drafts is None or drafts == "auto":
        return min(wanted, room)
    if wanted > room:
        raise not_allowed(
            "drafts",
            drafts,
            f": this engine has room for {room + verifier.block_is_a_draft} with verify={verify!r} (engine option "
            "max_drafts)",
        )
    return wanted
