"""Distributions of drafts that wait to be verified: the hidden states that they came from, kept between two forwards.

Logits of a forward are gone when the next one is there. FeF and S2D2 verify drafts with their distributions, so the
hidden states of the drafts' rows are kept, and the logits are computed from them again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.decoding.distributions import Distributions, Noise
from vllm_dllm.decoding.records import PerRequest, Progress, Rules
from vllm_dllm.decoding.rejection import RejectionSampler, Verified
from vllm_dllm.kernels.confidence import log_exponential_, position_noise, token_stream, token_uniform
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.logits.rows import DRAFT_VALUES, PROCESSED_VALUES
from vllm_dllm.runtime.logits.step import PASS_ROUND, Columns, place_columns
from vllm_dllm.runtime.parts import Advance, Forward, Part, see
from vllm_dllm.runtime.plan.arrays import iota
from vllm_dllm.runtime.plan.rows import Sight
from vllm_dllm.runtime.states import DenoiseStates

ACCEPTANCE_STREAM = 1
"""Stream of a position's noise that accepts its draft; 0 chooses positions."""
REPLACEMENT_ROUND = 1 << 48
"""Added to the round of draws that replace rejected drafts."""


def rows_of(sight: Sight, branch: Tensor, column: Tensor, rules: Rules) -> Tensor:
    """[F, n] int64: logits rows at ``column`` in ``branch``, both [F, n]; of the last branch where there is none.

    Windows are single blocks.
    """
    runs = sight.groups[:, :, 0].gather(1, branch.clamp(max=sight.groups.shape[1] - 1).expand_as(column))
    return runs * rules.block_length + column


@dataclass(frozen=True)
class Asked(PerRequest):
    """Up to K drafts of F requests, and what the forward is asked about them."""

    block: Tensor  # [F, L] int64: the block as it was drafted for
    columns: Tensor  # [F, K] int64: of the drafts, from left to right
    present: Tensor  # [F, K] bool, a prefix of every row
    drafts: Tensor  # [F, K] int64
    branch: Tensor  # [F, K] int64: the branches that verify them
    rows: Tensor  # [F, K] int64: logits rows of these
    uniform: Tensor  # [F, K] float32: draws that accept drafts
    seed: Tensor  # [F] int64
    start: Tensor  # [F] int64: position of the block
    round_: Tensor  # [F] int64: round of the noise


class DraftedRows:
    """What is kept of every request's drafts, and what forwards say of them."""

    def __init__(self, states: DenoiseStates, model: Any, rules: Rules, most: int, stages: Stages):
        """Room for ``most`` drafts of each of the requests of ``states``.

        Args:
            model: computes the logits of kept hidden states, and has the step's ``sampled_hidden_states``.
        """
        self.states, self.model, self.rules, self.most = states, model, rules, most
        self.sampler = RejectionSampler(stages.stage)
        # [max_num_reqs, most, hidden].
        self._hidden: Tensor | None = None
        self._noise_stage, self._place_stage = stages.stage(_replacement_uniform), stages.stage(self._place)
        # [vocab] int64. A compiled step would count tokens in 32 bits.
        self._stream: Tensor | None = None

    def hidden_states(self) -> Tensor:
        """Of the step's logits rows."""
        hidden: Tensor = self.model.sampled_hidden_states
        if self._hidden is None:
            self._hidden = hidden.new_zeros(len(self.states.asked), self.most, hidden.shape[1])
        return hidden

    def in_parts(self, part: Part, advance: Callable[[Part, bool], Advance]) -> Advance:
        """What ``advance`` makes of the requests, so many at a time that the logits of their drafts find room.

        Args:
            advance: is also told whether sampling parameters shape the requests' distributions.
        """
        processed_np = part.logits.reader.needs_processing_np[part.options.slots_np]
        order_np = np.argsort(processed_np, kind="stable")
        num_plain = int((~processed_np).sum())
        per_request = max(1, 2 * self.most) * part.logits.logits.shape[1]
        plain, processed = (max(1, values // per_request) for values in (DRAFT_VALUES, PROCESSED_VALUES))
        borders = [*range(0, num_plain, plain), *range(num_plain, len(order_np), processed)]
        if len(borders) == 1:
            return advance(part, bool(processed_np[0]))
        steps = [
            advance(self._of(part, order_np[begin:end]), begin >= num_plain)
            for begin, end in zip(borders, [*borders[1:], len(order_np)], strict=True)
        ]
        return Advance.cat(steps).select(async_tensor_h2d(np.argsort(order_np), device=part.requests.device))

    def _of(self, part: Part, which_np: np.ndarray) -> Part:
        """Some of the requests. If any request of the whole part edits tokens, each subset has an ``edit_threshold``,
        so that what steps make of the subsets has the same fields."""
        some = part.of(which_np, self.states)
        if part.options.edit_threshold is None:
            return some
        return replace(some, options=replace(some.options, edit_threshold=some.options.bounds["edit_threshold"]))

    def keep(self, slots: Tensor, hidden_states: Tensor, rows: Tensor) -> None:
        """Keep, of the requests in ``slots`` [F], what ``rows`` [F, most] say.

        Args:
            hidden_states: of the step's logits rows.
        """
        assert self._hidden is not None
        self._hidden.index_copy_(0, slots, hidden_states[rows])

    def said(self, part: Part, branch: Tensor, columns: Tensor, rows: Tensor, processed: bool) -> Distributions:
        """What ``branch`` says of ``columns``, [F, n] each.

        Args:
            rows: [F, n] int64: logits rows of ``branch`` at ``columns``.
        """
        logits = part.logits.logits
        if processed:
            at = self._place_stage(part.forward, None, branch, columns)
            logits = part.logits.process(logits[rows].flatten(0, 1), part.options.slots_np, at)
            rows = iota(len(logits), rows.device).view(rows.shape)
        return self._distributions(part, logits, rows, processed)

    def ask(
        self,
        forward: Forward,
        seeds: Tensor,
        progress: Progress,
        block: Tensor,
        columns: Tensor,
        present: Tensor,
        drafts: Tensor,
        branch: Tensor,
    ) -> Asked:
        """Ask about drafts; ``seeds``: [slots] int64, other arguments as in ``Asked``."""
        seed, start = seeds[forward.options.slots], progress.block_start
        round_ = (block != self.rules.mask_id).sum(dim=1) + progress.passes * PASS_ROUND
        uniform = position_noise(
            seed.unsqueeze(1), start.unsqueeze(1) + columns, round_.unsqueeze(1), ACCEPTANCE_STREAM
        )
        rows = rows_of(forward.sight, branch, columns, self.rules)
        return Asked(block, columns, present, drafts, branch, rows, uniform, seed, start, round_)

    def verify(self, part: Part, asked: Asked, processed: bool) -> Verified:
        """Accept drafts, and draw a replacement of the first that is not accepted."""
        p, q = self._kept_and_said(part, asked, processed)
        noise = self._noise(asked, q.logits.shape[1])
        return self.sampler.verify(asked.drafts, asked.columns, asked.present, q, p, asked.uniform, noise)

    def _kept_and_said(self, part: Part, asked: Asked, processed: bool) -> tuple[Distributions, Distributions]:
        """What the kept rows say of the drafts' columns, and what the branches that verify them say."""
        assert self._hidden is not None
        of_step, of_branches = self.model.sampled_hidden_states, part.logits.logits
        of_kept = self.model.compute_logits(self._hidden[part.options.slots].flatten(0, 1))
        # Which the model has replaced.
        self.model.sampled_hidden_states = of_step
        if not processed:
            kept_rows = iota(len(of_kept), asked.rows.device).view(-1, self.most)
            return self._distributions(part, of_kept, kept_rows), self._distributions(part, of_branches, asked.rows)
        # In one go, or sampling parameters would take twice the launches.
        both = torch.cat((of_kept.view(-1, self.most, of_kept.shape[1]), of_branches[asked.rows]), dim=1)
        at = self._place_stage(part.forward, asked.block, asked.branch, asked.columns)
        logits = part.logits.process(both.flatten(0, 1), part.options.slots_np, at)
        every = iota(len(logits), logits.device).view(both.shape[:2])
        # Copied: what reads these rows would have a form of its own for each of two views.
        kept, said = (rows.clone(memory_format=torch.contiguous_format) for rows in every.split(self.most, dim=1))
        return (
            self._distributions(part, logits, kept, processed=True),
            self._distributions(part, logits, said, processed=True),
        )

    def _place(self, forward: Forward, block: Tensor | None, branch: Tensor, columns: Tensor) -> Columns:
        """Where the rows of ``said`` are or, with a ``block``, those of ``_kept_and_said``."""
        window = see(forward, self.states.unpack, self.rules).window
        branches = window.branches
        windows = branches.gather(
            1, branch.clamp(max=branches.shape[1] - 1).unsqueeze(2).expand(-1, -1, branches.shape[2])
        )
        if block is not None:
            windows = torch.cat((block.unsqueeze(1).expand_as(windows), windows), dim=1)
            columns = torch.cat((columns, columns), dim=1)
        return place_columns(forward.options.slots, window.progress.block_start, windows, columns)

    def _noise(self, asked: Asked, vocab: int) -> Noise:
        """For the draws that replace rejected drafts, at columns of the block."""
        if self._stream is None:
            self._stream = token_stream(vocab, asked.seed.device)
        stream = self._stream

        def noise(some: slice, at: Tensor) -> Tensor:
            uniform = self._noise_stage(asked.seed[some], asked.start[some], at, asked.round_[some], stream)
            return log_exponential_(uniform)

        return noise

    def _distributions(self, part: Part, logits: Tensor, rows: Tensor, processed: bool = False) -> Distributions:
        temperature, inverse = part.temperatures
        return Distributions(logits, rows, temperature, self.rules.mask_id, processed, inverse)


def _replacement_uniform(seed: Tensor, start: Tensor, place: Tensor, round_: Tensor, stream: Tensor) -> Tensor:
    """[n, V] float32: of ``token_uniform``, for draws that replace rejected drafts."""
    return token_uniform(seed, start + place, round_ + REPLACEMENT_ROUND, stream)
