"""Streaming sessions: requests whose prompt goes on once they are answered."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from vllm_dllm.observe.vllm_log import module_logger
from vllm_dllm.observe.wires import counts_of
from vllm_dllm.runtime.scheduling.grammar import GrammarScheduler

logger = module_logger(__name__)

OF_THE_SESSION = ("logprobs", "logprob_token_ids")
"""Sampling parameters that a session keeps from its first prompt: vLLM's front end reads them once, when the session
begins."""


class SessionRoomScheduler(Scheduler):
    """Leaves out a prompt that the text of its session has no room for, and gives an empty answer to it.

    The answer ends for its length, as texts do at ``max_model_len``. vLLM checks the length of the prompt alone, and
    writes the text beyond its tables.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unanswered: list[Request] = []

    def add_request(self, request: Request) -> None:
        session = self.requests.get(request.request_id)
        waits = session is not None and session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        if session is None or not waits or not request.resumable or self._has_room(session, request.num_prompt_tokens):
            super().add_request(request)

    def has_finished_requests(self) -> bool:
        # A step tells of the empty answers, even if it does nothing else.
        return bool(self._unanswered) or super().has_finished_requests()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # The front end joins a session's outputs of one step. So an empty answer that this step brings waits for the
        # next step, and so does the second empty answer of a session.
        due = {session.request_id: session for session in self._unanswered}
        for session in due.values():
            self._unanswered.remove(session)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for session in due.values():
            metrics = session.spec_decode_metrics
            nothing = EngineCoreOutput(
                session.request_id,
                [],
                finish_reason=FinishReason.LENGTH,
                spec_decode_metrics=None if metrics is None else counts_of(metrics),
            )
            outputs.setdefault(session.client_index, EngineCoreOutputs()).outputs.insert(0, nothing)
        return outputs

    def _has_room(self, session: Request, num_tokens: int) -> bool:
        """Whether a session has room for a prompt of so many tokens and an answer; notes where it has not."""
        if session.num_tokens + num_tokens < self.max_model_len:
            return True
        logger.warning(
            "Leaving out a prompt of %d tokens: the streaming session %s has %d, and max_model_len=%d",
            num_tokens,
            session.request_id,
            session.num_tokens,
            self.max_model_len,
        )
        self._unanswered.append(session)
        return False

    def _handle_stopped_request(self, request: Request) -> bool:
        queue = request.streaming_queue
        while queue and queue[0] is not None and not self._has_room(request, len(queue[0].prompt_token_ids or ())):
            queue.popleft()
        return super()._handle_stopped_request(request)


class SessionScheduler(SessionRoomScheduler, GrammarScheduler):
    """Begins every answer of a session with what prefix caching has of the text, and keeps nothing for a session that
    waits for its next prompt.

    vLLM keeps a session's pages and its slot of the workers, and goes on where the last step ended. Here the K/V of the
    last block is not final, and the block's rows beyond the answer count as computed.
    """

    max_num_active_reqs: int

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # vLLM counts sessions without a prompt among the requests that have a slot.
        places = self.max_num_active_reqs
        self.max_num_active_reqs = places + self.num_waiting_for_streaming_input
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_active_reqs = places

    def _enqueue_waiting_request(self, request: Request) -> None:
        super()._enqueue_waiting_request(request)
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            # No step reads the pages again. Requests would wait for the pages, and a reset of the caches would fail.
            self._let_go(request)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """Go on with a text to which a further prompt was added: all of it is a prompt now."""
        session.num_computed_tokens = session.num_tokens
        session._all_token_ids.append(-1)  # vLLM drops the last token, up to 0.32 only where it is not computed
        for name in OF_THE_SESSION:
            setattr(update.sampling_params, name, getattr(session.sampling_params, name))
        super()._update_request_as_session(session, update)
        # A prompt that came early finds the session with its pages and its slot.
        self._let_go(session)
        session.num_computed_tokens, session.spec_token_ids = 0, []

    def _let_go(self, session: Request) -> None:
        """Free the pages of a session, and have the workers free its slot with the next step."""
        self._free_request_blocks(session)
        self.reset_preempted_req_ids.add(session.request_id)
