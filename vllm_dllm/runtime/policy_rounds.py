"""A step of requests that decode by their policy, with or without drafts."""

from dataclasses import replace

from torch import Tensor

from vllm_dllm.decoding.records import Rules
from vllm_dllm.decoding.step import choose, finish, origin_of, verify_drafts
from vllm_dllm.runtime.drafting import Drafter
from vllm_dllm.runtime.parts import Advance, Part
from vllm_dllm.runtime.policy_params import PolicyParamsBuilder


class PolicyRounds:
    """The stages of ``vllm_dllm.decoding.step``, one after the other."""

    def __init__(self, params: PolicyParamsBuilder, drafter: Drafter, rules: Rules):
        self.params = params
        self.drafter = drafter
        self.rules = rules

    def advance(self, part: Part, room: Tensor, *, with_origin: bool) -> Advance:
        """Take the requests to their next state.

        Args:
            room: [F] int64: tokens that each request may still have.
            with_origin: tell where the tokens come from.
        """
        window, options, rules = part.window, part.options, self.rules
        steps = window.progress.step.unsqueeze(1)
        if window.present.shape[1] > 1:
            steps = steps + window.levels
        params = self.params.params_of(options, window.progress, window.branches, steps)
        choice = choose(window, part.measured, options, params, rules)
        accepted = verify_drafts(window, choice, options, rules)
        origin = origin_of(window, choice, accepted, rules) if with_origin else None
        finished = finish(window, accepted, options, room, rules)
        if not self.drafter.is_to_draft(options, window.present.shape[1]):
            return Advance(accepted, origin, finished, finished.progress, ())
        num_drafts, drafts, levels = self.drafter.propose(part, accepted, finished)
        progress = replace(finished.progress, num_drafts=num_drafts)
        return Advance(accepted, origin, finished, progress, (drafts, levels), is_drafting=True)
