"""vLLM's layers with the families' checkpoints, without an engine; attention is plain torch."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
    parallel_state,
)
from vllm.distributed.parallel_state import GroupCoordinator, destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.paths import BUNDLED

# Some configurations leave the mask token out, as the published ones do. Logits do not depend on it.
MASK = {"mask_token_id": 0}
BLOCK_CAUSAL = ("sdar", "llada2_moe", "fast_dllm_v2")
FULL_ATTENTION = ("llada", "dream")
FAMILIES = BLOCK_CAUSAL + FULL_ATTENTION


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process groups that vLLM's parallel layers expect, of this process alone.

    An engine that ran before in this process has left some, but none for experts if its model has none.
    """
    of_engines = {name: group for name, group in vars(parallel_state).items() if isinstance(group, GroupCoordinator)}
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    with set_current_vllm_config(VllmConfig()):
        if not of_engines:
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        for name in of_engines.keys() - {"_WORLD"}:
            setattr(parallel_state, name, None)
        initialize_model_parallel(1, 1)
    yield
    if of_engines:
        destroy_model_parallel()
        for name, group in of_engines.items():
            setattr(parallel_state, name, group)
    else:
        cleanup_dist_env_and_memory()


def configure(checkpoint: Path, **arguments: Any) -> VllmConfig:
    return EngineArgs(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        hf_overrides=MASK,
        **arguments,
    ).create_engine_config()


def load_unprocessed(config: VllmConfig) -> nn.Module:
    """Load a checkpoint as vLLM does into a model whose every number was NaN before."""
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        model = initialize_model(config)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return model


def load(config: VllmConfig) -> nn.Module:
    model = load_unprocessed(config)
    with set_current_vllm_config(config):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model.eval()


def block_causal_attention(layer: Attention, block_length: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A forward for vLLM's attention layer over whole sequences ``[T, heads * head_size]``."""

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_tokens = query.shape[0]
        block = torch.arange(num_tokens) // block_length
        q, k, v = (x.view(num_tokens, -1, layer.head_size).transpose(0, 1) for x in (query, key, value))
        mask = block[:, None] >= block[None, :]
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(num_tokens, -1)

    return forward


def logits_of(model: nn.Module, config: VllmConfig, ids: Tensor, block_length: int) -> Tensor:
    """Logits ``[T, vocab]`` of one forward over ``ids`` ``[T]`` under the block-causal mask.

    A single block of all positions is full attention.
    """
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.forward = block_causal_attention(layer, block_length)
    with set_forward_context(None, config, num_tokens=len(ids)), torch.inference_mode():
        return model.compute_logits(model(ids, torch.arange(len(ids))))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_checkpoint_is_used_and_every_parameter_filled(family: str, golden: Path) -> None:
    checkpoint = golden / family / "checkpoint"
    model = load_unprocessed(configure(checkpoint))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    stored = load_file(checkpoint / "model.safetensors")
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in stored.values())


@pytest.mark.parametrize("family", BLOCK_CAUSAL)
def test_logits_equal_those_of_the_official_implementation(family: str, golden: Path) -> None:
    config = configure(golden / family / "checkpoint")
    model = load(config)
    with safe_open(golden / family / "logits.safetensors", "pt") as reference:
        for case in range(3):
            ids = reference.get_tensor(f"input_ids_{case}").flatten().long()
            block_length = int(reference.get_tensor(f"block_length_{case}"))
            expected = reference.get_tensor(f"logits_{case}").view(len(ids), -1)
            torch.testing.assert_close(logits_of(model, config, ids, block_length), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_logits_under_full_attention_equal_those_of_the_official_implementation(family: str, golden: Path) -> None:
    config = configure(golden / family / "checkpoint")
    model = load(config)
    with safe_open(golden / family / "logits.safetensors", "pt") as reference:
        for case in range(3):
            ids = reference.get_tensor(f"input_ids.{case}").long()
            expected = reference.get_tensor(f"logits.{case}")
            torch.testing.assert_close(logits_of(model, config, ids, len(ids)), expected, rtol=1e-4, atol=1e-4)


def randomize(reference: PreTrainedModel) -> None:
    """Fresh parameters are too alike: norms are ones, biases zeros, and routers have no preference."""
    torch.manual_seed(0)
    for parameter in reference.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)


def bidirectional_logits(reference: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits ``[T, vocab]`` of a causal model of Transformers without its causal mask."""
    no_mask = torch.zeros(1, 1, len(ids), len(ids))
    with torch.inference_mode():
        return reference(input_ids=ids[None], attention_mask=no_mask, use_cache=False).logits[0]


def rewrite_config(checkpoint: Path, config: dict[str, Any]) -> None:
    (checkpoint / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def qwen2() -> PreTrainedModel:
    """Biases of queries, keys and values only, two queries to a key, and the embedding as output head."""
    hf_config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    reference = Qwen2ForCausalLM(hf_config).eval()
    randomize(reference)
    return reference


def test_open_dcoder_logits_equal_those_of_qwen2_without_its_causal_mask(
    qwen2: PreTrainedModel, tmp_path: Path
) -> None:
    qwen2.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    rewrite_config(tmp_path, saved | {"is_causal": False})
    ids = torch.randint(512, (37,), generator=torch.Generator().manual_seed(1))
    config = configure(tmp_path, config_format="open_dcoder")
    logits = logits_of(load(config), config, ids, len(ids))
    torch.testing.assert_close(logits, bidirectional_logits(qwen2, ids), rtol=1e-4, atol=1e-4)


def test_pangu_logits_equal_those_of_llama_with_biases_and_rotary_tables_are_skipped(tmp_path: Path) -> None:
    hf_config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 16000000.0},
        rms_norm_eps=1e-6,
        attention_bias=True,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    reference = LlamaForCausalLM(hf_config).eval()
    randomize(reference)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    config = {"architectures": ["PanguEmbeddedForCausalLM"], "model_type": "PanguEmbedded", "bias": True}
    rewrite_config(tmp_path, config | {"rope_theta": 16000000.0} | {name: getattr(hf_config, name) for name in names})
    tables = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.full((16,), 7.0) for layer in range(3)}
    parameters = {name: tensor.clone() for name, tensor in reference.named_parameters()}
    assert {f"model.layers.0.self_attn.{name}_proj.bias" for name in "qkvo"} <= parameters.keys()
    save_file(parameters | tables, tmp_path / "model.safetensors")
    ids = torch.randint(512, (37,), generator=torch.Generator().manual_seed(1))
    model = load_unprocessed(configure(tmp_path, config_format="pangu_diffusion"))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    vllm_config = configure(tmp_path, config_format="pangu_diffusion")
    model = load(vllm_config)
    with torch.inference_mode():
        causal = reference(input_ids=ids[None], use_cache=False).logits[0]
    # A block of one position sees what is before it; one of all positions sees everything.
    for block_length, expected in ((1, causal), (len(ids), bidirectional_logits(reference, ids))):
        logits = logits_of(model, vllm_config, ids, block_length)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def llada_name(name: str, group: int) -> str:
    """What LLaDA calls a tensor of Qwen2; ``group`` blocks to a group."""
    outside = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
    inside = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "self_attn.q_proj": "q_proj",
        "self_attn.k_proj": "k_proj",
        "self_attn.v_proj": "v_proj",
        "self_attn.o_proj": "attn_out",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    }
    module, kind = name.rsplit(".", 1)
    if module in outside:
        return f"model.transformer.{outside[module]}.{kind}"
    layer, part = module.removeprefix("model.layers.").split(".", 1)
    block = layer if group == 1 else f"{int(layer) // group}.{int(layer) % group}"
    return f"model.transformer.{'blocks' if group == 1 else 'block_groups'}.{block}.{inside[part]}.{kind}"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("group", [1, 2])
def test_llada_variants_equal_qwen2_under_other_names(
    group: int, tied: bool, qwen2: PreTrainedModel, tmp_path: Path
) -> None:
    """Shared keys, biases, tied heads and grouped blocks, which the published LLaDA models do without."""
    rewrite_config(
        tmp_path,
        {
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            "d_model": 128,
            "mlp_hidden_size": 96,
            "n_layers": 4,
            "n_heads": 4,
            "n_kv_heads": 2,
            "max_sequence_length": 256,
            "rope_theta": 10000.0,
            "vocab_size": 512,
            "embedding_size": 512,
            "include_qkv_bias": True,
            "weight_tying": tied,
            "block_group_size": group,
        },
    )
    tensors = {llada_name(name, group): tensor.clone() for name, tensor in qwen2.named_parameters()}
    if not tied:
        tensors["model.transformer.ff_out.weight"] = tensors["model.transformer.wte.weight"].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    ids = torch.randint(512, (37,), generator=torch.Generator().manual_seed(1))
    expected = bidirectional_logits(qwen2, ids)
    config = configure(tmp_path)
    logits = logits_of(load(config), config, ids, len(ids))
    torch.testing.assert_close(logits, expected if tied else expected.flip(1), rtol=1e-4, atol=1e-4)


def save_llada_moe(folder: Path) -> PreTrainedModel:
    """A checkpoint in LLaDA-MoE's layout, its middle layer without experts, and the reference for it.

    Qwen3-MoE computes the same: norms of queries and keys per head, and the weights of the chosen experts as the
    softmax over all of them left them.
    """
    hf_config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        attn_implementation="eager",
    )
    reference = Qwen3MoeForCausalLM(hf_config).eval()
    randomize(reference)
    reference.save_pretrained(folder)
    rewrite_config(
        folder,
        {
            "architectures": ["LLaDAMoEModelLM"],
            "model_type": "llada",
            "dense_intermediate_size": 128,
            "expert_intermediate_size": 32,
            "hidden_size": 64,
            "max_position_embeddings": 256,
            "moe_layer_freq": [1, 0, 1],
            "moe_router_enable_expert_bias": False,
            "norm_topk_prob": None,
            "num_attention_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "qk_layernorm": True,
            "rms_norm_eps": 1e-05,
            "rope_theta": 50000,
            "shared_expert_intermediate_size": None,
            "vocab_size": 512,
        },
    )
    return reference


def test_llada_moe_fills_every_parameter_from_the_published_names(tmp_path: Path) -> None:
    save_llada_moe(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0."
    assert stored[layer + "self_attn.q_norm.weight"].shape == (32,)
    expected = {f"self_attn.{part}_proj" for part in "qkvo"} | {"self_attn.q_norm", "self_attn.k_norm", "mlp.gate"}
    expected |= {"input_layernorm", "post_attention_layernorm"}
    expected |= {f"mlp.experts.{e}.{part}_proj" for e in range(8) for part in ("gate", "up", "down")}
    assert {name for name in stored if name.startswith(layer)} == {f"{layer}{part}.weight" for part in expected}
    model = load_unprocessed(configure(tmp_path))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in stored.values())


def test_llada_moe_logits_equal_those_of_qwen3_moe_without_its_causal_mask(tmp_path: Path) -> None:
    reference = save_llada_moe(tmp_path)
    ids = torch.randint(512, (37,), generator=torch.Generator().manual_seed(1))
    config = configure(tmp_path)
    logits = logits_of(load(config), config, ids, len(ids))
    torch.testing.assert_close(logits, bidirectional_logits(reference, ids), rtol=1e-4, atol=1e-4)


def test_llada_moe_weighs_experts_by_the_softmax_over_all_of_them(tmp_path: Path) -> None:
    save_llada_moe(tmp_path)
    config = configure(tmp_path)
    block: Any = load(config).model.layers[2].mlp
    stored = load_file(tmp_path / "model.safetensors")

    def weight(name: str) -> Tensor:
        return stored[f"model.layers.2.mlp.{name}.weight"]

    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros_like(x)
    for i, row in enumerate(x):
        probs = torch.softmax(weight("gate") @ row, dim=0)
        for e in probs.topk(3).indices.tolist():
            hidden = F.silu(weight(f"experts.{e}.gate_proj") @ row) * (weight(f"experts.{e}.up_proj") @ row)
            expected[i] += probs[e] * (weight(f"experts.{e}.down_proj") @ hidden)
    with set_forward_context(None, config, num_tokens=len(x)), torch.inference_mode():
        torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)


def test_sdar_moe_logits_equal_those_of_qwen3_moe_under_the_block_causal_mask(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hf_config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        attn_implementation="eager",
        architectures=["SDARMoeForCausalLM"],
    )
    reference = Qwen3MoeForCausalLM(hf_config).eval()
    randomize(reference)
    reference.save_pretrained(tmp_path)
    saved = tmp_path / "config.json"
    saved.write_text(
        saved.read_text()
        .replace('"model_type": "qwen3_moe"', '"model_type": "sdar_moe"')
        .replace("Qwen3MoeForCausalLM", "SDARMoeForCausalLM")
    )
    ids, block_length = torch.randint(512, (22,)), 4
    block = torch.arange(len(ids)) // block_length
    bias = torch.where(block[:, None] >= block[None, :], 0.0, -torch.inf)[None, None]
    with torch.inference_mode():
        expected = reference(input_ids=ids[None], attention_mask=bias, use_cache=False).logits[0]
    config = configure(tmp_path)
    torch.testing.assert_close(logits_of(load(config), config, ids, block_length), expected, rtol=1e-4, atol=1e-4)


def test_llada2_routes_by_biased_scores_in_groups_and_weighs_by_unbiased_ones() -> None:
    checkpoint = BUNDLED / "llada2_moe" / "checkpoint"
    config = configure(checkpoint)
    block: Any = load(config).model.layers[1].mlp
    stored = load_file(checkpoint / "model.safetensors")

    def weight(name: str) -> Tensor:
        return stored[f"model.layers.1.mlp.{name}"]

    def swiglu(name: str, x: Tensor) -> Tensor:
        gate, up = (x @ weight(f"{name}.{part}_proj.weight").T for part in ("gate", "up"))
        return (F.silu(gate) * up) @ weight(f"{name}.down_proj.weight").T

    num_tokens, num_experts, groups, groups_kept, top_k, scale = 300, 8, 4, 2, 2, 2.5
    x = torch.randn(num_tokens, 128, generator=torch.Generator().manual_seed(0))
    scores = torch.sigmoid(x @ weight("gate.weight").T)
    biased = scores + weight("gate.expert_bias")
    group_scores = biased.view(num_tokens, groups, -1).topk(2).values.sum(-1)
    kept = torch.zeros(num_tokens, groups).scatter(1, group_scores.topk(groups_kept).indices, 1.0).bool()
    eligible = kept.repeat_interleave(num_experts // groups, dim=1)
    chosen = biased.masked_fill(~eligible, -torch.inf).topk(top_k).indices
    weights = scores.gather(1, chosen)
    weights = scale * weights / (weights.sum(-1, keepdim=True) + 1e-20)
    outputs = torch.stack([swiglu(f"experts.{e}", x) for e in range(num_experts)], dim=1)
    picked = outputs.gather(1, chosen[..., None].expand(-1, -1, outputs.shape[-1]))
    expected = (weights[..., None] * picked).sum(1) + swiglu("shared_experts", x)

    # The bias and the groups both decide something here, or this would test less than it says.
    assert (scores.topk(top_k).indices.sort().values != chosen.sort().values).any()
    assert (biased.topk(top_k).indices.sort().values != chosen.sort().values).any()
    with set_forward_context(None, config, num_tokens=num_tokens), torch.inference_mode():
        torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_without_rows_never_reaches_the_gather_over_ranks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(configure(BUNDLED / family / "checkpoint"))
    hidden = torch.zeros(3, 128)
    expected = model.compute_logits(hidden).shape[1:]
    monkeypatch.setattr(model.lm_head, "tp_size", 2)
    monkeypatch.setattr(model.logits_processor, "_gather_logits", lambda logits: pytest.fail("gathered"))
    with pytest.raises(pytest.fail.Exception, match="gathered"):
        model.compute_logits(hidden)
    logits = model.compute_logits(hidden[:0])
    assert logits.shape == (0, *expected)
    assert logits.dtype == hidden.dtype
