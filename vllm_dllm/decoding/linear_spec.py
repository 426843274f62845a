"""LinearSpec (Nemotron-Labs-Diffusion): drafts by diffusion, verified by the same model as an autoregressive one.

A round of a request has two kinds of forwards over the same L positions, the first of which holds the *seed*, the last
token of the text, whose K/V is not in the cache yet::

    [seed, mask, mask, ...]    denoising forwards, which see the block whole, until no mask is left
    [seed, d_1, ..., d_(L-1)]  the verifying forward, causal: row i says what the model writes behind its token i
    accept d_1 ... d_k         the longest run of drafts that the model writes itself, and one token more
    seed = that token          the next round begins with it, k + 1 positions further

The verifying forward is the one that commits a block, so its K/V stays. The next round overwrites the K/V of what was
not accepted.

At temperatures above 0 a token is drawn with noise that belongs to the request's seed and the token's position. A draft
is drawn with that noise too, from its own distribution, and accepted if the verifying forward draws it. So every token
is a draw from the autoregressive distribution, whatever the drafts were, and its noise is its own: the text is a sample
of the autoregressive model. Two distributions at a total variation distance of ``d`` draw the same token from the same
noise in at least ``(1 - d) / (1 + d)`` of the cases. NVIDIA's published code compares draws with noises of their own.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_dllm.decoding.records import Measured, PerRequest, Rules, Window
from vllm_dllm.decoding.step import Accepted, Choice, Finished, Origin


@dataclass(frozen=True)
class Speculated(PerRequest):
    """What a forward of LinearSpec leads to."""

    accepted: Accepted
    """``tokens`` are those that the forward emits first."""
    finished: Finished
    origin: Origin
    verified: Tensor
    """[D] int64: drafts that the forward verified."""


def place_draws(positions: Tensor, rounds: Tensor, verifies: Tensor, speculates: Tensor) -> tuple[Tensor, Tensor]:
    """Positions and rounds of noise of N runs of L logits rows, where some of the runs are of LinearSpec's requests.

    Args:
        positions: [N, L] int64: those of the window, and ``rounds`` [N] those of other requests.
        verifies: [N] bool: runs of forwards that verify; column 0 predicts the first position behind the block that is
            verified, and column j position j of that block.
        speculates: [N] bool: runs of LinearSpec's requests.

    Returns:
        [N, L] int64 and [N] int64. A position has one round: a draft is drawn as the token in its place will be.
    """
    length = positions.shape[1]
    within = (verifies & speculates).unsqueeze(1) & (torch.arange(length, device=positions.device) > 0)
    return torch.where(within, positions - length, positions), rounds.masked_fill(speculates, 0)


def speculate(
    window: Window, measured: Measured, choice: Choice, room: Tensor, rules: Rules, forced: Tensor | None = None
) -> Speculated:
    """Go on from a forward that drafted, or from one that verified (``window.commit_only``).

    Args:
        measured: [D, 1, L]; where a forward verified, column 0 tells of the position behind the block.
        choice: what the policy makes of the drafted blocks.
        room: [D] int64: tokens that the request may still have.
        forced: [D, L] int64: what must follow each token of the verified block, whatever the model says; negative
            where nothing must (``decoding.thinking``).
    """
    progress, columns, length = window.progress, rules.columns, rules.block_length
    verifies = window.commit_only
    by_row = verifies.unsqueeze(1)
    drafted = choice.targets[:, 0]
    is_whole = ~verifies & ~(drafted == rules.mask_id).any(dim=1)
    # What the model writes behind each token of the block.
    follows = measured.token[:, 0].roll(-1, dims=1)
    if forced is not None:
        follows = torch.where(forced >= 0, forced, follows)
    agreed = (follows[:, :-1] == window.before[:, 1:]).long().cumprod(dim=1).sum(dim=1) * verifies
    seed = follows.gather(1, agreed.unsqueeze(1))
    emitted = torch.where(by_row, follows, drafted)
    # The seed of the prompt is emitted with the first draft of all.
    count = torch.where(verifies, agreed + 1, (progress.first == 0).long())
    going_on = (~verifies & ~is_whole).unsqueeze(1)
    restart = torch.where(by_row & (columns == 0), seed, rules.mask_id)
    nothing = torch.zeros_like(agreed)
    finished = Finished(
        progress=replace(
            progress,
            block_start=progress.block_start + torch.where(verifies, agreed + 1 - length, is_whole * length),
            # Column 0 holds a token that was emitted.
            first=(~is_whole).long(),
            step=(progress.step + 1) * going_on.squeeze(1),
            commit=is_whole,
            num_drafts=nothing,
            span_start=nothing,
            switch=nothing,
            given=nothing,
            num_given=nothing,
        ),
        tokens=torch.where(going_on, drafted, restart),
        before=torch.where(is_whole.unsqueeze(1), drafted, window.before),
        may_draft=torch.zeros_like(verifies),
        shift=None,
        emitted=emitted,
        num_emitted=torch.minimum(count, room),
    )
    accepted = Accepted(
        tokens=emitted,
        branch=nothing,
        skipped=agreed,
        reached=window.present,
        chosen=choice.chosen[:, 0] & ~by_row,
    )
    # Emitted token e comes from column e + 1, the last one of a block that was accepted whole from column 0.
    place = (columns + 1 - length).expand_as(emitted)
    origin = Origin(
        written=by_row & (columns < count.unsqueeze(1)),
        branch=torch.zeros_like(emitted),
        step=torch.zeros_like(emitted),
        place=place,
    )
    return Speculated(accepted, finished, origin, verifies * (length - 1))
