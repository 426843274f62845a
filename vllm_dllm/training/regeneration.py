"""Block regeneration (DEER, arXiv 2512.15176, Section 4.5, Figure 5): a drafter completes an answer's end again."""

import torch
from torch.nn import functional as F

from vllm_dllm.training.alignment import DrafterIds, Draw, lay_out
from vllm_dllm.training.network import Network
from vllm_dllm.training.objectives import IGNORE


@torch.inference_mode()
def complete(
    drafter: Network, ids: DrafterIds, prefix: list[int], k: int, temperature: float, generator: torch.Generator
) -> list[int]:
    """The k tokens behind a prefix, each by itself, from one forward over prefix, k masks and [SEP].

    Args:
        temperature: 0: the likeliest tokens.
    """
    tokens = F.pad(torch.tensor(prefix), (0, k))
    masked = torch.arange(len(tokens)) >= len(prefix)
    batch = lay_out([[Draw(tokens, masked, masked.float())]], ids)
    logits = drafter(batch.input_ids, batch.positions, batch.mask, batch.targets != IGNORE).float()
    logits[:, ids.excluded] = -torch.inf
    if temperature == 0:
        return logits.argmax(-1).tolist()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(1).tolist()


def regenerate(
    drafter: Network,
    ids: DrafterIds,
    prompt: list[int],
    answer: list[int],
    masked: list[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Complete an answer again and again: the answer after each round.

    Args:
        masked: of each round, how many tokens at the end of the answer that the round before left are masked and
            completed; at least 1 and at most all of them.
    """
    generator = torch.Generator().manual_seed(seed)
    rounds = []
    for k in masked:
        kept = answer[: len(answer) - k]
        answer = kept + complete(drafter, ids, prompt + kept, k, temperature, generator)
        rounds.append(answer)
    return rounds
