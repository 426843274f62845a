"""Exact verifiers decode what the policy decodes without drafts: every policy, every exact verifier, every engine.

The cases come from the table of policies, so a new policy is a case here without anybody's doing.
"""

import itertools
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine import full_attention
from tests.engine.harness import MASK, drafting_engine, generate, tokens_of
from tests.engine.runtime import test_nemotron
from tests.engine.runtime.test_sampling import PROMPT
from tests.reference.bidirectional import Options as FullAttentionOptions
from tests.reference.decode import Options
from vllm_dllm import request_stats
from vllm_dllm.methods import POLICY_NAMES, PolicyName, PolicyRow, policy_row

VERIFIERS: dict[str, dict[str, Any]] = {
    "freedave": {"dllm_verify": "freedave", "dllm_drafts": 6},
    "spiffy": {"dllm_verify": "spiffy", "dllm_drafts": 3},
}
NO_DRAFTS = {"dllm_verify": "none"}
TEMPERATURES = (0.0, 1.0)
PROMPTS = [PROMPT[:5], PROMPT, PROMPT * 3]
MAX_TOKENS = 24
LENGTH = 8

ENGINES = ("sdar", "sdar-eager", "dream", "nemotron")
"""Dream has a policy of its own under the name ``entropy``."""


VOCABULARIES = {"nemotron": 320}
"""Of checkpoints that lack some of the prompts' tokens."""


def engine_called(name: str) -> LLM:
    if name == "dream":
        options = FullAttentionOptions(mask_id=MASK, gen_length=MAX_TOKENS, block_length=LENGTH, cache="prefix")
        return full_attention.drafting_engine("dream", options)
    if name == "nemotron":
        return test_nemotron.engine_of(test_nemotron.STATIC, dllm={"max_drafts": 7})
    eager = name == "sdar-eager"
    options = Options(block_length=4 if eager else LENGTH, mask_id=MASK)
    return drafting_engine("sdar", options, dllm={"eager": True} if eager else {})


def row_of(policy: PolicyName, engine: str) -> PolicyRow:
    """What the policy of this name is in this engine."""
    return policy_row(policy, timesteps=engine == "dream")


def is_refused(policy: PolicyName, engine: str, verifier: dict[str, Any]) -> bool:
    """Drafts do not reach into later blocks where the next state depends on the steps that a block has had.

    A policy that denoises several blocks at a time needs windows of several, and takes no drafts.
    """
    row, has_windows = row_of(policy, engine), engine == "sdar-eager"
    return (
        row.counts_steps
        if has_windows and not row.needs_windows
        else row.needs_windows and (not has_windows or verifier != NO_DRAFTS)
    )


def variants(policy: PolicyName, engine: str) -> list[dict[str, Any]]:
    """Options of requests with this policy: its defaults, another pace, and drawn positions where it may draw them."""
    row = row_of(policy, engine)
    # Thresholds that some positions of an untrained model reach, and not all.
    values: dict[str, Any] = {"threshold": 0.05, "relaxed_threshold": 0.02}
    low = {f"dllm_{name}": value for name, value in values.items() if name in row.options}
    found: list[dict[str, Any]] = [{}]
    if "tokens_per_step" in row.options:
        found.append({"dllm_tokens_per_step": 2})
        # Of 4 positions in 2 steps, of 8 in 5 or, with timesteps, 12.
        found.append({"dllm_denoising_steps": 2 if engine == "sdar-eager" else 12 if row.timed else 5})
    if row.has_alg_temp:
        found.append({"dllm_denoising_steps": 6, "dllm_alg_temp": 0.3})
    return [{"dllm_policy": policy, **low, **variant} for variant in found]


def requests_of(
    policy: PolicyName, engine: str, verifier: dict[str, Any]
) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts, params = [], []
    for index, (variant, temperature) in enumerate(itertools.product(variants(policy, engine), TEMPERATURES)):
        for seed, prompt in enumerate(PROMPTS[: 2 if engine == "nemotron" else None]):
            prompts.append([token % VOCABULARIES.get(engine, MASK) for token in prompt])
            params.append(
                SamplingParams(
                    temperature=temperature,
                    seed=100 * index + seed,
                    max_tokens=MAX_TOKENS,
                    detokenize=False,
                    ignore_eos=True,
                    extra_args={**variant, **verifier},
                )
            )
    return prompts, params


def assert_refused(llm: LLM, policy: PolicyName, engine: str, verifier: dict[str, Any]) -> None:
    needs_windows = row_of(policy, engine).needs_windows
    match = f"(verify|policy)=.* is not allowed.*{'block' if needs_windows else 'with the engine option eager'}"
    with pytest.raises(VLLMValidationError, match=match):
        generate(llm, *requests_of(policy, engine, verifier))


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_exact_verifiers_decode_what_the_policy_decodes(engine: str, policy: PolicyName) -> None:
    llm = engine_called(engine)
    expected = None
    if is_refused(policy, engine, NO_DRAFTS):
        assert_refused(llm, policy, engine, NO_DRAFTS)
    else:
        expected = [tokens_of(output) for output in generate(llm, *requests_of(policy, engine, NO_DRAFTS))]
    for name, verifier in VERIFIERS.items():
        if is_refused(policy, engine, verifier):
            assert_refused(llm, policy, engine, verifier)
            continue
        assert expected is not None
        prompts, params = requests_of(policy, engine, verifier)
        outputs = generate(llm, prompts, params)
        for output, tokens, asked in zip(outputs, expected, params, strict=True):
            assert tokens_of(output) == tokens, (name, asked.temperature, asked.extra_args)
        assert sum(request_stats(output).drafted for output in outputs), f"{name} drafted nothing"


def test_drafts_that_reach_into_later_blocks_change_nothing_of_a_seed() -> None:
    """The engine with ``eager`` draws what the engine without it draws."""
    plain = drafting_engine("sdar", Options(block_length=4, mask_id=MASK))
    for policy in POLICY_NAMES:
        if is_refused(policy, "sdar-eager", VERIFIERS["freedave"]):
            continue
        expected = generate(plain, *requests_of(policy, "sdar-eager", NO_DRAFTS))
        outputs = generate(engine_called("sdar-eager"), *requests_of(policy, "sdar-eager", VERIFIERS["freedave"]))
        assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in expected], policy
