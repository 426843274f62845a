"""Scheduling of a step before the step before it is known."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.decoding.commits import CommitRows
from vllm_dllm.decoding.step_cost import StepCost
from vllm_dllm.runtime.scheduling.scheduler import DllmScheduler
from vllm_dllm.runtime.scheduling.timing import is_alone


class DllmAsyncScheduler(DllmScheduler, AsyncScheduler):
    """Gives every request rows for all that its step may have to do.

    Which requests commit a finished block only the workers know. A request that has no rows for both commits first, and
    goes on with its next block in its next step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commit_rows = CommitRows()
        # Rows of the step in flight, which vLLM counts as computed, and rows of the step that is scheduled.
        self._rows_beyond_the_limit = 2 * self.canvas_length
        self._decides_by_costs |= self._commits_beside_the_next_block and is_alone(self.parallel_config)
        # Whether requests of the next step have rows of a commit and of the next block.
        self._beside = self._commits_beside_the_next_block
        # Blocks that a step finished, and those of them that the next step commits.
        self._finished = self._to_commit = 0

    def learn_costs(self, cost: StepCost) -> None:
        super().learn_costs(cost)
        self.commit_rows = CommitRows(cost)

    def _rows(self, req_id: str, num_drafts: int) -> int:
        rows = (1 + num_drafts) * self.window_length
        return max(rows, 2 * self.block_length) if self._beside else rows

    def _share_rows(self) -> None:
        if self._commits_beside_the_next_block:
            self._place_commits()
        super()._share_rows()

    def _place_commits(self) -> None:
        """Decide whether the next step has rows for commits beside those of the blocks, and take them back if not."""
        # A commit may stand where drafts would, so requests that keep theirs have rows for it anyway.
        own, others, length = 0, min(self._rows_of_prefills(), self._turn_of_prompts()), self.block_length
        for request in self.running:
            options = self.asked[request.request_id]
            if options.num_drafts and not options.auto_drafts:
                others += self._rows_wanted(request)
            elif request.spec_token_ids:
                own += length
        fits = others + 2 * own <= self.max_num_scheduled_tokens
        self._beside = fits and self.commit_rows.beside(others + own, own)
        if not self._beside:
            for request in self.running:
                if request.spec_token_ids and not self.asked[request.request_id].num_drafts:
                    request.spec_token_ids = self._canvas[:length]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM assumes that every step emits a token, and leaves out requests that the step in flight would then end. A
        denoising step may emit none, so the ``max_tokens`` of these requests is larger while vLLM schedules."""
        ending = [request for request in self.running if _ends_next(request)]
        for request in ending:
            request.max_tokens += self.canvas_length + 1
        try:
            return super().schedule(*args, **kwargs)
        finally:
            for request in ending:
                request.max_tokens -= self.canvas_length + 1

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        # As many rows as the next step may want.
        self._beside = self._commits_beside_the_next_block
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[req_id]
            if request.spec_token_ids:
                request.spec_token_ids = self._canvas[: self._rows(req_id, self.asked[req_id].num_drafts)]

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        to_commit, self._finished, self._to_commit = self._to_commit, 0, 0
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._emitted.clear()
        rows = [len(tokens) for tokens in scheduler_output.scheduled_spec_decode_tokens.values()]
        if rows and self._commits_beside_the_next_block:
            # Requests with the rows of one block that had a block to commit did nothing else.
            commits = rows.count(self.block_length) / len(rows) * to_commit
            self.commit_rows.observe(max(len(rows) - commits, 0.0), self._finished)
        return outputs

    def _update_request_with_output(self, request: Request, *args: Any, **kwargs: Any) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, *args, **kwargs)
        self._finished += 1
        self._to_commit += not stopped
        return new_token_ids, stopped


def _ends_next(request: Request) -> bool:
    """Whether the token that a step emits at least is the last one of the text, to vLLM."""
    emitted = request.num_computed_tokens - request.num_output_placeholders - request.num_prompt_tokens
    return request.num_output_placeholders > 0 and emitted + 2 >= request.max_tokens
