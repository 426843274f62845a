"""Where vLLM counts the forwards of a request, and where it shows them.

The scheduler observes; ``vllm_dllm.stats`` reads the observations of one request; the stat logger below
adds them up for ``/metrics``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Histogram
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_dllm.stats import observed_stats

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


@dataclass
class DiffusionRequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's observations of a request, for diffusion: the tokens a step accepts are those it commits.

    Has no fields of its own: between processes only vLLM's fields travel.
    """

    def __post_init__(self) -> None:
        self.last_committed = 0

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Count a forward that had ``num_draft_tokens`` rows and committed ``num_accepted`` tokens."""
        super().observe(num_draft_tokens, num_accepted, detailed)
        self.last_committed = num_accepted

    def trim(self, returned: int) -> None:
        """Correct the last observation: a stop token left the user ``returned`` of its tokens."""
        self.histogram[self.last_committed] -= 1
        self.histogram[returned] += 1
        if self.per_step_accepted:
            self.per_step_accepted[-1] = returned
        self.last_committed = returned


@dataclass
class ShiftedRequestMetrics(DiffusionRequestMetrics):
    """For families with shifted logits: the forward after a finished block only writes it to the KV cache.

    Such a forward is observed with no rows, for it denoises none, though it may commit the first token of the
    next block. Only the per-step lists can tell it from the others, so they are always kept.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wrote_block = False

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Count a forward; after one that finished a block, the one that writes the block."""
        self.wrote_block = self.last_committed > 0 and not self.wrote_block
        super().observe(0 if self.wrote_block else num_draft_tokens, num_accepted, detailed=True)


class RequestMetricsScheduler(Scheduler):
    """Lets the observations of a request tell what it cost. To be mixed in before a scheduler of vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shifted = self.vllm_config.model_config.hf_config.traits.shifted
        self.request_metrics_cls = ShiftedRequestMetrics if shifted else DiffusionRequestMetrics

    def add_request(self, request: "Request") -> None:
        super().add_request(request)
        # None where observations are off, and where this is a further input of a streaming session.
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = self.request_metrics_cls.new(self.num_spec_tokens)

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                if output.spec_decode_metrics is not None:
                    output.spec_decode_metrics.trim(len(output.new_token_ids))
                    continue
                request = self.requests.get(output.request_id)
                if request is not None and request.sampling_params.stop:
                    # A stop string ends a request in the front end: any output may turn out to be the last.
                    output.spec_decode_metrics = request.spec_decode_metrics
        return outputs


_collectors: "list[MetricWrapperBase]" = []


class DiffusionStatLogger(AggregateStatLoggerBase):
    """Prometheus metrics of finished requests, beside vLLM's ``vllm:diffusion_*`` counters of running ones.

    vLLM builds it, in each API server process, for models whose configuration names it
    (``model_stat_loggers``).
    """

    def __init__(self, vllm_config: "VllmConfig", engine_indexes: list[int]) -> None:
        # A second engine in the process registers the same names, as vLLM's own logger does.
        while _collectors:
            REGISTRY.unregister(_collectors.pop())
        forwards = Counter(
            "vllm_dllm:forwards",
            "Forwards of finished requests after their prefill; one that several share counts for each.",
            LABELS,
        )
        denoising_steps = Counter(
            "vllm_dllm:denoising_steps",
            "Forwards of finished requests that denoised, and did not only write a block to the KV cache.",
            LABELS,
        )
        committed_tokens = Counter("vllm_dllm:committed_tokens", "Tokens of finished requests.", LABELS)
        tokens_per_forward = Histogram(
            "vllm_dllm:tokens_per_forward",
            "Tokens per forward of each finished request.",
            LABELS,
            buckets=TOKENS_PER_FORWARD_BUCKETS,
        )
        _collectors.extend([forwards, denoising_steps, committed_tokens, tokens_per_forward])
        model_name = vllm_config.model_config.served_model_name
        labels: dict[int, list[object]] = {index: [model_name, str(index)] for index in engine_indexes}
        self.forwards = create_metric_per_engine(forwards, labels)
        self.denoising_steps = create_metric_per_engine(denoising_steps, labels)
        self.committed_tokens = create_metric_per_engine(committed_tokens, labels)
        self.tokens_per_forward = create_metric_per_engine(tokens_per_forward, labels)

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: "MultiModalCacheStats | None" = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is None:
            return
        for request in iteration_stats.finished_requests:
            if request.spec_decode_metrics is None:
                continue
            stats = observed_stats(request.spec_decode_metrics)
            self.forwards[engine_idx].inc(stats.nfe)
            self.denoising_steps[engine_idx].inc(stats.denoising_steps)
            self.committed_tokens[engine_idx].inc(stats.committed_tokens)
            self.tokens_per_forward[engine_idx].observe(stats.tokens_per_forward)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
