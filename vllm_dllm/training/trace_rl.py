"""TraceRL: a policy gradient over the denoising steps that an answer really took.

Source: Wang et al., Revolutionizing Reinforcement Learning Framework for Diffusion Large Language Models (TraDo, arXiv
2509.06949). A trajectory is an answer with its step map: which denoising step unmasked each token. The policy's
probability of a step is that of the tokens that the step unmasked, seen from the block as the step found it.

Blocks are anchored at position 0 and row ``i`` predicts position ``i``, as in SDAR.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_dllm.training.network import Network
from vllm_dllm.training.objectives import IGNORE, TrainingBatch, block_mask


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """An answer and how it came about.

    Attributes:
        prompt: token ids.
        tokens: token ids of the answer.
        steps: of each token, the denoising step of its block that unmasked it: ``StepMap.steps``.
        log_probs: of each token, under the policy that answered, when it was unmasked.
        learned: so many tokens from the front have a loss. The others are only seen, such as those behind a stop token.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    steps: Sequence[int]
    log_probs: Sequence[float]
    learned: int

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.steps) == len(self.log_probs):
            raise ValueError(
                f"{len(self.tokens)} tokens have {len(self.steps)} steps and {len(self.log_probs)} log-probabilities: "
                "each token must have one of either"
            )
        if not 0 < self.learned <= len(self.tokens):
            raise ValueError(f"learned={self.learned} of {len(self.tokens)} tokens: it must be 1 to all of them")
        if min(self.steps) < 0:
            raise ValueError("a token of step -1 comes from a prefill or a commit: shifted logits are not supported")

    def num_states(self, block_length: int) -> int:
        """Denoising steps that unmasked a learned token: the states of ``training_states`` with ``shrink=1``."""
        blocks = ((len(self.prompt) + index) // block_length for index in range(self.learned))
        return len(set(zip(blocks, self.steps, strict=False)))


def group_advantages(rewards: Tensor) -> Tensor:
    """Rewards [prompts, answers] less their mean over the answers of a prompt, over their deviation (GRPO)."""
    if rewards.shape[1] < 2:
        raise ValueError(
            f"rewards of shape {[*rewards.shape]}: a prompt needs two answers, or none is better than another"
        )
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)


def training_states(
    trajectories: Sequence[Trajectory], *, block_length: int, mask_token_id: int, pad_token_id: int, shrink: int = 1
) -> TrainingBatch:
    """All states of the trajectories in one batch: each text once clean, then each state of each of its blocks.

    A state is a block before one of its denoising steps: it shows the tokens of earlier steps, and masks. Its targets
    are the tokens that the step unmasked. With ``shrink=1`` the states are those that the engine forwarded. With
    ``shrink=4`` four steps in a row share the state before the first of them, which saves rows.

    The rows of a text are its clean blocks, and one noisy copy of a block for each of its states. Blocks behind the
    last learned token have no rows.

    Returns:
        A batch whose ``weights`` are the share of each target in its state: the sum over a state is 1.
    """
    rows = [_rows(each, block_length, mask_token_id, shrink) for each in trajectories]
    length = max(len(each[0]) for each in rows)
    # Padding is a view of its own, so that nothing else sees it.
    paddings = (pad_token_id, 0, -1, IGNORE, 0.0)
    input_ids, positions, views, targets, weights = (
        torch.stack([F.pad(column, (0, length - len(column)), value=padding) for column in columns])
        for columns, padding in zip(zip(*rows, strict=True), paddings, strict=True)
    )
    return TrainingBatch(
        input_ids=input_ids,
        positions=positions,
        mask=block_mask(positions // block_length, views),
        targets=targets,
        weights=weights,
    )


def _rows(trajectory: Trajectory, block_length: int, mask_token_id: int, shrink: int) -> tuple[Tensor, ...]:
    """Token ids, positions, views, targets and weights of one trajectory, each [rows]."""
    start, end = len(trajectory.prompt), len(trajectory.prompt) + trajectory.learned
    text = torch.tensor([*trajectory.prompt, *trajectory.tokens])
    # The last block may be cut short: its positions behind the answer are masks.
    clean = F.pad(text, (0, -len(text) % block_length), value=mask_token_id)
    steps = torch.full_like(clean, -1)
    steps[start : len(text)] = torch.tensor(trajectory.steps) // shrink
    steps[len(text) :] = torch.iinfo(steps.dtype).max
    positions = torch.arange(len(clean))
    learned = (positions >= start) & (positions < end)
    blocks = range(start // block_length, -(-end // block_length))
    # Only later blocks see a block's clean text.
    seen = positions < blocks[-1] * block_length
    view = torch.zeros_like(clean[seen])
    columns = [(clean[seen], positions[seen], view, view + IGNORE, view.float())]
    for block in blocks:
        own = slice(block * block_length, (block + 1) * block_length)
        for step in steps[own][learned[own]].unique():
            target = learned[own] & (steps[own] == step)
            columns.append(
                (
                    clean[own].masked_fill(steps[own] >= step, mask_token_id),
                    positions[own],
                    torch.full_like(clean[own], len(columns)),
                    clean[own].masked_fill(~target, IGNORE),
                    target / target.sum(),
                )
            )
    return tuple(torch.cat(column) for column in zip(*columns, strict=True))


def token_log_probs(network: Network, batch: TrainingBatch, *, mask_token_id: int, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [N] of the batch's N targets, row by row.

    The distribution is the engine's: after the temperature, and without the mask token, which is never drawn. An
    engine with ``--logprobs-mode processed_logprobs`` returns the same numbers.
    """
    rows = batch.targets != IGNORE
    logits = network(batch.input_ids, batch.positions, batch.mask, rows).float() / temperature
    logits[:, mask_token_id] = float("-inf")
    return logits.log_softmax(dim=1).gather(1, batch.targets[rows].unsqueeze(1)).squeeze(1)


def rollout_log_probs(trajectories: Sequence[Trajectory], batch: TrainingBatch) -> Tensor:
    """The trajectories' own log-probabilities [N] of the batch's N targets, in the order of `token_log_probs`.

    Args:
        batch: of the same trajectories, with ``shrink=1``: the engine knows the states of single steps only.
    """
    owners, rows = (batch.targets != IGNORE).nonzero(as_tuple=True)
    places = zip(owners.tolist(), batch.positions[owners, rows].tolist(), strict=True)
    return torch.tensor(
        [trajectories[owner].log_probs[place - len(trajectories[owner].prompt)] for owner, place in places]
    )


def trace_rl_loss(
    new: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, *, clip: float = 0.2, kl: float = 0.01
) -> Tensor:
    """TraceRL's loss: PPO's clipped ratio and a KL penalty, per token; every argument is [N].

    Args:
        new: log-probabilities under the policy that learns.
        old: log-probabilities under the policy that answered, without gradient.
        advantages: of the answer that each token belongs to.
        weights: a token's share in its state, divided by the number of states that the mean is over.
        clip: ratios beyond ``1 - clip`` and ``1 + clip`` give no more.
        kl: factor of the penalty, the estimator k3 of KL(new || old), which is never negative.
    """
    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    penalty = (old - new).exp() - 1 - (old - new)
    return -(weights * (surrogate - kl * penalty)).sum()
