"""TraceRL's training states and loss, compared with a plain loop over denoising steps."""

import math
import random

import pytest
import torch

from tests.training.toys import qwen2_network
from vllm_dllm.training.network import Network
from vllm_dllm.training.objectives import IGNORE
from vllm_dllm.training.trace_rl import (
    Trajectory,
    group_advantages,
    rollout_log_probs,
    token_log_probs,
    trace_rl_loss,
    training_states,
)

BLOCK, MASK, PAD = 4, 31, 0
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8,
}  # fmt: skip


def some_trajectory(rng: random.Random, prompt_length: int, length: int, learned: int) -> Trajectory:
    """Random tokens, each block unmasked in a random number of steps."""
    steps: list[int] = []
    for block in range(prompt_length // BLOCK, -(-(prompt_length + length) // BLOCK)):
        size = min(prompt_length + length, (block + 1) * BLOCK) - max(prompt_length, block * BLOCK)
        own = [rng.randrange(size) for _ in range(size)]
        steps += [sorted(set(own)).index(step) for step in own]
    return Trajectory(
        prompt=[rng.randrange(30) for _ in range(prompt_length)],
        tokens=[rng.randrange(30) for _ in range(length)],
        steps=steps,
        log_probs=[-rng.uniform(1.0, 6.0) for _ in range(length)],
        learned=learned,
    )


def some_trajectories() -> list[Trajectory]:
    rng = random.Random(0)
    # A prompt shares the first block, or none; an answer fills its last block, or not; all is learned, or a part.
    lengths = ((3, 13, 13), (8, 8, 5), (5, 9, 9), (1, 2, 1), (6, 14, 3))
    return [some_trajectory(rng, *each) for each in lengths]


def slow_log_prob(network: Network, each: Trajectory, index: int, shrink: int, temperature: float) -> torch.Tensor:
    """Log-probability of one token: a forward over the text before its block and the block as the step found it."""
    text = [*each.prompt, *each.tokens]
    place = len(each.prompt) + index
    start = place // BLOCK * BLOCK
    first_step = each.steps[index] // shrink * shrink
    shown = list(text[:start])
    for position in range(start, start + BLOCK):
        answered = position - len(each.prompt)
        if position >= len(text) or (answered >= 0 and each.steps[answered] >= first_step):
            shown.append(MASK)
        else:
            shown.append(text[position])
    blocks = torch.arange(len(shown)) // BLOCK
    logits = network(
        torch.tensor([shown]),
        torch.arange(len(shown)).unsqueeze(0),
        (blocks.unsqueeze(1) >= blocks).unsqueeze(0),
        torch.ones(1, len(shown), dtype=torch.bool),
    )[place]
    logits = torch.cat((logits[:MASK], logits[MASK + 1 :])) / temperature
    return logits.log_softmax(0)[text[place]]


def slow_loss(
    network: Network, trajectories: list[Trajectory], advantages: list[float], shrink: int, temperature: float
) -> torch.Tensor:
    """TraceRL's objective, step by step: the mean over all steps of the mean over the tokens of a step."""
    of_steps = []
    for each, advantage in zip(trajectories, advantages, strict=True):
        steps: dict[tuple[int, int], list[int]] = {}
        for index in range(each.learned):
            key = (len(each.prompt) + index) // BLOCK, each.steps[index] // shrink
            steps.setdefault(key, []).append(index)
        for indices in steps.values():
            losses = []
            for index in indices:
                new, old = slow_log_prob(network, each, index, shrink, temperature), each.log_probs[index]
                ratio = torch.exp(new - old)
                gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
                losses.append(-(gain - 0.05 * (torch.exp(old - new) - 1 - (old - new))))
            of_steps.append(sum(losses) / len(losses))
    return sum(of_steps) / len(of_steps)


@pytest.mark.parametrize("shrink", [1, 2, 4])
def test_loss_and_gradient_are_those_of_a_loop_over_steps(shrink: int) -> None:
    torch.manual_seed(1)
    network, trajectories = qwen2_network(**SIZES), some_trajectories()
    for parameter in network.parameters():  # or every distribution is flat
        torch.nn.init.normal_(parameter, std=0.5)
    advantages = [1.0, -0.5, 0.25, -1.5, 0.75]
    batch = training_states(trajectories, block_length=BLOCK, mask_token_id=MASK, pad_token_id=PAD, shrink=shrink)
    rows = batch.targets != IGNORE
    assert rows.sum() == sum(each.learned for each in trajectories)
    assert batch.weights is not None
    if shrink == 1:
        assert batch.weights.sum().item() == pytest.approx(sum(each.num_states(BLOCK) for each in trajectories))
    weights = batch.weights[rows] / batch.weights.sum()
    new = token_log_probs(network, batch, mask_token_id=MASK, temperature=0.7)
    old = rollout_log_probs(trajectories, batch)
    of_rows = torch.tensor(advantages)[rows.nonzero()[:, 0]]
    loss = trace_rl_loss(new, old, of_rows, weights, clip=0.2, kl=0.05)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    expected = slow_loss(network, trajectories, advantages, shrink, temperature=0.7)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, list(network.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_ratio_beyond_the_clip_has_no_gradient() -> None:
    new = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    trace_rl_loss(new, torch.zeros(4), advantages, torch.ones(4), kl=0.0).backward()
    # Gains beyond the clip give no more; what a step made worse is still corrected.
    expected = [0.0, -math.exp(-0.5), math.exp(0.5), 0.0]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(expected)


def test_advantages_compare_the_answers_to_one_prompt() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]))
    assert advantages[0].tolist() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    assert advantages[1].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="a prompt needs two answers"):
        group_advantages(torch.ones(3, 1))


def test_a_step_map_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens have 1 steps"):
        Trajectory(prompt=[1], tokens=[2, 3], steps=[0], log_probs=[-1.0, -1.0], learned=2)
    with pytest.raises(ValueError, match="shifted logits"):
        Trajectory(prompt=[1], tokens=[2, 3], steps=[-1, 0], log_probs=[-1.0, -1.0], learned=2)
    with pytest.raises(ValueError, match="learned=3"):
        Trajectory(prompt=[1], tokens=[2, 3], steps=[0, 1], log_probs=[-1.0, -1.0], learned=3)
