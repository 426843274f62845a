"""Step maps: which denoising step and which forward wrote each token. The battery is in ``test_invariance.py``."""

from typing import Any

import pytest
from vllm import RequestOutput, SamplingParams

from tests.engine.harness import (
    case_params,
    configuration_of,
    drafting_engine,
    engine_of,
    generate,
    golden,
    greedy,
    nfe_of,
    skipping_options,
    tokens_of,
)
from tests.engine.runtime.test_golden import _fixed_for_engine
from tests.engine.step_maps import expected_of, map_of, mapped, misplaced
from tests.reference.decode import Options
from tests.reference.drafts import PSD, FreeDave, Spiffy
from tests.reference.golden import Case
from vllm_dllm import request_stats

PROMPTS = [[5, 6, 7], list(range(20, 57)), [9] * 5 + [3], list(range(100, 231)), [1], list(range(300, 316))]
SDAR = configuration_of("sdar", (8, None))


def sdar_cases() -> list[Case]:
    return [c for c in golden("sdar").cases if (c.options.block_length, c.options.sub_block_length) == SDAR]


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
def test_drafts_of_lossless_verifiers_leave_the_steps_as_they_are(eager: bool) -> None:
    # Denoising steps are about a block at a time, which eager drafts are not.
    cases = [case for case in sdar_cases() if not eager or case.options.denoising_steps is None]
    assert cases
    llm = drafting_engine(golden("sdar"), cases[0].options, dllm={"eager": eager})
    verifiers = [None, FreeDave(8), FreeDave(4), Spiffy([], 3)]
    requests = [
        (case, mapped(greedy(case.options, verifier, max_tokens=case.max_new_tokens)))
        for case in cases
        for verifier in verifiers
    ]
    outputs = generate(llm, [case.prompt for case, _ in requests], [params for _, params in requests])
    skipped = 0
    for number, case in enumerate(cases):
        plain, *drafted = outputs[number * len(verifiers) : (number + 1) * len(verifiers)]
        expected = expected_of(case)
        places = range(len(case.prompt), len(case.prompt) + len(case.tokens))
        assert map_of(plain).steps == tuple(expected.steps[position] for position in places)
        for output in drafted:
            assert tokens_of(output) == case.tokens
            assert map_of(output).steps == map_of(plain).steps, case.name
            assert map_of(output).blocks == map_of(plain).blocks, case.name
            if (len(case.prompt) + len(case.tokens)) % 8 == 0:  # no block is cut
                # Each forward writes something.
                assert set(map_of(output).forwards) == set(range(nfe_of(output))), case.name
            skipped += nfe_of(plain) - nfe_of(output)
    assert skipped > 0


def num_steps(output: RequestOutput) -> int:
    """Steps of all blocks, by the map."""
    found = map_of(output)
    last: dict[int, int] = {}
    for block, step in zip(found.blocks, found.steps, strict=True):
        last[block] = max(step, last.get(block, 0))
    return sum(step + 1 for step in last.values())


@pytest.mark.parametrize(
    "args",
    [
        skipping_options(PSD(3)),
        skipping_options(FreeDave(5, "subset")),
        {"dllm_verify": "fef", "dllm_resample_steps": 1},
        {"dllm_verify": "fef", "dllm_resample_steps": 2},
    ],
    ids=["psd", "freedave, subset", "fef", "fef, two passes"],
)
def test_skipped_steps_count_like_steps(args: dict[str, Any]) -> None:
    options = sdar_cases()[0].options
    llm = drafting_engine(golden("sdar"), options)
    # To the end of a block.
    params = [mapped(greedy(max_tokens=48 - len(prompt) % 8, extra_args=args)) for prompt in PROMPTS]
    accepted = 0
    for prompt, output in zip(PROMPTS, generate(llm, PROMPTS, params), strict=True):
        stats = request_stats(output)
        assert num_steps(output) == stats.denoising_steps + stats.accepted, prompt
        assert max(map_of(output).forwards) == stats.nfe - 1
        accepted += stats.accepted
    assert accepted > 0


def test_answers_with_drafts_after_preemption_and_with_asynchronous_scheduling() -> None:
    cases = sdar_cases()[::3]
    llm = drafting_engine(golden("sdar"), cases[0].options, async_scheduling=True)
    params = [mapped(greedy(c.options, FreeDave(8), max_tokens=c.max_new_tokens)) for c in cases]
    outputs = generate(llm, [c.prompt for c in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        expected = expected_of(case)
        places = range(len(case.prompt), len(case.prompt) + len(case.tokens))
        assert tokens_of(output) == case.tokens
        assert map_of(output).steps == tuple(expected.steps[position] for position in places), case.name


def test_each_completion_has_its_own_map_and_other_requests_have_none() -> None:
    llm = engine_of(golden("sdar"), sdar_cases()[0].options)
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=24, detokenize=False, ignore_eos=True)
    plain, with_map = (generate(llm, PROMPTS[:2], each) for each in (params, mapped(params)))
    for before, after in zip(plain, with_map, strict=True):
        assert [list(each.token_ids) for each in before.outputs] == [list(each.token_ids) for each in after.outputs]
        assert request_stats(before).step_map is request_stats(after).step_map is None
        assert request_stats(before).nfe == request_stats(after).nfe
        for completion in after.outputs:
            found = request_stats(completion).step_map
            assert found is not None
            assert len(found.steps) == 24
        assert all(request_stats(completion).step_map is None for completion in before.outputs)


@pytest.mark.parametrize("shift", [False, True], ids=["sdar", "fast_dllm_v2"])
def test_log_probabilities_beside_a_map_are_those_without_it(shift: bool) -> None:
    family, fixed = ("fast_dllm_v2", (8, 4)) if shift else ("sdar", (8, None))
    configuration = configuration_of(family, fixed)
    cases = [c for c in golden(family).cases if _fixed_for_engine(c) == configuration]
    options: Options = cases[0].options
    llm = engine_of(golden(family), options)
    params = greedy(options, max_tokens=20, logprobs=2)
    neighbours = [params, mapped(params), mapped(greedy(options, max_tokens=20)), params]
    prompts = [PROMPTS[1], PROMPTS[1], PROMPTS[3], PROMPTS[4]]
    alone = generate(llm, prompts[:1], params)[0].outputs[0]
    both = generate(llm, prompts, neighbours)
    assert both[2].outputs[0].logprobs is None
    for output in both[:2]:
        assert output.outputs[0].logprobs is not None
        assert alone.logprobs is not None
        for ours, theirs in zip(output.outputs[0].logprobs, alone.logprobs, strict=True):
            assert {token: each.rank for token, each in ours.items()} == {
                token: each.rank for token, each in theirs.items()
            }
            assert [each.logprob for each in ours.values()] == pytest.approx(
                [each.logprob for each in theirs.values()], abs=1e-5
            )
    assert map_of(both[1]) == map_of(generate(llm, prompts[1:2], mapped(greedy(options, max_tokens=20)))[0])


def test_a_map_ends_with_the_text_of_a_stop_token() -> None:
    case = next(c for c in sdar_cases() if len(set(c.tokens)) > 4 and len(c.tokens) >= 24)
    llm = engine_of(golden("sdar"), case.options)
    for stop in set(case.tokens[4:20]):
        for early in (False, True):
            params = mapped(case_params(case))
            params.stop_token_ids = [stop]
            params.extra_args["dllm_eos_early_stop"] = early
            (output,) = generate(llm, [case.prompt], params)
            assert tokens_of(output)[-1] == stop
            assert not misplaced(output, len(case.prompt), expected_of(case))
