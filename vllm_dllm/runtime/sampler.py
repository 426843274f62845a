"""vLLM's sampler hook: takes a step's logits through measure, choose, verify, finish and draft.

The algorithm is in ``vllm_dllm.decoding.step``; here requests are partitioned by how they decode, their next state is
stored, and what they emit goes to vLLM.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_dllm.decoding.draft_graph import DraftGraph
from vllm_dllm.decoding.grammar import Drafted
from vllm_dllm.decoding.records import Rules
from vllm_dllm.decoding.step import Origin
from vllm_dllm.decoding.verifiers import AUTOREGRESSIVE, Verifier
from vllm_dllm.geometry import Geometry
from vllm_dllm.observe.recorder import Recorder, Round
from vllm_dllm.options.resolve import options_of
from vllm_dllm.runtime.autoregressive_rounds import IsdRounds, LinearSpecRounds
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.emission import Emission, add_prefills
from vllm_dllm.runtime.fef_rounds import FefRounds
from vllm_dllm.runtime.logits.grammar import GrammarRows
from vllm_dllm.runtime.logits.logprobs import LogprobsStash
from vllm_dllm.runtime.logits.rows import DRAFT_VALUES, PROCESSED_VALUES, LogitsReader, RowGroups
from vllm_dllm.runtime.logits.step import StepLogits, place_draws_of_drafts, place_rows
from vllm_dllm.runtime.logits.step_maps import StepMaps
from vllm_dllm.runtime.parts import Advance, Forward, Part
from vllm_dllm.runtime.plan.rows import RowPlan, Sight
from vllm_dllm.runtime.policy_params import PolicyParamsBuilder
from vllm_dllm.runtime.policy_rounds import PolicyRounds
from vllm_dllm.runtime.s2d2_rounds import S2D2Rounds
from vllm_dllm.runtime.states import BatchOptions, DenoiseStates
from vllm_dllm.runtime.thinking import ThinkingBudgets, with_given


class BlockDiffusionSampler:
    """Replaces vLLM's sampler. Request state that vLLM's own sampler keeps stays there."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        states: DenoiseStates,
        geometry: Geometry,
        model: nn.Module,
        max_model_len: int,
        draft_graph: DraftGraph | None,
        plan_of_step: Callable[[], RowPlan | None],
        has_cache: Callable[[], bool],
        stages: Stages,
        thinking: ThinkingBudgets,
    ):
        """Takes the place of ``sampler``.

        Args:
            plan_of_step: gives the plan of the forward before.
            has_cache: tells whether there is a K/V cache. Before there is one, vLLM profiles its memory.
        """
        self.states, self.thinking, self.stages = states, thinking, stages
        self.plan_of_step, self.has_cache = plan_of_step, has_cache
        self.model = model
        self.geometry = geometry
        traits, options = geometry.traits, geometry.options
        self.full_attention = traits.sees_whole_text
        self.recorder: Recorder | None = None
        several_blocks = states.window_length > states.block_length
        self.rules = Rules(
            mask_id=states.mask_token_id,
            block_length=states.block_length,
            columns=torch.arange(states.window_length, device=states.device),
            group_length=options.sub_block_length or (states.block_length if several_blocks else None),
            first_apart=traits.shifted or traits.commit_predicts,
            commit_emits=traits.commit_predicts,
            threshold_inclusive=traits.threshold_inclusive,
            most_branches=1 + states.max_drafts,
            strides=traits.verifier == "isd",
            may_give=thinking.markers is not None,
        )
        self.reader = LogitsReader(sampler, max_model_len, stages, self.rules)
        params = PolicyParamsBuilder(states, sampler.sampling_states, self.rules)
        self.autoregressive_rounds = (IsdRounds if self.rules.strides else LinearSpecRounds)(params, thinking, stages)
        self.policy_rounds = PolicyRounds(
            params,
            draft_graph,
            options.refresh_interval if self.full_attention else None,
            stages,
        )
        self.grammar = GrammarRows(model, states, self.rules, plan_of_step, self._logits_of)
        # Of the step whose logits are guided already.
        self._guided: RowPlan | None = None
        self._place_stages = stages.stage(place_rows), stages.stage(place_draws_of_drafts)
        self._step_stage, self._conclude_stage = stages.stage(self._step), stages.stage(self._conclude)
        self._add_prefills_stage = stages.stage(add_prefills)
        # Attributes that the runner reads of every sampler.
        self.sampling_states = sampler.sampling_states
        self.penalties_state = sampler.penalties_state
        self.req_states = thinking.req_states = sampler.req_states
        self.compute_nans = False
        self.logprobs = LogprobsStash(
            self.req_states.max_num_reqs, states.window_length, sampler.logprobs_mode, self.req_states.device
        )
        self.step_maps = StepMaps(self.req_states.max_num_reqs, self.rules, self.req_states.device)
        # What a step emits in which no request decodes.
        nobody = self.rules.columns[:0]
        tokens = nobody.view(0, states.window_length)
        self._nothing = Emission(tokens, nobody.int(), nobody.int(), nobody, None, nobody.int())

    @cached_property
    def fef_rounds(self) -> FefRounds:
        """Made for the first request that decodes with FeF."""
        traits, cache = self.geometry.traits, self.geometry.options.cache
        is_fixed = traits.commit_predicts or (self.full_attention and traits.shifted and cache != "none")
        return FefRounds(self.states, self.model, self.rules, self.stages, first_position_is_fixed=is_fixed)

    @cached_property
    def s2d2_rounds(self) -> S2D2Rounds:
        """Made for the first request that decodes with S2D2."""
        return S2D2Rounds(self.policy_rounds.params, self.model, self.stages, shifted=self.geometry.traits.shifted)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Take the sampling parameters of a request that enters slot ``req_idx``."""
        if not self.has_cache():
            # vLLM 0.33 profiles with a request for every row of logits, and there are more of these than slots.
            return
        options = options_of(sampling_params, self.geometry)
        self.reader.add_request(req_idx, sampling_params, options)
        self.step_maps.add_request(req_idx, options.step_map or options.step_events)
        self.logprobs.add_request(req_idx, sampling_params.logprobs)

    def kept_by_position(self) -> tuple[Tensor, ...]:
        """Tensors [max_num_reqs, W, ...] that tell of the positions of every request's window."""
        stash = self.logprobs
        return self.step_maps.kept, stash.token_ids, stash.logprobs, stash.ranks

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` staged to the device; vLLM calls this in every step."""
        self.reader.apply_staged_writes()

    def __call__(self, logits: Tensor, input_batch: InputBatch, draft_logits: Tensor | None = None) -> SamplerOutput:
        """Advance every decoding request of the batch by one denoising step, and by those that drafts let it skip.

        Args:
            logits: [N * L + P + T, vocab] of ``RowPlan.logits_rows``; may change.

        Returns:
            Tokens of the requests whose block was finished by this step, none for the others.
        """
        num_reqs, plan = input_batch.num_reqs, self.plan_of_step()
        emission, logprobs = self._nothing, None
        if not self.has_cache():
            self._take_memory(logits)
        if plan is not None:
            num_rows = len(plan.run_requests_np) * self.rules.block_length
            self._guide(logits, plan)
            if len(plan.first_token_requests):
                self._first_tokens(logits[num_rows:], input_batch, plan)
            if input_batch.num_draft_tokens:
                emission, logprobs = self._denoise(logits, input_batch, plan)
        self.grammar.end_step()
        num_decodes = len(emission.count)
        if num_decodes < num_reqs:
            add = self._add_prefills_stage if num_decodes else add_prefills
            emission = add(emission, input_batch.query_start_loc[: num_reqs + 1], self.full_attention)
        return SamplerOutput(
            sampled_token_ids=emission.tokens,
            logprobs_tensors=logprobs,
            num_nans=emission.observation if num_decodes else None,
            num_sampled=emission.count,
            num_rejected=emission.rejected,
        )

    def _take_memory(self, logits: Tensor) -> None:
        """Take about as much as steps do, for vLLM to see before the K/V cache gets the rest."""
        if logits.device.type == "cpu":
            # There vLLM counts what the process has in the end, and would count this as lost.
            return
        drafts = logits.new_empty(DRAFT_VALUES if self.states.max_drafts else 0)
        self.reader.take_memory(logits)
        del drafts

    def _guide(self, logits: Tensor, plan: RowPlan) -> None:
        """Put guided logits in the place of those of the text, once per step."""
        if plan.guidance is not None and plan is not self._guided:
            plan.guidance.apply(logits, PROCESSED_VALUES)
            self._guided = plan

    def _logits_of(self, logits: Tensor, plan: RowPlan, options: BatchOptions) -> StepLogits:
        """The logits [rows, vocab] of a step of the requests with these ``options``."""
        self._guide(logits, plan)
        num_rows = len(plan.run_requests_np) * self.rules.block_length
        return StepLogits(
            self.reader, logits[:num_rows], options, plan, self.rules, self.states.unpack, *self._place_stages
        )

    def _denoise(self, logits: Tensor, batch: InputBatch, plan: RowPlan) -> tuple[Emission, LogprobsTensors | None]:
        """One denoising step of D requests with up to B branches each."""
        slots_np = batch.idx_mapping_np[: plan.num_decodes]
        options = self.states.options_of(slots_np, batch.idx_mapping[: plan.num_decodes])
        whole = Part.whole(self._logits_of(logits, plan, options))
        is_structured = options.asked["structured"] > 0
        if is_structured.any() and self.reader.needs_processing_np[slots_np[is_structured]].any():
            self.grammar.overrule(logits, whole.stats, self.grammar.rows)
        kinds, query_start_loc = options.kinds, batch.query_start_loc[: batch.num_reqs + 1]
        parts = [whole] if len(kinds) == 1 else [whole.of(which, self.states) for which in kinds]
        drafts = [self.policy_rounds.is_to_draft(part) for part in parts]
        emissions = [
            self._advance(part, makes_drafts, any(drafts), query_start_loc, batch.req_ids)
            for part, makes_drafts in zip(parts, drafts, strict=True)
        ]
        self.states.copy_draft_counts()
        emission = emissions[0]
        if len(parts) > 1:
            order = np.argsort(np.concatenate(kinds))
            emission = Emission.cat(emissions).select(async_tensor_h2d(order, device=logits.device))
        logprobs = self.logprobs.emit(slots_np, emission.first, emission.shift, batch.num_reqs, self.step_maps)
        return emission, logprobs

    def _advance(
        self, part: Part, makes_drafts: bool, drafting: bool, query_start_loc: Tensor, req_ids: list[str]
    ) -> Emission:
        """Take requests that decode the same way to their next state, and say what they emit.

        Args:
            makes_drafts: by a policy's order, for the next step.
            drafting: as in ``Emission.of``.
            query_start_loc: [R + 1] int32: first row of every request of the step.
        """
        options = part.options
        with_origin = self.logprobs.wanted(options.slots_np) or self.step_maps.wanted(options.slots_np)
        if Verifier.FEF in options.verifiers:
            step = self.fef_rounds.advance(part)
        elif Verifier.S2D2 in options.verifiers:
            step = self.s2d2_rounds.advance(part)
        elif options.verifiers & AUTOREGRESSIVE:
            part = part.without_drafts()
            step = self.autoregressive_rounds.advance(part)
        else:
            drafted = None
            if options.asked["structured"].any():
                part, drafted = part.without_drafts(), self.grammar.drafted(part.requests_np, options)
            is_looked_at = self.recorder is not None or self.thinking.markers is not None
            if options.compares_only and not makes_drafts and not is_looked_at:
                emission, tokens_and_origin = self._step_stage(
                    part.forward, part.requests, query_start_loc, drafting, drafted, with_origin
                )
                if tokens_and_origin is not None:
                    self.logprobs.keep(part, *tokens_and_origin)
                return emission
            step = self.policy_rounds.advance(part, drafted, drafting=makes_drafts, with_origin=with_origin)
        if self.thinking.among(options.slots_np) and not options.verifiers & AUTOREGRESSIVE:
            step = self.thinking.begin_blocks(part, step)
            if step.origin is not None:
                step = replace(step, origin=with_given(step.origin, part.seen.window, self.rules))
        if step.origin is not None:
            self.logprobs.keep(part, step.accepted.tokens, step.origin)
            if self.step_maps.wanted(options.slots_np):
                self.step_maps.note(options.slots, step.accepted.tokens, step.origin.written, step.origin.step)
        if self.recorder is not None:
            self.recorder(_round(part, step, req_ids))
        return self._conclude_stage(part.sight, part.requests, query_start_loc, replace(step, origin=None), drafting)

    def _step(
        self,
        forward: Forward,
        requests: Tensor,
        query_start_loc: Tensor,
        drafting: bool,
        drafted: Drafted | None,
        with_origin: bool,
    ) -> tuple[Emission, tuple[Tensor, Origin] | None]:
        """A whole step of requests that decode by their policy and make no drafts, in one stage.

        Args:
            requests: [F] int64: which of the step's requests.
            query_start_loc, drafting: as for ``_advance``.
            drafted: of requests that are all structured.
            with_origin: tell the tokens of their windows, [F, W] int64, and where these come from.
        """
        decided = self.policy_rounds.decide(
            forward, with_origin=with_origin, drafting=False, drawing=False, drafted=drafted
        )
        step = Advance(decided.accepted, decided.finished, None)
        emission = self._conclude(forward.sight, requests, query_start_loc, step, drafting)
        tokens, origin = decided.accepted.tokens, decided.origin
        if origin is None:
            return emission, None
        # One compiled form serves requests with and without step maps.
        if torch.compiler.is_compiling() or self.step_maps.wanted(forward.options.slots_np):
            self.step_maps.note(forward.sight.slots, tokens, origin.written, origin.step)
        return emission, (tokens, origin)

    def _conclude(
        self, sight: Sight, requests: Tensor, query_start_loc: Tensor, step: Advance, drafting: bool
    ) -> Emission:
        """Store the next state of requests, and say what they emit; arguments as for ``_step``."""
        finished = step.finished
        self.states.put(sight.slots, finished.progress, finished.before, finished.tokens, step.drafts, step.levels)
        num_rows = query_start_loc[1:][requests] - query_start_loc[requests]
        emission = Emission.of(sight, self.states.unpack(sight.state).progress.first, num_rows, step, drafting)
        # With full attention, vLLM's counter of computed tokens stays at 0.
        return replace(emission, rejected=num_rows) if self.full_attention else emission

    def _first_tokens(self, logits: Tensor, batch: InputBatch, plan: RowPlan) -> None:
        """With ``commit_predicts``: the last row of a prompt that fills its blocks predicts the next first token."""
        requests = async_tensor_h2d(plan.first_token_requests, device=logits.device)
        slots = batch.idx_mapping[requests].long()
        slots_np = batch.idx_mapping_np[plan.first_token_requests]
        state = self.states.gather(slots)
        # Copied, as a compiled form serves for strides of one kind only.
        start = state.progress.block_start.contiguous()
        window, positions = state.branches[:, : len(self.rules.columns)].contiguous(), start.unsqueeze(1)
        groups = RowGroups(logits, slots_np, slots, positions, torch.zeros_like(positions), window, start)
        stats = self.reader.measure(groups)
        if self.states.asked["structured"][slots_np].any():
            self.grammar.overrule(logits, stats, self.grammar.first_rows)
        tokens = stats.token
        if self.thinking.among(slots_np):
            is_given = (state.progress.num_given > 0) & (state.progress.given == 0)
            tokens = torch.where(is_given, window[:, 0], tokens)
        written = torch.ones_like(positions, dtype=torch.bool)

        def read(which_np: np.ndarray, which: Tensor) -> Tensor:
            if self.logprobs.are_processed:
                return self.reader.process(groups.select(which_np, which))
            return logits[which]

        self.logprobs.stash(slots_np, slots, logits.shape[1], tokens.unsqueeze(1), written, read)
        if self.step_maps.wanted(slots_np):
            # No denoising step.
            self.step_maps.note(slots, tokens.unsqueeze(1), written, torch.full_like(positions, -1))
        self.states.put_first_token(slots, tokens)


def _round(part: Part, step: Advance, req_ids: list[str]) -> Round:
    """What ``vllm-dllm trace`` and ``vllm-dllm calibrate`` want to know of a step."""
    window, accepted = part.seen.window, step.accepted
    return Round(
        req_ids=[req_ids[request] for request in part.requests_np],
        block_start=window.progress.block_start,
        first=window.progress.first,
        denoised=window.denoises,
        branches=torch.where(window.present.unsqueeze(2), window.branches, part.logits.rules.mask_id),
        present=window.present,
        reached=accepted.reached,
        accepted=accepted.branch,
        predicted=part.seen.measured.token,
        confidence=part.seen.measured.confidence,
        chosen=accepted.chosen,
        tokens=accepted.tokens,
        top_tokens=lambda k: part.logits.top_tokens(accepted.branch, part.requests, k)[0],
    )
