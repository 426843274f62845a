"""A step of requests that decode as an autoregressive model would: LinearSpec's, or ISD's (``vllm_dllm.decoding``)."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from vllm_dllm.decoding.isd import stride
from vllm_dllm.decoding.linear_spec import Speculated, speculate
from vllm_dllm.decoding.records import Window
from vllm_dllm.decoding.step import choose
from vllm_dllm.observe.wires import pack
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.parts import Advance, Forward, Part, Seen, see
from vllm_dllm.runtime.policy_params import PolicyParamsBuilder
from vllm_dllm.runtime.thinking import ThinkingBudgets


class AutoregressiveRounds(ABC):
    """What drafts tokens and verifies them."""

    def __init__(self, params: PolicyParamsBuilder, thinking: ThinkingBudgets, stages: Stages):
        self.thinking = thinking
        self.params, self.states, self.rules = params, params.states, params.rules
        self._speculate_stage = stages.stage(self._speculate)

    @abstractmethod
    def verified(self, window: Window) -> tuple[Tensor, Tensor]:
        """Positions [F] that the blocks begin at which a forward verifies, and their tokens [F, L]."""

    @abstractmethod
    def verifies(self, window: Window) -> Tensor:
        """[F] bool: requests whose blocks a forward verifies."""

    @abstractmethod
    def go_on(self, forward: Forward, seen: Seen, forced: Tensor | None) -> Speculated:
        """What a forward leads to; ``forced`` is that of ``speculate``."""

    def advance(self, part: Part) -> Advance:
        """Take the requests to their next state."""
        run = self._speculate_stage if part.options.compares_only else self._speculate
        slots, forced, known = part.options.slots, None, None
        if self.thinking.among(part.options.slots_np):
            forced, known = self.thinking.forced(*self.verified(part.seen.window), slots)
        found, observation = run(part.forward, forced)
        if known is not None:
            self.thinking.accept(slots, found, self.verifies(part.seen.window), known)
        return Advance(found.accepted, found.finished, found.origin, observation=observation)

    def _speculate(self, forward: Forward, forced: Tensor | None) -> tuple[Speculated, Tensor]:
        """What a forward leads to, and what the scheduler is told of it, [F] int32."""
        found = self.go_on(forward, see(forward, self.states.unpack, self.rules), forced).dense()
        # A forward that verifies does more than to write a block to the K/V cache.
        did = torch.ones_like(found.verified, dtype=torch.bool)
        return found, pack(did, found.verified, found.accepted.skipped)


class LinearSpecRounds(AutoregressiveRounds):
    """Drafts by the requests' policies, and verifies what is whole."""

    def verified(self, window: Window) -> tuple[Tensor, Tensor]:
        return window.progress.block_start - self.rules.block_length, window.before

    def verifies(self, window: Window) -> Tensor:
        return window.commit_only

    def go_on(self, forward: Forward, seen: Seen, forced: Tensor | None) -> Speculated:
        options, window = forward.options, seen.window
        params = self.params.params_of(options, window.progress, window.branches, window.progress.step.unsqueeze(1))
        choice = choose(window, seen.measured, options, params, self.rules)
        return speculate(window, seen.measured, choice, seen.room, self.rules, forced)


class IsdRounds(AutoregressiveRounds):
    """Verifies drafts and makes the next in every forward."""

    def verified(self, window: Window) -> tuple[Tensor, Tensor]:
        return window.progress.block_start, window.branches[:, 0]

    def verifies(self, window: Window) -> Tensor:
        return window.denoises

    def go_on(self, forward: Forward, seen: Seen, forced: Tensor | None) -> Speculated:
        return stride(seen.window, seen.measured, seen.room, self.rules, forced)
