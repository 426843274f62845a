"""Where vLLM counts the forwards of a request, and where it shows them.

The worker says what a forward did (``vllm_dllm.observe.wires``) and the scheduler observes it;
``vllm_dllm.observe.stats`` reads the observations of one request; the stat logger below adds them up for
``/metrics``, beside what the scheduler says of every step. ``docs/metrics.md`` is for those who look at them.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dllm.geometry import geometry_of
from vllm_dllm.observe.stats import observed_stats
from vllm_dllm.observe.wires import Observation, unpack
from vllm_dllm.runtime.plan.scratch import scratch_pages_of

if TYPE_CHECKING:
    from prometheus_client.metrics import MetricWrapperBase
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

LABELS = ["model_name", "engine"]
TOKENS_PER_FORWARD_BUCKETS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ACCEPTANCE_DEPTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
ROWS_PER_STEP_BUCKETS = tuple(1 << exponent for exponent in range(2, 17))

ROWS_PER_STEP = "vllm_dllm:rows_per_step"
SCRATCH_PAGES_USED = "vllm_dllm:scratch_pages_used"
SCRATCH_PAGES = "vllm_dllm:scratch_pages"
DENOISING_STEPS = "vllm:diffusion_num_denoising_steps"
CANVAS_POSITIONS = "vllm:diffusion_num_canvas_positions"


@dataclass
class DiffusionRequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's observations of a request, with the meaning that their fields have for diffusion.

    Has no fields of its own, for between processes only vLLM's travel:

    - ``histogram[n]``: forwards that committed n tokens;
    - ``num_draft_tokens``: rows that the forwards computed for the request;
    - ``per_step_drafted[i]``: branches that forward i denoised, so 1 for the block without drafts, and 0 where the
      forward only wrote a finished block to the K/V cache;
    - ``per_step_accepted[i]``: denoising steps that forward i skipped.
    """

    def __post_init__(self) -> None:
        self.forward: Observation | None = None
        """What the worker said of the forward to be observed next."""
        self.last_committed = 0

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Count ``forward``, which had ``num_draft_tokens`` rows and committed ``num_accepted`` tokens.

        The lists per step are kept whatever ``detailed`` says: they are two small integers per forward.
        """
        assert self.forward is not None, "the worker says of every forward after the prefill what it did"
        super().observe(num_draft_tokens, num_accepted)
        self.per_step_drafted.append(1 + self.forward.drafted if self.forward.denoised else 0)
        self.per_step_accepted.append(self.forward.accepted)
        self.last_committed = num_accepted

    def trim(self, returned: int) -> None:
        """Correct the last observation: a stop token left the user ``returned`` of its tokens."""
        self.histogram[self.last_committed] -= 1
        self.histogram[returned] += 1
        self.last_committed = returned

    def snapshot(self) -> RequestSpecDecodeMetrics:
        """The observations so far, which later ones do not change."""
        return RequestSpecDecodeMetrics(
            num_spec_tokens=self.num_spec_tokens,
            histogram=self.histogram.copy(),
            num_draft_tokens=self.num_draft_tokens,
            per_step_accepted=self.per_step_accepted.copy(),
            per_step_drafted=self.per_step_drafted.copy(),
        )


class RequestMetricsScheduler(Scheduler):
    """Lets the observations of a request tell what it cost, and vLLM's statistics of a step what it held.

    To be mixed in before a scheduler of vLLM.
    """

    pages_per_draft = 0
    """Scratch pages that a draft writes to."""
    block_length = 1
    """Positions of a diffusion block."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observations: dict[str, Observation] = {}
        """What the last step did for each request that decoded in it, also for those that were preempted or aborted
        while it ran."""

    def add_request(self, request: "Request") -> None:
        super().add_request(request)
        # None where observations are off, and where this is a further input of a streaming session.
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = DiffusionRequestMetrics.new(self.num_spec_tokens)

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        packed = model_runner_output.num_nans_in_logits or {}
        model_runner_output.num_nans_in_logits = None  # vLLM is not to take them for what they are not
        # Requests that only prefilled have 0 there.
        self.observations = {req_id: unpack(value) for req_id, value in packed.items() if value < 0}
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is not None and request.spec_decode_metrics is not None:
                # Set in every step: one that vLLM drops, of a request preempted while it ran, must not be left over.
                request.spec_decode_metrics.forward = self.observations.get(req_id)

        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                metrics = output.spec_decode_metrics
                if metrics is not None:
                    metrics.trim(len(output.new_token_ids))
                else:
                    request = self.requests.get(output.request_id)
                    if request is not None and request.sampling_params.stop:
                        # A stop string ends a request in the front end: any output may turn out to be the last.
                        metrics = request.spec_decode_metrics
                if metrics is not None:
                    # The output is sent by another thread, while the request may go on.
                    output.spec_decode_metrics = metrics.snapshot()
        self._tell_step(scheduler_output.total_num_scheduled_tokens, outputs)
        return outputs

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count one forward of a request among those of the step, as vLLM's log and metrics of diffusion mean it.

        ``num_drafts`` are denoising steps, ``num_draft_tokens`` the positions of the blocks that they denoised, and
        ``num_accepted_tokens`` tokens of finished blocks. vLLM itself would count rows instead of positions, those of
        drafts too, and the forwards that only write a finished block to the K/V cache as denoising steps.
        """
        if not self.log_stats:
            return None
        stats = spec_decoding_stats or SpecDecodingStats(self.num_spec_tokens)
        seen = self.observations.get(request_id)
        if seen is not None and seen.denoised:
            stats.num_drafts += 1
            stats.num_draft_tokens += self.block_length
        stats.num_accepted_tokens += num_accepted_tokens
        return stats

    def _tell_step(self, num_rows: int, outputs: "dict[int, EngineCoreOutputs]") -> None:
        """Let vLLM's statistics of a step carry its rows, and the scratch pages that are still somebody's after it.

        Of the fields that travel between processes, the one for LoRA adapters is left over: named counts that nobody
        else writes or reads in an engine without adapters, which are refused for our models.
        """
        stats = next((each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None), None)
        if stats is None:
            return  # --disable-log-stats
        num_drafts = sum(seen.drafted for req_id, seen in self.observations.items() if self._is_running(req_id))
        stats.running_lora_adapters = {ROWS_PER_STEP: num_rows, SCRATCH_PAGES_USED: num_drafts * self.pages_per_draft}

    def _is_running(self, req_id: str) -> bool:
        request = self.requests.get(req_id)
        return request is not None and request.status == RequestStatus.RUNNING


class BulkHistogram(Histogram):
    """A histogram that takes equal values in one go, where the client library wants a call for each."""

    def observe_many(self, amount: float, times: int) -> None:
        """Observe ``amount`` as often as ``times`` says."""
        self._raise_if_not_observable()
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


COUNTERS = {
    "nfe": (
        "vllm_dllm:forwards",
        "Forwards of finished requests after their prefill; one that several share counts for each.",
    ),
    "denoising_steps": (
        "vllm_dllm:denoising_steps",
        "Forwards of finished requests that denoised, and did not only write a block to the KV cache.",
    ),
    "committed_tokens": ("vllm_dllm:committed_tokens", "Tokens of finished requests."),
    "drafted": ("vllm_dllm:drafted_branches", "Drafts that forwards of finished requests had beside the block itself."),
    "accepted": ("vllm_dllm:accepted_steps", "Denoising steps that finished requests skipped, by accepting drafts."),
}
"""By field of ``RequestStats``: name and documentation of the counter that adds it up."""

_collectors: "list[MetricWrapperBase]" = []


class DiffusionStatLogger(AggregateStatLoggerBase):
    """Prometheus metrics of finished requests and of steps, beside vLLM's ``vllm:diffusion_*`` counters.

    vLLM builds it, in each API server process, for models whose configuration names it
    (``model_stat_loggers``).
    """

    def __init__(self, vllm_config: "VllmConfig", engine_indexes: list[int]) -> None:
        # A second engine in the process registers the same names, as vLLM's own logger does.
        while _collectors:
            REGISTRY.unregister(_collectors.pop())
        counters = {field: Counter(name, text, LABELS) for field, (name, text) in COUNTERS.items()}
        tokens_per_forward = Histogram(
            "vllm_dllm:tokens_per_forward",
            "Tokens per forward of each finished request.",
            LABELS,
            buckets=TOKENS_PER_FORWARD_BUCKETS,
        )
        acceptance_depth = BulkHistogram(
            "vllm_dllm:acceptance_depth",
            "Denoising steps skipped by each forward with drafts of finished requests.",
            LABELS,
            buckets=ACCEPTANCE_DEPTH_BUCKETS,
        )
        rows_per_step = Histogram(
            ROWS_PER_STEP,
            "Rows of each forward of the engine: prompts, blocks, drafts, and padding for drafts not known yet.",
            LABELS,
            buckets=ROWS_PER_STEP_BUCKETS,
        )
        # One of several API servers gets the statistics of a step: what came last holds, as for vLLM's gauges.
        scratch_pages_used = Gauge(
            SCRATCH_PAGES_USED,
            "KV pages that drafts of requests which are still running wrote to in the last step.",
            LABELS,
            multiprocess_mode="mostrecent",
        )
        scratch_pages = Gauge(SCRATCH_PAGES, "KV pages set aside for drafts.", LABELS, multiprocess_mode="mostrecent")
        _collectors.extend([*counters.values(), tokens_per_forward, acceptance_depth])
        _collectors.extend([rows_per_step, scratch_pages_used, scratch_pages])
        self.vllm_config = vllm_config
        # By engine: tokens of blocks that make no whole block yet.
        self.uncommitted = dict.fromkeys(engine_indexes, 0)
        self.model_name = vllm_config.model_config.served_model_name
        labels: dict[int, list[object]] = {index: [self.model_name, str(index)] for index in engine_indexes}
        self.counters = {field: create_metric_per_engine(counter, labels) for field, counter in counters.items()}
        self.tokens_per_forward = create_metric_per_engine(tokens_per_forward, labels)
        self.acceptance_depth = create_metric_per_engine(acceptance_depth, labels)
        self.rows_per_step = create_metric_per_engine(rows_per_step, labels)
        self.scratch_pages_used = create_metric_per_engine(scratch_pages_used, labels)
        self.scratch_pages = create_metric_per_engine(scratch_pages, labels)

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: "MultiModalCacheStats | None" = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None and scheduler_stats.spec_decoding_stats is not None:
            self._count_commits(scheduler_stats.spec_decoding_stats.num_accepted_tokens, engine_idx)
        # Taken out: to everybody else the field is about adapters. Statistics that are of no step do not have it.
        step = {} if scheduler_stats is None else scheduler_stats.running_lora_adapters
        if rows := step.pop(ROWS_PER_STEP, 0):  # none: a step that only tells the workers who has left
            self.rows_per_step[engine_idx].observe(rows)
        if (pages := step.pop(SCRATCH_PAGES_USED, None)) is not None:
            self.scratch_pages_used[engine_idx].set(pages)
        if iteration_stats is None:
            return
        for request in iteration_stats.finished_requests:
            if request.spec_decode_metrics is None:
                continue
            stats = observed_stats(request.spec_decode_metrics)
            for field, counter in self.counters.items():
                counter[engine_idx].inc(getattr(stats, field))
            self.tokens_per_forward[engine_idx].observe(stats.tokens_per_forward)
            for depth, num_forwards in enumerate(stats.acceptance_histogram):
                self.acceptance_depth[engine_idx].observe_many(depth, num_forwards)

    def _count_commits(self, num_tokens: int, engine_idx: int) -> None:
        """Add a step to vLLM's counters for every block's worth of tokens: the step that commits a canvas.

        ``vllm bench serve`` takes the counters for those of models that commit each canvas in a step of its own, and
        subtracts a step per canvas. The server's log, which subtracts nothing, does not read the counters.
        """
        block_length = geometry_of(self.vllm_config).block_length
        blocks, self.uncommitted[engine_idx] = divmod(self.uncommitted[engine_idx] + num_tokens, block_length)
        for name, value in ((DENOISING_STEPS, blocks), (CANVAS_POSITIONS, blocks * block_length)):
            # The registry has no public way to find what vLLM's own logger registered.
            counter = REGISTRY._names_to_collectors.get(name)
            if isinstance(counter, Counter):
                counter.labels(self.model_name, str(engine_idx)).inc(value)

    def log_engine_initialized(self) -> None:
        """The engine has started, so the size of its pages is known."""
        num_pages = scratch_pages_of(self.vllm_config, self.vllm_config.cache_config.block_size)
        for gauge in self.scratch_pages.values():
            gauge.set(num_pages)
