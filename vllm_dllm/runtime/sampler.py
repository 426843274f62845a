"""The decision of a denoising step: from logits to unmasked tokens, finished blocks and emitted text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.output import SamplerOutput
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

PROCESSED_VALUES = 8 << 20
"""Logits that are processed at a time (penalties, top-k, ...), which takes them in fp32: 32 MiB."""


class _Rows(NamedTuple):
    """Logits rows in the order of the plan: N of them, K from each of the requests at ``requests``."""

    logits: torch.Tensor
    """[N, vocab]."""
    slots: torch.Tensor
    """[N] int64: slot of each row's request."""
    positions: torch.Tensor
    """[N] int64: position that each row predicts."""
    step: torch.Tensor
    """[N] int64: denoising steps that the row's block has had."""


class BlockDiffusionSampler:
    """Replaces vLLM's sampler. Request state that vLLM's own sampler keeps stays there."""

    def __init__(self, model_state: "BlockDiffusionModelState", sampler: Sampler):
        self.model_state = model_state
        self.states = model_state.states
        self.traits = model_state.traits
        self.block_length = model_state.block_length
        self.sub_block_length = model_state.options.sub_block_length or self.traits.sub_block_length

        # Attributes that the runner reads of every sampler.
        self.sampling_states = sampler.sampling_states
        self.penalties_state = sampler.penalties_state
        self.logprob_token_ids_state = sampler.logprob_token_ids_state
        self.req_states = sampler.req_states
        self.compute_nans = False

        # A word may be completed from either side in a block, which vLLM's check does not know.
        self.logits_processors = [p for p in sampler.logits_processors if not isinstance(p, BadWordsState)]
        max_num_reqs, device = self.req_states.max_num_reqs, self.req_states.device
        self.bad_words = BlockBadWords(max_num_reqs, device)
        self.logprobs = LogprobsStash(max_num_reqs, self.block_length, device)
        self.needs_processing_np = np.zeros(max_num_reqs, dtype=bool)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Take the sampling parameters of a request that enters slot ``req_idx``."""
        self.sampling_states.add_request(req_idx, sampling_params)
        self.logprob_token_ids_state.add_request(req_idx, sampling_params)
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
        """Send what ``add_request`` staged to the device."""
        self.sampling_states.apply_staged_writes()
        self.logprob_token_ids_state.apply_staged_writes()
        for processor in self.logits_processors:
            processor.apply_staged_writes()

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
        sampled = torch.zeros(num_reqs, self.block_length, dtype=torch.int32, device=device)
        num_sampled = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        num_rejected = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        logprobs_tensors = None

        plan = self.model_state.plan
        if plan is not None and len(plan.first_token_requests):
            self._first_tokens(logits[plan.num_decodes * self.block_length :], input_batch, plan)
        if input_batch.num_draft_tokens > 0:
            assert plan is not None
            decodes = slice(0, plan.num_decodes)
            block_logits = logits[: plan.num_decodes * self.block_length]
            tokens, count, first = self._denoise(block_logits, input_batch, plan)
            sampled[decodes] = tokens
            num_sampled[decodes] = count
            num_rows = input_batch.query_start_loc[: plan.num_decodes + 1].diff()
            num_rejected[decodes] = num_rows - count
            logprobs_tensors = self.logprobs.emit(input_batch.idx_mapping_np[: plan.num_decodes], first, num_reqs)
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs_tensors,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _denoise(
        self, logits: torch.Tensor, batch: InputBatch, plan: RowPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One denoising step of D requests.

        Returns:
            tokens: [D, L] int32, those to emit first.
            count: [D] int32: tokens to emit; 0 unless the block is finished.
            first: [D] int64: offset of the first emitted token in its block.
        """
        length, mask = self.block_length, self.states.mask_token_id
        slots = batch.idx_mapping[: plan.num_decodes]
        slots_np = batch.idx_mapping_np[: plan.num_decodes]
        fields, tokens, finished = plan.state
        step, first = fields[:, Field.STEP].long(), fields[:, Field.FIRST].long()
        commit_only = plan.commit_only.unsqueeze(1)
        offsets = torch.arange(length, device=tokens.device)
        masked = tokens == mask

        # Tokens and confidences. A row predicts its own position or, in shifted families, the next one.
        start = fields[:, Field.BLOCK_START].long() - plan.commit_only * length
        positions = (start.unsqueeze(1) + offsets).flatten() + self.traits.shifted
        rows = _Rows(logits, slots.repeat_interleave(length), positions, step.repeat_interleave(length))
        present = {Policy(int(p)) for p in np.unique(self.states.policy_np[slots_np])}
        stats = self._row_stats(rows, slots_np, plan.state, with_entropy=Policy.ENTROPY in present)
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
            quota=quota_of_step(fields[:, Field.QUOTA].long(), fields[:, Field.QUOTA_REMAINDER].long(), step),
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
            editable = ~masked & ~commit_only & (offsets >= first.unsqueeze(1))
            edited = edits(tokens, predicted, confidence, editable, bounds[:, EDIT_THRESHOLD])
            chosen = chosen | edited
        self.logprobs.stash(slots_np, slots, logits, predicted, chosen, shifted=self.traits.shifted)
        tokens = torch.where(chosen, predicted.int(), tokens)

        # Is the block finished, and what is there to emit?
        done = ~(tokens == mask).any(dim=1) & ~plan.commit_only
        post_steps = fields[:, Field.POST_STEPS]
        if editing:
            # A block without masks gets another look until it edits nothing or has had its post-edit steps.
            max_post_steps = fields[:, Field.MAX_POST_STEPS]
            looked = ~masked.any(dim=1)
            post_steps = post_steps + looked.int()
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
        room = self.model_state.max_model_len - self.req_states.total_len.gpu[slots].long()
        count = torch.minimum(count, room)
        emitted = tokens.gather(1, (first.unsqueeze(1) + offsets).clamp(max=length - 1))

        # Next state.
        fields = fields.clone()
        done_int = done.int()
        fields[:, Field.BLOCK_START] += length * done_int
        fields[:, Field.FIRST] *= 1 - done_int
        if self.traits.shifted:
            fields[:, Field.FIRST] += plan.commit_only.int()
        fields[:, Field.STEP] = (step.int() + (~plan.commit_only).int()) * (1 - done_int)
        fields[:, Field.POST_STEPS] = post_steps * (1 - done_int)
        fields[:, Field.COMMIT] = done_int
        done_rows = done.unsqueeze(1)
        self.states.scatter(
            slots,
            BlockState(
                fields=fields,
                tokens=torch.where(done_rows, mask, tokens),
                finished=torch.where(done_rows, tokens, finished),
            ),
        )
        return emitted, count.int(), first

    def _first_tokens(self, logits: torch.Tensor, batch: InputBatch, plan: RowPlan) -> None:
        """Shifted families: the last row of a prompt that fills its blocks predicts the next block's first token."""
        requests = async_tensor_h2d(plan.first_token_requests, device=logits.device)
        slots = batch.idx_mapping[requests]
        slots_np = batch.idx_mapping_np[plan.first_token_requests]
        state = self.states.gather(slots)
        positions = state.fields[:, Field.BLOCK_START].long()
        rows = _Rows(logits, slots, positions, torch.zeros_like(positions))
        stats = self._row_stats(rows, slots_np, state, with_entropy=False)
        tokens = state.tokens.clone()
        tokens[:, 0] = stats.token.int()
        self.logprobs.stash_first(slots_np, slots, logits, stats.token)
        self.states.scatter(slots, state._replace(tokens=tokens))

    def _row_stats(self, rows: _Rows, slots_np: np.ndarray, state: BlockState, *, with_entropy: bool) -> RowStats:
        """Token and confidence of each row, after the sampling parameters of its request.

        Requests with parameters that reshape the distribution take the slow path, and they alone: a request's result
        must not depend on its neighbours.
        """
        sampling = bool((self.sampling_states.temperature.np[slots_np] > 0).any())
        stats = self._draw(rows, sampling=sampling, with_entropy=with_entropy)
        needs_processing = np.flatnonzero(self.needs_processing_np[slots_np])
        for requests_np in self._chunks(needs_processing, rows, len(slots_np)):
            part = self._select(rows, requests_np, len(slots_np))
            requests = async_tensor_h2d(requests_np, device=rows.logits.device)
            block_start = state.fields[requests, Field.BLOCK_START].long()
            processed = self._process(part, slots_np[requests_np], state.tokens[requests], block_start)
            part_stats = self._draw(
                part._replace(logits=processed),
                sampling=sampling,
                with_entropy=with_entropy,
                temperature_applied=True,
            )
            for values, part_values in zip(stats, part_stats, strict=True):
                if values is not None and part_values is not None:
                    values.view(len(slots_np), -1)[requests] = part_values.view(len(requests_np), -1)
        return stats

    def _draw(self, rows: _Rows, *, sampling: bool, with_entropy: bool, temperature_applied: bool = False) -> RowStats:
        states = self.sampling_states
        return row_stats(
            rows.logits,
            # Unread by a batch that is all greedy.
            temperature=states.temperature.gpu[rows.slots] if sampling else rows.positions,
            seed=states.seeds.gpu[rows.slots] if sampling else rows.positions,
            position=rows.positions,
            round_=rows.step,
            forbidden_token=self.states.mask_token_id,
            with_entropy=with_entropy,
            sampling=sampling,
            temperature_applied=temperature_applied,
        )

    @staticmethod
    def _chunks(requests_np: np.ndarray, rows: _Rows, num_requests: int) -> Iterator[np.ndarray]:
        """Requests to process at a time, so that their fp32 logits stay below ``PROCESSED_VALUES``."""
        values_per_request = rows.logits.numel() // num_requests
        size = max(1, PROCESSED_VALUES // values_per_request)
        for begin in range(0, len(requests_np), size):
            yield requests_np[begin : begin + size]

    @staticmethod
    def _select(rows: _Rows, requests_np: np.ndarray, num_requests: int) -> _Rows:
        """The rows of some requests. Logits come out in fp32, as a copy that processing may overwrite."""
        per_request = rows.logits.shape[0] // num_requests
        index_np = (requests_np[:, None] * per_request + np.arange(per_request)).ravel()
        index = async_tensor_h2d(index_np, device=rows.logits.device)
        return _Rows(rows.logits[index].float(), rows.slots[index], rows.positions[index], rows.step[index])

    def _process(
        self, rows: _Rows, slots_np: np.ndarray, tokens: torch.Tensor, block_start: torch.Tensor
    ) -> torch.Tensor:
        """Apply all sampling parameters but the draw itself to the rows of n requests.

        Args:
            tokens, block_start: [n, L] and [n]: current block of each request.

        Returns:
            [N, vocab] fp32, temperature included.
        """
        states = self.sampling_states
        zeros = torch.zeros_like(rows.slots, dtype=torch.int32)
        context = LogitsContext(
            expanded_idx_mapping=rows.slots,
            idx_mapping=rows.slots[:: rows.slots.shape[0] // len(slots_np)],
            idx_mapping_np=slots_np,
            # Only finished blocks count as text: no row has drafts before it.
            expanded_local_pos=zeros,
            input_ids=zeros,
            # vLLM means the position of the row, which predicts the next one.
            pos=rows.positions - 1,
            seq_lens_upper_bound_np=np.full(len(slots_np), self.model_state.max_model_len, dtype=np.int32),
        )
        logits = rows.logits
        for processor in self.logits_processors:
            logits = processor.apply(logits, context)
        logits = self.bad_words.apply(
            logits,
            slots_np,
            context.idx_mapping,
            rows.positions,
            tokens,
            block_start,
            self.states.mask_token_id,
            self.req_states,
        )
        # The mask token must not take a place among the top k.
        logits[:, self.states.mask_token_id] = -torch.inf
        temperature = states.temperature.gpu[rows.slots]
        logits.div_(torch.where(temperature > 0, temperature, 1.0).unsqueeze(1))
        states.apply_min_p(logits, rows.slots, slots_np)
        return states.apply_top_k_top_p(logits, rows.slots, slots_np)
