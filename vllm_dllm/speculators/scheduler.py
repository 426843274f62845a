"""vLLM's scheduler for an engine with a diffusion drafter: adaptive numbers of drafts, and what must not be shared."""

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dllm.decoding.adaptive import DraftController
from vllm_dllm.observe.startup import drafter_facts, log_engine
from vllm_dllm.observe.vllm_log import module_logger
from vllm_dllm.observe.wires import take_proposed
from vllm_dllm.options.drafter import DrafterOptions
from vllm_dllm.runtime.engine_process import exit_with_parent
from vllm_dllm.runtime.scheduling.sessions import SessionRoomScheduler
from vllm_dllm.runtime.scheduling.timing import StartSteps

logger = module_logger(__name__)


def create_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """What vLLM finds under ``scheduler_cls`` and calls in the engine's process, like the class it expects.

    Raises:
        ValueError: the batch has no room for a request and its drafts, or the runner does not know the drafter.
    """
    speculative, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    max_model_len = vllm_config.model_config.max_model_len
    assert speculative is not None
    options = DrafterOptions.model_validate(speculative.draft_model_config.hf_config.drafter_options)
    num_drafts, extra = speculative.num_speculative_tokens, speculative.max_num_new_slots_for_drafting
    if not vllm_config.use_v2_model_runner:
        raise ValueError("A diffusion drafter needs Model Runner V2; leave VLLM_USE_V2_MODEL_RUNNER out")
    least = max_model_len + extra if options.recompute else 1 + num_drafts + extra
    if scheduler.max_num_batched_tokens < least:
        whose = f"a text of max_model_len={max_model_len}" if options.recompute else "one request"
        raise ValueError(
            f"max_num_batched_tokens={scheduler.max_num_batched_tokens} must be at least {least}, the rows of {whose} "
            f"with num_speculative_tokens={num_drafts} and those of its drafter"
        )
    if options.recompute and vllm_config.cache_config.enable_prefix_caching:
        # What the drafter computes of a text depends on all of it, so requests with a beginning in common would write
        # different K/V into the same pages.
        vllm_config.cache_config.enable_prefix_caching = False
        logger.info("draft_cache=recompute: prefix caching is off, requests must not share the drafter's pages")
    num_drafting = scheduler.max_num_batched_tokens // (1 + num_drafts + extra)
    if num_drafting < scheduler.max_num_seqs:
        logger.info(
            "Up to %d of %d requests draft in one step (max_num_batched_tokens=%d, num_speculative_tokens=%d)",
            num_drafting,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            num_drafts,
        )
    log_engine(drafter_facts(vllm_config, options))
    exit_with_parent()
    scheduler_cls = DrafterAsyncScheduler if scheduler.async_scheduling else DrafterScheduler
    return scheduler_cls(options, speculative.draft_model_config.max_model_len, vllm_config=vllm_config, **kwargs)


class DrafterScheduler(SessionRoomScheduler):
    """Takes back drafts that are not worth the target's rows (``adaptive``), and drafts beyond the drafter's context.

    The drafter makes all k drafts of a request in one forward whatever becomes of them, so only rows of the target can
    be saved. How many drafts are verified follows from earlier rounds alone, never from the drafts themselves: the
    distribution of the output stays the target's.

    Args:
        options: the drafter's.
        limit: positions of the drafter's context.
    """

    def __init__(self, options: DrafterOptions, limit: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._limit = limit
        self._cuts_drafts = options.fails_fast
        self._takes_drafts_back = options.adaptive or limit < self.max_model_len
        self.draft_controller = DraftController() if options.adaptive else None

    def warm_up(self, executor: Executor) -> None:
        """Time steps with and without drafts to verify; vLLM calls this once, before the first request."""
        if self.draft_controller is not None:
            # The drafter runs in every step, so a step's cost is a function of its rows alone.
            cost = StartSteps(self, executor).cost([0], None, None, self.num_spec_tokens)
            self.draft_controller = DraftController(cost)

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new and self.draft_controller is not None:
            self.draft_controller.add(request.request_id)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._cuts_drafts:
            # What the device cut off was scheduled, but never proposed.
            scheduled = scheduler_output.scheduled_spec_decode_tokens
            scheduler_output.num_invalid_spec_tokens = {
                req_id: len(scheduled[req_id]) - number
                for req_id, number in take_proposed(model_runner_output).items()
                if req_id in scheduled
            }
        return super().update_from_output(scheduler_output, model_runner_output)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._takes_drafts_back:
            drafting = [request for request in self.running if request.spec_token_ids]
            for request, number in zip(drafting, self._allot(drafting), strict=True):
                request.spec_token_ids = request.spec_token_ids[:number]
        return super().schedule(*args, **kwargs)

    def _allot(self, drafting: Sequence[Request]) -> list[int]:
        """How many drafts of each request to verify."""
        rooms = [max(self._limit - request.num_tokens - request.num_output_placeholders, 0) for request in drafting]
        available = [min(len(request.spec_token_ids), room) for request, room in zip(drafting, rooms, strict=True)]
        if self.draft_controller is None:
            return available
        candidates = [(request.request_id, number) for request, number in zip(drafting, available, strict=True)]
        return self.draft_controller.allot(candidates, len(drafting), 1, len(drafting))

    def make_spec_decoding_stats(self, *args: Any, **counts: Any) -> SpecDecodingStats | None:
        # vLLM calls this for every request whose drafts were verified.
        if self.draft_controller is not None:
            accepted = counts["num_accepted_tokens"]
            self.draft_controller.observe(counts["request_id"], counts["num_draft_tokens"], accepted, accepted)
        return super().make_spec_decoding_stats(*args, **counts)

    def _handle_stopped_request(self, request: Request) -> bool:
        if request.resumable:
            # A turn of a session may end among accepted drafts. Those behind its end are no part of the session; vLLM
            # 0.32 counts them as computed.
            surplus = request.num_computed_tokens - request.num_output_placeholders - (request.num_tokens - 1)
            request.num_computed_tokens -= max(surplus, 0)
        return super()._handle_stopped_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.draft_controller is not None:
            self.draft_controller.remove(request.request_id)
        return super()._free_request(request, *args, **kwargs)


class DrafterAsyncScheduler(DrafterScheduler, AsyncScheduler):
    """The same with asynchronous scheduling."""
