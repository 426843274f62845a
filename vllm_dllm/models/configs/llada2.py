"""LLaDA2.0 and 2.1."""

from typing import Any

from vllm_dllm.models.configs.base import BlockDiffusionConfig
from vllm_dllm.traits import FamilyTraits


class LLaDA2MoeConfig(BlockDiffusionConfig):
    """LLaDA2.0 and 2.1: a Ling 2.0 (BailingMoeV2) backbone. Defaults are those of LLaDA2.0-mini."""

    model_type = "llada2_moe"
    traits = FamilyTraits(family="LLaDA2", block_length=32, mask_token_id=156895, threshold=0.95, editing=True)
    default_theta = 600000.0

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 0.5
    use_bias: bool = False
    use_qkv_bias: bool = False
    use_qk_norm: bool = True
    use_rmsnorm: bool = True
    embedding_dropout: float = 0.0
    tie_word_embeddings: bool = False
    norm_head: bool = False
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    router_dtype: str = "fp32"
    pad_token_id: int | None = 156892
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # The reference code goes by `partial_rotary_factor` alone; vLLM's backbone would prefer this.
        kwargs.pop("rotary_dim", None)
        if self.eos_token_id is None:
            self.eos_token_id = self.pad_token_id
        super().__post_init__(**kwargs)
