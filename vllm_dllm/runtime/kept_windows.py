"""Windows of preempted requests, kept until the requests go on.

A request that is preempted begins with its unfinished block anew, which gives the same tokens where one block is
denoised at a time. With ``MULTI_BLOCK`` it would not: tokens of the blocks behind were chosen while the blocks in front
had masks. So the worker keeps what it knows of such a request's window, on the device. Of S2D2 with hysteresis it keeps
the switch alone, as it was when the block began.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dllm.decoding.records import Progress
from vllm_dllm.decoding.s2d2 import switch_when_began
from vllm_dllm.decoding.verifiers import Verifier
from vllm_dllm.runtime.compiled import NOBODYS
from vllm_dllm.runtime.states import DenoiseStates


@dataclass(frozen=True)
class _Kept:
    state: Tensor
    """[columns]: the request's row of ``DenoiseStates.rows``."""
    others: list[Tensor]
    """What else is kept by position of the window: log-probabilities, step maps."""


class KeptWindows:
    """Keeps the window of every request that leaves its slot, until the request is back or is told of again.

    vLLM tells a worker that a request leaves, and not whether the request will be back. The scheduler names a finished
    request in two steps, and with the second nothing of the request is left here.
    """

    def __init__(self, states: DenoiseStates) -> None:
        self.states = states
        # Tensors with a row per slot, as they are at the moment.
        self.others: Callable[[], Sequence[Tensor]] = tuple
        self._kept: dict[str, _Kept] = {}
        self._told_again: tuple[str, _Kept | None] = "", None
        self._returned: list[tuple[int, int, _Kept]] = []

    def leave(self, req_id: str, slot: int | None) -> None:
        """Keep the window of a request that leaves ``slot``; None: the request left before.

        vLLM calls this when a request is preempted or finished, and again just before it adds a request. Our scheduler
        names finished requests twice, and the second call drops what the first one kept.
        """
        self._told_again = req_id, self._kept.pop(req_id, None)
        if slot is None or req_id.startswith(NOBODYS):
            return
        if self.states.asked["keeps_window"][slot]:
            self._kept[req_id] = _Kept(
                self.states.rows.gpu[slot].clone(), [each[slot].clone() for each in self.others()]
            )

    def enter(self, req_id: str, slot: int, num_tokens: int, *, was_preempted: bool) -> None:
        """Take that a request with ``num_tokens`` tokens, its prompt included, enters ``slot``."""
        named, kept = self._told_again
        self._told_again = "", None
        if kept is not None and named == req_id and was_preempted:
            self._returned.append((slot, num_tokens, kept))

    def apply(self) -> None:
        """Write the windows of requests that are back, once all that was staged of them is written."""
        for slot, num_tokens, kept in self._returned:
            self._write(slot, num_tokens, kept)
        self._returned.clear()

    def _write(self, slot: int, num_tokens: int, kept: _Kept) -> None:
        progress = _progress(kept.state)
        # `reset_prefix_cache` drops tokens of a step, so the kept window may be ahead of the text. If the window still
        # holds the dropped tokens, they are emitted again. If it has moved past them, the block begins anew.
        first = num_tokens - progress.block_start
        is_ahead = first < 0
        row = self.states.rows.gpu[slot]
        if self.states.asked["verifier"][slot] == Verifier.S2D2:
            _progress(row).switch.copy_(switch_when_began(progress.switch, before=is_ahead))
            return
        state = kept.state.clone()
        _progress(state).first.copy_(first)
        row.copy_(torch.where(is_ahead, row, state))
        for now, before in zip(self.others(), kept.others, strict=True):
            # Room for more top log-probabilities may have been made meanwhile.
            place = now[slot][..., : before.shape[-1]]
            place.copy_(torch.where(is_ahead, place, before))


def _progress(state: Tensor) -> Progress:
    """Views of a row."""
    return Progress(*state[: len(Progress.__dataclass_fields__)].unbind(0))
