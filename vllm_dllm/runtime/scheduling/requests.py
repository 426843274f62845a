"""What the scheduler keeps of each request: options, adapter, and what prefix caching and workers know of it."""

import copy
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, StreamingUpdate

from vllm_dllm.geometry import Geometry, geometry_of
from vllm_dllm.methods import VERIFIER_ROWS
from vllm_dllm.observe.metrics import RequestMetricsScheduler
from vllm_dllm.options.resolve import options_of
from vllm_dllm.options.resolved import PREEMPTED_KEY, ResolvedOptions


class RequestScheduler(RequestMetricsScheduler):
    """Holds the options of every request until the request is freed, and decides by them.

    - A request whose LoRA adapter has no slot waits. vLLM 0.32 counts the adapters of the requests that a step has rows
      for. Here a running request may have no rows in a step, as requests take turns. Another adapter would take the
      slot meanwhile, and vLLM does not survive a step with more adapters than slots. vLLM 0.33 counts those of all
      running requests itself.
    - A preempted request whose window the workers keep (`vllm_dllm.runtime.kept_windows`) is marked, and a finished
      request is named in two steps in a row. vLLM tells a worker of both in the same words: the request leaves its
      slot. With the second naming the worker drops what it kept.
    - Prefix caching is shown pages that hold final K/V, or will when the step is over. Pages that were shown for a step
      that never computes them are taken back.
    """

    geometry: Geometry

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.geometry = geometry_of(self.vllm_config)
        self.asked: dict[str, ResolvedOptions] = {}
        # Requests whose next forward is the first of an answer.
        self._beginning: list[Request] = []
        # Adapters of running requests and of those that this step lets in; None: not known yet.
        self._adapters: set[int] | None = None
        # Requests that were finished since the last step, and before it.
        self._finished_now: set[str] = set()
        self._to_name_again: set[str] = set()
        # By priority a request may be preempted in a step that it has its rows of: how many pages it showed prefix
        # caching before that step, of each group of layers.
        self._pages_shown: dict[str, list[int]] = {}
        if self.geometry.traits.causal_context:
            coordinator = self.kv_cache_manager.coordinator
            self._cache_pages = coordinator.cache_blocks
            coordinator.cache_blocks = self._cache_committed_pages

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for request in self._beginning:
            if not request.is_finished():
                self._begin_answer(request)
        self._beginning.clear()
        self._adapters = None
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._pages_shown.clear()
        # A request of the same name may have come meanwhile.
        if again := self._to_name_again - self.requests.keys():
            output.finished_req_ids = output.finished_req_ids | again
        self._to_name_again, self._finished_now = self._finished_now, set()
        return output

    # Options.

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            self._heed_options(request)
            self._beginning.append(request)
        super().add_request(request)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        super()._update_request_as_session(session, update)
        self._heed_options(session)
        # In the next step. The step now may end the answer before, whose output tells what was observed of that answer.
        self._beginning.append(session)

    def _begin_answer(self, request: Request) -> None:
        """Have what is observed of a request from now on tell what the options ask for, of this answer alone."""
        request.stop_reason = None
        if (metrics := request.spec_decode_metrics) is None:
            return
        options, blocks = self.asked[request.request_id], None
        if options.step_map:
            start = request.num_prompt_tokens if self.geometry.traits.blocks_from_prompt else 0
            blocks = start, self.geometry.block_length
        metrics.begin_answer(wants_events=options.step_events, blocks=blocks)

    def _heed_options(self, request: Request) -> None:
        """Take note of what a new request asks for, or the next prompt of a streaming session.

        A prompt that comes while the session still answers the one before waits, and so do its options.
        """
        self.asked[request.request_id] = options_of(request.sampling_params, self.geometry)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.asked.pop(request.request_id).keeps_window:
            self._finished_now.add(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    # Adapters.

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        if self.lora_config is None or request.lora_request is None:
            return True
        if self._adapters is None:
            self._adapters = {each.lora_request.lora_int_id for each in self.running if each.lora_request}
        adapter = request.lora_request.lora_int_id
        if adapter not in self._adapters and len(self._adapters) >= self.lora_config.max_loras:
            return False
        self._adapters.add(adapter)
        return True

    # Preemption, and pages that prefix caching knows.

    def reset_for_new_weights(self) -> None:
        """Empty the caches. No request goes on with its window: old weights chose the tokens. For `changed_weights`."""
        self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        for request in self.requests.values():
            params = request.sampling_params
            if params is not None and PREEMPTED_KEY in (params.extra_args or {}):
                request.sampling_params = params = copy.copy(params)
                params.extra_args = {key: value for key, value in params.extra_args.items() if key != PREEMPTED_KEY}

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Take the pages back, too, that prefix caching was shown for rows of this step: nobody computes them now."""
        shown = self._pages_shown.pop(request.request_id, ())
        managers = self.kv_cache_manager.coordinator.single_type_managers
        for manager, number in zip(managers, shown, strict=False):
            pages = manager.req_to_blocks[request.request_id][number:]
            self.kv_cache_manager.evict_blocks({page.block_id for page in pages})
        if self.asked[request.request_id].keeps_window:
            # Answers of one request may share their parameters.
            request.sampling_params = params = copy.copy(request.sampling_params)
            params.extra_args = {**(params.extra_args or {}), PREEMPTED_KEY: True}
        return super()._preempt_request(request, *args, **kwargs)

    def _note_pages(self, request: Request) -> None:
        """Before a request gets its pages of a step: note what prefix caching knows of the request already."""
        if self.policy == SchedulingPolicy.PRIORITY:
            managers = self.kv_cache_manager.coordinator.single_type_managers
            shown = [manager.num_cached_block.get(request.request_id, 0) for manager in managers]
            self._pages_shown.setdefault(request.request_id, shown)

    def _cache_committed_pages(self, request: Request, num_tokens: int) -> Any:
        """Show prefix caching no page that the current block, which may begin anywhere, reaches into."""
        prompt_length = request.num_prompt_tokens
        finished = (request.num_tokens - prompt_length) // self.block_length * self.block_length
        if VERIFIER_ROWS[self.asked[request.request_id].verify].is_autoregressive:
            # A round begins with the last token, whose K/V is not final yet.
            finished = max(request.num_tokens - prompt_length - 1, 0)
        return self._cache_pages(request, min(num_tokens, prompt_length + finished))
