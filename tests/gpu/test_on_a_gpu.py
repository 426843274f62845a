"""Steps on a GPU: the host never waits for the device in a row plan or a sampler, and drafts change no token."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.engine.harness import generate, runner_of, tokens_of
from tests.engine.runtime import test_isd
from tests.gpu_less.test_steps import (
    LINEAR_SPEC,
    POLICIES,
    PROMPTS,
    S2D2,
    SAMPLING,
    VERIFIED,
    VERIFIERS,
    engine_called,
    engine_for,
    params,
)
from vllm_dllm.methods import policy_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONG = [20 + position % 300 for position in range(900)]
"""A prompt of more than 512 tokens, beyond which FlashAttention 4 may read the K/V of a small batch in pieces."""


@contextmanager
def waits(llm: LLM) -> Iterator[list[str]]:
    """Where the host waits for the device meanwhile, in row plans and samplers."""
    runner, found = runner_of(llm), []

    def watch(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    return original(*args, **kwargs)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                    found.extend(
                        f"{warning.filename}:{warning.lineno}"
                        for warning in caught
                        if "called a synchronizing CUDA operation" in str(warning.message)
                    )

        return run

    with (
        mock.patch.object(runner.model_state, "prepare_attn", watch(runner.model_state.prepare_attn)),
        mock.patch.object(runner, "sample", watch(runner.sample)),
    ):
        yield found


def assert_no_waits(llm: LLM, *requests: SamplingParams) -> None:
    asked = [requests[index % len(requests)] for index in range(len(PROMPTS))]
    # Kernels are compiled, and caches of constants filled, by steps that nobody looks at.
    generate(llm, PROMPTS, asked)
    with waits(llm) as found:
        generate(llm, PROMPTS, asked)
    assert sorted(set(found)) == []


@pytest.mark.parametrize(("engine", "policy"), POLICIES)
def test_policies_never_wait(engine: str, policy: str) -> None:
    asked: dict[str, Any] = {"dllm_policy": policy}
    if policy_row(policy, timesteps=False).needs_windows:
        asked["dllm_threshold"] = 0.5
    assert_no_waits(engine_called(engine), params(asked))


@pytest.mark.parametrize(("engine", "verifier"), VERIFIED)
def test_verifiers_never_wait(engine: str, verifier: str) -> None:
    sampled = params(VERIFIERS[verifier], **SAMPLING["seeded"])
    assert_no_waits(engine_called(engine), params(VERIFIERS[verifier]), sampled, params(VERIFIERS["freedave"]))


def test_s2d2_never_waits() -> None:
    assert_no_waits(engine_for(S2D2, "sdar"), params(S2D2), params(S2D2, **SAMPLING["seeded"]))


def test_strides_never_wait() -> None:
    assert_no_waits(test_isd.engine_of(), params({}), params({}, **SAMPLING["seeded"]))


def test_linear_spec_never_waits() -> None:
    llm = engine_called("nemotron")
    assert_no_waits(llm, params(LINEAR_SPEC), params(LINEAR_SPEC, **SAMPLING["seeded"]))


@pytest.mark.parametrize("sampling", SAMPLING)
def test_sampling_parameters_never_wait(sampling: str) -> None:
    assert_no_waits(engine_called("sdar", drafts=False), params({}, **SAMPLING[sampling]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_change_no_token_of_a_long_context(dtype: str) -> None:
    """Alone and beside others, with Triton's attention and with FlashAttention."""
    llm = engine_called("sdar", max_model_len=1024, dtype=dtype)
    plain, drafting = params({}, max_tokens=48), params(VERIFIERS["freedave"], max_tokens=48)
    alone = [tokens_of(generate(llm, [LONG], asked)[0]) for asked in (plain, drafting)]
    beside = [tokens_of(generate(llm, [LONG, *PROMPTS], asked)[0]) for asked in (plain, drafting)]
    assert alone + beside == [alone[0]] * 4
