"""A step of requests that decode with LinearSpec (``vllm_dllm.decoding.linear_spec``)."""

import torch
from torch import Tensor

from vllm_dllm.decoding.linear_spec import Speculated, speculate
from vllm_dllm.decoding.step import choose
from vllm_dllm.kernels.confidence import RowStats
from vllm_dllm.observe.wires import pack
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.parts import Advance, Part, Sight, see
from vllm_dllm.runtime.plan.arrays import dense
from vllm_dllm.runtime.policy_params import PolicyParamsBuilder
from vllm_dllm.runtime.states import BatchOptions
from vllm_dllm.runtime.thinking import ThinkingBudgets


class LinearSpecRounds:
    """Drafts by the requests' policies, and verifies what is whole."""

    def __init__(self, params: PolicyParamsBuilder, thinking: ThinkingBudgets, stages: Stages):
        self.thinking = thinking
        self.params, self.states, self.rules = params, params.states, params.rules
        self._speculate_stage = stages.stage(self._speculate)

    def advance(self, part: Part) -> Advance:
        """Take the requests to their next state."""
        total_len, *_, limit = part.logits.bounds
        run = self._speculate_stage if part.options.compares_only else self._speculate
        slots, forced, known = part.options.slots, None, None
        if self.thinking.among(part.options.slots_np):
            forced, known = self.thinking.forced(part.seen.window, slots)
        found, observation = run(part.sight, part.stats, total_len, limit, part.options, forced)
        if known is not None:
            self.thinking.accept(slots, found, part.sight.commit_only, known)
        return Advance(found.accepted, found.finished, found.origin, observation=observation)

    def _speculate(
        self,
        sight: Sight,
        stats: RowStats,
        total_len: Tensor,
        limit: int,
        options: BatchOptions,
        forced: Tensor | None,
    ) -> tuple[Speculated, Tensor]:
        """What a forward leads to, and what the scheduler is told of it, [F] int32."""
        seen = see(sight, stats, total_len, self.states.unpack, self.rules, limit)
        window = seen.window
        params = self.params.params_of(options, window.progress, window.branches, window.progress.step.unsqueeze(1))
        choice = choose(window, seen.measured, options, params, self.rules)
        found = speculate(window, seen.measured, choice, seen.room, self.rules, forced).map(dense)
        nothing = torch.zeros_like(found.verified)
        # A forward that verifies does more than to write a block to the K/V cache.
        did = torch.ones_like(window.commit_only)
        observation = pack(did, found.verified, found.accepted.skipped, nothing, nothing, drafting=False)
        return found, observation
