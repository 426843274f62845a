"""openPangu-Diffusion."""

from typing import Any, ClassVar

from vllm_dllm.models.configs.base import BlockDiffusionConfig
from vllm_dllm.traits import FamilyTraits


class PanguDiffusionConfig(BlockDiffusionConfig):
    """openPangu-7B-Diffusion: vLLM's openPangu backbone. Its ``config.json`` says ``PanguEmbedded``, as those of the
    autoregressive openPangu models do. Defaults are those of openPangu-7B-Diffusion-Base."""

    model_type = "pangu_diffusion"
    traits = FamilyTraits(
        family="openPangu",
        block_length=32,
        mask_token_id=45830,
        shifted=True,
        attention="causal-context",
    )
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "sandwich_norm": (False,),
        "param_sink_number": (0, None),
    }
    default_theta = 16000000.0

    vocab_size: int = 153376
    hidden_size: int = 4096
    intermediate_size: int = 12800
    num_hidden_layers: int = 34
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    bias: bool = True
    """Of queries, keys, values and the output projection of attention."""
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 45892
