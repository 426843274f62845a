"""Objective and plain decoding loop of the models with full attention."""

import pytest
import torch

from vllm_dllm.training.diffusion import IGNORE
from vllm_dllm.training.full_attention import (
    MIN_RATE,
    corrupt_responses,
    decode_windows,
)

MASK = 9
STOP = 8


def corrupted(shift=0, batch=400, seed=0):
    """Sequences of 12 tokens: a prompt of 3, a response of 5 or 7, then padding."""
    clean = torch.arange(12).remainder(8).repeat(batch, 1)
    ends = torch.where(torch.arange(batch) % 2 == 0, 8, 10)
    places = torch.arange(12)
    trainable = (places >= 3) & (places < ends.unsqueeze(1))
    result = corrupt_responses(
        clean,
        trainable,
        torch.zeros(batch, dtype=torch.long),
        window_length=0,
        block_length=1,
        mask_token_id=MASK,
        generator=torch.Generator().manual_seed(seed),
        shift=shift,
    )
    return result, clean, trainable


def test_only_responses_are_masked_and_only_masked_tokens_carry_a_loss():
    batch, clean, trainable = corrupted()
    masked = batch.input_ids == MASK
    assert masked.any()
    assert not (masked & ~trainable).any()
    assert torch.equal(batch.input_ids[~masked], clean[~masked])
    assert torch.equal(batch.targets[masked], clean[masked])
    assert (batch.targets[~masked] == IGNORE).all()


def test_shifted_targets_stand_one_row_to_the_left_of_their_masks():
    plain, _, _ = corrupted()
    shifted, _, _ = corrupted(shift=1)
    assert torch.equal(shifted.input_ids, plain.input_ids)
    assert torch.equal(shifted.targets[:, :-1], plain.targets[:, 1:])
    assert (shifted.targets[:, -1] == IGNORE).all()


def test_rates_are_uniform_and_spread_evenly_over_a_batch():
    batch, _, trainable = corrupted(batch=400)
    sizes = trainable.sum(1)
    rates = 1 / (batch.weights[:, 0] * sizes * 400)
    assert rates.min() >= MIN_RATE
    # One rate in each of 400 strata; a batch of independent draws would miss some.
    assert torch.histc(rates, bins=20, min=0, max=1).tolist() == pytest.approx([20] * 20, abs=1)
    shares = (batch.input_ids == MASK).sum(1) / sizes
    high, low = rates > 0.8, rates < 0.2
    assert shares[high].mean() == pytest.approx(0.9, abs=0.05)
    assert shares[low].mean() == pytest.approx(0.1, abs=0.05)


def test_weights_make_the_loss_an_unbiased_mean_over_response_tokens():
    # With a cross-entropy of 1 everywhere the loss is 1 in expectation, for short and long responses alike.
    short, long = [], []
    for seed in range(30):
        batch, _, _ = corrupted(seed=seed)
        terms = (batch.weights * (batch.targets != IGNORE)).sum(1) * 400
        short.append(terms[0::2].mean())
        long.append(terms[1::2].mean())
    assert torch.stack(short).mean() == pytest.approx(1, abs=0.04)
    assert torch.stack(long).mean() == pytest.approx(1, abs=0.04)


def test_every_row_sees_the_prompt_and_the_response_and_nobody_the_padding():
    batch, _, trainable = corrupted(batch=4)
    for mask, row in zip(batch.mask, trainable, strict=True):
        end = int(row.nonzero().max()) + 1
        assert mask[:, :end].all()
        assert not mask[:, end:].any()


class Scripted(torch.nn.Module):
    """Predicts ``position % 7``, or the stop token at ``stop_at``, more surely the further left."""

    def __init__(self, stop_at=99, shift=0):
        super().__init__()
        self.stop_at, self.shift = stop_at, shift
        self.lm_head = torch.nn.Linear(1, 1)
        self.seen = []

    def forward(self, input_ids, positions, mask, rows):
        self.seen.append(input_ids.clone())
        position = (positions.expand_as(input_ids) + self.shift)[rows]
        token = torch.where(position == self.stop_at, STOP, position % 7)
        logits = torch.zeros(len(token), 10)
        logits[torch.arange(len(token)), token] = 8.0 - position / 4
        logits[:, MASK] = 100.0  # the loop must never choose the mask itself
        return logits


def windows(network, prompts, threshold=None, stops=(), **kwargs):
    return decode_windows(
        network,
        prompts,
        length=13,
        block_length=4,
        mask_token_id=MASK,
        stop_token_ids=list(stops),
        threshold=threshold,
        **kwargs,
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_windows_begin_at_the_end_of_each_prompt(shift):
    decoded = windows(Scripted(shift=shift), [[1, 1], [1, 1, 1, 1, 1]], shift=shift)
    assert decoded.tokens == [[2, 3, 4, 5, 6, 0, 1, 2], [5, 6, 0, 1, 2, 3, 4, 5]]
    assert decoded.forwards == [8, 8]


def test_steps_unmask_as_many_tokens_as_asked_in_each_block():
    assert windows(Scripted(), [[1, 1]], tokens_per_step=2).forwards == [4]
    assert windows(Scripted(), [[1, 1]], tokens_per_step=3).forwards == [4]
    assert windows(Scripted(), [[1, 1]], tokens_per_step=4).forwards == [2]


def test_a_threshold_unmasks_what_exceeds_it_and_at_least_one():
    assert windows(Scripted(), [[1, 1]], threshold=0.0).forwards == [2]
    assert windows(Scripted(), [[1, 1]], threshold=1.0).forwards == [8]


def test_the_whole_window_is_in_every_forward():
    network = Scripted()
    windows(network, [[1, 1]], threshold=0.0)
    assert [ids.tolist() for ids in network.seen] == [[[1, 1] + [MASK] * 8], [[1, 1, 2, 3, 4, 5] + [MASK] * 4]]


def test_decoding_ends_after_the_block_with_a_stop_token_for_each_prompt_alone():
    decoded = windows(Scripted(stop_at=4), [[STOP, 1], [1] * 5], stops=[STOP])
    assert decoded.tokens == [[2, 3, STOP, 5], [5, 6, 0, 1, 2, 3, 4, 5]]
    assert decoded.forwards == [4, 8]


def test_prompts_that_leave_no_room_are_refused():
    with pytest.raises(ValueError, match="prompts of up to 10 tokens leave no block within 13"):
        windows(Scripted(), [[1] * 10])
