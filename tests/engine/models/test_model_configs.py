import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig, Qwen2Config
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils.config import get_config

from vllm_dllm.geometry import Geometry
from vllm_dllm.models.base_config import block_length_of_name
from vllm_dllm.models.configs import (
    BlockDiffusionConfig,
    DreamConfig,
    LLaDAConfig,
    LLaDAMoEConfig,
    OpenDCoderConfig,
    PanguDiffusionConfig,
    SDARConfig,
)
from vllm_dllm.options.schema import DllmConfig


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

LLADA_8B = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": auto_map("llada", "LLaDA"),
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_dropout": 0.0,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "transformers_version": "4.46.3",
    "use_cache": False,
    "vocab_size": 126464,
    "weight_tying": False,
}

LLADA_MOE_7B = {
    "architectures": ["LLaDAMoEModelLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": auto_map("lladamoe", "LLaDAMoE"),
    "clip_qkv": None,
    "dense_intermediate_size": 8192,
    "eos_token_id": 156892,
    "expert_intermediate_size": 1024,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "model_type": "llada",
    "moe_layer_freq": [1] * 16,
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "norm_topk_prob": None,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000,
    "routed_scaling_factor": 1,
    "router_aux_loss_coef": 0.01,
    "router_num_group": None,
    "router_topk_group": None,
    "shared_expert_intermediate_size": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.2",
    "use_cache": False,
    "vocab_size": 157184,
}

DREAM_7B = QWEN | {
    "architectures": ["DreamModel"],
    "auto_map": auto_map("dream", "Dream"),
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "Dream",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151643,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "vocab_size": 152064,
}

OPEN_DCODER = QWEN | {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}

PANGU_7B_DIFFUSION = {
    "architectures": ["PanguEmbeddedForCausalLM"],
    "auto_map": auto_map("openpangu_dense", "PanguEmbedded"),
    "attention_dropout": 0.0,
    "bias": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12800,
    "max_position_embeddings": 32768,
    "model_type": "PanguEmbedded",
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 16000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.2",
    "use_cache": True,
    "vocab_size": 153376,
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
        ("SDAR-8B-Chat-b4", 4),
        ("SDAR-8B-Chat-b32-AWQ", 32),
        ("SDAR-8B-Chat-b32-W8A8", 32),
        ("SDAR-8B-Chat-b64-GPTQ-Int4", 64),
        ("SDAR-8B-Chat-b16_sft", 16),
        ("SDAR-8B-Chat-b8.v2", 8),
        ("SDAR-8B-Chat-b8-to-b32-merged", 32),
        ("/models/run-b32/checkpoint-500", 32),
        ("/models/run-b32/checkpoint-500/", 32),
        ("/hub/models--org--SDAR-b32-FP8/snapshots/0123abcd/checkpoint-500", 32),
        ("JetLM/SDAR-8B-Chat", None),
        ("JetLM/SDAR-8B-Chat-b24", None),
        ("JetLM/SDAR-8B-Chat-b320", None),
        ("JetLM/SDAR-8B-Chat-b32x-AWQ", None),
        ("JetLM/SDAR-8B-Chat-bf16", None),
        ("JetLM/SDAR-7b", None),
        ("lab-b32/SDAR-8B-Chat", None),
        ("/runs-b16/SDAR-8B-Chat", None),
        ("/runs-b16/SDAR-8B-Chat/checkpoint-500", None),
        ("/hub-b16/models--lab--SDAR/snapshots/0123abcd", None),
        ("", None),
    ],
)
def test_block_length_of_a_name_is_a_part_of_it(name: str, block_length: int | None) -> None:
    assert block_length_of_name(name) == block_length


def test_llada_becomes_what_the_llama_backbone_reads(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    config = load(write_config(LLADA_8B))
    assert type(config) is LLaDAConfig
    expected = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": 126464,
        "tie_word_embeddings": False,
        "qkv_bias": False,
        "eos_token_id": 126081,
        "block_length": 32,
        "mask_token_id": 126336,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    # The published names stay readable.
    assert (config.d_model, config.n_layers, config.max_sequence_length) == (4096, 32, 4096)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_kv_heads": None}, {"num_key_value_heads": 32}),
        ({"n_kv_heads": 8}, {"num_key_value_heads": 8, "head_dim": 128}),
        ({"n_kv_heads": None, "multi_query_attention": True}, {"num_key_value_heads": 1}),
        ({"n_kv_heads": 1, "multi_query_attention": True}, {"num_key_value_heads": 1}),
        ({"n_kv_heads": None, "multi_query_attention": False}, {"num_key_value_heads": 32}),
        ({"mlp_hidden_size": None}, {"intermediate_size": 16384}),
        ({"mlp_hidden_size": None, "mlp_ratio": 2}, {"intermediate_size": 8192}),
        ({"vocab_size": 126349}, {"vocab_size": 126464}),
        ({"embedding_size": None, "vocab_size": 126349}, {"vocab_size": 126349}),
        ({"include_qkv_bias": True}, {"qkv_bias": True}),
        ({"include_qkv_bias": None}, {"qkv_bias": False}),
        ({"weight_tying": True}, {"tie_word_embeddings": True}),
        ({"mask_token_id": None}, {"mask_token_id": 126336}),
    ],
)
def test_llada_settings_have_the_meaning_of_the_published_code(
    changes: dict[str, Any],
    expected: dict[str, Any],
    load: Callable[[str], BlockDiffusionConfig],
    write_config: Callable[..., str],
) -> None:
    config = load(write_config(LLADA_8B | changes))
    assert {name: getattr(config, name) for name in expected} == expected


def test_llada_without_key_value_heads_in_config_json_has_one_for_each_head(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    config = load(write_config({name: value for name, value in LLADA_8B.items() if name != "n_kv_heads"}))
    assert config.num_key_value_heads == 32


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("block_type", "sequential", "'llama'"),
        ("activation_type", "gelu", "'silu'"),
        ("activation_type", "swiglu", "'silu'"),  # the published code cannot run it in these blocks
        ("layer_norm_type", "default", "'rms'"),
        ("layer_norm_with_affine", False, "True"),
        ("bias_for_layer_norm", True, "False, None"),
        ("include_bias", True, "False"),
        ("attention_layer_norm", True, "False"),
        ("input_emb_norm", True, "False"),
        ("rope", False, "True"),
        ("alibi", True, "False"),
        ("scale_logits", True, "False"),
    ],
)
def test_variants_that_llama_lacks_are_refused_with_key_value_and_what_is_allowed(
    key: str, value: Any, allowed: str, load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    message = f"{key}={value!r} is not supported for LLaDA models; allowed: {allowed}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(write_config(LLADA_8B | {key: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_size": 126336}, "embedding_size=126336 is less than vocab_size=126464"),
        ({"n_kv_heads": 8, "multi_query_attention": True}, "n_kv_heads=8 contradicts multi_query_attention=True"),
        ({"n_kv_heads": 5}, "n_kv_heads=5 does not divide n_heads=32"),
        ({"n_heads": 33, "n_kv_heads": None}, "n_heads=33 does not divide d_model=4096"),
    ],
)
def test_contradictions_in_llada_configurations_are_errors(
    changes: dict[str, Any],
    message: str,
    load: Callable[[str], BlockDiffusionConfig],
    write_config: Callable[..., str],
) -> None:
    with pytest.raises(ValueError, match=message):
        load(write_config(LLADA_8B | changes))


def test_llada_moe_of_the_same_model_type_is_told_by_its_architecture(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    config = load(write_config(LLADA_MOE_7B))
    assert type(config) is LLaDAMoEConfig
    assert config.model_type == "llada"
    expected = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "vocab_size": 157184,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
        "block_length": 32,
        "mask_token_id": 156895,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.rope_parameters["rope_theta"] == 50000
    assert config.rope_parameters.get("partial_rotary_factor", 1) == 1


def test_llada_moe_layers_without_experts_are_dense(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    assert load(write_config(LLADA_MOE_7B | {"moe_layer_freq": [0, 1] * 8})).mlp_only_layers == list(range(0, 16, 2))
    with pytest.raises(ValueError, match="moe_layer_freq has 15 entries for num_hidden_layers=16"):
        load(write_config(LLADA_MOE_7B | {"moe_layer_freq": [1] * 15}))


def test_llada_moe_never_renormalises_expert_weights(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    assert load(write_config(LLADA_MOE_7B | {"norm_topk_prob": True})).norm_topk_prob is False


@pytest.mark.parametrize(
    ("published", "family", "key", "value", "allowed"),
    [
        (LLADA_MOE_7B, "LLaDA-MoE", "qk_layernorm", False, "True"),
        (LLADA_MOE_7B, "LLaDA-MoE", "attention_bias", True, "False"),
        (LLADA_MOE_7B, "LLaDA-MoE", "clip_qkv", 8.0, "None"),
        (LLADA_MOE_7B, "LLaDA-MoE", "hidden_act", "gelu", "'silu'"),
        (LLADA_MOE_7B, "LLaDA-MoE", "moe_router_enable_expert_bias", True, "False, None"),
        (LLADA_MOE_7B, "LLaDA-MoE", "shared_expert_intermediate_size", 1024, "None, 0"),
        (DREAM_7B, "Dream", "use_sliding_window", True, "False, None"),
        (SDAR_8B, "SDAR", "use_sliding_window", True, "False, None"),
        (SDAR_30B_A3B, "SDAR", "use_sliding_window", True, "False, None"),
        (FAST_DLLM_V2_1_5B, "Fast-dLLM v2", "use_sliding_window", True, "False, None"),
        (SDAR_30B_A3B, "SDAR", "use_regular_causal", True, "False, None"),
        (DREAM_7B, "Dream", "use_mrope", True, "False, None"),
        (LLADA2_MINI, "LLaDA2", "use_sliding_window", True, "False, None"),
        (LLADA2_MINI, "LLaDA2", "hidden_act", "gelu", "'silu'"),
        (LLADA2_MINI, "LLaDA2", "delete_token_id", 156900, "None"),
        (LLADA_8B, "LLaDA", "sliding_window", 4096, "None"),
        (LLADA_MOE_7B, "LLaDA-MoE", "sliding_window", 4096, "None"),
    ],
)
def test_variants_that_the_backbone_lacks_are_refused(
    published: dict[str, Any],
    family: str,
    key: str,
    value: Any,
    allowed: str,
    load: Callable[[str], BlockDiffusionConfig],
    write_config: Callable[..., str],
) -> None:
    message = f"{key}={value!r} is not supported for {family} models; allowed: {allowed}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(write_config(published | {key: value}))


@pytest.mark.parametrize(
    "published", [LLADA2_MINI, LLADA_8B, LLADA_MOE_7B, SDAR_8B], ids=lambda each: each["model_type"]
)
def test_a_sliding_window_that_is_not_used_is_none(
    published: dict[str, Any], load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    config = load(write_config(published | {"sliding_window": 4096, "use_sliding_window": False}))
    assert config.sliding_window is None


def test_dream_is_read_as_published(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    config = load(write_config(DREAM_7B))
    assert type(config) is DreamConfig
    expected = {
        "model_type": "Dream",
        "hidden_size": 3584,
        "num_key_value_heads": 4,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 28,
        "tie_word_embeddings": False,
        "block_length": 32,
        "mask_token_id": 151666,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000.0}


@pytest.mark.parametrize(
    ("config_class", "longest"), [(SDARConfig, 104), (DreamConfig, 107), (PanguDiffusionConfig, 107)]
)
def test_the_last_block_of_a_text_may_end_beyond_its_longest(
    config_class: type[BlockDiffusionConfig], longest: int
) -> None:
    """By its grid, or as if it began on the last position."""
    geometry = Geometry(
        traits=config_class.traits, options=DllmConfig(), block_length=8, step_rows=64, max_model_len=100, draft_rows=8
    )
    assert geometry.longest_text(100) == longest


@pytest.mark.parametrize("config_class", [LLaDAConfig, LLaDAMoEConfig, DreamConfig, OpenDCoderConfig])
def test_models_with_full_attention_pass_a_threshold_they_reach(config_class: type[BlockDiffusionConfig]) -> None:
    traits = config_class.traits
    assert (traits.attention, traits.threshold, traits.threshold_inclusive) == ("full", 0.9, True)
    qwen = config_class in (DreamConfig, OpenDCoderConfig)
    assert (traits.shifted, traits.timesteps) == (qwen, qwen)


def test_is_causal_of_a_checkpoint_does_not_reach_the_backbone_which_would_drop_its_cache(
    load: Callable[[str], BlockDiffusionConfig], write_config: Callable[..., str]
) -> None:
    for published in (LLADA_8B, DREAM_7B):
        assert not hasattr(load(write_config(published | {"is_causal": False})), "is_causal")


def engine_config_of(checkpoint: str, **arguments: Any) -> VllmConfig:
    return EngineArgs(
        model=checkpoint, skip_tokenizer_init=True, enforce_eager=True, load_format="dummy", **arguments
    ).create_engine_config()


def test_open_dcoder_is_a_qwen2_checkpoint_that_the_user_says_it_is(write_config: Callable[..., str]) -> None:
    published = OPEN_DCODER | {"is_causal": False, "hidden_size": 448, "max_position_embeddings": 2048}
    checkpoint = write_config(published)
    model = engine_config_of(checkpoint, config_format="open_dcoder").model_config
    config = model.hf_config
    assert type(config) is OpenDCoderConfig
    assert (model.architecture, model.runner_type, model.is_diffusion) == ("OpenDCoderModel", "generate", True)
    assert (config.mask_token_id, config.block_length, config.tie_word_embeddings) == (151665, 32, True)
    assert (config.hidden_size, config.num_key_value_heads, config.num_hidden_layers) == (448, 2, 24)
    assert not hasattr(config, "is_causal")
    assert config.name_or_path == checkpoint
    overridden = engine_config_of(checkpoint, config_format="open_dcoder", hf_overrides={"mask_token_id": 7})
    assert overridden.model_config.hf_config.mask_token_id == 7
    # The same process still takes the same checkpoint for what it says it is.
    assert type(AutoConfig.from_pretrained(checkpoint)) is Qwen2Config
    stock = engine_config_of(write_config(OPEN_DCODER | {"hidden_size": 448}, "stock")).model_config
    assert (stock.architecture, stock.is_diffusion) == ("Qwen2ForCausalLM", False)


def test_only_qwen2_checkpoints_can_be_read_as_open_dcoder(write_config: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=r"--config-format open_dcoder reads .* 'qwen2', not 'sdar'"):
        get_config(write_config(SDAR_8B), trust_remote_code=False, config_format="open_dcoder")


def test_pangu_diffusion_is_an_openpangu_checkpoint_that_the_user_says_it_is(
    write_config: Callable[..., str],
) -> None:
    checkpoint = write_config(PANGU_7B_DIFFUSION)
    model = engine_config_of(checkpoint, config_format="pangu_diffusion", max_model_len=1024).model_config
    config = model.hf_config
    assert type(config) is PanguDiffusionConfig
    assert (model.architecture, model.is_diffusion) == ("PanguDiffusionForCausalLM", True)
    assert (config.mask_token_id, config.block_length, config.canvas_length) == (45830, 32, 32)
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (4096, 34, 8)
    assert (config.bias, config.tie_word_embeddings, config.vocab_size) == (True, False, 153376)
    assert (config.rope_parameters["rope_theta"], config.rope_parameters["rope_type"]) == (16000000.0, "default")
    # What the published configuration says is what ours says where it says nothing.
    left_out = PanguDiffusionConfig()
    names = PANGU_7B_DIFFUSION.keys() & vars(left_out).keys() - {
        "architectures",
        "eos_token_id",
        "transformers_version",
    }
    assert {"intermediate_size", "max_position_embeddings", "rms_norm_eps"} <= names
    assert {name: getattr(left_out, name) for name in names} == {name: getattr(config, name) for name in names}
    assert left_out.rope_parameters == config.rope_parameters
    # The published sampler stops at another token than config.json names; generation_config.json has the right one.
    assert (left_out.eos_token_id, config.eos_token_id) == (45892, 2)


def test_only_openpangu_checkpoints_can_be_read_as_pangu_diffusion(write_config: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=r"--config-format pangu_diffusion reads .* 'PanguEmbedded', not 'sdar'"):
        get_config(write_config(SDAR_8B), trust_remote_code=False, config_format="pangu_diffusion")


@pytest.mark.parametrize(
    ("key", "value"),
    [("sandwich_norm", True), ("param_sink_number", 128), ("mlp_bias", True), ("sliding_window", 4096)],
)
def test_openpangu_variants_of_other_models_are_refused(key: str, value: Any, write_config: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r} is not supported for openPangu models"):
        get_config(
            write_config(PANGU_7B_DIFFUSION | {key: value}), trust_remote_code=False, config_format="pangu_diffusion"
        )


@pytest.mark.parametrize(
    "published",
    [SDAR_8B, SDAR_30B_A3B, LLADA2_MINI, LLADA_8B, LLADA_MOE_7B, DREAM_7B],
    ids=lambda p: p["architectures"][0],
)
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
