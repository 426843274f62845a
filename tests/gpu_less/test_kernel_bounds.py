"""Steps give vLLM's kernels tensors that lie in memory as the kernels read them."""

import pytest
from vllm import LLM, SamplingParams

from tests.engine.harness import generate, schedule_asynchronously, tokens_of
from tests.gpu_less.bounds import Bounds, bounded_kernels
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


def assert_within(llm: LLM, *requests: SamplingParams) -> Bounds:
    """A request alone, and three together. With the kernels the tokens are those of the fallbacks."""
    asked = [requests[index % len(requests)] for index in range(len(PROMPTS))]
    for prompts in (PROMPTS[:1], PROMPTS):
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


def test_asynchronous_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_asynchronously(monkeypatch)
    # `seed` only sets this engine apart from those of other tests.
    assert_within(engine_called("sdar", seed=17), params({}, **RESHAPED), params(VERIFIERS["freedave"]))


@pytest.mark.parametrize(
    ("engine", "verifier"),
    [*(("sdar", verifier) for verifier in VERIFIERS), ("llada", "freedave"), ("fast_dllm_v2", "fef")],
)
def test_every_verifier(engine: str, verifier: str) -> None:
    assert_within(engine_called(engine), params(VERIFIERS[verifier], **RESHAPED), params(VERIFIERS[verifier]))


def test_self_speculation() -> None:
    assert_within(engine_for(S2D2, "sdar"), params(S2D2, **RESHAPED), params(S2D2))
    drawn = params(LINEAR_SPEC, **SAMPLING["seeded"], top_p=0.9)
    assert_within(engine_called("nemotron"), drawn, params(LINEAR_SPEC))
