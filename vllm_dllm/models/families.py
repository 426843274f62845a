"""Model classes of the families: vLLM's layers and weights under `BlockDiffusionModel`.

Each class has the name that checkpoints give in ``architectures``, under which `vllm_dllm.plugin` registers it.
"""

import re
from typing import Any, ClassVar

from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.openpangu import PanguEmbeddedForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dllm.models.block_diffusion import BlockDiffusionModel
from vllm_dllm.models.configs import LLADA_INSIDE, LLADA_OUTSIDE


class SDARForCausalLM(BlockDiffusionModel, Qwen3ForCausalLM):
    """SDAR-{1.7B,4B,8B}-Chat and TraDo."""


class SDARMoeForCausalLM(BlockDiffusionModel, Qwen3MoeForCausalLM):
    """SDAR-30B-A3B."""


class LLaDA2MoeModelLM(BlockDiffusionModel, BailingMoeV2ForCausalLM):
    """LLaDA2.0-mini, LLaDA2.1-mini and their larger siblings."""


class Fast_dLLM_QwenForCausalLM(BlockDiffusionModel, Qwen2ForCausalLM):
    """Fast_dLLM_v2_{1.5B,7B}."""


class DreamModel(BlockDiffusionModel, Qwen2ForCausalLM):
    """Dream-v0-{Base,Instruct}-7B, Dream-Coder and DiffuCoder."""


class OpenDCoderModel(BlockDiffusionModel, Qwen2ForCausalLM):
    """Open-dCoder 0.5B, by ``--config-format open_dcoder``."""


class LLaDAMoEModelLM(BlockDiffusionModel, Qwen3MoeForCausalLM):
    """LLaDA-MoE-7B-A1B-{Base,Instruct}.

    The published code descends from OLMoE, but norms queries and keys per head, which vLLM's OLMoE does not.
    """


class PanguDiffusionForCausalLM(BlockDiffusionModel, PanguEmbeddedForCausalLM):
    """openPangu-7B-Diffusion-Base.

    The name is ours, because checkpoints of the autoregressive openPangu models have the same ``architectures``,
    ``model_type`` and tensors.
    """


class NemotronLabsDiffusionModel(BlockDiffusionModel, MistralForCausalLM):
    """Nemotron-Labs-Diffusion-{3B,8B,14B}: the layers of Ministral 3, wrapped under names of their own."""

    def vllm_name(self, stored_name: str) -> str:
        return re.sub(r"^diffusion_head\.", "lm_head.", re.sub(r"^encoder\.", "model.", stored_name))

    @classmethod
    def stored_module(cls, hf_config: Any, module: str) -> str:
        return re.sub(r"^lm_head\b", "diffusion_head", re.sub(r"^model\b", "encoder", module))


# Names of previews of the same models.
MinistralDiffEncoderModel = NemotronLabsDiffusionEncoderModel = NemotronLabsDiffusionModel


_LLADAS = {llamas: ours for ours, llamas in (*LLADA_OUTSIDE.items(), *LLADA_INSIDE.items())}

# Outside of a block `ff_out` is the output head and inside it is the down projection: the regular expressions come
# first, and leave only the latter to the rest.
_TO_LLAMA = WeightsMapper(
    orig_to_new_regex={
        **{re.compile(rf"^model\.transformer\.{ours}\b"): llamas for ours, llamas in LLADA_OUTSIDE.items()},
        re.compile(r"^model\.transformer\.blocks\b"): "model.layers",
    },
    orig_to_new_substr={f".{ours}": f".{llamas}" for ours, llamas in LLADA_INSIDE.items()},
)


class LLaDAModelLM(BlockDiffusionModel, LlamaForCausalLM):
    """LLaDA-8B-{Base,Instruct} and LLaDA-1.5: Llama's layers under other names."""

    stored_parts: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["ff_proj", "up_proj"],
    }

    def vllm_name(self, stored_name: str) -> str:
        # `block_groups.G.B` is block `G * block_group_size + B`.
        size = self.config.block_group_size
        ungrouped = re.sub(
            r"\.block_groups\.(\d+)\.(\d+)\b", lambda m: f".blocks.{int(m[1]) * size + int(m[2])}", stored_name
        )
        renamed = _TO_LLAMA.map_name(ungrouped)
        assert renamed is not None
        return renamed

    @classmethod
    def stored_module(cls, hf_config: Any, module: str) -> str:
        size = hf_config.block_group_size
        if match := re.match(r"model\.layers\.(\d+)\.(.*)$", module):
            layer = int(match[1])
            blocks = f"blocks.{layer}" if size == 1 else f"block_groups.{layer // size}.{layer % size}"
            own_name = match[2].rpartition(".")[2]
            return f"model.transformer.{blocks}.{_LLADAS.get(match[2], own_name)}"
        return f"model.transformer.{_LLADAS[module]}" if module in _LLADAS else module
