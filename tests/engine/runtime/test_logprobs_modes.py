"""``--logprobs-mode``: log-probabilities or logits, of the model or after all sampling parameters."""

import math
from typing import Any

import pytest
from vllm import LLM, RequestOutput

from tests.engine import full_attention
from tests.engine.harness import MASK, drafting_engine, engine_of, generate, golden, greedy, tokens_of
from tests.engine.runtime.test_golden import options_with
from tests.reference.bidirectional import Options as FullOptions
from tests.reference.decode import Options
from vllm_dllm import request_stats

PROMPTS = [[5, 6, 7], list(range(20, 57)), [9] * 5 + [3], list(range(300, 316))]
VOCAB = 512
TOP_K, TEMPERATURE = 5, 0.7
FAMILIES = ("sdar", "fast_dllm_v2", "dream")


def llm_of(family: str, mode: str) -> LLM:
    more: dict[str, Any] = {"logprobs_mode": mode, "max_logprobs": VOCAB}
    if family == "dream":
        options = FullOptions(mask_id=MASK, gen_length=32, block_length=8, shifted=True, cache="dual")
        return full_attention.engine_of(family, options, **more)
    return engine_of(golden(family), options_with(golden(family), 8), **more)


def values_of(output: RequestOutput) -> list[dict[int, float]]:
    """By position: the number of every token that there is one for."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [{token: entry.logprob for token, entry in entries.items()} for entries in logprobs]


def normalized(values: dict[int, float]) -> dict[int, float]:
    total = math.log(sum(math.exp(value) for value in values.values()))
    return {token: value - total for token, value in values.items() if value > -math.inf}


def processed(raw: dict[int, float]) -> dict[int, float]:
    """What top-k and temperature make of the log-probabilities of all tokens."""
    allowed = {token: value / TEMPERATURE for token, value in raw.items() if token != MASK}
    best = sorted(allowed, key=lambda token: allowed[token], reverse=True)[:TOP_K]
    return normalized({token: allowed[token] for token in best})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mode_tells_of_the_distribution_that_it_names(family: str) -> None:
    params = greedy(temperature=TEMPERATURE, top_k=TOP_K, seed=4, max_tokens=24, logprobs=VOCAB)
    outputs = {
        mode: generate(llm_of(family, mode), PROMPTS, params)
        for mode in ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
    }
    for raw, raw_logits, after, after_logits in zip(*outputs.values(), strict=True):
        assert tokens_of(raw) == tokens_of(raw_logits) == tokens_of(after) == tokens_of(after_logits)
        rows = zip(*map(values_of, (raw, raw_logits, after, after_logits)), strict=True)
        for token, (all_raw, all_logits, some, some_logits) in zip(tokens_of(raw), rows, strict=True):
            assert len(all_raw) == VOCAB
            assert all_raw[token] <= 0
            assert normalized(all_logits) == pytest.approx(all_raw, abs=1e-3)
            expected = processed(all_raw)
            assert token in expected
            assert {t: v for t, v in some.items() if v > -math.inf} == pytest.approx(expected, abs=1e-3)
            assert normalized(some_logits) == pytest.approx(expected, abs=1e-3)


def test_without_sampling_parameters_both_are_the_same_but_for_the_mask() -> None:
    params = greedy(max_tokens=24, logprobs=5)
    raw, after = (generate(llm_of("sdar", mode), PROMPTS, params) for mode in ("raw_logprobs", "processed_logprobs"))
    for before, now in zip(raw, after, strict=True):
        for theirs, ours in zip(values_of(before), values_of(now), strict=True):
            shared = theirs.keys() & ours.keys()
            assert len(shared) >= 4
            # The mask token's share goes to the others.
            differences = [ours[token] - theirs[token] for token in shared]
            assert max(differences) - min(differences) < 1e-3
            assert min(differences) > -1e-3


@pytest.mark.parametrize(
    "verify", [{"dllm_verify": "freedave", "dllm_match": "subset"}, {"dllm_verify": "psd"}], ids=str
)
def test_a_greedy_token_is_the_likeliest_where_its_logprob_is_from(verify: dict[str, str]) -> None:
    """Drafts of PSD are accepted past branches that would have had other tokens."""
    options = Options(block_length=8, sub_block_length=4, shifted=True, mask_id=MASK)
    llm = drafting_engine("fast_dllm_v2", options, logprobs_mode="processed_logprobs")
    args = {"dllm_policy": "threshold", "dllm_threshold": 0.05, "dllm_drafts": 4, **verify}
    prompts = [[(13 * i + 7 * j) % 500 for j in range(5 + i % 11)] for i in range(24)]
    outputs = generate(llm, prompts, greedy(max_tokens=27, logprobs=0, extra_args=args))
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert all(entries[token].rank == 1 for token, entries in zip(tokens_of(output), logprobs, strict=True))
    assert sum(request_stats(output).accepted for output in outputs) > 20
