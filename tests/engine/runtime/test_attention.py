"""Attention metadata of groups of rows."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from tests.engine.harness import bundled, engine, runner_of
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


def metadata_of(group: AttentionGroup, block_table: torch.Tensor, *, seq_len: int = ROWS) -> dict[str, Any]:
    """Of a step whose groups have ``ROWS`` rows each, by layer."""
    num_groups = len(block_table)
    query_start_loc = np.arange(0, (num_groups + 1) * ROWS, ROWS, dtype=np.int32)
    views = Views(
        query_start_loc=query_start_loc,
        query_start_loc_on_device=torch.from_numpy(query_start_loc),
        block_tables=[block_table],
        seq_lens=torch.full((num_groups,), seq_len, dtype=torch.int32),
        max_seq_len=seq_len,
    )
    num_rows = num_groups * ROWS
    config: Any = SimpleNamespace(kv_cache_groups=[group])
    slot_mappings = torch.zeros(1, num_rows, dtype=torch.int64)
    return attention_metadata(views, [[group]], config, num_rows=num_rows, slot_mappings=slot_mappings)


@pytest.mark.parametrize(("num_groups", "pages"), [(1, 2), (5, 2), (2, 3), (9, 4)])
def test_more_groups_than_requests_have_their_kernel_blocks(num_groups: int, pages: int) -> None:
    group = group_of(max_num_seqs=2, width=4)
    block_table = torch.arange(num_groups * pages, dtype=torch.int32).view(num_groups, pages)
    for _ in range(2):
        metadata = metadata_of(group, block_table)
        halves = torch.stack((2 * block_table, 2 * block_table + 1), dim=2).flatten(1)
        assert torch.equal(metadata["layer"].block_table_tensor, halves)


def gpu_metadata(backend: type[AttentionBackend], flash_attention: int | None = None) -> dict[str, Any]:
    """What a backend for GPUs makes of a step with two groups, by the layers of an engine."""
    runner = runner_of(engine(bundled("sdar").checkpoint))
    ((own,),) = runner.attn_groups
    group = AttentionGroup(backend, own.layer_names, own.kv_cache_spec, 0)
    schedule = torch.zeros(9, dtype=torch.int32)
    with (
        mock.patch.object(flash_attn, "get_flash_attn_version", return_value=flash_attention),
        mock.patch.object(flash_attn, "get_scheduler_metadata", return_value=schedule, create=True),
    ):
        group.create_metadata_builders(runner.vllm_config, torch.device("cpu"))
        return metadata_of(group, torch.zeros(2, 64, dtype=torch.int32), seq_len=900)


@pytest.mark.parametrize("version", [2, 4])
def test_flash_attention_reads_in_one_piece_whatever_the_number_of_groups(version: int) -> None:
    metadata = gpu_metadata(FlashAttentionBackend, version)
    # 0 would have it choose.
    assert {each.max_num_splits for each in metadata.values()} == {1}


def test_flash_attention_3_keeps_the_pieces_of_its_schedule() -> None:
    metadata = gpu_metadata(FlashAttentionBackend, 3)
    assert {each.max_num_splits for each in metadata.values()} == {0}


def test_tritons_attention_reads_in_one_piece_whatever_the_number_of_groups() -> None:
    metadata = gpu_metadata(TritonAttentionBackend)
    # More groups are read in one piece.
    assert {each.seq_threshold_3D for each in metadata.values()} == {0}
