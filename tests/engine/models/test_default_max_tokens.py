"""Requests without max_tokens, offline: models with full attention answer within a default of their own."""

from types import SimpleNamespace

import pytest
from vllm import LLM, SamplingParams

from tests.paths import ROOT
from vllm_dllm.models.configs import DreamConfig, LLaDAConfig, LLaDAMoEConfig, OpenDCoderConfig, SDARConfig

QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 5 more. How many apples does he have?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = str(ROOT / "checkpoints" / "tiny-llada")
    return LLM(model=model, enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_num_seqs=2)


@pytest.mark.slow
@pytest.mark.parametrize("params", [None, SamplingParams(temperature=0, max_tokens=None)], ids=["none", "open"])
def test_tiny_llada_answers(llm: LLM, params: SamplingParams | None) -> None:
    output = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0]
    assert output.text.strip()
    assert output.finish_reason == "stop"


@pytest.mark.slow
def test_an_answer_that_ends_there_says_so(llm: LLM) -> None:
    output = llm.chat(QUESTION, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 64
    assert (output.finish_reason, output.stop_reason) == ("length", "max_tokens=64, the default")


@pytest.mark.parametrize("config", [LLaDAConfig, LLaDAMoEConfig, DreamConfig, OpenDCoderConfig])
def test_families_with_full_attention_have_a_default(config: type) -> None:
    assert config().diffusion_default_max_tokens == 256


def test_other_families_go_on_to_the_end_of_the_context() -> None:
    assert SDARConfig().diffusion_default_max_tokens is None
    assert OpenDCoderConfig(context_attention="causal").diffusion_default_max_tokens is None


@pytest.mark.parametrize(("step_rows", "default"), [(8192, 256), (300, 150), (1, 1)])
def test_a_prompt_as_long_as_the_default_has_room_in_a_step(step_rows: int, default: int) -> None:
    config = LLaDAConfig()
    config.geometry = SimpleNamespace(step_rows=step_rows)
    assert config.diffusion_default_max_tokens == default
