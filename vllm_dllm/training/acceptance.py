"""How many drafts an autoregressive target accepts at temperature 0, with plain full forwards."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

from vllm_dllm.training.alignment import DrafterIds, Draw, lay_out
from vllm_dllm.training.autoregressive import next_token_logits
from vllm_dllm.training.data import TrainingError
from vllm_dllm.training.diffusion import IGNORE
from vllm_dllm.training.layouts import load_network, read_config
from vllm_dllm.training.network import Network


@torch.inference_mode()
def draft_tokens(drafter: Network, ids: DrafterIds, prefixes: list[list[int]], k: int) -> list[list[int]]:
    """The most likely k tokens behind each prefix, each by itself, from one forward over prefix, k masks and [SEP]."""
    draws = []
    for prefix in prefixes:
        tokens = F.pad(torch.tensor(prefix), (0, k))
        masked = torch.arange(len(tokens)) >= len(prefix)
        draws.append([Draw(tokens, masked, masked.float())])
    drafts = []
    for start in range(0, len(draws), _SEQUENCES_PER_FORWARD):
        batch = lay_out(draws[start : start + _SEQUENCES_PER_FORWARD], ids)
        logits = drafter(batch.input_ids, batch.positions, batch.mask, batch.targets != IGNORE).float()
        logits[:, ids.excluded] = -torch.inf
        drafts += logits.argmax(-1).unflatten(0, (-1, k)).tolist()
    return drafts


_SEQUENCES_PER_FORWARD = 64


def draft_one_by_one(drafter: Network, prefixes: list[list[int]], k: int) -> list[list[int]]:
    """The most likely k tokens behind each prefix, of an autoregressive drafter: k forwards."""
    texts = [list(prefix) for prefix in prefixes]
    for _ in range(k):
        for text, token in zip(texts, next_token_logits(drafter, texts).argmax(-1).tolist(), strict=True):
            text.append(token)
    return [text[-k:] for text in texts]


class Acceptance(NamedTuple):
    """Greedy speculation over several prompts.

    Attributes:
        tokens: of all answers.
        prompts: how many; each has a prefill, which gives the first token.
        histogram: ``[k + 1]``, rounds by how many drafts they accepted, up to the answers' ends.
    """

    tokens: int
    prompts: int
    histogram: list[int]

    @property
    def rounds(self) -> int:
        """Verifications of drafts."""
        return sum(self.histogram)

    @property
    def accepted(self) -> float:
        """Mean accepted drafts per round, tau without the target's own token."""
        return sum(count * rounds for count, rounds in enumerate(self.histogram)) / max(self.rounds, 1)

    @property
    def tokens_per_round(self) -> float:
        """Tokens behind the first ones, per round; a round that ends an answer may add no token of the target's."""
        return (self.tokens - self.prompts) / max(self.rounds, 1)

    @property
    def target_forwards_per_token(self) -> float:
        """Prefills included; plain decoding takes 1."""
        return (self.prompts + self.rounds) / max(self.tokens, 1)


Drafter = Callable[[list[list[int]], int], list[list[int]]]
"""k tokens for each prefix."""


def speculate(prompts: list[list[int]], answers: list[list[int]], drafter: Drafter, k: int) -> Acceptance:
    """Replay greedy speculation: the target's answers are known, so a draft is accepted where it equals them.

    As in vLLM, the target's first token comes from the prefill; each round drafts k tokens, and the target adds one of
    its own behind those that it accepts.
    """
    done = [min(1, len(answer)) for answer in answers]
    histogram = [0] * (k + 1)
    while running := [index for index, answer in enumerate(answers) if done[index] < len(answer)]:
        drafts = drafter([prompts[index] + answers[index][: done[index]] for index in running], k)
        for index, drafted in zip(running, drafts, strict=True):
            rest = answers[index][done[index] : done[index] + k]
            right = 0
            while right < len(rest) and drafted[right] == rest[right]:
                right += 1
            histogram[right] += 1
            done[index] += right + 1
    return Acceptance(sum(map(len, answers)), len(prompts), histogram)


def load_drafter(folder: Path, vocab_size: int) -> Drafter:
    """What drafts with the checkpoint in ``folder``: a diffusion drafter or an autoregressive model.

    Raises:
        TrainingError: its tokens are not the target's.
    """
    network = load_network(folder)
    if read_config(folder)["model_type"] == "qwen2":
        if network.config.vocab_size != vocab_size:
            raise TrainingError(f"{folder} has {network.config.vocab_size} rows, the target {vocab_size}")
        return partial(draft_one_by_one, network)
    return partial(draft_tokens, network, DrafterIds.of(folder))
