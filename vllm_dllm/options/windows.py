"""What does not go with windows of several blocks (the engine option ``eager``), and what does not go without them.

Both functions name the option that a request may not have and the reason, or give None.
"""

from vllm_dllm.methods import PolicyRow, VerifierRow
from vllm_dllm.traits import FamilyTraits

Refused = tuple[str, str] | None


def refused_in_windows(
    row: PolicyRow, verifier: VerifierRow, editing: bool, steps_differ: bool, subset_match: bool
) -> Refused:
    """Of any policy, on an engine with such windows.

    Args:
        editing: tokens may be edited.
        steps_differ: the first steps of a block unmask another number of positions than the others.
        subset_match: FreeDave accepts drafts that are not the next state.
    """
    # Another policy begins no block before the block in front is settled, and a window could not tell.
    asked = {
        "edit_threshold": editing and not row.needs_windows,
        "denoising_steps": steps_differ,
        "policy": row.counts_steps,
    }
    for key, is_asked in asked.items():
        if is_asked:
            alone = "; policy='multi_block' edits all blocks of a window" if key == "edit_threshold" else ""
            return key, f" with the engine option eager: it is about a block at a time{alone}"
    if verifier.needs_all_drafts or subset_match:
        return (
            "match" if subset_match else "verify",
            " with the engine option eager: its tokens depend on when drafts were made, and a request that is "
            "preempted begins the blocks of its window anew",
        )
    return None


def refused_to_several_blocks(
    row: PolicyRow, verifier: VerifierRow, traits: FamilyTraits, has_windows: bool, structured: bool
) -> Refused:
    """Of a policy that denoises several blocks at a time.

    Args:
        has_windows: the engine has such windows.
        structured: a grammar constrains the request's text.
    """
    if traits.sees_whole_text:
        return (
            "policy",
            f": {traits.family} models compute their whole text anew with every block; windows of several blocks are "
            "for models whose blocks see the text before them alone",
        )
    if traits.commit_predicts or traits.causal_context:
        return (
            "policy",
            f": blocks of {traits.family} models see the blocks before them as they are once they are committed, so "
            "no block begins earlier",
        )
    if not has_windows:
        return (
            "policy",
            ": this engine has windows of one block; start it with the engine option eager, which is the number of "
            "blocks of a window, such as eager=4",
        )
    if structured:
        return "policy", " with structured outputs: a grammar denoises one block at a time; give another policy"
    if verifier.name != "none":
        return (
            "verify",
            f" with policy={row.name!r}: drafts fill one block after the other, and the policy fills several at a "
            "time; leave one of them out, or give verify='none'",
        )
    return None
