"""A step of requests that decode with LinearSpec (``vllm_dllm.decoding.linear_spec``)."""

import torch
from torch import Tensor

from vllm_dllm.decoding.linear_spec import Speculated, speculate
from vllm_dllm.decoding.step import choose
from vllm_dllm.observe.wires import pack
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.parts import Advance, Forward, Part, see
from vllm_dllm.runtime.policy_params import PolicyParamsBuilder
from vllm_dllm.runtime.thinking import ThinkingBudgets


class LinearSpecRounds:
    """Drafts by the requests' policies, and verifies what is whole."""

    def __init__(self, params: PolicyParamsBuilder, thinking: ThinkingBudgets, stages: Stages):
        self.thinking = thinking
        self.params, self.states, self.rules = params, params.states, params.rules
        self._speculate_stage = stages.stage(self._speculate)

    def advance(self, part: Part) -> Advance:
        """Take the requests to their next state."""
        run = self._speculate_stage if part.options.compares_only else self._speculate
        slots, forced, known = part.options.slots, None, None
        if self.thinking.among(part.options.slots_np):
            forced, known = self.thinking.forced(part.seen.window, slots)
        found, observation = run(part.forward, forced)
        if known is not None:
            self.thinking.accept(slots, found, part.sight.commit_only, known)
        return Advance(found.accepted, found.finished, found.origin, observation=observation)

    def _speculate(self, forward: Forward, forced: Tensor | None) -> tuple[Speculated, Tensor]:
        """What a forward leads to, and what the scheduler is told of it, [F] int32."""
        seen, options = see(forward, self.states.unpack, self.rules), forward.options
        window = seen.window
        params = self.params.params_of(options, window.progress, window.branches, window.progress.step.unsqueeze(1))
        choice = choose(window, seen.measured, options, params, self.rules)
        found = speculate(window, seen.measured, choice, seen.room, self.rules, forced).dense()
        # A forward that verifies does more than to write a block to the K/V cache.
        did = torch.ones_like(window.commit_only)
        return found, pack(did, found.verified, found.accepted.skipped)
