"""Statistics of requests: what the scheduler observes, what the user reads, what Prometheus shows."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.config import DeviceConfig, ModelConfig, ObservabilityConfig, VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.entrypoints.generate.base.serving import build_spec_decoding_metrics
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, RequestSpecDecodeMetrics
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from vllm_dllm import RequestStats, request_stats, response_stats
from vllm_dllm.metrics import (
    DiffusionRequestMetrics,
    DiffusionStatLogger,
    RequestMetricsScheduler,
    ShiftedRequestMetrics,
)
from vllm_dllm.models.traits import FamilyTraits
from vllm_dllm.patches import apply_all

BLOCK = 4
EOS = 2


def observed(metrics: RequestSpecDecodeMetrics, commits: Sequence[int]) -> RequestSpecDecodeMetrics:
    for committed in commits:
        metrics.observe(num_draft_tokens=BLOCK, num_accepted=committed)
    return metrics


def completion(
    commits: Sequence[int],
    *,
    num_tokens: int | None = None,
    stop_reason: str | int | None = None,
    shifted: bool = False,
) -> CompletionOutput:
    """A finished completion whose forwards committed ``commits`` tokens each."""
    cls = ShiftedRequestMetrics if shifted else DiffusionRequestMetrics
    return CompletionOutput(
        index=0,
        text="",
        token_ids=[0] * (sum(commits) if num_tokens is None else num_tokens),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="stop",
        stop_reason=stop_reason,
        spec_decode_metrics=observed(cls.new(BLOCK), commits),
    )


def request(*completions: CompletionOutput) -> RequestOutput:
    return RequestOutput("r", None, [1], None, list(completions), finished=True)


def test_forwards_and_tokens_of_a_request_are_counted() -> None:
    stats = request_stats(request(completion([0, 0, 4, 0, 3])))
    assert stats == RequestStats(nfe=5, committed_tokens=7, denoising_steps=5)
    assert stats.tokens_per_forward == 7 / 5


def test_a_request_that_needed_no_forward_has_no_rate() -> None:
    assert RequestStats(nfe=0, committed_tokens=0, denoising_steps=0).tokens_per_forward == 0


def test_a_forward_that_only_writes_a_block_is_no_denoising_step() -> None:
    # After each finished block but the last, a shifted family spends one forward on the KV cache.
    stats = request_stats(request(completion([0, 4, 0, 0, 0, 4, 0, 1], shifted=True)))
    assert stats == RequestStats(nfe=8, committed_tokens=9, denoising_steps=6)


def test_the_forward_that_writes_a_block_may_commit_a_token_of_the_next() -> None:
    stats = request_stats(request(completion([0, 4, 1, 0, 3, 1, 2], shifted=True)))
    assert stats == RequestStats(nfe=7, committed_tokens=11, denoising_steps=5)


def test_several_completions_add_up_and_can_be_told_apart() -> None:
    first, second = completion([0, 4]), completion([0, 0, 3])
    assert request_stats(request(first, second)) == RequestStats(5, 7, 5)
    assert request_stats(second) == RequestStats(3, 3, 3)


def test_tokens_after_a_stop_string_are_not_the_users() -> None:
    assert request_stats(completion([0, 4, 0, 4], num_tokens=6, stop_reason="\n\n")).committed_tokens == 6
    # A stop token is found by the scheduler, which counts to it; the tokens here are those of a last delta.
    assert request_stats(completion([0, 4, 0, 2], num_tokens=2, stop_reason=7)).committed_tokens == 6


def test_an_unfinished_request_has_no_statistics_yet() -> None:
    output = completion([0])
    output.finish_reason = None
    with pytest.raises(ValueError, match="not the last"):
        request_stats(request(output))


def test_an_engine_without_observations_is_named_as_the_reason() -> None:
    output = completion([0])
    output.spec_decode_metrics = None
    with pytest.raises(ValueError, match="carries no observations"):
        request_stats(request(output))


def test_a_response_over_http_carries_the_same_numbers() -> None:
    output = request(completion([0, 4, 0, 0, 3], shifted=True))
    body = {"speculative_decoding": build_spec_decoding_metrics(output).model_dump(exclude_none=True)}
    assert response_stats(json.loads(json.dumps(body))) == request_stats(output)
    output = request(completion([0, 4, 0, 0, 3]))
    body = {"speculative_decoding": build_spec_decoding_metrics(output).model_dump()}
    assert response_stats(body) == request_stats(output)


@pytest.mark.parametrize("metrics", [None, {}, {"queue_time_ms": 1.0}])
def test_a_response_without_observations_is_refused(metrics: dict[str, float] | None) -> None:
    with pytest.raises(ValueError, match="n=1"):
        response_stats(metrics)


@pytest.mark.parametrize("cls", [DiffusionRequestMetrics, ShiftedRequestMetrics])
def test_observations_travel_between_processes(cls: type[DiffusionRequestMetrics]) -> None:
    metrics = observed(cls.new(BLOCK), [0, 4, 0, 2])
    sent = EngineCoreOutput(request_id="r", new_token_ids=[], spec_decode_metrics=metrics)
    received = MsgpackDecoder(EngineCoreOutput).decode(MsgpackEncoder().encode(sent)).spec_decode_metrics
    assert type(received) is RequestSpecDecodeMetrics
    assert received.to_dict() == metrics.to_dict()


def test_importing_the_package_does_not_import_vllm() -> None:
    code = "import sys; from vllm_dllm import request_stats; print({'vllm', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


# Observation by vLLM's scheduler


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    apply_all()
    directory = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "canvas_length": BLOCK,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return VllmConfig(
        model_config=ModelConfig(model=str(directory), skip_tokenizer_init=True),
        device_config=DeviceConfig("cpu"),
        diffusion_config=DiffusionConfig(canvas_length=BLOCK),
        observability_config=ObservabilityConfig(per_request_spec_decode_metrics="summary"),
    )


class Engine:
    """A scheduler, and a worker that commits what it is told to."""

    def __init__(self, config: VllmConfig, *, shifted: bool):
        config.model_config.hf_config.traits = FamilyTraits(
            family="test", block_length=BLOCK, mask_token_id=3, shifted=shifted
        )
        config.cache_config.num_gpu_blocks = 16
        spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
        self.scheduler = RequestMetricsScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(16, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=32,
            log_stats=True,
        )

    def run(self, steps: Sequence[list[int]], **params: object) -> list[EngineCoreOutput]:
        """Outputs of a request whose forwards after the prefill commit the tokens of ``steps``."""
        sampling_params = SamplingParams(max_tokens=64, **params)
        sampling_params.update_from_generation_config({}, EOS)
        self.scheduler.add_request(Request("r", [5, 6, 7], sampling_params, None))
        outputs = []
        for tokens in [[], *steps]:
            scheduled = self.scheduler.schedule()
            worker_output = ModelRunnerOutput(["r"], {"r": 0}, sampled_token_ids=[list(tokens)])
            for client in self.scheduler.update_from_output(scheduled, worker_output).values():
                outputs += client.outputs
            if "r" in self.scheduler.requests:
                self.scheduler.requests["r"].spec_token_ids = [-1] * BLOCK
        return outputs


def test_the_scheduler_observes_each_forward_after_the_prefill(engine_config: VllmConfig) -> None:
    outputs = Engine(engine_config, shifted=False).run([[], [8, 9, 10, 11], [], [], [12, EOS, 13, 14]])
    assert [output.new_token_ids for output in outputs] == [[8, 9, 10, 11], [12, EOS]]
    assert outputs[0].spec_decode_metrics is None
    metrics = outputs[1].spec_decode_metrics
    assert metrics is not None
    assert metrics.histogram == [3, 0, 1, 0, 1]  # the stop token left two of the last four tokens
    assert metrics.num_draft_tokens == 5 * BLOCK


def test_the_scheduler_tells_the_forwards_of_a_shifted_family_apart(engine_config: VllmConfig) -> None:
    outputs = Engine(engine_config, shifted=True).run([[], [8, 9, 10, 11], [], [], [12, EOS, 13, 14]])
    metrics = outputs[-1].spec_decode_metrics
    assert metrics is not None
    assert metrics.per_step_accepted == [0, 4, 0, 0, 2]
    assert metrics.per_step_drafted == [BLOCK, BLOCK, 0, BLOCK, BLOCK]


def test_any_output_may_be_the_last_where_a_stop_string_ends_it(engine_config: VllmConfig) -> None:
    outputs = Engine(engine_config, shifted=False).run([[], [8, 9, 10, 11]], stop=["end"])
    assert outputs[0].finish_reason is None
    assert outputs[0].spec_decode_metrics is not None
    assert outputs[0].spec_decode_metrics.histogram == [1, 0, 0, 0, 1]


# Prometheus


def stat_logger(engine_indexes: Sequence[int] = (0,)) -> DiffusionStatLogger:
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="sdar"))
    return DiffusionStatLogger(config, list(engine_indexes))


def sample(name: str, engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "sdar", "engine": str(engine), **labels})


def finished(metrics: RequestSpecDecodeMetrics | None) -> IterationStats:
    request = FinishedRequestStats(finish_reason=FinishReason.STOP)
    request.spec_decode_metrics = metrics
    iteration = IterationStats()
    iteration.finished_requests.append(request)
    return iteration


def test_metrics_add_up_over_finished_requests() -> None:
    logger = stat_logger()
    logger.record(None, finished(observed(ShiftedRequestMetrics.new(BLOCK), [0, 4, 0, 4])))
    logger.record(None, finished(observed(DiffusionRequestMetrics.new(BLOCK), [4])))
    assert sample("vllm_dllm:forwards_total") == 5
    assert sample("vllm_dllm:denoising_steps_total") == 4
    assert sample("vllm_dllm:committed_tokens_total") == 12
    assert sample("vllm_dllm:tokens_per_forward_count") == 2
    assert sample("vllm_dllm:tokens_per_forward_sum") == 2.0 + 4.0
    assert sample("vllm_dllm:tokens_per_forward_bucket", le="2.0") == 1


def test_engines_are_counted_apart() -> None:
    logger = stat_logger([0, 1])
    logger.record(None, finished(observed(DiffusionRequestMetrics.new(BLOCK), [4])), engine_idx=1)
    assert sample("vllm_dllm:forwards_total", engine=0) == 0
    assert sample("vllm_dllm:forwards_total", engine=1) == 1


def test_iterations_without_observations_count_nothing() -> None:
    logger = stat_logger()
    logger.record(None, None)
    logger.record(None, IterationStats())
    logger.record(None, finished(None))
    assert sample("vllm_dllm:forwards_total") == 0


def test_a_second_engine_in_the_process_starts_at_zero() -> None:
    stat_logger().record(None, finished(observed(DiffusionRequestMetrics.new(BLOCK), [4])))
    stat_logger()
    assert sample("vllm_dllm:forwards_total") == 0


@pytest.mark.slow
def test_the_metrics_of_several_api_servers_are_added(tmp_path: Path) -> None:
    server = (
        "from test_stats import DiffusionRequestMetrics, finished, observed, stat_logger\n"
        "stat_logger().record(None, finished(observed(DiffusionRequestMetrics.new(4), [0, 4])))"
    )
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    for _ in range(2):
        subprocess.run([sys.executable, "-c", server], env=environment, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    labels = {"model_name": "sdar", "engine": "0"}
    assert registry.get_sample_value("vllm_dllm:forwards_total", labels) == 4
    assert registry.get_sample_value("vllm_dllm:tokens_per_forward_sum", labels) == 4.0
