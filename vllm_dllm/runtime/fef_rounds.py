"""FeF-DLLM (paper 000, Algorithm 2) in the engine: which forward is a draft, which one verifies, and what is kept.

A round drafts j_1 .. j_b and commits j_1 at once, because the draft of j_1 is accepted for certain. The next forward
sees the block with j_1, which verifies j_2, and drafts that hold j_2 .. j_m each, which verify j_(m+1): branches as any
other verifier has them. So every forward, drafting or verifying, commits at least one token. The algorithm itself is
in ``vllm_dllm.decoding.fef``.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_dllm.decoding.fef import (
    Committed,
    branches_present,
    commit,
    draft_positions,
    fef_branches,
    num_remask,
    remask,
    token_probs,
)
from vllm_dllm.decoding.records import Rules
from vllm_dllm.decoding.step import Accepted, Origin, finish, step_of
from vllm_dllm.kernels.confidence import position_noise, token_noise
from vllm_dllm.observe.wires import pack
from vllm_dllm.runtime.drafted_rows import DraftedRows
from vllm_dllm.runtime.logits.step import PASS_ROUND
from vllm_dllm.runtime.parts import Advance, Part
from vllm_dllm.runtime.states import DenoiseStates

ACCEPTANCE_STREAM = 1
"""Stream of a position's noise that accepts its draft; 0 chooses positions."""
CORRECTION_ROUND = 1 << 48
"""Added to the round of draws that replace rejected drafts."""


@dataclass(frozen=True)
class _Round:
    """The next round's drafts of F requests, of which the first is committed."""

    tokens: Tensor  # [F, L] int64: the block with the first draft in it
    confidence: Tensor  # [F, L] float32
    source: Tensor  # [F] int64: the branch that drafted
    positions: Tensor  # [F, K] int64: drafted columns
    is_drafted: Tensor  # [F, K] bool: those of them that there are drafts for
    drawn: Tensor  # [F, K] int64: their drafts
    num_drafts: Tensor  # [F] int64: drafts to be forwarded next
    branches: Tensor  # [F, max_drafts, L] int64: what is to be forwarded
    pending: Tensor  # [F] int64: positions drafted and not yet verified, the committed first one included


class FefRounds:
    """What is kept of every request between drafting and verifying.

    ``Progress.pending`` says how much of it counts, so nothing is to be cleared when a request leaves its slot.
    """

    def __init__(self, states: DenoiseStates, model: Any, rules: Rules, *, first_position_is_fixed: bool):
        """Room for what the requests of ``states`` draft.

        Args:
            model: computes the logits of kept hidden states, and has the step's ``sampled_hidden_states``.
            first_position_is_fixed: logits of a block's first position are there in a refresh only.
        """
        self.states = states
        self.max_drafts = states.max_drafts
        self.rules = rules
        self.first_position_is_fixed = first_position_is_fixed
        # Positions that a round may draft: those of its drafts, the one committed at once, and one that is verified but
        # would leave no mask.
        self.max_window = min(rules.block_length, states.max_drafts + 2)
        self.index = rules.columns[: self.max_window]
        max_num_reqs, device = len(states.asked), states.device
        self.positions = torch.zeros(max_num_reqs, self.max_window, dtype=torch.int64, device=device)
        self.tokens = torch.zeros_like(self.positions)
        self.confidence = torch.zeros(max_num_reqs, rules.block_length, device=device)
        self.rows = DraftedRows(states, model, rules, self.max_window)

    def advance(self, part: Part) -> Advance:
        """Go on with the requests of a step that decode with FeF."""
        hidden_states = self.rows.hidden_states()
        return self.rows.in_parts(part, lambda some, processed: self._advance(some, hidden_states, processed))

    def _advance(self, part: Part, hidden_states: Tensor, processed: bool) -> Advance:
        window, rules, options = part.seen.window, self.rules, part.options
        generated, block, pending = window.generated, window.branches[:, 0], window.progress.pending
        positions = self.positions[options.slots]
        awaited = self.index < pending.unsqueeze(1)
        verified = self._verify(part, positions, awaited, processed)
        drafted = self._draft(part, verified, processed)
        self._keep(part, drafted, hidden_states)

        # Where each token came from: j_(i+1) from branch i, the new first one from the branch that drafts.
        source = torch.where(awaited, (self.index - 1).clamp(min=0), 0)
        came_from = torch.zeros_like(block).scatter(1, positions, source)
        came_from = _put_first(came_from, drafted.positions, drafted.is_drafted, drafted.source)

        # A pass ends where no mask is left. The least confident positions are masked again for the next.
        tokens = drafted.tokens
        whole = ~((tokens == rules.mask_id) & generated).any(dim=1)
        passes = window.progress.passes + whole
        finished = whole & (passes >= options.num_passes)
        # The logits of a fixed position are those of the refresh, which further passes do without.
        candidates = generated & (rules.columns > 0) if self.first_position_is_fixed else generated
        count = num_remask(generated, options.bounds["remask"]) * (whole & ~finished)
        written = (block == rules.mask_id) & generated & (tokens != rules.mask_id)
        # Drafts that fill the block may be accepted too, in a branch that was not forwarded.
        reached = torch.minimum(verified.num_accepted, window.present.sum(dim=1))
        branch = torch.where(pending > 0, reached - 1, 0).clamp(min=0)
        accepted = Accepted(
            tokens=remask(tokens, drafted.confidence, candidates, count, rules.mask_id),
            branch=branch,
            # Beside the one token of a step, as one position at a time would take.
            skipped=(written.sum(dim=1) - 1).clamp(min=0),
            reached=torch.arange(window.present.shape[1], device=branch.device) <= branch.unsqueeze(1),
            chosen=written & (came_from == branch.unsqueeze(1)),
            may_finish=finished,
            may_stop=passes + (~whole).long() >= options.num_passes,
        )
        committing, progress = window.commit_only, window.progress
        # As one position at a time would write them, from left to right.
        step = step_of(window, (written.cumsum(dim=1) - 1).clamp(min=0))
        accepted, origin = self._unless_commit_only(part, accepted, Origin(written, came_from, step))
        ended = finish(window, accepted, options, part.seen.room, rules)
        progress = replace(
            ended.progress,
            num_drafts=drafted.num_drafts.masked_fill(committing, 0),
            pending=torch.where(committing, progress.pending, drafted.pending),
            passes=torch.where(committing, progress.passes, torch.where(finished, 0, passes)),
        )
        # The scheduler counts drafts that were verified and accepted, not the steps that they stand for.
        observation = pack(
            window.denoises,
            window.present.sum(dim=1) - 1,
            accepted.branch,
            progress.num_drafts,
            accepted.branch,
            drafting=False,
        )
        ended = replace(ended, progress=progress)
        return Advance(accepted, ended, origin, drafted.branches.flatten(1), observation=observation)

    def _verify(self, part: Part, positions: Tensor, awaited: Tensor, processed: bool) -> Committed:
        """Accept what the round before drafted, and correct the first draft that is not accepted.

        Args:
            positions: [F, K] int64: columns that the round before drafted.
            awaited: [F, K] bool: those of them that wait to be verified.
        """
        window, slots, states = part.seen.window, part.options.slots, part.logits.reader.sampling_states
        block, start, mask_id = window.branches[:, 0], window.progress.block_start, self.rules.mask_id
        # X is the block as it was drafted for, j_1 not committed.
        x = _put_first(block, positions, awaited, torch.full_like(start, mask_id))
        rho = self.rows.kept(part, x, positions, processed)
        forwarded = torch.zeros_like(awaited)
        forwarded[:, : window.present.shape[1]] = window.present[:, : self.max_window]
        round_ = (x != mask_id).sum(dim=1) + window.progress.passes * PASS_ROUND
        seeds = states.seeds.gpu[slots]
        pi = self.rows.said(part, self.index[:-1].expand(len(slots), -1), positions[:, 1:], processed)
        return commit(
            x,
            self.confidence[slots],
            positions,
            awaited,
            self.tokens[slots],
            forwarded,
            rho,
            pi,
            position_noise(seeds.unsqueeze(1), start.unsqueeze(1) + positions, round_.unsqueeze(1), ACCEPTANCE_STREAM),
            lambda some, at: token_noise(
                seeds[some], start[some] + at, round_[some] + CORRECTION_ROUND, rho.logits.shape[1]
            ),
        )

    def _draft(self, part: Part, verified: Committed, processed: bool) -> _Round:
        """Draft again where the distributions of the block are known, and commit the first of the drafts."""
        window = part.seen.window
        is_verified = window.progress.pending > 0
        source = torch.where(is_verified, verified.num_accepted - 1, 0).clamp(min=0)
        known = ~is_verified | verified.forwarded
        masked = (verified.tokens == self.rules.mask_id) & window.generated
        positions, drafted = draft_positions(masked, part.options.window * known, max_window=self.max_window)
        drawn = part.seen.measured.of_branch(source.clamp(max=window.present.shape[1] - 1)).token.gather(1, positions)
        distributions = self.rows.said(part, source.unsqueeze(1), positions[:, :1], processed)
        confidence = token_probs(distributions, drawn[:, 0]).confidence
        branches = fef_branches(verified.tokens, positions, drafted, drawn)[:, 1 : 1 + self.max_drafts]
        num_drafted = drafted.sum(dim=1)
        return _Round(
            tokens=_put_first(verified.tokens, positions, drafted, drawn[:, 0]),
            confidence=_put_first(verified.confidence, positions, drafted, confidence),
            source=source,
            positions=positions,
            is_drafted=drafted,
            drawn=drawn,
            num_drafts=branches_present(masked, drafted)[:, 1:].sum(dim=1),
            branches=pad(branches, (0, 0, 0, self.max_drafts - branches.shape[1])),
            pending=torch.where(num_drafted > 1, num_drafted, 0),
        )

    def _keep(self, part: Part, drafted: _Round, hidden_states: Tensor) -> None:
        """Keep what the next forward needs to verify the drafts."""
        slots = part.options.slots
        self.positions[slots], self.tokens[slots] = drafted.positions, drafted.drawn
        self.confidence[slots] = drafted.confidence
        self.rows.keep(part, hidden_states, drafted.source.unsqueeze(1), drafted.positions)

    def _unless_commit_only(self, part: Part, accepted: Accepted, origin: Origin) -> tuple[Accepted, Origin]:
        """The same, but nothing new for requests whose forward only committed the block before.

        With ``commit_predicts`` such a forward predicts the first token of the block.
        """
        window, committing = part.seen.window, part.seen.window.commit_only
        by_row = committing.unsqueeze(1)
        first = window.first_only.unsqueeze(1) & (self.rules.columns == 0) & window.generated
        tokens = torch.where(first, part.seen.measured.token[:, 0], window.branches[:, 0])
        is_root = torch.arange(accepted.reached.shape[1], device=tokens.device) == 0
        assert accepted.may_stop is not None
        accepted = replace(
            accepted,
            tokens=torch.where(by_row, tokens, accepted.tokens),
            branch=accepted.branch.masked_fill(committing, 0),
            skipped=accepted.skipped.masked_fill(committing, 0),
            reached=torch.where(by_row, is_root, accepted.reached),
            chosen=torch.where(by_row, first, accepted.chosen),
            may_stop=accepted.may_stop | committing,
        )
        written = torch.where(by_row, first, origin.written)
        return accepted, replace(origin, written=written, branch=origin.branch.masked_fill(by_row, 0))


def _put_first(values: Tensor, positions: Tensor, is_there: Tensor, new: Tensor) -> Tensor:
    """``values`` [F, L] with ``new`` [F] at the first of ``positions`` [F, K], where ``is_there`` [F, K] says of it."""
    first = positions[:, :1]
    return values.scatter(1, first, torch.where(is_there[:, :1], new.unsqueeze(1), values.gather(1, first)))
