"""Attention mask and corruption of block diffusion."""

import torch

from vllm_dllm.tiny.objectives import corrupt_blocks
from vllm_dllm.training.objectives import IGNORE, block_mask

MASK = 9


def test_block_mask_lets_noisy_rows_see_their_block_and_clean_blocks_before_it():
    blocks = torch.tensor([[0, 0, 1, 1, 0, 1, 1]])
    views = torch.tensor([[0, 0, 0, 0, 1, 1, 2]])
    expected = torch.tensor(
        [
            # clean 0 0 1 1, noisy copy 1: 0 1, noisy copy 2: 1
            [1, 1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0, 0],
            [0, 0, 0, 0, 1, 0, 0],
            [1, 1, 0, 0, 0, 1, 0],
            [1, 1, 0, 0, 0, 0, 1],
        ],
        dtype=torch.bool,
    )
    assert torch.equal(block_mask(blocks, views)[0], expected)


def corrupted(seed=0):
    clean = torch.arange(8).repeat(64, 1)
    trainable = clean >= 3
    start = torch.full((64,), 2)
    batch = corrupt_blocks(
        clean,
        trainable,
        start,
        window_length=4,
        block_length=2,
        mask_token_id=MASK,
        generator=torch.Generator().manual_seed(seed),
    )
    return batch, clean, trainable


def test_the_clean_half_is_the_text_and_has_no_loss():
    batch, clean, _ = corrupted()
    assert torch.equal(batch.input_ids[:, :8], clean)
    assert (batch.targets[:, :8] == IGNORE).all()


def test_noisy_copies_repeat_the_positions_of_their_window():
    batch, _, _ = corrupted()
    assert batch.positions[5].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 2, 3, 4, 5]


def test_masked_rows_predict_their_own_token_and_visible_rows_nothing():
    batch, _, _ = corrupted()
    noisy, targets, positions = batch.input_ids[:, 8:], batch.targets[:, 8:], batch.positions[:, 8:]
    masked = noisy == MASK
    assert torch.equal(targets[masked], positions[masked])
    assert torch.equal(noisy[~masked], positions[~masked])
    assert (targets[~masked] == IGNORE).all()


def test_the_two_copies_mask_complementary_trainable_positions_and_never_the_prompt():
    batch, _, trainable = corrupted()
    first, second = (batch.input_ids[:, 8:] == MASK).split(4, dim=1)
    assert torch.equal(first ^ second, trainable[:, 2:6])
    assert not (first & second).any()
    assert first.any()
    assert second.any()


def test_masking_rates_vary_between_blocks():
    clean = torch.zeros(200, 32, dtype=torch.long)
    batch = corrupt_blocks(
        clean,
        torch.ones_like(clean, dtype=torch.bool),
        torch.zeros(200, dtype=torch.long),
        window_length=32,
        block_length=16,
        mask_token_id=MASK,
        generator=torch.Generator().manual_seed(0),
    )
    counts = (batch.input_ids[:, 32:64] == MASK).unflatten(1, (2, 16)).sum(2).flatten()
    # Counts of a uniform rate are uniform on 0..16; a fixed rate would leave the ends empty.
    assert (torch.bincount(counts, minlength=17) > 0).all()
