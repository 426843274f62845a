"""The bookkeeping of a step on CPU is that of vLLM's Triton kernels."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import FusedStagedWriter, StagedWriteTensor

from tests.engine.cpu.launches import LAUNCHES, assert_same, run_both, run_both_methods
from vllm_dllm.cpu import batch as ours

CPU = torch.device("cpu")
MAX_REQS, MAX_LEN, MAX_TOKENS, VOCAB, DRAFTS = 6, 96, 256, 50, 8


@dataclass
class Batch:
    """A random batch: prefills that end, chunked prefills, decodes with and without drafts."""

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor
    num_computed: torch.Tensor
    prefill_len: torch.Tensor
    seq_lens: torch.Tensor
    all_token_ids: torch.Tensor
    total_len: torch.Tensor
    bonus: int

    @property
    def num_reqs(self) -> int:
        return len(self.idx_mapping)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[self.num_reqs])

    @property
    def num_logits(self) -> int:
        return int(self.cu_num_logits[self.num_reqs])


def random_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    num_reqs = int(rng.integers(1, MAX_REQS + 1))
    bonus = int(seed % 2)  # diffusion models sample no bonus token
    slots = rng.permutation(MAX_REQS)[:num_reqs]
    prefill_len = rng.integers(1, 40, MAX_REQS)
    num_computed = np.zeros(MAX_REQS, dtype=np.int64)
    query_lens, num_logits = [], []
    for slot in slots:
        kind = rng.choice(["chunk", "last chunk", "plain decode", "draft decode"])
        drafts = int(rng.integers(1, DRAFTS + 1))
        if kind == "chunk":
            prefill_len[slot] = rng.integers(10, 40)
            num_computed[slot] = rng.integers(0, prefill_len[slot] - 5)
            query_lens.append(int(rng.integers(1, 5)))
            num_logits.append(1)
        elif kind == "last chunk":
            num_computed[slot] = rng.integers(0, prefill_len[slot])
            query_lens.append(int(prefill_len[slot] - num_computed[slot]))
            num_logits.append(1)
        else:
            num_computed[slot] = prefill_len[slot] + rng.integers(0, 20)
            rows = bonus + (drafts if kind == "draft decode" or not bonus else 0)
            query_lens.append(rows)
            num_logits.append(rows)
    computed = torch.tensor(num_computed, dtype=torch.int32)
    idx_mapping = torch.tensor(slots, dtype=torch.int64)
    # Entries after the batch repeat the last one, as vLLM pads them.
    starts = np.full(MAX_REQS + 1, sum(query_lens), dtype=np.int32)
    starts[: num_reqs + 1] = np.cumsum([0, *query_lens])
    return Batch(
        idx_mapping=idx_mapping,
        query_start_loc=torch.from_numpy(starts),
        cu_num_logits=torch.tensor(np.cumsum([0, *num_logits]), dtype=torch.int32),
        num_computed=computed,
        prefill_len=torch.tensor(prefill_len, dtype=torch.int32),
        seq_lens=computed[idx_mapping] + torch.tensor(query_lens, dtype=torch.int32),
        all_token_ids=torch.from_numpy(rng.integers(0, VOCAB, (MAX_REQS, MAX_LEN), dtype=np.int32)),
        total_len=torch.tensor(num_computed + 1, dtype=torch.int32),
        bonus=bonus,
    )


@pytest.fixture(params=range(12))
def batch(request: pytest.FixtureRequest) -> Batch:
    return random_batch(request.param)


def integers(seed: int, *size: int, high: int = VOCAB, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(high, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_prompt_tokens_and_their_lookahead_are_copied_as_by_triton(monkeypatch, batch, lookahead):
    assert_same(
        *run_both(
            monkeypatch,
            "_prepare_prefill_inputs_kernel",
            "prepare_prefill_inputs",
            integers(1, MAX_TOKENS, dtype=torch.int32),
            integers(2, lookahead, MAX_REQS, dtype=torch.int32),
            batch.idx_mapping,
            batch.query_start_loc,
            batch.all_token_ids,
            batch.prefill_len,
            batch.num_computed,
        )
    )


def test_positions_and_padded_sequence_lengths_are_those_of_triton(monkeypatch, batch):
    assert_same(
        *run_both(
            monkeypatch,
            "_prepare_pos_seq_lens_kernel",
            "prepare_pos_seq_lens",
            batch.idx_mapping,
            batch.query_start_loc,
            batch.num_computed,
            integers(1, MAX_TOKENS),
            integers(2, MAX_REQS, dtype=torch.int32),
        )
    )


def test_sampled_and_draft_tokens_are_combined_as_by_triton(monkeypatch, batch):
    assert_same(
        *run_both(
            monkeypatch,
            "_combine_sampled_and_draft_tokens_kernel",
            "combine_sampled_and_draft_tokens",
            integers(1, MAX_TOKENS, dtype=torch.int32),
            batch.idx_mapping,
            integers(2, MAX_REQS, 1),
            batch.query_start_loc,
            batch.seq_lens,
            batch.prefill_len,
            integers(3, MAX_REQS, DRAFTS),
            batch.cu_num_logits,
            batch.num_logits,
            num_new_sampled_tokens=batch.bonus,
        )
    )


def test_the_mapping_of_requests_is_expanded_to_logits_rows_as_by_triton(monkeypatch, batch):
    assert_same(
        *run_both(
            monkeypatch,
            "_expand_idx_mapping_kernel",
            "expand_idx_mapping",
            batch.idx_mapping,
            batch.num_logits,
            batch.cu_num_logits,
            DRAFTS + 1,
        )
    )


def test_sampled_and_rejected_rows_are_counted_as_by_triton(monkeypatch, batch):
    num_logits = batch.cu_num_logits.diff()
    assert_same(
        *run_both(
            monkeypatch,
            "_get_num_sampled_and_rejected_kernel",
            "get_num_sampled_and_rejected",
            (integers(1, batch.num_reqs, high=99) % (num_logits + 1)).int(),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            batch.prefill_len,
        )
    )


@pytest.mark.parametrize("counts_output", [True, False])
@pytest.mark.parametrize("has_queries", [True, False])
def test_requests_advance_as_by_triton(monkeypatch, batch, counts_output, has_queries):
    idx_mapping = batch.idx_mapping.clone()
    idx_mapping[batch.num_reqs // 2] = -1  # vLLM filters rows this way
    assert_same(
        *run_both(
            monkeypatch,
            "_post_update_kernel",
            "post_update",
            idx_mapping,
            batch.num_computed,
            integers(1, MAX_REQS, 1),
            integers(2, MAX_REQS, VOCAB, dtype=torch.int32) if counts_output else None,
            integers(3, batch.num_reqs, DRAFTS + 1),
            integers(4, batch.num_reqs, high=DRAFTS + 2, dtype=torch.int32),
            integers(5, batch.num_reqs, high=DRAFTS + 1, dtype=torch.int32),
            batch.query_start_loc if has_queries else None,
            batch.all_token_ids,
            batch.total_len,
        )
    )


def test_tokens_past_the_token_table_are_counted_and_not_stored():
    token_ids, total_len = np.zeros((2, 4), dtype=np.int32), np.array([3, 0], dtype=np.int32)
    ours.post_update(
        idx_mapping=np.array([0]),
        num_computed_tokens=np.zeros(2, dtype=np.int32),
        last_sampled_tokens=np.zeros((2, 1), dtype=np.int64),
        output_bin_counts=None,
        sampled_tokens=np.array([[7, 8, 9]]),
        num_sampled=np.array([3], dtype=np.int32),
        num_rejected=np.array([0], dtype=np.int32),
        query_start_loc=None,
        all_token_ids=token_ids,
        total_len=total_len,
    )
    assert token_ids.tolist() == [[0, 0, 0, 7], [0, 0, 0, 0]]
    assert total_len.tolist() == [6, 0]


def random_block_tables(batch: Batch, block_sizes: list[int], enabled: list[bool]) -> BlockTables:
    widths = [MAX_LEN // size for size in block_sizes]
    tables = BlockTables(block_sizes, MAX_REQS, MAX_TOKENS, widths, CPU, slot_mapping_enabled=enabled)
    for group, table in enumerate(tables.block_tables):
        table.gpu.copy_(integers(group, *table.gpu.shape, high=1000))
        tables.input_block_tables[group].copy_(integers(9 + group, *table.gpu.shape, high=1000))
        tables.num_blocks.np[group] = integers(20 + group, MAX_REQS, high=widths[group] + 1).numpy()
    tables.num_blocks.copy_to_uva()
    tables.slot_mappings.fill_(77)
    return tables


@pytest.mark.parametrize(
    ("block_sizes", "enabled"), [([16], [True]), ([16, 32, 8], [True, True, True]), ([32, 16], [True, False])]
)
class TestBlockTables:
    def test_rows_of_the_batch_are_gathered_as_by_triton(self, batch, block_sizes, enabled):
        tables = random_block_tables(batch, block_sizes, enabled)
        (triton, theirs), (result, mine) = run_both_methods(
            "BlockTables.gather_block_tables", tables, batch.idx_mapping, MAX_REQS
        )
        assert_same(triton, result)
        assert_same(theirs.input_block_tables, mine.input_block_tables)

    def test_slots_are_those_of_triton(self, batch, block_sizes, enabled):
        tables = random_block_tables(batch, block_sizes, enabled)
        idx_mapping = batch.idx_mapping.clone()
        idx_mapping[batch.num_reqs // 2] = -1  # a padding request
        positions = integers(5, MAX_TOKENS, high=MAX_LEN)
        (triton, theirs), (result, mine) = run_both_methods(
            "BlockTables.compute_slot_mappings",
            tables,
            idx_mapping,
            batch.query_start_loc,
            positions,
            batch.num_tokens + 3,
        )
        assert_same(triton, result)
        assert_same(theirs.slot_mappings, mine.slot_mappings)


def test_a_row_past_the_block_table_stays_inside_the_last_page_of_its_request():
    tables = random_block_tables(random_batch(0), [16], [True])
    slots = ours.compute_slot_mappings(
        tables, np.array([2]), np.array([0, 3]), np.array([MAX_LEN - 1, MAX_LEN, 10 * MAX_LEN]), 4
    )
    last_page = int(tables.block_tables[0].gpu[2, -1])
    assert slots[0].tolist() == [last_page * 16 + 15, last_page * 16, last_page * 16, PAD_SLOT_ID]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("size", [(5, 12), 5])
def test_staged_rows_are_written_as_by_triton_and_in_order(dtype, size):
    def staged() -> StagedWriteTensor:
        tensor = StagedWriteTensor(size, dtype, CPU)
        tensor.gpu.fill_(3)
        if isinstance(size, int):
            tensor.stage_write_elem(4, 9)
            tensor.stage_write_elem(0, 8)
            tensor.stage_write_elem(4, 7)
        else:
            tensor.stage_write(4, 2, [1, 2, 3])
            tensor.stage_write(0, 0, range(12))
            tensor.stage_write(4, 3, [9])
        return tensor

    theirs, mine = staged(), staged()
    LAUNCHES["StagedWriteTensor.apply_write"].original(theirs)
    ours.apply_write(mine)
    assert_same(theirs.gpu, mine.gpu)
    assert mine._staged_write_indices == []


def test_an_empty_stage_changes_nothing():
    tensor = StagedWriteTensor((2, 2), torch.int32, CPU)
    ours.apply_write(tensor)
    assert tensor.gpu.tolist() == [[0, 0], [0, 0]]


def test_staged_rows_of_several_groups_are_written_as_by_triton():
    def staged() -> list[StagedWriteTensor]:
        tensors = [StagedWriteTensor((4, width), torch.int32, CPU) for width in (3, 8, 5)]
        tensors[0].stage_write(1, 0, [1, 2, 3])
        tensors[2].stage_write(3, 2, [4, 5])
        tensors[2].stage_write(0, 0, [6])
        return tensors

    theirs, mine = staged(), staged()
    writer = FusedStagedWriter(CPU, 12)
    addresses = torch.tensor([tensor.gpu.data_ptr() for tensor in theirs], dtype=torch.uint64)
    strides = torch.tensor([tensor.gpu.stride(0) for tensor in theirs])
    LAUNCHES["FusedStagedWriter.apply"].original(writer, theirs, addresses, strides)
    LAUNCHES["FusedStagedWriter.apply"].fallback(writer, mine, addresses, strides)
    assert_same([tensor.gpu for tensor in theirs], [tensor.gpu for tensor in mine])
