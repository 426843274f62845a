"""Attention mask, corruption and decoding loop of the tiny models' block diffusion."""

import pytest
import torch

from vllm_dllm.training.diffusion import IGNORE, block_mask, corrupt_blocks, decode_blocks

MASK = 9
STOP = 8


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


class Scripted(torch.nn.Module):
    """Predicts ``position % 7``, or the stop token at ``stop_at``, less surely towards the end of a block."""

    def __init__(self, stop_at):
        super().__init__()
        self.stop_at = stop_at
        self.lm_head = torch.nn.Linear(1, 1)
        self.seen = []

    def forward(self, input_ids, positions, mask, rows):
        self.seen.append(input_ids.clone())
        positions = positions.expand_as(input_ids)[rows]
        token = torch.where(positions == self.stop_at, STOP, positions % 7)
        logits = torch.zeros(len(token), 10)
        logits[torch.arange(len(token)), token] = 6.0 - positions % 4
        logits[:, MASK] = 100.0  # the loop must never choose the mask itself
        return logits


def decode(network, prompts, threshold):
    return decode_blocks(
        network,
        prompts,
        length=12,
        block_length=4,
        mask_token_id=MASK,
        stop_token_ids=[STOP],
        threshold=threshold,
    )


def test_static_decoding_spends_one_forward_per_masked_position():
    decoded = decode(Scripted(stop_at=99), [[1, 1], [1, 1, 1, 1, 1]], None)
    assert decoded.tokens == [[2, 3, 4, 5, 6, 0, 1, 2, 3, 4], [5, 6, 0, 1, 2, 3, 4]]
    assert decoded.forwards == [10, 7]


def test_threshold_decoding_unmasks_all_confident_positions_at_once():
    # Softmax peaks of logits 6, 5, 4, 3 against eight zeros: 0.98, 0.95, 0.87, 0.72.
    decoded = decode(Scripted(stop_at=99), [[]], 0.9)
    assert decoded.tokens == [[p % 7 for p in range(12)]]
    assert decoded.forwards == [9]
    assert decode(Scripted(stop_at=99), [[]], 0.8).forwards == [6]
    assert decode(Scripted(stop_at=99), [[]], 0.0).forwards == [3]


def test_decoding_ends_after_the_block_with_a_stop_token_for_each_prompt_alone():
    decoded = decode(Scripted(stop_at=5), [[1], [1] * 9], None)
    assert decoded.tokens == [[1, 2, 3, 4, STOP, 6, 0], [2, 3, 4]]
    assert decoded.forwards == [7, 3]


def test_a_stop_token_inside_the_prompt_does_not_end_decoding():
    decoded = decode(Scripted(stop_at=99), [[STOP, 1]], None)
    assert decoded.forwards == [10]


def test_later_blocks_are_not_shown_to_the_network():
    network = Scripted(stop_at=99)
    decode(network, [[1, 1]], 0.0)
    assert [tuple(ids.shape) for ids in network.seen] == [(1, 4), (1, 8), (1, 12)]


def test_confidences_of_every_masked_position_are_reported():
    decoded = decode(Scripted(stop_at=99), [[]], None)
    assert len(decoded.confidences) == 3 * (4 + 3 + 2 + 1)
    assert float(decoded.confidences.max()) == pytest.approx(torch.tensor([6.0] + [0.0] * 8).softmax(0)[0].item())
