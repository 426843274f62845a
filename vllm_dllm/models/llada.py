"""LLaDA over vLLM's Llama: same layers under other names."""

import re
from collections.abc import Iterable

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_dllm.models.block_diffusion import BlockDiffusionModel

# Outside of a block `ff_out` is the output head and inside it is the down projection: the regular expressions come
# first, and leave only the latter to the rest.
_TO_LLAMA = WeightsMapper(
    orig_to_new_regex={
        re.compile(r"^model\.transformer\.ff_out\b"): "lm_head",
        re.compile(r"^model\.transformer\.wte\b"): "model.embed_tokens",
        re.compile(r"^model\.transformer\.ln_f\b"): "model.norm",
        re.compile(r"^model\.transformer\.blocks\b"): "model.layers",
    },
    orig_to_new_substr={
        ".attn_norm": ".input_layernorm",
        ".q_proj": ".self_attn.q_proj",
        ".k_proj": ".self_attn.k_proj",
        ".v_proj": ".self_attn.v_proj",
        ".attn_out": ".self_attn.o_proj",
        ".ff_norm": ".post_attention_layernorm",
        ".ff_proj": ".mlp.gate_proj",
        ".up_proj": ".mlp.up_proj",
        ".ff_out": ".mlp.down_proj",
    },
)
_GROUPED = re.compile(r"\.block_groups\.(\d+)\.(\d+)\b")


class LLaDAModelLM(BlockDiffusionModel, LlamaForCausalLM):
    """LLaDA-8B-{Base,Instruct} and LLaDA-1.5."""

    hf_to_vllm_mapper = _TO_LLAMA | LlamaModel.hf_to_vllm_mapper

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the tensors of a checkpoint; returns the names of the parameters that were filled."""
        ungrouped = ((self._ungroup(name), tensor) for name, tensor in weights)
        return AutoWeightsLoader(self).load_weights(ungrouped, mapper=_TO_LLAMA)

    def _ungroup(self, name: str) -> str:
        """``block_groups.G.B`` is block ``G * block_group_size + B``."""
        size = self.config.block_group_size
        return _GROUPED.sub(lambda match: f".blocks.{int(match[1]) * size + int(match[2])}", name)
