"""Requests with a budget for their reasoning (``thinking_token_budget``): where their texts stand, step by step.

vLLM's ``ReasoningConfig`` has the tokens around reasoning. A request's text is read once when the request enters, and
block by block on the device from there, so nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_dllm.decoding.linear_spec import Speculated
from vllm_dllm.decoding.records import Rules, Window
from vllm_dllm.decoding.step import Origin
from vllm_dllm.decoding.thinking import NOWHERE, Markers, Reasoning, forced_next, given_to_block, read
from vllm_dllm.runtime.parts import Advance, Part

if TYPE_CHECKING:
    from vllm.config.reasoning import ReasoningConfig
    from vllm.v1.worker.gpu.states import RequestState

MOST = int(np.iinfo(np.int32).max)
"""Larger budgets mean the same: no text is as long."""


class ThinkingBudgets:
    """Budgets by slot, and what the text of each request with one says of its reasoning."""

    def __init__(self, config: "ReasoningConfig | None", max_num_reqs: int, block_length: int, device: torch.device):
        self.block_length, self.device = block_length, device
        self.markers: Markers | None = None
        self.markers_on_host: Markers | None = None
        if config is not None and config.enabled:
            ids = (
                config.reasoning_start_token_ids,
                config.natural_reasoning_end_token_ids,
                config.reasoning_end_token_ids,
            )
            self.markers_on_host = Markers(*(torch.tensor(each, dtype=torch.int64) for each in ids))
            self.markers = Markers(*(torch.tensor(each, dtype=torch.int64, device=device) for each in ids))
        self.has_budget_np = np.zeros(max_num_reqs, dtype=bool)
        # [max_num_reqs]; a budget of NOWHERE is none.
        self.budget = torch.full((max_num_reqs,), NOWHERE, dtype=torch.int64, device=device)
        self.kept = Reasoning(self.budget.clone(), self.budget.clone())
        # Has the tokens before a block; there once there is a sampler.
        self.req_states: RequestState | None = None

    def add_request(
        self,
        slot: int,
        budget: int | None,
        token_ids: Sequence[int],
        prompt_length: int,
        grid_start: int,
        given_length: int,
    ) -> tuple[int, list[int]]:
        """Take the budget of a request that enters ``slot``.

        Args:
            token_ids: known tokens, prompt and output.
            grid_start: position that blocks are counted from.
            given_length: positions of a block that may be given.

        Returns:
            Column of the first block, and the tokens that the block is given from there on.
        """
        had_budget, self.has_budget_np[slot] = self.has_budget_np[slot], budget is not None
        if budget is None:
            if had_budget:
                self.budget[slot] = NOWHERE
            return 0, []
        markers = self.markers_on_host
        assert markers is not None, "vLLM refuses budgets without a ReasoningConfig"
        block_start = len(token_ids) - (len(token_ids) - grid_start) % self.block_length
        # A tail of output is what an earlier forward wrote into the block, which says nothing of what is given to it.
        free = max(block_start, prompt_length)
        text = torch.tensor([[*[NOWHERE] * markers.context, *token_ids[:free]]])
        start, nothing = torch.tensor([-markers.context]), torch.tensor([NOWHERE])
        reasoning = read(text, start, Reasoning(nothing, nothing), markers).column(torch.tensor([text.shape[1] - 1]))
        asked = torch.tensor([min(budget, MOST)])
        for kept, value in ((self.budget, asked), (self.kept.start, reasoning.start), (self.kept.end, reasoning.end)):
            kept[slot] = int(value)
        given = given_to_block(
            reasoning, asked, text, torch.tensor([free]), torch.tensor([block_start]), given_length, markers
        )
        if not int(given.number):
            return 0, []
        column, number = int(given.column), int(given.number)
        return column, given.tokens[0, column : column + number].tolist()

    def among(self, slots_np: np.ndarray) -> bool:
        """Whether any of the requests has a budget."""
        return bool(self.has_budget_np[slots_np].any())

    def begin_blocks(self, part: Part, step: Advance) -> Advance:
        """The same step, where blocks that begin are given the end of the reasoning."""
        markers, slots, finished = self.markers, part.options.slots, step.finished
        assert markers is not None
        window, done = part.seen.window, finished.progress.commit
        tokens, start = self._with_context(slots, window.progress.block_start, finished.before)
        before = self.kept.select(slots)
        reasoning = read(tokens, start, before, markers).column(torch.full_like(start, tokens.shape[1] - 1))
        reasoning = self._keep(slots, reasoning.where(done, before))
        free = finished.progress.block_start
        given = given_to_block(reasoning, self.budget[slots], tokens, free, free, self.block_length, markers)
        progress = replace(
            finished.progress,
            given=torch.where(done, given.column, window.progress.given),
            num_given=torch.where(done, given.number, window.progress.num_given),
        )
        is_given = done.unsqueeze(1) & (given.tokens != NOWHERE)
        finished = replace(finished, progress=progress, tokens=torch.where(is_given, given.tokens, finished.tokens))
        return replace(step, finished=finished)

    def forced(self, block_start: Tensor, block: Tensor, slots: Tensor) -> tuple[Tensor, Reasoning]:
        """What must follow each token of the blocks [D, L] that an autoregressive verifier verifies, [D, L] int64 or
        NOWHERE, and what the text says through each of the tokens, records [D, L]."""
        assert self.markers is not None
        length = self.block_length
        tokens, start = self._with_context(slots, block_start, block)
        known = read(tokens, start, self.kept.select(slots), self.markers)
        follows = forced_next(tokens, start, known, self.budget[slots], length, self.markers)
        return follows, known.map(lambda values: values[:, -length:])

    def accept(self, slots: Tensor, found: Speculated, verifies: Tensor, known: Reasoning) -> None:
        """Go on behind what a forward of such a verifier accepted; ``known`` is that of ``forced``."""
        self._keep(slots, known.column(found.accepted.skipped).where(verifies, self.kept.select(slots)))

    def _keep(self, slots: Tensor, reasoning: Reasoning) -> Reasoning:
        self.kept.map(lambda kept, now: kept.index_copy_(0, slots, now), reasoning)
        return reasoning

    def _with_context(self, slots: Tensor, block_start: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks [D, L] with the tokens before them, [D, T] int64, and the position of the first of those, [D]."""
        assert self.markers is not None and self.req_states is not None
        start = block_start - self.markers.context
        positions = start.unsqueeze(1) + torch.arange(self.markers.context, device=self.device)
        every = self.req_states.all_token_ids.gpu
        index = positions.clamp(0, every.shape[1] - 1)
        context = every[slots.unsqueeze(1), index].long().masked_fill(positions < 0, NOWHERE)
        return torch.cat((context, block), dim=1), start


def with_given(origin: Origin, window: Window, rules: Rules) -> Origin:
    """``origin`` with the tokens that blocks were given.

    Log-probabilities and step maps get each of them from the first forward that predicts its position: where commits
    emit, column 0 from the commit; all other columns from the block's first denoising step.
    """
    given = window.given
    assert given is not None
    begins = (window.denoises & (window.progress.step == 0)).unsqueeze(1)
    if rules.commit_emits:
        begins = torch.where(rules.columns == 0, window.first_only.unsqueeze(1), begins)
    told = given & begins
    return replace(
        origin,
        written=origin.written | told,
        branch=origin.branch.masked_fill(told, 0),
        # No denoising step wrote them.
        step=origin.step.masked_fill(told, -1),
    )
