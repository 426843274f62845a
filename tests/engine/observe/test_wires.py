"""What a forward did for a request: on its way from the worker, through the scheduler, to the request's statistics."""

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from vllm import LLM
from vllm.config import DeviceConfig, ModelConfig, ObservabilityConfig, VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.harness import (
    bundled,
    case_params,
    engine,
    engine_of,
    generate,
    greedy,
    scheduler_of,
    tokens_of,
)
from tests.engine.runtime.test_invariance import cases_of
from vllm_dllm import request_stats
from vllm_dllm.observe.metrics import SCRATCH_PAGES, RequestMetricsScheduler
from vllm_dllm.observe.stats import RequestStats, observed_stats
from vllm_dllm.observe.wires import ROWS_PER_STEP, SCRATCH_PAGES_USED, Observation, pack, unpack
from vllm_dllm.options.schema import MOST_DRAFTS
from vllm_dllm.patches import apply_all

BLOCK = 4
EOS = 2
BLOCK_ALONE = Observation(denoised=True, drafted=0, accepted=0, next_drafts=0)
WRITE_ONLY = Observation(denoised=False, drafted=0, accepted=0, next_drafts=0)


def packed(*observations: Observation) -> list[int]:
    *counts, drafting = torch.tensor(observations).T
    return pack(*counts, drafting=drafting).tolist()


# Packing


def test_an_observation_survives_packing() -> None:
    counts = (0, 1, 3, MOST_DRAFTS)
    flags = (False, True)
    observations = [Observation(*values) for values in product(flags, counts, counts, counts, counts, flags)]
    assert [unpack(value) for value in packed(*observations)] == observations


def test_no_observation_can_be_taken_for_a_number_of_nans() -> None:
    least, most = Observation(False, 0, 0, 0), Observation(True, *[MOST_DRAFTS] * 4, drafting=True)
    assert all(value < 0 for value in packed(least, most))


# The scheduler


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    apply_all()
    directory = tmp_path_factory.mktemp("model")
    hf_config = {
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
    (directory / "config.json").write_text(json.dumps(hf_config))
    return VllmConfig(
        model_config=ModelConfig(model=str(directory), skip_tokenizer_init=True),
        device_config=DeviceConfig("cpu"),
        diffusion_config=DiffusionConfig(canvas_length=BLOCK),
        observability_config=ObservabilityConfig(per_request_spec_decode_metrics="summary"),
    )


class AsyncRequestMetricsScheduler(RequestMetricsScheduler, AsyncScheduler):
    """Schedules a step before the one before it is known."""


class Rig:
    """A scheduler, and a worker that does what it is told to. ``steps_in_flight``: scheduled, and not known yet."""

    def __init__(self, config: VllmConfig, scheduler_cls: type[RequestMetricsScheduler] = RequestMetricsScheduler):
        config.cache_config.num_gpu_blocks = 16
        spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(16, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=32,
            log_stats=True,
        )
        self.scheduler.block_length = BLOCK
        self.steps_in_flight: deque[SchedulerOutput] = deque()
        self.told: dict[str, int] = {}
        """What vLLM's statistics of the last step carry for our logger."""
        self.sums: SpecDecodingStats | None = None
        """vLLM's own sums over the requests of that step."""

    def add(self, *req_ids: str, **params: object) -> None:
        for req_id in req_ids:
            sampling_params = SamplingParams(max_tokens=64, **params)
            sampling_params.update_from_generation_config({}, EOS)
            self.scheduler.add_request(Request(req_id, [5, 6, 7], sampling_params, None))

    def schedule(self) -> None:
        self.steps_in_flight.append(self.scheduler.schedule())

    def finish_step(self, forwards: dict[str, tuple[list[int], Observation]]) -> list[EngineCoreOutput]:
        """The worker is done with the oldest step: the tokens that each decoding request committed, and the rest."""
        scheduled = self.steps_in_flight.popleft()
        req_ids = list(scheduled.num_scheduled_tokens)
        worker_output = ModelRunnerOutput(
            req_ids,
            {req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[list(forwards[req_id][0]) if req_id in forwards else [] for req_id in req_ids],
            num_nans_in_logits={
                req_id: packed(forwards[req_id][1])[0] if req_id in forwards else 0 for req_id in req_ids
            },
        )
        outputs = self.scheduler.update_from_output(scheduled, worker_output)
        (stats,) = [each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None]
        self.told, self.sums = stats.running_lora_adapters, stats.spec_decoding_stats
        return [output for client_outputs in outputs.values() for output in client_outputs.outputs]

    def step(self, **forwards: tuple[list[int], Observation]) -> list[EngineCoreOutput]:
        """Run a step in which the named requests decode and others prefill."""
        for req_id in forwards:
            self.scheduler.requests[req_id].spec_token_ids = [-1] * BLOCK
        self.schedule()
        return self.finish_step(forwards)

    def stats(self, req_id: str) -> RequestStats:
        """Cost of a running request so far."""
        return observed_stats(self.scheduler.requests[req_id].spec_decode_metrics)


def test_the_scheduler_observes_each_forward_after_the_prefill(config: VllmConfig) -> None:
    rig = Rig(config)
    rig.add("r")
    assert rig.step() == []
    assert rig.step(r=([], BLOCK_ALONE)) == []
    (output,) = rig.step(r=([8, 9, 10, 11], Observation(True, drafted=3, accepted=2, next_drafts=0)))
    assert output.spec_decode_metrics is None
    rig.step(r=([], WRITE_ONLY))
    rig.step(r=([], Observation(True, drafted=0, accepted=0, next_drafts=3)))
    (output,) = rig.step(r=([12, EOS, 13, 14], Observation(True, drafted=3, accepted=0, next_drafts=3)))
    assert output.new_token_ids == [12, EOS]
    metrics = output.spec_decode_metrics
    assert metrics is not None
    assert metrics.histogram == [3, 0, 1, 0, 1]  # the stop token left two of the last four tokens
    assert metrics.num_draft_tokens == 5 * BLOCK
    assert metrics.per_step_drafted == [1, 4, 0, 1, 4]
    assert metrics.per_step_accepted == [0, 2, 0, 0, 0]


def test_what_a_step_did_is_there_for_the_next_one_to_be_planned_by(config: VllmConfig) -> None:
    rig = Rig(config)
    rig.add("first")
    rig.step()
    rig.add("second")
    drafts = Observation(True, drafted=1, accepted=1, next_drafts=3)
    rig.step(first=([], drafts))
    assert rig.scheduler.observations == {"first": drafts}  # the second request prefilled
    rig.step(first=([], BLOCK_ALONE), second=([], drafts))
    assert rig.scheduler.observations == {"first": BLOCK_ALONE, "second": drafts}


def test_completions_of_one_request_are_observed_apart(config: VllmConfig) -> None:
    rig = Rig(config)
    rig.add("0_r", "1_r")
    rig.step()
    rig.step(**{"0_r": ([], Observation(True, 3, 2, 0)), "1_r": ([], Observation(True, 1, 0, 0))})
    rig.step(**{"1_r": ([], BLOCK_ALONE), "0_r": ([8, 9, 10, 11], Observation(True, 2, 0, 0))})
    assert rig.stats("0_r") == RequestStats(2, 4, 2, drafted=5, accepted=2, acceptance_histogram=(1, 0, 1))
    assert rig.stats("1_r") == RequestStats(2, 0, 2, drafted=1, accepted=0, acceptance_histogram=(1,))


def test_vllm_never_sees_an_observation_as_a_number_of_nans(config: VllmConfig) -> None:
    rig = Rig(config)
    rig.add("r")
    rig.step()
    (output,) = rig.step(r=([8, 9, 10, 11], Observation(True, 3, 2, 3)))
    assert output.num_nans_in_logits == 0


def test_any_output_may_be_the_last_where_a_stop_string_ends_it(config: VllmConfig) -> None:
    rig = Rig(config)
    rig.add("r", stop=["end"])
    rig.step()
    rig.step(r=([], BLOCK_ALONE))
    (output,) = rig.step(r=([8, 9, 10, 11], Observation(True, drafted=2, accepted=1, next_drafts=0)))
    assert output.finish_reason is None
    # The request goes on while its output is on the way.
    rig.step(r=([], Observation(True, drafted=2, accepted=2, next_drafts=0)))
    metrics = output.spec_decode_metrics
    assert type(metrics) is RequestSpecDecodeMetrics
    assert metrics.histogram == [1, 0, 0, 0, 1]
    assert metrics.per_step_drafted == [1, 3]
    assert metrics.per_step_accepted == [0, 1]


def test_a_forward_that_a_preemption_overtook_counts_if_its_tokens_do(config: VllmConfig) -> None:
    rig = Rig(config, AsyncRequestMetricsScheduler)
    rig.add("r")
    rig.schedule()
    rig.schedule()
    rig.finish_step({})
    scheduler = rig.scheduler
    scheduler.running.remove(scheduler.requests["r"])
    scheduler._preempt_request(scheduler.requests["r"], timestamp=0.0)
    (output,) = rig.finish_step({"r": ([8, 9, 10, 11], Observation(True, 3, 2, 0))})
    assert output.new_token_ids == [8, 9, 10, 11]
    assert rig.stats("r") == RequestStats(1, 4, 1, drafted=3, accepted=2, acceptance_histogram=(0, 0, 1))


def test_a_forward_whose_outcome_is_dropped_does_not_count(config: VllmConfig) -> None:
    rig = Rig(config, AsyncRequestMetricsScheduler)
    rig.add("r")
    rig.schedule()
    rig.schedule()
    rig.finish_step({})
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.schedule()  # the prompt again
    rig.schedule()
    assert rig.finish_step({"r": ([8, 9, 10, 11], Observation(True, 3, 2, 0))}) == []
    rig.finish_step({})
    assert rig.stats("r") == RequestStats(0, 0, 0)
    rig.finish_step({"r": ([], Observation(True, 1, 0, 0))})
    assert rig.stats("r") == RequestStats(1, 0, 1, drafted=1, accepted=0, acceptance_histogram=(1,))


def test_a_request_aborted_while_its_step_runs_leaves_the_others_alone(config: VllmConfig) -> None:
    rig = Rig(config, AsyncRequestMetricsScheduler)
    rig.add("aborted", "kept")
    rig.schedule()
    rig.schedule()
    rig.finish_step({})
    rig.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    rig.finish_step({"aborted": ([], Observation(True, 3, 3, 0)), "kept": ([], Observation(True, 1, 0, 0))})
    assert rig.stats("kept") == RequestStats(1, 0, 1, drafted=1, accepted=0, acceptance_histogram=(1,))


# Steps


@pytest.mark.parametrize("pages_per_draft", [1, 3])
def test_a_step_tells_its_rows_and_the_pages_that_its_drafts_wrote(config: VllmConfig, pages_per_draft: int) -> None:
    rig = Rig(config)
    rig.scheduler.pages_per_draft = pages_per_draft
    rig.add("first", "second")
    rig.step()
    assert rig.told == {ROWS_PER_STEP: 2 * 3, SCRATCH_PAGES_USED: 0}  # the prompts
    rig.step(first=([], Observation(True, 5, 2, 0)), second=([], Observation(True, 2, 0, 7)))
    assert rig.told == {ROWS_PER_STEP: 2 * BLOCK, SCRATCH_PAGES_USED: 7 * pages_per_draft}
    rig.step(first=([], BLOCK_ALONE), second=([], WRITE_ONLY))
    assert rig.told == {ROWS_PER_STEP: 2 * BLOCK, SCRATCH_PAGES_USED: 0}


def test_requests_that_have_ended_or_were_preempted_use_no_scratch_pages(config: VllmConfig) -> None:
    rig = Rig(config, AsyncRequestMetricsScheduler)
    rig.scheduler.pages_per_draft = 1
    rig.add("ends", "aborted", "preempted", "kept")
    rig.schedule()
    rig.schedule()
    rig.finish_step({})
    rig.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    preempted = rig.scheduler.requests["preempted"]
    rig.scheduler.running.remove(preempted)
    rig.scheduler._preempt_request(preempted, timestamp=0.0)
    forwards = {name: ([], Observation(True, drafts, 0, 0)) for name, drafts in (("aborted", 2), ("preempted", 4))}
    forwards["kept"] = ([], Observation(True, 8, 0, 0))
    forwards["ends"] = ([EOS, 8, 9, 10], Observation(True, 16, 0, 0))
    rig.finish_step(forwards)
    assert rig.told[SCRATCH_PAGES_USED] == 8


def test_the_step_that_tells_the_workers_who_has_left_has_no_rows_and_no_pages(config: VllmConfig) -> None:
    rig = Rig(config)
    rig.scheduler.pages_per_draft = 1
    rig.add("r")
    rig.step()
    rig.step(r=([], Observation(True, 5, 0, 5)))
    assert rig.told[SCRATCH_PAGES_USED] == 5
    rig.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    rig.step()
    assert rig.told == {ROWS_PER_STEP: 0, SCRATCH_PAGES_USED: 0}


def test_vllms_sums_over_a_step_count_what_was_denoised_and_neither_drafts_nor_commits(config: VllmConfig) -> None:
    rig = Rig(config)
    rig.add("first", "second", "third")
    rig.step()
    assert rig.sums is None
    commit = Observation(denoised=False, drafted=0, accepted=0, next_drafts=0)
    with_drafts = Observation(denoised=True, drafted=3, accepted=2, next_drafts=0, deepest=2)
    rig.step(first=([8, 9, 10, 11], BLOCK_ALONE), second=([], with_drafts), third=([], commit))
    expected = SpecDecodingStats(BLOCK, num_drafts=2, num_draft_tokens=2 * BLOCK, num_accepted_tokens=4)
    assert MsgpackDecoder(SpecDecodingStats).decode(MsgpackEncoder().encode(rig.sums)) == expected


def test_without_statistics_a_step_tells_nothing(config: VllmConfig) -> None:
    rig = Rig(config)
    rig.scheduler.log_stats = False
    rig.add("r")
    rig.schedule()
    scheduled = rig.steps_in_flight.popleft()
    outputs = rig.scheduler.update_from_output(scheduled, ModelRunnerOutput(["r"], {"r": 0}, sampled_token_ids=[[]]))
    assert all(each.scheduler_stats is None for each in outputs.values())


# The engine


def observe(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Observation]]:
    """What each forward of each request did, in the order in which the requests came."""
    scheduler, forwards = scheduler_of(llm), defaultdict(list)
    original = scheduler.update_from_output

    def note(*args: Any) -> Any:
        outputs = original(*args)
        for req_id, observation in scheduler.observations.items():
            forwards[req_id].append(observation)
        return outputs

    scheduler.update_from_output = note
    try:
        generate(llm, prompts, params)
    finally:
        del scheduler.update_from_output
    return [forwards[req_id] for req_id in sorted(forwards, key=lambda name: int(name.split("-")[0]))]


def test_forwards_that_only_write_a_block_are_told_from_those_that_denoise() -> None:
    cases = cases_of("fast_dllm_v2", 24)
    llm = engine_of("fast_dllm_v2", cases[0].options)
    outputs = generate(llm, [c.prompt for c in cases], [case_params(c) for c in cases])
    assert [request_stats(output).denoising_steps for output in outputs] == [len(c.steps) for c in cases]


MAX_DRAFTS = 7


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return engine(
        bundled("sdar").checkpoint,
        dllm={"block_length": 8, "max_drafts": MAX_DRAFTS},
        max_num_seqs=8,
        disable_log_stats=False,
    )


PROMPTS = [[1, 2, 3], list(range(20, 36)), list(range(100, 113))]


def freedave(**params: Any) -> SamplingParams:
    return greedy(max_tokens=41, extra_args={"dllm_policy": "static", "dllm_verify": "freedave"}, **params)


def test_steps_that_were_skipped_and_steps_that_were_not_make_up_those_without_drafts(drafting: LLM) -> None:
    # Of a text that ends inside a block, drafts skip steps that it does not need.
    whole = {"dllm_eos_early_stop": False}
    plain = generate(drafting, PROMPTS, greedy(max_tokens=41, extra_args={"dllm_policy": "static", **whole}))
    drafts = freedave()
    assert drafts.extra_args is not None
    drafts.extra_args |= whole
    drafted = generate(drafting, PROMPTS, drafts)
    for without, with_drafts in zip(plain, drafted, strict=True):
        before, after = request_stats(without), request_stats(with_drafts)
        assert tokens_of(with_drafts) == tokens_of(without)
        assert (before.drafted, before.accepted) == (0, 0)
        assert after.nfe == after.denoising_steps == before.nfe - after.accepted
        assert 0 < after.accepted <= after.drafted
        assert sum(depth * forwards for depth, forwards in enumerate(after.acceptance_histogram)) == after.accepted


def test_a_request_has_the_drafts_that_the_forward_before_announced(drafting: LLM) -> None:
    requests = observe(drafting, PROMPTS, freedave())
    assert len(requests) == len(PROMPTS)
    for forwards in requests:
        assert forwards[0].drafted == 0
        assert [f.drafted for f in forwards[1:]] == [f.next_drafts for f in forwards[:-1]]
        assert max(f.drafted for f in forwards) > 1


def test_the_statistics_of_completions_add_up_to_those_of_their_request(drafting: LLM) -> None:
    (output,) = generate(drafting, PROMPTS[:1], freedave(n=3, temperature=1.0, seed=5))
    parts = [request_stats(completion) for completion in output.outputs]
    whole = request_stats(output)
    assert whole.drafted == sum(part.drafted for part in parts) > 0
    assert whole.accepted == sum(part.accepted for part in parts)
    assert sum(whole.acceptance_histogram) == sum(sum(part.acceptance_histogram) for part in parts)


def samples() -> dict[str, float]:
    """Our metrics in this process, by the sample's name; all have the same labels. ``get_metrics`` shows vLLM's."""
    families = [family for family in REGISTRY.collect() if family.name.startswith("vllm_dllm:")]
    return {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}


def test_metrics_of_an_offline_engine_are_what_its_requests_and_steps_say(drafting: LLM) -> None:
    before, theirs_before = samples(), {metric.name: metric for metric in drafting.get_metrics()}
    scheduler, rows, pages = scheduler_of(drafting), list[int](), list[float]()
    original = scheduler.update_from_output

    def note(scheduler_output: SchedulerOutput, *args: Any) -> Any:
        rows.append(scheduler_output.total_num_scheduled_tokens)
        # What the step before this one told has reached the gauge.
        pages.append(samples()[SCRATCH_PAGES_USED])
        expected.append(sum(seen.drafted for seen in scheduler.observations.values()))
        return original(scheduler_output, *args)

    expected: list[int] = []
    scheduler.update_from_output = note
    try:
        stats = [request_stats(output) for output in generate(drafting, PROMPTS, freedave())]
    finally:
        del scheduler.update_from_output
    after = samples()
    increase = {name: value - before[name] for name, value in after.items()}
    assert increase["vllm_dllm:forwards_total"] == sum(each.nfe for each in stats)
    assert increase["vllm_dllm:committed_tokens_total"] == sum(each.committed_tokens for each in stats)
    assert increase["vllm_dllm:drafted_branches_total"] == sum(each.drafted for each in stats) > 0
    assert increase["vllm_dllm:accepted_steps_total"] == sum(each.accepted for each in stats) > 0
    assert increase["vllm_dllm:acceptance_depth_count"] == sum(sum(each.acceptance_histogram) for each in stats)
    assert increase[f"{ROWS_PER_STEP}_count"] == sum(number > 0 for number in rows)
    assert increase[f"{ROWS_PER_STEP}_sum"] == sum(rows)
    assert max(pages) > 0
    # A block of 8 and its page of 32 tokens: one page per draft. Of what a request drafted in its last step, nothing.
    assert all(gauge <= drafted for gauge, drafted in zip(pages, expected, strict=True))
    assert sum(gauge == drafted for gauge, drafted in zip(pages, expected, strict=True)) >= len(pages) - len(PROMPTS)
    assert after[SCRATCH_PAGES_USED] == 0
    assert after[SCRATCH_PAGES] == 8 * MAX_DRAFTS
    theirs = {metric.name: metric for metric in drafting.get_metrics()}
    increase = {
        name.removeprefix("vllm:diffusion_num_"): metric.value - theirs_before[name].value
        for name, metric in theirs.items()
        if name.startswith("vllm:diffusion_num_")
    }
    steps, committed = sum(each.denoising_steps for each in stats), increase["committed_tokens"]
    # The formulas of `vllm bench serve`, which takes a step of each canvas for the one that commits it.
    canvases = committed / (increase["canvas_positions"] / increase["denoising_steps"])
    assert increase["denoising_steps"] - canvases == pytest.approx(steps, abs=1)
    assert canvases == pytest.approx(committed / 8)
    # The end of the last block of each answer is committed, but not returned.
    assert committed >= sum(each.committed_tokens for each in stats)


def test_scratch_pages_are_given_back_by_requests_that_are_aborted(drafting: LLM) -> None:
    llm_engine = drafting.llm_engine
    ids = [
        llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, freedave())
        for number, prompt in enumerate(PROMPTS)
    ]
    while samples()[SCRATCH_PAGES_USED] == 0:
        llm_engine.step()
    llm_engine.abort_request(ids, internal=True)
    llm_engine.step()
    assert samples()[SCRATCH_PAGES_USED] == 0
