"""LLaDA over vLLM's Llama: same layers under other names."""

import re

from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dllm.models.block_diffusion import BlockDiffusionModel

_OUTSIDE = {"ff_out": "lm_head", "wte": "model.embed_tokens", "ln_f": "model.norm"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
"""LLaDA's modules and Llama's, outside of the layers and inside."""

# Outside of a block `ff_out` is the output head and inside it is the down projection: the regular expressions come
# first, and leave only the latter to the rest.
_TO_LLAMA = WeightsMapper(
    orig_to_new_regex={
        **{re.compile(rf"^model\.transformer\.{ours}\b"): llamas for ours, llamas in _OUTSIDE.items()},
        re.compile(r"^model\.transformer\.blocks\b"): "model.layers",
    },
    orig_to_new_substr={f".{ours}": f".{llamas}" for ours, llamas in _INSIDE.items()},
)
_GROUPED = re.compile(r"\.block_groups\.(\d+)\.(\d+)\b")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.*)$")


class LLaDAModelLM(BlockDiffusionModel, LlamaForCausalLM):
    """LLaDA-8B-{Base,Instruct} and LLaDA-1.5."""

    hf_to_vllm_mapper = _TO_LLAMA | LlamaModel.hf_to_vllm_mapper

    def vllm_name(self, stored_name: str) -> str:
        # `block_groups.G.B` is block `G * block_group_size + B`.
        size = self.config.block_group_size
        ungrouped = _GROUPED.sub(lambda match: f".blocks.{int(match[1]) * size + int(match[2])}", stored_name)
        renamed = _TO_LLAMA.map_name(ungrouped)
        assert renamed is not None
        return renamed

    def stored_name(self, vllm_name: str) -> str:
        module, kind = vllm_name.rsplit(".", 1)
        size = self.config.block_group_size
        if match := _LAYER.match(module):
            layer = int(match[1])
            blocks = f"blocks.{layer}" if size == 1 else f"block_groups.{layer // size}.{layer % size}"
            module = f"{blocks}.{_LLADAS[match[2]]}"
        else:
            module = _LLADAS[module]
        return f"model.transformer.{module}.{kind}"


_LLADAS = {llamas: ours for ours, llamas in (*_OUTSIDE.items(), *_INSIDE.items())}
"""The other way round."""
