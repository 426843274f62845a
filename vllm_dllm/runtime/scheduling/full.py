"""Scheduling of models with full attention: refreshes, whole or not at all."""

from typing import Any

from vllm.v1.request import Request, RequestStatus

from vllm_dllm.decoding.holes import Holes
from vllm_dllm.observe.wires import Observation
from vllm_dllm.runtime.plan.spans import Spans, cdiv
from vllm_dllm.runtime.scheduling import DllmScheduler


class FullAttentionScheduler(DllmScheduler):
    """Gives a request all rows of its text where its K/V are to be computed anew, else those of its current block.

    To vLLM a request in a refresh has no computed tokens. vLLM admits a request without draft rows, and masks to be
    denoised are draft rows to vLLM. So a request enters with one row, which reserves a place in the batch and the pages
    of the text and computes nothing. The next step is the first refresh of the request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spans = Spans.of(self.geometry)
        # Position behind the last block of each request.
        self._text_end: dict[str, int] = {}
        # Denoising steps that each request's block has had.
        self._steps: dict[str, int] = {}
        self._mask_token_id = self.vllm_config.model_config.hf_config.mask_token_id
        self._default_max_tokens = self.vllm_config.model_config.get_diff_sampling_param().get("max_tokens")

    def _heed_options(self, request: Request) -> None:
        super()._heed_options(request)
        holes = self.asked[request.request_id].holes
        if holes is not None:
            _put_in_order(request, holes, self._mask_token_id)
        prompt_length = request.num_prompt_tokens
        self._text_end[request.request_id] = self.spans.text_end(
            prompt_length,
            min(request.max_tokens, self.max_model_len - prompt_length),
            infill=holes is not None,
        )
        self._steps[request.request_id] = 0

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        for kept in (self._text_end, self._steps):
            kept.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def _is_guided(self, req_id: str) -> bool:
        """Whether the request computes its text twice."""
        return self.asked[req_id].cfg_scale > 0

    def _window_end(self, request: Request) -> int:
        return int(self.spans.window_end(request.num_tokens, self._text_end[request.request_id]))

    def _allocate_window(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Pages for the whole text and its unconditional branch, also of a request that enters, which could not go on
        without the pages."""
        end = self._window_end(request)
        if self._is_guided(request.request_id):
            text_end = self._text_end[request.request_id]
            end += int(cdiv(text_end, self.page_size)) * self.page_size
        num_new_tokens = end - request.num_computed_tokens
        return self._allocate_slots(request, num_new_tokens, *args, **kwargs)

    def _rows_of_prefills(self) -> int:
        """Rows of requests that enter: one each. Their first refresh is scheduled with the decoding requests."""
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
        num_texts = 1 + self._is_guided(req_id)
        return num_texts * int(root.length) + num_drafts * self._rows_of_draft(request)

    def _mamba_block_aligned_split(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
        return self._decoding_rows(request, num_new_tokens) if request.spec_token_ids else 1

    def _update_request_with_output(self, request: Request, *args: Any, **kwargs: Any) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, *args, **kwargs)
        if request.status == RequestStatus.FINISHED_LENGTH_CAPPED and request.max_tokens == self._default_max_tokens:
            # A response has no other place for what ended it.
            request.stop_reason = f"max_tokens={request.max_tokens}, the default"
        return new_token_ids, stopped

    def _draft_rows(self, request: Request, seen: Observation | None) -> int:
        req_id, interval = request.request_id, self.options.refresh_interval
        if seen is None or req_id in self._emitted:
            self._steps[req_id] = 0
        else:
            self._steps[req_id] += 1 + seen.accepted
        steps = self._steps[req_id]
        if self.spans.cache == "none" or steps == 0 or (interval is not None and steps % interval == 0):
            request.num_computed_tokens = 0
        # Rows of known text are no drafts to vLLM.
        num_rows = self._rows(req_id, 0) - (request.num_tokens - request.num_computed_tokens)
        if seen is not None and seen.next_drafts:
            unit = self._rows_of_draft(request)
            num_rows += min(seen.next_drafts, (self.canvas_length - num_rows) // unit) * unit
        return num_rows


def _put_in_order(request: Request, holes: Holes, mask_token_id: int) -> None:
    """Make the known tokens of a text with holes the prompt of its request, in the order of the sequence.

    The scheduler and the workers alone have them so: vLLM's front end keeps the prompt as it was sent.
    """
    tokens, first = request.prompt_token_ids, holes.runs[0][0]
    assert tokens is not None
    known = [token for token in tokens[first:] if token != mask_token_id] + tokens[:first]
    request.prompt_token_ids, request.num_prompt_tokens = known, len(known)
    # In place: a read-only view of the list is part of the request.
    request._all_token_ids[:] = known
