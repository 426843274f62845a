"""Forward passes of the supported architectures in plain fp32 torch: no cache, no batch, no fusion.

Weights come from a checkpoint in its released layout (``config.json`` and ``*.safetensors``). Dimensions:
T tokens, D hidden, H query heads, K key/value heads, E experts, V vocabulary.
"""

import copy
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


def block_causal(length: int, block_length: int) -> Tensor:
    """[T, T] bool: position q sees position k when k's block does not come after q's."""
    block = torch.arange(length) // block_length
    return block.unsqueeze(1) >= block.unsqueeze(0)


def causal_context(length: int, start: int) -> Tensor:
    """[T, T] bool: a position sees those before it and itself, and from ``start`` on all."""
    position = torch.arange(length)
    return (position.unsqueeze(1) >= position) | (position.unsqueeze(1) >= start)


def _usual_name(name: str) -> str:
    """Llama's name of a tensor; Nemotron-Labs-Diffusion wraps its backbone."""
    return name.replace("encoder.", "model.", 1).replace("diffusion_head.", "lm_head.", 1)


class ReferenceModel:
    """SDAR, SDAR-MoE, LLaDA2, Fast-dLLM v2, openPangu or Nemotron-Labs-Diffusion: pre-norm transformers with SwiGLU
    MLPs and rotary positions.

    They differ in tensor names, in the norms and biases of q, k and v, and in the router of their experts.
    Nemotron-Labs-Diffusion scales its rotary frequencies (YaRN) and, behind its original length, its queries.
    """

    def __init__(self, folder: Path, adapter: Path | None = None):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.weights.update({_usual_name(name): tensor.float() for name, tensor in load_file(file).items()})
        self.is_llada2 = self.config["model_type"] == "llada2_moe"
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        self.rope = self.config.get("rope_parameters") or {"rope_theta": self.config["rope_theta"]}
        self.adapted_from: int | None = None
        self.lora = self._read_lora(adapter or folder / "linear_spec_lora")

    def _read_lora(self, folder: Path) -> dict[str, Tensor]:
        """What the adapter adds to weights, by their names; of few models there is one."""
        if not folder.is_dir():
            return {}
        config = json.loads((folder / "adapter_config.json").read_text())
        stored = {
            _usual_name(name.removeprefix("base_model.model.")): tensor.float()
            for name, tensor in load_file(folder / "adapter_model.safetensors").items()
        }
        scale = config["lora_alpha"] / config["r"]
        ends = ".lora_A.weight"
        return {
            name.replace(ends, ".weight"): scale * stored[name.replace("lora_A", "lora_B")] @ down
            for name, down in stored.items()
            if name.endswith(ends)
        }

    def adapted(self, start: int) -> "ReferenceModel":
        """The same model with its adapter in the rows from ``start`` on."""
        other = copy.copy(self)
        other.adapted_from = start
        return other

    @torch.inference_mode()
    def __call__(self, ids: Tensor, visible: Tensor) -> Tensor:
        """Logits [T, V] of ``ids`` [T] int64, where token q attends to token k if ``visible[q, k]``."""
        embedding = self.weights["model.word_embeddings.weight" if self.is_llada2 else "model.embed_tokens.weight"]
        x = embedding[ids]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self.attention(prefix, self.rms_norm(x, f"{prefix}input_layernorm"), visible)
            x = x + self.mlp(f"{prefix}mlp.", self.rms_norm(x, f"{prefix}post_attention_layernorm"))
        head = embedding if self.config["tie_word_embeddings"] else self.weights["lm_head.weight"]
        return self.rms_norm(x, "model.norm") @ head.T

    def attention(self, prefix: str, x: Tensor, visible: Tensor) -> Tensor:
        heads = [self.heads, self.kv_heads, self.kv_heads]
        if self.is_llada2:
            prefix += "attention."
            qkv = self.linear(x, f"{prefix}query_key_value").unflatten(-1, (-1, self.head_dim))
            q, k, v = qkv.split(heads, dim=1)  # [T, heads, head_dim] each
            q_norm, k_norm, output = f"{prefix}query_layernorm", f"{prefix}key_layernorm", f"{prefix}dense"
        else:
            prefix += "self_attn."
            q, k, v = (self.linear(x, f"{prefix}{name}_proj").unflatten(-1, (-1, self.head_dim)) for name in "qkv")
            q_norm, k_norm, output = f"{prefix}q_norm", f"{prefix}k_norm", f"{prefix}o_proj"
        if f"{q_norm}.weight" in self.weights:  # all but Fast-dLLM v2 and openPangu
            q, k = self.rms_norm(q, q_norm), self.rms_norm(k, k_norm)
        q, k = self.rotate(q), self.rotate(k)
        if "llama_4_scaling_beta" in self.rope:
            lengths = torch.arange(x.shape[0]) // self.rope["original_max_position_embeddings"]
            q = q * (1 + self.rope["llama_4_scaling_beta"] * lengths.float().log1p()).view(-1, 1, 1)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return self.linear(mixed, output)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding (half-split) of [T, heads, head_dim]; LLaDA2 rotates only the first dimensions."""
        rotary_dim = int(self.head_dim * self.config.get("partial_rotary_factor", 1.0))
        frequency = self.frequencies(rotary_dim)
        angle = (torch.arange(x.shape[0]).unsqueeze(1) * frequency).unsqueeze(1)  # [T, 1, rotary_dim / 2]
        cos, sin = angle.cos(), angle.sin()
        rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        a, b = rotated.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def frequencies(self, rotary_dim: int) -> Tensor:
        """[rotary_dim / 2]. With YaRN those that turn rarely within the original length are slowed down."""
        theta = self.rope["rope_theta"]
        frequency = theta ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)
        if self.rope.get("rope_type", "default") == "default":
            return frequency
        assert self.rope["rope_type"] == "yarn"
        assert self.rope["mscale"] == self.rope["mscale_all_dim"]
        original = self.rope["original_max_position_embeddings"]

        def index(turns: float) -> float:
            return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(index(self.rope["beta_fast"])), 0)
        high = min(math.ceil(index(self.rope["beta_slow"])), rotary_dim - 1)
        slowed = ((torch.arange(rotary_dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        return frequency * (1 - slowed) + frequency / self.rope["factor"] * slowed

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        if f"{prefix}gate.weight" not in self.weights:
            return self.swiglu(prefix, x)
        route = self.route_llada2 if self.is_llada2 else self.route_qwen3
        weights, chosen = route(prefix, x)
        y = torch.zeros_like(x)
        for expert in range(self.config["num_experts"]):
            weight = (weights * (chosen == expert)).sum(dim=-1, keepdim=True)  # 0 where it was not chosen
            y = y + weight * self.swiglu(f"{prefix}experts.{expert}.", x)
        if self.is_llada2:
            y = y + self.swiglu(f"{prefix}shared_experts.", x)
        return y

    def route_qwen3(self, prefix: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices, both [T, experts per token], of SDAR-MoE's router."""
        scores = (x @ self.weights[f"{prefix}gate.weight"].T).softmax(dim=-1)
        weights, chosen = scores.topk(self.config["num_experts_per_tok"])
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen

    def route_llada2(self, prefix: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices, both [T, experts per token], of LLaDA2's group-limited router."""
        scores = (x @ self.weights[f"{prefix}gate.weight"].T).sigmoid()
        # The bias steers the choice of experts and does not enter their weights.
        biased = scores + self.weights[f"{prefix}gate.expert_bias"]
        grouped = biased.unflatten(-1, (self.config["n_group"], -1))
        best_groups = grouped.topk(2).values.sum(dim=-1).topk(self.config["topk_group"]).indices
        allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, best_groups, True)
        limited = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = limited.topk(self.config["num_experts_per_tok"]).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.config["routed_scaling_factor"], chosen

    def swiglu(self, prefix: str, x: Tensor) -> Tensor:
        gate, up = self.linear(x, f"{prefix}gate_proj"), self.linear(x, f"{prefix}up_proj")
        return self.linear(F.silu(gate) * up, f"{prefix}down_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        if self.adapted_from is not None and f"{name}.weight" in self.lora:
            out[self.adapted_from :] += x[self.adapted_from :] @ self.lora[f"{name}.weight"].T
        return out

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.square().mean(dim=-1, keepdim=True)
        return self.weights[f"{name}.weight"] * x * (variance + self.config["rms_norm_eps"]).rsqrt()
