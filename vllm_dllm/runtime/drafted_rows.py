"""Distributions of drafts that wait to be verified: the hidden states that they came from, kept between two forwards.

Logits of a forward are gone when the next one is there. FeF and S2D2 verify drafts with their distributions, so the
hidden states of the drafts' rows are kept, and the logits are computed from them again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.decoding.distributions import Distributions, Noise
from vllm_dllm.decoding.records import Rules
from vllm_dllm.kernels.confidence import log_exponential_, token_stream, token_uniform
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.logits.rows import DRAFT_VALUES, PROCESSED_VALUES
from vllm_dllm.runtime.logits.step import Columns, place_columns
from vllm_dllm.runtime.parts import Advance, Forward, Part, see
from vllm_dllm.runtime.plan.arrays import iota
from vllm_dllm.runtime.plan.rows import Sight
from vllm_dllm.runtime.states import DenoiseStates

ACCEPTANCE_STREAM = 1
"""Stream of a position's noise that accepts its draft; 0 chooses positions."""
CORRECTION_ROUND = 1 << 48
"""Added to the round of draws that replace rejected drafts."""


def rows_of(sight: Sight, branch: Tensor, column: Tensor, rules: Rules) -> Tensor:
    """[F, n] int64: logits rows at ``column`` in ``branch``, both [F, n]; of the last branch where there is none.

    Windows are single blocks.
    """
    runs = sight.groups[:, :, 0].gather(1, branch.clamp(max=sight.groups.shape[1] - 1).expand_as(column))
    return runs * rules.block_length + column


class DraftedRows:
    """What is kept of every request's drafts, and what forwards say of them."""

    def __init__(self, states: DenoiseStates, model: Any, rules: Rules, most: int, stages: Stages):
        """Room for ``most`` drafts of each of the requests of ``states``.

        Args:
            model: computes the logits of kept hidden states, and has the step's ``sampled_hidden_states``.
        """
        self.states, self.model, self.rules, self.most = states, model, rules, most
        # [max_num_reqs, most, hidden].
        self._hidden: Tensor | None = None
        self._noise_stage, self._place_stage = stages.stage(_correction_uniform), stages.stage(self._place)
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

    def kept_and_said(
        self, part: Part, block: Tensor, branch: Tensor, columns: Tensor, rows: Tensor, processed: bool
    ) -> tuple[Distributions, Distributions]:
        """What the kept rows say of ``columns`` [F, most], and what ``branch`` [F, most] says of them.

        Args:
            block: [F, L] int64: as the drafting forward saw it.
            rows: [F, most] int64: logits rows of ``branch`` at ``columns``.
        """
        assert self._hidden is not None
        of_step, of_branches = self.model.sampled_hidden_states, part.logits.logits
        of_kept = self.model.compute_logits(self._hidden[part.options.slots].flatten(0, 1))
        # Which the model has replaced.
        self.model.sampled_hidden_states = of_step
        if not processed:
            kept_rows = iota(len(of_kept), rows.device).view(-1, self.most)
            return self._distributions(part, of_kept, kept_rows), self._distributions(part, of_branches, rows)
        # In one go, or sampling parameters would take twice the launches.
        both = torch.cat((of_kept.view(-1, self.most, of_kept.shape[1]), of_branches[rows]), dim=1)
        at = self._place_stage(part.forward, block, branch, columns)
        logits = part.logits.process(both.flatten(0, 1), part.options.slots_np, at)
        every = iota(len(logits), rows.device).view(both.shape[:2])
        return (
            self._distributions(part, logits, every[:, : self.most], processed=True),
            self._distributions(part, logits, every[:, self.most :], processed=True),
        )

    def _place(self, forward: Forward, block: Tensor | None, branch: Tensor, columns: Tensor) -> Columns:
        """Where the rows of ``said`` are or, with a ``block``, those of ``kept_and_said``."""
        window = see(forward, self.states.unpack, self.rules).window
        branches = window.branches
        windows = branches.gather(
            1, branch.clamp(max=branches.shape[1] - 1).unsqueeze(2).expand(-1, -1, branches.shape[2])
        )
        if block is not None:
            windows = torch.cat((block.unsqueeze(1).expand_as(windows), windows), dim=1)
            columns = torch.cat((columns, columns), dim=1)
        return place_columns(forward.options.slots, window.progress.block_start, windows, columns)

    def noise(self, seed: Tensor, start: Tensor, round_: Tensor, vocab: int) -> Noise:
        """For the draws that replace rejected drafts, at places counted from ``start``.

        Args:
            seed, start, round_: [F] int64: the requests' seeds, positions, and rounds of noise.
        """
        if self._stream is None:
            self._stream = token_stream(vocab, seed.device)
        stream = self._stream

        def noise(some: slice, at: Tensor) -> Tensor:
            return log_exponential_(self._noise_stage(seed[some], start[some], at, round_[some], stream))

        return noise

    def _distributions(self, part: Part, logits: Tensor, rows: Tensor, processed: bool = False) -> Distributions:
        temperature, inverse = part.temperatures
        return Distributions(logits, rows, temperature, self.rules.mask_id, processed, inverse)


def _correction_uniform(seed: Tensor, start: Tensor, place: Tensor, round_: Tensor, stream: Tensor) -> Tensor:
    """[n, V] float32: of ``token_uniform``, for draws that replace rejected drafts."""
    return token_uniform(seed, start + place, round_ + CORRECTION_ROUND, stream)
