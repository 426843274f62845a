"""S2D2 in the engine (``vllm_dllm.decoding.s2d2``): which forward drafts, which one verifies, and what is kept.

A request whose drafts wait to be verified has the block with all of them in its window. The next forward sees that
block, and beside it, as drafts of other verifiers, branches that only S2D2 has under a causal mask. If all drafts are
accepted, the logits of the window are those of the next drafts, and the same forward drafts again.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_dllm.decoding.policies import sub_block_candidates
from vllm_dllm.decoding.records import Window
from vllm_dllm.decoding.s2d2 import (
    Beliefs,
    Routing,
    Span,
    accept_greedily,
    acceptances,
    expected_accepted,
    filled,
    first_span,
    score,
    verifies,
    verify,
    verifying_branches,
)
from vllm_dllm.decoding.step import Accepted, Choice, Finished, Origin, choose, finish, step_of
from vllm_dllm.kernels.confidence import position_noise, token_noise
from vllm_dllm.observe.wires import pack
from vllm_dllm.runtime.drafted_rows import DraftedRows, rows_of
from vllm_dllm.runtime.fef_rounds import ACCEPTANCE_STREAM, CORRECTION_ROUND
from vllm_dllm.runtime.parts import Advance, Part
from vllm_dllm.runtime.policy_params import PolicyParamsBuilder
from vllm_dllm.runtime.states import ROUTING


class _Verified(NamedTuple):
    """F requests after the verification of what they drafted before."""

    span: Span
    num_accepted: Tensor  # [F] int64
    tokens: Tensor  # [F, L] int64: the block
    written: Tensor  # [F, L] bool: positions that the verification wrote
    known: Tensor  # [F] bool: the window's logits are those of this block


class S2D2Rounds:
    """Verifies drafts, and drafts or unmasks by the policy where the block's logits are known.

    ``Progress.pending`` says how many drafts count, so nothing is to be cleared when a request leaves its slot.
    """

    def __init__(self, params: PolicyParamsBuilder, model: Any, *, shifted: bool):
        """For the requests that ``params`` knows.

        Args:
            model: as for ``DraftedRows``.
            shifted: as in ``FamilyTraits``.
        """
        self.params, self.states, self.rules = params, params.states, params.rules
        self.shifted = shifted
        most = self.rules.block_length if shifted else min(self.states.max_drafts, self.rules.block_length)
        self.index = self.rules.columns[:most]
        self.rows = DraftedRows(self.states, model, self.rules, most)

    def advance(self, part: Part) -> Advance:
        """Take the requests to their next state."""
        if not part.logits.reader.samples(part.options.slots_np).any():
            return self._advance(part, self._verify_greedily(part))
        hidden_states = self.rows.hidden_states()

        def run(some: Part, processed: bool) -> Advance:
            step = self._advance(some, self._verify_draws(some, processed))
            start = step.finished.progress.span_start.unsqueeze(1)
            column = (start + self.index).clamp(max=self.rules.block_length - 1)
            rows = rows_of(some.sight, torch.zeros_like(column), column, self.rules)
            self.rows.keep(some.options.slots, hidden_states, rows)
            return step

        return self.rows.in_parts(part, run)

    def _advance(self, part: Part, verified: _Verified) -> Advance:
        window, options, rules, columns = part.seen.window, part.options, self.rules, self.rules.columns
        token = part.seen.measured.token[:, 0]
        choice = self._choose(part, verified)
        masked = choice.masked[:, 0] & window.denoises.unsqueeze(1)
        # A block without masks that nobody edits is finished, and this forward did not look at it again.
        looks = verified.known & masked.any(dim=1)
        if options.edit_threshold is not None:
            looks = looks | (verified.known & (options.edit_threshold != torch.inf) & (options.max_post_steps > 0))
        span, to_verify, switch = self._route(part, masked, looks)

        edited = torch.zeros_like(masked) if choice.edited is None else choice.edited[:, 0]
        chosen = torch.where(to_verify.unsqueeze(1), edited, choice.chosen[:, 0])
        chosen = chosen & (looks | window.commit_only).unsqueeze(1)
        tokens = torch.where(chosen, token, verified.tokens)
        # Steps that this forward ends: the one that it verifies, and one of the policy.
        steps = (verified.span.length > 0).long() + (looks & ~to_verify)
        nothing = torch.zeros_like(verified.num_accepted)
        accepted = Accepted(
            tokens=tokens,
            branch=nothing,
            skipped=(steps - 1) * window.denoises,
            reached=window.present & (torch.arange(window.present.shape[1], device=token.device) == 0),
            chosen=chosen,
            was_whole=None if choice.edited is None else looks & ~masked.any(dim=1),
            edited=None if choice.edited is None else edited & looks.unsqueeze(1),
        )
        finished = self._wait(window, finish(window, accepted, options, part.seen.room, rules), span, token, switch)
        place = verified.span.place(columns)
        branch = torch.where(verified.written & ~chosen, torch.ones_like(place) if self.shifted else place + 1, 0)
        ahead = torch.where(chosen, (verified.span.length > 0).unsqueeze(1), False).long()
        origin = Origin(chosen | verified.written, branch, step_of(window, ahead))
        drafts = verifying_branches(
            finished.tokens, span, rules.mask_id, shifted=self.shifted, most=self.states.max_drafts
        )
        # A forward that verifies without a policy's step denoises too.
        observation = pack(
            window.denoises,
            verified.span.length,
            verified.num_accepted,
            finished.progress.num_drafts,
            nothing,
            drafting=False,
        )
        return Advance(accepted, finished, origin, drafts.flatten(1), observation=observation)

    def _choose(self, part: Part, verified: _Verified) -> Choice:
        """What the policy makes of the block."""
        window, options = part.seen.window, part.options
        block = replace(
            window,
            branches=verified.tokens.unsqueeze(1),
            present=window.present[:, :1],
            levels=window.levels[:, :1],
        )
        measured = part.seen.measured.map(lambda values: values[:, :1])
        steps = (window.progress.step + (verified.span.length > 0)).unsqueeze(1)
        params = self.params.params_of(options, window.progress, block.branches, steps)
        return choose(block, measured, options, params, self.rules)

    def _route(self, part: Part, masked: Tensor, looks: Tensor) -> tuple[Span, Tensor, Tensor]:
        """The span to verify, of length 0 where none is; who verifies, [F] bool; the switch of hysteresis, [F] bool.

        Args:
            masked: [F, L] bool: masked positions of blocks that a forward denoised.
            looks: [F] bool: the block's logits are known.
        """
        options, measured, progress = part.options, part.seen.measured, part.seen.window.progress
        routing = Routing(**{name: options.bounds[name] for name in ROUTING})
        routing = routing._replace(per_token=routing.per_token > 0)
        candidates = masked & looks.unsqueeze(1)
        if self.rules.group_length is not None:
            candidates = sub_block_candidates(candidates, self.rules.group_length)
        run = first_span(candidates)
        span = Span(run.start, torch.minimum(run.length, options.window))
        scores = torch.zeros_like(routing.score_on)
        if options.scores_spans:
            confidence, vocab = measured.confidence[:, 0], part.logits.logits.shape[1]
            assert measured.entropy is not None and measured.margin is not None
            beliefs = Beliefs(confidence, measured.entropy[:, 0] / math.log(vocab), measured.margin[:, 0])
            confident = candidates & (confidence > options.bounds["threshold"].unsqueeze(1))
            scores = score(expected_accepted(acceptances(beliefs, routing), span), confident.sum(dim=1), routing)
        # A look at a block without masks turns the switch off.
        scores = torch.where(run.length > 0, scores, -torch.inf)
        was_on = (progress.switch & 1).bool()
        to_verify, is_on = verifies(run.length, scores, was_on, routing)
        return Span(span.start, span.length * to_verify), to_verify, torch.where(looks, is_on, was_on)

    def _wait(self, window: Window, finished: Finished, span: Span, token: Tensor, is_on: Tensor) -> Finished:
        """The next state, in which the drafts of the ``span`` wait to be verified."""
        progress, was = finished.progress, window.progress.switch
        # What it was when the block began, and the block before.
        before = torch.where(progress.commit.bool(), (was & 2) | is_on, (was >> 1) & 3)
        count = span.length if not self.shifted else (span.length > 0).long()
        return replace(
            finished,
            tokens=filled(finished.tokens, span, token),
            progress=replace(
                progress,
                pending=span.length,
                span_start=span.start,
                num_drafts=count,
                switch=before * 2 + is_on,
            ),
        )

    # Verification of what the forward before drafted.

    def _verified(self, part: Part, span: Span, count: Tensor, replacement: Tensor) -> _Verified:
        window, block = part.seen.window, part.seen.window.branches[:, 0]
        place, holds = span.place(self.rules.columns), span.holds(self.rules.columns)
        accepted, corrected = holds & (place < count.unsqueeze(1)), holds & (place == count.unsqueeze(1))
        tokens = torch.where(holds, self.rules.mask_id, block)
        tokens = torch.where(accepted, block, torch.where(corrected, replacement.unsqueeze(1), tokens))
        return _Verified(span, count, tokens, accepted | corrected, (count == span.length) & window.denoises)

    def _branch_of(self, place: Tensor) -> Tensor:
        """The branch that says of a ``place`` in the span."""
        return torch.ones_like(place) if self.shifted else place + 1

    def _verify_greedily(self, part: Part) -> _Verified:
        window, token = part.seen.window, part.seen.measured.token
        span = _span_of(window)
        branch = self._branch_of(span.place(self.rules.columns)).clamp(0, token.shape[1] - 1)
        said = token.gather(1, branch.unsqueeze(1)).squeeze(1)
        count = accept_greedily(window.branches[:, 0], said, span)
        at = (span.start + count).clamp(max=said.shape[1] - 1).unsqueeze(1)
        return self._verified(part, span, count, said.gather(1, at).squeeze(1))

    def _verify_draws(self, part: Part, processed: bool) -> _Verified:
        window, slots = part.seen.window, part.options.slots
        span, block = _span_of(window), window.branches[:, 0]
        column = (span.start.unsqueeze(1) + self.index).clamp(max=self.rules.block_length - 1)
        # The block as it was when the drafts were drawn.
        before = torch.where(span.holds(self.rules.columns), self.rules.mask_id, block)
        branch = self._branch_of(self.index.expand_as(column))
        q = self.rows.said(part, branch, column, rows_of(part.sight, branch, column, self.rules), processed)
        p = self.rows.kept(part, before, column, processed)
        seeds = part.logits.reader.sampling_states.seeds.gpu[slots]
        positions = window.progress.block_start.unsqueeze(1) + column
        round_ = (before != self.rules.mask_id).sum(dim=1)
        vocab = q.logits.shape[1]
        count, replacement = verify(
            block.gather(1, column),
            self.index < span.length.unsqueeze(1),
            q,
            p,
            position_noise(seeds.unsqueeze(1), positions, round_.unsqueeze(1), ACCEPTANCE_STREAM),
            lambda some, at: token_noise(
                seeds[some],
                positions[some].gather(1, at.unsqueeze(1)).squeeze(1),
                round_[some] + CORRECTION_ROUND,
                vocab,
            ),
        )
        return self._verified(part, span, count, replacement)


def _span_of(window: Window) -> Span:
    """The drafts that a forward verified."""
    return Span(window.progress.span_start, window.progress.pending)
