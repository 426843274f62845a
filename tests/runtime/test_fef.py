"""FeF-DLLM in the engine."""

from typing import Any

import pytest
from reference.bidirectional import Options as FullOptions
from vllm import LLM, SamplingParams

from runtime import full_attention
from runtime.harness import drafting_engine, engine_of, generate, nfe_of, tokens_of
from runtime.test_golden import options_with

PROMPTS = [[5, 6, 7], list(range(20, 57)), [9] * 5 + [3], list(range(100, 231)), [1]]


def _fef(**options: Any) -> dict[str, Any]:
    return {"dllm_verify": "fef", **{f"dllm_{key}": value for key, value in options.items()}}


def _params(extra: dict[str, Any], **params: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, "detokenize": False, "extra_args": extra, **params}
    )


def _full(family: str, cache: str, max_drafts: int = 15) -> LLM:
    options = FullOptions(
        mask_id=511,
        gen_length=32,
        block_length=16,
        cache=cache,  # type: ignore[arg-type]
        generation_window=32,
    )
    # Drafts have pages for all that they compute.
    return full_attention.drafting_engine(
        family, options, dllm={"max_drafts": max_drafts}, max_num_seqs=4, max_model_len=288
    )


SEQUENTIAL = {"dllm_policy": "sequential"}


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("cache", ["dual", "prefix", "none"])
@pytest.mark.parametrize("family", full_attention.FAMILIES)
def test_one_greedy_pass_is_left_to_right_decoding_with_fewer_forwards(family: str, cache: str, window: int) -> None:
    llm = _full(family, cache)
    alone = generate(llm, PROMPTS, _params(SEQUENTIAL))
    fef = generate(llm, PROMPTS, _params(_fef(window=window, resample_steps=1)))
    assert [tokens_of(o) for o in fef] == [tokens_of(o) for o in alone]
    for ours, one_by_one in zip(fef, alone, strict=True):
        assert nfe_of(ours) <= nfe_of(one_by_one)
    if window == 1:
        assert [nfe_of(o) for o in fef] == [nfe_of(o) for o in alone]


@pytest.mark.parametrize("family", ["sdar", "llada2_moe", "fast_dllm_v2"])
def test_the_same_with_blocks_that_see_what_is_before_them(family: str) -> None:
    options = options_with(family, {"sdar": 8, "llada2_moe": 16, "fast_dllm_v2": 32}[family])
    assert engine_of is not None
    llm = drafting_engine(family, options)
    alone = generate(llm, PROMPTS, _params(SEQUENTIAL))
    fef = generate(llm, PROMPTS, _params(_fef(window=8, resample_steps=1)))
    assert [tokens_of(o) for o in fef] == [tokens_of(o) for o in alone]
    assert sum(map(nfe_of, fef)) < sum(map(nfe_of, alone))
