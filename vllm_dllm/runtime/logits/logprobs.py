"""Log-probabilities of committed tokens, kept from the step that unmasked each until its block is emitted."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.kernels.confidence import token_logprobs

_COPIED_LOGITS = 16 << 20
"""Logits that are copied at a time."""


class LogprobsStash:
    """For every position of a request's window: its token's log-probability, rank, and the best others.

    They come from the model's unprocessed distribution in the step that wrote the token. A step none of whose requests
    asked for log-probabilities does no work here.
    """

    def __init__(self, max_num_reqs: int, window_length: int, device: torch.device):
        self.window_length = window_length
        self.device = device
        self.max_num_reqs = max_num_reqs
        self.num_logprobs_np = np.full(max_num_reqs, -1, dtype=np.int32)
        # [max_num_reqs, W, 1 + most top log-probabilities asked for so far]; made for the first request that asks.
        self.token_ids: torch.Tensor | None = None
        self.logprobs: torch.Tensor | None = None
        self.ranks: torch.Tensor | None = None  # [max_num_reqs, W]

    def add_request(self, slot: int, num_logprobs: int | None) -> None:
        """Take how many top log-probabilities the request in ``slot`` wants; None: it wants no log-probabilities."""
        self.num_logprobs_np[slot] = -1 if num_logprobs is None else num_logprobs
        if num_logprobs is None:
            return
        if self.token_ids is None or self.token_ids.shape[2] <= num_logprobs:
            shape = self.max_num_reqs, self.window_length, 1 + num_logprobs
            token_ids = torch.zeros(shape, dtype=torch.int64, device=self.device)
            logprobs = torch.zeros(shape, dtype=torch.float32, device=self.device)
            if self.token_ids is not None and self.logprobs is not None:
                width = self.token_ids.shape[2]
                token_ids[..., :width] = self.token_ids
                logprobs[..., :width] = self.logprobs
            self.token_ids, self.logprobs = token_ids, logprobs
        if self.ranks is None:
            self.ranks = torch.zeros(self.token_ids.shape[:2], dtype=torch.int64, device=self.device)

    def _wanting(self, slots_np: np.ndarray) -> np.ndarray | None:
        """Which of the requests want log-probabilities; None: none of them."""
        if self.token_ids is None:
            return None
        wanting = np.flatnonzero(self.num_logprobs_np[slots_np] >= 0)
        return wanting if len(wanting) else None

    def wanted(self, slots_np: np.ndarray) -> bool:
        """Whether any of the requests wants log-probabilities."""
        return self._wanting(slots_np) is not None

    def stash(
        self,
        slots_np: np.ndarray,
        slots: torch.Tensor,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        written: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """Keep what this step says of the positions it writes.

        Args:
            slots_np, slots: [D] slots of the requests.
            logits: [rows, vocab].
            tokens, written: [D, W] token of each position, and whether this step writes it.
            rows: [D, W] int64: the logits row that each position's token comes from.
        """
        wanting = self._wanting(slots_np)
        if wanting is None:
            return
        size = max(1, _COPIED_LOGITS // (self.window_length * logits.shape[1]))
        for begin in range(0, len(wanting), size):
            requests = async_tensor_h2d(wanting[begin : begin + size], device=self.device)
            self._write(slots[requests], logits[rows[requests].flatten()], tokens[requests], written[requests])

    def stash_first(
        self, slots_np: np.ndarray, slots: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """As ``stash``, for the first position of a block only. ``logits`` [P, vocab], ``tokens`` [P]."""
        wanting = self._wanting(slots_np)
        if wanting is None:
            return
        requests = async_tensor_h2d(wanting, device=self.device)
        first = torch.zeros(len(wanting), 1, dtype=torch.bool, device=self.device).logical_not_()
        self._write(slots[requests], logits[requests], tokens[requests].unsqueeze(1), first)

    def _write(self, slots: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, chosen: torch.Tensor) -> None:
        """Keep the log-probabilities of ``tokens`` [n, K] from ``logits`` [n * K, vocab] where ``chosen`` [n, K]."""
        assert self.token_ids is not None and self.logprobs is not None and self.ranks is not None
        num_positions = tokens.shape[1]
        width = self.token_ids.shape[2]
        values = token_logprobs(logits, tokens.flatten(), min(width - 1, logits.shape[1]))
        for kept, new in zip((self.token_ids, self.logprobs, self.ranks), values, strict=True):
            new = new.view(*tokens.shape, *new.shape[1:])
            where = chosen.view(*chosen.shape, *[1] * (new.ndim - 2))
            view = kept[:, :num_positions]
            view[slots] = torch.where(where, new, view[slots])

    def emit(self, slots_np: np.ndarray, first: torch.Tensor, num_reqs: int) -> LogprobsTensors | None:
        """Log-probabilities of the decoding requests ``slots_np`` [D] from offset ``first`` [D] on, for the batch.

        Every request that wants them gets W rows: how many are emitted is only known on the device, and vLLM takes as
        many from the front as there are tokens.
        """
        wanting = self._wanting(slots_np)
        if wanting is None:
            return None
        assert self.token_ids is not None and self.logprobs is not None and self.ranks is not None
        requests = async_tensor_h2d(wanting, device=self.device)
        slots = async_tensor_h2d(slots_np[wanting].astype(np.int64), device=self.device).unsqueeze(1)
        offsets = torch.arange(self.window_length, device=self.device)
        offsets = (first[requests].unsqueeze(1) + offsets).clamp(max=self.window_length - 1)
        num_rows = np.zeros(num_reqs + 1, dtype=np.int64)
        num_rows[wanting + 1] = self.window_length
        width = 1 + int(self.num_logprobs_np[slots_np[wanting]].max())
        return LogprobsTensors(
            logprob_token_ids=self.token_ids[slots, offsets, :width].flatten(0, 1),
            logprobs=self.logprobs[slots, offsets, :width].flatten(0, 1),
            selected_token_ranks=self.ranks[slots, offsets].flatten(),
            cu_num_generated_tokens=np.cumsum(num_rows).tolist(),
        )

    def shift(self, slots_np: np.ndarray, by: torch.Tensor) -> None:
        """Move what is kept of the requests ``slots_np`` [D] along with their windows, ``by`` [D] columns."""
        wanting = self._wanting(slots_np)
        if wanting is None:
            return
        assert self.token_ids is not None and self.logprobs is not None and self.ranks is not None
        requests = async_tensor_h2d(wanting, device=self.device)
        slots = async_tensor_h2d(slots_np[wanting].astype(np.int64), device=self.device).unsqueeze(1)
        columns = torch.arange(self.window_length, device=self.device) + by[requests].unsqueeze(1)
        columns = columns.clamp(max=self.window_length - 1)
        for kept in (self.token_ids, self.logprobs, self.ranks):
            kept[slots.squeeze(1)] = kept[slots, columns]
