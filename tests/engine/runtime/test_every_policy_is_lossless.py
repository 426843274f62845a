"""Exact verifiers decode what the policy decodes without drafts: every policy, every exact verifier, every engine.

The cases come from the list of policies, so a new policy is a case here without anybody's doing.
"""

import itertools
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine import full_attention
from tests.engine.harness import MASK, drafting_engine, generate, read_by_policy, tokens_of
from tests.engine.runtime.test_sampling import PROMPT
from tests.reference.bidirectional import Options as FullAttentionOptions
from tests.reference.decode import Options
from vllm_dllm import request_stats
from vllm_dllm.decoding.policies import ALG_TEMP_POLICIES, TIMED_POLICIES, Policy
from vllm_dllm.methods import POLICY_NAMES, PolicyName

VERIFIERS: dict[str, dict[str, Any]] = {
    "freedave": {"dllm_verify": "freedave", "dllm_drafts": 6},
    "spiffy": {"dllm_verify": "spiffy", "dllm_drafts": 3},
}
NO_DRAFTS = {"dllm_verify": "none"}
TEMPERATURES = (0.0, 1.0)
PROMPTS = [PROMPT, PROMPT[:5], PROMPT[::-1], PROMPT * 3]
MAX_TOKENS = 24
LENGTH = 8

ENGINES = ("sdar", "sdar-eager", "dream")
"""Dream has a policy of its own under the name ``entropy``."""

BEFORE_DRAFTS_REACH = {"sdar-eager": ("origin", "maskgit_plus", "topk_margin", "paced")}
"""Policies with a schedule over a block, which ``eager`` refuses."""


def engine_called(name: str) -> LLM:
    if name == "dream":
        options = FullAttentionOptions(mask_id=MASK, gen_length=MAX_TOKENS, block_length=LENGTH, cache="prefix")
        return full_attention.drafting_engine("dream", options)
    eager = name == "sdar-eager"
    options = Options(block_length=4 if eager else LENGTH, mask_id=MASK)
    return drafting_engine("sdar", options, dllm={"eager": True} if eager else {})


def kind_of(policy: PolicyName, engine: str) -> Policy:
    """What the policy of this name is in this engine."""
    return Policy.TIMED_ENTROPY if policy == "entropy" and engine == "dream" else Policy[policy.upper()]


def variants(policy: PolicyName, engine: str) -> list[dict[str, Any]]:
    """Options of requests with this policy: its defaults, another pace, and drawn positions where it may draw them."""
    kind = kind_of(policy, engine)
    found: list[dict[str, Any]] = [{}, {"dllm_tokens_per_step": 2}]
    if kind in TIMED_POLICIES:
        found.append({"dllm_denoising_steps": 12})
    elif engine == "sdar":
        found.append({"dllm_denoising_steps": 5})
    if kind in ALG_TEMP_POLICIES:
        found.append({"dllm_denoising_steps": 6, "dllm_alg_temp": 0.3})
    # Thresholds that some positions of an untrained model reach, and not all.
    low = {"dllm_threshold": 0.05, "dllm_relaxed_threshold": 0.02}
    given = [
        read_by_policy({"dllm_policy": policy, **low, **variant}, timesteps=engine == "dream") for variant in found
    ]
    return [args for index, args in enumerate(given) if args not in given[:index]]


def requests_of(
    policy: PolicyName, engine: str, verifier: dict[str, Any]
) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts, params = [], []
    for index, (variant, temperature) in enumerate(itertools.product(variants(policy, engine), TEMPERATURES)):
        for seed, prompt in enumerate(PROMPTS):
            prompts.append(prompt)
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


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_exact_verifiers_decode_what_the_policy_decodes(engine: str, policy: PolicyName) -> None:
    llm = engine_called(engine)
    if policy in BEFORE_DRAFTS_REACH.get(engine, ()):
        for verifier in (*VERIFIERS.values(), NO_DRAFTS):
            with pytest.raises(VLLMValidationError, match="is not allowed with the engine option eager"):
                generate(llm, *requests_of(policy, engine, verifier))
        return
    expected = [tokens_of(output) for output in generate(llm, *requests_of(policy, engine, NO_DRAFTS))]
    for name, verifier in VERIFIERS.items():
        prompts, params = requests_of(policy, engine, verifier)
        outputs = generate(llm, prompts, params)
        for output, tokens, asked in zip(outputs, expected, params, strict=True):
            assert tokens_of(output) == tokens, (name, asked.temperature, asked.extra_args)
        assert sum(request_stats(output).drafted for output in outputs), f"{name} drafted nothing"


def test_drafts_that_reach_into_later_blocks_change_nothing_of_a_seed() -> None:
    """The engine with ``eager`` draws what the engine without it draws."""
    plain = drafting_engine("sdar", Options(block_length=4, mask_id=MASK))
    for policy in POLICY_NAMES:
        if policy in BEFORE_DRAFTS_REACH["sdar-eager"]:
            continue
        expected = generate(plain, *requests_of(policy, "sdar-eager", NO_DRAFTS))
        outputs = generate(engine_called("sdar-eager"), *requests_of(policy, "sdar-eager", VERIFIERS["freedave"]))
        assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in expected], policy
