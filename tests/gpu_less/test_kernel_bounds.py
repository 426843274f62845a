"""Steps give vLLM's kernels tensors that lie in memory as the kernels read them."""

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.harness import generate, tokens_of
from tests.engine.runtime.grammars import write_tokenizer
from tests.engine.speculators.engines import CONTEXTS, engine, sampled
from tests.gpu_less.bounds import Bounds, bounded_kernels
from tests.gpu_less.test_drafter import PROMPTS as DRAFTER_PROMPTS
from tests.gpu_less.test_steps import (
    LINEAR_SPEC,
    PROMPTS,
    S2D2,
    SAMPLING,
    VERIFIERS,
    engine_called,
    engine_for,
    params,
)

RESHAPED = SAMPLING["reshaped"]


ALONE, TOGETHER = (1,), (1, 3)


def assert_within(
    llm: LLM, *requests: SamplingParams, texts: list[list[int]] = PROMPTS, numbers: tuple[int, ...] = TOGETHER
) -> Bounds:
    """So many of the texts at a time. With the kernels the tokens are those of the fallbacks."""
    asked = [requests[index % len(requests)] for index in range(len(texts))]
    for number in numbers:
        prompts = texts[:number]
        expected = [tokens_of(output) for output in generate(llm, prompts, asked[: len(prompts)])]
        llm.reset_prefix_cache()
        with bounded_kernels() as bounds:
            found = [tokens_of(output) for output in generate(llm, prompts, asked[: len(prompts)])]
        assert bounds.beyond == {}
        assert found == expected
        llm.reset_prefix_cache()
    return bounds


@pytest.mark.parametrize("sampling", SAMPLING)
def test_every_sampling_parameter(sampling: str) -> None:
    launches = assert_within(engine_called("sdar", drafts=False), params({}, **SAMPLING[sampling])).launches
    assert launches["_post_update_kernel"] > 0
    assert (launches["_bias_kernel"] > 0) == (sampling in ("reshaped", "allowed"))
    for kernel in ("_topk_log_softmax_kernel", "_ranks_kernel"):
        assert (launches[kernel] > 0) == (sampling in ("reshaped", "logprobs"))


def test_end_tokens_that_the_model_lacks() -> None:
    asked = params({}, min_tokens=5)
    asked._all_stop_token_ids |= {10_000}
    assert_within(engine_called("sdar", drafts=False), asked)


def test_asynchronous_scheduling() -> None:
    assert_within(engine_called("sdar", async_scheduling=True), params({}, **RESHAPED), params(VERIFIERS["freedave"]))


@pytest.mark.parametrize(
    ("engine", "verifier"),
    [*(("sdar", verifier) for verifier in VERIFIERS), ("llada", "freedave"), ("fast_dllm_v2", "fef")],
)
def test_every_verifier(engine: str, verifier: str) -> None:
    assert_within(engine_called(engine), params(VERIFIERS[verifier], **RESHAPED), numbers=ALONE)


def test_self_speculation() -> None:
    assert_within(engine_for(S2D2, "sdar"), params(S2D2, **RESHAPED), numbers=ALONE)
    drawn = params(LINEAR_SPEC, **SAMPLING["seeded"], top_p=0.9)
    assert_within(engine_called("nemotron"), drawn, numbers=ALONE)
    # Penalties count the drafts before a row.
    assert_within(engine_called("idlm", drafts=False), params({}, **RESHAPED), numbers=ALONE)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_drafter_of_an_autoregressive_target(context: str) -> None:
    llm, greedy = engine(context), {"temperature": 0.0}
    penalized = sampled(3, repetition_penalty=1.2, **greedy)
    launches = assert_within(llm, penalized, sampled(3, **greedy), texts=DRAFTER_PROMPTS).launches
    assert launches["_penalties_kernel"] > 0
    # Drawn tokens depend on the drafts, and these on what the drafter computed before.
    with bounded_kernels() as bounds:
        generate(llm, DRAFTER_PROMPTS, sampled(3, top_p=0.8))
    assert bounds.beyond == {}


@pytest.mark.parametrize("engine", ["sdar", "llada"])
def test_structured_outputs(engine: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    llm = engine_called(engine, skip_tokenizer_init=False, tokenizer=str(tokenizer))
    constrained = params({}, structured_outputs=StructuredOutputsParams(regex="[a-z]{4,9}"))
    launches = assert_within(llm, constrained, params({}, **RESHAPED)).launches
    assert launches["_apply_grammar_bitmask_kernel"] > 0
