"""A denoising step of D requests: measure, choose, verify, finish, draft (FreeDave, arXiv 2510.00294, Algorithm 2).

Algorithm 1 of Spiffy (arXiv 2509.18085) and Algorithm 1 of PSD (arXiv 2605.15609) are the same loop body with other
drafts and another verifier; without drafts it is plain denoising. The stages hand each other frozen values::

    measured = the token and confidence of every position    runtime.logits.rows         line 18
    choice   = choose(window, measured, ...)                  what the policy unmasks     lines 19-27
    accepted = verify_drafts(window, choice, ...)             which branch to go on from  lines 28-37
    finished = finish(window, accepted, ...)                  whole block? stop token?    not in the paper
    order    = drafting_order(finished, ...)                  what drafts will fill       lines 6-13

FeF-DLLM and S2D2 verify in ways of their own (``vllm_dllm.runtime.fef_rounds``, ``s2d2_rounds``) and then finish like
everyone.

Dimensions: D requests; B branches of each, branch 0 the window as it stands and the others drafts of later states; W
positions of a window, which is one block of L positions, or w blocks (``eager``): drafts reach into later blocks, or
``MULTI_BLOCK`` denoises several at a time.
Nothing here waits for the device or knows vLLM.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dllm.decoding.drafters import ranks
from vllm_dllm.decoding.policies import (
    Policy,
    PolicyParams,
    edits,
    end_length,
    policy_scores,
    sub_block_candidates,
    unmask,
)
from vllm_dllm.decoding.records import Measured, PerRequest, Progress, RequestOptions, Rules, Window, move, of_branch
from vllm_dllm.decoding.schedules import multi_block_progress
from vllm_dllm.decoding.settling import leading_length, settled, settled_length
from vllm_dllm.decoding.verifiers import Verifier, sources, verify


@dataclass(frozen=True)
class Choice:
    """What one step of the policy makes of every branch; set by ``choose``."""

    masked: Tensor
    """[D, B, W] bool: masked positions before the step."""
    chosen: Tensor
    """[D, B, W] bool: positions that the step writes."""
    edited: Tensor | None
    """[D, B, W] bool: those of them that held a token; None: no request edits tokens."""
    targets: Tensor
    """[D, B, W] int64: the branches after the step."""


@dataclass(frozen=True)
class Accepted(PerRequest):
    """The state that D requests go on from; set by ``verify_drafts`` or by a round of FeF."""

    tokens: Tensor
    """[D, W] int64: the window after the step."""
    branch: Tensor
    """[D] int64: the accepted branch, whose logits the step goes by."""
    skipped: Tensor
    """[D] int64: denoising steps that accepted drafts stand for."""
    reached: Tensor
    """[D, B] bool: branches on the accepted path, branch 0 included."""
    chosen: Tensor
    """[D, W] bool: positions that the step wrote from the accepted branch's logits."""
    was_whole: Tensor | None = None
    """[D] bool: nothing was masked in the accepted branch; None: no request edits tokens."""
    edited: Tensor | None = None
    """[D, W] bool: tokens that the step replaced; None: no request edits tokens."""
    may_finish: Tensor | None = None
    """[D] bool: a window without masks is finished; None: everyone's is."""
    may_stop: Tensor | None = None
    """[D] bool: tokens of an unfinished block are final, so a stop token ends the request; None: everyone's are."""


@dataclass(frozen=True)
class Origin(PerRequest):
    """Where the tokens of a step come from, for log-probabilities and step maps."""

    written: Tensor
    """[D, W] bool: positions that got a token."""
    branch: Tensor
    """[D, W] int64: the branch whose logits each token comes from."""
    step: Tensor
    """[D, W] int64: the denoising step of its block that wrote each token, counted from 0; those that accepted drafts
    stand for count. -1: a forward that only committed the block before."""
    place: Tensor | None = None
    """[D, W] int64: the column of the logits row that each token comes from. LinearSpec reads rows of the block before
    the window: column c of that block counts as c - L. None: every token comes from its own column."""


@dataclass(frozen=True)
class Finished(PerRequest):
    """What a step ends with; set by ``finish``."""

    progress: Progress
    """Of the next step, without its drafts."""
    tokens: Tensor
    """[D, W] int64: the window of the next step."""
    before: Tensor
    """[D, L] int64: as in ``Window``, for the next step."""
    may_draft: Tensor
    """[D] bool: the window goes on and its logits are known."""
    shift: Tensor | None
    """[D] int64: columns that the window moved on; None where windows are single blocks, replaced whole."""
    emitted: Tensor
    """[D, W] int64: tokens to emit first."""
    num_emitted: Tensor
    """[D] int64: how many of them."""


@dataclass(frozen=True)
class DraftingOrder(PerRequest):
    """In what order drafts fill the masked positions of the next window; set by ``drafting_order``."""

    available: Tensor
    """[D, W] bool: masked positions that logits are known for."""
    rank: Tensor
    """[D, W] int64: the order of the policy, 0 first."""
    measured: Measured
    """[D, W]: by the accepted branch's logits."""


def choose(window: Window, measured: Measured, options: RequestOptions, params: PolicyParams, rules: Rules) -> Choice:
    """What one step of the policy makes of every branch.

    Args:
        params: of D * B rows.
    """
    generated = window.generated.unsqueeze(1)
    masked = (window.branches == rules.mask_id) & generated
    denoises = window.denoises.view(-1, 1, 1)
    candidates = (masked & denoises).flatten(0, 1)
    of_several = candidates
    if rules.group_length is not None:
        candidates = sub_block_candidates(candidates, rules.group_length)
    if Policy.MULTI_BLOCK in options.policies:
        begun, full = _progress_of_blocks(masked, generated, options, rules)
        is_multi_block = (options.policy == int(Policy.MULTI_BLOCK)).repeat_interleave(masked.shape[1]).unsqueeze(1)
        of_several = of_several & begun.repeat_interleave(rules.block_length, dim=1)
        candidates = torch.where(is_multi_block, of_several, candidates)
        params = params._replace(full=full)
    rows = measured.map(lambda values: values.flatten(0, 1))
    chosen = unmask(
        candidates,
        rows.confidence,
        rows.entropy,
        params,
        margin=rows.margin,
        threshold_inclusive=rules.threshold_inclusive,
        present=options.policies,
    ).view_as(masked)
    if rules.first_apart:
        first = (rules.columns == 0) & generated
        if window.predicted_outside is not None:
            first = window.predicted_outside.unsqueeze(1) & masked
        chosen = torch.where(window.first_only.view(-1, 1, 1), first, chosen)
    edited = None
    if options.edit_threshold is not None:
        edited = edits(
            window.branches.flatten(0, 1),
            rows.token,
            rows.confidence,
            (~masked & denoises & generated).flatten(0, 1),
            options.edit_threshold.repeat_interleave(masked.shape[1]),
        ).view_as(masked)
        chosen = chosen | edited
    return Choice(masked, chosen, edited, torch.where(chosen, measured.token, window.branches))


def _progress_of_blocks(
    masked: Tensor, generated: Tensor, options: RequestOptions, rules: Rules
) -> tuple[Tensor, Tensor]:
    """``multi_block_progress`` of ``masked`` [D, B, W] and ``generated`` [D, 1, W]: [D * B, w] bool each."""
    num_branches = masked.shape[1]
    return multi_block_progress(
        masked.flatten(0, 1),
        generated.expand_as(masked).flatten(0, 1),
        options.add_level.repeat_interleave(num_branches),
        options.full_level.repeat_interleave(num_branches),
        rules.block_length,
    )


def verify_drafts(window: Window, choice: Choice, options: RequestOptions, rules: Rules) -> Accepted:
    """Which branch each request goes on from."""
    if window.branches.shape[1] == 1:
        nothing = torch.zeros_like(window.progress.step)
        branch, skipped, reached = nothing, nothing, window.present
    else:
        branch, skipped, reached = verify(
            window.branches,
            choice.targets,
            window.present,
            window.levels,
            options.timed,
            options.verifier,
            mask_id=rules.mask_id,
            verifiers=options.verifiers - {Verifier.NONE, Verifier.FEF},
            most_branches=rules.most_branches,
        )
    was_whole = edited = None
    if choice.edited is not None:
        was_whole = ~of_branch(choice.masked, branch).any(dim=1)
        edited = of_branch(choice.edited, branch)
    return Accepted(
        tokens=of_branch(choice.targets, branch),
        branch=branch,
        skipped=skipped,
        reached=reached,
        chosen=of_branch(choice.chosen, branch),
        was_whole=was_whole,
        edited=edited,
    )


def origin_of(window: Window, choice: Choice, accepted: Accepted, options: RequestOptions, rules: Rules) -> Origin:
    """Where the tokens of ``accepted`` come from."""
    if window.branches.shape[1] == 1:
        nothing = torch.zeros_like(accepted.tokens)
        return Origin(accepted.chosen, nothing, step_of(window).expand_as(nothing))
    filled = choice.masked[:, 0] & ~of_branch(choice.masked, accepted.branch)
    branch = sources(window.branches, choice.targets, accepted.branch, accepted.reached, mask_id=rules.mask_id)
    if accepted.edited is not None:
        # It was no mask before it was edited, in the accepted branch.
        branch = torch.where(accepted.edited, accepted.branch.unsqueeze(1), branch)
    # The accepted path has one branch per step. PSD goes by the levels that the branches were drafted at.
    num_tokens = (window.branches != rules.mask_id).sum(dim=2)
    before = accepted.reached.unsqueeze(1) & (num_tokens.unsqueeze(1) < num_tokens.unsqueeze(2))
    of_psd = (options.verifier == int(Verifier.PSD)).unsqueeze(1)
    ahead = torch.where(of_psd, window.levels, before.sum(dim=2))
    return Origin(accepted.chosen | filled, branch, step_of(window, ahead.gather(1, branch)))


def step_of(window: Window, ahead: Tensor | None = None) -> Tensor:
    """[D, W] int64: as ``Origin`` has it, for tokens that steps ``ahead`` [D, W] of the window as it stands wrote.

    Without ``ahead``: of the window's own step, [D, 1].
    """
    if ahead is None:
        return torch.where(window.denoises, window.progress.step, -1).unsqueeze(1)
    return torch.where(window.denoises.unsqueeze(1), window.progress.step.unsqueeze(1) + ahead, -1)


def finish(window: Window, accepted: Accepted, options: RequestOptions, room: Tensor, rules: Rules) -> Finished:
    """Whether the block is finished, what there is to emit, and the state of the next step without its drafts.

    A finished block makes way for the next one, and is to be committed to the K/V cache.

    Args:
        room: [D] int64: tokens that the request may still have; the last block may reach beyond them.
    """
    progress, tokens, first = window.progress, accepted.tokens, window.progress.first
    still_masked = (tokens == rules.mask_id) & window.generated
    denoised = window.denoises
    post_steps, shift = progress.post_steps, None
    if rules.window_blocks > 1:
        shift, finished_length, post_steps = _window_lengths(window, accepted, still_masked, options, rules)
        done = torch.zeros_like(window.commit_only)
    else:
        done = denoised & ~still_masked.any(dim=1)
        if options.edit_threshold is not None:
            assert accepted.was_whole is not None and accepted.edited is not None
            was_edited = accepted.edited.any(dim=1)
            done, post_steps = settled(done, accepted.was_whole, was_edited, options, progress.post_steps)
        if accepted.may_finish is not None:
            done = done & accepted.may_finish
        finished_length = done * rules.block_length
    count = (finished_length - first).clamp(min=0)
    if rules.commit_emits:
        # The first token of a block is final as soon as it is known, a forward before the block's others.
        count = torch.where(window.commit_only, 1, count)
    ended = _ended_length(window, accepted, done, options, rules)
    # A commit that predicts emits the next block's first token alone. Where a token that the next block is given ends
    # the text (the end of a reasoning budget), the block's own steps emit that end.
    ended = ended.masked_fill(window.commit_only & (ended > 1), 0) if rules.commit_emits else ended * window.denoises
    count = torch.where(ended > 0, ended, count)
    emitted = tokens.gather(1, (first.unsqueeze(1) + rules.columns).clamp(max=len(rules.columns) - 1))

    going_on = ~done
    step, num_drafts, prefix_copied = progress.step + denoised, progress.num_drafts, progress.prefix_copied
    if options.verifiers - {Verifier.NONE}:
        step = step + accepted.skipped
        num_drafts = torch.zeros_like(step)
        prefix_copied = prefix_copied * (going_on if shift is None else shift == 0)
    if shift is None:
        moved = done * rules.block_length
        next_tokens = tokens.masked_fill(done.unsqueeze(1), rules.mask_id)
        next_first = first + (window.commit_only & window.first_only) if rules.first_apart else first
        next_first = next_first * going_on
        before = torch.where(done.unsqueeze(1), tokens, window.before)
    else:
        moved, before = shift, window.before
        next_tokens = move(tokens, shift, rules.mask_id)
        next_first = torch.maximum(first, finished_length) - shift
    return Finished(
        progress=Progress(
            block_start=progress.block_start + moved,
            first=next_first,
            step=step * going_on,
            post_steps=post_steps if options.edit_threshold is None else post_steps * going_on,
            commit=done,
            num_drafts=num_drafts,
            prefix_copied=prefix_copied,
            pending=progress.pending,
            passes=progress.passes,
            # State of the current block, reset where the block is finished. A compiled step multiplies for free, but
            # copies a field that it leaves as it is in a kernel of its own.
            span_start=progress.span_start * going_on,
            switch=progress.switch * going_on,
            given=progress.given * going_on,
            num_given=progress.num_given * going_on,
        ),
        tokens=next_tokens,
        before=before,
        may_draft=going_on & denoised,
        shift=shift,
        emitted=emitted,
        num_emitted=torch.minimum(count, room),
    )


def _window_lengths(
    window: Window, accepted: Accepted, still_masked: Tensor, options: RequestOptions, rules: Rules
) -> tuple[Tensor, Tensor, Tensor]:
    """Of windows of several blocks: columns that they move on, finished positions, post-edit steps; [D] int64 each.

    Args:
        still_masked: [D, W] bool: what is masked after the step.
    """
    # The K/V of leading blocks is final once a forward has seen them whole, as part of the window as it stood, and none
    # of their tokens was edited.
    seen_masked = (window.branches[:, 0] == rules.mask_id) & window.generated
    unsettled = seen_masked if accepted.edited is None else seen_masked | accepted.edited
    shift, finished_length = leading_length(unsettled, rules), leading_length(still_masked, rules)
    post_steps = window.progress.post_steps
    if options.edit_threshold is not None:
        return shift, *settled_length(finished_length, shift, seen_masked, options, post_steps, rules)
    return shift, finished_length, post_steps


def _ended_length(window: Window, accepted: Accepted, done: Tensor, options: RequestOptions, rules: Rules) -> Tensor:
    """[D] int64: tokens through the first stop token or the last that may be, where that ends the request, else 0."""
    progress, tokens = window.progress, accepted.tokens
    is_end = rules.columns == (options.last_position - progress.block_start).unsqueeze(1)
    if options.stop_token_ids is not None:
        is_end = is_end | (tokens.unsqueeze(2) == options.stop_token_ids.unsqueeze(1)).any(dim=2)
    ended = end_length(tokens, rules.mask_id, is_end, progress.first)
    if options.edit_threshold is not None:
        # A token that may still be edited ends nothing.
        ended = ended.masked_fill((options.edit_threshold != torch.inf) & ~done, 0)
    if accepted.may_stop is not None:
        ended = ended * accepted.may_stop
    return ended


def drafting_order(
    finished: Finished,
    accepted: Accepted,
    measured: Measured,
    options: RequestOptions,
    params: PolicyParams,
    rules: Rules,
) -> DraftingOrder:
    """The order that drafts fill the next window in: the policy's own, by the accepted branch's logits.

    Args:
        measured: [D, B, W], of all branches.
        params: of the D next windows.
    """
    first = finished.progress.first.unsqueeze(1)
    available = (finished.tokens == rules.mask_id) & (rules.columns >= first) & finished.may_draft.unsqueeze(1)
    there = measured.of_branch(accepted.branch)
    if finished.shift is not None:
        # No logits tell of the block that moved into the window.
        available = available & (rules.columns < (len(rules.columns) - finished.shift).unsqueeze(1))
        there = there.move(finished.shift)
    scores = policy_scores(
        available, there.confidence, there.entropy, params, margin=there.margin, present=options.policies
    )
    return DraftingOrder(available, ranks(scores, rules.group_length), there)
