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

from vllm_dllm.decoding.policies import (
    Policy,
    PolicyParams,
    edits,
    quota_of_step,
    stop_length,
    sub_block_candidates,
    unmask,
)
from vllm_dllm.kernels.confidence import RowStats, row_stats
from vllm_dllm.runtime.bad_words import BlockBadWords
from vllm_dllm.runtime.logprobs import LogprobsStash
from vllm_dllm.runtime.row_plan import RowPlan
from vllm_dllm.runtime.states import EDIT_THRESHOLD, ENTROPY_BOUND, THRESHOLD, BlockState, Field

if TYPE_CHECKING:
    from vllm_dllm.runtime.model_state import BlockDiffusionModelState

PROCESSED_VALUES = 16 << 20
"""Logits that are processed at a time (penalties, top-k, ...), which takes them in fp32: 64 MiB."""


class _Rows(NamedTuple):
    """Logits rows of n requests, K of each."""

    logits: torch.Tensor
    """[n * K, vocab]."""
    slots_np: np.ndarray
    """[n] slots of the requests, on the host."""
    slots: torch.Tensor
    """[n] int64."""
    positions: torch.Tensor
    """[n, K] int64: position that each row predicts."""
    step: torch.Tensor
    """[n] int64: denoising steps that the request's block has had."""

    def per_row(self, values: torch.Tensor) -> torch.Tensor:
        """[n * K]: what is [n] by request, by row."""
        return values.unsqueeze(1).expand_as(self.positions).flatten()

    def select(self, requests_np: np.ndarray, requests: torch.Tensor) -> "_Rows":
        """The rows of some of the requests; the logits are copied."""
        logits = self.logits.view(len(self.slots_np), -1, self.logits.shape[1])[requests].flatten(0, 1)
        return _Rows(
            logits, self.slots_np[requests_np], self.slots[requests], self.positions[requests], self.step[requests]
        )


class BlockDiffusionSampler:
    """Replaces vLLM's sampler. Request state that vLLM's own sampler keeps stays there."""

    def __init__(self, model_state: "BlockDiffusionModelState", sampler: Sampler):
        self.model_state = model_state
        self.states = model_state.states
        self.traits = model_state.traits
        self.block_length = model_state.block_length
        self.sub_block_length = model_state.options.sub_block_length

        # Attributes that the runner reads of every sampler.
        self.sampling_states = sampler.sampling_states
        self.penalties_state = sampler.penalties_state
        self.req_states = sampler.req_states
        self.compute_nans = False

        # A word may be completed from either side in a block, which vLLM's check does not know.
        self.logits_processors = [p for p in sampler.logits_processors if not isinstance(p, BadWordsState)]
        max_num_reqs, device = self.req_states.max_num_reqs, self.req_states.device
        self.bad_words = BlockBadWords(max_num_reqs, device)
        self.logprobs = LogprobsStash(max_num_reqs, self.block_length, device)
        self.needs_processing_np = np.zeros(max_num_reqs, dtype=bool)
        self._staged = True

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Take the sampling parameters of a request that enters slot ``req_idx``."""
        self._staged = True
        self.sampling_states.add_request(req_idx, sampling_params)
        processed = [p.add_request(req_idx, sampling_params) for p in self.logits_processors]
        self.bad_words.add_request(req_idx, sampling_params.bad_words_token_ids or [])
        self.logprobs.add_request(req_idx, sampling_params.logprobs)
        states = self.sampling_states
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
        """Advance every decoding request of the batch by one denoising step.

        Args:
            logits: [D * L + P, vocab] of ``RowPlan.logits_rows``.

        Returns:
            Tokens of the requests whose block was finished by this step, none for the others.
        """
        num_reqs, device = input_batch.num_reqs, logits.device
        plan = self.model_state.plan
        num_decodes = 0 if plan is None or input_batch.num_draft_tokens == 0 else plan.num_decodes
        if plan is not None and len(plan.first_token_requests):
            self._first_tokens(logits[num_decodes * self.block_length :], input_batch, plan)
        logprobs_tensors = None
        # Requests that prefill, behind those that decode, sample and reject nothing.
        sampled = torch.zeros(num_reqs - num_decodes, self.block_length, dtype=torch.int64, device=device)
        num_sampled = num_rejected = torch.zeros(num_reqs - num_decodes, dtype=torch.int64, device=device)
        if plan is not None and num_decodes:
            tokens, count, first = self._denoise(logits[: num_decodes * self.block_length], input_batch, plan)
            rejected = input_batch.query_start_loc[: num_decodes + 1].diff() - count
            logprobs_tensors = self.logprobs.emit(input_batch.idx_mapping_np[:num_decodes], first, num_reqs)
            if num_decodes == num_reqs:
                sampled, num_sampled, num_rejected = tokens, count, rejected
            else:
                sampled = torch.cat((tokens, sampled))
                num_sampled, num_rejected = torch.cat((count, num_sampled)), torch.cat((rejected, num_rejected))
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs_tensors,
            num_nans=None,
            num_sampled=num_sampled.int(),
            num_rejected=num_rejected.int(),
        )

    def _denoise(
        self, logits: torch.Tensor, batch: InputBatch, plan: RowPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One denoising step of D requests.

        Returns:
            tokens: [D, L] int64, those to emit first.
            count: [D] int64: tokens to emit; 0 unless the block is finished.
            first: [D] int64: offset of the first emitted token in its block.
        """
        length, mask = self.block_length, self.states.mask_token_id
        slots = batch.idx_mapping[: plan.num_decodes]
        slots_np = batch.idx_mapping_np[: plan.num_decodes]
        fields, tokens, finished = plan.state
        step, first = fields[:, Field.STEP], fields[:, Field.FIRST]
        commit_only = plan.commit_only.unsqueeze(1)
        offsets = torch.arange(length, device=tokens.device)
        # A mask token in the prompt is a token like any other: what it stands for is not for us to write.
        generated = offsets >= first.unsqueeze(1)
        masked = (tokens == mask) & generated

        # Tokens and confidences. A row predicts its own position or, in shifted families, the next one.
        start = fields[:, Field.BLOCK_START] - plan.commit_only * length + self.traits.shifted
        rows = _Rows(logits, slots_np, slots, start.unsqueeze(1) + offsets, step)
        present = {Policy(policy) for policy in set(self.states.policy_np[slots_np].tolist())}
        stats = self._row_stats(rows, plan.state, with_entropy=Policy.ENTROPY in present)
        predicted = stats.token.view(-1, length)
        confidence = stats.confidence.view(-1, length)
        entropy = None if stats.entropy is None else stats.entropy.view(-1, length)
        if self.traits.shifted:
            # The last row of a block being committed predicts the first token of the current one.
            predicted, confidence = predicted.roll(1, 1), confidence.roll(1, 1)
            entropy = None if entropy is None else entropy.roll(1, 1)

        # Which positions to unmask.
        candidates = masked & ~commit_only
        if self.sub_block_length is not None:
            candidates = sub_block_candidates(candidates, self.sub_block_length)
        bounds = self.states.bounds.gpu[slots]
        params = PolicyParams(
            policy=fields[:, Field.POLICY],
            quota=quota_of_step(fields[:, Field.QUOTA], fields[:, Field.QUOTA_REMAINDER], step),
            threshold=bounds[:, THRESHOLD],
            entropy_bound=bounds[:, ENTROPY_BOUND],
        )
        chosen = unmask(
            candidates,
            confidence,
            entropy,
            params,
            threshold_inclusive=self.traits.threshold_inclusive,
            present=present,
        )
        if self.traits.shifted:
            chosen = torch.where(commit_only, offsets == 0, chosen)
        editing = bool(self.states.editing_np[slots_np].any())
        if editing:
            editable = ~masked & ~commit_only & generated
            edited = edits(tokens, predicted, confidence, editable, bounds[:, EDIT_THRESHOLD])
            chosen = chosen | edited
        self.logprobs.stash(slots_np, slots, logits, predicted, chosen, shifted=self.traits.shifted)
        tokens = torch.where(chosen, predicted, tokens)

        # Is the block finished, and what is there to emit?
        done = ~((tokens == mask) & generated).any(dim=1) & ~plan.commit_only
        post_steps = fields[:, Field.POST_STEPS]
        if editing:
            # A block without masks gets another look until it edits nothing or has had its post-edit steps.
            max_post_steps = fields[:, Field.MAX_POST_STEPS]
            looked = ~masked.any(dim=1)
            post_steps = post_steps + looked
            settled = looked & (~edited.any(dim=1) | (post_steps >= max_post_steps))
            edits_on = bounds[:, EDIT_THRESHOLD] != torch.inf
            done = done & (~edits_on | (max_post_steps == 0) | settled)
        count = torch.where(done, length - first, 0)
        if self.traits.shifted:
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
            count = torch.where(stopped > 0, stopped, count)
        # The last block may reach beyond max_model_len.
        room = self.model_state.max_model_len - self.req_states.total_len.gpu[slots]
        count = torch.minimum(count, room)
        emitted = tokens.gather(1, (first.unsqueeze(1) + offsets).clamp(max=length - 1))

        # Next state. A finished block makes way for the next, and is to be committed.
        going_on = ~done
        next_first = first + plan.commit_only if self.traits.shifted else first
        changed = (
            fields[:, Field.BLOCK_START] + done * length,
            next_first * going_on,
            (step + ~plan.commit_only) * going_on,
            post_steps * going_on,
            done,
        )
        fields = torch.cat((torch.stack(changed, dim=1), fields[:, len(changed) :]), dim=1)
        done_rows = done.unsqueeze(1)
        self.states.scatter(
            slots,
            BlockState(
                fields=fields,
                tokens=torch.where(done_rows, mask, tokens),
                finished=torch.where(done_rows, tokens, finished),
            ),
        )
        return emitted, count, first

    def _first_tokens(self, logits: torch.Tensor, batch: InputBatch, plan: RowPlan) -> None:
        """Shifted families: the last row of a prompt that fills its blocks predicts the next block's first token."""
        requests = async_tensor_h2d(plan.first_token_requests, device=logits.device)
        slots = batch.idx_mapping[requests]
        slots_np = batch.idx_mapping_np[plan.first_token_requests]
        state = self.states.gather(slots)
        positions = state.fields[:, Field.BLOCK_START]
        rows = _Rows(logits, slots_np, slots, positions.unsqueeze(1), torch.zeros_like(positions))
        stats = self._row_stats(rows, state, with_entropy=False)
        tokens = state.tokens.clone()
        tokens[:, 0] = stats.token
        self.logprobs.stash_first(slots_np, slots, logits, stats.token)
        self.states.scatter(slots, state._replace(tokens=tokens))

    def _row_stats(self, rows: _Rows, state: BlockState, *, with_entropy: bool) -> RowStats:
        """Token and confidence of each row, after the sampling parameters of its request.

        Requests with parameters that reshape the distribution take the slow path, and they alone: a request's result
        must not depend on its neighbours.
        """
        num_requests = len(rows.slots_np)
        sampling = bool((self.sampling_states.temperature.np[rows.slots_np] > 0).any())
        stats = self._draw(rows, sampling=sampling, with_entropy=with_entropy)
        needs_processing = np.flatnonzero(self.needs_processing_np[rows.slots_np])
        # As many requests at a time as keep the fp32 logits below PROCESSED_VALUES.
        size = max(1, PROCESSED_VALUES * num_requests // max(1, rows.logits.numel()))
        for begin in range(0, len(needs_processing), size):
            requests_np = needs_processing[begin : begin + size]
            requests = async_tensor_h2d(requests_np, device=rows.logits.device)
            part = rows.select(requests_np, requests)
            part_state = BlockState(*(values[requests] for values in state))
            part_stats = self._draw(
                part._replace(logits=self._process(part, part_state)),
                sampling=sampling,
                with_entropy=with_entropy,
                temperature_applied=True,
            )
            for values, part_values in zip(stats, part_stats, strict=True):
                if values is not None and part_values is not None:
                    values.view(num_requests, -1)[requests] = part_values.view(len(requests_np), -1)
        return stats

    def _draw(self, rows: _Rows, *, sampling: bool, with_entropy: bool, temperature_applied: bool = False) -> RowStats:
        states = self.sampling_states
        slots = rows.per_row(rows.slots) if sampling else rows.slots
        return row_stats(
            rows.logits,
            # A batch that is all greedy reads none of these.
            temperature=states.temperature.gpu[slots] if sampling else slots,
            seed=states.seeds.gpu[slots] if sampling else slots,
            position=rows.positions.flatten(),
            round_=rows.per_row(rows.step) if sampling else slots,
            forbidden_token=self.states.mask_token_id,
            with_entropy=with_entropy,
            sampling=sampling,
            temperature_applied=temperature_applied,
        )

    def _process(self, rows: _Rows, state: BlockState) -> torch.Tensor:
        """Apply all sampling parameters but the draw itself.

        Returns [n * K, vocab] fp32, temperature included.

        Args:
            rows: of n requests.
            state: of the same.
        """
        states, slots_np = self.sampling_states, rows.slots_np
        slots = rows.per_row(rows.slots)
        context = LogitsContext(
            expanded_idx_mapping=slots,
            idx_mapping=rows.slots,
            idx_mapping_np=slots_np,
            # Only finished blocks count as text: no row has drafts before it.
            expanded_local_pos=torch.zeros_like(slots, dtype=torch.int32),
            input_ids=state.tokens[:, : rows.positions.shape[1]].flatten().int(),
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
            state.tokens,
            state.fields[:, Field.BLOCK_START],
            self.states.mask_token_id,
            self.req_states,
        )
        # The mask token must not take a place among the top k.
        logits[:, self.states.mask_token_id] = -torch.inf
        temperature = states.temperature.gpu[slots]
        logits.div_(torch.where(temperature > 0, temperature, 1.0).unsqueeze(1))
        states.apply_min_p(logits, slots, slots_np)
        return states.apply_top_k_top_p(logits, slots, slots_np)
