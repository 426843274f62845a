"""What a batch's requests asked for, as tensors on the device, and the parameters of a step's policies.

What requests asked for never changes while they live, so ``BatchOptions`` is made when the batch changes and kept.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_dllm.decoding.policies import TIMED_POLICIES, Policy, PolicyParams, quota_of_step
from vllm_dllm.decoding.records import Progress, RequestOptions, Rules
from vllm_dllm.decoding.verifiers import Verifier
from vllm_dllm.kernels.confidence import position_noise
from vllm_dllm.runtime.states import BOUNDS, PROGRESS, DenoiseStates, Field

MOST_BATCHES = 8
"""Batches whose options are kept. Two or so take turns under pipeline parallelism."""


@dataclass(frozen=True)
class BatchOptions(RequestOptions):
    """Options of D requests, for the runtime."""

    slots_np: np.ndarray
    """[D] slots of the requests, on the host."""
    slots: Tensor
    """[D] int64: the same on the device."""
    every: Tensor
    """[D] int64: 0, 1, ..., D - 1."""
    fef_np: np.ndarray
    """[D] bool: requests that decode with FeF."""
    drafting_np: np.ndarray
    """[D] bool: requests that draft by their policy's order."""
    graph_np: np.ndarray
    """[D] bool: requests whose drafts come from the engine's graph."""
    draws_positions: bool
    """Whether a policy that occurs draws positions by chance."""
    radius: Tensor
    """[D] int64."""
    max_drafts: Tensor
    """[D] int64: drafts beside the block itself."""
    schedule: Tensor
    """[D] int64: where the request's timesteps begin in ``DenoiseStates.schedules``; -1: its policy has none."""
    num_steps: Tensor
    """[D] int64: timesteps of a block."""
    fef_window: Tensor
    """[D] int64: positions that a round of FeF drafts."""
    num_passes: Tensor
    """[D] int64: passes of FeF over a block."""
    bounds: dict[str, Tensor]
    """[D] float32 each: the options of ``runtime.states.BOUNDS``."""


class PolicyParamsBuilder:
    """Makes ``BatchOptions`` of slots, and ``PolicyParams`` of them and a step's windows."""

    def __init__(self, states: DenoiseStates, sampling_states: SamplingStates, rules: Rules):
        """For the requests in ``states``, whose seeds ``sampling_states`` holds."""
        self.states = states
        self.sampling_states = sampling_states
        self.rules = rules
        self._made: dict[bytes, BatchOptions] = {}
        self._generation = -1

    def options_of(self, slots_np: np.ndarray, slots: Tensor) -> BatchOptions:
        """Options of the requests in ``slots`` [D]."""
        if self._generation != self.states.generation or len(self._made) > MOST_BATCHES:
            self._made.clear()
            self._generation = self.states.generation
        key = slots_np.tobytes()
        if key not in self._made:
            self._made[key] = self._options_of(slots_np.copy(), slots)
        return self._made[key]

    def _options_of(self, slots_np: np.ndarray, slots: Tensor) -> BatchOptions:
        states = self.states
        fields = states.rows.gpu[:, : PROGRESS[0]][slots]
        bounds = dict(zip(BOUNDS, states.bounds.gpu[slots].unbind(1), strict=True))
        verifiers = states.verifier_np[slots_np]
        num_stop_token_ids = int(states.num_stop_token_ids_np[slots_np].max(initial=0))
        policy, schedule = fields[:, Field.POLICY], fields[:, Field.SCHEDULE]
        remainder = fields[:, Field.QUOTA_REMAINDER]
        return BatchOptions(
            policies=frozenset(map(Policy, set(states.policy_np[slots_np].tolist()))),
            verifiers=frozenset(map(Verifier, set(verifiers.tolist()))),
            policy=policy,
            quota=fields[:, Field.QUOTA],
            quota_remainder=remainder,
            verifier=fields[:, Field.VERIFIER],
            timed=(remainder > 0) | (schedule >= 0) | (policy == Policy.PACED),
            edit_threshold=bounds["edit_threshold"] if states.editing_np[slots_np].any() else None,
            max_post_steps=fields[:, Field.MAX_POST_STEPS],
            stop_token_ids=states.stop_token_ids.gpu[slots, :num_stop_token_ids] if num_stop_token_ids else None,
            slots_np=slots_np,
            slots=slots,
            every=torch.arange(len(slots_np), device=slots.device),
            fef_np=verifiers == Verifier.FEF,
            drafting_np=(states.num_drafts_np[slots_np] > 0) & (verifiers != Verifier.FEF),
            graph_np=states.uses_graph_np[slots_np],
            draws_positions=bool(states.draws_positions_np[slots_np].any()),
            radius=fields[:, Field.RADIUS],
            max_drafts=fields[:, Field.MAX_DRAFTS],
            schedule=schedule,
            num_steps=fields[:, Field.NUM_STEPS],
            fef_window=fields[:, Field.WINDOW],
            num_passes=fields[:, Field.NUM_PASSES],
            bounds=bounds,
        )

    def params_of(self, options: BatchOptions, progress: Progress, branches: Tensor, steps: Tensor) -> PolicyParams:
        """Parameters of the policies for denoising ``branches`` [D, B, W], which have had ``steps`` [D, B] each.

        Returns those of D * B rows.
        """
        quota, remainder = options.quota.unsqueeze(1), options.quota_remainder.unsqueeze(1)
        quotas = quota_of_step(quota, remainder, steps)
        is_unmasked = None
        if options.draws_positions or Policy.PACED in options.policies:
            is_unmasked = (branches != self.rules.mask_id) & (self.rules.columns >= progress.first.view(-1, 1, 1))
        if Policy.PACED in options.policies:
            assert is_unmasked is not None
            due = quota * (steps + 1) + torch.minimum(steps + 1, remainder)
            is_paced = (options.policy == Policy.PACED).unsqueeze(1)
            quotas = torch.where(is_paced, (due - is_unmasked.sum(dim=2)).clamp(min=0), quotas)
        noise = None
        if options.draws_positions:
            assert is_unmasked is not None
            noise = self._noise(options, progress, is_unmasked, steps).flatten(0, 1)
        bounds = options.bounds
        values = [
            options.policy,
            options.radius,
            bounds["threshold"],
            bounds["entropy_bound"],
            bounds["relaxed_threshold"],
            bounds["factor"],
            bounds["alg_temp"],
        ]
        if steps.shape[1] > 1:
            values = [value.repeat_interleave(steps.shape[1]) for value in values]
        policy, radius, threshold, entropy_bound, relaxed_threshold, factor, alg_temp = values
        return PolicyParams(
            policy=policy,
            quota=quotas.flatten(),
            threshold=threshold,
            entropy_bound=entropy_bound,
            relaxed_threshold=relaxed_threshold,
            radius=radius,
            factor=factor,
            ratio=self._ratio(options, steps).flatten() if options.policies & TIMED_POLICIES else None,
            alg_temp=alg_temp,
            noise=noise,
        )

    def _noise(self, options: BatchOptions, progress: Progress, is_unmasked: Tensor, steps: Tensor) -> Tensor:
        """[D, B, W] float32: noise of every position in branches with ``is_unmasked`` [D, B, W].

        Noise belongs to a position and to how far the position's own block is: what stands in other blocks of the
        window depends on drafts.
        """
        rules = self.rules
        unmasked = is_unmasked.unflatten(2, (rules.window_blocks, -1)).sum(dim=3)  # [D, B, w]
        block_steps = steps.unsqueeze(2)
        if rules.window_blocks > 1:
            # `eager` allows constant quotas only, so the tokens of a block tell its steps.
            block_steps = torch.div(unmasked, options.quota.view(-1, 1, 1), rounding_mode="floor")
        # A step that unmasks nothing leaves the state as it was, and the next must draw anew.
        rounds = (unmasked + (block_steps << 32)).repeat_interleave(rules.block_length, dim=2)
        positions = progress.block_start.view(-1, 1, 1) + rules.columns
        seeds = self.sampling_states.seeds.gpu[options.slots]
        return position_noise(seeds.view(-1, 1, 1), positions, rounds)

    def quotas_ahead(self, options: BatchOptions, steps: Tensor, num_masked: Tensor, num_steps: int) -> Tensor:
        """[D, num_steps] int64: positions that the policy unmasks in each of the next steps, at least ``max_drafts``.

        Args:
            steps: [D] int64: steps that the block has had.
            num_masked: [D] int64: its masked positions.
        """
        ahead = torch.arange(num_steps, device=steps.device)
        quotas = quota_of_step(
            options.quota.unsqueeze(1), options.quota_remainder.unsqueeze(1), steps.unsqueeze(1) + ahead
        )
        if Policy.ENTROPY in options.policies:
            # It has no quota: as many as the entropies of that step allow, of which one is certain.
            quotas = quotas.masked_fill((options.policy == Policy.ENTROPY).unsqueeze(1), 1)
        if not options.policies & TIMED_POLICIES:
            return quotas
        of_schedule = quotas.clone()
        for step in range(self.states.max_drafts):
            ratio = self._ratio(options, (steps + step).unsqueeze(1)).squeeze(1)
            of_schedule[:, step] = (num_masked.float() * ratio).long().clamp(min=1)
            num_masked = (num_masked - of_schedule[:, step]).clamp(min=0)
        return torch.where((options.schedule >= 0).unsqueeze(1), of_schedule, quotas)

    def _ratio(self, options: BatchOptions, steps: Tensor) -> Tensor:
        """[D, n] float32: share of the masked positions that schedules of timesteps unmask in ``steps`` [D, n]."""
        schedule, last = options.schedule.unsqueeze(1), options.num_steps.unsqueeze(1) - 1
        # The first entry is for requests without a schedule.
        return self.states.schedules[torch.where(schedule < 0, 0, schedule + torch.minimum(steps, last))]
