"""Statistics of requests: what the user reads of the scheduler's observations, what Prometheus shows of them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.entrypoints.generate.base.serving import build_spec_decoding_metrics
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests import warm
from vllm_dllm import RequestStats, StepMap, request_stats, response_stats
from vllm_dllm.geometry import Geometry
from vllm_dllm.models.configs import SDARConfig
from vllm_dllm.observe.metrics import SCRATCH_PAGES, DiffusionStatLogger
from vllm_dllm.observe.stats import observed_stats
from vllm_dllm.observe.wires import (
    ROWS_PER_STEP,
    SCRATCH_PAGES_USED,
    DiffusionRequestMetrics,
    Observation,
)
from vllm_dllm.options.schema import DllmConfig

BLOCK = 4


class Forward(NamedTuple):
    """A forward of one request, as the scheduler observes it."""

    committed: int
    drafted: int = 0
    accepted: int = 0
    denoised: bool = True


def observed(*forwards: Forward | int) -> RequestSpecDecodeMetrics:
    """Observations of ``forwards``; of one without drafts the tokens it committed are enough."""
    metrics = DiffusionRequestMetrics(BLOCK)
    for forward in (each if isinstance(each, Forward) else Forward(each) for each in forwards):
        metrics.forward = Observation(forward.denoised, forward.drafted, forward.accepted, next_drafts=0)
        metrics.observe(num_draft_tokens=BLOCK, num_accepted=forward.committed)
    return metrics.snapshot()


def completion(
    *forwards: Forward | int, num_tokens: int | None = None, stop_reason: str | int | None = None
) -> CompletionOutput:
    """A finished completion that took ``forwards``."""
    metrics = observed(*forwards)
    committed = sum(tokens * times for tokens, times in enumerate(metrics.histogram))
    return CompletionOutput(
        index=0,
        text="",
        token_ids=[0] * (committed if num_tokens is None else num_tokens),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="stop",
        stop_reason=stop_reason,
        spec_decode_metrics=metrics,
    )


def request(*completions: CompletionOutput) -> RequestOutput:
    return RequestOutput("r", None, [1], None, list(completions), finished=True)


WRITE_ONLY = Forward(0, denoised=False)
DRAFTED = (Forward(0), Forward(0, drafted=3, accepted=2), Forward(0, drafted=2), Forward(4, drafted=3, accepted=2))


def test_forwards_and_tokens_of_a_request_are_counted() -> None:
    stats = request_stats(request(completion(0, 0, 4, 0, 3)))
    assert stats == RequestStats(nfe=5, committed_tokens=7, denoising_steps=5)
    assert stats.tokens_per_forward == 7 / 5


def test_a_request_that_needed_no_forward_has_no_rate() -> None:
    assert RequestStats(nfe=0, committed_tokens=0, denoising_steps=0).tokens_per_forward == 0
    assert request_stats(completion()) == RequestStats(nfe=0, committed_tokens=0, denoising_steps=0)


def test_a_forward_that_only_writes_a_block_is_no_denoising_step() -> None:
    stats = request_stats(request(completion(0, 4, WRITE_ONLY, 0, 0, 4, WRITE_ONLY, 1)))
    assert stats == RequestStats(nfe=8, committed_tokens=9, denoising_steps=6)


def test_the_forward_that_writes_a_block_may_commit_a_token_of_the_next() -> None:
    writes = Forward(1, denoised=False)
    stats = request_stats(request(completion(0, 4, writes, 0, 3, writes, 2)))
    assert stats == RequestStats(nfe=7, committed_tokens=11, denoising_steps=5)


def test_drafts_and_what_they_saved_are_counted() -> None:
    stats = request_stats(completion(*DRAFTED))
    assert stats == RequestStats(
        nfe=4, committed_tokens=4, denoising_steps=4, drafted=8, accepted=4, acceptance_histogram=(1, 0, 2)
    )


def test_forwards_without_drafts_have_no_acceptance_depth() -> None:
    assert request_stats(completion(0, 4, WRITE_ONLY)).acceptance_histogram == ()
    assert request_stats(completion(0, Forward(4, drafted=1))).acceptance_histogram == (1,)


def test_the_histogram_ends_with_the_most_tokens_of_a_forward() -> None:
    assert observed().to_dict()["acceptance_histogram"] == []
    assert observed(0, 0, 3, 1).to_dict()["acceptance_histogram"] == [2, 1, 0, 1]


def test_a_stop_token_shortens_the_histogram() -> None:
    metrics = DiffusionRequestMetrics(BLOCK)
    metrics.trim(0)  # no forward was needed
    assert metrics.histogram == []
    for num_tokens in (0, 4):
        metrics.forward = Observation(True, 0, 0, next_drafts=0)
        metrics.observe(num_draft_tokens=BLOCK, num_accepted=num_tokens)
    metrics.trim(2)
    assert metrics.histogram == [1, 0, 1]
    metrics.trim(0)
    assert metrics.histogram == [2]


def test_a_step_map_tells_steps_forwards_and_blocks_of_the_returned_tokens() -> None:
    metrics = DiffusionRequestMetrics(BLOCK)
    # A prompt of 6 tokens: the first block of 4 has two of them.
    metrics.blocks = 0, 4
    position = 6
    # By forward: the step that wrote each token of the window, and the forwards since. One has more rows than tokens.
    for num_tokens, written in (
        (0, [(0, 0)]),
        (2, [(1, 0), (0, 1), (7, 7)]),
        (0, []),
        (4, [(0, 1), (1, 0), (-1, 2), (0, 1)]),
    ):
        metrics.forward = Observation(True, 0, 0, next_drafts=0)
        metrics.written = np.array(written, dtype=np.int64).reshape(-1, 2)
        metrics.position = position
        metrics.observe(num_draft_tokens=BLOCK, num_accepted=num_tokens)
        position += num_tokens
    assert observed_stats(metrics.snapshot()).step_map == StepMap(
        steps=(1, 0, 0, 1, -1, 0), blocks=(0, 0, 1, 1, 1, 1), forwards=(1, 0, 2, 3, 1, 2)
    )
    metrics.trim(3)
    stats = observed_stats(metrics.snapshot())
    assert stats.step_map == StepMap(steps=(1, 0, 0, 1, -1), blocks=(0, 0, 1, 1, 1), forwards=(1, 0, 2, 3, 1))
    assert (stats.nfe, stats.committed_tokens, stats.denoising_steps) == (4, 5, 4)
    # What vLLM puts into a response.
    assert response_stats({"speculative_decoding": metrics.snapshot().to_dict()}) == stats


def test_several_completions_add_up_and_can_be_told_apart() -> None:
    first, second = completion(0, 4), completion(0, 0, 3)
    assert request_stats(request(first, second)) == RequestStats(5, 7, 5)
    assert request_stats(second) == RequestStats(3, 3, 3)


def test_drafts_of_several_completions_add_up() -> None:
    deep, shallow = completion(*DRAFTED), completion(0, Forward(3, drafted=1, accepted=1))
    stats = request_stats(request(deep, shallow, completion(4)))
    assert (stats.drafted, stats.accepted, stats.acceptance_histogram) == (9, 5, (1, 1, 2))


def test_tokens_after_a_stop_string_are_not_the_users() -> None:
    stats = request_stats(completion(0, 4, 0, Forward(4, drafted=2, accepted=1), num_tokens=6, stop_reason="\n\n"))
    assert stats == RequestStats(4, 6, 4, drafted=2, accepted=1, acceptance_histogram=(0, 1))
    # A stop token is found by the scheduler, which counts to it; the tokens here are those of a last delta.
    assert request_stats(completion(0, 4, 0, 2, num_tokens=2, stop_reason=7)).committed_tokens == 6
    # The newest tokens alone: what the block had of others is not known.
    for newest in (1, 4):
        assert request_stats(completion(0, 4, 0, 4, num_tokens=newest, stop_reason="\n\n")).committed_tokens == 8


def test_an_unfinished_request_has_no_statistics_yet() -> None:
    output = completion(0)
    output.finish_reason = None
    with pytest.raises(ValueError, match="not the last"):
        request_stats(request(output))


def test_an_engine_without_observations_is_named_as_the_reason() -> None:
    output = completion(0)
    output.spec_decode_metrics = None
    with pytest.raises(ValueError, match="carries no observations"):
        request_stats(request(output))


def test_observations_of_an_autoregressive_model_are_refused() -> None:
    output = completion()
    output.spec_decode_metrics = RequestSpecDecodeMetrics.new(BLOCK)
    output.spec_decode_metrics.observe(num_draft_tokens=3, num_accepted=2)
    with pytest.raises(ValueError, match="1 forwards were observed but 0 of them described"):
        request_stats(output)


@pytest.mark.parametrize("forwards", [(), (0, 4, WRITE_ONLY, 0, 3), DRAFTED], ids=["none", "write", "drafts"])
def test_a_response_over_http_carries_the_same_numbers(forwards: Sequence[Forward | int]) -> None:
    output = request(completion(*forwards))
    payload = build_spec_decoding_metrics(output)
    assert payload is not None
    for fields in (payload.model_dump(), payload.model_dump(exclude_none=True)):
        assert response_stats(json.loads(json.dumps({"speculative_decoding": fields}))) == request_stats(output)


@pytest.mark.parametrize("metrics", [None, {}, {"queue_time_ms": 1.0}])
def test_a_response_without_observations_is_refused(metrics: dict[str, float] | None) -> None:
    with pytest.raises(ValueError, match="n=1"):
        response_stats(metrics)


@pytest.mark.parametrize("what", [[], None, {}, "text"])
def test_what_is_no_output_is_refused_by_its_type(what: object) -> None:
    with pytest.raises(TypeError, match=f"one RequestOutput or CompletionOutput, not {type(what).__name__}"):
        request_stats(what)  # type: ignore[arg-type]


def test_observations_travel_between_processes() -> None:
    metrics = observed(*DRAFTED, WRITE_ONLY)
    sent = EngineCoreOutput(request_id="r", new_token_ids=[], spec_decode_metrics=metrics)
    received = MsgpackDecoder(EngineCoreOutput).decode(MsgpackEncoder().encode(sent)).spec_decode_metrics
    assert received == metrics


def test_importing_the_package_does_not_import_vllm() -> None:
    code = "import sys; from vllm_dllm import request_stats; print({'vllm', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


# Prometheus


def stat_logger(engine_indexes: Sequence[int] = (0,)) -> DiffusionStatLogger:
    hf_config = SDARConfig(block_length=8)
    hf_config.geometry = Geometry(
        traits=hf_config.traits,
        options=DllmConfig(),
        block_length=8,
        max_drafts=3,
        step_rows=256,
        max_model_len=256,
        draft_rows=8,
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="sdar", hf_config=hf_config),
        scheduler_config=SimpleNamespace(max_num_seqs=5),
        cache_config=SimpleNamespace(block_size=32),
    )
    return DiffusionStatLogger(config, list(engine_indexes))


def step(rows: int, pages: int) -> SchedulerStats:
    """What the scheduler says of a step."""
    return SchedulerStats(num_running_reqs=1, running_lora_adapters={ROWS_PER_STEP: rows, SCRATCH_PAGES_USED: pages})


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
    logger.record(None, finished(observed(0, 4, WRITE_ONLY, 4)))
    logger.record(None, finished(observed(4)))
    assert sample("vllm_dllm:forwards_total") == 5
    assert sample("vllm_dllm:denoising_steps_total") == 4
    assert sample("vllm_dllm:committed_tokens_total") == 12
    assert sample("vllm_dllm:tokens_per_forward_count") == 2
    assert sample("vllm_dllm:tokens_per_forward_sum") == 2.0 + 4.0
    assert sample("vllm_dllm:tokens_per_forward_bucket", le="2.0") == 1
    assert sample("vllm_dllm:drafted_branches_total") == 0
    assert sample("vllm_dllm:acceptance_depth_count") == 0


def test_drafts_of_finished_requests_add_up() -> None:
    logger = stat_logger()
    logger.record(None, finished(observed(*DRAFTED)))
    logger.record(None, finished(observed(0, Forward(4, drafted=1, accepted=1))))
    assert sample("vllm_dllm:drafted_branches_total") == 9
    assert sample("vllm_dllm:accepted_steps_total") == 5
    assert sample("vllm_dllm:acceptance_depth_count") == 4  # forwards with drafts
    assert sample("vllm_dllm:acceptance_depth_sum") == 5
    assert [sample("vllm_dllm:acceptance_depth_bucket", le=le) for le in ("0.0", "1.0", "2.0")] == [1, 2, 4]


def test_engines_are_counted_apart() -> None:
    logger = stat_logger([0, 1])
    logger.record(None, finished(observed(4)), engine_idx=1)
    assert sample("vllm_dllm:forwards_total", engine=0) == 0
    assert sample("vllm_dllm:forwards_total", engine=1) == 1


def test_iterations_without_observations_count_nothing() -> None:
    logger = stat_logger()
    logger.record(None, None)
    logger.record(None, IterationStats())
    logger.record(None, finished(None))
    assert sample("vllm_dllm:forwards_total") == 0


def test_steps_are_counted_by_their_rows() -> None:
    logger = stat_logger()
    for rows in (8, 64, 100):
        logger.record(step(rows, 0), None)
    assert sample("vllm_dllm:rows_per_step_count") == 3
    assert sample("vllm_dllm:rows_per_step_sum") == 172
    assert sample("vllm_dllm:rows_per_step_bucket", le="64.0") == 2


def test_the_scratch_pages_in_use_are_those_of_the_last_step() -> None:
    logger = stat_logger()
    logger.record(step(64, 6), IterationStats())
    assert sample(SCRATCH_PAGES_USED) == 6
    # The last step has no rows: it tells the workers who has left.
    logger.record(step(0, 0), None)
    assert sample(SCRATCH_PAGES_USED) == 0
    assert sample("vllm_dllm:rows_per_step_count") == 1


def test_statistics_that_are_of_no_step_change_nothing() -> None:
    logger = stat_logger()
    logger.record(step(64, 6), None)
    logger.record(SchedulerStats(num_running_reqs=2), None)
    assert sample(SCRATCH_PAGES_USED) == 6
    assert sample("vllm_dllm:rows_per_step_count") == 1


def test_what_a_step_tells_is_hidden_from_loggers_that_take_it_for_adapters() -> None:
    stats = step(64, 6)
    stat_logger().record(stats, None)
    assert stats.running_lora_adapters == {}


def test_what_a_step_tells_travels_between_processes() -> None:
    sent = EngineCoreOutputs(scheduler_stats=step(64, 6))
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent)).scheduler_stats
    logger = stat_logger([0, 1])
    logger.record(received, None, engine_idx=1)
    assert (sample(SCRATCH_PAGES_USED, engine=0), sample(SCRATCH_PAGES_USED, engine=1)) == (0, 6)
    assert sample("vllm_dllm:rows_per_step_sum", engine=1) == 64


def test_every_engine_has_its_own_scratch_pages() -> None:
    stat_logger([0, 1]).log_engine_initialized()
    # One page for each of 3 drafts of 5 requests.
    assert [sample(SCRATCH_PAGES, engine=index) for index in (0, 1)] == [15, 15]


def test_a_second_engine_in_the_process_starts_at_zero() -> None:
    stat_logger().record(None, finished(observed(*DRAFTED)))
    stat_logger()
    assert sample("vllm_dllm:forwards_total") == 0
    assert sample("vllm_dllm:acceptance_depth_count") == 0


@pytest.mark.slow
def test_the_metrics_of_several_api_servers_are_added(tmp_path: Path) -> None:
    server = (
        "from prometheus_client import values\n"
        "values.ValueClass = values.get_value_class()\n"  # vLLM's modules have loaded it without the folder.
        "from tests.engine.observe.test_stats import DRAFTED, finished, observed, stat_logger, step\n"
        "logger = stat_logger()\n"
        "logger.log_engine_initialized()\n"
        "logger.record(step(64, 6), finished(observed(*DRAFTED)))"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        done = warm.run(["-c", server], env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    labels = {"model_name": "sdar", "engine": "0"}
    assert registry.get_sample_value("vllm_dllm:forwards_total", labels) == 8
    assert registry.get_sample_value("vllm_dllm:tokens_per_forward_sum", labels) == 2.0
    assert registry.get_sample_value("vllm_dllm:acceptance_depth_sum", labels) == 8
    assert registry.get_sample_value("vllm_dllm:acceptance_depth_bucket", {**labels, "le": "0.0"}) == 2
    assert registry.get_sample_value("vllm_dllm:rows_per_step_sum", labels) == 128
    # One API server or the other hears of a step, and all of the engine's pages.
    assert registry.get_sample_value(SCRATCH_PAGES_USED, labels) == 6
    assert registry.get_sample_value(SCRATCH_PAGES, labels) == 15
