"""The sampler's memory with the vocabulary of a released model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from tests.engine.harness import engine, generate
from tests.engine.memory import PeakMemory
from vllm_dllm.runtime.logits.rows import PROCESSED_VALUES
from vllm_dllm.runtime.sampler import BlockDiffusionSampler

VOCABULARY = 151936
LENGTH = 32


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with two layers that are nearly nothing, and a real vocabulary."""
    folder: Path = tmp_path_factory.mktemp("large-vocabulary")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    text = (folder / "config.json").read_text()
    text = text.replace('"qwen3"', '"sdar"').replace("Qwen3ForCausalLM", "SDARForCausalLM")
    (folder / "config.json").write_text(text)
    return engine(
        folder,
        dllm={"block_length": LENGTH, "policy": "static", "denoising_steps": 1},
        dtype="bfloat16",
        hf_overrides={"mask_token_id": 151669},
    )


def peak(llm: LLM, num_requests: int, monkeypatch: pytest.MonkeyPatch, **params: Any) -> int:
    """Most bytes that one call of the sampler held with this many requests in the batch."""
    peaks: list[int] = []
    original = BlockDiffusionSampler.__call__

    def measured(self: Any, logits: torch.Tensor, *args: Any) -> Any:
        with PeakMemory() as memory:
            result = original(self, logits, *args)
        if logits.shape[0] == num_requests * LENGTH:
            peaks.append(memory.peak)
        return result

    prompts = [[i + 1, i + 2] for i in range(num_requests)]
    with monkeypatch.context() as patch:
        patch.setattr(BlockDiffusionSampler, "__call__", measured)
        generate(llm, prompts, SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False, **params))
    return max(peaks)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.0, "extra_args": {"dllm_policy": "entropy"}},
    ],
    ids=["greedy", "sampled", "entropy"],
)
def test_no_copy_of_the_logits_is_made(llm: LLM, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fp32_logits = 8 * LENGTH * VOCABULARY * 4
    assert peak(llm, 8, monkeypatch, **params) < fp32_logits / 4


def test_processing_takes_a_fixed_number_of_logits_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"temperature": 0.8, "seed": 1, "top_k": 20, "top_p": 0.95}
    assert PROCESSED_VALUES < 4 * LENGTH * VOCABULARY
    few, many = (peak(llm, number, monkeypatch, **params) for number in (4, 8))
    assert many < 1.1 * few
