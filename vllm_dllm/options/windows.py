"""What does not go with windows of several blocks (the engine option ``eager``), and what does not go without them."""

from vllm_dllm.options.resolution import Resolution


def check_windows(asked: Resolution) -> None:
    """Of any policy, on an engine with such windows."""
    # Another policy begins no block before the block in front is settled, and a window could not tell.
    misplaced = {
        "edit_threshold": asked.editing and not asked.row.needs_windows,
        "denoising_steps": asked.quota[1] > 0,
        "policy": asked.row.counts_steps,
    }
    for key, is_asked in misplaced.items():
        if is_asked:
            alone = "; policy='multi_block' edits all blocks of a window" if key == "edit_threshold" else ""
            raise asked.refusal(key, f" with the engine option eager: it is about a block at a time{alone}")
    if asked.verifier.needs_all_drafts or asked.subset_match:
        raise asked.refusal(
            "match" if asked.subset_match else "verify",
            " with the engine option eager: its tokens depend on when drafts were made, and a request that is "
            "preempted begins the blocks of its window anew",
        )


def check_several_blocks(asked: Resolution) -> None:
    """Of a policy that denoises several blocks at a time."""
    traits, reason = asked.traits, None
    if traits.sees_whole_text:
        reason = (
            f": {traits.family} models compute their whole text anew with every block; windows of several blocks are "
            "for models whose blocks see the text before them alone"
        )
    elif traits.commit_predicts or traits.causal_context:
        reason = (
            f": blocks of {traits.family} models see the blocks before them as they are once they are committed, so "
            "no block begins earlier"
        )
    elif not asked.engine.eager:
        reason = (
            ": this engine has windows of one block; start it with the engine option eager, which is the number of "
            "blocks of a window, such as eager=4"
        )
    elif asked.structured:
        reason = " with structured outputs: a grammar denoises one block at a time; give another policy"
    if reason is not None:
        raise asked.refusal("policy", reason)
    if asked.verifier.name != "none":
        raise asked.refusal(
            "verify",
            f" with policy={asked.row.name!r}: drafts fill one block after the other, and the policy fills several at "
            "a time; leave one of them out, or give verify='none'",
        )
