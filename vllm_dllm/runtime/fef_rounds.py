"""FeF-DLLM (paper 000, Algorithm 2) in the engine: which forward is a draft, which one verifies, and what is kept.

A round drafts j_1 .. j_b and commits j_1 at once, for its draft is accepted for certain. What is forwarded next is the
block with j_1, which verifies j_2, and drafts that hold j_2 .. j_m each, which verify j_(m+1): branches as any other
verifier has them. So every forward, drafting or verifying, commits a token at least. The algorithm itself is in
``vllm_dllm.decoding.fef``.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.decoding.fef import (
    branches_present,
    commit,
    draft_positions,
    fef_branches,
    num_remask,
    remask,
    token_laws,
)
from vllm_dllm.kernels.confidence import position_noise, token_noise
from vllm_dllm.runtime.states import REMASK, Field

if TYPE_CHECKING:
    from vllm_dllm.runtime.plan.rows import RowPlan
    from vllm_dllm.runtime.sampler import BlockDiffusionSampler

LAW_VALUES = 128 << 20
"""Logits of drafts that are computed again at a time; in their own precision, so 256 MiB in bfloat16."""
PROCESSED_LAW_VALUES = 16 << 20
"""The same where sampling parameters reshape them, in fp32."""
ACCEPTANCE_STREAM = 1
"""Stream of a position's noise that accepts its draft; 0 chooses positions."""
CORRECTION_ROUND = 1 << 48
"""Added to the round of draws that replace rejected drafts."""
PASS_ROUND = 1 << 16
"""Rounds of a pass: more than any block has positions. A further pass comes to the same numbers of unmasked ones."""


class Advance(NamedTuple):
    """What a forward makes of F requests, blocks of L positions."""

    tokens: torch.Tensor
    """[F, L] int64: the block, masked again where a further pass begins."""
    written: torch.Tensor
    """[F, L] bool: positions that got a token."""
    source: torch.Tensor
    """[F, L] int64: the branch whose logits it came from."""
    reached: torch.Tensor
    """[F] int64: forwarded branches whose drafts were accepted, the block itself included."""
    finished: torch.Tensor
    """[F] bool: no mask is left after the last pass."""
    last_pass: torch.Tensor
    """[F] bool: what it commits is final."""
    num_drafts: torch.Tensor
    """[F] int64: drafts to be forwarded next."""
    drafts: torch.Tensor
    """[F, K - 1, L] int64."""
    pending: torch.Tensor
    """[F] int64: positions drafted and not yet verified, the committed first included."""
    passes: torch.Tensor
    """[F] int64: passes that the block has had."""


class FefRounds:
    """What is kept of every request between drafting and verifying.

    ``Field.PENDING`` says how much of it counts, so nothing is to be cleared when a request leaves its slot.
    """

    def __init__(self, sampler: "BlockDiffusionSampler"):
        self.sampler = sampler
        self.states = sampler.states
        self.mask = self.states.mask_token_id
        self.block_length = sampler.block_length
        # Positions that a round may draft: those of its drafts, the one committed at once, and one that is verified but
        # would leave no mask.
        self.max_window = min(self.block_length, self.states.max_drafts + 2)
        shape = sampler.req_states.max_num_reqs, self.max_window
        device = sampler.req_states.device
        self.positions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.confidence = torch.zeros(shape[0], self.block_length, device=device)
        # [max_num_reqs, K, hidden]; the laws of the drafts are computed from them again when they are verified.
        self.hidden: torch.Tensor | None = None

    def advance(
        self,
        logits: torch.Tensor,
        predicted: torch.Tensor,
        slots_np: np.ndarray,
        requests_np: np.ndarray,
        plan: "RowPlan",
    ) -> Advance:
        """Go on with some of the step's requests.

        Args:
            logits: [N * L, vocab].
            predicted: [D, B, L] int64: token drawn for every position of every branch.
            slots_np: [F] their slots, on the host.
            requests_np: [F] which requests of the D they are.
        """
        hidden_states = self.sampler.model_state.model.sampled_hidden_states
        if self.hidden is None:
            self.hidden = hidden_states.new_zeros(*self.positions.shape, hidden_states.shape[1])
        # The logits of the drafts of so many requests are computed at a time.
        processed_np = self.sampler.needs_processing_np[slots_np]
        order_np = np.concatenate((np.flatnonzero(~processed_np), np.flatnonzero(processed_np)))
        num_plain = int((~processed_np).sum())
        per_request = 2 * self.max_window * logits.shape[1]
        plain, processed = (max(1, values // per_request) for values in (LAW_VALUES, PROCESSED_LAW_VALUES))
        borders = [*range(0, num_plain, plain), *range(num_plain, len(order_np), processed)]
        parts = [
            self._advance(
                logits, hidden_states, predicted, slots_np[order_np[begin:end]], requests_np[order_np[begin:end]], plan
            )
            for begin, end in zip(borders, [*borders[1:], len(order_np)], strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        back = async_tensor_h2d(np.argsort(order_np), device=logits.device)
        return Advance(*(torch.cat(values)[back] for values in zip(*parts, strict=True)))

    def _advance(
        self,
        logits: torch.Tensor,
        hidden_states: torch.Tensor,
        predicted: torch.Tensor,
        slots_np: np.ndarray,
        requests_np: np.ndarray,
        plan: "RowPlan",
    ) -> Advance:
        sampler, device = self.sampler, logits.device
        processed = bool(sampler.needs_processing_np[slots_np].any())
        requests = async_tensor_h2d(requests_np, device=device)
        slots = async_tensor_h2d(slots_np.astype(np.int64), device=device)
        fields = plan.state.fields[requests]
        num_branches = plan.branches.num_branches
        branches = plan.state.branches[requests].view(len(requests), -1, self.block_length)[:, :num_branches]
        present = plan.branches.present[requests]
        predicted = predicted[requests]
        block = branches[:, 0]
        generated = torch.arange(self.block_length, device=device) >= fields[:, Field.FIRST].unsqueeze(1)
        temperature = sampler.sampling_states.temperature.gpu[slots]
        pending, passes = fields[:, Field.PENDING], fields[:, Field.PASSES]
        index = torch.arange(self.max_window, device=device)

        def rows(branch: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            """Row of the logits that predicts ``position`` in ``branch``, both [F, n]."""
            group = plan.branches.groups[requests.unsqueeze(1), branch.clamp(max=num_branches - 1), 0]
            return group * self.block_length + position

        def laws(branch: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Logits and their rows [F, n] of the laws at ``position`` in ``branch``."""
            at = rows(branch, position)
            if not processed:
                return logits, at
            windows = branches.gather(
                1, branch.clamp(max=num_branches - 1).unsqueeze(2).expand(-1, -1, self.block_length)
            )
            return self._processed(logits[at.flatten()], slots_np, slots, fields, windows, position)

        # Verify what the round before drafted. X is the block as it was drafted for, j_1 not committed.
        drafted_at, tokens = self.positions[slots], self.tokens[slots]
        awaited = index < pending.unsqueeze(1)
        first = drafted_at[:, :1]
        x = block.scatter(1, first, torch.where(pending.unsqueeze(1) > 0, self.mask, block.gather(1, first)))
        assert self.hidden is not None
        rho_logits = sampler.model_state.model.compute_logits(self.hidden[slots].flatten(0, 1))
        rho_rows = torch.arange(len(rho_logits), device=device).view(-1, self.max_window)
        if processed:
            windows = x.unsqueeze(1).expand(-1, self.max_window, -1)
            rho_logits, rho_rows = self._processed(rho_logits, slots_np, slots, fields, windows, drafted_at)
        pi_logits, pi_rows = laws(index[:-1].expand(len(requests), -1), drafted_at[:, 1:])
        forwarded = torch.zeros_like(awaited)
        forwarded[:, :num_branches] = present[:, : self.max_window]
        round_ = self._round(x, passes)
        seeds = sampler.sampling_states.seeds.gpu[slots]
        block_start = fields[:, Field.BLOCK_START]
        committed = commit(
            x,
            self.confidence[slots],
            drafted_at,
            awaited,
            tokens,
            forwarded,
            rho_logits,
            rho_rows,
            pi_logits,
            pi_rows,
            position_noise(
                seeds.unsqueeze(1), block_start.unsqueeze(1) + drafted_at, round_.unsqueeze(1), ACCEPTANCE_STREAM
            ),
            lambda part, at: token_noise(
                seeds[part], block_start[part] + at, round_[part] + CORRECTION_ROUND, logits.shape[1]
            ),
            temperature,
            mask_id=self.mask,
            temperature_applied=processed,
        )

        # Draft again where the laws of the block are known, and commit the first of the drafts.
        accepted = committed.num_accepted
        source = torch.where(pending > 0, accepted - 1, 0).clamp(min=0)
        known = (pending == 0) | committed.forwarded
        masked = (committed.tokens == self.mask) & generated
        positions, drafted = draft_positions(masked, fields[:, Field.WINDOW] * known, max_window=self.max_window)
        drawn = predicted.gather(1, source.clamp(max=num_branches - 1).view(-1, 1, 1).expand(-1, 1, self.block_length))
        drawn = drawn.squeeze(1).gather(1, positions)
        first, is_drafted = positions[:, :1], drafted[:, :1]
        first_logits, first_rows = laws(source.unsqueeze(1), first)
        law = token_laws(
            first_logits,
            first_rows.flatten(),
            drawn[:, 0],
            temperature,
            mask_id=self.mask,
            temperature_applied=processed,
        )
        following = fef_branches(committed.tokens, positions, drafted, drawn)
        to_forward = branches_present(masked, drafted)
        tokens = committed.tokens.scatter(
            1, first, torch.where(is_drafted, drawn[:, :1], committed.tokens.gather(1, first))
        )
        confidence = committed.confidence.scatter(
            1,
            first,
            torch.where(is_drafted, law.confidence.unsqueeze(1), committed.confidence.gather(1, first)),
        )
        num_drafted = drafted.sum(dim=1)
        num_drafted = torch.where(num_drafted > 1, num_drafted, 0)
        self.positions[slots], self.tokens[slots] = positions, drawn
        self.confidence[slots] = confidence
        at = rows(source.unsqueeze(1), positions).flatten()
        self.hidden[slots] = hidden_states[at].view(len(requests), self.max_window, -1)

        # Where each token came from: j_(i+1) from branch i, the new first one from the branch that drafts.
        came_from = torch.zeros_like(block).scatter(1, drafted_at, torch.where(awaited, (index - 1).clamp(min=0), 0))
        came_from = came_from.scatter(
            1, first, torch.where(is_drafted, source.unsqueeze(1), came_from.gather(1, first))
        )

        # A pass ends where no mask is left. The least confident positions are masked again for the next.
        whole = ~((tokens == self.mask) & generated).any(dim=1)
        passes = passes + whole
        last_pass = passes + (~whole).long() >= fields[:, Field.NUM_PASSES]
        finished = whole & (passes >= fields[:, Field.NUM_PASSES])
        candidates = generated
        if sampler.first_position_is_fixed:
            # Its logits are those of the refresh, which further passes do without.
            candidates = generated & (torch.arange(self.block_length, device=device) > 0)
        fraction = sampler.states.bounds.gpu[slots][:, REMASK]
        count = num_remask(generated, fraction) * (whole & ~finished)
        return Advance(
            tokens=remask(tokens, confidence, candidates, count, self.mask),
            written=(block == self.mask) & generated & (tokens != self.mask),
            source=came_from,
            # Drafts that fill the block may be accepted too, in a branch that is none.
            reached=torch.where(pending > 0, torch.minimum(accepted, present.sum(dim=1)), 1),
            finished=finished,
            last_pass=last_pass,
            num_drafts=to_forward[:, 1:].sum(dim=1),
            drafts=following[:, 1:],
            pending=num_drafted,
            passes=torch.where(finished, 0, passes),
        )

    def _round(self, blocks: torch.Tensor, passes: torch.Tensor) -> torch.Tensor:
        """[F]: what keys the noise of a state, beside position and seed."""
        return (blocks != self.mask).sum(dim=1) + passes * PASS_ROUND

    def _processed(
        self,
        logits: torch.Tensor,
        slots_np: np.ndarray,
        slots: torch.Tensor,
        fields: torch.Tensor,
        windows: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of logits [F * n, vocab] after all sampling parameters, and their numbers [F, n].

        Args:
            windows: [F, n, L] int64: the block that each row saw.
            positions: [F, n] int64: what each predicts, in the block.
        """
        num_rows = positions.shape[1]
        block_start = fields[:, Field.BLOCK_START]
        processed = self.sampler.process_rows(
            logits,
            np.repeat(slots_np, num_rows),
            slots.repeat_interleave(num_rows),
            (block_start.unsqueeze(1) + positions).flatten(),
            windows.flatten(0, 1),
            block_start.repeat_interleave(num_rows),
        )
        return processed, torch.arange(len(processed), device=logits.device).view_as(positions)
