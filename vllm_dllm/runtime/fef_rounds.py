"""FeF-DLLM (arXiv 2605.14305, Algorithm 2) in the engine: which forward drafts, which one verifies, and what is kept.

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
    places,
    remask,
    spread,
)
from vllm_dllm.decoding.records import PerRequest, Rules
from vllm_dllm.decoding.step import Accepted, Origin, finish, step_of
from vllm_dllm.observe.wires import pack
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.drafted_rows import Asked, DraftedRows, rows_of
from vllm_dllm.runtime.parts import Advance, Forward, Part, Seen, see
from vllm_dllm.runtime.states import DenoiseStates


@dataclass(frozen=True)
class _Asked(PerRequest):
    """What F requests drafted before, and what the forward is asked about that."""

    behind: Asked  # the drafts from the second on; in their block the first draft is not committed
    confidence: Tensor  # [F, L] float32: of what was committed before, the first draft included
    positions: Tensor  # [F, K] int64: drafted columns
    awaited: Tensor  # [F, K] bool: those of them that wait to be verified
    tokens: Tensor  # [F, K] int64: drafts
    forwarded: Tensor  # [F, K] bool: branches that the forward computed
    pending: Tensor  # [F] int64: as in ``Progress``
    generated: Tensor  # [F, L] bool: as in ``Window``


@dataclass(frozen=True)
class _Round(PerRequest):
    """The next round's drafts of F requests, of which the first is committed."""

    source: Tensor  # [F] int64: the branch that drafted
    positions: Tensor  # [F, K] int64: drafted columns
    is_drafted: Tensor  # [F, K] bool: those of them that there are drafts for
    drawn: Tensor  # [F, K] int64: their drafts
    rows: Tensor  # [F, K] int64: the logits rows that say of them
    num_drafts: Tensor  # [F] int64: drafts to be forwarded next
    branches: Tensor  # [F, max_drafts, L] int64: what is to be forwarded
    pending: Tensor  # [F] int64: positions drafted and not yet verified, the committed first one included


class FefRounds:
    """What is kept of every request between drafting and verifying.

    ``Progress.pending`` says how much of it counts, so nothing is to be cleared when a request leaves its slot.
    """

    def __init__(
        self, states: DenoiseStates, model: Any, rules: Rules, stages: Stages, *, first_position_is_fixed: bool
    ):
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
        # The first draft of a round is not verified.
        self.rows = DraftedRows(states, model, rules, self.max_window - 1, stages)
        self._commit_stage = stages.stage(commit)
        self._ask_stage, self._draft_stage = stages.stage(self._ask), stages.stage(self._draft)
        self._close_stage = stages.stage(self._close)

    def advance(self, part: Part) -> Advance:
        """Go on with the requests of a step that decode with FeF."""
        hidden_states = self.rows.hidden_states()
        return self.rows.in_parts(part, lambda some, processed: self._advance(some, hidden_states, processed))

    def _advance(self, part: Part, hidden_states: Tensor, processed: bool) -> Advance:
        forward = part.forward
        asked = self._ask_stage(forward, part.logits.reader.sampling_states.seeds.gpu)
        verified = self._verify(part, asked, processed)
        drafted = self._draft_stage(forward, asked, verified)
        confidence = self._confidence(part, drafted, processed)
        return self._close_stage(forward, asked, verified, drafted, confidence, hidden_states)

    def _confidence(self, part: Part, drafted: _Round, processed: bool) -> Tensor:
        """[F, 1] float32: of the first drafts; 0 where no request has a second pass, which alone goes by it."""
        first = drafted.drawn[:, :1]
        if (part.options.asked["num_passes"] == 1).all():
            return torch.zeros_like(first, dtype=torch.float32)
        rows = drafted.source.unsqueeze(1), drafted.positions[:, :1], drafted.rows[:, :1]
        return self.rows.sampler.reader.token_probs(self.rows.said(part, *rows, processed), first).confidence

    def _is_first(self, positions: Tensor, present: Tensor) -> Tensor:
        """[F, L] bool: the first of ``positions`` [F, K], where it is ``present`` [F, K]."""
        return (self.rules.columns == positions[:, :1]) & present[:, :1]

    def _ask(self, forward: Forward, seeds: Tensor) -> _Asked:
        """What the round goes by; ``seeds``: [slots] int64."""
        window, slots = see(forward, self.states.unpack, self.rules).window, forward.options.slots
        pending, positions, tokens = window.progress.pending, self.positions[slots], self.tokens[slots]
        awaited = self.index < pending.unsqueeze(1)
        # X is the block as it was drafted for, j_1 not committed.
        x = window.branches[:, 0].masked_fill(self._is_first(positions, awaited), self.rules.mask_id)
        branch = self.index[:-1].expand(len(slots), -1)
        behind = positions[:, 1:], awaited[:, 1:], tokens[:, 1:]
        return _Asked(
            behind=self.rows.ask(forward, seeds, window.progress, x, *behind, branch),
            confidence=self.confidence[slots],
            positions=positions,
            awaited=awaited,
            tokens=tokens,
            forwarded=pad(window.present, (0, self.max_window))[:, : self.max_window],
            pending=pending,
            generated=window.generated,
        ).dense()

    def _close(
        self,
        forward: Forward,
        asked: _Asked,
        verified: Committed,
        drafted: _Round,
        confidence: Tensor,
        hidden_states: Tensor,
    ) -> Advance:
        """What the round makes of the requests; keeps what the next forward needs to verify the drafts.

        Args:
            confidence: [F, 1] float32: of the first drafts.
        """
        rules, options = self.rules, forward.options
        seen = see(forward, self.states.unpack, rules)
        window = seen.window
        generated, block, pending = window.generated, window.branches[:, 0], window.progress.pending
        is_new = self._is_first(drafted.positions, drafted.is_drafted)
        tokens = torch.where(is_new, drafted.drawn[:, :1], verified.tokens)
        confidences = torch.where(is_new, confidence, verified.confidence)
        slots = options.slots
        self.positions.index_copy_(0, slots, drafted.positions)
        self.tokens.index_copy_(0, slots, drafted.drawn)
        self.confidence.index_copy_(0, slots, confidences)
        self.rows.keep(slots, hidden_states, drafted.rows[:, 1:])
        # Where each token came from: j_(i+1) from branch i, the new first one from the branch that drafts.
        source = (self.index - 1).clamp(min=0).expand_as(asked.positions)
        came_from = spread(source, places(asked.positions, asked.awaited, rules.block_length))
        came_from = torch.where(is_new, drafted.source.unsqueeze(1), came_from)

        # A pass ends where no mask is left. The least confident positions are masked again for the next.
        whole = ~((tokens == rules.mask_id) & generated).any(dim=1)
        passes = window.progress.passes + whole
        finished = whole & (passes >= options.num_passes)
        # The logits of a fixed position are those of the refresh, which further passes do without.
        candidates = generated & (rules.columns > 0) if self.first_position_is_fixed else generated
        count = num_remask(rules.written_by_denoising(generated), options.bounds["remask"]) * (whole & ~finished)
        written = (block == rules.mask_id) & generated & (tokens != rules.mask_id)
        # Drafts that fill the block may be accepted too, in a branch that was not forwarded.
        reached = torch.minimum(verified.num_accepted, window.present.sum(dim=1))
        branch = torch.where(pending > 0, reached - 1, 0).clamp(min=0)
        accepted = Accepted(
            tokens=remask(tokens, confidences, candidates, count, rules.mask_id),
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
        accepted, origin = self._unless_commit_only(seen, accepted, Origin(written, came_from, step))
        ended = finish(window, accepted, options, seen.room, rules)
        progress = replace(
            ended.progress,
            num_drafts=drafted.num_drafts.masked_fill(committing, 0),
            pending=torch.where(committing, progress.pending, drafted.pending),
            passes=torch.where(committing, progress.passes, torch.where(finished, 0, passes)),
        )
        # The scheduler counts drafts that were verified and accepted, not the steps that they stand for.
        num_drafts, branch = window.present.sum(dim=1) - 1, accepted.branch
        observation = pack(window.denoises, num_drafts, branch, progress.num_drafts, branch)
        ended = replace(ended, progress=progress)
        advance = Advance(accepted, ended, origin, drafted.branches.flatten(1), observation=observation)
        return advance.dense()

    def _verify(self, part: Part, asked: _Asked, processed: bool) -> Committed:
        """Accept what the round before drafted, and replace the first draft that is not accepted."""
        verified = self.rows.verify(part, asked.behind, processed) if self.max_window > 1 else None
        block = asked.behind.block
        return self._commit_stage(
            block, asked.confidence, asked.positions, asked.awaited, asked.tokens, asked.forwarded, verified
        )

    def _draft(self, forward: Forward, asked: _Asked, verified: Committed) -> _Round:
        """Draft again where the distributions of the block are known."""
        is_verified = asked.pending > 0
        source = torch.where(is_verified, verified.num_accepted - 1, 0).clamp(min=0)
        known = ~is_verified | verified.forwarded
        masked = (verified.tokens == self.rules.mask_id) & asked.generated
        positions, drafted = draft_positions(masked, forward.options.window * known, max_window=self.max_window)
        rows = rows_of(forward.sight, source.unsqueeze(1), positions, self.rules)
        drawn = forward.stats.token[rows]
        branches = fef_branches(verified.tokens, positions, drafted, drawn)[:, 1 : 1 + self.max_drafts]
        num_drafted = drafted.sum(dim=1)
        return _Round(
            source=source,
            positions=positions,
            is_drafted=drafted,
            drawn=drawn,
            rows=rows,
            num_drafts=branches_present(masked, drafted)[:, 1:].sum(dim=1),
            branches=pad(branches, (0, 0, 0, self.max_drafts - branches.shape[1])),
            pending=torch.where(num_drafted > 1, num_drafted, 0),
        ).dense()

    def _unless_commit_only(self, seen: Seen, accepted: Accepted, origin: Origin) -> tuple[Accepted, Origin]:
        """The same, but nothing new for requests whose forward only committed the block before.

        With ``commit_predicts`` such a forward predicts the first token of the block.
        """
        window, committing = seen.window, seen.window.commit_only
        by_row = committing.unsqueeze(1)
        first = window.first_only.unsqueeze(1) & (self.rules.columns == 0) & window.generated
        tokens = torch.where(first, seen.measured.token[:, 0], window.branches[:, 0])
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
