"""Log-probabilities of committed tokens, kept from the step that unmasked each until its block is emitted."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.config.model import LogprobsMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from vllm_dllm.decoding.step import Origin
from vllm_dllm.observe.wires import IS_STEP_MAP, OUTSIDE
from vllm_dllm.runtime.logits.rows import PROCESSED_VALUES
from vllm_dllm.runtime.logits.step import place_columns
from vllm_dllm.runtime.logits.step_maps import StepMaps
from vllm_dllm.runtime.parts import Part


class LogprobsStash:
    """For every position of a request's window: its token's log-probability, rank, and the best others.

    They are of the step that wrote the token, and of the model's distribution or of what sampling parameters make of it
    (``mode``). A step none of whose requests asked for log-probabilities does no work here.
    """

    def __init__(self, max_num_reqs: int, window_length: int, mode: LogprobsMode, device: torch.device):
        self.window_length = window_length
        self.are_processed = mode.startswith("processed")
        self.are_logits = mode.endswith("logits")
        self.device = device
        self.columns = torch.arange(window_length, device=device)
        self.num_logprobs_np = np.full(max_num_reqs, -1, dtype=np.int32)
        shape = max_num_reqs, window_length
        # [max_num_reqs, W, 1 + most top log-probabilities asked for so far].
        self.token_ids = torch.zeros(*shape, 1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(*shape, 1, dtype=torch.float32, device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int64, device=device)

    def add_request(self, slot: int, num_logprobs: int | None) -> None:
        """Take how many top log-probabilities the request in ``slot`` wants; None: it wants no log-probabilities."""
        self.num_logprobs_np[slot] = -1 if num_logprobs is None else num_logprobs
        missing = int(self.num_logprobs_np[slot]) + 1 - self.token_ids.shape[2]
        if missing > 0:
            self.token_ids, self.logprobs = pad(self.token_ids, (0, missing)), pad(self.logprobs, (0, missing))
        if num_logprobs is not None:
            # Nothing of the request that had the slot before may come out.
            for kept in (self.token_ids, self.logprobs, self.ranks):
                kept[slot] = 0

    def _wanting(self, slots_np: np.ndarray) -> np.ndarray:
        """Which of the requests want log-probabilities."""
        return np.flatnonzero(self.num_logprobs_np[slots_np] >= 0)

    def wanted(self, slots_np: np.ndarray) -> bool:
        """Whether any of the requests wants log-probabilities."""
        return len(self._wanting(slots_np)) > 0

    def keep(self, part: Part, tokens: Tensor, origin: Origin) -> None:
        """Keep the log-probabilities of what a denoising step wrote, for those of F requests that want some.

        Args:
            tokens: [F, W] int64: windows of the requests after the step.
        """
        slots_np, slots, logits, rules = part.options.slots_np, part.options.slots, part.logits, part.logits.rules
        if not self.wanted(slots_np):
            return
        columns = rules.columns if origin.place is None else origin.place % rules.block_length
        # [F, W]: the row of the logits that each position's token comes from.
        rows = logits.rows_at(part.requests, origin.branch, columns)

        def read(which_np: np.ndarray, which: Tensor) -> Tensor:
            of_rows = logits.logits[rows[which].flatten()]
            if not self.are_processed:
                return of_rows
            window, branch = part.seen.window.select(which), origin.branch[which]
            seen = window.branches.gather(1, branch.unsqueeze(2).expand(-1, -1, window.branches.shape[2]))
            columns = rules.columns.expand_as(branch) if origin.place is None else origin.place[which]
            placed = place_columns(slots[which], window.progress.block_start, seen, columns)
            return logits.process(of_rows, slots_np[which_np], placed)

        self.stash(slots_np, slots, logits.logits.shape[1], tokens, origin.written, read)

    def stash(
        self,
        slots_np: np.ndarray,
        slots: Tensor,
        vocab_size: int,
        tokens: Tensor,
        written: Tensor,
        read: Callable[[np.ndarray, Tensor], Tensor],
    ) -> None:
        """Keep what this step says of the positions it writes, the first K of each window.

        Args:
            slots_np, slots: [D] slots of the requests.
            tokens, written: [D, K] token of each position, and whether this step writes it.
            read: gives the logits [n * K, vocab] that the tokens of n of the requests come from; they are processed
                where ``are_processed``.
        """
        wanting = self._wanting(slots_np)
        size = max(1, PROCESSED_VALUES // (self.window_length * vocab_size))
        for begin in range(0, len(wanting), size):
            some = wanting[begin : begin + size]
            requests = async_tensor_h2d(some, device=self.device)
            num_others = int(self.num_logprobs_np[slots_np[some]].max())
            self._write(slots[requests], read(some, requests), tokens[requests], written[requests], num_others)

    def _write(self, slots: Tensor, logits: Tensor, tokens: Tensor, chosen: Tensor, num_others: int) -> None:
        """Keep the log-probabilities of ``tokens`` [n, K] and of the best ``num_others`` where ``chosen`` [n, K].

        Args:
            logits: [n * K, vocab].
        """
        scores = compute_topk_scores(logits, num_others, tokens.flatten(), logits_mode=self.are_logits)
        values = scores.logprob_token_ids, scores.logprobs, scores.selected_token_ranks
        kept = self.token_ids[:, :, : 1 + num_others], self.logprobs[:, :, : 1 + num_others], self.ranks
        for table, new in zip(kept, values, strict=True):
            new = new.view(*tokens.shape, *new.shape[1:])
            where = chosen.view(*chosen.shape, *[1] * (new.ndim - 2))
            view = table[:, : tokens.shape[1]]
            view[slots] = torch.where(where, new, view[slots])

    def emit(
        self, slots_np: np.ndarray, first: Tensor, shift: Tensor | None, num_reqs: int, step_maps: StepMaps
    ) -> LogprobsTensors | None:
        """Log-probabilities of the decoding requests ``slots_np`` [D] from offset ``first`` [D] on, for the batch.

        Every request that wants them, or its step map, gets W rows: how many are emitted is only known on the device,
        and vLLM takes as many from the front as there are tokens. Where one of them wants its step map, columns of step
        maps come last (``vllm_dllm.observe.wires``). Then what is kept moves along with the windows, ``shift`` [D]
        columns.
        """
        wanting = np.flatnonzero((self.num_logprobs_np[slots_np] >= 0) | step_maps.wanted_np[slots_np])
        if len(wanting) == 0:
            return None
        requests = async_tensor_h2d(wanting, device=self.device)
        slots = async_tensor_h2d(slots_np[wanting].astype(np.int64), device=self.device).unsqueeze(1)
        offsets = first[requests].unsqueeze(1) + self.columns
        from_first = offsets.clamp(max=self.window_length - 1)
        num_rows = np.zeros(num_reqs + 1, dtype=np.int64)
        num_rows[wanting + 1] = self.window_length
        # No column of log-probabilities, if all want their step map alone.
        width = 1 + int(self.num_logprobs_np[slots_np[wanting]].max())
        kept = [self.token_ids[:, :, :width], self.logprobs[:, :, :width], self.ranks] if width else []
        parts = [each[slots, from_first] for each in kept]
        if has_maps := step_maps.wanted(slots_np):
            maps = step_maps.of_window(slots.squeeze(1))
            maps = maps.gather(1, from_first.unsqueeze(2).expand_as(maps))
            maps.masked_fill_((offsets >= self.window_length).unsqueeze(2), OUTSIDE)
            marks = torch.full(maps.shape, IS_STEP_MAP, device=self.device)
            if parts:
                maps, marks = torch.cat((parts[0], maps), dim=2), torch.cat((parts[1], marks), dim=2)
            parts = [maps, marks, parts[2] if parts else from_first]
        emitted = LogprobsTensors(
            logprob_token_ids=parts[0].flatten(0, 1),
            logprobs=parts[1].flatten(0, 1),
            selected_token_ranks=parts[2].flatten(),
            cu_num_generated_tokens=np.cumsum(num_rows).tolist(),
        )
        if shift is not None:
            moved = (shift[requests].unsqueeze(1) + self.columns).clamp(max=self.window_length - 1)
            for each in kept:
                each[slots.squeeze(1)] = each[slots, moved]
            if has_maps:
                step_maps.move(slots.squeeze(1), shift[requests])
        return emitted
