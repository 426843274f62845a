"""The decision of a denoising step: from logits to unmasked tokens, finished blocks and emitted text."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_dllm.decoding.adaptive import Drafting
from vllm_dllm.decoding.draft_graph import DraftGraph
from vllm_dllm.decoding.drafters import GraphTensors, chain_drafts, chain_lengths, graph_drafts, ranks
from vllm_dllm.decoding.policies import (
    TIMED_POLICIES,
    Policy,
    PolicyParams,
    edits,
    policy_scores,
    quota_of_step,
    stop_length,
    sub_block_candidates,
    unmask,
)
from vllm_dllm.decoding.verifiers import Verdict, Verifier, sources, verify
from vllm_dllm.kernels.confidence import RowStats, position_noise, row_stats
from vllm_dllm.observe.recorder import Recorder, Round
from vllm_dllm.observe.wires import pack
from vllm_dllm.options.resolve import options_of
from vllm_dllm.runtime.fef_rounds import PASS_ROUND, Advance, FefRounds
from vllm_dllm.runtime.logits.bad_words import BlockBadWords
from vllm_dllm.runtime.logits.logprobs import LogprobsStash
from vllm_dllm.runtime.plan.rows import RowPlan
from vllm_dllm.runtime.states import (
    EDIT_THRESHOLD,
    BlockState,
    Field,
)

if TYPE_CHECKING:
    from vllm_dllm.runtime.model_state import DllmModelState

ENTROPY_POLICIES = {Policy.ENTROPY, Policy.TIMED_ENTROPY}

PROCESSED_VALUES = 16 << 20
"""Logits that are processed at a time (penalties, top-k, ...), which takes them in fp32: 64 MiB."""


class _Rows(NamedTuple):
    """Logits rows of n groups, K of each."""

    logits: torch.Tensor
    """[n * K, vocab]."""
    slots_np: np.ndarray
    """[n] slots of the groups' requests, on the host."""
    slots: torch.Tensor
    """[n] int64."""
    positions: torch.Tensor
    """[n, K] int64: position that each row predicts."""
    rounds: torch.Tensor
    """[n, K] int64: unmasked positions of the block, which makes a draw at a position differ from the one before."""
    window: torch.Tensor
    """[n, W] int64: the window that the group is part of."""
    window_start: torch.Tensor
    """[n] int64: its position."""

    def per_row(self, values: torch.Tensor) -> torch.Tensor:
        """[n * K]: what is [n] by group, by row."""
        return values.unsqueeze(1).expand_as(self.positions).flatten()

    def select(self, groups_np: np.ndarray, groups: torch.Tensor) -> "_Rows":
        """The rows of some of the groups; the logits are copied."""
        logits = self.logits.view(len(self.slots_np), -1, self.logits.shape[1])[groups].flatten(0, 1)
        rest = (values[groups] for values in self[2:])
        return _Rows(logits, self.slots_np[groups_np], *rest)


class _Decision(NamedTuple):
    """What a denoising step makes of D requests."""

    tokens: torch.Tensor
    """[D, W] int64: tokens to emit first."""
    num_emitted: torch.Tensor
    """[D] int64: how many of them to emit."""
    first: torch.Tensor
    """[D] int64: column of the window that they begin in."""
    shift: torch.Tensor | None
    """[D] int64: columns that the window moves on while its other tokens stay; None where blocks end with it."""
    observation: torch.Tensor
    """[D] int32: see ``vllm_dllm.observe.wires``."""


class _Fef(NamedTuple):
    """What a step makes of the requests of a batch that use FeF-DLLM."""

    requests: torch.Tensor
    """[F] int64: which of the D they are."""
    denoised: torch.Tensor
    """[D] bool."""
    advance: Advance

    def of_others(self, others: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """[D, ...]: ``theirs`` [F, ...] for the requests that denoise with FeF, ``others`` [D, ...] for the rest."""
        merged = others.index_copy(0, self.requests, theirs.to(others.dtype))
        return torch.where(self.denoised.view(-1, *[1] * (others.ndim - 1)), merged, others)

    def merge(
        self, tokens: torch.Tensor, written: torch.Tensor, verdict: Verdict
    ) -> tuple[torch.Tensor, torch.Tensor, Verdict]:
        """Tokens [D, L], what was written [D, L], and how far drafts were accepted, with theirs in them."""
        advance = self.advance
        branch = torch.arange(verdict.reached.shape[1], device=tokens.device)
        return (
            self.of_others(tokens, advance.tokens),
            self.of_others(written, advance.written),
            Verdict(
                accepted=self.of_others(verdict.accepted, (advance.reached - 1).clamp(min=0)),
                # Beside the one token of a step, as one position at a time would take.
                skipped=self.of_others(verdict.skipped, (advance.written.sum(dim=1) - 1).clamp(min=0)),
                reached=self.of_others(verdict.reached, branch < advance.reached.unsqueeze(1)),
            ),
        )


class BlockDiffusionSampler:
    """Replaces vLLM's sampler. Request state that vLLM's own sampler keeps stays there."""

    def __init__(self, model_state: "DllmModelState", sampler: Sampler):
        self.model_state = model_state
        self.states = model_state.states
        self.traits = model_state.traits
        self.options = model_state.options
        self.full_attention = self.traits.sees_whole_text
        self.block_length = model_state.block_length
        self.window_length = self.states.window_length
        self.window_blocks = self.window_length // self.block_length
        # Positions that are unmasked one group after the other, left to right; None: all of a window together.
        self.group_length = model_state.options.sub_block_length
        if self.group_length is None and self.window_blocks > 1:
            self.group_length = self.block_length
        # Denoising steps after which a block's K/V is computed anew.
        self.refresh_interval = model_state.options.refresh_interval if self.full_attention else None
        self.recorder: Recorder | None = None
        # Of requests that leave it to the scheduler how many drafts they have.
        self._drafting = Drafting()
        # Logits of a block's first position are there in a refresh only.
        self.first_position_is_fixed = self.full_attention and self.traits.shifted and self.options.cache != "none"
        self.fef_rounds: FefRounds | None = None

        # Attributes that the runner reads of every sampler.
        self.sampling_states = sampler.sampling_states
        self.penalties_state = sampler.penalties_state
        self.req_states = sampler.req_states
        self.compute_nans = False

        # A word may be completed from either side in a block, which vLLM's check does not know.
        self.logits_processors = [p for p in sampler.logits_processors if not isinstance(p, BadWordsState)]
        max_num_reqs, device = self.req_states.max_num_reqs, self.req_states.device
        self.bad_words = BlockBadWords(max_num_reqs, device)
        self.logprobs = LogprobsStash(max_num_reqs, self.window_length, device)
        self.needs_processing_np = np.zeros(max_num_reqs, dtype=bool)
        self._staged = True
        graph = model_state.draft_graph
        self.graph = None if graph is None else _graph_tensors(graph, device)
        self.num_vocab_ranks = 1 if self.graph is None else int(self.graph.vocab_rank.max())

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Take the sampling parameters of a request that enters slot ``req_idx``."""
        self._staged = True
        self.sampling_states.add_request(req_idx, sampling_params)
        processed = [p.add_request(req_idx, sampling_params) for p in self.logits_processors]
        self.bad_words.add_request(req_idx, sampling_params.bad_words_token_ids or [])
        self.logprobs.add_request(req_idx, sampling_params.logprobs)
        states = self.sampling_states
        top_k = options_of(sampling_params, self.model_state.geometry).confidence_top_k
        if top_k is not None:
            states.top_k.np[req_idx] = min(states.top_k.np[req_idx], top_k)
        self.needs_processing_np[req_idx] = (
            any(processed)
            or self.bad_words.num_words_np[req_idx] > 0
            or states.min_p.np[req_idx] != 0.0
            or states.top_k.np[req_idx] != states.vocab_size
            or states.top_p.np[req_idx] != 1.0
        )

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` staged to the device; vLLM calls this in every step."""
        for processor in self.logits_processors:
            # A processor of the user may count on being called in every step, as vLLM promises.
            if self._staged or not isinstance(processor, (LogitBiasState, PenaltiesState)):
                processor.apply_staged_writes()
        if self._staged:
            self.sampling_states.apply_staged_writes()
            self._staged = False

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, draft_logits: torch.Tensor | None = None
    ) -> SamplerOutput:
        """Advance every decoding request of the batch by one denoising step, and by those that drafts let it skip.

        Args:
            logits: [N * L + P + T, vocab] of ``RowPlan.logits_rows``; may change.

        Returns:
            Tokens of the requests whose block was finished by this step, none for the others.
        """
        num_reqs, device = input_batch.num_reqs, logits.device
        plan = self.model_state.plan
        num_decodes = 0 if plan is None or input_batch.num_draft_tokens == 0 else plan.num_decodes
        if plan is not None and plan.guidance is not None:
            plan.guidance.apply(logits, PROCESSED_VALUES)
        if plan is not None and len(plan.first_token_requests):
            num_rows = len(plan.branches.requests_np) * self.block_length
            self._first_tokens(logits[num_rows:], input_batch, plan)
        logprobs_tensors = None
        # Requests that prefill, behind those that decode, sample and reject nothing.
        sampled = torch.zeros(num_reqs - num_decodes, self.window_length, dtype=torch.int64, device=device)
        num_sampled = num_rejected = torch.zeros(num_reqs - num_decodes, dtype=torch.int64, device=device)
        if self.full_attention:
            # vLLM's counter of computed tokens stays at 0.
            num_rejected = input_batch.query_start_loc[num_decodes : num_reqs + 1].diff().long()
        observation = None
        if plan is not None and num_decodes:
            num_rows = len(plan.branches.requests_np) * self.block_length
            decision = self._denoise(logits[:num_rows], input_batch, plan)
            slots_np = input_batch.idx_mapping_np[:num_decodes]
            rejected = input_batch.query_start_loc[: num_decodes + 1].diff()
            if not self.full_attention:
                rejected = rejected - decision.num_emitted
            logprobs_tensors = self.logprobs.emit(slots_np, decision.first, num_reqs)
            if decision.shift is not None:
                self.logprobs.shift(slots_np, decision.shift)
            if num_decodes == num_reqs:
                sampled, num_sampled, num_rejected = decision.tokens, decision.num_emitted, rejected
                observation = decision.observation
            else:
                sampled = torch.cat((decision.tokens, sampled))
                observation = torch.cat((decision.observation, num_sampled.int()))
                num_sampled, num_rejected = (
                    torch.cat((decision.num_emitted, num_sampled)),
                    torch.cat((rejected, num_rejected)),
                )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs_tensors,
            num_nans=observation,
            num_sampled=num_sampled.int(),
            num_rejected=num_rejected.int(),
        )

    def _denoise(self, logits: torch.Tensor, batch: InputBatch, plan: RowPlan) -> _Decision:
        """One denoising step of D requests with up to B branches each.

        Paper 001 Alg. 2, paper 002 Alg. 1 and paper 003 Alg. 1 are this loop body with other drafts and another
        verifier; with B = 1 it is plain denoising.
        """
        mask = self.states.mask_token_id
        num_decodes, num_branches = plan.num_decodes, plan.branches.num_branches
        slots = batch.idx_mapping[:num_decodes]
        slots_np = batch.idx_mapping_np[:num_decodes]
        fields, levels, finished, _ = plan.state
        branches = plan.state.branches.view(num_decodes, -1, self.window_length)[:, :num_branches]
        levels = torch.nn.functional.pad(levels, (1, 0))[:, :num_branches]
        step, first = fields[:, Field.STEP], fields[:, Field.FIRST]
        commit_only = plan.commit_only.unsqueeze(1)
        offsets = torch.arange(self.window_length, device=branches.device)
        # A mask token in the prompt is a token like any other: what it stands for is not for us to write.
        generated = offsets >= first.unsqueeze(1)
        masked = (branches == mask) & generated.unsqueeze(1)

        # Tokens and confidences. A row predicts its own position or, in shifted families, the next one.
        present = {Policy(policy) for policy in set(self.states.policy_np[slots_np].tolist())}
        rows = self._rows(logits, slots_np, slots, plan)
        stats = self._row_stats(
            rows, with_entropy=bool(present & ENTROPY_POLICIES), with_margin=Policy.TOPK_MARGIN in present
        )
        predicted, confidence, entropy, margin = (
            None if values is None else self._by_branch(values, plan) for values in stats
        )
        assert predicted is not None and confidence is not None

        # What one step of the policy makes of every branch.
        candidates = (masked & ~commit_only.unsqueeze(2)).flatten(0, 1)
        if self.group_length is not None:
            candidates = sub_block_candidates(candidates, self.group_length)
        bounds = self.states.bounds.gpu[slots]
        params = self._params(fields, slots, slots_np, branches, step.unsqueeze(1) + levels)
        chosen = unmask(
            candidates,
            confidence.flatten(0, 1),
            None if entropy is None else entropy.flatten(0, 1),
            params,
            margin=None if margin is None else margin.flatten(0, 1),
            threshold_inclusive=self.traits.threshold_inclusive,
            present=present,
        ).view_as(masked)
        if self.traits.shifted:
            chosen = torch.where(plan.first_only.view(-1, 1, 1), offsets == 0, chosen)
        editing = bool(self.states.editing_np[slots_np].any())
        if editing:
            editable = ~masked & ~commit_only.unsqueeze(2) & generated.unsqueeze(1)
            edit_threshold = bounds[:, EDIT_THRESHOLD].repeat_interleave(num_branches)
            edited = edits(
                branches.flatten(0, 1),
                predicted.flatten(0, 1),
                confidence.flatten(0, 1),
                editable.flatten(0, 1),
                edit_threshold,
            ).view_as(masked)
            chosen = chosen | edited
        targets = torch.where(chosen, predicted, branches)

        # Which branch to go on from, and the block after it.
        verdict = self._verify(branches, targets, levels, slots_np, plan)
        tokens = _pick(targets, verdict)
        chosen_there, masked_there = _pick(chosen, verdict), _pick(masked, verdict)
        written = chosen_there | (masked[:, 0] & ~masked_there)
        uses_fef = self.states.verifier_np[slots_np] == Verifier.FEF
        fef = None
        if uses_fef.any():
            fef = self._fef(logits, predicted, slots_np, uses_fef, plan)
            tokens, written, verdict = fef.merge(tokens, written, verdict)
        if self.logprobs.wanted(slots_np):
            source = sources(branches, verdict, mask_id=mask) if num_branches > 1 else torch.zeros_like(tokens)
            if fef is not None:
                source = fef.of_others(source, fef.advance.source)
            self.logprobs.stash(slots_np, slots, logits, tokens, written, self._logits_rows(source, plan))

        # Is the block finished, and what is there to emit?
        still_masked = (tokens == mask) & generated
        post_steps = fields[:, Field.POST_STEPS]
        shift = None
        if self.window_blocks > 1:
            finished_length = self._leading_length(still_masked)
            # Their K/V is final once a forward has seen them whole as part of the window as it stood.
            shift = self._leading_length(masked[:, 0])
            done = torch.zeros_like(plan.commit_only)
        else:
            done = ~still_masked.any(dim=1) & ~plan.commit_only
            if editing:
                # A block without masks gets another look until it edits nothing or has had its post-edit steps.
                max_post_steps = fields[:, Field.MAX_POST_STEPS]
                looked = ~masked_there.any(dim=1)
                post_steps = post_steps + looked
                settled = looked & (~_pick(edited, verdict).any(dim=1) | (post_steps >= max_post_steps))
                edits_on = bounds[:, EDIT_THRESHOLD] != torch.inf
                done = done & (~edits_on | (max_post_steps == 0) | settled)
            if fef is not None:
                # A position may be masked again until the last pass is over.
                done = done & fef.of_others(done, fef.advance.finished)
            finished_length = done * self.block_length
        count = (finished_length - first).clamp(min=0)
        if self.traits.shifted and not self.full_attention:
            # The first token of a block is final as soon as it is known, a forward before the block's others.
            count = torch.where(plan.commit_only, 1, count)
        num_stop_token_ids = int(self.states.num_stop_token_ids_np[slots_np].max())
        if num_stop_token_ids:
            stop_token_ids = self.states.stop_token_ids.gpu[slots, :num_stop_token_ids]
            is_stop = (tokens.unsqueeze(2) == stop_token_ids.unsqueeze(1)).any(dim=2)
            stopped = stop_length(tokens, mask, is_stop, first)
            if editing:
                # A token that may still be edited ends nothing.
                stopped = torch.where(edits_on & ~done, 0, stopped)
            if fef is not None:
                stopped = torch.where(fef.of_others(~done, fef.advance.last_pass), stopped, 0)
            count = torch.where(stopped > 0, stopped, count)
        # The last block may reach beyond max_model_len.
        room = self.model_state.max_model_len - self.req_states.total_len.gpu[slots]
        count = torch.minimum(count, room)
        emitted = tokens.gather(1, (first.unsqueeze(1) + offsets).clamp(max=self.window_length - 1))

        # Next state. A finished block makes way for the next, and is to be committed.
        going_on = ~done
        steps = step + verdict.skipped + ~plan.commit_only
        if shift is None:
            moved = done * self.block_length
            next_tokens = torch.where(done.unsqueeze(1), mask, tokens)
            next_first = (first + (plan.commit_only & plan.first_only)) * going_on
            finished = torch.where(done.unsqueeze(1), tokens[:, : self.block_length], finished)
            heads = fields[:, Field.HEADS] * going_on
        else:
            moved = shift
            next_tokens = _move(tokens, shift, mask)
            next_first = torch.maximum(first, finished_length) - shift
            heads = fields[:, Field.HEADS] * (shift == 0)
        num_drafts, draft_levels = torch.zeros_like(step), plan.state.levels
        drafts = plan.state.branches[:, self.window_length :]
        is_drafting = self._is_to_draft(slots_np, num_branches)
        if is_drafting:
            may_draft = going_on & ~plan.commit_only
            available = (next_tokens == mask) & (offsets >= next_first.unsqueeze(1)) & may_draft.unsqueeze(1)
            num_drafts, draft_levels, drafts = self._draft(
                next_tokens, available, predicted, confidence, entropy, margin, steps, rows, verdict, shift, batch, plan
            )
        pending, passes = fields[:, Field.PENDING], fields[:, Field.PASSES]
        if fef is not None:
            pending = fef.of_others(pending, fef.advance.pending)
            passes = fef.of_others(passes, fef.advance.passes)
            num_drafts = fef.of_others(num_drafts, fef.advance.num_drafts)
            width = drafts.shape[1] // self.window_length
            fef_drafts = torch.nn.functional.pad(
                fef.advance.drafts, (0, 0, 0, max(0, width - fef.advance.drafts.shape[1]))
            )
            drafts = fef.of_others(drafts, fef_drafts[:, :width].flatten(1))
        changed = (
            fields[:, Field.BLOCK_START] + moved,
            next_first,
            steps * going_on,
            post_steps * going_on,
            done,
            num_drafts,
            heads,
            pending,
            passes,
        )
        self.states.scatter(
            slots,
            BlockState(
                fields=torch.cat((torch.stack(changed, dim=1), fields[:, len(changed) :]), dim=1),
                levels=draft_levels,
                finished=finished,
                branches=torch.cat((next_tokens, drafts), dim=1),
            ),
        )
        self.states.tell_host_of_drafts()
        drafted = plan.branches.present.sum(dim=1) - 1
        if self.recorder is not None:
            self.recorder(
                Round(
                    req_ids=batch.req_ids[:num_decodes],
                    block_start=fields[:, Field.BLOCK_START],
                    first=first,
                    denoised=~plan.commit_only,
                    branches=torch.where(plan.branches.present.unsqueeze(2), branches, mask),
                    present=plan.branches.present,
                    reached=verdict.reached,
                    accepted=verdict.accepted,
                    predicted=predicted,
                    confidence=confidence,
                    chosen=chosen_there,
                    tokens=tokens,
                    emitted=count,
                    top_tokens=lambda k: self._top_tokens(logits, verdict.accepted, plan, k)[0],
                )
            )
        observation = pack(~plan.commit_only, drafted, verdict.skipped, num_drafts, verdict.accepted, is_drafting)
        return _Decision(emitted, count, first, shift, observation)

    def _fef(
        self, logits: torch.Tensor, predicted: torch.Tensor, slots_np: np.ndarray, uses_fef: np.ndarray, plan: RowPlan
    ) -> "_Fef":
        """What the step makes of the requests that use FeF-DLLM."""
        if self.fef_rounds is None:
            self.fef_rounds = FefRounds(self)
        requests_np = np.flatnonzero(uses_fef)
        requests = async_tensor_h2d(requests_np, device=logits.device)
        advance = self.fef_rounds.advance(logits, predicted, slots_np[requests_np], requests_np, plan)
        # In a step that only commits the block before, nothing is drafted.
        return _Fef(requests, ~plan.commit_only, advance)

    def _rows(self, logits: torch.Tensor, slots_np: np.ndarray, slots: torch.Tensor, plan: RowPlan) -> _Rows:
        """The logits rows [N * L] of all branches."""
        at = plan.branches
        fields = plan.state.fields[at.requests]
        commit_only = plan.commit_only[at.requests]
        windows = plan.state.branches.view(plan.num_decodes, -1, self.window_length)
        window = windows[at.requests, at.branch]
        block = window
        if self.window_blocks > 1:
            every = torch.arange(len(window), device=window.device)
            block = window.view(len(window), -1, self.block_length)[every, at.block]
        rounds = (block != self.states.mask_token_id).sum(dim=1) + fields[:, Field.POST_STEPS]
        rounds = rounds + fields[:, Field.PASSES] * PASS_ROUND
        # The first token of the next block, as a prefill that ends before it would draw it.
        rounds = rounds * ~commit_only
        window_start = fields[:, Field.BLOCK_START]
        start = window_start + at.block * self.block_length
        positions = start.unsqueeze(1) + torch.arange(self.block_length, device=slots.device)
        return _Rows(
            logits,
            slots_np[at.requests_np],
            slots[at.requests],
            positions,
            rounds.unsqueeze(1).expand_as(positions),
            window,
            window_start,
        )

    def _by_branch(self, values: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """[D, B, W]: what is [N * L] by logits row, by the position that the row predicts."""
        values = values.view(-1, self.block_length)
        groups = plan.branches.groups
        return values.unsqueeze(1) if groups.shape[1:] == (1, 1) else values[groups].flatten(2)

    def _logits_rows(self, branch: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """[D, W] int64: logits row that predicts each position in ``branch`` [D, W] or [D, 1]."""
        offsets = torch.arange(self.window_length, device=branch.device)
        request = torch.arange(plan.num_decodes, device=branch.device).unsqueeze(1)
        groups = plan.branches.groups[request, branch, offsets // self.block_length]
        return groups * self.block_length + offsets % self.block_length

    def _params(
        self,
        fields: torch.Tensor,
        slots: torch.Tensor,
        slots_np: np.ndarray,
        branches: torch.Tensor,
        steps: torch.Tensor,
    ) -> PolicyParams:
        """Parameters of the policies for denoising ``branches`` [D, B, W], which have had ``steps`` [D, B] each.

        Returns those of D * B rows.
        """
        num_branches = steps.shape[1]
        quota, remainder = fields[:, Field.QUOTA, None], fields[:, Field.QUOTA_REMAINDER, None]
        quotas = quota_of_step(quota, remainder, steps)
        policies = self.states.policy_np[slots_np]
        paced = policies == Policy.PACED
        offsets = torch.arange(self.window_length, device=steps.device)
        is_unmasked = (branches != self.states.mask_token_id) & (offsets >= fields[:, Field.FIRST].view(-1, 1, 1))
        if paced.any():
            due = quota * (steps + 1) + torch.minimum(steps + 1, remainder)
            is_paced = (fields[:, Field.POLICY] == Policy.PACED).unsqueeze(1)
            quotas = torch.where(is_paced, (due - is_unmasked.sum(dim=2)).clamp(min=0), quotas)
        ratio = self._ratio(fields, steps)
        noise = None
        if self.states.draws_positions_np[slots_np].any():
            positions = fields[:, Field.BLOCK_START].view(-1, 1, 1) + offsets
            # Noise belongs to a position and to how far the position's own block is: what stands in other blocks of the
            # window depends on drafts.
            unmasked = is_unmasked.unflatten(2, (self.window_blocks, -1)).sum(dim=3)  # [D, B, w]
            block_steps = steps.unsqueeze(2)
            if self.window_blocks > 1:
                # `eager` allows constant quotas only, so the tokens of a block tell its steps.
                block_steps = torch.div(unmasked, quota.unsqueeze(2), rounding_mode="floor")
            # A step that unmasks nothing leaves the state as it was, and the next must draw anew.
            rounds = (unmasked + (block_steps << 32)).repeat_interleave(self.block_length, dim=2)
            seeds = self.sampling_states.seeds.gpu[slots].view(-1, 1, 1)
            noise = position_noise(seeds.expand_as(rounds), positions.expand_as(rounds), rounds, stream=0).flatten(0, 1)
        bounds = self.states.bounds.gpu[slots]
        of = [fields[:, Field.POLICY], fields[:, Field.RADIUS], *bounds.unbind(1)]
        if num_branches > 1:
            of = [values.repeat_interleave(num_branches) for values in of]
        policy, radius, threshold, entropy_bound, _, relaxed_threshold, factor, alg_temp, _ = of
        return PolicyParams(
            policy=policy,
            quota=quotas.flatten(),
            threshold=threshold,
            entropy_bound=entropy_bound,
            relaxed_threshold=relaxed_threshold,
            radius=radius,
            factor=factor,
            ratio=ratio.flatten(),
            alg_temp=alg_temp,
            noise=noise,
        )

    def _verify(
        self,
        branches: torch.Tensor,
        targets: torch.Tensor,
        levels: torch.Tensor,
        slots_np: np.ndarray,
        plan: RowPlan,
    ) -> Verdict:
        if branches.shape[1] == 1:
            nothing = torch.zeros_like(plan.state.fields[:, 0])
            return Verdict(accepted=nothing, skipped=nothing, reached=plan.branches.present)
        fields = plan.state.fields
        kinds = {Verifier(kind) for kind in set(self.states.verifier_np[slots_np].tolist())}
        return verify(
            branches,
            targets,
            plan.branches.present,
            levels,
            (fields[:, Field.QUOTA_REMAINDER] > 0)
            | (fields[:, Field.SCHEDULE] >= 0)
            | (fields[:, Field.POLICY] == Policy.PACED),
            fields[:, Field.VERIFIER],
            mask_id=self.states.mask_token_id,
            verifiers=kinds - {Verifier.NONE, Verifier.FEF},
        )

    def _is_to_draft(self, slots_np: np.ndarray, num_branches: int) -> bool:
        """Whether the step makes drafts for the next. Where the scheduler takes them all back (``auto``), few do."""
        wanted = (self.states.num_drafts_np[slots_np] > 0) & (self.states.verifier_np[slots_np] != Verifier.FEF)
        if not wanted.any():
            return False
        slots_np = slots_np[wanted]
        are_used = num_branches > 1
        pays = self._drafting.decide(are_used or bool(self.states.may_have_drafts(slots_np).any()), are_used)
        return pays or not self.states.auto_drafts_np[slots_np].all()

    def _leading_length(self, masked: torch.Tensor) -> torch.Tensor:
        """[D] int64: positions of the leading blocks of each window that are without masks."""
        whole = ~masked.view(len(masked), -1, self.block_length).any(dim=2)
        return whole.long().cumprod(dim=1).sum(dim=1) * self.block_length

    def _draft(
        self,
        root: torch.Tensor,
        available: torch.Tensor,
        predicted: torch.Tensor,
        confidence: torch.Tensor,
        entropy: torch.Tensor | None,
        margin: torch.Tensor | None,
        steps: torch.Tensor,
        rows: _Rows,
        verdict: Verdict,
        shift: torch.Tensor | None,
        batch: InputBatch,
        plan: RowPlan,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Drafts for the next forward, from the accepted branch's logits.

        Args:
            root: [D, W] int64: the window after this step.
            available: [D, W] bool: its masked positions; none of a request that drafts nothing.
            predicted, confidence, entropy, margin: [D, B, W], of all branches.
            steps: [D] int64: denoising steps that the block has had.

        Returns:
            number of drafts [D] int64, their levels [D, max_drafts] int64, their tokens [D, max_drafts * W] int64.
        """
        num_decodes, most = len(root), self.states.max_drafts
        slots_np = batch.idx_mapping_np[:num_decodes]
        fields = plan.state.fields
        present = {Policy(policy) for policy in set(self.states.policy_np[slots_np].tolist())}
        measured = (predicted, confidence, entropy, margin)
        there = [None if values is None else _pick(values, verdict) for values in measured]
        if shift is not None:
            # No logits tell of the block that moved into the window.
            known = torch.arange(self.window_length, device=root.device) < (self.window_length - shift).unsqueeze(1)
            available = available & known
            there = [None if values is None else _move(values, shift, 0) for values in there]
        tokens_there, confidence_there, entropy_there, margin_there = there
        assert tokens_there is not None and confidence_there is not None
        params = self._params(fields, batch.idx_mapping[:num_decodes], slots_np, root.unsqueeze(1), steps.unsqueeze(1))
        scores = policy_scores(available, confidence_there, entropy_there, params, margin=margin_there, present=present)
        rank = ranks(scores, self.group_length)

        ahead = torch.arange(max(most, self.window_length), device=root.device)
        quotas = quota_of_step(
            fields[:, Field.QUOTA].unsqueeze(1),
            fields[:, Field.QUOTA_REMAINDER].unsqueeze(1),
            steps.unsqueeze(1) + ahead,
        )
        if Policy.ENTROPY in present:
            # It has no quota: as many as the entropies of that step allow, of which one is certain.
            quotas = torch.where((fields[:, Field.POLICY] == Policy.ENTROPY).unsqueeze(1), 1, quotas)
        if present & TIMED_POLICIES:
            quotas = self._timed_quotas(fields, steps, available.sum(dim=1), quotas, most)
        lengths = chain_lengths(quotas)
        tokens, token_confidence = self._draft_tokens(
            root, rank, lengths, tokens_there, confidence_there, rows, verdict, shift, slots_np, plan
        )
        drafts = chain_drafts(root, available, rank, tokens, lengths[:, :most])
        uses_graph = self.states.uses_graph_np[slots_np]
        if uses_graph.any() and self.graph is not None:
            candidates, logprobs = tokens.unsqueeze(2), token_confidence.log().unsqueeze(2)
            if self.num_vocab_ranks > 1:
                candidates, logprobs = self._alternatives(tokens, token_confidence, rows.logits, verdict, shift, plan)
            of_graph = graph_drafts(root, available, rank, candidates, logprobs, lengths, self.graph, most)
            if uses_graph.all():
                drafts = of_graph
            else:
                wants = async_tensor_h2d(uses_graph, device=root.device)
                drafts = drafts._replace(
                    tokens=torch.where(wants.view(-1, 1, 1), of_graph.tokens, drafts.tokens),
                    present=torch.where(wants.unsqueeze(1), of_graph.present, drafts.present),
                    levels=torch.where(wants.unsqueeze(1), of_graph.levels, drafts.levels),
                )
        wanted = drafts.present & (ahead[:most] < fields[:, Field.MAX_DRAFTS].unsqueeze(1))
        if self.refresh_interval is not None:
            # No draft may stand for a step that is to be a refresh.
            since = (steps % self.refresh_interval).unsqueeze(1)
            wanted &= (since > 0) & (since + drafts.levels < self.refresh_interval)
        drafted = torch.where(wanted.unsqueeze(2), drafts.tokens, self.states.mask_token_id)
        return wanted.sum(dim=1), drafts.levels, drafted.flatten(1)

    def _ratio(self, fields: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """[D, n]: share of the masked positions that the requests' schedules unmask in ``steps`` [D, n]."""
        schedule, last = fields[:, Field.SCHEDULE, None], fields[:, Field.NUM_STEPS, None] - 1
        return self.states.schedules[torch.where(schedule < 0, 0, schedule + torch.minimum(steps, last))]

    def _timed_quotas(
        self, fields: torch.Tensor, steps: torch.Tensor, num_masked: torch.Tensor, quotas: torch.Tensor, num_steps: int
    ) -> torch.Tensor:
        """``quotas`` [D, n] with those of the schedules of timesteps for the next ``num_steps`` steps."""
        of_schedule = quotas.clone()
        for ahead in range(num_steps):
            ratio = self._ratio(fields, (steps + ahead).unsqueeze(1)).squeeze(1)
            of_schedule[:, ahead] = (num_masked.float() * ratio).long().clamp(min=1)
            num_masked = (num_masked - of_schedule[:, ahead]).clamp(min=0)
        return torch.where((fields[:, Field.SCHEDULE] >= 0).unsqueeze(1), of_schedule, quotas)

    def _draft_tokens(
        self,
        root: torch.Tensor,
        rank: torch.Tensor,
        lengths: torch.Tensor,
        predicted: torch.Tensor,
        confidence: torch.Tensor,
        rows: _Rows,
        verdict: Verdict,
        shift: torch.Tensor | None,
        slots_np: np.ndarray,
        plan: RowPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token of every masked position in a draft, and its probability: [D, W] each.

        What a position would be drawn as in the step that a chain fills it in: from the logits at hand, with the noise
        of that step. Without sampling there is no noise, and it is what the logits predict.
        """
        tokens = predicted
        states = self.sampling_states
        samples = (states.temperature.np[slots_np] > 0) & (self.states.num_drafts_np[slots_np] > 0)
        if not samples.any():
            return tokens, confidence
        # Unmasked positions of each position's block when a chain comes to it.
        length, width = self.block_length, self.window_blocks
        masked = (root == self.states.mask_token_id).view(-1, width, length)
        before = torch.where(lengths.unsqueeze(1) <= rank.unsqueeze(2), lengths.unsqueeze(1), 0).amax(dim=2)
        num_masked = masked.sum(dim=2)
        earlier = num_masked.cumsum(dim=1) - num_masked
        in_block = (before.view(-1, width, length) - earlier.unsqueeze(2)).clamp(min=0)
        rounds = (length - num_masked).unsqueeze(2) + in_block
        if shift is not None:
            rounds = _move(rounds.flatten(1), -shift, 0).view_as(rounds)

        window = root if shift is None else _move(root, -shift, 0)
        tokens, confidence = tokens.clone(), confidence.clone()
        sampled_np = np.flatnonzero(samples)
        # The accepted branches' logits are copied, a bounded number of them at a time.
        size = max(1, PROCESSED_VALUES // (self.window_length * rows.logits.shape[1]))
        for begin in range(0, len(sampled_np), size):
            requests_np = sampled_np[begin : begin + size]
            requests = async_tensor_h2d(requests_np, device=root.device)
            groups = plan.branches.groups[requests, verdict.accepted[requests]].flatten()  # [n * w]
            drawn = self._row_stats(
                _Rows(
                    rows.logits.view(-1, length, rows.logits.shape[1])[groups].flatten(0, 1),
                    slots_np[np.repeat(requests_np, width)],
                    rows.slots[groups],
                    rows.positions[groups],
                    rounds[requests].flatten(0, 1),
                    window[requests.repeat_interleave(width)],
                    rows.window_start[groups],
                )
            )
            for kept, values in zip((tokens, confidence), drawn[:2], strict=True):
                values = values.view(len(requests_np), -1)
                kept[requests] = values if shift is None else _move(values, shift[requests], 0)
        return tokens, confidence

    def _alternatives(
        self,
        tokens: torch.Tensor,
        confidence: torch.Tensor,
        logits: torch.Tensor,
        verdict: Verdict,
        shift: torch.Tensor | None,
        plan: RowPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of every position by vocabulary rank, ``tokens`` [D, W] first, and their log-probabilities.

        Returns [D, W, J] int64 and [D, W, J] float32.
        """
        top, top_logits = self._top_tokens(logits, verdict.accepted, plan, self.num_vocab_ranks)
        of_token = logits[
            self._logits_rows(verdict.accepted.unsqueeze(1), plan),
            tokens if shift is None else _move(tokens, -shift, 0),
        ].unsqueeze(2)
        relative = top_logits - of_token.float()
        if shift is not None:
            top, relative = _move(top, shift, 0), _move(relative, shift, 0)
        # A drawn token need not be the best one: it comes first, and once.
        again = torch.nn.functional.pad(top == tokens.unsqueeze(2), (1, 0))
        order = again.long().argsort(dim=2, stable=True)[:, :, : self.num_vocab_ranks]
        every = torch.cat((tokens.unsqueeze(2), top), dim=2).gather(2, order)
        logprobs = torch.nn.functional.pad(relative, (1, 0)).gather(2, order) + confidence.log().unsqueeze(2)
        return every, logprobs

    def _top_tokens(
        self, logits: torch.Tensor, branch: torch.Tensor, plan: RowPlan, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k best tokens of every position by the logits of ``branch`` [D], the mask token excluded.

        Returns [D, W, k] int64 and their logits, float32.
        """
        rows = self._logits_rows(branch.unsqueeze(1), plan)
        # Copied, a bounded number of logits at a time.
        size = max(1, PROCESSED_VALUES // (self.window_length * logits.shape[1]))
        parts = [logits[some].topk(k + 1, dim=2) for some in rows.split(size)]
        values, tokens = (torch.cat(part) for part in zip(*parts, strict=True))
        order = (tokens == self.states.mask_token_id).long().argsort(dim=2, stable=True)[:, :, :k]
        return tokens.gather(2, order), values.gather(2, order).float()

    def _first_tokens(self, logits: torch.Tensor, batch: InputBatch, plan: RowPlan) -> None:
        """Shifted families: the last row of a prompt that fills its blocks predicts the next block's first token."""
        requests = async_tensor_h2d(plan.first_token_requests, device=logits.device)
        slots = batch.idx_mapping[requests]
        slots_np = batch.idx_mapping_np[plan.first_token_requests]
        state = self.states.gather(slots)
        start = state.fields[:, Field.BLOCK_START]
        window = state.branches[:, : self.window_length]
        positions = start.unsqueeze(1)
        rows = _Rows(logits, slots_np, slots, positions, torch.zeros_like(positions), window, start)
        stats = self._row_stats(rows)
        branches = state.branches.clone()
        branches[:, 0] = stats.token
        self.logprobs.stash_first(slots_np, slots, logits, stats.token)
        self.states.scatter(slots, state._replace(branches=branches))

    def _row_stats(self, rows: _Rows, *, with_entropy: bool = False, with_margin: bool = False) -> RowStats:
        """Token and confidence of each row, after the sampling parameters of its request.

        Requests with parameters that reshape the distribution take the slow path, and they alone: a request's result
        must not depend on its neighbours.
        """
        num_groups = len(rows.slots_np)
        sampling = bool((self.sampling_states.temperature.np[rows.slots_np] > 0).any())
        measures = {"sampling": sampling, "with_entropy": with_entropy, "with_margin": with_margin}
        stats = self._draw(rows, **measures)
        needs_processing = np.flatnonzero(self.needs_processing_np[rows.slots_np])
        # As many groups at a time as keep the fp32 logits below PROCESSED_VALUES.
        size = max(1, PROCESSED_VALUES * num_groups // max(1, rows.logits.numel()))
        for begin in range(0, len(needs_processing), size):
            groups_np = needs_processing[begin : begin + size]
            groups = async_tensor_h2d(groups_np, device=rows.logits.device)
            part = rows.select(groups_np, groups)
            part_stats = self._draw(part._replace(logits=self._process(part)), **measures, temperature_applied=True)
            for values, part_values in zip(stats, part_stats, strict=True):
                if values is not None and part_values is not None:
                    values.view(num_groups, -1)[groups] = part_values.view(len(groups_np), -1)
        return stats

    def _draw(
        self,
        rows: _Rows,
        *,
        sampling: bool,
        with_entropy: bool,
        with_margin: bool,
        temperature_applied: bool = False,
    ) -> RowStats:
        states = self.sampling_states
        slots = rows.per_row(rows.slots) if sampling else rows.slots
        return row_stats(
            rows.logits,
            # A batch that is all greedy reads none of these.
            temperature=states.temperature.gpu[slots] if sampling else slots,
            seed=states.seeds.gpu[slots] if sampling else slots,
            position=rows.positions.flatten(),
            round_=rows.rounds.flatten() if sampling else slots,
            forbidden_token=self.states.mask_token_id,
            with_entropy=with_entropy,
            with_margin=with_margin,
            sampling=sampling,
            temperature_applied=temperature_applied,
        )

    def process_rows(
        self,
        logits: torch.Tensor,
        slots_np: np.ndarray,
        slots: torch.Tensor,
        positions: torch.Tensor,
        windows: torch.Tensor,
        window_start: torch.Tensor,
    ) -> torch.Tensor:
        """``_process`` of n single rows, [n, vocab], each with a window of its own: [n, vocab] fp32."""
        rows = _Rows(
            logits, slots_np, slots, positions.unsqueeze(1), torch.zeros_like(positions), windows, window_start
        )
        return self._process(rows)

    def _process(self, rows: _Rows) -> torch.Tensor:
        """Apply all sampling parameters but the draw itself.

        Returns [n * K, vocab] fp32, temperature included.
        """
        states, slots_np = self.sampling_states, rows.slots_np
        slots = rows.per_row(rows.slots)
        context = LogitsContext(
            expanded_idx_mapping=slots,
            idx_mapping=rows.slots,
            idx_mapping_np=slots_np,
            # Only finished blocks count as text: no row has drafts before it.
            expanded_local_pos=torch.zeros_like(slots, dtype=torch.int32),
            input_ids=rows.window[:, : rows.positions.shape[1]].flatten().int(),
            # vLLM means the position of the row, which predicts the next one.
            pos=rows.positions.flatten() - 1,
            seq_lens_upper_bound_np=np.full(len(slots_np), self.model_state.max_model_len, dtype=np.int32),
        )
        logits = rows.logits.float()
        for processor in self.logits_processors:
            logits = processor.apply(logits, context)
        logits = self.bad_words.apply(
            logits,
            slots_np,
            rows.slots,
            rows.positions,
            rows.window,
            rows.window_start,
            self.states.mask_token_id,
            self.req_states,
        )
        # The mask token is a token like any other to top-k and its like, as in the reference samplers. Only where it
        # is the most likely one it would leave no room for those that may be chosen.
        mask = logits[:, self.states.mask_token_id]
        own = mask.clone()
        mask.fill_(-torch.inf)
        best = logits.amax(dim=1)
        mask.copy_(torch.where(own < best, own, -torch.inf))
        # Parameters may leave nothing (the only allowed token is a bad word, or the mask). Then it is the first other
        # token, as in ``decoding.fef``; a law of nothing would have no confidence.
        first = logits[:, int(self.states.mask_token_id == 0)]
        first.masked_fill_(best == -torch.inf, 0.0)
        temperature = states.temperature.gpu[slots]
        logits.div_(torch.where(temperature > 0, temperature, 1.0).unsqueeze(1))
        states.apply_min_p(logits, slots, slots_np)
        return states.apply_top_k_top_p(logits, slots, slots_np)


def _pick(values: torch.Tensor, verdict: Verdict) -> torch.Tensor:
    """[D, W]: of ``values`` [D, B, W], those of the accepted branch."""
    if values.shape[1] == 1:
        return values.squeeze(1)
    index = verdict.accepted.view(-1, 1, 1).expand(-1, 1, values.shape[2])
    return values.gather(1, index).squeeze(1)


def _move(values: torch.Tensor, by: torch.Tensor, fill: int) -> torch.Tensor:
    """Columns of ``values`` [D, W, ...] moved ``by`` [D] to the left; ``fill`` comes in from the right."""
    width = values.shape[1]
    columns = torch.arange(width, device=values.device) + by.unsqueeze(1)
    outside = (columns < 0) | (columns >= width)
    index = columns.clamp(0, width - 1).view(*columns.shape, *[1] * (values.ndim - 2)).expand_as(values)
    return values.gather(1, index).masked_fill(outside.view(*outside.shape, *[1] * (values.ndim - 2)), fill)


def _graph_tensors(graph: DraftGraph, device: torch.device) -> GraphTensors:
    return GraphTensors(vocab_rank=graph.membership(device), children=graph.child_matrix(device))
