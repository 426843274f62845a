"""S2D2 in the engine (``vllm_dllm.decoding.s2d2``): which forward drafts, which one verifies, and what is kept.

A request whose drafts wait to be verified has the block with all of them in its window. The next forward sees that
block, and beside it, as drafts of other verifiers, branches that only S2D2 has under a causal mask. If all drafts are
accepted, the logits of the window are those of the next drafts, and the same forward drafts again.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_dllm.decoding.policies import sub_block_candidates
from vllm_dllm.decoding.records import PerRequest, Window
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
    switch_after,
    switch_is_on,
    verifies,
    verifying_branches,
)
from vllm_dllm.decoding.step import Accepted, Choice, Finished, Origin, choose, finish, step_of
from vllm_dllm.observe.wires import pack
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.drafted_rows import Asked, DraftedRows, rows_of
from vllm_dllm.runtime.parts import Advance, Forward, Part, Seen, see
from vllm_dllm.runtime.policy_params import PolicyParamsBuilder
from vllm_dllm.runtime.states import BatchOptions

Judged = tuple[Tensor, Tensor]
"""Of F requests that sample, [F] int64 each: drafts that are accepted, and the token in the place of the next."""


@dataclass(frozen=True)
class _Verified(PerRequest):
    """F requests after the verification of what they drafted before, and what the policy makes of their blocks."""

    num_accepted: Tensor  # [F] int64
    tokens: Tensor  # [F, L] int64: the block
    written: Tensor  # [F, L] bool: positions that the verification wrote
    looks: Tensor  # [F] bool: the logits are those of this block, and there is something to look at
    masked: Tensor  # [F, L] bool: masked positions of blocks that the forward denoised
    chosen: Tensor  # [F, L] bool: positions that the policy would write
    edited: Tensor | None  # [F, L] bool: as in ``Choice``
    run: Tensor  # [F] int64: length of the first run of masked positions
    span: Span  # what is to be verified of that run, if anything is
    inside: Tensor | None  # [F, L] bool: positions of the span. None, as the next two: no request verifies by a score
    beliefs: Beliefs | None  # with the entropy in nats
    num_confident: Tensor | None  # [F] int64: masked positions whose confidence passes the threshold


class S2D2Rounds:
    """Verifies drafts, and drafts or unmasks by the policy where the block's logits are known.

    ``Progress.pending`` says how many drafts count, so nothing is to be cleared when a request leaves its slot.
    """

    def __init__(self, params: PolicyParamsBuilder, model: Any, stages: Stages, *, shifted: bool):
        """For the requests that ``params`` knows.

        Args:
            model: as for ``DraftedRows``.
            shifted: as in ``FamilyTraits``.
        """
        self.params, self.states, self.rules = params, params.states, params.rules
        self.shifted = shifted
        most = self.rules.block_length if shifted else min(self.states.max_drafts, self.rules.block_length)
        self.index = self.rules.columns[:most]
        self.rows = DraftedRows(self.states, model, self.rules, most, stages)
        self._ask_stage, self._verify_stage = stages.stage(self._ask), stages.stage(self._verify)
        self._close_stage = stages.stage(self._close)

    def advance(self, part: Part) -> Advance:
        """Take the requests to their next state."""
        if not part.logits.reader.samples(part.options.slots_np).any():
            return self._advance(part, None, None)
        hidden_states = self.rows.hidden_states()
        return self.rows.in_parts(
            part, lambda some, processed: self._advance(some, self._judge(some, processed), hidden_states)
        )

    def _advance(self, part: Part, judged: Judged | None, hidden_states: Tensor | None) -> Advance:
        verify = self._verify_stage if part.options.compares_only else self._verify
        verified = verify(part.forward, judged)
        scores = None
        if verified.beliefs is not None:
            scores = self._scores(verified, part.options, vocab=part.logits.logits.shape[1])
        return self._close_stage(part.forward, verified, scores, hidden_states)

    # Verification of what the forward before drafted.

    def _judge(self, part: Part, processed: bool) -> Judged:
        """How many drafts are accepted of requests that sample, and what replaces the next."""
        asked = self._ask_stage(part.forward, part.logits.reader.sampling_states.seeds.gpu)
        verified = self.rows.verify(part, asked, processed)
        return verified.num_accepted, verified.replacement.token

    def _ask(self, forward: Forward, seeds: Tensor) -> Asked:
        """What the verification goes by; ``seeds``: [slots] int64."""
        window, rules = see(forward, self.states.unpack, self.rules).window, self.rules
        span, block = _span_of(window), window.branches[:, 0]
        columns, present = self._column(span), self.index < span.length.unsqueeze(1)
        before = torch.where(span.holds(rules.columns), rules.mask_id, block)
        branch, drafts = self._branch_of(self.index.expand_as(columns)), block.gather(1, columns)
        return self.rows.ask(forward, seeds, window.progress, before, columns, present, drafts, branch).dense()

    def _column(self, span: Span) -> Tensor:
        """[F, K] int64: columns from the left end of the span."""
        return (span.start.unsqueeze(1) + self.index).clamp(max=self.rules.block_length - 1)

    def _branch_of(self, place: Tensor) -> Tensor:
        """The branch that says of a ``place`` in the span."""
        return torch.ones_like(place) if self.shifted else place + 1

    def _judge_greedily(self, seen: Seen) -> Judged:
        window, token, span = seen.window, seen.measured.token, _span_of(seen.window)
        branch = self._branch_of(span.place(self.rules.columns)).clamp(0, token.shape[1] - 1)
        said = token.gather(1, branch.unsqueeze(1)).squeeze(1)
        count = accept_greedily(window.branches[:, 0], said, span)
        at = (span.start + count).clamp(max=said.shape[1] - 1).unsqueeze(1)
        return count, said.gather(1, at).squeeze(1)

    def _verify(self, forward: Forward, judged: Judged | None) -> _Verified:
        """Accept drafts, and look at the block. Without ``judged`` no request samples."""
        options, rules = forward.options, self.rules
        seen = see(forward, self.states.unpack, rules)
        window, (count, replacement) = seen.window, judged or self._judge_greedily(seen)
        span, block = _span_of(window), window.branches[:, 0]
        place, holds = span.place(rules.columns), span.holds(rules.columns)
        accepted, replaced = holds & (place < count.unsqueeze(1)), holds & (place == count.unsqueeze(1))
        tokens = torch.where(holds, rules.mask_id, block)
        tokens = torch.where(accepted, block, torch.where(replaced, replacement.unsqueeze(1), tokens))

        choice = self._choose(seen, options, tokens)
        masked = choice.masked[:, 0] & window.denoises.unsqueeze(1)
        # A block without masks that nobody edits is finished, and this forward did not look at it again.
        looks = masked.any(dim=1)
        if options.edit_threshold is not None:
            looks = looks | ((options.edit_threshold != torch.inf) & (options.max_post_steps > 0))
        looks = looks & (count == span.length) & window.denoises
        candidates = masked & looks.unsqueeze(1)
        if rules.group_length is not None:
            candidates = sub_block_candidates(candidates, rules.group_length)
        run = first_span(candidates)
        next_span = Span(run.start, torch.minimum(run.length, options.window))
        inside = beliefs = num_confident = None
        if options.estimators:
            confidence, entropy, margin = seen.measured.confidence, seen.measured.entropy, seen.measured.margin
            assert entropy is not None and margin is not None
            inside = next_span.holds(rules.columns)
            beliefs = Beliefs(confidence[:, 0], entropy[:, 0], margin[:, 0])
            confident = candidates & (beliefs.confidence > options.bounds["threshold"].unsqueeze(1))
            num_confident = confident.sum(dim=1)
        return _Verified(
            num_accepted=count,
            tokens=tokens,
            written=accepted | replaced,
            looks=looks,
            masked=masked,
            chosen=choice.chosen[:, 0],
            edited=None if choice.edited is None else choice.edited[:, 0],
            run=run.length,
            span=next_span,
            inside=inside,
            beliefs=beliefs,
            num_confident=num_confident,
        ).dense()

    def _choose(self, seen: Seen, options: BatchOptions, tokens: Tensor) -> Choice:
        """What the policy makes of the block [F, L]."""
        window = seen.window
        block = replace(
            window, branches=tokens.unsqueeze(1), present=window.present[:, :1], levels=window.levels[:, :1]
        )
        measured = seen.measured.map(lambda values: values[:, :1]).dense()
        steps = (window.progress.step + (window.progress.pending > 0)).unsqueeze(1)
        params = self.params.params_of(options, window.progress, block.branches, steps)
        return choose(block, measured, options, params, self.rules)

    # What is drafted or unmasked.

    def _scores(self, verified: _Verified, options: BatchOptions, vocab: int) -> Tensor:
        """[F] float32: of the spans, for the routes that go by a score."""
        # Quotient, power, exponential, products and sums round, otherwise in a compiled stage than here.
        beliefs, inside, num_confident = verified.beliefs, verified.inside, verified.num_confident
        assert beliefs is not None and inside is not None and num_confident is not None
        beliefs, routing = replace(beliefs, entropy=beliefs.entropy / math.log(vocab)), _routing_of(options)
        expected = expected_accepted(acceptances(beliefs, routing, options.estimators), inside)
        return score(expected, num_confident, routing)

    def _close(
        self, forward: Forward, verified: _Verified, scores: Tensor | None, hidden_states: Tensor | None
    ) -> Advance:
        """What the step makes of the requests; keeps what the next forward needs to verify draws.

        Args:
            scores: of ``_scores``; None: no request verifies by a score.
            hidden_states: of the step's logits rows; None: no request samples.
        """
        options, rules, columns = forward.options, self.rules, self.rules.columns
        seen = see(forward, self.states.unpack, rules)
        window, token, looks = seen.window, seen.measured.token[:, 0], verified.looks
        was_verified = _span_of(window)
        to_verify, switch = self._route(window, options, verified, scores)
        span = Span(verified.span.start, verified.span.length * to_verify)
        if hidden_states is not None:
            column = self._column(span)
            rows = rows_of(forward.sight, torch.zeros_like(column), column, rules)
            self.rows.keep(options.slots, hidden_states, rows)

        edited = torch.zeros_like(verified.chosen) if verified.edited is None else verified.edited
        chosen = torch.where(to_verify.unsqueeze(1), edited, verified.chosen)
        chosen = chosen & (looks | window.commit_only).unsqueeze(1)
        tokens = torch.where(chosen, token, verified.tokens)
        # Steps that this forward ends: the one that it verifies, and one of the policy.
        has_verified = was_verified.length > 0
        steps = has_verified.long() + (looks & ~to_verify)
        nothing = torch.zeros_like(verified.num_accepted)
        is_edited = verified.edited is not None
        accepted = Accepted(
            tokens=tokens,
            branch=nothing,
            skipped=(steps - 1) * window.denoises,
            reached=window.present & (torch.arange(window.present.shape[1], device=token.device) == 0),
            chosen=chosen,
            was_whole=looks & ~verified.masked.any(dim=1) if is_edited else None,
            edited=edited & looks.unsqueeze(1) if is_edited else None,
        )
        finished = self._wait(window, finish(window, accepted, options, seen.room, rules), span, token, switch)
        branch = self._branch_of(was_verified.place(columns))
        branch = torch.where(verified.written & ~chosen, branch, 0)
        ahead = torch.where(chosen, has_verified.unsqueeze(1), False).long()
        origin = Origin(chosen | verified.written, branch, step_of(window, ahead))
        drafts = verifying_branches(
            finished.tokens, span, rules.mask_id, shifted=self.shifted, most=self.states.max_drafts
        )
        # A forward that verifies without a policy's step denoises too.
        next_drafts = finished.progress.num_drafts
        observation = pack(window.denoises, was_verified.length, verified.num_accepted, next_drafts)
        return Advance(accepted, finished, origin, drafts.flatten(1), observation=observation).dense()

    def _route(
        self, window: Window, options: BatchOptions, verified: _Verified, scores: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Who verifies, and the switch of hysteresis: [F] bool each."""
        run, was_on = verified.run, switch_is_on(window.progress.switch)
        if scores is None:
            scores = torch.zeros_like(options.bounds["score_on"])
        # A look at a block without masks turns the switch off.
        scores = torch.where(run > 0, scores, -torch.inf)
        to_verify, is_on = verifies(run, scores, was_on, _routing_of(options))
        return to_verify, torch.where(verified.looks, is_on, was_on)

    def _wait(self, window: Window, finished: Finished, span: Span, token: Tensor, is_on: Tensor) -> Finished:
        """The next state, in which the drafts of the ``span`` wait to be verified."""
        progress = finished.progress
        count = span.length if not self.shifted else (span.length > 0).long()
        return replace(
            finished,
            tokens=filled(finished.tokens, span, token),
            progress=replace(
                progress,
                pending=span.length,
                span_start=span.start,
                num_drafts=count,
                switch=switch_after(window.progress.switch, is_on, progress.commit.bool()),
            ),
        )


def _span_of(window: Window) -> Span:
    """The drafts that a forward verified."""
    return Span(window.progress.span_start, window.progress.pending)


def _routing_of(options: BatchOptions) -> Routing:
    routing = Routing(**{name: options.bounds[name] for name in Routing._fields})
    return routing._replace(per_token=routing.per_token > 0)
