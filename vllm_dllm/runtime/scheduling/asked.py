"""What the requests of an engine ask for, read once."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, StreamingUpdate

from vllm_dllm.geometry import Geometry, geometry_of
from vllm_dllm.observe.metrics import RequestMetricsScheduler
from vllm_dllm.options.resolve import options_of
from vllm_dllm.options.resolved import ResolvedOptions


class AskedScheduler(RequestMetricsScheduler):
    """Holds the options of every request, until the request is freed."""

    geometry: Geometry

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.geometry = geometry_of(self.vllm_config)
        self.asked: dict[str, ResolvedOptions] = {}
        # Requests whose next forward is the first of an answer.
        self._beginning: list[Request] = []

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

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for request in self._beginning:
            if not request.is_finished():
                self._begin_answer(request)
        self._beginning.clear()
        return super().schedule(*args, **kwargs)

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
        del self.asked[request.request_id]
        return super()._free_request(request, *args, **kwargs)
