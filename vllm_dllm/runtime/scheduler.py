"""vLLM's scheduler, taught that a diffusion block is the unit of everything.

The worker decides what a row is; what the scheduler must get right is how many rows a request has, and where its
tokens end.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from vllm_dllm.metrics import RequestMetricsScheduler


class DllmScheduler(RequestMetricsScheduler):
    """Gives a decoding request the rows of its current block, and those of a finished block that is to be committed.

    A block is emitted when its last mask is gone and committed, its final tokens written to the K/V cache, in the
    request's next step. Pages of generated text become visible to prefix caching only when that step is scheduled:
    vLLM hashes full pages as it allocates slots for a step, after which no other request can be scheduled to a step
    before it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_model_len: int
        hf_config = self.vllm_config.model_config.hf_config
        self.block_length: int = hf_config.block_length
        self.canvas_length: int = hf_config.canvas_length
        self._canvas = [-1] * self.canvas_length
        # Requests that emitted in the step being processed. What a request emits and goes on after is a finished block.
        self._emitted: set[str] = set()
        # vLLM's seam for models whose prefill chunks must end on certain positions.
        self.need_mamba_block_aligned_split = True

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # The last block is denoised whole even where it reaches beyond max_model_len: with fewer mask tokens in it the
        # model would write another text. What exceeds the limit is never emitted, and the page of a block's start
        # holds all of it, so no page is needed beyond the limit.
        limit: int = self.max_model_len
        self.max_model_len = limit + self.canvas_length
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_model_len = limit

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Rows of this step out of ``num_new_tokens`` that the budget allows; 0: none in this step.

        A prefill chunk ends on the border of a block or with the prompt. Rows of a decoding request come all or not at
        all.
        """
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        known = request.num_tokens + request.num_output_placeholders
        end = start + num_new_tokens
        if start >= known:
            return num_new_tokens if num_new_tokens == len(request.spec_token_ids) else 0
        if end < known:
            end = end // self.block_length * self.block_length
        # Decoding begins in a step of its own: its rows are laid out by blocks, those of the prompt by tokens.
        return max(min(end, known) - start, 0)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Set the rows of each request's next step. Which tokens stand in them is the worker's knowledge."""
        for req_id in draft_token_ids.req_ids:
            request = self.requests.get(req_id)
            if request is None or request.is_finished():
                continue
            if request.is_prefill_chunk:
                request.spec_token_ids = []
                continue
            num_rows = self.canvas_length if req_id in self._emitted else self.block_length
            request.spec_token_ids = self._canvas[:num_rows]
        self._emitted.clear()

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        self._emitted.add(request.request_id)
        return super()._update_request_with_output(request, new_token_ids, is_stale)


class DllmAsyncScheduler(DllmScheduler, AsyncScheduler):
    """With async scheduling a step is scheduled before the one before it is known, so every step has all rows."""

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        # Not AsyncScheduler's: it lets prefix caching see the pages of new tokens at once. Those of a request that ends
        # here are never committed; those of the others become visible with a later step, as without async scheduling.
        new_token_ids, stopped = Scheduler._update_request_with_output(self, request, new_token_ids)
        if not is_stale:
            request.num_output_placeholders -= len(new_token_ids)
            assert request.num_output_placeholders >= 0
        return new_token_ids, stopped
