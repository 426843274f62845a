"""Engines whose steps are compiled write what others write, and compile nothing once they serve.

``tests/gpu_less`` has what Inductor makes of a stage. Here PyTorch runs what it has traced, which takes
little time to compile.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from vllm import LLM, SamplingParams
from vllm.utils import jit_monitor

from tests.engine import full_attention
from tests.engine.harness import (
    MASK,
    drafting_engine,
    engine_of,
    generate,
    no_form_is_missing,
    place_commits,
    runner_of,
    tokens_of,
)
from tests.engine.runtime import test_isd, test_nemotron
from tests.engine.runtime.test_every_policy_is_lossless import variants
from tests.reference.bidirectional import Options as FullAttentionOptions
from tests.reference.decode import Options
from vllm_dllm import request_stats
from vllm_dllm.decoding.distributions import scores
from vllm_dllm.decoding.policies import ROUNDING_POLICIES
from vllm_dllm.methods import POLICY_NAMES, policy_row
from vllm_dllm.patches import apply_all
from vllm_dllm.runtime import compiled as compiled_module
from vllm_dllm.runtime.compiled import GPU_OPTIONS, NOBODYS, Stages
from vllm_dllm.runtime.policy_rounds import PolicyRounds
from vllm_dllm.runtime.sampler import BlockDiffusionSampler
from vllm_dllm.runtime.scheduling.timing import StartSteps

OPTIONS = Options(block_length=8, mask_id=MASK)
PROMPTS = [list(range(10, 10 + length)) for length in (37, 5, 8)]
LONG_PROMPTS = [list(range(10, 10 + length)) for length in (37, 17, 30)]
"""Of two blocks and more. Where more than three requests decode together, the rows of shorter prompts are written."""
STOP = 319
"""A token of the smallest vocabulary."""
KINDS = ((0.0, 1.0, None), (0.8, 1.0, None), (0.8, 0.9, None), (0.8, 1.0, 1))
"""Temperature, ``top_p`` and ``logprobs`` of greedy and drawn answers, of those from distributions that are reshaped,
and of those with log-probabilities and a step map."""
FREEDAVE = {"dllm_verify": "freedave", "dllm_drafts": 3}


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(message: str, name: str) -> None:
        raise AssertionError(message % name)

    monkeypatch.setattr(Stages, "backend", "eager")
    monkeypatch.setattr(Stages, "backend_options", [{}])
    # With sizes that vary, the cache of fake tensors is hardly ever hit.
    monkeypatch.setattr(torch._dynamo.config, "fake_tensor_cache_enabled", False)
    monkeypatch.setattr(compiled_module.logger, "exception", fail)
    yield
    torch._dynamo.reset()


def engines(seed: int, asynchronous: bool = False, **dllm: Any) -> tuple[LLM, LLM]:
    """An engine with drafts whose steps run as they are written, and one whose steps are compiled.

    ``seed`` only sets them apart from the engines of other tests.
    """
    options: dict[str, Any] = {"seed": seed, "async_scheduling": asynchronous}
    written = drafting_engine("sdar", OPTIONS, dllm=dllm, **options)
    return written, drafting_engine("sdar", OPTIONS, dllm={**dllm, "compile_steps": True}, **options)


def params(
    seed: int = 0, temperature: float = 0.0, top_p: float = 1.0, logprobs: int | None = None, **extra_args: Any
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        logprobs=logprobs,
        seed=seed,
        max_tokens=17,
        ignore_eos=True,
        # Nearly every request has one: the tokenizer's.
        stop_token_ids=[STOP],
        detokenize=False,
        extra_args=extra_args if logprobs is None else {"dllm_step_map": True, **extra_args},
    )


def alone_and_together(llm: LLM, requests: list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """Of every answer its tokens, and the log-probabilities and the step map that its request asked for."""
    outputs = [generate(llm, [prompt], [request])[0] for prompt, request in zip(prompts, requests, strict=True)]
    outputs += generate(llm, prompts, requests)
    return [
        (tokens_of(output), output.outputs[0].logprobs, request_stats(output.outputs[0]).step_map) for output in outputs
    ]


def assert_the_same_without_compiling(written: LLM, compiled: LLM, **asked: Any) -> None:
    """Answers of all kinds, alone and together; ``compiled`` serves them with what it compiled at its start."""
    num_graphs = counters["stats"]["unique_graphs"]
    for kind in KINDS:
        requests = [params(seed, *kind, **asked) for seed in range(len(PROMPTS))]
        assert alone_and_together(compiled, requests) == alone_and_together(written, requests)
    assert counters["stats"]["unique_graphs"] == num_graphs


def assert_no_form_is_missing(compiled: LLM) -> None:
    """Or it would run as it is written."""
    with no_form_is_missing(compiled):
        for kind in KINDS:
            alone_and_together(compiled, [params(seed, *kind) for seed in range(len(LONG_PROMPTS))], LONG_PROMPTS)


def assert_the_same_and_no_form_is_missing(written: LLM, compiled: LLM, **asked: Any) -> None:
    """Both at once, in engines that compile forms for prompts of less than two blocks too."""
    with no_form_is_missing(compiled):
        assert_the_same_without_compiling(written, compiled, **asked)


def num_forms(function: Callable[..., Any]) -> int:
    """How many forms of a stage are compiled."""
    return len(_debug_get_cache_entry_list(function.__code__))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_an_engine_compiles_at_its_start_is_what_it_serves_with(asynchronous: bool) -> None:
    # Noise of a random order has the seeds that samples have.
    own = {"policy": "random"} if asynchronous else {}
    written, compiled = engines(31, asynchronous, verify="freedave", drafts=3, **own)
    # Only with synchronous scheduling do steps without drafts have fewer branches. One request and several share their
    # forms, and so do greedy and sampling requests. Those with log-probabilities have forms of their own.
    assert num_forms(PolicyRounds.decide) == (2 if asynchronous else 4)
    assert_the_same_without_compiling(written, compiled)
    assert_no_form_is_missing(compiled)


def test_rows_of_commits_may_stand_beside_or_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    written, compiled = (
        engine_of("sdar", OPTIONS, dllm={"compile_steps": compiles}, async_scheduling=True, max_num_seqs=8, seed=37)
        for compiles in (False, True)
    )
    # With log-probabilities and without.
    assert num_forms(BlockDiffusionSampler._step) == 2
    assert_no_form_is_missing(compiled)
    num_graphs = counters["stats"]["unique_graphs"]
    requests = [params(seed, 0.8 * seed) for seed in range(len(PROMPTS))]
    for where in ("beside", "apart"):
        place_commits(monkeypatch, where)
        assert alone_and_together(compiled, requests) == alone_and_together(written, requests)
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_every_policy_that_compares_only(monkeypatch: pytest.MonkeyPatch) -> None:
    written, compiled = engines(33)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs
    # A form that is not compiled runs as it is written.
    requests = [params(seed, 0.8, dllm_policy="random", **FREEDAVE) for seed in range(len(PROMPTS))]
    requests[0].logprobs = 1
    assert alone_and_together(compiled, requests) == alone_and_together(written, requests)
    assert counters["stats"]["unique_graphs"] == num_graphs
    # All requests may compile.
    monkeypatch.setattr(compiled_module, "NOBODYS", "")
    for policy in POLICY_NAMES:
        if policy_row(policy, timesteps=False).needs_windows:
            continue
        first, *others = variants(policy, "sdar")
        # Of the others, those of another form.
        for index, variant in enumerate([first, *(other for other in others if "dllm_alg_temp" in other)]):
            # What drafts add to a stage is the same for all; a policy adds what it unmasks, and in which order.
            drafts = index == 0 and policy in ("threshold", "random", "maskgit_plus")
            verifiers: list[dict[str, Any]] = [{}, FREEDAVE] if drafts else [{}]
            requests = [
                params(seed, 0.8 * (seed % 2), **variant, **verifiers[seed % len(verifiers)])
                for seed in range(len(PROMPTS))
            ]
            expected = [tokens_of(output) for output in generate(written, PROMPTS, requests)]
            assert [tokens_of(output) for output in generate(compiled, PROMPTS, requests)] == expected, variant
            options = list(runner_of(compiled).model_state.states._options.values())[-1]
            rounds = policy_row(policy, timesteps=False).kind in ROUNDING_POLICIES or "dllm_alg_temp" in variant
            assert options.compares_only is not rounds


def test_several_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is compiled at the start, and all requests may compile.
    monkeypatch.setattr(StartSteps, "take", lambda *_args, **_more: None)
    monkeypatch.setattr(compiled_module, "NOBODYS", "")
    own: dict[str, Any] = {"policy": "multi_block", "threshold": 0.5, "eager": 2}
    written, compiled = (
        engine_of("sdar", OPTIONS, dllm={**own, "compile_steps": compiles}, max_num_seqs=3, seed=41)
        for compiles in (False, True)
    )
    num_graphs = counters["stats"]["unique_graphs"]
    requests = [params(seed, 0.8 * (seed % 2)) for seed in range(len(PROMPTS))]
    expected = [tokens_of(output) for output in generate(written, PROMPTS, requests)]
    assert [tokens_of(output) for output in generate(compiled, PROMPTS, requests)] == expected
    assert counters["stats"]["unique_graphs"] > num_graphs


def test_the_start_takes_steps_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = set()
    step = StartSteps._step

    def noting(start: StartSteps) -> Any:
        output = step(start)
        decoding = output.scheduled_spec_decode_tokens
        longest = max((request.num_tokens for request in start._scheduler.requests.values()), default=0)
        kinds.add((len(decoding), len(output.num_scheduled_tokens) > len(decoding), longest > 400))
        return output

    monkeypatch.setattr(StartSteps, "_step", noting)
    # What the steps compile is for other tests.
    monkeypatch.setattr(Stages, "stage", lambda _, function: function)
    llm = engine_of("sdar", OPTIONS, dllm={"compile_steps": True}, max_num_seqs=8, seed=36)
    # Alone; two; two beside a prefill; as many as there can be; one with a long context.
    assert {(1, False, False), (2, False, False), (2, True, False), (8, False, False), (1, False, True)} <= kinds
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1


def test_a_cpu_compiles_no_steps_by_default() -> None:
    config = engine_of("sdar", OPTIONS, max_num_seqs=8).llm_engine.vllm_config
    assert config.model_config.hf_config.geometry.options.compile_steps is False


def test_a_stage_that_does_not_compile_runs_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    monkeypatch.setattr(compiled_module.logger, "exception", lambda message, name: problems.append(message % name))

    def double(values: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()  # which a compiler of whole functions refuses
        return 2 * values

    # Options of the backend are no help.
    monkeypatch.setattr(Stages, "backend_options", [GPU_OPTIONS, {}])
    stages = Stages(enabled=True)
    stage = stages.stage(double)
    stages.may_compile = True
    for _ in range(2):
        assert stage(torch.ones(3)).tolist() == [2, 2, 2]
    assert problems == ["double cannot be compiled, and runs as it is written"]


def test_a_stage_that_does_not_compile_with_the_options_of_a_gpu_is_compiled_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems: list[str] = []
    monkeypatch.setattr(compiled_module.logger, "exception", lambda message, name: problems.append(message % name))
    compiles: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any, options: Any = None) -> torch.fx.GraphModule:
        if options == GPU_OPTIONS:
            raise RuntimeError("no combined kernels")
        compiles.append(graph)
        return graph

    monkeypatch.setattr(Stages, "backend", staticmethod(compiler))
    monkeypatch.setattr(Stages, "backend_options", [GPU_OPTIONS, {}])
    stages = Stages(enabled=True)
    stage = stages.stage(lambda values: 2 * values)
    for stages.may_compile in (True, True, False):
        assert stage(torch.ones(3)).tolist() == [2, 2, 2]
    assert problems == ["<lambda> cannot be compiled, and is tried with fewer options"]
    assert len(compiles) == 1


@pytest.mark.parametrize("enabled", [False, True])
def test_what_compiles_in_steps_of_requests_that_nobody_sent_is_expected(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_all()  # as every engine does when it starts
    monkeypatch.setattr(jit_monitor, "_mode", "error")
    stages = Stages(enabled)
    stages.begin_step(["sent", f"{NOBODYS}0"])
    jit_monitor._log_triton_jit_compile("kernel", {})
    stages.begin_step(["sent"])
    with pytest.raises(RuntimeError, match="during inference"):
        jit_monitor._log_triton_jit_compile("kernel", {})


def test_full_attention_and_its_timesteps_are_compiled_at_the_start_too() -> None:
    """Refreshes, what computes the row before the block only in some steps, and a number of steps that is new."""
    options = FullAttentionOptions(mask_id=MASK, gen_length=32, block_length=8, cache="prefix")
    own = {"policy": "maskgit_plus"}
    written, compiled = (
        full_attention.engine_of("dream", options, dllm={**own, "compile_steps": compiles}, max_num_seqs=8, seed=52)
        for compiles in (False, True)
    )
    assert_the_same_and_no_form_is_missing(written, compiled)
    assert_the_same_and_no_form_is_missing(written, compiled, dllm_denoising_steps=5)


def test_rounds_of_linear_spec_are_compiled_at_the_start_too() -> None:
    """Drafts with the adapter, and what verifies them."""
    own = {"verify": "linear_spec"}
    # Few steps at the start.
    small = {"max_model_len": 96, "max_num_seqs": 3, "seed": 51}
    options = replace(test_nemotron.STATIC, block_length=4)
    written = test_nemotron.engine_of(options, dllm=own, **small)
    compiled = test_nemotron.engine_of(options, dllm={**own, "compile_steps": True}, **small)
    assert_the_same_without_compiling(written, compiled, dllm_step_map=False)


def test_strides_are_compiled_at_the_start_too() -> None:
    small = {"max_model_len": 96, "max_num_seqs": 3, "seed": 51}
    written = test_isd.engine_of(3, **small)
    compiled = test_isd.engine_of(3, dllm={"compile_steps": True}, **small)
    assert_the_same_without_compiling(written, compiled, dllm_step_map=False)


FEF: dict[str, Any] = {"verify": "fef", "window": 4}
S2D2: dict[str, Any] = {"verify": "s2d2", "window": 4}


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("sdar", FEF),
        ("llada", FEF),
        ("fast_dllm_v2", {**S2D2, "causal_drafts": True, "route": "hysteresis", "score_on": 50.0}),
        ("llada2_moe", {**S2D2, "edit_threshold": 0.6, "max_post_edit_steps": 4}),
    ],
)
def test_rounds_that_read_distributions_are_compiled_at_the_start_too(family: str, own: dict[str, Any]) -> None:
    """Drafts, their verification and what replaces the rejected ones; causal rows, routes and edits of S2D2."""
    of_llada = FullAttentionOptions(mask_id=MASK, gen_length=32, block_length=8, cache="none")
    written, compiled = (
        (full_attention.engine_of if family == "llada" else engine_of)(
            family,
            of_llada if family == "llada" else OPTIONS,
            dllm={**own, "compile_steps": compiles},
            max_num_seqs=3,
            seed=53,
        )
        for compiles in (False, True)
    )
    # Of drafts, of a column and of single rows; plain and with sampling parameters.
    assert 0 < num_forms(scores) <= 6
    # Requests may verify where the engine's own ones do not.
    asked = {"dllm_score_on": -2.0} if "score_on" in own else {}
    assert_the_same_and_no_form_is_missing(written, compiled, **asked)
