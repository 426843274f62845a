"""Policies that draw positions, and drawn tokens, with full attention: keyed by the request's seed alone."""

from collections import Counter
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.full_attention import FAMILIES
from tests.engine.harness import generate, nfe_of, tokens_of
from tests.engine.runtime.test_full_attention_requests import LENGTHS, PROMPT, engine_for, options_of, prompt_of
from vllm_dllm.observe.recorder import Round, recording

CACHES = ("none", "prefix", "dual")
DRAWING: list[dict[str, Any]] = [
    {"dllm_policy": "random"},
    {"dllm_policy": "random", "dllm_denoising_steps": 3},
    {"dllm_policy": "origin", "dllm_denoising_steps": 6},
    {"dllm_policy": "maskgit_plus", "dllm_denoising_steps": 5, "dllm_alg_temp": 0.2},
    {"dllm_policy": "topk_margin", "dllm_denoising_steps": 5, "dllm_alg_temp": 0.1},
    {"dllm_policy": "entropy", "dllm_denoising_steps": 5, "dllm_alg_temp": 0.5},
]
PLAIN: list[dict[str, Any]] = [
    {"dllm_policy": "static"},
    {"dllm_policy": "threshold", "dllm_threshold": 0.4},
    {"dllm_policy": "maskgit_plus", "dllm_denoising_steps": 5},
]
DRAFTS = {"dllm_verify": "freedave", "dllm_drafts": 4}


def params_of(args: dict[str, Any], *, seed: int, temperature: float = 0.0, max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=args
    )


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_positions_depend_on_the_seed_alone(family: str, cache: str) -> None:
    llm = engine_for(options_of(family, cache, 20))
    # LLaDA's entropy policy has no schedule and draws nothing.
    policies = DRAWING if family == "dream" else DRAWING[:5]
    requests = [(prompt_of(family, length), args) for length, args in zip(LENGTHS, policies, strict=False)]
    params = [params_of(args, seed=7) for _, args in requests]
    alone = [tokens_of(generate(llm, [prompt], p)[0]) for (prompt, _), p in zip(requests, params, strict=True)]
    others = [(PROMPT, params_of(args, seed=seed)) for seed, args in enumerate(policies)]
    for order in (slice(None), slice(None, None, -1)):
        prompts = [*(prompt for prompt, _ in requests), *(prompt for prompt, _ in others)][order]
        outputs = generate(llm, prompts, [*params, *(p for _, p in others)][order])[order]
        assert [tokens_of(output) for output in outputs[: len(requests)]] == alone
    for (prompt, args), tokens in zip(requests, alone, strict=True):
        seeds = generate(llm, [prompt] * 4, [params_of(args, seed=seed) for seed in range(4)])
        assert any(tokens_of(output) != tokens for output in seeds), args


@pytest.mark.parametrize(("family", "cache"), [("llada", "dual"), ("llada", "none"), ("dream", "none")])
def test_the_first_step_of_random_covers_the_block_evenly(family: str, cache: str) -> None:
    count, length = 400, 8
    llm = engine_for(options_of(family, cache, length), max_num_seqs=64, dllm={"max_drafts": 0})
    first = Counter[int]()

    def note(round_: Round) -> None:
        begins = (round_.branches[:, 0] == 511).all(dim=1)
        first.update(round_.chosen[begins].nonzero()[:, 1].tolist())

    with recording(llm, note):
        generate(
            llm,
            [PROMPT] * count,
            [params_of({"dllm_policy": "random"}, seed=seed, max_tokens=length) for seed in range(count)],
        )
    assert first.total() == count
    chi_square = sum((first[i] - count / length) ** 2 / (count / length) for i in range(length))
    # Of 7 degrees of freedom; exceeded once in a thousand.
    assert chi_square < 24.3


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_drawn_token(family: str, cache: str) -> None:
    llm = engine_for(options_of(family, cache, 20, refresh_interval=None))
    prompts = [prompt_of(family, length) for length in LENGTHS[:6]]
    fewer = 0
    for args in PLAIN:
        for temperature in (0.3, 1.0):
            outcomes = []
            for drafts in ({"dllm_verify": "none"}, DRAFTS):
                params = [params_of({**args, **drafts}, seed=seed, temperature=temperature) for seed in range(6)]
                outcomes.append(generate(llm, prompts, params))
            for plain, drafted in zip(*outcomes, strict=True):
                assert tokens_of(drafted) == tokens_of(plain), (args, temperature)
                assert nfe_of(drafted) <= nfe_of(plain)
                fewer += nfe_of(drafted) < nfe_of(plain)
    assert fewer
