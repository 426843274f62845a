"""Configurations of Nemotron-Labs-Diffusion as published, and what is refused in their place."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.engine.models.test_model_configs import SDAR_8B, engine_config_of
from tests.paths import BUNDLED
from tests.reference.nemotron import FAMILY
from vllm_dllm.geometry import geometry_of
from vllm_dllm.models.configs import NemotronLabsDiffusionConfig
from vllm_dllm.models.draft_adapter import DraftAdapter, Source

ROPE = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
}
NEMOTRON_3B = {
    "architectures": ["NemotronLabsDiffusionModel"],
    "auto_map": {"AutoModel": "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel"},
    "ar_loss_weight": 1.0,
    "attention_bias": False,
    "attn_implementation": "sdpa",
    "block_size": 32,
    "bos_token_id": 1,
    "dlm_loss_weight": None,
    "dlm_paradigm": "bidirectional",
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "mask_token_id": 100,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "model_type": "nemotron_labs_diffusion",
    "num_attention_heads": 32,
    "num_hidden_layers": 26,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": ROPE,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "vocab_size": 131072,
}
BASE = NEMOTRON_3B | {"eos_token_id": 2, "max_position_embeddings": 4096, "rope_parameters": ROPE | {"factor": 0.25}}


def dllm(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"dllm": options}}


def test_the_published_configuration_has_its_traits_and_scales_queries(write_config: Callable[..., str]) -> None:
    config = AutoConfig.from_pretrained(write_config(NEMOTRON_3B))
    assert type(config) is NemotronLabsDiffusionConfig
    assert (config.block_length, config.mask_token_id, config.eos_token_id, config.canvas_length) == (32, 100, 11, 32)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (3072, 32, 128)
    assert config.llama_4_scaling == {"original_max_position_embeddings": 16384, "beta": 0.1}
    assert config.rope_parameters.items() >= ROPE.items()
    traits = config.traits
    assert (traits.shifted, traits.commit_predicts, traits.threshold_inclusive) == (False, True, True)
    assert "llama_4_scaling" not in config.to_dict()
    # What it says is what ours says where it says nothing, but for the size.
    left_out = NemotronLabsDiffusionConfig()
    names = ("bos_token_id", "eos_token_id", "rms_norm_eps", "vocab_size", "max_position_embeddings", "head_dim")
    assert {name: getattr(left_out, name) for name in names} == {name: NEMOTRON_3B[name] for name in names}
    assert left_out.llama_4_scaling == config.llama_4_scaling


def test_the_last_block_of_the_longest_text_fits_the_scaled_positions(write_config: Callable[..., str]) -> None:
    """The table of the published base model has 0.25 times its original length, which is no reason to refuse it."""
    config = engine_config_of(write_config(BASE))
    assert config.model_config.max_model_len == 4096 - 31
    assert config.model_config.hf_config.eos_token_id == 2
    assert engine_config_of(write_config(NEMOTRON_3B), max_model_len=1000).model_config.max_model_len == 1000


@pytest.mark.parametrize("architecture", ["NemotronLabsDiffusionEncoderModel", "MinistralDiffEncoderModel"])
def test_names_of_previews_are_served_too(architecture: str, write_config: Callable[..., str]) -> None:
    model = engine_config_of(write_config(NEMOTRON_3B | {"architectures": [architecture]}), max_model_len=512)
    assert model.model_config.architecture == architecture
    assert model.model_config.is_diffusion


def test_where_first_tokens_come_from_is_the_users_choice(write_config: Callable[..., str]) -> None:
    checkpoint = write_config(NEMOTRON_3B)
    for first_token, canvas in ((None, 32), ("autoregressive", 32), ("denoised", 64)):
        given = {} if first_token is None else dllm(first_token=first_token)
        geometry = geometry_of(engine_config_of(checkpoint, max_model_len=512, **given))
        assert geometry.canvas_length == canvas
        assert geometry.traits.commit_predicts == (first_token != "denoised")
    with pytest.raises(ValueError, match="first_token='denoised' is not allowed: SDAR models have one way"):
        engine_config_of(write_config(SDAR_8B, "sdar-b8"), max_model_len=512, **dllm(first_token="denoised"))
    with pytest.raises(ValueError, match="first_token"):
        engine_config_of(checkpoint, max_model_len=512, **dllm(first_token="seeded"))


@pytest.mark.parametrize("first_token", ["autoregressive", "denoised"])
def test_windows_of_several_blocks_are_refused(first_token: str, write_config: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=r"eager=True is not allowed: .* Nemotron-Labs-Diffusion"):
        engine_config_of(write_config(NEMOTRON_3B), max_model_len=512, **dllm(eager=True, first_token=first_token))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dlm_paradigm", "autoregressive"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("sliding_window", 4096),
        ("tie_word_embeddings", True),
    ],
)
def test_other_computations_are_refused(key: str, value: Any, write_config: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r} is not supported for Nemotron-Labs-Diffusion models"):
        AutoConfig.from_pretrained(write_config(NEMOTRON_3B | {key: value}))


@pytest.mark.parametrize("key", ["llama_4_scaling_beta", "original_max_position_embeddings"])
def test_queries_without_a_scale_are_refused(key: str, write_config: Callable[..., str]) -> None:
    rope = {name: value for name, value in ROPE.items() if name != key}
    rope["rope_type"] = "yarn" if key == "llama_4_scaling_beta" else "default"
    with pytest.raises(ValueError, match=rf"rope_parameters\['{key}'\]=None is not allowed"):
        AutoConfig.from_pretrained(write_config(NEMOTRON_3B | {"rope_parameters": rope}))


@pytest.mark.parametrize(("factor", "theta"), [(16.0, 1e6), (16.0, 1e9), (0.25, 1e6)])
def test_rotary_frequencies_and_their_scale_are_those_of_transformers(
    factor: float, theta: float, write_config: Callable[..., str]
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

    config = AutoConfig.from_pretrained(
        write_config(NEMOTRON_3B | {"rope_parameters": ROPE | {"factor": factor, "rope_theta": theta}})
    )
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = YaRNScalingRotaryEmbedding.__new__(YaRNScalingRotaryEmbedding)
    torch.nn.Module.__init__(ours)
    ours.base, ours.rotary_dim, ours.truncate, ours.extrapolation_factor = theta, 128, True, 1
    ours.beta_fast, ours.beta_slow, ours.max_position_embeddings = 32, 1, 16384
    torch.testing.assert_close(ours._compute_inv_freq(factor), expected, rtol=1e-6, atol=0)
    assert math.isclose(scale, 1.0)


def adapted(tmp_path: Path, *, config: dict[str, Any] | None = None, without: str = "", shape: int = 128) -> str:
    """The golden checkpoint with another adapter."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(BUNDLED / FAMILY / "checkpoint", folder)
    adapter = folder / "linear_spec_lora"
    written = json.loads((adapter / "adapter_config.json").read_text()) | (config or {})
    (adapter / "adapter_config.json").write_text(json.dumps(written))
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not without or without not in name}
    first = next(name for name in tensors if "lora_A" in name)
    save_file(tensors | {first: tensors[first][:, :shape].clone()}, adapter / "adapter_model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"config": {"target_modules": ["lm_head"]}},
            r"target_modules=\['lm_head'\] is not supported; allowed: some of",
        ),
        ({"config": {"target_modules": "all-linear"}}, "target_modules='all-linear' is not supported; allowed: some"),
        ({"config": {"use_dora": True}}, "use_dora=True is not supported"),
        ({"config": {"init_lora_weights": "pissa"}}, "init_lora_weights='pissa' is not supported; allowed: True"),
        ({"config": {"lora_alpha": None}}, "lora_alpha=None is not allowed: it must be a number above 0"),
        ({"config": {"r": 0}}, "r=0 is not allowed"),
        (
            {"without": "layers.1.self_attn.o_proj.lora_B"},
            r"lora_B of o_proj of layer 1 is missing and should be \[96, 4\]",
        ),
        ({"shape": 64}, r"lora_A of o_proj of layer 0 is \[4, 64\] and should be \[4, 128\]"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint = adapted(tmp_path, **change)
    config = engine_config_of(checkpoint, max_model_len=512).model_config.hf_config
    assert config.geometry.options.draft_adapter
    projection = SimpleNamespace(input_size=128, output_size=96, input_size_per_partition=128, tp_rank=0)
    projection.quant_method = SimpleNamespace(
        requires_device_loading=True, uses_meta_device=False, supports_pre_processed_weights=False
    )
    projection.register_buffer = partial(_register, projection)
    layers = [SimpleNamespace(self_attn=SimpleNamespace(o_proj=projection))] * 2
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model=checkpoint, revision=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        load_config=SimpleNamespace(load_format="auto"),
    )
    with pytest.raises(ValueError, match=message):
        DraftAdapter(
            SimpleNamespace(model=SimpleNamespace(layers=layers)),
            vllm_config,  # type: ignore[arg-type]
            Source(checkpoint, "linear_spec_lora", None),
        )


def _register(layer: Any, name: str, tensor: torch.Tensor, **_: Any) -> None:
    setattr(layer, name, tensor)


def test_whether_drafts_are_adapted_is_settled_by_what_the_checkpoint_has(write_config: Callable[..., str]) -> None:
    without, golden = write_config(NEMOTRON_3B), str(BUNDLED / FAMILY / "checkpoint")

    def resolved(checkpoint: str, **options: Any) -> bool | str | None:
        return geometry_of(engine_config_of(checkpoint, max_model_len=512, **dllm(**options))).options.draft_adapter

    assert (resolved(without), resolved(golden), resolved(golden, draft_adapter=False)) == (False, True, False)
    assert resolved(golden, first_token="denoised") is False
    elsewhere = str(BUNDLED / FAMILY / "checkpoint/linear_spec_lora")
    assert resolved(without, draft_adapter=elsewhere) == elsewhere
    with pytest.raises(
        ValueError, match=r"draft_adapter=True is not allowed: .* no linear_spec_lora/adapter_config.json"
    ):
        resolved(without, draft_adapter=True)
    with pytest.raises(ValueError, match="draft_adapter=True is not allowed: the engine's first_token='denoised'"):
        resolved(golden, draft_adapter=True, first_token="denoised")
    with pytest.raises(ValueError, match="draft_adapter=True is not allowed: SDAR models have no adapter"):
        resolved(write_config(SDAR_8B, "sdar-b8"), draft_adapter=True)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_an_adapter_is_none(file: str, tmp_path: Path, hook_log: pytest.LogCaptureFixture) -> None:
    checkpoint = adapted(tmp_path)
    (tmp_path / "checkpoint" / "linear_spec_lora" / file).unlink()

    def resolved(**options: Any) -> bool | str | None:
        return geometry_of(engine_config_of(checkpoint, max_model_len=512, **dllm(**options))).options.draft_adapter

    assert resolved(draft_adapter=False) is False
    assert "without the checkpoint's adapter" not in hook_log.text
    assert resolved() is False
    assert f"go without the checkpoint's adapter: {checkpoint} has no linear_spec_lora/{file}" in hook_log.text
    with pytest.raises(
        ValueError, match=f"draft_adapter=True is not allowed: .* has no linear_spec_lora/{file}; leave"
    ):
        resolved(draft_adapter=True)
