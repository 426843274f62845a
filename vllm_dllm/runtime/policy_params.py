"""The parameters of a step's policies, from what the batch's requests asked for and where they stand."""

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_dllm.decoding.policies import TIMED_POLICIES, Policy, PolicyParams
from vllm_dllm.decoding.records import Progress, Rules, given_columns
from vllm_dllm.decoding.schedules import quota_of_step
from vllm_dllm.kernels.confidence import position_noise
from vllm_dllm.runtime.states import BatchOptions, DenoiseStates


@dataclass(frozen=True)
class PolicyParamsBuilder:
    """Makes ``PolicyParams`` for the requests in ``states``, whose seeds ``sampling_states`` holds."""

    states: DenoiseStates
    sampling_states: SamplingStates
    rules: Rules

    def params_of(self, options: BatchOptions, progress: Progress, branches: Tensor, steps: Tensor) -> PolicyParams:
        """Parameters of the policies for denoising ``branches`` [D, B, W], which have had ``steps`` [D, B] each.

        Returns those of D * B rows.
        """
        quota, remainder = options.quota.unsqueeze(1), options.quota_remainder.unsqueeze(1)
        quotas, noise = quota_of_step(quota, remainder, steps), None
        if options.draws_positions or Policy.PACED in options.policies:
            generated = self.rules.written_by_denoising(self.rules.columns >= progress.first.view(-1, 1, 1))
            is_unmasked = (branches != self.rules.mask_id) & generated
            if Policy.PACED in options.policies:
                due = quota * (steps + 1) + torch.minimum(steps + 1, remainder)
                is_paced = (options.policy == int(Policy.PACED)).unsqueeze(1)
                # No step wrote the tokens that the block was given.
                given = given_columns(progress, self.rules)
                written = is_unmasked if given is None else is_unmasked & ~given.unsqueeze(1)
                quotas = torch.where(is_paced, (due - written.sum(dim=2)).clamp(min=0), quotas)
            if options.draws_positions:
                noise = self._noise(options, progress, is_unmasked, steps).flatten(0, 1)
        asked = {"policy": options.policy, "radius": options.radius}
        asked |= {name: options.bounds[name] for name in PolicyParams._fields if name in options.bounds}
        if steps.shape[1] > 1:
            asked = {name: values.repeat_interleave(steps.shape[1]) for name, values in asked.items()}
        ratio = self._ratio(options, steps).flatten() if options.policies & TIMED_POLICIES else None
        return PolicyParams(quota=quotas.flatten(), ratio=ratio, noise=noise, **asked)

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
            # It has no quota. A step unmasks as many positions as their entropies allow, and at least one.
            quotas = quotas.masked_fill((options.policy == int(Policy.ENTROPY)).unsqueeze(1), 1)
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
