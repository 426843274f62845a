"""Models that no golden case covers, against the plain reference."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import SamplingParams

from tests.engine.harness import engine, generate, greedy, tokens_of
from tests.reference.decode import Options, decode
from tests.reference.model import ReferenceModel
from vllm_dllm.commands.engine import BUNDLED_MODEL
from vllm_dllm.tiny.arithmetic import make_problems

MOE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
}


@pytest.fixture(scope="module")
def sdar_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdar-moe")
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)
    released = {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(MOE | released))
    return folder


@pytest.mark.parametrize("policy", ["static", "threshold"])
def test_sdar_moe_decodes_as_the_reference_does(sdar_moe: Path, policy: str) -> None:
    options = Options(block_length=4, mask_id=511, policy=policy, threshold=0.5)
    prompts = [list(range(7, 7 + length)) for length in (3, 9, 16, 37)]
    model = ReferenceModel(sdar_moe)
    expected = [decode(model, prompt, 14, options).tokens for prompt in prompts]
    outputs = generate(engine(sdar_moe), prompts, greedy(options, max_tokens=14))
    assert [tokens_of(output) for output in outputs] == expected


@pytest.mark.skipif(not (BUNDLED_MODEL / "config.json").is_file(), reason="no bundled model")
@pytest.mark.parametrize("policy", ["static", "threshold"])
def test_the_trained_model_decodes_as_the_reference_does(policy: str) -> None:
    """Twelve problems it has not seen, in one batch and from text to text."""
    llm = engine(BUNDLED_MODEL, skip_tokenizer_init=False, hf_overrides={}, max_model_len=256)
    tokenizer = llm.get_tokenizer()
    options = Options(block_length=16, mask_id=3, policy=policy, stop_ids=frozenset({0, 2}))
    chats = [[{"role": "user", "content": problem.question}] for problem in make_problems(12, seed=5, split="test")]
    params = SamplingParams(temperature=0, max_tokens=48, extra_args={"dllm_policy": policy})
    outputs = llm.chat(chats, params, use_tqdm=False)
    model = ReferenceModel(BUNDLED_MODEL)
    for output in outputs:
        assert output.prompt_token_ids is not None
        expected = decode(model, output.prompt_token_ids, 48, options).tokens
        assert tokens_of(output) == expected
        assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)
