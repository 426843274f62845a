"""Parameters that leave no token to choose, or that ask for as much work as they can: all end, and harm nobody."""

from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.engine.harness import (
    MASK,
    assert_nothing_left,
    drafting_engine,
    engine_of,
    free_pages,
    greedy,
    tokens_of,
)
from tests.reference.decode import Options
from vllm_dllm.methods import POLICY_NAMES

LENGTH, MAX_TOKENS = 8, 20
STATIC = Options(block_length=LENGTH, mask_id=MASK, policy="static")
PROMPT = [354, 206, 479, 4, 198, 387, 187]
STEPS = 3 * MAX_TOKENS
"""More than any of these answers takes."""

TIMED = ("origin", "maskgit_plus", "topk_margin")

NOTHING_LEFT: dict[str, dict[str, Any]] = {
    "the mask token alone is allowed": {"allowed_token_ids": [MASK]},
    "the only token allowed is a bad word": {"allowed_token_ids": [77], "bad_words": [[77]]},
    "the only token allowed would end the text": {
        "allowed_token_ids": [77],
        "stop_token_ids": [77],
        "min_tokens": MAX_TOKENS,
    },
}


def params_of(*, bad_words: list[list[int]] | None = None, **fields: Any) -> SamplingParams:
    """Bad words as token ids: there is no tokenizer."""
    params = greedy(max_tokens=MAX_TOKENS, **fields)
    params._bad_words_token_ids = bad_words
    return params


def run(llm: LLM, requests: dict[str, SamplingParams], steps: int) -> dict[str, list[int]]:
    """Tokens of the requests that end within so many steps; the others are aborted."""
    core, answers = llm.llm_engine, dict[str, list[int]]()
    for name, params in requests.items():
        core.add_request(name, {"prompt_token_ids": PROMPT}, params)
    for _ in range(steps):
        for output in core.step():
            if output.finished:
                answers[output.request_id] = tokens_of(output)
        if not core.has_unfinished_requests():
            break
    core.abort_request(list(requests), internal=False)
    return answers


@pytest.mark.parametrize("policy", [name for name in POLICY_NAMES if name != "multi_block"])
def test_a_request_that_no_token_is_left_for_ends_all_the_same(policy: str) -> None:
    llm = engine_of("sdar", STATIC)
    before = free_pages(llm)
    neighbour = greedy(STATIC, max_tokens=MAX_TOKENS)
    alone = run(llm, {"neighbour": neighbour}, STEPS)["neighbour"]
    requests = {
        f"{what} at {temperature}": params_of(**fields, temperature=temperature, extra_args={"dllm_policy": policy})
        for what, fields in NOTHING_LEFT.items()
        for temperature in (0.0, 1.0)
    }
    answers = run(llm, {**requests, "neighbour": neighbour}, STEPS)
    assert sorted(answers) == sorted([*requests, "neighbour"])
    assert answers.pop("neighbour") == alone
    for what, tokens in answers.items():
        assert len(tokens) == MAX_TOKENS, what
        assert MASK not in tokens, what
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("verify", ["freedave", "psd", "spiffy", "fef"])
def test_so_does_one_with_drafts(verify: str) -> None:
    llm = drafting_engine("sdar", STATIC)
    options = {"dllm_verify": verify}
    if verify != "fef":
        options["dllm_policy"] = "factor"
    requests = {
        f"{what} at {temperature}": params_of(**fields, temperature=temperature, extra_args=options)
        for what, fields in NOTHING_LEFT.items()
        for temperature in (0.0, 1.0)
    }
    answers = run(llm, requests, 2 * STEPS)
    assert sorted(answers) == sorted(requests)
    assert all(len(tokens) == MAX_TOKENS and MASK not in tokens for tokens in answers.values())


ASKING_FOR_MUCH: dict[str, dict[str, Any]] = {
    "denoising_steps": {"dllm_policy": "static", "dllm_denoising_steps": 65536},
    "paced": {"dllm_policy": "paced", "dllm_denoising_steps": 65536, "dllm_threshold": 1},
    "sequential": {"dllm_policy": "sequential", "dllm_denoising_steps": 65536},
    "threshold": {"dllm_policy": "threshold", "dllm_threshold": 1},
    "entropy": {"dllm_policy": "entropy", "dllm_entropy_bound": 1e-300},
    "factor": {"dllm_policy": "factor", "dllm_factor": 1e-300},
    "hierarchy": {"dllm_policy": "hierarchy", "dllm_threshold": 1, "dllm_relaxed_threshold": 1},
    "localleap": {
        "dllm_policy": "localleap",
        "dllm_threshold": 1,
        "dllm_relaxed_threshold": 1,
        "dllm_radius": 2**31 - 1,
    },
    "random": {"dllm_policy": "random", "dllm_denoising_steps": 65536},
}
"""The most denoising steps that each policy can be made to take: one per position."""


@pytest.mark.parametrize("policy", ASKING_FOR_MUCH)
def test_no_option_makes_a_block_take_more_steps_than_it_has_positions(policy: str) -> None:
    llm = engine_of("sdar", STATIC)
    core, steps = llm.llm_engine, 0
    core.add_request(policy, {"prompt_token_ids": PROMPT}, params_of(extra_args=ASKING_FOR_MUCH[policy]))
    while core.has_unfinished_requests():
        core.step()
        steps += 1
        assert steps <= STEPS
    # A prefill where the prompt fills a block, and a step for each position up to the end of the last block.
    assert steps <= 1 + MAX_TOKENS + LENGTH


@pytest.mark.parametrize("policy", TIMED)
def test_a_schedule_of_timesteps_ends_with_its_last_step(policy: str) -> None:
    llm = engine_of("sdar", STATIC)
    core, steps, blocks = llm.llm_engine, 0, -(-(len(PROMPT) + MAX_TOKENS) // LENGTH)
    args = {"dllm_policy": policy, "dllm_denoising_steps": 8 * LENGTH}
    core.add_request(policy, {"prompt_token_ids": PROMPT}, params_of(extra_args=args))
    while core.has_unfinished_requests():
        core.step()
        steps += 1
        assert steps <= 1 + 8 * LENGTH * blocks
