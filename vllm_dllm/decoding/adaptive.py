"""How many drafts each request gets in the next step: ``drafts="auto"``, and ``adaptive`` of an engine with a drafter.

A draft adds rows to a step and may save a step. The drafts of a step are those that make the most of

    (steps without drafts + steps that the drafts are expected to save) / seconds of the step

The seconds come from steps that were timed when the engine started, the expectation from what earlier drafts saved.
Whatever slows all steps down by the same factor does not change which number is best, so the times of the start hold
while the engine runs. Nothing here knows of vLLM or of tokens; the same calls get the same answers.
"""

from collections.abc import Hashable, Sequence
from math import exp

import numpy as np
from numpy.typing import NDArray

from vllm_dllm.decoding.step_cost import Floats, StepCost

PRIOR_ACCEPTANCE = 0.9
"""Assumed chance that a draft is accepted once the drafts before it are; high, so that drafts are tried."""
PRIOR_FORWARDS = 8.0
"""Forwards with drafts that this assumption weighs as much as."""
WINDOW, LIFE, REQUEST_WINDOW = 1024.0, 2000.0, 64.0
"""Forwards with drafts of all requests, steps of the engine, and forwards with drafts of a request after which an
observation has lost most of its weight."""
REQUEST_PRIOR = 16.0
"""Saved steps that the average of a request's kind weighs as much as, against the request's own."""
MARGIN = 0.02
"""Gain in throughput that drafts must promise; less is noise."""
PROBE_INTERVAL, PROBE_SHARE = 4, 1 / 16
"""Every so many decisions for no drafts, this share of the requests gets drafts all the same, and at least one does."""
DRAFTING_INTERVAL = 16
"""Steps between two that make drafts while none are used."""


class Drafting:
    """Whether a step makes drafts for the next, of requests whose drafts are decided step by step.

    The worker makes drafts before the scheduler decides how many are used, which takes time. After two steps in a row
    that used none of the drafts at hand, one step in ``DRAFTING_INTERVAL`` makes drafts.
    """

    def __init__(self) -> None:
        self._unused = self._steps = 0

    def decide(self, are_there: bool, are_used: bool) -> bool:
        """Whether this step makes drafts, given that the step before made some, and that this step has some of them."""
        if are_used:
            self._unused = max(self._unused - 1, 0)
        elif are_there:
            self._unused = min(self._unused + 1, 2)
        if self._unused < 2:
            return are_used or not are_there
        self._steps += 1
        return self._steps % DRAFTING_INTERVAL == 0


class _Gain:
    """What drafts of one kind of request save: for each draft, decayed sums over the forwards that had the draft."""

    def __init__(self) -> None:
        self._tried, self._saved = np.zeros(0), np.zeros(0)
        # Steps that each draft is expected to save, never more than the draft before.
        self.of_draft: Floats = np.zeros(0)

    def observe(self, drafted: int, accepted: int, deepest: int) -> None:
        """A forward with ``drafted`` drafts saved ``accepted`` steps by going on from draft ``deepest``."""
        self._tried[:drafted] += 1
        # The drafts up to the deepest accepted one share what they saved together.
        self._saved[:deepest] += accepted / max(deepest, 1)

    def fit(self, most: int, keep: float) -> None:
        """Expect up to ``most`` drafts, and take what was observed into account, of which ``keep`` stays known."""
        missing = np.zeros(max(0, most - len(self._tried)))
        self._tried, self._saved = np.append(self._tried * keep, missing), np.append(self._saved * keep, missing)
        gains, before = [], 1.0
        for tried, saved in zip(self._tried.tolist(), self._saved.tolist(), strict=True):
            prior = PRIOR_FORWARDS * PRIOR_ACCEPTANCE * before
            before = min(before, (saved + prior) / (tried + PRIOR_FORWARDS))
            gains.append(before)
        self.of_draft = np.array(gains)


class _Request:
    """What a request's drafts saved, beside what the average of its kind expects of them."""

    def __init__(self, gain: _Gain) -> None:
        self.gain = gain
        self.saved = self.expected = 0.0

    def gains(self, most: int) -> Floats:
        """[most]: steps that each draft is expected to save: the average times a ratio that is shrunk towards 1."""
        ratio = (self.saved + REQUEST_PRIOR) / (self.expected + REQUEST_PRIOR)
        return (self.gain.of_draft[:most] * ratio).clip(max=1.0)


class DraftController:
    """Decides the drafts of each step. Not thread-safe."""

    def __init__(self, cost: StepCost | None = None) -> None:
        self._cost = cost or StepCost()
        self._requests: dict[str, _Request] = {}
        self._gains: dict[Hashable, _Gain] = {}
        self._idle = self._observed = 0

    def add(self, req_id: str, kind: Hashable = None) -> None:
        """A request whose drafts are to be decided. Drafts of requests of one ``kind`` are expected to save alike."""
        self._requests[req_id] = _Request(self._gains.setdefault(kind, _Gain()))

    def remove(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        self._requests.pop(req_id, None)

    def observe(self, req_id: str, drafted: int, accepted: int, deepest: int) -> None:
        """A forward of a request with ``drafted`` drafts saved ``accepted`` steps by going on from draft ``deepest``.

        ``deepest`` counts from 1; 0 is none. A draft may be several steps ahead of the draft before it, or of none.
        """
        request, keep = self._requests.get(req_id), 1 - 1 / REQUEST_WINDOW
        if request is not None and drafted:
            request.saved = request.saved * keep + accepted
            request.expected = request.expected * keep + float(request.gain.of_draft[:drafted].sum())
            request.gain.observe(drafted, accepted, deepest)
            self._observed += 1

    def allot(
        self, candidates: Sequence[tuple[str, int]], base_rows: int, block_rows: int, base_steps: int
    ) -> list[int]:
        """Drafts of each candidate in the next step; to be called once per step, also without candidates.

        Args:
            candidates: requests that were added, with the drafts they have.
            base_rows: rows of all decoding requests without these drafts.
            block_rows: rows of one draft.
            base_steps: steps that these rows make.
        """
        requests = [self._requests[req_id] for req_id, _ in candidates]
        available = np.array([number for _, number in candidates], dtype=np.int64)
        most = int(available.max(initial=0))
        keep, self._observed = exp(-1 / LIFE - self._observed / WINDOW), 0
        for gain in self._gains.values():
            gain.fit(most, keep)
        if most == 0:
            return [0] * len(candidates)
        # [most, candidates]: drafts that are not there come last.
        gains = np.stack([request.gains(most) for request in requests], axis=1)
        gains = np.where(np.arange(most)[:, None] < available, gains, -1.0)
        # By gain; of equal gains the earlier draft, so that no request skips one.
        order = np.argsort(-gains, axis=None, kind="stable")[: available.sum()]
        rows = base_rows + block_rows * np.arange(len(order) + 1.0)
        rates = (base_steps + gains.ravel()[order].cumsum()) / self._cost.seconds(rows[1:], drafts=True)
        best = int(rates.argmax())
        if rates[best] < (1 + MARGIN) * base_steps / self._cost.seconds(rows[:1], drafts=False)[0]:
            return self._probe(available)
        return np.bincount(order[: best + 1] % len(candidates), minlength=len(candidates)).tolist()

    def _probe(self, available: NDArray[np.int64]) -> list[int]:
        """No drafts, but now and then one or two for some requests, in turn: without any nothing is learned."""
        drafts, waiting = np.zeros_like(available), np.flatnonzero(available)
        self._idle += 1
        turn, phase = divmod(self._idle, PROBE_INTERVAL)
        if phase == 0:
            number = max(1, round(PROBE_SHARE * len(waiting)))
            drafts[np.roll(waiting, -turn * number)[:number]] = 1 + turn % 2
        return np.minimum(drafts, available).tolist()
