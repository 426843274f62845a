"""Sampling with drafts: the request's own draws, in fewer forwards."""

from typing import Any

import pytest
import torch
from scipy import stats
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.harness import MASK, drafting_engine, generate, greedy, nfe_of, tokens_of
from tests.engine.runtime.test_sampling import PROMPT
from tests.reference.decode import Options
from vllm_dllm import request_stats
from vllm_dllm.runtime.logits import step

FAMILIES = {
    "sdar": Options(block_length=8, mask_id=MASK),
    "llada2_moe": Options(block_length=16, mask_id=MASK),
    "fast_dllm_v2": Options(block_length=8, mask_id=MASK, sub_block_length=4, shifted=True),
}
EXACT: dict[str, dict[str, Any]] = {
    "freedave": {"dllm_verify": "freedave", "dllm_drafts": 8},
    "spiffy": {"dllm_verify": "spiffy", "dllm_drafts": 3},
}
PROMPTS = [PROMPT, PROMPT[:5], PROMPT[::-1], PROMPT[2:], PROMPT * 5, PROMPT[:4] * 2]
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3, "extra_args": {"dllm_policy": "static"}},
    {"temperature": 0.5, "top_k": 8, "extra_args": {"dllm_policy": "threshold", "dllm_threshold": 0.5}},
    {"temperature": 1.0, "top_p": 0.7, "extra_args": {"dllm_policy": "static", "dllm_tokens_per_step": 2}},
    {"temperature": 1.0, "min_p": 0.1, "extra_args": {"dllm_policy": "entropy", "dllm_entropy_bound": 3.0}},
    {"temperature": 0.5, "presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    {"temperature": 0.3, "logit_bias": {3: 4.0, 77: 6.0}, "extra_args": {"dllm_policy": "sequential"}},
    {"temperature": 0.4, "top_k": 3, "extra_args": {"dllm_policy": "localleap", "dllm_threshold": 0.4}},
    {"temperature": 0.0, "extra_args": {"dllm_policy": "static"}},
    {"temperature": 0.2, "extra_args": {"dllm_policy": "static", "dllm_denoising_steps": 5}},
]
EDITING: list[dict[str, Any]] = [
    {"temperature": 0.5, "extra_args": {"dllm_threshold": 0.4, "dllm_edit_threshold": 0.4}},
    {"temperature": 0.2, "extra_args": {"dllm_policy": "static", "dllm_edit_threshold": 0.6}},
]


def llm_of(family: str) -> LLM:
    return drafting_engine(family, FAMILIES[family])


def params_of(family: str, verify: dict[str, Any], seed: int, **more: Any) -> list[SamplingParams]:
    """Each request's parameters with this verifier, and bad words for two of them."""
    found = []
    for index, request in enumerate(REQUESTS + (EDITING if family == "llada2_moe" else [])):
        given = {"seed": 100 * seed + index, "max_tokens": 40, "detokenize": False, "ignore_eos": True} | request | more
        params = SamplingParams(**{**given, "extra_args": {**request.get("extra_args", {}), **verify}})
        if index in (1, 5):
            params._bad_words_token_ids = [[77], [13, 5], [456], [341, 341]]
        found.append(params)
    return found


def prompts_for(params: list[SamplingParams]) -> list[list[int]]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]


def run(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return generate(llm, prompts_for(params), params)


NONE = {"dllm_verify": "none"}


def test_drafts_are_drawn_from_a_part_of_the_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, params = llm_of("sdar"), params_of("sdar", EXACT["freedave"], seed=9)
    whole = generate(llm, prompts_for(params), params)
    monkeypatch.setattr(step, "DRAFT_VALUES", 1)
    parts = generate(llm, prompts_for(params), params)
    assert [(tokens_of(each), nfe_of(each)) for each in parts] == [(tokens_of(each), nfe_of(each)) for each in whole]
    assert sum(request_stats(each).accepted for each in parts) > 0


@pytest.mark.parametrize("verify", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_draws_with_drafts_what_it_draws_without(family: str, verify: str) -> None:
    llm = llm_of(family)
    accepted = 0
    for seed in range(2):
        plain = run(llm, params_of(family, NONE, seed))
        params = params_of(family, EXACT[verify], seed)
        for index, (ours, theirs) in enumerate(zip(run(llm, params), plain, strict=True)):
            assert tokens_of(ours) == tokens_of(theirs), (seed, index)
            assert nfe_of(ours) <= nfe_of(theirs), (seed, index)
            if params[index].temperature > 0:
                accepted += request_stats(ours).accepted
    assert accepted, "no draft of a sampling request was ever accepted"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_draws_the_same_with_drafts_alone_and_beside_others(family: str) -> None:
    llm = llm_of(family)
    params = params_of(family, EXACT["freedave"], 9)
    together = run(llm, params)
    alone = [generate(llm, [p], q)[0] for p, q in zip(prompts_for(params), params, strict=True)]
    assert [tokens_of(output) for output in alone] == [tokens_of(output) for output in together]
    neighbours = params_of(family, {"dllm_verify": "psd"}, 3)
    mixed = generate(llm, prompts_for(params) * 2, [*neighbours, *params])
    assert [tokens_of(output) for output in mixed[len(params) :]] == [tokens_of(output) for output in together]


PENALTIES, UNEVEN = 5, 9
"""Places of two of the requests."""


def test_a_seed_draws_the_same_where_drafts_reach_into_later_blocks() -> None:
    indices = sorted({*range(9)} - {PENALTIES, UNEVEN})
    options = Options(block_length=4, mask_id=MASK)
    eager, plain = drafting_engine("sdar", options, dllm={"eager": True}), drafting_engine("sdar", options)
    for seed in range(4):
        prompts = [PROMPTS[i % len(PROMPTS)] for i in indices]
        with_drafts, without = (params_of("sdar", verify, seed) for verify in (EXACT["freedave"], NONE))
        expected = generate(plain, prompts, [without[i] for i in indices])
        drafting = generate(eager, prompts, [with_drafts[i] for i in indices])
        assert [tokens_of(output) for output in drafting] == [tokens_of(output) for output in expected]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_do_not_go_with_drafts_that_reach_into_later_blocks(penalty: str) -> None:
    llm = drafting_engine("sdar", Options(block_length=4, mask_id=MASK), dllm={"eager": True})
    drafts = {"dllm_verify": "freedave", "dllm_drafts": 4}
    with pytest.raises(VLLMValidationError, match=f"{penalty} does not go with drafts"):
        generate(llm, [PROMPTS[0]], greedy(max_tokens=9, extra_args=drafts, **{penalty: 1.5}))
    generate(llm, [PROMPTS[0]], greedy(max_tokens=9, extra_args={"dllm_verify": "none"}, **{penalty: 1.5}))


@pytest.mark.parametrize("verify", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_the_step_that_would_have_written_the_token(family: str, verify: str) -> None:
    llm = llm_of(family)
    plain = run(llm, params_of(family, NONE, 5, logprobs=3))
    drafting = run(llm, params_of(family, EXACT[verify], 5, logprobs=3))
    for index, (ours, theirs) in enumerate(zip(drafting, plain, strict=True)):
        assert tokens_of(ours) == tokens_of(theirs)
        pairs = zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True)
        for position, (got, expected) in enumerate(pairs):
            assert got.keys() == expected.keys(), (index, position)
            for token, value in expected.items():
                assert got[token].logprob == pytest.approx(value.logprob, abs=1e-5), (index, position)
                assert got[token].rank == value.rank, (index, position)


@pytest.mark.parametrize("verify", EXACT)
def test_drafts_do_not_change_the_distribution_of_what_is_drawn(verify: str) -> None:
    """Tokens that drafts had a part in, against those of as many other seeds without drafts."""
    draws, place = 500, 5
    llm = llm_of("sdar")
    counts, accepted = [], 0
    for begin, args in ((0, EXACT[verify]), (draws, NONE)):
        params = [
            SamplingParams(
                temperature=0.7,
                seed=seed,
                max_tokens=7,
                detokenize=False,
                ignore_eos=True,
                extra_args={"dllm_policy": "sequential", **args},
            )
            for seed in range(begin, begin + draws)
        ]
        outputs = generate(llm, [PROMPT] * draws, params)
        counts.append(torch.tensor([tokens_of(output)[place] for output in outputs]).bincount(minlength=512))
        accepted += sum(request_stats(output).accepted for output in outputs)
    assert accepted > draws / 20
    table = torch.stack(counts)
    frequent = table.sum(dim=0) >= 10
    rare = table[:, ~frequent].sum(dim=1, keepdim=True)
    assert frequent.sum() > 4
    assert stats.chi2_contingency(torch.cat((table[:, frequent], rare), dim=1).numpy()).pvalue > 1e-4
