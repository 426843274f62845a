"""Scheduling of models with full attention: refreshes, whole or not at all."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from vllm_dllm.geometry import geometry_of
from vllm_dllm.options.resolve import options_of
from vllm_dllm.runtime.plan.spans import Spans, pages_of_a_request
from vllm_dllm.runtime.scheduling import DllmScheduler
from vllm_dllm.runtime.scheduling.pages import check_pages


class FullAttentionScheduler(DllmScheduler):
    """Gives a request all rows of its text where its K/V are to be computed anew, else those of its current block.

    To vLLM a refresh is a request of which no token is computed any more. A request enters with one row, of which
    nothing comes but a place in the batch and the pages of its text: vLLM admits requests without draft rows, and the
    masks to be denoised are draft rows to it. Its next step is its first refresh.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spans = Spans.of(geometry_of(self.vllm_config))
        self._page_size: int = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        pages = pages_of_a_request(geometry_of(self.vllm_config), self.max_model_len, self._page_size)
        check_pages(self.vllm_config, pages, self.kv_cache_config.num_blocks, self._page_size)
        # vLLM cuts a request's pages there. The last block may end beyond, and an unconditional branch has its pages
        # behind the text.
        self.kv_cache_manager.max_model_len = pages * self._page_size
        # Position behind the last block of each request.
        self._text_end: dict[str, int] = {}
        # Denoising steps that each request's block has had.
        self._steps: dict[str, int] = {}
        # Requests that compute their text twice.
        self._guided: set[str] = set()
        # Requests that the last step had no rows for.
        self._waited: set[str] = set()
        self._default_max_tokens = self.vllm_config.model_config.get_diff_sampling_param().get("max_tokens")

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.request_id in self.requests:
            prompt_length = request.num_prompt_tokens
            self._text_end[request.request_id] = self.spans.text_end(
                prompt_length, min(request.max_tokens, self.max_model_len - prompt_length)
            )
            self._steps[request.request_id] = 0
            if self.geometry.guidance and options_of(request.sampling_params, self.geometry).cfg_scale > 0:
                self._guided.add(request.request_id)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        for kept in (self._text_end, self._steps):
            kept.pop(request.request_id, None)
        for names in (self._guided, self._waited):
            names.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # A refresh needs many rows at once. One that found too few of them left comes first in the next step.
        if self._waited:
            self.running.sort(key=lambda request: request.request_id not in self._waited)
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        self._waited = {request.request_id for request in self.running if request.request_id not in scheduled}
        return output

    def _window_end(self, request: Request) -> int:
        return int(self.spans.window_end(request.num_tokens, self._text_end[request.request_id]))

    def _allocate_window(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Pages for the whole text and its unconditional branch, also of a request that enters, which could not go on
        without the pages."""
        end = self._window_end(request)
        if request.request_id in self._guided:
            text_end = self._text_end[request.request_id]
            end += int(self.spans.unconditional_page(text_end, self._page_size)) * self._page_size
        num_new_tokens = end - request.num_computed_tokens
        return self._allocate_slots(request, num_new_tokens, *args, **kwargs)

    def _rows_of_prefills(self) -> int:
        """Rows of requests that enter: one each. Their first refresh comes as one of those that decode."""
        places = self.max_num_running_reqs - len(self.running)
        entering = sum(not request.spec_token_ids for request in self.running)
        return min(entering + max(0, min(places, len(self.waiting))), self.max_num_scheduled_tokens)

    def _rows_of_draft(self, request: Request) -> int:
        return int(self.spans.draft(request.num_tokens, self._window_end(request)).length)

    def _rows_wanted(self, request: Request) -> int:
        return request.num_tokens_with_spec - request.num_computed_tokens

    def _rows(self, req_id: str, num_drafts: int) -> int:
        request = self.requests[req_id]
        refresh = request.num_computed_tokens == 0
        root = self.spans.sequence(request.num_tokens, self._window_end(request), refresh)
        num_texts = 1 + (req_id in self._guided)
        return num_texts * int(root.length) + num_drafts * self._rows_of_draft(request)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        if not request.spec_token_ids:
            return 1
        if num_new_tokens == self._rows_wanted(request):
            return num_new_tokens
        fixed = self._fixed_rows(request)
        if num_new_tokens < fixed:
            return 0
        unit = self._rows_of_draft(request)
        return fixed + (num_new_tokens - fixed) // unit * unit

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        if request.status == RequestStatus.FINISHED_LENGTH_CAPPED and request.max_tokens == self._default_max_tokens:
            # A response has no other place for what ended it.
            request.stop_reason = f"max_tokens={request.max_tokens}, the default"
        return new_token_ids, stopped

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        for req_id in draft_token_ids.req_ids:
            request = self.requests.get(req_id)
            if request is None or request.is_finished():
                continue
            seen = self.observations.get(req_id)
            if seen is None or req_id in self._emitted:
                self._steps[req_id] = 0
            else:
                self._steps[req_id] += 1 + seen.accepted
            interval = self.options.refresh_interval
            if (
                self.spans.cache == "none"
                or self._steps[req_id] == 0
                or (interval is not None and self._steps[req_id] % interval == 0)
            ):
                request.num_computed_tokens = 0
            known = request.num_tokens - request.num_computed_tokens
            num_rows = self._rows(req_id, 0) - known
            if seen is not None and seen.next_drafts:
                unit = self._rows_of_draft(request)
                num_rows += min(seen.next_drafts, (self.canvas_length - num_rows) // unit) * unit
            request.spec_token_ids = self._canvas[:num_rows]
        self._emitted.clear()
