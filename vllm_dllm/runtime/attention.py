"""vLLM's attention metadata for the views of a plan."""

import itertools
from typing import Any

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
    most: int = 0,
) -> dict[str, Any]:
    """Attention metadata by layer: every group of rows is a request of its own.

    Args:
        slot_mappings: [K/V cache groups, rows] int64.
        most: groups of the largest step, where CUDA graphs keep addresses.
    """
    make_room(views, attn_groups, most)
    starts = views.query_start_loc
    # No seq_lens_cpu_upper_bound: FlashInfer takes that bound for the lengths themselves, which only the device knows.
    metadata = build_attn_metadata(
        attn_groups=attn_groups,
        num_reqs=len(starts) - 1,
        num_tokens=num_rows,
        query_start_loc_gpu=views.query_start_loc_on_device,
        query_start_loc_cpu=torch.from_numpy(starts),
        max_query_len=int((starts[1:] - starts[:-1]).max()),
        seq_lens=views.seq_lens,
        max_seq_len=views.max_seq_len,
        block_tables=views.block_tables,
        slot_mappings=slot_mappings,
        kv_cache_config=kv_cache_config,
        causal=views.causal,
    )
    for group in itertools.chain.from_iterable(attn_groups):
        read_in_one_piece(metadata[group.layer_names[0]])
    return metadata


def read_in_one_piece(metadata: Any) -> None:
    """Have attention read the K/V of a group of rows from end to end.

    Where a step has few groups, FlashAttention and Triton's attention divide the K/V of each among multiprocessors and
    add up what each of them finds. The number of pieces depends on the number of groups, so the last bits of a request
    would depend on its neighbours, its drafts and the padding of CUDA graphs.

    Args:
        metadata: of a backend's layers; changed in place. FlashAttention 3, which is for drafters only, has counted the
            pieces already where its metadata has a schedule, and keeps them.
    """
    if hasattr(metadata, "max_num_splits") and metadata.scheduler_metadata is None:
        metadata.max_num_splits = 1
    if hasattr(metadata, "seq_threshold_3D"):
        # With more groups than this one, Triton's attention reads in one piece.
        metadata.seq_threshold_3D = 0


def make_room(views: Views, attn_groups: list[list[AttentionGroup]], most: int) -> None:
    """Enlarge vLLM's tables of kernel blocks where a step has more groups than requests can run, or wider tables.

    A backend has such a table if its kernels split the pages of the K/V cache. CUDA graphs keep the table's address, so
    that the first step makes it as large as any step needs.
    """
    for block_table, of_cache in zip(views.block_tables, attn_groups, strict=True):
        num_groups, pages = max(len(block_table), most), block_table.shape[1]
        for group in of_cache:
            table = group.kernel_block_table
            if table is None:
                continue
            assert group.kernel_block_size is not None
            width = pages * (group.kv_cache_spec.block_size // group.kernel_block_size)
            if table.shape[1] < num_groups or table.shape[2] < width:
                rows, columns = max(table.shape[1], num_groups), max(table.shape[2], width)
                group.kernel_block_table = table.new_zeros(table.shape[0], rows, columns)
