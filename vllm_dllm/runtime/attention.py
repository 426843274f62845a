"""vLLM's attention metadata for the views of a plan."""

from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends import utils
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_dllm.runtime.plan.rows import PAD_SLOT_ID, Views

assert utils.PAD_SLOT_ID == PAD_SLOT_ID


def attention_metadata(
    views: Views,
    attn_groups: list[list[AttentionGroup]],
    kv_cache_config: KVCacheConfig,
    *,
    num_rows: int,
    slot_mappings: torch.Tensor,
) -> dict[str, Any]:
    """Attention metadata by layer: every group of rows is a request of its own.

    Args:
        slot_mappings: [K/V cache groups, rows] int64.
    """
    # No seq_lens_cpu_upper_bound: FlashInfer takes that bound for the lengths themselves, which only the device knows.
    return build_attn_metadata(
        attn_groups=attn_groups,
        num_reqs=len(views.query_start_loc) - 1,
        num_tokens=num_rows,
        query_start_loc_gpu=views.query_start_loc_on_device,
        query_start_loc_cpu=torch.from_numpy(views.query_start_loc),
        max_query_len=int(np.diff(views.query_start_loc).max()),
        seq_lens=views.seq_lens,
        max_seq_len=views.max_seq_len,
        block_tables=views.block_tables,
        slot_mappings=slot_mappings,
        kv_cache_config=kv_cache_config,
        causal=views.causal,
    )
