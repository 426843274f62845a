"""Requests of a step by how they decode, what the forward saw of them, and what a step makes of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor
from torch.nn.functional import pad
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.decoding.records import Measured, PerRequest, Rules, Window, given_columns
from vllm_dllm.decoding.step import Accepted, Finished, Origin
from vllm_dllm.kernels.confidence import RowStats
from vllm_dllm.runtime.logits.step import StepLogits
from vllm_dllm.runtime.plan.arrays import iota
from vllm_dllm.runtime.plan.rows import BlockState, Sight
from vllm_dllm.runtime.states import BatchOptions, DenoiseStates


@dataclass(frozen=True)
class Forward:
    """What a stage of a step is told of the forward."""

    sight: Sight
    stats: RowStats
    """Of the step's logits rows, those of requests that are not among the F included."""
    total_len: Tensor
    """[slots] int: tokens that each request has."""
    limit: int
    """Tokens that a request may have."""
    options: BatchOptions
    """Of the F."""


@dataclass(frozen=True)
class Seen(PerRequest):
    """What the stages of a step go by; made by ``see``."""

    window: Window
    measured: Measured
    """[F, B, W]."""
    room: Tensor
    """[F] int64: tokens that each request may still have."""


def see(forward: Forward, unpack: Callable[[Tensor], BlockState], rules: Rules) -> Seen:
    """Put what the forward saw, and what its logits say, by request, branch and position."""
    sight = forward.sight
    state = unpack(sight.state)
    given, generated = given_columns(state.progress, rules), rules.columns >= state.progress.first.unsqueeze(1)
    if given is not None:
        generated = generated & ~given
    num_branches, groups = sight.present.shape[1], sight.groups
    length = rules.block_length

    def by_branch(values: Tensor) -> Tensor:
        """[F, B, W]: what is [N * L] by row, by the position that the row predicts."""
        if groups.shape[1:] == (1, 1) and len(values) == len(groups) * length:
            # The rows of one request follow those of the other.
            return values.view(len(groups), 1, length)
        return values.view(-1, length)[groups].flatten(2)

    return Seen(
        window=Window(
            progress=state.progress,
            branches=state.branches.unflatten(1, (-1, len(rules.columns)))[:, :num_branches],
            present=sight.present,
            levels=pad(state.levels[:, : num_branches - 1], (1, 0)),
            commit_only=sight.commit_only,
            denoises=~sight.commit_only,
            first_only=sight.first_only,
            before=state.finished,
            generated=generated,
            given=given,
            predicted_outside=sight.predicted_outside,
        ),
        measured=Measured(*forward.stats).map(by_branch),
        room=forward.limit - forward.total_len[sight.slots],
    )


@dataclass(frozen=True)
class Part(PerRequest):
    """F of a step's D requests, which decode the same way (``BatchOptions.kinds``)."""

    requests_np: np.ndarray
    """[F] int64: which of the D, on the host."""
    requests: Tensor
    """[F] int64: the same on the device."""
    options: BatchOptions
    sight: Sight
    stats: RowStats
    """Of the logits rows of the D."""
    logits: StepLogits
    """Of the D."""

    @classmethod
    def whole(cls, logits: StepLogits) -> "Part":
        """All requests of a step; measures the logits."""
        plan, options = logits.plan, logits.options
        return cls(
            requests_np=np.arange(plan.num_decodes),
            requests=iota(plan.num_decodes, options.slots.device),
            options=options,
            sight=plan.sight,
            stats=logits.measure(),
            logits=logits,
        )

    def of(self, which_np: np.ndarray, states: DenoiseStates) -> "Part":
        """Some of the requests, ``which_np`` of the F."""
        which = async_tensor_h2d(which_np, device=self.requests.device)
        options = states.options_of(self.options.slots_np[which_np], self.options.slots[which])
        return replace(self.select(which), requests_np=self.requests_np[which_np], options=options)

    def without_drafts(self) -> "Part":
        """The same requests, which have no drafts, in a step in which others have some."""
        sight = replace(self.sight, present=self.sight.present[:, :1], groups=self.sight.groups[:, :1])
        return replace(self, sight=sight)

    @cached_property
    def forward(self) -> Forward:
        """What stages are told of the forward."""
        reader = self.logits.reader
        return Forward(self.sight, self.stats, reader.req_states.total_len.gpu, reader.max_model_len, self.options)

    @cached_property
    def seen(self) -> Seen:
        """What the stages of a step go by."""
        return see(self.forward, self.logits.unpack, self.logits.rules)

    @cached_property
    def temperatures(self) -> tuple[Tensor, Tensor]:
        """[F] float32: of each request, 0 for the most likely token; and the reciprocal."""
        temperature = self.logits.reader.sampling_states.temperature.gpu[self.options.slots]
        return temperature, temperature.reciprocal()


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
    observation: Tensor | None = None
    """[F] int32: what the scheduler is told, as ``observe.wires`` packs it; None: what the records above say."""
