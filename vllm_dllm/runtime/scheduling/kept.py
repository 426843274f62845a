"""What workers are told of requests whose windows they keep over a preemption (`vllm_dllm.runtime.kept_windows`)."""

import copy
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_dllm.options.resolved import PREEMPTED_KEY
from vllm_dllm.runtime.scheduling.grammar import GrammarScheduler


class KeptWindowsScheduler(GrammarScheduler):
    """Marks requests that are preempted, and names a finished request in two steps in a row.

    vLLM tells a worker of both in the same words: the request leaves its slot. With the second naming the worker drops
    what it kept.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Requests that were finished since the last step, and before it.
        self._finished_now: set[str] = set()
        self._to_name_again: set[str] = set()

    def reset_for_new_weights(self) -> None:
        """Empty the caches. No request goes on with its window: old weights chose the tokens. For `changed_weights`."""
        self.reset_prefix_cache(reset_running_requests=True)
        for request in self.requests.values():
            params = request.sampling_params
            if params is not None and PREEMPTED_KEY in (params.extra_args or {}):
                request.sampling_params = params = copy.copy(params)
                params.extra_args = {key: value for key, value in params.extra_args.items() if key != PREEMPTED_KEY}

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.asked[request.request_id].keeps_window:
            # Answers of one request may share their parameters.
            request.sampling_params = params = copy.copy(request.sampling_params)
            params.extra_args = {**(params.extra_args or {}), PREEMPTED_KEY: True}
        return super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.asked[request.request_id].keeps_window:
            self._finished_now.add(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        # A request of the same name may have come meanwhile.
        again = self._to_name_again - self.requests.keys()
        if again:
            output.finished_req_ids = output.finished_req_ids | again
        self._to_name_again, self._finished_now = self._finished_now, set()
        return output
