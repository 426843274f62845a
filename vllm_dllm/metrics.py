"""Where vLLM counts the forwards of a request, and where it shows them.

The scheduler observes; ``vllm_dllm.stats`` reads the observations of one request; the stat logger below adds them up
for ``/metrics``.
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

    def trim(self, committed: int, returned: int) -> None:
        """The last step committed tokens, but only ``returned`` of them are the user's: a stop token cut it short."""
        self.histogram[committed] -= 1
        self.histogram[returned] += 1
        if self.per_step_accepted:
            self.per_step_accepted[-1] = returned


@dataclass
class ShiftedRequestMetrics(DiffusionRequestMetrics):
    """For families with shifted logits: the forward after a finished block writes it to the KV cache and denoises
    nothing. Such a forward is observed with no rows, which only the per-step lists can tell."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        writes_block = bool(self.per_step_accepted) and self.per_step_accepted[-1] > 0
        super().observe(0 if writes_block else num_draft_tokens, num_accepted, detailed=True)


class RequestMetricsScheduler(Scheduler):
    """Keeps the observations of each request. To be mixed in before one of vLLM's schedulers.

    They are always on: a request costs one list of ``canvas_length + 1`` counts, which its last output carries.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.spec_decode_metrics_level == "none":
            self.spec_decode_metrics_level = "summary"
        shifted = self.vllm_config.model_config.hf_config.traits.shifted
        self.request_metrics_cls = ShiftedRequestMetrics if shifted else DiffusionRequestMetrics

    def add_request(self, request: "Request") -> None:
        super().add_request(request)
        # A further input of a streaming session updates the request that exists; this one is then empty.
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = self.request_metrics_cls.new(self.num_spec_tokens)

    def _update_request_with_output(
        self, request: "Request", new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        committed = len(new_token_ids)  # the call below shortens the list itself
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        if len(new_token_ids) < committed and request.spec_decode_metrics is not None:
            request.spec_decode_metrics.trim(committed, len(new_token_ids))
        return new_token_ids, stopped

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        # A stop string ends a request outside of the scheduler, which then never sends a last output.
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                request = self.requests.get(output.request_id)
                if (
                    request is not None
                    and request.sampling_params is not None
                    and request.sampling_params.stop
                ):
                    output.spec_decode_metrics = request.spec_decode_metrics
        return outputs


_collectors: "list[MetricWrapperBase]" = []


class DiffusionStatLogger(AggregateStatLoggerBase):
    """Prometheus metrics of finished requests, beside vLLM's ``vllm:diffusion_*`` counters of running ones.

    vLLM builds it, in each API server process, for models whose configuration names it (``model_stat_loggers``).
    """

    def __init__(self, vllm_config: "VllmConfig", engine_indexes: list[int]) -> None:
        # A second engine in the process registers the same names, as vLLM's own logger does.
        while _collectors:
            REGISTRY.unregister(_collectors.pop())
        forwards = Counter(
            "vllm_dllm:forwards",
            "Model forwards of finished requests, after their prefill; one that several requests share counts for each.",
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
