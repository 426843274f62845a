"""Autoregressive models: next-token training and greedy decoding, both with full forwards and causal attention."""

import sys

import torch

from vllm_dllm.training.diffusion import IGNORE, Decoded, TrainingBatch
from vllm_dllm.training.network import Network

_ROWS_PER_FORWARD = 1 << 15


def causal_mask(length: int, device: torch.device | None = None) -> torch.Tensor:
    """Every row sees itself and the rows before it: ``[1, length, length]`` bool."""
    return torch.ones(1, length, length, dtype=torch.bool, device=device).tril()


def next_tokens(
    clean: torch.Tensor,
    trainable: torch.Tensor,
    window_start: torch.Tensor,
    *,
    window_length: int,
    block_length: int,
    mask_token_id: int | None,
    generator: torch.Generator,
) -> TrainingBatch:
    """Each trainable token from those before it. Nothing is corrupted.

    Args:
        clean: ``[B, L]`` int64.
        trainable: ``[B, L]`` bool, tokens that are predicted; not the first.
        window_start, window_length, block_length, mask_token_id, generator: of diffusion, not used.
    """
    length = clean.shape[1]
    return TrainingBatch(
        input_ids=clean,
        positions=torch.arange(length, device=clean.device).unsqueeze(0),
        mask=causal_mask(length, clean.device),
        targets=clean.masked_fill(~trainable, IGNORE).roll(-1, dims=1),
    )


@torch.inference_mode()
def next_token_logits(network: Network, prefixes: list[list[int]]) -> torch.Tensor:
    """Logits of the token that follows each prefix: ``[n, vocab_size]`` float32."""
    device = network.lm_head.weight.device
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prefix) for prefix in prefixes], batch_first=True)
    length = ids.shape[1]
    positions = torch.arange(length).unsqueeze(0)
    # Padding is behind the rows that are read, which do not see it.
    rows = positions == torch.tensor([len(prefix) - 1 for prefix in prefixes]).unsqueeze(1)
    mask = causal_mask(length, device)
    size = max(1, _ROWS_PER_FORWARD // length)
    return torch.cat(
        [
            network(some.to(device), positions.to(device), mask, wanted.to(device)).float()
            for some, wanted in zip(ids.split(size), rows.split(size), strict=True)
        ]
    )


@torch.inference_mode()
def decode_greedily(
    network: Network,
    prompts: list[list[int]],
    *,
    stop_token_ids: list[int],
    length: int | None = None,
    max_tokens: int | None = None,
    block_length: int = 1,
    mask_token_id: int | None = None,
    threshold: float | None = None,
) -> Decoded:
    """Decode greedily without a cache: the plain loop that a served model has to agree with.

    Args:
        prompts: token ids of each prompt.
        stop_token_ids: decoding of a prompt ends with the first of them.
        length: prompt and answer together end here at the latest.
        max_tokens: the answer ends here at the latest.
        block_length, mask_token_id, threshold: of diffusion, not used.
    """
    texts = [list(prompt) for prompt in prompts]
    ends = [min(length or sys.maxsize, len(prompt) + (max_tokens or sys.maxsize)) for prompt in prompts]
    running = [index for index, text in enumerate(texts) if len(text) < ends[index]]
    confidences: list[torch.Tensor] = []
    while running:
        confidence, token = next_token_logits(network, [texts[index] for index in running]).softmax(-1).max(-1)
        confidences.append(confidence)
        for index, chosen in zip(running, token.tolist(), strict=True):
            texts[index].append(chosen)
        running = [i for i in running if texts[i][-1] not in stop_token_ids and len(texts[i]) < ends[i]]
    answers = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    return Decoded(
        tokens=answers, forwards=[len(answer) for answer in answers], confidences=torch.cat(confidences).cpu()
    )
