"""Attention metadata of groups of rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from vllm_dllm.runtime.attention import attention_metadata
from vllm_dllm.runtime.plan.rows import Views

PAGE, KERNEL_BLOCK, ROWS = 32, 16, 4


def group_of(max_num_seqs: int, width: int) -> AttentionGroup:
    """Of a backend whose kernels split pages in two, and whose metadata is vLLM's own."""
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=32, dtype=torch.float32)
    builder: Any = SimpleNamespace(build=lambda _, metadata, **__: metadata, supports_update_block_table=False)
    return AttentionGroup(
        TritonAttentionBackend,
        ["layer"],
        spec,
        0,
        kernel_block_size=KERNEL_BLOCK,
        kernel_block_table=torch.zeros(1, max_num_seqs, width, dtype=torch.int32),
        kernel_block_offsets=torch.arange(PAGE // KERNEL_BLOCK, dtype=torch.int32),
        metadata_builders=[builder],
    )


@pytest.mark.parametrize(("num_groups", "pages"), [(1, 2), (5, 2), (2, 3), (9, 4)])
def test_more_groups_than_requests_have_their_kernel_blocks(num_groups: int, pages: int) -> None:
    group = group_of(max_num_seqs=2, width=4)
    block_table = torch.arange(num_groups * pages, dtype=torch.int32).view(num_groups, pages)
    query_start_loc = np.arange(0, (num_groups + 1) * ROWS, ROWS, dtype=np.int32)
    views = Views(
        query_start_loc=query_start_loc,
        query_start_loc_on_device=torch.from_numpy(query_start_loc),
        block_tables=[block_table],
        seq_lens=torch.full((num_groups,), ROWS, dtype=torch.int32),
        max_seq_len=ROWS,
    )
    num_rows = num_groups * ROWS
    config: Any = SimpleNamespace(kv_cache_groups=[group])
    for _ in range(2):
        metadata = attention_metadata(
            views,
            [[group]],
            config,
            num_rows=num_rows,
            slot_mappings=torch.zeros(1, num_rows, dtype=torch.int64),
        )
        halves = torch.stack((2 * block_table, 2 * block_table + 1), dim=2).flatten(1)
        assert torch.equal(metadata["layer"].block_table_tensor, halves)
