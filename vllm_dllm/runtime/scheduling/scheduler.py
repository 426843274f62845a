"""vLLM's scheduler, taught that a diffusion block is the unit of everything.

The worker decides what a row is; what the scheduler must get right is how many rows a request has, and where its
tokens end.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from vllm_dllm.decoding.adaptive import DraftController
from vllm_dllm.decoding.step_cost import StepCost
from vllm_dllm.geometry import geometry_of
from vllm_dllm.observe.startup import diffusion_facts, log_engine
from vllm_dllm.observe.wires import Observation
from vllm_dllm.runtime.plan.scratch import pages_of_a_draft, scratch_pages_of
from vllm_dllm.runtime.plan.spans import pages_of_a_request
from vllm_dllm.runtime.scheduling.sessions import SessionScheduler
from vllm_dllm.runtime.scheduling.timing import StartSteps
from vllm_dllm.runtime.turns import RowNeeds, Turns, share

WITHOUT_ROWS = (RequestStatus.WAITING_FOR_STREAMING_REQ, RequestStatus.WAITING_FOR_REMOTE_KVS)
"""Of waiting requests that want no rows: sessions without a prompt, and requests whose K/V is being loaded."""


def without_scratch_pages(vllm_config: Any, kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """The pages that the scheduler may hand out: all but those that drafts write to.

    Raises:
        ValueError: too few are left for one request of ``max_model_len``.
    """
    page_size, num_pages = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size, kv_cache_config.num_blocks
    reserved = scratch_pages_of(vllm_config, page_size)
    geometry, max_model_len = geometry_of(vllm_config), vllm_config.model_config.max_model_len
    left = num_pages - reserved
    # One page is vLLM's null page.
    needed = pages_of_a_request(geometry, max_model_len, page_size) + 1
    # Without drafts, and where no text reaches beyond max_model_len, vLLM itself has looked.
    if left < needed and (reserved or geometry.traits.blocks_from_prompt):
        there, lower = f"there are {left} KV pages of {page_size} tokens", "max_model_len"
        if reserved:
            there = (
                f"max_drafts={geometry.max_drafts} and max_num_seqs={vllm_config.scheduler_config.max_num_seqs} set "
                f"{reserved} KV pages of {page_size} tokens aside for drafts, which leaves {max(left, 0)} "
                f"of {num_pages}"
            )
            lower = "max_num_seqs or max_drafts, or max_model_len (-1 does not reckon with drafts)"
        twice = rows = ""
        if geometry.options.has_room_for_guidance:
            twice, rows = ", twice for guidance,", " or max_num_batched_tokens"
        raise ValueError(
            f"{there}, and one request of max_model_len={max_model_len} with its last block{twice} needs {needed}; "
            f"lower {lower}{rows}, or give the KV cache more memory"
        )
    # KV offloading reckons the size of a page from these.
    tensors = [
        dataclasses.replace(tensor, size=tensor.size // num_pages * left) for tensor in kv_cache_config.kv_cache_tensors
    ]
    return dataclasses.replace(kv_cache_config, num_blocks=left, kv_cache_tensors=tensors)


@contextlib.contextmanager
def _caching_nothing(manager: KVCacheManager) -> Iterator[None]:
    """Keep vLLM from showing prefix caching the pages of new tokens as they come.

    Pages of a request that ends are never committed; those of the others become visible with a later step.
    """
    cache_blocks = manager.cache_blocks
    manager.cache_blocks = lambda *_: None
    try:
        yield
    finally:
        manager.cache_blocks = cache_blocks


class DllmScheduler(SessionScheduler):
    """Gives a decoding request the rows of its current block and its drafts, and those of a finished block that is to
    be committed.

    A block is emitted when its last mask is gone and committed, its final tokens written to the K/V cache, in the
    request's next step. Pages of generated text become visible to prefix caching only when that step is scheduled:
    vLLM hashes full pages as it allocates slots for a step, after which no other request can be scheduled to a step
    before it. What prefix caching was shown for a step that the request is preempted in is taken back.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, without_scratch_pages(vllm_config, kv_cache_config), *args, **kwargs)
        self.max_model_len: int
        geometry = self.geometry
        self.page_size: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.pages_per_draft = pages_of_a_draft(geometry, self.page_size)
        log_engine(diffusion_facts(vllm_config, num_pages=kv_cache_config.num_blocks, page_size=self.page_size))
        self.traits, self.options = geometry.traits, geometry.options
        self.block_length, self.window_length = geometry.block_length, geometry.window_length
        self.canvas_length, self.max_drafts = geometry.canvas_length, geometry.max_drafts
        self._canvas = [-1] * self.canvas_length
        self._rows_beyond_the_limit = self.canvas_length
        # Requests that emitted in the step being processed. What a request emits and goes on after is a finished block.
        self._emitted: set[str] = set()
        # A window of several blocks holds the finished ones. A commit that predicts is a step of its own.
        is_block = self.window_length == self.block_length
        self._commits_beside_the_next_block = is_block and not self.traits.commit_predicts
        # Requests whose next step commits a finished block.
        self._commits: set[str] = set()
        # Requests that have as many drafts as pay.
        self._auto: set[str] = set()
        self._arrival_times: set[float] = set()
        # Of the request that came last: its own time, and the time that it was given.
        self._last_arrival = (0.0, 0.0)
        self.draft_controller = DraftController()
        self._decides_by_costs = self.max_drafts > 0
        self._turns = Turns()
        # vLLM's hook for models whose prefill chunks must end on certain positions.
        self.need_mamba_block_aligned_split = True
        self._allocate_slots = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_window
        if self.traits.blocks_from_prompt:
            # vLLM cuts a request's pages there. The last block may end beyond, and an unconditional branch has its
            # pages behind the text.
            pages = pages_of_a_request(geometry, self.max_model_len, self.page_size)
            self.kv_cache_manager.max_model_len = pages * self.page_size

    def warm_up(self, executor: Executor) -> None:
        """Take steps for the workers to compile, and time some; vLLM calls this once, before the first request."""
        super().warm_up(executor)
        if cost := StartSteps(self, executor).take(self.geometry, timed=self._decides_by_costs):
            self.learn_costs(cost)

    def learn_costs(self, cost: StepCost) -> None:
        """Decide by these costs from now on."""
        self.draft_controller = DraftController(cost)

    def _heed_options(self, request: Request) -> None:
        super()._heed_options(request)
        self._set_arrival_apart(request)
        self._forget_auto(request.request_id)
        options = self.asked[request.request_id]
        if options.auto_drafts:
            self._auto.add(request.request_id)
            self.draft_controller.add(request.request_id, (options.kind, options.verify))

    def _forget_auto(self, req_id: str) -> None:
        if req_id in self._auto:
            self._auto.remove(req_id)
            self.draft_controller.remove(req_id)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        self._arrival_times.discard(session.arrival_time)
        super()._update_request_as_session(session, update)

    def _set_arrival_apart(self, request: Request) -> None:
        """Give a request an arrival time of its own, under priority scheduling.

        vLLM preempts the request that arrived last, and the first of several that arrived together. Answers of one
        request (``n``) arrive together: each would preempt another in turn, and none would ever finish its block.
        """
        if self.policy != SchedulingPolicy.PRIORITY:
            return
        own, (last_own, last) = request.arrival_time, self._last_arrival
        if own == last_own:
            # Otherwise each answer of a request would try the times of all answers before it.
            request.arrival_time = last
        while request.arrival_time in self._arrival_times:
            request.arrival_time = math.nextafter(request.arrival_time, math.inf)
        self._arrival_times.add(request.arrival_time)
        self._last_arrival = own, request.arrival_time

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._arrival_times.discard(request.arrival_time)
        self._commits.discard(request.request_id)
        self._forget_auto(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._share_rows()
        # The last block is denoised whole even where it reaches beyond max_model_len: with fewer mask tokens in it the
        # model would write another text. What exceeds the limit is never emitted. The page of a block's start holds all
        # of it, so no page is needed beyond the limit, but where blocks begin anywhere.
        limit: int = self.max_model_len
        self.max_model_len = limit + self._rows_beyond_the_limit
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_model_len = limit
        # The worker would return a placeholder for each row that each request may have, and nobody reads them.
        output.num_spec_tokens_to_schedule = 0
        self._turns.end_step(output.num_scheduled_tokens)
        return output

    def _allocate_window(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Pages for the window of a decoding request, however many rows its drafts have: those write to scratch."""
        self._note_pages(request)
        if not request.spec_token_ids:
            return self._allocate_slots(request, num_new_tokens, *args, **kwargs)
        # With a step in flight (async scheduling) vLLM counts all its rows as computed, drafts too. What that step can
        # add to the text is one window, behind which this one's begins.
        window = max(self.window_length, 2 * self.block_length)
        in_flight = request.num_output_placeholders
        request.num_computed_tokens -= in_flight
        try:
            num_new_tokens = min(in_flight + num_new_tokens, 2 * window if in_flight else window)
            return self._allocate_slots(request, num_new_tokens, *args, **kwargs)
        finally:
            request.num_computed_tokens += in_flight

    def _rows_of(self, request: Request) -> RowNeeds:
        """Rows of a decoding request, its drafts as they are now."""
        wanted, options = self._rows_wanted(request), self.asked[request.request_id]
        if not options.num_drafts or options.needs_all_drafts:
            # Where tokens depend on the number of drafts none is taken back: load must not change an answer.
            return RowNeeds(wanted, wanted, 1)
        return RowNeeds(wanted, min(wanted, self._rows(request.request_id, 0)), self._rows_of_draft(request))

    def _rows(self, req_id: str, num_drafts: int) -> int:
        """Rows of a request's next step, the step before it known. A step that commits has no drafts."""
        if req_id in self._commits:
            return 2 * self.block_length
        return (1 + num_drafts) * self.window_length

    def _share_rows(self) -> None:
        """Take drafts back that do not pay, and choose who gets drafts and rows where a step has too few rows for all.

        The order of ``running`` stays, by which vLLM chooses whom to preempt: the first must go on, or nobody would.
        """
        decoding = [request for request in self.running if request.spec_token_ids]
        if self._auto:
            self._allot_drafts(decoding)
        budget, prompts = self.max_num_scheduled_tokens, self._rows_of_prefills()
        if sum(map(self._rows_wanted, decoding)) + prompts <= budget:
            return self._turns.all_have_room()
        needed = {request.request_id: self._rows_wanted(request) for request in decoding}
        drafting = [request for request in decoding if self.asked[request.request_id].num_drafts]
        rows = [self._rows_of(request) for request in drafting]
        needed |= {request.request_id: each.fixed for request, each in zip(drafting, rows, strict=True)}
        fixed = sum(needed.values())
        if drafting:
            drafts, units = [each.drafts for each in rows], [each.per_draft for each in rows]
            self._keep_drafts(drafting, rows, share(drafts, units, max(0, budget - fixed - prompts)))
        prompts = min(prompts, self._turn_of_prompts())
        if fixed + min(prompts, self.block_length) <= budget:
            return self._turns.all_have_room()
        return self._turns.take(needed, prompts, budget)

    def _turn_of_prompts(self) -> int:
        """Rows that prompts may take where a step has too few. Many may be waiting, for pages and not for rows."""
        budget = self.max_num_scheduled_tokens
        # Without chunked prefill a prompt comes whole.
        return max(self.block_length, budget // 4) if self.scheduler_config.enable_chunked_prefill else budget

    def _allot_drafts(self, decoding: list[Request]) -> None:
        """Take drafts of ``auto`` requests back that do not pay."""
        auto = [request for request in decoding if request.request_id in self._auto]
        rows = [self._rows_of(request) for request in auto]
        candidates = [(request.request_id, each.drafts) for request, each in zip(auto, rows, strict=True)]
        base_rows = sum(map(self._rows_wanted, decoding)) - sum(each.drafts * each.per_draft for each in rows)
        # Drafts of one engine have as many rows, but for those that the end of a text cuts short.
        unit = max(map(self._rows_of_draft, decoding), default=self.window_length)
        self._keep_drafts(auto, rows, self.draft_controller.allot(candidates, base_rows, unit, len(decoding)))

    def _num_branches_drafted(self, req_id: str) -> int:
        # Of one branch S2D2 may verify several drafts, and drafts of LinearSpec and ISD stand in the block itself.
        return min(self.asked[req_id].num_drafts, super()._num_branches_drafted(req_id))

    def _keep_drafts(self, requests: list[Request], rows: list[RowNeeds], drafts: list[int]) -> None:
        """Take all but so many ``drafts`` of each request back that may be taken back."""
        for request, each, number in zip(requests, rows, drafts, strict=True):
            if excess := each.wanted - each.keeping(number):
                request.spec_token_ids = request.spec_token_ids[: len(request.spec_token_ids) - excess]

    def _rows_of_draft(self, request: Request) -> int:
        return self.window_length

    def _rows_wanted(self, request: Request) -> int:
        """Rows of a decoding request's next step if nothing limits them."""
        return len(request.spec_token_ids)

    def _rows_of_prefills(self) -> int:
        """Rows that requests want whose prompt is not computed yet: those running, and waiting ones with a place."""
        budget, rows = self.max_num_scheduled_tokens, 0
        for request in self.running:
            if not request.spec_token_ids:
                rows += request.num_tokens - request.num_computed_tokens
        # Sessions wait in a queue of their own, with a further prompt or without.
        places = self.max_num_active_reqs - len(self.running)
        waiting = itertools.chain(self.kv_holding_waiting, self.waiting)
        asking = (request for request in waiting if request.status not in WITHOUT_ROWS)
        for request in itertools.islice(asking, max(0, places)):
            if rows >= budget:
                break
            rows += request.num_tokens
        return max(0, min(rows, budget))

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        with _caching_nothing(self.kv_cache_manager):
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        for req_id in self._auto & self.observations.keys():
            seen = self.observations[req_id]
            self.draft_controller.observe(req_id, seen.drafted, seen.accepted, seen.deepest)
        return outputs

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Rows of this step out of ``num_new_tokens`` that the budget allows; 0: none in this step.

        A prefill chunk ends on the border of a block or with the prompt, or anywhere where tokens of the prompt see
        only what is before them. Rows of a decoding request come all or not at all, but for those of drafts.
        """
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        known = request.num_tokens + request.num_output_placeholders
        end = start + num_new_tokens
        if start >= known:
            return self._decoding_rows(request, num_new_tokens)
        prompt_rows = self._turns.prompt_rows
        if prompt_rows is not None and num_new_tokens > prompt_rows:
            if not self.scheduler_config.enable_chunked_prefill:
                return 0
            end = start + prompt_rows
        if end < known and not self.traits.causal_context:
            end = end // self.block_length * self.block_length
        # Decoding begins in a step of its own: its rows are laid out by blocks, those of the prompt by tokens.
        num_new_tokens = max(min(end, known) - start, 0)
        if prompt_rows is not None:
            self._turns.prompt_rows = prompt_rows - num_new_tokens
        return num_new_tokens

    def _decoding_rows(self, request: Request, num_new_tokens: int) -> int:
        """Rows of a decoding request out of ``num_new_tokens``: all, or at least all but those of drafts, or none."""
        if request.request_id in self._turns.sitting_out:
            return 0
        if num_new_tokens == self._rows_wanted(request):
            return num_new_tokens
        return self._rows_of(request).within(num_new_tokens)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Set the rows of each request's next step. Which tokens stand in them is the worker's knowledge."""
        for req_id in draft_token_ids.req_ids:
            request = self.requests.get(req_id)
            # A session that waits for its next prompt, or was given it already, is not finished either.
            if request is not None and request.status == RequestStatus.RUNNING:
                request.spec_token_ids = self._canvas[: self._draft_rows(request, self.observations.get(req_id))]
        self._emitted.clear()

    def _draft_rows(self, request: Request, seen: Observation | None) -> int:
        """Rows of the request's next step that vLLM takes for drafts, given what the step before did for it."""
        req_id = request.request_id
        self._commits.discard(req_id)
        if request.is_prefill_chunk:
            return 0
        if self._commits_beside_the_next_block and req_id in self._emitted:
            self._commits.add(req_id)
        return self._rows(req_id, 0 if seen is None else seen.next_drafts)

    def _update_request_with_output(self, request: Request, *args: Any, **kwargs: Any) -> tuple[list[int], bool]:
        self._emitted.add(request.request_id)
        return super()._update_request_with_output(request, *args, **kwargs)
