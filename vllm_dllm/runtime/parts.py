"""Requests of a step by how they decode, and what a step makes of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn.functional import pad
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.decoding.records import Measured, Progress, Window
from vllm_dllm.decoding.step import Accepted, Finished, Origin
from vllm_dllm.runtime.logits.step import StepLogits
from vllm_dllm.runtime.policy_params import BatchOptions, PolicyParamsBuilder


@dataclass(frozen=True)
class Part:
    """F of a step's D requests, which decode the same way: by their policy, or with FeF."""

    requests_np: np.ndarray
    """[F] int64: which of the D, on the host."""
    requests: Tensor
    """[F] int64: the same on the device."""
    options: BatchOptions
    """Of the F."""
    window: Window
    """Of the F."""
    measured: Measured
    """Of the F."""
    logits: StepLogits
    """Of the D."""

    @classmethod
    def whole(cls, logits: StepLogits) -> "Part":
        """All requests of a step; measures the logits."""
        plan, columns = logits.plan, logits.rules.columns
        state, progress, num_branches = plan.state, plan.state.progress, plan.branches.num_branches
        return cls(
            requests_np=np.arange(plan.num_decodes),
            requests=logits.options.every,
            options=logits.options,
            window=Window(
                progress=progress,
                branches=state.branches.view(plan.num_decodes, -1, len(columns))[:, :num_branches],
                present=plan.branches.present,
                levels=pad(state.levels[:, : num_branches - 1], (1, 0)),
                commit_only=plan.commit_only,
                first_only=plan.first_only,
                before=state.finished,
                generated=columns >= progress.first.unsqueeze(1),
            ),
            measured=logits.measure(),
            logits=logits,
        )

    def select(self, which_np: np.ndarray, params: PolicyParamsBuilder) -> "Part":
        """Some of the requests, ``which_np`` of the F."""
        which = async_tensor_h2d(which_np.astype(np.int64), device=self.requests.device)
        return Part(
            requests_np=self.requests_np[which_np],
            requests=self.requests[which],
            options=params.options_of(self.options.slots_np[which_np], self.options.slots[which]),
            window=self.window.select(which),
            measured=self.measured.select(which),
            logits=self.logits,
        )

    def by_verifier(self, params: PolicyParamsBuilder) -> Iterator["Part"]:
        """The requests that decode by their policy, and those that decode with FeF."""
        fef_np = self.options.fef_np
        if not fef_np.any() or fef_np.all():
            yield self
        else:
            yield self.select(np.flatnonzero(~fef_np), params)
            yield self.select(np.flatnonzero(fef_np), params)


@dataclass(frozen=True)
class Advance:
    """What a step makes of a part."""

    accepted: Accepted
    origin: Origin | None
    """None where no request wants log-probabilities."""
    finished: Finished
    progress: Progress
    """Of the next step, with its drafts."""
    drafts: tuple[Tensor, ...]
    """[F, max_drafts * W] int64, the tokens of the next forward's drafts, and [F, max_drafts] int64, their levels;
    without drafts, or without levels, what is stored of them stays."""
    is_drafting: bool = False
    """Whether the step made drafts by a policy's order, or sought in vain to."""
