"""Released layouts: names and keys of the official checkpoints, their logits, and what is refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from tests.paths import BUNDLED, GOLDEN
from tests.training.toys import RECIPES, config_of, qwen2_network, small_network
from vllm_dllm.tiny import train as tiny
from vllm_dllm.tiny.objectives import causal_mask, visible_keys
from vllm_dllm.training.layouts import LAYOUTS, load_network, network_config, released_tensors
from vllm_dllm.training.network import build_network

FULL_ATTENTION = ("llada", "dream")
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip


def official_checkpoint(name):
    return BUNDLED / name / "checkpoint"


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_logits_equal_the_official_implementation(name):
    folder = GOLDEN / name
    if not folder.is_dir():
        pytest.skip(f"no golden data in {folder}")
    network = load_network(folder / "checkpoint")
    recorded = load_file(folder / "logits.safetensors")
    for index in range(3):
        ids = recorded[f"input_ids.{index}"].unsqueeze(0)
        length = ids.shape[1]
        mask = visible_keys(torch.tensor([length]), length)
        with torch.inference_mode():
            logits = network(ids, torch.arange(length).unsqueeze(0), mask, torch.ones_like(ids, dtype=torch.bool))
        torch.testing.assert_close(logits, recorded[f"logits.{index}"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_config_has_the_keys_of_the_official_checkpoint_and_differs_only_in_sizes_and_ids(name):
    official = json.loads((official_checkpoint(name) / "config.json").read_text())
    config = config_of(name)
    assert set(config) == set(official)
    assert {key for key, value in config.items() if value != official[key]} <= {
        "embedding_size", "d_model", "mlp_hidden_size", "n_layers", "n_heads", "n_kv_heads",
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_hidden_layers", "num_key_value_heads", "max_window_layers", "rms_norm_eps", "rope_theta",
        "max_sequence_length", "max_position_embeddings", "torch_dtype",
        "bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id",
    }  # fmt: skip


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_tensors_have_the_names_of_the_official_checkpoint(name):
    folder = official_checkpoint(name)
    with safe_open(folder / "model.safetensors", "pt") as official:
        shapes = {key: tuple(official.get_slice(key).get_shape()) for key in official.keys()}  # noqa: SIM118
    network = load_network(folder)
    tensors = released_tensors(network.state_dict(), config_of(name))
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == shapes


def save_small(recipe, folder, tokenizer, **sizes):
    config = config_of(recipe, **{**SIZES, **sizes})
    network = small_network(config)
    tiny.save_checkpoint(config, network, tokenizer, folder)
    return network


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.train_tokenizer(["Mia has 17 apples."] * 3, 320)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_saved_network_is_loaded_again_without_loss(recipe, tokenizer, tmp_path):
    network = save_small(recipe, tmp_path, tokenizer)
    again = load_network(tmp_path)
    assert again.config.to_dict() == network.config.to_dict()
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llada", "include_qkv_bias", True),
        ("llada", "architectures", ["LLaDAMoEModelLM"]),
        ("llada", "block_group_size", 2),
        ("llada", "alibi", True),
        ("dream", "use_sliding_window", True),
        ("sdar", "use_regular_causal", True),
    ],
)
def test_what_the_network_does_not_compute_is_refused_by_name(name, key, value, tokenizer, tmp_path):
    save_small(name, tmp_path, tokenizer)
    change_config(tmp_path, **{key: value})
    with pytest.raises(ValueError, match=f"^{key}="):
        load_network(tmp_path)


def test_missing_parts_of_a_checkpoint_are_named(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_network(tmp_path)
    save_small("llada", tmp_path, tokenizer)
    change_config(tmp_path, n_layers=3)
    with pytest.raises(ValueError, match=r"model\.transformer\.blocks\.2"):
        load_network(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_network(tmp_path)
    change_config(tmp_path, model_type="gpt2")
    with pytest.raises(ValueError, match="model_type='gpt2' is not one of sdar, llada, Dream"):
        load_network(tmp_path)


def test_weights_in_several_files_are_read_together(tokenizer, tmp_path):
    network = save_small("llada", tmp_path, tokenizer)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, tmp_path / "model-00002-of-00002.safetensors")
    again = load_network(tmp_path)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in network.state_dict().items())


def test_llada_without_a_number_of_key_heads_has_one_for_each_query_head(tokenizer, tmp_path):
    save_small("llada", tmp_path, tokenizer)
    change_config(tmp_path, n_kv_heads=None)
    assert load_network(tmp_path).config.num_key_value_heads == 4


def test_shifted_layouts_are_those_of_shifted_families():
    shifts = {name: int(layout.traits.shifted) for name, layout in LAYOUTS.items()}
    assert shifts == {"sdar": 0, "llada": 0, "Dream": 1, "qwen2": 1, "open_dcoder": 1}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_of_qwen2_equal_those_of_transformers(tied, tokenizer, tmp_path):
    network = save_small("qwen2", tmp_path, tokenizer, tie_word_embeddings=tied)
    qwen2 = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert (qwen2.lm_head.weight is qwen2.model.embed_tokens.weight) is tied
    ids = torch.randint(320, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = qwen2(input_ids=ids).logits
        logits = load_network(tmp_path)(ids, torch.arange(24).unsqueeze(0), causal_mask(24), torch.ones_like(ids) > 0)
    torch.testing.assert_close(logits.view_as(expected), expected, atol=2e-3, rtol=1e-4)
    assert network.config.tie_word_embeddings is tied


def test_a_tied_head_is_not_saved_and_may_be_there(tokenizer, tmp_path):
    network = save_small("qwen2", tmp_path, tokenizer)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    again = load_network(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, network.lm_head.weight)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_positions_are_those_of_transformers_however_a_release_writes_them(key, tokenizer, tmp_path):
    save_small("qwen2", tmp_path, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    if key == "rope_parameters":
        rope["rope_theta"] = config.pop("rope_theta")
    (tmp_path / "config.json").write_text(json.dumps({**config, key: rope}))
    expected = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(320, (1, 24), generator=torch.Generator().manual_seed(0))
    rows = torch.ones_like(ids) > 0
    with torch.inference_mode():
        logits = load_network(tmp_path)(ids, torch.arange(24).unsqueeze(0), causal_mask(24), rows)
        torch.testing.assert_close(logits, expected(input_ids=ids).logits[0], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_token_that_pads_answers_is_learned(recipe):
    config = config_of(recipe, **SIZES)
    network = build_network(network_config({**config, "pad_token_id": 0}))
    assert network.model.embed_tokens.padding_idx is None
    assert network.model.embed_tokens.weight[0].any()


def test_a_network_with_biases_starts_with_zeros():
    network = qwen2_network()
    biases = [parameter for name, parameter in network.named_parameters() if name.endswith("bias")]
    assert len(biases) == 3 * 2
    assert not any(bias.any() for bias in biases)
