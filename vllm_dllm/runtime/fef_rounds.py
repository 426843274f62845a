"""FeF-DLLM (paper 000, Algorithm 2) in the engine: which forward is a draft, which one verifies, and what is kept.

A round drafts j_1 .. j_b and commits j_1 at once, because the draft of j_1 is accepted for certain. The next forward
sees the block with j_1, which verifies j_2, and drafts that hold j_2 .. j_m each, which verify j_(m+1): branches as any
other verifier has them. So every forward, drafting or verifying, commits at least one token. The algorithm itself is
in ``vllm_dllm.decoding.fef``.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.utils.torch_utils import async_tensor_h2d

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
from vllm_dllm.decoding.records import PerRequest, Rules
from vllm_dllm.decoding.step import Accepted, Origin, finish
from vllm_dllm.kernels.confidence import position_noise, token_noise
from vllm_dllm.runtime.logits.rows import PROCESSED_VALUES, LogitsReader
from vllm_dllm.runtime.logits.step import PASS_ROUND
from vllm_dllm.runtime.parts import Advance, Part
from vllm_dllm.runtime.policy_params import PolicyParamsBuilder
from vllm_dllm.runtime.states import DenoiseStates

DRAFT_VALUES = 128 << 20
"""Logits of drafts that are computed again at a time; in their own precision, so 256 MiB in bfloat16."""
ACCEPTANCE_STREAM = 1
"""Stream of a position's noise that accepts its draft; 0 chooses positions."""
CORRECTION_ROUND = 1 << 48
"""Added to the round of draws that replace rejected drafts."""


@dataclass(frozen=True)
class FefStep(PerRequest):
    """What a forward makes of F requests, blocks of L positions."""

    accepted: Accepted
    origin: Origin
    num_drafts: Tensor
    """[F] int64: drafts to be forwarded next."""
    drafts: Tensor
    """[F, max_drafts * L] int64."""
    pending: Tensor
    """[F] int64: positions drafted and not yet verified, the committed first one included."""
    passes: Tensor
    """[F] int64: passes that the block has had."""


@dataclass(frozen=True)
class _Verified:
    """The drafts of the round before, verified."""

    committed: Committed
    positions: Tensor
    """[F, K] int64: columns that had been drafted."""
    awaited: Tensor
    """[F, K] bool: those of them that waited to be verified."""


@dataclass(frozen=True)
class _Drafted:
    """The next round's drafts, of which the first is committed."""

    tokens: Tensor
    """[F, L] int64: the block with the first draft in it."""
    confidence: Tensor
    """[F, L] float32."""
    source: Tensor
    """[F] int64: the branch that drafted."""
    positions: Tensor
    """[F, K] int64: drafted columns."""
    drawn: Tensor
    """[F, K] int64: their drafts."""
    first: Tensor
    """[F, 1] int64: column of the first draft."""
    any: Tensor
    """[F, 1] bool: there is a first draft."""
    num_drafts: Tensor
    """[F] int64: drafts to be forwarded."""
    branches: Tensor
    """[F, K - 1, L] int64: what is to be forwarded."""
    pending: Tensor
    """[F] int64."""


class FefRounds:
    """What is kept of every request between drafting and verifying.

    ``Progress.pending`` says how much of it counts, so nothing is to be cleared when a request leaves its slot.
    """

    def __init__(
        self,
        reader: LogitsReader,
        params: PolicyParamsBuilder,
        states: DenoiseStates,
        model: Any,
        rules: Rules,
        *,
        first_position_is_fixed: bool,
    ):
        """Room for what the requests of ``states`` draft.

        Args:
            model: computes the logits of kept hidden states, and has the step's ``sampled_hidden_states``.
            first_position_is_fixed: logits of a block's first position are there in a refresh only.
        """
        self.reader = reader
        self.params = params
        self.max_drafts = states.max_drafts
        self.model = model
        self.rules = rules
        self.first_position_is_fixed = first_position_is_fixed
        # Positions that a round may draft: those of its drafts, the one committed at once, and one that is verified but
        # would leave no mask.
        self.max_window = min(rules.block_length, states.max_drafts + 2)
        self.index = rules.columns[: self.max_window]
        max_num_reqs, device = reader.req_states.max_num_reqs, reader.req_states.device
        self.positions = torch.zeros(max_num_reqs, self.max_window, dtype=torch.int64, device=device)
        self.tokens = torch.zeros_like(self.positions)
        self.confidence = torch.zeros(max_num_reqs, rules.block_length, device=device)
        # [max_num_reqs, K, hidden]; the distributions of the drafts are computed from them again to verify them.
        self.hidden: Tensor | None = None

    def advance(self, part: Part, room: Tensor) -> Advance:
        """Go on with the requests of a step that decode with FeF; each may have ``room`` [F] more tokens."""
        step = self._step(part)
        finished = finish(part.window, step.accepted, part.options, room, self.rules)
        progress = replace(finished.progress, num_drafts=step.num_drafts, pending=step.pending, passes=step.passes)
        return Advance(step.accepted, step.origin, finished, progress, (step.drafts,))

    def _step(self, part: Part) -> FefStep:
        # Computing the logits of drafts again replaces the model's.
        hidden_states = self.model.sampled_hidden_states
        if self.hidden is None:
            self.hidden = hidden_states.new_zeros(*self.positions.shape, hidden_states.shape[1])
        # The logits of the drafts of so many requests are computed at a time.
        processed_np = self.reader.needs_processing_np[part.options.slots_np]
        order_np = np.concatenate((np.flatnonzero(~processed_np), np.flatnonzero(processed_np)))
        num_plain = int((~processed_np).sum())
        per_request = 2 * self.max_window * part.logits.logits.shape[1]
        plain, processed = (max(1, values // per_request) for values in (DRAFT_VALUES, PROCESSED_VALUES))
        borders = [*range(0, num_plain, plain), *range(num_plain, len(order_np), processed)]
        if len(borders) == 1:
            return self._advance(part, hidden_states, bool(processed_np[0]))
        steps = [
            self._advance(part.select(order_np[begin:end], self.params), hidden_states, begin >= num_plain)
            for begin, end in zip(borders, [*borders[1:], len(order_np)], strict=True)
        ]
        return FefStep.cat(steps).select(async_tensor_h2d(np.argsort(order_np), device=part.requests.device))

    def _advance(self, part: Part, hidden_states: Tensor, processed: bool) -> FefStep:
        window, rules = part.window, self.rules
        block, pending = window.branches[:, 0], window.progress.pending
        generated = window.generated
        verified = self._verify(part, processed)
        drafted = self._draft(part, verified, generated, processed)
        self._keep(part, drafted, hidden_states)

        # Where each token came from: j_(i+1) from branch i, the new first one from the branch that drafts.
        source = torch.where(verified.awaited, (self.index - 1).clamp(min=0), 0)
        came_from = torch.zeros_like(block).scatter(1, verified.positions, source)
        came_from = came_from.scatter(
            1, drafted.first, torch.where(drafted.any, drafted.source.unsqueeze(1), came_from.gather(1, drafted.first))
        )

        # A pass ends where no mask is left. The least confident positions are masked again for the next.
        tokens, num_passes = drafted.tokens, part.options.num_passes
        whole = ~((tokens == rules.mask_id) & generated).any(dim=1)
        passes = window.progress.passes + whole
        last_pass = passes + (~whole).long() >= num_passes
        finished = whole & (passes >= num_passes)
        candidates = generated
        if self.first_position_is_fixed:
            # Its logits are those of the refresh, which further passes do without.
            candidates = generated & (rules.columns > 0)
        count = num_remask(generated, part.options.bounds["remask"]) * (whole & ~finished)
        written = (block == rules.mask_id) & generated & (tokens != rules.mask_id)
        # Drafts that fill the block may be accepted too, in a branch that was not forwarded.
        reached = torch.minimum(verified.committed.num_accepted, window.present.sum(dim=1))
        branch = torch.where(pending > 0, reached - 1, 0).clamp(min=0)
        drafts = pad(drafted.branches, (0, 0, 0, max(0, self.max_drafts - drafted.branches.shape[1])))
        return self._unless_commit_only(
            part,
            FefStep(
                accepted=Accepted(
                    tokens=remask(tokens, drafted.confidence, candidates, count, rules.mask_id),
                    branch=branch,
                    # Beside the one token of a step, as one position at a time would take.
                    skipped=(written.sum(dim=1) - 1).clamp(min=0),
                    reached=torch.arange(window.present.shape[1], device=branch.device) <= branch.unsqueeze(1),
                    chosen=written & (came_from == branch.unsqueeze(1)),
                    may_finish=finished,
                    may_stop=last_pass,
                ),
                origin=Origin(written, came_from),
                num_drafts=drafted.num_drafts,
                drafts=drafts[:, : self.max_drafts].flatten(1),
                pending=drafted.pending,
                passes=torch.where(finished, 0, passes),
            ),
        )

    def _verify(self, part: Part, processed: bool) -> _Verified:
        """Accept what the round before drafted, and correct the first draft that is not accepted."""
        window, slots = part.window, part.options.slots
        block, pending, start = window.branches[:, 0], window.progress.pending, window.progress.block_start
        positions = self.positions[slots]
        awaited = self.index < pending.unsqueeze(1)
        # X is the block as it was drafted for, j_1 not committed.
        first = positions[:, :1]
        mask_id = self.rules.mask_id
        x = block.scatter(1, first, torch.where(pending.unsqueeze(1) > 0, mask_id, block.gather(1, first)))
        assert self.hidden is not None
        rho_logits = self.model.compute_logits(self.hidden[slots].flatten(0, 1))
        rho_rows = torch.arange(len(rho_logits), device=slots.device).view(-1, self.max_window)
        if processed:
            windows = x.unsqueeze(1).expand(-1, self.max_window, -1)
            rho_logits, rho_rows = part.logits.process(rho_logits, part.options, window.progress, windows, positions)
        branch = self.index[:-1].expand(len(slots), -1)
        pi_logits, pi_rows = self._distributions(part, branch, positions[:, 1:], processed)
        forwarded = torch.zeros_like(awaited)
        forwarded[:, : window.present.shape[1]] = window.present[:, : self.max_window]
        round_ = (x != mask_id).sum(dim=1) + window.progress.passes * PASS_ROUND
        seeds = self.reader.sampling_states.seeds.gpu[slots]
        committed = commit(
            x,
            self.confidence[slots],
            positions,
            awaited,
            self.tokens[slots],
            forwarded,
            rho_logits,
            rho_rows,
            pi_logits,
            pi_rows,
            position_noise(seeds.unsqueeze(1), start.unsqueeze(1) + positions, round_.unsqueeze(1), ACCEPTANCE_STREAM),
            lambda some, at: token_noise(
                seeds[some], start[some] + at, round_[some] + CORRECTION_ROUND, rho_logits.shape[1]
            ),
            self.reader.sampling_states.temperature.gpu[slots],
            mask_id=mask_id,
            temperature_applied=processed,
        )
        return _Verified(committed, positions, awaited)

    def _draft(self, part: Part, verified: _Verified, generated: Tensor, processed: bool) -> _Drafted:
        """Draft again where the distributions of the block are known, and commit the first of the drafts."""
        committed, pending, slots = verified.committed, part.window.progress.pending, part.options.slots
        source = torch.where(pending > 0, committed.num_accepted - 1, 0).clamp(min=0)
        known = (pending == 0) | committed.forwarded
        masked = (committed.tokens == self.rules.mask_id) & generated
        positions, drafted = draft_positions(masked, part.options.fef_window * known, max_window=self.max_window)
        drawn = part.measured.of_branch(source.clamp(max=part.window.present.shape[1] - 1)).token.gather(1, positions)
        first, any_ = positions[:, :1], drafted[:, :1]
        logits, rows = self._distributions(part, source.unsqueeze(1), first, processed)
        probs = token_probs(
            logits,
            rows.flatten(),
            drawn[:, 0],
            self.reader.sampling_states.temperature.gpu[slots],
            mask_id=self.rules.mask_id,
            temperature_applied=processed,
        )
        tokens = committed.tokens.scatter(1, first, torch.where(any_, drawn[:, :1], committed.tokens.gather(1, first)))
        confidence = committed.confidence.scatter(
            1, first, torch.where(any_, probs.confidence.unsqueeze(1), committed.confidence.gather(1, first))
        )
        num_drafted = drafted.sum(dim=1)
        return _Drafted(
            tokens=tokens,
            confidence=confidence,
            source=source,
            positions=positions,
            drawn=drawn,
            first=first,
            any=any_,
            num_drafts=branches_present(masked, drafted)[:, 1:].sum(dim=1),
            branches=fef_branches(committed.tokens, positions, drafted, drawn)[:, 1:],
            pending=torch.where(num_drafted > 1, num_drafted, 0),
        )

    def _keep(self, part: Part, drafted: _Drafted, hidden_states: Tensor) -> None:
        """Keep what the next forward needs to verify the drafts."""
        assert self.hidden is not None
        slots = part.options.slots
        self.positions[slots], self.tokens[slots] = drafted.positions, drafted.drawn
        self.confidence[slots] = drafted.confidence
        rows = part.logits.rows_at(part.requests, drafted.source.unsqueeze(1), drafted.positions)
        self.hidden[slots] = hidden_states[rows.flatten()].view(len(slots), self.max_window, -1)

    def _distributions(self, part: Part, branch: Tensor, column: Tensor, processed: bool) -> tuple[Tensor, Tensor]:
        """Logits of the distributions at ``column`` in ``branch``, both [F, n], and their row numbers [F, n]."""
        logits, rows = part.logits.logits, part.logits.rows_at(part.requests, branch, column)
        if not processed:
            return logits, rows
        branches = part.window.branches
        seen = branch.clamp(max=branches.shape[1] - 1).unsqueeze(2).expand(-1, -1, branches.shape[2])
        windows = branches.gather(1, seen)
        return part.logits.process(logits[rows.flatten()], part.options, part.window.progress, windows, column)

    def _unless_commit_only(self, part: Part, step: FefStep) -> FefStep:
        """``step``, but nothing of it for requests whose forward only committed the block before.

        In shifted families such a forward predicts the first token of the block.
        """
        window = part.window
        committing, progress = window.commit_only, window.progress
        by_row = committing.unsqueeze(1)
        accepted, block = step.accepted, window.branches[:, 0]
        first = window.first_only.unsqueeze(1) & (self.rules.columns == 0)
        is_root = torch.arange(accepted.reached.shape[1], device=block.device) == 0
        tokens = torch.where(first, part.measured.token[:, 0], block)
        assert accepted.may_stop is not None
        return FefStep(
            accepted=Accepted(
                tokens=torch.where(by_row, tokens, accepted.tokens),
                branch=accepted.branch.masked_fill(committing, 0),
                skipped=accepted.skipped.masked_fill(committing, 0),
                reached=torch.where(by_row, is_root, accepted.reached),
                chosen=torch.where(by_row, first, accepted.chosen),
                may_finish=accepted.may_finish,
                may_stop=accepted.may_stop | committing,
            ),
            origin=Origin(torch.where(by_row, first, step.origin.written), step.origin.branch.masked_fill(by_row, 0)),
            num_drafts=step.num_drafts.masked_fill(committing, 0),
            drafts=step.drafts,
            pending=torch.where(committing, progress.pending, step.pending),
            passes=torch.where(committing, progress.passes, step.passes),
        )
