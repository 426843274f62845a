"""Bad words in a block that fills in any order."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.states import RequestState

_ANY = -1
"""Padding of shorter words at their front: matches whatever stands there."""


class BlockBadWords:
    """Keeps every bad word of a request out of its output.

    Autoregressive decoding forbids the last token of a word where the tokens before it stand. Here those may still be
    masked and be filled in later, or in the same step. So the last token is also held back where a mask could become
    the rest of the word. It can follow in a later step, when what stands before it is known to be something else.
    As in vLLM, a word counts only where all of it is output.
    """

    def __init__(self, max_num_reqs: int, device: torch.device):
        self.device = device
        self.num_words_np = np.zeros(max_num_reqs, dtype=np.int32)
        # [max_num_reqs, words, tokens] int32, padded with _ANY at the front; grows with the longest list seen.
        self.words = torch.full((max_num_reqs, 1, 1), _ANY, dtype=torch.int32, device=device)

    def add_request(self, slot: int, words: Sequence[Sequence[int]]) -> None:
        """Take the bad words, as token ids, of the request in ``slot``."""
        if self.num_words_np[slot] > len(words) == 0:
            # Beside a neighbour with bad words, those of every request are looked at.
            self.words[slot] = _ANY
        self.num_words_np[slot] = len(words)
        if not words:
            return
        more_words = max(0, len(words) - self.words.shape[1])
        more_tokens = max(0, max(len(word) for word in words) - self.words.shape[2])
        if more_words or more_tokens:
            self.words = pad(self.words, (more_tokens, 0, 0, more_words), value=_ANY)
        padded = np.full(self.words.shape[1:], _ANY, dtype=np.int32)
        for row, word in zip(padded, words, strict=False):
            row[-len(word) :] = word
        self.words[slot] = async_tensor_h2d(padded, device=self.device)

    def apply(
        self,
        logits: torch.Tensor,
        slots_np: np.ndarray,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        block_start: torch.Tensor,
        mask_token_id: int,
        req_states: RequestState,
    ) -> torch.Tensor:
        """Bar the last tokens of bad words from the rows where they could complete one.

        Args:
            logits: [n * K, vocab] fp32, K rows of each of n requests; changed in place.
            slots_np, slots: [n] slots of the requests.
            positions: [n, K] int64: position that each row predicts.
            tokens: [n, L] int64: current block of each request.
            block_start: [n] int64: its position.
        """
        num_words = int(self.num_words_np[slots_np].max())
        if num_words == 0:
            return logits
        words = self.words[slots, :num_words].unsqueeze(1)  # [n, 1, words, tokens]
        at = positions.unsqueeze(2)  # [n, K, 1]
        before = at - torch.arange(self.words.shape[2] - 1, 0, -1, device=self.device)  # [n, K, tokens - 1]

        offset = (before - block_start.view(-1, 1, 1)).clamp(0, tokens.shape[1] - 1)
        in_block = tokens.unsqueeze(1).expand(-1, at.shape[1], -1).gather(2, offset)
        # The block may reach beyond the longest text, and a block that nobody waits for any more may begin beyond it.
        all_tokens = req_states.all_token_ids.gpu
        in_text = before.minimum(block_start.view(-1, 1, 1) - 1).clamp(0, all_tokens.shape[1] - 1)
        text = all_tokens[slots.view(-1, 1, 1), in_text]
        known = torch.where(before >= block_start.view(-1, 1, 1), in_block, text)
        is_output = before >= req_states.prompt_len.gpu[slots].view(-1, 1, 1)

        prefix = words[..., :-1]
        could_match = is_output.unsqueeze(2) & ((known.unsqueeze(2) == prefix) | (known == mask_token_id).unsqueeze(2))
        completes = ((prefix == _ANY) | could_match).all(dim=3)  # [n, K, words]
        last = words[..., -1].expand_as(completes)
        completes &= last != _ANY
        penalty = torch.zeros_like(completes, dtype=logits.dtype).masked_fill_(completes, -torch.inf)
        rows = logits.view(len(slots_np), -1, logits.shape[1])
        return rows.scatter_add_(2, last.clamp(min=0).long(), penalty).view_as(logits)
