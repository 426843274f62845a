"""Exact match gives what the policy gives, on text that a model was trained to write: 100 prompts of the tiny task."""

import functools
from typing import Any

import pytest
from vllm import LLM, RequestOutput

from tests.engine.harness import engine, greedy, nfe_of, tokens_of
from tests.paths import CHECKPOINTS
from vllm_dllm import request_stats
from vllm_dllm.tiny.arithmetic import make_problems

CHECKPOINT = CHECKPOINTS / "tiny-sdar"
PROMPTS = 100
POLICIES: dict[str, dict[str, Any]] = {
    "static": {"dllm_policy": "static"},
    "threshold": {"dllm_policy": "threshold", "dllm_threshold": 0.9},
}
EXACT: dict[str, dict[str, Any]] = {
    "freedave": {"dllm_verify": "freedave", "dllm_drafts": 8},
    "spiffy": {"dllm_verify": "spiffy", "dllm_drafts": 3},
}


def tiny(dtype: str = "float32", **dllm: object) -> LLM:
    return engine(
        CHECKPOINT,
        dllm={"max_drafts": 7, **dllm},
        dtype=dtype,
        max_num_seqs=32,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=256 << 20,
        skip_tokenizer_init=False,
        hf_overrides={},
    )


@functools.cache
def answers(
    policy: str, verify: str, *, count: int = PROMPTS, dtype: str = "float32", eager: bool = False
) -> list[RequestOutput]:
    """Answers to the same prompts; the task's texts end with a stop token, mostly before ``max_tokens``."""
    llm = tiny(dtype, eager=True) if eager else tiny(dtype)
    args = {**POLICIES[policy], **EXACT.get(verify, {"dllm_verify": "none"})}
    messages = [
        [{"role": "user", "content": problem.question}] for problem in make_problems(count, seed=0, split="test")
    ]
    return llm.chat(messages, greedy(max_tokens=64, ignore_eos=False, extra_args=args), use_tqdm=False)


@pytest.mark.parametrize("verify", EXACT)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_is_the_policys_and_no_prompt_takes_more_forwards(policy: str, verify: str) -> None:
    plain, skipping = answers(policy, "none"), answers(policy, verify)
    assert [tokens_of(output) for output in skipping] == [tokens_of(output) for output in plain]
    assert all(nfe_of(ours) <= nfe_of(theirs) for ours, theirs in zip(skipping, plain, strict=True))
    assert sum(request_stats(output).accepted for output in skipping) > 0
    saved = sum(map(nfe_of, plain)) / sum(map(nfe_of, skipping))
    print(f"{policy}, {verify}: {saved:.2f} times fewer forwards")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_is_the_policys_where_drafts_reach_into_later_blocks(policy: str) -> None:
    plain, eager = answers(policy, "none")[:30], answers(policy, "freedave", count=30, eager=True)
    assert [tokens_of(output) for output in eager] == [tokens_of(output) for output in plain]
    assert all(nfe_of(ours) <= nfe_of(theirs) for ours, theirs in zip(eager, plain, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_in_bf16_rounding_changes_few_answers(policy: str) -> None:
    """A forward rounds by its number of rows, so the policy without drafts is not sure of its near-ties either."""
    plain, skipping = (answers(policy, verify, count=60, dtype="bfloat16") for verify in ("none", "freedave"))
    equal = sum(tokens_of(ours) == tokens_of(theirs) for ours, theirs in zip(skipping, plain, strict=True)) / 60
    print(f"{policy}, bf16: {equal:.1%} of the answers are equal")
    assert equal >= 0.9
