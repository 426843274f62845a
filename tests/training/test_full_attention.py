"""Objective of the models with full attention."""

import pytest
import torch

from vllm_dllm.tiny.objectives import corrupt_responses
from vllm_dllm.training.objectives import IGNORE, MIN_RATE

MASK = 9


def corrupted(shift=0, batch=400, seed=0):
    """Sequences of 12 tokens: a prompt of 3, a response of 5 or 7, then padding."""
    clean = torch.arange(12).remainder(8).repeat(batch, 1)
    ends = torch.where(torch.arange(batch) % 2 == 0, 8, 10)
    places = torch.arange(12)
    trainable = (places >= 3) & (places < ends.unsqueeze(1))
    result = corrupt_responses(
        clean,
        trainable,
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
