"""Streaming sessions: requests whose prompt goes on once they are answered."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from vllm_dllm.runtime.scheduling.committed import CommittedPagesScheduler


class SessionScheduler(CommittedPagesScheduler):
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
        super()._update_request_as_session(session, update)
        # A prompt that came early finds the session with its pages and its slot.
        self._let_go(session)
        session.num_computed_tokens, session.spec_token_ids = 0, []

    def _let_go(self, session: Request) -> None:
        """Free the pages of a session, and have the workers free its slot with the next step."""
        self._free_request_blocks(session)
        self.reset_preempted_req_ids.add(session.request_id)
