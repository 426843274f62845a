"""Hugging Face configurations of the model families, with the traits of each: one file per family.

The configurations lie apart from the model classes, because every process of vLLM registers all configurations when the
process starts, and most processes never need a model's layers. Nothing here imports vLLM.
"""

from vllm_dllm.models.configs.base import BlockDiffusionConfig, block_length_of_name
from vllm_dllm.models.configs.dream import DreamConfig, OpenDCoderConfig
from vllm_dllm.models.configs.fast_dllm_v2 import FastDLLMQwenConfig
from vllm_dllm.models.configs.llada import LLaDAConfig, LLaDAMoEConfig
from vllm_dllm.models.configs.llada2 import LLaDA2MoeConfig
from vllm_dllm.models.configs.pangu import PanguDiffusionConfig
from vllm_dllm.models.configs.sdar import SDARConfig, SDARMoeConfig

__all__ = [
    "BlockDiffusionConfig",
    "DreamConfig",
    "FastDLLMQwenConfig",
    "LLaDA2MoeConfig",
    "LLaDAConfig",
    "LLaDAMoEConfig",
    "OpenDCoderConfig",
    "PanguDiffusionConfig",
    "SDARConfig",
    "SDARMoeConfig",
    "block_length_of_name",
]
