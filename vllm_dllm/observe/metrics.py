"""Where vLLM counts the forwards of a request, and where it shows them; ``docs/metrics.md`` explains the metrics.

The scheduler observes what the worker says of every forward, and says what every step held
(``vllm_dllm.observe.wires``); the stat logger adds both up for ``/metrics``.
"""

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dllm.geometry import geometry_of
from vllm_dllm.observe.stats import observed_stats
from vllm_dllm.observe.step_events import tell
from vllm_dllm.observe.wires import (
    ROWS_PER_STEP,
    SCRATCH_PAGES_USED,
    DiffusionRequestMetrics,
    Observation,
    event_of,
    take_observations,
    take_step,
    take_step_maps,
    tell_step,
)
from vllm_dllm.runtime.plan.scratch import scratch_pages_of

SCRATCH_PAGES = "vllm_dllm:scratch_pages"

COUNTERS = {
    "vllm_dllm:forwards": (
        "nfe",
        "Forwards of finished requests after their prefill; one that several share counts for each.",
    ),
    "vllm_dllm:denoising_steps": (
        "denoising_steps",
        "Forwards of finished requests that denoised, and did not only write a block to the KV cache.",
    ),
    "vllm_dllm:committed_tokens": ("committed_tokens", "Tokens of finished requests."),
    "vllm_dllm:drafted_branches": (
        "drafted",
        "Drafts that forwards of finished requests had beside the block itself.",
    ),
    "vllm_dllm:accepted_steps": (
        "accepted",
        "Denoising steps that finished requests skipped by accepting drafts; of fef, linear_spec, isd and s2d2 drafts.",
    ),
}
"""By name: the field of ``RequestStats`` that the counter adds up, and the documentation."""

HISTOGRAMS = {
    "vllm_dllm:tokens_per_forward": (
        (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
        "Tokens per forward of each finished request.",
    ),
    "vllm_dllm:acceptance_depth": (
        (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64),
        "Denoising steps skipped, or drafts accepted, by each forward with drafts of finished requests.",
    ),
    ROWS_PER_STEP: (
        tuple(1 << exponent for exponent in range(2, 17)),
        "Rows of each forward of the engine: prompts, blocks, drafts, and padding for drafts not known yet.",
    ),
}
"""By name: buckets and documentation."""

GAUGES = {
    SCRATCH_PAGES_USED: "KV pages that drafts of requests which are still running wrote to in the last step.",
    SCRATCH_PAGES: "KV pages set aside for drafts.",
}


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

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        # None where observations are off, and where this is a further input of a streaming session.
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = DiffusionRequestMetrics(self.num_spec_tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.observations, step_maps = take_observations(model_runner_output), take_step_maps(model_runner_output)
        watched: list[tuple[Request, int, int]] = []
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is not None and request.spec_decode_metrics is not None:
                # Set in every step: one that vLLM drops, of a request preempted while it ran, must not be left over.
                request.spec_decode_metrics.forward = self.observations.get(req_id)
                if req_id in step_maps:
                    request.spec_decode_metrics.written = step_maps[req_id]
                    request.spec_decode_metrics.position = request.num_tokens
                    if request.spec_decode_metrics.wants_events:
                        # Noted now: where the step ends an answer of a session, the next prompt may come with it.
                        start = request.num_output_tokens
                        watched.append((request, start, request.max_tokens - start))

        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if watched:
            self._tell_events(watched, outputs)
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
        stats = next((each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None), None)
        if stats is not None:  # None: --disable-log-stats
            still_running = self.observations.keys() & {request.request_id for request in self.running}
            num_drafts = sum(map(self._num_branches_drafted, still_running))
            tell_step(
                stats,
                num_rows=scheduler_output.total_num_scheduled_tokens,
                num_scratch_pages=num_drafts * self.pages_per_draft,
            )
        return outputs

    def _num_branches_drafted(self, req_id: str) -> int:
        """Drafts of a request in the last step that have pages of their own."""
        return self.observations[req_id].drafted

    def _tell_events(self, watched: list[tuple[Request, int, int]], outputs: dict[int, EngineCoreOutputs]) -> None:
        """Let the outputs of a step tell of the forwards of requests; one without output gets one.

        Args:
            watched: the requests, where in its answer the window of each begins, and how many tokens may follow there.
        """
        own = {output.request_id: output for each in outputs.values() for output in each.outputs}
        for request, start, room in watched:
            metrics = request.spec_decode_metrics
            if metrics.forward is not None:  # the forward was not counted: the request was preempted while it ran
                continue
            output = own.get(request.request_id)
            if output is None:
                output = EngineCoreOutput(request.request_id, new_token_ids=[], trace_headers=request.trace_headers)
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
            window = metrics.written[:room]
            tell(output, event_of(len(metrics.per_step_drafted) - 1, start, window))

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *, num_accepted_tokens: int, request_id: str, **_: Any
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


_collectors: list[Any] = []


class DiffusionStatLogger(AggregateStatLoggerBase):
    """Prometheus metrics of finished requests and of steps, beside vLLM's ``vllm:diffusion_*`` counters.

    vLLM builds it, in each API server process, for models whose configuration names it
    (``model_stat_loggers``).
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        # A second engine in the process registers the same names, as vLLM's own logger does.
        while _collectors:
            REGISTRY.unregister(_collectors.pop())
        self.vllm_config = vllm_config
        # By engine: tokens of blocks that make no whole block yet.
        self.uncommitted = dict.fromkeys(engine_indexes, 0)
        self.model_name = vllm_config.model_config.served_model_name
        labels: dict[int, list[object]] = {index: [self.model_name, str(index)] for index in engine_indexes}
        names = ["model_name", "engine"]
        metrics: dict[str, Any] = {name: Counter(name, text, names) for name, (_, text) in COUNTERS.items()}
        for name, (buckets, text) in HISTOGRAMS.items():
            metrics[name] = Histogram(name, text, names, buckets=buckets)
        for name, text in GAUGES.items():
            # One of several API servers gets the statistics of a step: what came last holds, as for vLLM's gauges.
            metrics[name] = Gauge(name, text, names, multiprocess_mode="mostrecent")
        _collectors.extend(metrics.values())
        self.metrics = {name: create_metric_per_engine(metric, labels) for name, metric in metrics.items()}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        metrics = {name: per_engine[engine_idx] for name, per_engine in self.metrics.items()}
        if scheduler_stats is not None:
            if (sums := scheduler_stats.spec_decoding_stats) is not None:
                self._count_commits(sums.num_accepted_tokens, engine_idx)
            if (step := take_step(scheduler_stats)) is not None:
                rows, pages = step
                if rows:  # none: the step only tells the workers who has left
                    metrics[ROWS_PER_STEP].observe(rows)
                metrics[SCRATCH_PAGES_USED].set(pages)
        for request in iteration_stats.finished_requests if iteration_stats is not None else ():
            if request.spec_decode_metrics is None:
                continue
            stats = observed_stats(request.spec_decode_metrics)
            for name, (field, _) in COUNTERS.items():
                metrics[name].inc(getattr(stats, field))
            metrics["vllm_dllm:tokens_per_forward"].observe(stats.tokens_per_forward)
            for depth, num_forwards in enumerate(stats.acceptance_histogram):
                for _ in range(num_forwards):
                    metrics["vllm_dllm:acceptance_depth"].observe(depth)

    def _count_commits(self, num_tokens: int, engine_idx: int) -> None:
        """Add a step to vLLM's counters for every block's worth of tokens: the step that commits a canvas.

        ``vllm bench serve`` takes the counters for those of models that commit each canvas in a step of its own, and
        subtracts a step per canvas. The server's log, which subtracts nothing, does not read the counters.
        """
        block_length = geometry_of(self.vllm_config).block_length
        blocks, self.uncommitted[engine_idx] = divmod(self.uncommitted[engine_idx] + num_tokens, block_length)
        for name, value in (("denoising_steps", blocks), ("canvas_positions", blocks * block_length)):
            # The registry has no public way to find what vLLM's own logger registered.
            counter = REGISTRY._names_to_collectors.get(f"vllm:diffusion_num_{name}")
            if isinstance(counter, Counter):
                counter.labels(self.model_name, str(engine_idx)).inc(value)

    def log_engine_initialized(self) -> None:
        """The engine has started, so the size of its pages is known."""
        num_pages = scratch_pages_of(self.vllm_config, self.vllm_config.cache_config.block_size)
        for gauge in self.metrics[SCRATCH_PAGES].values():
            gauge.set(num_pages)
