"""How many drafts each request gets in the next step (``drafts="auto"``).

A draft costs rows and may skip a denoising step. The drafts of a step are chosen to make the most of

    (denoising steps without drafts + steps expected to be skipped) / expected seconds

which is the rule "one more draft as long as its gain per second exceeds that of the whole step". Both expectations are
learned from the running engine: what drafts gain from what was accepted, what rows cost from how long steps took.
Nothing here knows of vLLM or of tokens, everything runs on the host in microseconds, and the same calls get the same
answers.
"""

from collections import Counter, deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from math import exp, log, log2
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

REFRESH_STEPS = 8
"""Steps between two looks at what was learned; in between it is only written down."""

PRIOR_ACCEPTANCE = 0.8
"""Of drafts whose predecessors were accepted, as long as nothing is known. High, so that drafts are tried."""
PRIOR_FORWARDS = 8.0
"""Forwards with a draft that outweigh the prior."""
ENGINE_WINDOW = 1024
"""Forwards with drafts, of all requests, after which an observation has lost most of its weight."""
ENGINE_LIFE = 2000
"""Steps in which it has all the same, or what drafts once gained would never be doubted by those that do without."""
REQUEST_WINDOW = 64
"""The same for what is known of one request, in its own forwards."""
REQUEST_PRIOR = 4.0
"""Skipped steps expected of a request that outweigh the engine's average."""

PROBE_SHARE = 0.01
"""Rows of drafts that only serve to learn, over those of all steps."""
PROBE_DEPTHS = (1, 2, 4, 8)
"""Drafts of such a request, in turn: where one gains nothing, several may."""
PROBE_WIDTH = 0.25
"""Rows of a probe over those of its step: enough to show in its seconds."""
CONTROL_SHARE = 0.005
"""Throughput given up for steps without drafts, which show what drafts cost."""
MARGIN = 0.02
"""Gain in throughput that drafts must promise; less is noise."""

BINS_PER_OCTAVE = 3
"""Steps are compared with those of the same bin of row counts."""
BIN_STEPS = 63
"""Latest steps of a bin that count."""
STEP_LIFE = 1000
"""Steps after which a bin forgets one."""
BIN_HALF_LIFE = 128
"""Steps in which a bin that sees none loses half its weight."""
LEAST_STEPS = 3
"""A bin with fewer says nothing: a lone slow step may have been a compilation."""
LEAST_SECONDS = 1e-9
"""Of a step; none takes less."""
PACE_STEPS = 31
"""Latest steps that tell the machine's pace."""
PACE_SHARE = 0.97
"""Of the pace that is taken out of what a step took. The rest wears off: noise would drive the pace ever further from
1, and away from the pace that rare steps were seen at."""
EXPLORED = 1.5
"""Rows of a step over those of the largest steps of late: load is raised bit by bit."""


_ENDLESS = 1e9
"""Rows: more than any step has."""


class StepCost:
    """Seconds of a step: a convex, non-decreasing, piecewise linear function of its rows, and more if it has drafts.

    The function covers an accelerator (flat up to a knee, then linear) and a CPU (linear from the start). Row counts
    are binned, so that hours at one load do not wash out what is known of another; convexity joins the bins against
    noise, in which a free curve would see bargains. What drafts take beside their rows is time on the host. It shows
    where a bin has steps with drafts and steps without.

    The machine's pace changes: other programs come and go, texts get longer. Steps with many rows that were seen at one
    pace say nothing beside steps with few that were seen at another. So all are kept as they would have been at one
    pace; which one does not matter to what is compared.
    """

    def __init__(self) -> None:
        # Of each bin the latest steps: when, rows, seconds.
        self._bins: dict[int, deque[_Step]] = {}
        self._now = 0
        # Logarithms of the seconds of late steps over the expected ones.
        self._paces: deque[float] = deque(maxlen=PACE_STEPS)
        # Knots of the function, from 0 rows to more than any step has.
        self._rows: Floats = np.array([0.0, _ENDLESS])
        self._seconds: Floats = np.ones(2)
        # Of each bin: what its steps took over what the function says.
        self._misfits: dict[int, float] = {}
        self.of_drafts = 0.0
        """Seconds that drafts take beside their rows, however many there are."""
        self.largest = 0.0
        """Rows of the largest steps of late."""

    def observe(self, rows: int, seconds: float, has_drafts: bool = False) -> None:
        """A step of ``rows`` > 0 rows took ``seconds`` > 0."""
        self._now += 1
        key = int(BINS_PER_OCTAVE * log2(rows))
        if key in self._misfits:
            # Beside steps of its own bin: where rows cost more than the function knows, the pace is not to explain it.
            expected = float(self.seconds(np.array(rows))) * self._misfits[key] + self.of_drafts * has_drafts
            self._paces.append(log(max(seconds, LEAST_SECONDS) / max(expected, LEAST_SECONDS)))
        if self._paces:
            seconds *= exp(-PACE_SHARE * median(self._paces))
        steps = self._bins.setdefault(key, deque(maxlen=BIN_STEPS))
        steps.append(_Step(self._now, rows, seconds, has_drafts))
        if self._now - steps[0].time > STEP_LIFE and len(steps) > LEAST_STEPS:
            steps.popleft()

    def fit(self) -> None:
        """Take the observations into account."""
        keys = sorted(key for key, steps in self._bins.items() if len(steps) >= LEAST_STEPS)
        if not keys:
            return
        bins = [self._bins[key] for key in keys]
        self._compare_drafts(bins)
        rows, seconds, count, latest = np.array([_summary(steps, self.of_drafts) for steps in bins]).T
        # Up to a factor. Noise is about proportional, and old knowledge yields to new.
        weights = count / seconds**2 * self._trust(latest)
        known = np.maximum(_fit_convex(rows, seconds, weights), seconds.min() / 2)
        slopes = np.diff(known) / np.diff(rows) if len(rows) > 1 else np.zeros(1)
        # Towards 0 rows never faster than in proportion, or small steps would take no time at all.
        start = max(known[0] - slopes[0] * rows[0], 0.0)
        end = known[-1] + slopes[-1] * (_ENDLESS - rows[-1])
        self._rows = np.concatenate(([0.0], rows, [_ENDLESS]))
        self._seconds = np.concatenate(([start], known, [end]))
        self._misfits = dict(zip(keys, (seconds / known).tolist(), strict=True))
        self.largest = rows[latest > self._now - 2 * BIN_HALF_LIFE].max(initial=0.0)

    def _compare_drafts(self, bins: list[deque["_Step"]]) -> None:
        """What drafts take beside their rows, from the bins that have steps with drafts and without."""
        sides = [[[step for step in steps if step.has_drafts is has] for has in (False, True)] for steps in bins]
        pairs = [pair for pair in sides if min(map(len, pair)) >= LEAST_STEPS]
        if not pairs:
            return
        summaries = np.array([[_summary(side, 0.0) for side in pair] for pair in pairs])  # [bins, 2, 4]
        rows, seconds, count, latest = summaries.transpose(2, 0, 1)
        more = np.diff(seconds - self.seconds(rows)).ravel()
        weights = count.min(axis=1) / seconds[:, 0] ** 2 * self._trust(latest.min(axis=1))
        self.of_drafts = max(float(np.average(more, weights=weights)), 0.0)

    def _trust(self, time: Floats) -> Floats:
        """Weight of what was last seen at that time."""
        return np.exp2(-np.minimum((self._now - time) / BIN_HALF_LIFE, 10.0))

    def seconds(self, rows: Floats | Integers) -> Floats:
        """Expected seconds of steps of so many rows, without drafts; the same for all while nothing is known."""
        return np.interp(rows, self._rows, self._seconds)


class _Step(NamedTuple):
    time: int
    rows: int
    seconds: float
    has_drafts: bool


def _summary(steps: Collection[_Step], of_drafts: float) -> tuple[float, float, int, int]:
    """Mean rows, mean of the middle half of the seconds without those of drafts, how many there are, when the latest
    was."""
    count = len(steps)
    seconds = sorted(step.seconds - of_drafts * step.has_drafts for step in steps)
    middle = seconds[count // 4 : count - count // 4]
    rows = sum(step.rows for step in steps) / count
    return rows, max(sum(middle) / len(middle), LEAST_SECONDS), count, max(step.time for step in steps)


def _fit_convex(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Values at ``x``, ascending, of a convex, non-decreasing, piecewise linear function near the points.

    Least squares with a bend at every point; then the bend that is most concave goes, until none is.
    """
    columns = np.ones((len(x), len(x)))
    columns[:, 1:] = np.maximum(np.subtract.outer(x, x[:-1]), 0.0) / x[-1]
    weighted = columns.T * weights
    products, target = weighted @ columns, weighted @ y
    # Points almost upon each other have no bend to speak of: keep the equations solvable.
    products[np.diag_indices_from(products)] += 1e-9 * weights.max()
    kept = np.arange(len(x))
    while True:
        bends = np.linalg.solve(products[np.ix_(kept, kept)], target[kept])
        most_concave = int(bends[1:].argmin()) + 1 if len(kept) > 1 else 0
        if bends[most_concave] >= 0.0:
            break
        kept = np.delete(kept, most_concave)
    return columns[:, kept] @ bends


def _non_decreasing(values: Floats, weights: Floats) -> Floats:
    """The non-decreasing sequence nearest to ``values`` in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] >= value:
            other, other_weight, other_count = pools.pop()
            value = (value * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        pools.append((value, weight, count))
    return np.repeat([value for value, _, _ in pools], [count for _, _, count in pools])


class DraftGain:
    """Steps that the first, second, ... draft of a forward is expected to skip, over all requests of the engine.

    Drafts are nested: those of a forward with k drafts are the first k of one with more. So draft k gains the same
    whatever follows it, and a forward says it of all drafts it had: one step of the deepest accepted, nothing of those
    behind, and the other skipped steps somewhere before.
    """

    def __init__(self) -> None:
        # How often (drafted, accepted, deepest) was seen.
        self._observed: Counter[tuple[int, int, int]] = Counter()
        # Of draft k, from k = 1: decayed forwards that had it, and steps that it skipped in them.
        self._tried: Floats = np.zeros(0)
        self._skipped: Floats = np.zeros(0)
        self.of_draft: Floats = np.zeros(0)
        """Expected gain of draft k, from k = 1; not increasing in k."""
        self.total = [0.0]
        """Expected gain of the first k drafts, from k = 0."""

    def observe(self, drafted: int, accepted: int, deepest: int) -> None:
        """A forward with ``drafted`` > 0 drafts skipped ``accepted`` steps, the last of them with draft ``deepest``."""
        self._observed[drafted, accepted, deepest] += 1

    def fit(self, most: int) -> None:
        """Take the observations into account, and expect up to ``most`` drafts."""
        size = max(most, len(self._tried), max((drafted for drafted, _, _ in self._observed), default=0))
        missing = np.zeros(size - len(self._tried))
        self._tried = np.concatenate((self._tried, missing))
        self._skipped = np.concatenate((self._skipped, missing))
        if self._observed:
            drafted, accepted, deepest = np.array(list(self._observed)).T
            count = np.array(list(self._observed.values()))
            self._observed.clear()
            keep = (1 - 1 / ENGINE_WINDOW) ** count.sum()
            before = np.maximum(deepest - 1, 0)
            share = np.maximum(accepted - 1, 0) / np.maximum(before, 1)
            last = np.bincount(deepest, count, minlength=size + 1)[1:]
            self._tried = keep * self._tried + _at_least(drafted, count, size)
            self._skipped = keep * self._skipped + _at_least(before, count * share, size) + last
        self._tried *= 1 - REFRESH_STEPS / ENGINE_LIFE
        self._skipped *= 1 - REFRESH_STEPS / ENGINE_LIFE
        gain = np.empty(size)
        expected = 1.0
        for k in range(size):
            prior = PRIOR_FORWARDS * PRIOR_ACCEPTANCE * expected
            gain[k] = expected = (self._skipped[k] + prior) / (self._tried[k] + PRIOR_FORWARDS)
        # Where a step unmasks several positions, a single draft gains nothing that several would: each draft of such a
        # run counts with the run's mean.
        self.of_draft = -_non_decreasing(-gain, self._tried + PRIOR_FORWARDS)
        self.total = [0.0, *self.of_draft.cumsum().tolist()]


def _at_least(values: Integers, weights: Floats | Integers, size: int) -> Floats:
    """[size]: weight of all values that are at least 1, 2, ..., ``size``."""
    return np.bincount(values, weights, minlength=size + 1)[:0:-1].cumsum()[::-1]


@dataclass(slots=True)
class _Request:
    """Decayed skipped steps of a request, those the average of its kind would have made of its drafts, their ratio."""

    gain: DraftGain
    accepted: float = 0.0
    expected: float = 0.0
    factor: float = 1.0


class DraftController:
    """Decides the drafts of each step. Not thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._gains: dict[Hashable, DraftGain] = {}
        self._cost = StepCost()
        self._steps = 0
        self._probes = 0
        # What may be spent on learning: rows, and steps' worth of throughput.
        self._probe_credit = 0.0
        self._control_credit = 0.0

    def add(self, req_id: str, kind: Hashable = None) -> None:
        """A request whose drafts are to be decided.

        Args:
            kind: requests of one kind are expected to gain alike: those with the same policy and verifier.
        """
        self._requests[req_id] = _Request(self._gains.setdefault(kind, DraftGain()))

    def remove(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        self._requests.pop(req_id, None)

    def observe(self, req_id: str, drafted: int, accepted: int, deepest: int | None = None) -> None:
        """One forward of a request.

        Args:
            drafted: drafts forwarded beside the block.
            accepted: denoising steps skipped.
            deepest: which draft, from 1, skipped the last of them; 0 for none. None: every draft is one step, as where
                a step unmasks one position.
        """
        if drafted == 0:
            return
        request = self._requests.get(req_id)
        if request is None:
            return
        request.gain.observe(drafted, accepted, accepted if deepest is None else deepest)
        keep = 1 - 1 / REQUEST_WINDOW
        total = request.gain.total
        request.accepted = request.accepted * keep + accepted
        request.expected = request.expected * keep + total[min(drafted, len(total) - 1)]
        request.factor = (request.accepted + REQUEST_PRIOR) / (request.expected + REQUEST_PRIOR)

    def observe_step(self, num_rows: int, seconds: float, has_drafts: bool = False) -> None:
        """One step of the engine with ``num_rows`` rows in total took ``seconds``, time without work not counted.

        Args:
            has_drafts: whether some of the rows were drafts.
        """
        if num_rows > 0 and seconds > 0:
            self._cost.observe(num_rows, seconds, has_drafts)

    def allot(
        self,
        candidates: Sequence[tuple[str, int]],
        base_rows: int,
        block_rows: int,
        base_steps: int | None = None,
        base_has_drafts: bool = False,
    ) -> list[int]:
        """Drafts of each candidate in the next step.

        Args:
            candidates: requests that were added, with the drafts they have.
            base_rows: rows of all decoding requests without these drafts. Prefills are better left out: drafts do not
                save their time.
            block_rows: rows of one draft.
            base_steps: denoising steps that these rows make. None: one for each candidate.
            base_has_drafts: whether some of these rows are drafts, of other requests.

        Raises:
            KeyError: a candidate was not added.
        """
        available = np.array([drafts for _, drafts in candidates], dtype=np.int64)
        requests = [self._requests[req_id] for req_id, _ in candidates]
        most = int(available.max(initial=0))
        if most == 0:
            return [0] * len(candidates)
        kinds = {id(request.gain): request.gain for request in requests}
        if self._steps % REFRESH_STEPS == 0 or any(most > len(gain.of_draft) for gain in kinds.values()):
            self._cost.fit()
            for gain in self._gains.values():
                gain.fit(most)
        self._steps += 1

        factors = np.array([[request.factor] for request in requests])
        of_draft = np.array([request.gain.of_draft[:most] for request in requests])
        gains = np.minimum(factors * of_draft, 1.0)  # [requests, most]
        gains[np.arange(most) >= available[:, None]] = 0.0
        best_first = np.sort(gains, axis=None)[::-1]
        explored = (EXPLORED * self._cost.largest - base_rows) // block_rows
        limit = min(int(available.sum()), max(int(explored), 1))

        steps = np.empty(limit + 1)
        steps[0] = len(candidates) if base_steps is None else base_steps
        steps[1:] = best_first[:limit]
        seconds = self._cost.seconds(base_rows + block_rows * np.arange(limit + 1))
        seconds[0 if base_has_drafts else 1 :] += self._cost.of_drafts
        rates = steps.cumsum() / seconds
        count = int(rates.argmax())
        promise = 1 - rates[0] / rates[count]
        if promise < MARGIN or self._is_control_step(promise):
            drafts = np.zeros_like(available)
        else:
            last = best_first[count - 1]
            drafts = (gains > last).sum(axis=1)
            # Of the drafts that gain the same, those of the first requests.
            ties = (gains == last).sum(axis=1)
            drafts += np.clip(count - drafts.sum() - (ties.cumsum() - ties), 0, ties)
        if promise < MARGIN:
            self._control_credit = 0.0
        self._probe(drafts, available, base_rows, block_rows)
        return drafts.tolist()

    def _is_control_step(self, promise: float) -> bool:
        """Whether this step does without drafts, though they promise this share of its throughput.

        Drafts look cheap once what steps take without them is out of date.
        """
        self._control_credit += CONTROL_SHARE
        if self._control_credit < promise:
            return False
        self._control_credit -= promise
        return True

    def _probe(self, drafts: Integers, available: Integers, base_rows: int, block_rows: int) -> None:
        """Now and then give drafts to requests that got none, in turn: without drafts nothing is learned of them."""
        idle = np.flatnonzero((drafts == 0) & (available > 0))
        if len(idle) == 0:
            return
        self._probe_credit += PROBE_SHARE * base_rows
        if self._probe_credit < PROBE_WIDTH * base_rows:
            return
        for _ in idle:
            depth = PROBE_DEPTHS[self._probes % len(PROBE_DEPTHS)]
            if depth * block_rows > self._probe_credit:
                break
            request = idle[self._probes % len(idle)]
            drafts[request] = min(depth, available[request])
            self._probe_credit -= depth * block_rows
            self._probes += 1
