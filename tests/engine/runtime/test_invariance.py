"""The battery: the same tokens whatever happens around a request.

Golden cases serve as requests, since all of them are known to be stable under small numerical noise: a request that
gives other tokens here is treated wrongly, not rounded differently.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.engine.harness import (
    MASK,
    assert_nothing_left,
    case_params,
    configuration_of,
    engine_of,
    free_pages,
    generate,
    golden,
    greedy,
    nfe_of,
    preemptions,
    request_options,
    scheduler_of,
    tensor_parallel_engine,
    tokens_of,
)
from tests.engine.step_maps import expected_of, mapped, misplaced
from tests.reference.decode import Options
from tests.reference.golden import Case

FAMILIES = {
    "sdar": configuration_of("sdar", (4, None)),
    "llada2_moe": configuration_of("llada2_moe", (8, None)),
    "fast_dllm_v2": configuration_of("fast_dllm_v2", (8, 4)),
}
"""Engine configuration of each family: block length, sub-block length."""


def cases_of(family: str, count: int, *, at_least: int = 0) -> list[Case]:
    """Cases of one engine configuration, with as many kinds of options and prompt lengths as there are."""
    fixed = FAMILIES[family]
    cases = [
        c
        for c in golden(family).cases
        if (c.options.block_length, c.options.sub_block_length) == fixed and len(c.prompt) >= at_least
    ]
    by_kind: dict[tuple[object, ...], Case] = {}
    for case in cases:
        by_kind.setdefault((case.options, len(case.prompt)), case)
    kinds = list(by_kind.values())
    # Evenly over all kinds.
    return [kinds[i * len(kinds) // count] for i in range(count)] if len(kinds) >= count else kinds


def assert_golden(cases: Sequence[Case], llm: LLM) -> None:
    params = [case_params(c) for c in cases]
    # Every other request asks for its step map.
    params[::2] = [mapped(each) for each in params[::2]]
    outputs = generate(llm, [c.prompt for c in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        assert tokens_of(output) == case.tokens, case.name
        assert nfe_of(output) == case.nfe, case.name
    for case, output in list(zip(cases, outputs, strict=True))[::2]:
        assert not misplaced(output, len(case.prompt), expected_of(case)), case.name


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_among_eight_other_neighbours(family: str) -> None:
    cases = cases_of(family, 8)
    llm = engine_of(golden(family), cases[0].options)
    for case in cases:
        assert_golden([case], llm)
    assert_golden(cases, llm)
    assert_golden(cases[::-1], llm)
    others = [c for c in cases_of(family, 24) if c not in cases]
    for case in cases[:4]:
        assert_golden([*others[:4], case, *others[4:7]], llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_hits_in_the_prefix_cache(family: str) -> None:
    cases = cases_of(family, 6, at_least=33)
    if not cases:
        pytest.skip("no golden prompt spans a page")
    llm = engine_of(golden(family), cases[0].options, block_size=32)
    llm.reset_prefix_cache()
    assert_golden(cases, llm)
    again = generate(llm, [c.prompt for c in cases], [case_params(c) for c in cases])
    for case, output in zip(cases, again, strict=True):
        assert output.num_cached_tokens > 0
        assert tokens_of(output) == case.tokens, case.name


@pytest.mark.parametrize("family", FAMILIES)
def test_after_preemption(family: str) -> None:
    cases = cases_of(family, 8)
    # Too few pages for all of them to the end.
    llm = engine_of(golden(family), cases[0].options, block_size=32, num_gpu_blocks_override=12, max_model_len=256)
    fitting = [c for c in cases if len(c.prompt) + c.max_new_tokens <= 256] * 3
    before = free_pages(llm)
    with preemptions(llm) as preempted:
        outputs = generate(llm, [c.prompt for c in fitting], [case_params(c) for c in fitting])
    assert preempted
    for case, output in zip(fitting, outputs, strict=True):
        assert tokens_of(output) == case.tokens, case.name
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_chunked_prefill(family: str) -> None:
    cases = cases_of(family, 8, at_least=33)
    if not cases:
        pytest.skip("no golden prompt is longer than the budget")
    budget = 32
    llm = engine_of(
        golden(family), cases[0].options, max_num_batched_tokens=budget, max_num_seqs=4, enable_prefix_caching=False
    )
    assert any(len(c.prompt) > budget for c in cases)
    assert_golden(cases, llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_requests_of_all_lengths_and_policies(family: str) -> None:
    cases = [
        c for c in golden(family).cases if (c.options.block_length, c.options.sub_block_length) == FAMILIES[family]
    ]
    llm = engine_of(golden(family), cases[0].options, max_num_seqs=7)
    before = free_pages(llm)
    assert_golden(cases, llm)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.slow
def test_with_tensor_parallel_two() -> None:
    """Experts over ranks. Such engines take long to start: ``test_step_skipping_invariance`` has SDAR, with drafts and
    without, ``test_pangu`` shifted logits and sub-blocks, ``test_full_attention_invariance`` the layers of Qwen2."""
    family = "llada2_moe"
    cases = cases_of(family, 8)
    dllm = dict(zip(("block_length", "sub_block_length"), FAMILIES[family], strict=True))
    with tensor_parallel_engine(
        golden(family).checkpoint, dllm=dllm, hf_overrides={"mask_token_id": golden(family).mask_id}
    ) as llm:
        assert_golden(cases, llm)
        # A step in which every request prefills has no logits to gather.
        outputs = generate(llm, [cases[0].prompt], greedy(max_tokens=1, extra_args=request_options(cases[0].options)))
        assert tokens_of(outputs[0]) == cases[0].tokens[:1]


def assert_equal_after_a_preemption_at_any_step(llm: LLM, params: SamplingParams, steps: int) -> None:
    """The first token of a block comes from a commit, or from the prefill of a request that was preempted before it."""
    prompt = [(222 + 3 * place) % 500 for place in range(18)]
    (expected,) = (tokens_of(output) for output in generate(llm, [prompt], params))
    core = llm.llm_engine
    for stop in range(1, steps):
        core.add_request(str(stop), {"prompt_token_ids": prompt}, params)
        for step in itertools.count():
            if step == stop:
                assert scheduler_of(llm).reset_prefix_cache(reset_running_requests=True)
            outputs = core.step()
            if not core.has_unfinished_requests():
                break
        assert tokens_of(outputs[0]) == expected, f"preempted in step {stop}"


def commits_predict(**options: Any) -> LLM:
    """An engine of a model whose commits predict the first token of the next block."""
    own = Options(block_length=8, mask_id=MASK, policy="threshold", sub_block_length=4, shifted=True)
    return engine_of("fast_dllm_v2", own, block_size=32, max_model_len=256, **options)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("penalty", [{"presence_penalty": 1.5}, {"frequency_penalty": 2.0}])
def test_penalties_count_the_same_text_after_a_preemption_at_any_step(
    penalty: dict[str, float], asynchronous: bool
) -> None:
    llm = commits_predict(async_scheduling=asynchronous)
    policy = {"dllm_policy": "threshold", "dllm_threshold": 0.6}
    assert_equal_after_a_preemption_at_any_step(llm, greedy(max_tokens=60, extra_args=policy, **penalty), 12)


@pytest.mark.parametrize(
    "policy",
    [
        {"dllm_policy": "random"},
        {"dllm_policy": "paced", "dllm_denoising_steps": 4},
        {"dllm_policy": "origin", "dllm_denoising_steps": 6},
        {"dllm_policy": "maskgit_plus", "dllm_alg_temp": 0.5, "dllm_denoising_steps": 6},
    ],
    ids=lambda policy: policy["dllm_policy"],
)
def test_positions_are_the_same_after_a_preemption_at_any_step(policy: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, seed=5, max_tokens=24, ignore_eos=True, extra_args=policy)
    assert_equal_after_a_preemption_at_any_step(commits_predict(), params, 20)


def test_fef_draws_as_many_positions_anew_after_a_preemption_at_any_step() -> None:
    fef = {"dllm_verify": "fef", "dllm_window": 8, "dllm_remask": 0.14}
    params = SamplingParams(temperature=0, seed=5, max_tokens=24, ignore_eos=True, extra_args=fef)
    assert_equal_after_a_preemption_at_any_step(commits_predict(dllm={"max_drafts": 7}), params, 30)
