"""Layouts that no golden checkpoint has, against the transformers library with the same visibility mask."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.reference.model import ReferenceModel, block_causal

DIMENSIONS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}


def assert_same_logits(model: torch.nn.Module, folder: Path, released_config: dict[str, object]) -> None:
    """Save ``model`` in the released layout and compare its logits with the reference's."""
    torch.manual_seed(0)
    for parameter in model.parameters():  # transformers starts norms at one and biases at zero
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(DIMENSIONS | released_config))
    ids, visible = torch.randint(64, (13,)), block_causal(13, 4)
    with torch.inference_mode():
        expected = model(ids[None], attention_mask=visible[None, None]).logits[0]
    torch.testing.assert_close(ReferenceModel(folder)(ids, visible), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_sdar_moe_computes_what_qwen3_moe_does(tmp_path: Path, norm_topk_prob: bool) -> None:
    moe = {
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": norm_topk_prob,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**DIMENSIONS, **moe))
    assert_same_logits(model.eval(), tmp_path, {"model_type": "sdar_moe", **moe})


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_fast_dllm_v2_computes_what_qwen2_does(tmp_path: Path, tie_word_embeddings: bool) -> None:
    options = {"tie_word_embeddings": tie_word_embeddings, "rope_theta": 1e4}
    model = Qwen2ForCausalLM(Qwen2Config(**DIMENSIONS, **options))
    assert_same_logits(model.eval(), tmp_path, {"model_type": "Fast_dLLM_Qwen", **options})
