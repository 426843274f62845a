"""Shapes of released models: their configurations, and what a forward reads and computes.

The GPU benchmark makes weights of these shapes on the spot; nothing is downloaded.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Model(StrEnum):
    """Whose shape it is."""

    SDAR_8B = "sdar-8b"
    SDAR_1_7B = "sdar-1.7b"
    SDAR_30B_A3B = "sdar-30b-a3b"
    LLADA2_MINI = "llada2-mini"


@dataclass(frozen=True)
class Parameters:
    """Entries of a model's matrices, by how a forward reads them. Norms and biases do not count.

    Attributes:
        embedding: a forward reads a row for each of its own rows.
        dense: every forward reads all of these.
        experts: of all experts that a router chooses among, in all layers.
        top_k: experts that a row goes to, of ``num_experts``; both 0 without experts.
        head: from hidden states to logits.
    """

    embedding: int
    dense: int
    experts: int
    num_experts: int
    top_k: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.dense + self.experts + self.head

    def read(self, rows: int) -> float:
        """Entries that a forward of ``rows`` rows reads at least; of experts, those that some row is expected to
        go to, as rows choose independently and experts alike."""
        touched = 1 - (1 - self.top_k / self.num_experts) ** rows if self.num_experts else 0.0
        return self.dense + self.experts * touched + self.head

    def multiply_adds(self, rows: int, logits_rows: int) -> float:
        """Multiplications of the matrices with ``rows`` rows, ``logits_rows`` of which go on to logits."""
        chosen = self.top_k / self.num_experts if self.num_experts else 0.0
        return rows * (self.dense + self.experts * chosen) + logits_rows * self.head


@dataclass(frozen=True)
class Shape:
    """A model without weights.

    Attributes:
        config: ``config.json`` of the diffusion model.
        backbone: what ``config.json`` of the same layers says where they decode autoregressively.
    """

    config: dict[str, Any]
    backbone: dict[str, Any]

    @property
    def parameters(self) -> Parameters:
        """Counted from the configuration."""
        c = self.config
        hidden, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
        queries, keys = (c[name] * c["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        attention = hidden * (queries + 2 * keys) + queries * hidden
        num_experts = c.get("num_experts", 0)
        sparse = layers - c.get("first_k_dense_replace", 0) if num_experts else 0
        expert = 3 * hidden * c.get("moe_intermediate_size", 0)
        dense_mlp = 3 * hidden * c["intermediate_size"]
        return Parameters(
            embedding=vocab * hidden,
            dense=layers * attention
            + (layers - sparse) * dense_mlp
            + sparse * (hidden * num_experts + expert * c.get("num_shared_experts", 0)),
            experts=sparse * num_experts * expert,
            num_experts=num_experts,
            top_k=c.get("num_experts_per_tok", 0),
            head=vocab * hidden,
        )

    @property
    def kv_entries(self) -> int:
        """Entries of K/V per position, in all layers."""
        c = self.config
        return 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]

    def tiny(self) -> "Shape":
        """The same kinds of layers, small enough for a CPU."""
        small = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "head_dim": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "vocab_size": 1024,
            "mask_token_id": 1023,
            "max_position_embeddings": 4096,
        }
        if "num_experts" in self.config:
            small |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        if "n_group" in self.config:
            small |= {"n_group": 4, "topk_group": 2, "pad_token_id": 1022}
        return Shape({**self.config, **small}, self.backbone)

    def write(self, folder: Path, *, autoregressive: bool) -> None:
        """Make ``folder`` a checkpoint that has a configuration and no weights (``load_format="dummy"``)."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config | (self.backbone if autoregressive else {})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


_QWEN3: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "mask_token_id": 151669,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
_SDAR: dict[str, Any] = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", **_QWEN3}
_SDAR_BACKBONE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}

AUTOREGRESSIVE_LLADA2 = "bailing_moe_v2"
"""``model_type`` of Ling 2.0, whose configuration class neither Transformers nor vLLM has."""

SHAPES: dict[Model, Shape] = {
    Model.SDAR_8B: Shape(
        {
            **_SDAR,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
        },
        _SDAR_BACKBONE,
    ),
    Model.SDAR_1_7B: Shape(
        {
            **_SDAR,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
        },
        _SDAR_BACKBONE,
    ),
    Model.SDAR_30B_A3B: Shape(
        {
            **_QWEN3,
            "architectures": ["SDARMoeForCausalLM"],
            "model_type": "sdar_moe",
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    ),
    Model.LLADA2_MINI: Shape(
        {
            "architectures": ["LLaDA2MoeModelLM"],
            "model_type": "llada2_moe",
            "embedding_dropout": 0.0,
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "mask_token_id": 156895,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 512,
            "moe_router_enable_expert_bias": True,
            "n_group": 8,
            "norm_head": False,
            "norm_topk_prob": True,
            "num_attention_heads": 16,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 20,
            "num_key_value_heads": 4,
            "num_shared_experts": 1,
            "pad_token_id": 156892,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-6,
            "rope_theta": 600_000.0,
            "routed_scaling_factor": 2.5,
            "router_dtype": "fp32",
            "score_function": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 4,
            "use_bias": False,
            "use_qk_norm": True,
            "use_qkv_bias": False,
            "use_rmsnorm": True,
            "vocab_size": 157184,
        },
        {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": AUTOREGRESSIVE_LLADA2},
    ),
}
