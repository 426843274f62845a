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

    Autoregressive decoding forbids the last token of a word where the tokens before it stand. Here tokens fill in in
    any order, and some are masked again or edited. So a token of a word is barred where the word *may come to stand*:
    where each other place of the word has its token, or is masked and may still get it.

    - The last token of a word is barred wherever the word may come to stand. It can follow in a later step, when what
      stands before it is known to be something else.
    - Any other token is barred where the last token stands already (FeF masks positions again).
    - An edit replaces one token while others of the block may be replaced, too. So it brings in a token of a word only
      where tokens before the block rule the word out.

    As in vLLM, a word counts only where all of it is output.
    """

    def __init__(self, max_num_reqs: int, device: torch.device):
        self.device = device
        self.num_words_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.longest_np = np.zeros(max_num_reqs, dtype=np.int32)  # tokens of each request's longest word
        self.edits_np = np.zeros(max_num_reqs, dtype=bool)
        # [max_num_reqs, words, tokens] int32, padded with _ANY at the front; grows with the longest list seen.
        self.words = torch.full((max_num_reqs, 1, 1), _ANY, dtype=torch.int32, device=device)
        self.edits = torch.zeros(max_num_reqs, dtype=torch.bool, device=device)

    def add_request(self, slot: int, words: Sequence[Sequence[int]], *, edits: bool) -> None:
        """Take the bad words, as token ids, of the request in ``slot``, and whether the request edits tokens."""
        if self.num_words_np[slot] > len(words) == 0:
            # Beside a neighbour with bad words, those of every request are looked at.
            self.words[slot] = _ANY
        self.num_words_np[slot] = len(words)
        self.longest_np[slot] = max(map(len, words), default=0)
        self.edits_np[slot] = edits and len(words) > 0
        if not words:
            return
        self.edits[slot] = edits
        more_words = max(0, len(words) - self.words.shape[1])
        more_tokens = max(0, int(self.longest_np[slot]) - self.words.shape[2])
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
        window: torch.Tensor,
        window_start: torch.Tensor,
        mask_token_id: int,
        req_states: RequestState,
    ) -> torch.Tensor:
        """Bar tokens of bad words from the rows where the words may come to stand.

        Args:
            logits: [n * K, vocab] fp32, K rows of each of n requests; changed in place.
            slots_np, slots: [n] slots of the requests.
            positions: [n, K] int64: position that each row predicts: in the window, or the one behind it.
            window: [n, W] int64: the tokens that each request's rows saw.
            window_start: [n] int64: position of the window's first column.
        """
        num_words = int(self.num_words_np[slots_np].max())
        if num_words == 0:
            return logits
        longest = int(self.longest_np[slots_np].max())
        words = self.words[slots, :num_words, -longest:].unsqueeze(1)  # [n, 1, words, M]
        num_places = words.shape[3]
        # Where a word may begin: S places, from where it only ends in the window's first column.
        first = window_start - (num_places - 1)
        known, is_output = self._text_around(slots, first, num_places, window, mask_token_id, req_states)
        is_masked = known == mask_token_id

        def at_places(values: torch.Tensor) -> torch.Tensor:
            """[n, S, 1, M] of the values [n, T] of positions."""
            return values.unfold(1, num_places, 1).unsqueeze(2)

        fits = at_places(is_output) & ((at_places(known) == words) | at_places(is_masked))
        misfits = (~fits & (words != _ANY)).sum(dim=3)  # [n, S, words]

        place = torch.arange(num_places, device=self.device)
        # [n, K]: which of the known positions a row predicts. Rows of `linear_spec`, which has no bad words, stand in
        # front of their windows.
        row = (positions - first.unsqueeze(1)).clamp(min=0)
        begin = (row.unsqueeze(2) - place).clamp(0, misfits.shape[1] - 1)  # [n, K, M]
        requests = torch.arange(len(words), device=self.device).view(-1, 1, 1)
        token = words.transpose(2, 3)  # [n, 1, M, words]
        own = known.gather(1, row).view(*row.shape, 1, 1)
        of_others = misfits[requests, begin] - ((own != token) & (own != mask_token_id)).int()
        is_last = place == num_places - 1
        last = is_masked[:, num_places - 1 :]  # [n, S]: of the last place of a word that begins there
        is_barred = (of_others == 0) & (is_last | ~last[requests, begin]).unsqueeze(3)
        if self.edits_np[slots_np].any():
            in_window = torch.arange(known.shape[1], device=self.device) - (num_places - 1)
            in_window = ((in_window >= 0) & (in_window < window.shape[1])).expand_as(known)
            fits_edited = fits | (at_places(is_output & in_window))
            fits_edited &= at_places(in_window)[..., -1:]
            may_stand = (fits_edited | (words == _ANY)).all(dim=3)
            edited = may_stand[requests, begin] & (own != token)
            is_edit = self.edits[slots].view(-1, 1, 1, 1) & (own != mask_token_id)
            is_barred = torch.where(is_edit, edited, is_barred)
        is_barred &= token != _ANY
        penalty = torch.zeros_like(is_barred, dtype=logits.dtype).masked_fill_(is_barred, -torch.inf).flatten(2)
        index = token.expand_as(is_barred).flatten(2).clamp(min=0).long()
        rows = logits.view(len(slots_np), -1, logits.shape[1])
        return rows.scatter_add_(2, index, penalty).view_as(logits)

    def _text_around(
        self,
        slots: torch.Tensor,
        first: torch.Tensor,
        num_places: int,
        window: torch.Tensor,
        mask_token_id: int,
        req_states: RequestState,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens from position ``first`` [n] to those behind the window that a word may reach, and which are output.

        Returns [n, T] int64 and bool, T = W + 1 + 2 * (num_places - 1). Behind the window are masks.
        """
        index = torch.arange(window.shape[1] + 2 * num_places - 1, device=self.device).expand(len(slots), -1)
        position = first.unsqueeze(1) + index
        all_tokens = req_states.all_token_ids.gpu
        # A block that nobody waits for any more may begin beyond the longest text.
        text = all_tokens[slots.unsqueeze(1), position.clamp(0, all_tokens.shape[1] - 1)]
        column = index - (num_places - 1)
        in_window = window.gather(1, column.clamp(0, window.shape[1] - 1))
        known = torch.where(column < 0, text, torch.where(column < window.shape[1], in_window, mask_token_id))
        return known, position >= req_states.prompt_len.gpu[slots].unsqueeze(1)
