"""Requests of a step by how they decode, and what a step makes of them."""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor
from torch.nn.functional import pad
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.decoding.records import Measured, PerRequest, Window
from vllm_dllm.decoding.step import Accepted, Finished, Origin
from vllm_dllm.runtime.logits.step import StepLogits
from vllm_dllm.runtime.plan.arrays import iota
from vllm_dllm.runtime.states import BatchOptions, DenoiseStates


@dataclass(frozen=True)
class Part(PerRequest):
    """F of a step's D requests, which decode the same way: by their policy, or with FeF."""

    requests_np: np.ndarray
    """[F] int64: which of the D, on the host."""
    requests: Tensor
    """[F] int64: the same on the device."""
    options: BatchOptions
    window: Window
    measured: Measured
    room: Tensor
    """[F] int64: tokens that each request may still have."""
    logits: StepLogits
    """Of the D."""

    @classmethod
    def whole(cls, logits: StepLogits) -> "Part":
        """All requests of a step; measures the logits."""
        plan, options, columns, reader = logits.plan, logits.options, logits.rules.columns, logits.reader
        state, num_branches = plan.state, plan.branches.num_branches
        return cls(
            requests_np=np.arange(plan.num_decodes),
            requests=iota(plan.num_decodes, options.slots.device),
            options=options,
            window=Window(
                progress=state.progress,
                branches=state.branches.view(plan.num_decodes, -1, len(columns))[:, :num_branches],
                present=plan.branches.present,
                levels=pad(state.levels[:, : num_branches - 1], (1, 0)),
                commit_only=plan.commit_only,
                first_only=plan.first_only,
                before=state.finished,
                generated=columns >= state.progress.first.unsqueeze(1),
            ),
            measured=logits.measure(),
            room=reader.max_model_len - reader.req_states.total_len.gpu[options.slots],
            logits=logits,
        )

    def of(self, which_np: np.ndarray, states: DenoiseStates) -> "Part":
        """Some of the requests, ``which_np`` of the F."""
        which = async_tensor_h2d(which_np, device=self.requests.device)
        options = states.options_of(self.options.slots_np[which_np], self.options.slots[which])
        return replace(self.select(which), requests_np=self.requests_np[which_np], options=options)


@dataclass(frozen=True)
class Advance(PerRequest):
    """What a step makes of a part."""

    accepted: Accepted
    finished: Finished
    """Its progress has the drafts of the next step."""
    origin: Origin | None
    """None where no request wants log-probabilities."""
    drafts: Tensor | None = None
    """[F, max_drafts * W] int64: tokens of the next forward's drafts; None: what is stored of them stays."""
    levels: Tensor | None = None
    """[F, max_drafts] int64: their levels; None: what is stored of them stays."""
    is_drafting: bool = False
    """Whether the step made drafts by a policy's order, or sought in vain to."""
