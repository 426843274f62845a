import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig
from vllm.transformers_utils.config import get_config

from vllm_dllm.models.configs import BlockDiffusionConfig, block_length_of_name


def auto_map(module: str, name: str) -> dict[str, str]:
    return {
        "AutoConfig": f"configuration_{module}.{name}Config",
        "AutoModel": f"modeling_{module}.{name}Model",
        "AutoModelForCausalLM": f"modeling_{module}.{name}ForCausalLM",
    }


QWEN = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4",
    "use_cache": True,
    "use_sliding_window": False,
}

SDAR_8B = QWEN | {
    "architectures": ["SDARForCausalLM"],
    "auto_map": auto_map("sdar", "SDAR"),
    "attention_bias": False,
    "attn_implementation": "flex_attention",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "fuse_cross_entropy": True,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "sdar",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}

SDAR_30B_A3B = SDAR_8B | {
    "architectures": ["SDARMoeForCausalLM"],
    "auto_map": auto_map("sdar_moe", "SDARMoe"),
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "model_type": "sdar_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}

LLADA2_MINI = {
    "architectures": ["LLaDA2MoeModelLM"],
    "auto_map": auto_map("llada2_moe", "LLaDA2Moe"),
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "llada2_moe",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 128,  # not what the reference code rotates
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "vocab_size": 157184,
}

FAST_DLLM_V2_1_5B = QWEN | {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "auto_map": auto_map("fast_dllm", "Fast_dLLM_Qwen"),
    "bd_size": 32,
    "bos_token_id": 151643,
    "conplemenrary_mask": True,
    "eos_token_id": 151645,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "Fast_dLLM_Qwen",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}

PUBLISHED = {
    "sdar": SDAR_8B,
    "sdar_moe": SDAR_30B_A3B,
    "llada2_moe": LLADA2_MINI,
    "Fast_dLLM_Qwen": FAST_DLLM_V2_1_5B,
}


@pytest.fixture(params=["transformers", "vllm"])
def load(request: pytest.FixtureRequest) -> Callable[[str], BlockDiffusionConfig]:
    """Load a configuration without remote code, as Transformers does or as vLLM does."""
    if request.param == "transformers":
        return AutoConfig.from_pretrained
    return lambda path: get_config(path, trust_remote_code=False)


@pytest.mark.parametrize(
    ("model_type", "block_length", "mask_token_id", "canvas_length"),
    [
        ("sdar", 4, 151669, 8),
        ("sdar_moe", 4, 151669, 8),
        ("llada2_moe", 32, 156895, 64),
        ("Fast_dLLM_Qwen", 32, 151665, 32),
    ],
)
def test_published_configurations_load_without_remote_code_and_get_what_they_leave_out(
    model_type: str,
    block_length: int,
    mask_token_id: int,
    canvas_length: int,
    load: Callable[[str], BlockDiffusionConfig],
    write_config: Callable[..., str],
) -> None:
    published = PUBLISHED[model_type]
    config = load(write_config(published))
    assert config.model_type == model_type
    assert (config.block_length, config.mask_token_id) == (block_length, mask_token_id)
    assert config.canvas_length == canvas_length
    assert config.rope_parameters["rope_theta"] == published["rope_theta"]
    assert config.rope_parameters["rope_type"] == "default"
    left_alone = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "tie_word_embeddings")
    assert {k: getattr(config, k) for k in left_alone} == {k: published[k] for k in left_alone}


def test_remote_code_is_not_used_even_where_it_is_trusted(write_config: Callable[..., str]) -> None:
    config = get_config(write_config(SDAR_8B), trust_remote_code=True)
    assert isinstance(config, BlockDiffusionConfig)


def test_llada2_rotates_half_of_each_head_whatever_rotary_dim_says(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    config = load(write_config(LLADA2_MINI))
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert not hasattr(config, "rotary_dim")


def test_llada2_stops_at_its_padding_token(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    assert load(write_config(LLADA2_MINI)).eos_token_id == 156892


def test_old_style_rope_scaling_becomes_rope_parameters(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = load(write_config(SDAR_8B | {"rope_scaling": scaling, "max_position_embeddings": 131072}))
    expected = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 1000000,
    }
    assert config.rope_parameters.items() >= expected.items()


@pytest.mark.parametrize("key", ["block_length", "block_size", "bd_size"])
def test_every_name_of_the_block_length_in_config_json_is_understood(
    key: str, load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    config = load(write_config(SDAR_8B | {key: 16}, "SDAR-8B-Chat-b32"))
    assert config.block_length == 16


def test_a_mask_token_in_config_json_is_kept(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    assert load(write_config(SDAR_8B | {"mask_token_id": 7})).mask_token_id == 7


@pytest.mark.parametrize(
    ("name", "block_length"),
    [
        ("JetLM/SDAR-8B-Chat-b8", 8),
        ("JetLM/SDAR-8B-Chat-b16", 16),
        ("/models/SDAR-8B-Chat-b32/", 32),
        ("SDAR-8B-Chat-B64", 64),
        ("/hub/models--JetLM--SDAR-8B-Chat-b32/snapshots/0123abcd", 32),
        ("JetLM/SDAR-8B-Chat", None),
        ("JetLM/SDAR-8B-b32-Chat", None),
        ("JetLM/SDAR-8B-Chat-b24", None),
        ("/models/run-b32/checkpoint-100", None),
    ],
)
def test_block_length_of_a_name_is_its_suffix(name: str, block_length: int | None) -> None:
    assert block_length_of_name(name) == block_length


@pytest.mark.parametrize("published", [SDAR_8B, SDAR_30B_A3B, LLADA2_MINI], ids=lambda p: p["model_type"])
def test_configurations_survive_saving_copying_and_pickling(
    published: dict[str, Any], write_config: Callable[..., str], tmp_path: Any
) -> None:
    config = AutoConfig.from_pretrained(write_config(published, "model-b16"))
    config.mask_token_id = 5
    config.save_pretrained(tmp_path / "saved")
    saved = AutoConfig.from_pretrained(tmp_path / "saved")
    for other in (saved, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(other) is type(config)
        assert (other.block_length, other.mask_token_id) == (16, 5)
        assert other.canvas_length == config.canvas_length
