"""How many drafts each request gets in the next step (``drafts="auto"``).

A draft costs rows and may skip a denoising step. The drafts of a step are chosen to make the most of

    (denoising steps without drafts + steps expected to be skipped) / expected seconds

which is the rule "one more draft as long as its gain per second exceeds that of the whole step". Both expectations are
learned from the running engine: what drafts gain from what was accepted, what rows cost from how long steps took.
Nothing here knows of vLLM or of tokens, everything runs on the host in microseconds, and the same calls get the same
answers.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from math import exp, log, log2
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

DRAFTING_INTERVAL = 16
"""Steps between two that make drafts while none are used."""

REFRESH_STEPS = 8
"""Decisions between two looks at what was learned; in between it is only written down."""

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
REQUEST_PRIOR = 16.0
"""Skipped steps expected of a request that outweigh the engine's average, as long as it is not known how far requests
differ."""
LEAST_PRIOR, MOST_PRIOR = 2.0, 128.0
"""What they may become."""
DISPERSION = 1.5
"""Variance of the steps that forwards of one request skip, over their mean: about that of chains that end by chance."""
SPREAD_WINDOW = 16
"""Looks at single requests after which one has lost most of its weight."""

PROBE_SHARE = 0.005
"""Rows of drafts that only serve to learn, over those of all steps."""
PROBE_DEPTHS = (1, 2, 4, 8)
"""Drafts of such a request, in turn: where one gains nothing, several may."""
PROBE_WIDTH = 0.25
"""Rows of a probe over those of its step: enough to show in its seconds."""
CONTROL_SHARE = 0.005
"""Throughput given up for steps without drafts, which show what drafts cost."""
STRETCH_SHARE = 0.0025
"""The same for steps with more drafts than pay, which show what more of them cost and gain."""
STRETCH = 2
"""Drafts of such a step over those that pay."""
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
LEAST_TRUST = 0.001
"""Of that weight always stays."""
LEAST_SECONDS = 1e-9
"""Of a step; none takes less."""
PACE_STEPS = 31
"""Latest steps that tell the machine's pace."""
PACE_SHARE = 0.97
"""Of the pace that is taken out of what a step took. The rest wears off: noise would drive the pace ever further from
1, and away from the pace that rare steps were seen at."""
USABLE_WINDOW = 64
"""Steps with drafts to use after which one has lost most of its weight in how many make drafts for each of them."""
MOST_DRAFTING = 4.0
"""How many that may be: others may draft for long while a prompt is read."""
EXPLORED = 1.5
"""Rows of a step over those of the largest steps of late: load is raised bit by bit."""


_ENDLESS = 1e9
"""Rows: more than any step has."""


class Drafting:
    """Whether a step makes drafts for the next, of requests whose drafts are decided step by step.

    Drafts are made before anybody knows whether they are used, and making them takes time. A step that was to have
    drafts but uses none makes none either: alone it shows what a step without any of it takes. After a second one in a
    row drafts do not pay for the time being, and are made now and then.
    """

    def __init__(self) -> None:
        self._unused = 0
        self._steps = 0

    def decide(self, are_there: bool, are_used: bool) -> bool:
        """Whether this step makes drafts; to be called once for each.

        Args:
            are_there: the step before made drafts for this one.
            are_used: this one has some of them.
        """
        if are_used:
            self._unused = max(self._unused - 1, 0)
        elif are_there:
            self._unused = min(self._unused + 1, 2)
        if self._unused < 2:
            return are_used or not are_there
        self._steps += 1
        return self._steps % DRAFTING_INTERVAL == 0


class StepCost:
    """Seconds of a step: a convex, non-decreasing, piecewise linear function of its rows, and more with drafts.

    The function covers an accelerator (flat up to a knee, then linear) and a CPU (linear from the start). Row counts
    are binned, so that hours at one load do not wash out what is known of another; convexity joins the bins against
    noise, in which a free curve would see bargains. What it takes to make drafts for the next step, and to verify those
    of this one, is time beside that of rows. It shows where a bin has steps of several kinds.

    The machine's pace changes: other programs come and go, texts get longer. Steps with many rows that were seen at one
    pace say nothing beside steps with few that were seen at another. So all are kept as they would have been at one
    pace; which one does not matter to what is compared.
    """

    def __init__(self) -> None:
        # Of each bin the latest steps of each kind.
        self._bins: dict[int, dict[_Kind, _Steps]] = {}
        self._now = 0
        # Logarithms of the seconds of late steps over the expected ones.
        self._paces: deque[float] = deque(maxlen=PACE_STEPS)
        # Knots of the function, from 0 rows to more than any step has.
        self._rows = [0.0, _ENDLESS]
        self._seconds = [1.0, 1.0]
        # Of each bin: what its steps took over what the function says.
        self._misfits: dict[int, float] = {}
        self.of_verifying = 0.0
        """Seconds that it takes to verify a step's drafts, beside their rows and however many there are."""
        self.of_drafting = 0.0
        """Seconds that it takes to make drafts for the next step."""
        self.largest = 0.0
        """Rows of the largest steps of late."""

    def observe(self, rows: int, seconds: float, verifies: bool = False, drafts: bool = False) -> None:
        """A step of ``rows`` > 0 rows took ``seconds`` > 0. It had drafts, it made drafts for the next."""
        self._now += 1
        key, kind = int(BINS_PER_OCTAVE * log2(rows)), _Kind(verifies, drafts)
        if key in self._misfits:
            # Beside steps of its own bin: where rows cost more than the function knows, the pace is not to explain it.
            expected = self.seconds(rows) * self._misfits[key] + self._beside(kind)
            self._paces.append(log(max(seconds, LEAST_SECONDS) / max(expected, LEAST_SECONDS)))
        if self._paces:
            seconds *= exp(-PACE_SHARE * median(self._paces))
        steps = self._bins.setdefault(key, {})
        if kind not in steps:
            steps[kind] = _Steps(kind)
        steps[kind].append(self._now, rows, seconds)

    def fit(self) -> None:
        """Take the observations into account."""
        bins = {}
        for key, kinds in sorted(self._bins.items()):
            if known := [summary for _, steps in sorted(kinds.items()) if (summary := steps.summary())]:
                bins[key] = known
        if not bins:
            return
        self._compare_kinds(bins.values())
        rows, seconds, weights, latest = np.array([self._join(known) for known in bins.values()]).T
        # Noise is about proportional.
        fitted = np.maximum(_fit_convex(rows, seconds, weights / seconds**2), seconds.min() / 2)
        slopes = np.diff(fitted) / np.diff(rows) if len(rows) > 1 else np.zeros(1)
        # Towards 0 rows never faster than in proportion, or small steps would take no time at all.
        start = max(fitted[0] - slopes[0] * rows[0], 0.0)
        end = fitted[-1] + slopes[-1] * (_ENDLESS - rows[-1])
        self._rows = [0.0, *rows.tolist(), _ENDLESS]
        self._seconds = [float(start), *fitted.tolist(), float(end)]
        self._misfits = dict(zip(bins, (seconds / fitted).tolist(), strict=True))
        self.largest = rows[latest > self._now - 2 * BIN_HALF_LIFE].max(initial=0.0)

    def _compare_kinds(self, bins: Iterable[list["_Summary"]]) -> None:
        """What drafts take beside their rows, from the bins that have steps of several kinds.

        Weighted least squares with an unknown of each bin's own, for the change of what is known.
        """
        products, target = np.zeros((2, 2)), np.zeros(2)
        for summaries in bins:
            if len(summaries) < 2:
                continue
            kinds = np.array([each.kind for each in summaries], dtype=float)
            more = np.array([each.seconds - self.seconds(each.rows) - self._beside(each.kind) for each in summaries])
            weights = np.array([self._weight(each) for each in summaries])
            shares = weights / weights.sum()
            # Noise is about proportional.
            weights = weights / summaries[0].seconds ** 2
            kinds -= shares @ kinds
            products += kinds.T @ (weights[:, None] * kinds)
            target += kinds.T @ (weights * (more - shares @ more))
        total = np.trace(products)
        if not total:
            return
        # What no bin tells apart changes as little as it can.
        products[np.diag_indices(2)] += 1e-3 * total
        known = np.array([self.of_verifying, self.of_drafting])
        change = np.linalg.solve(products, target)
        for index in np.flatnonzero(known + change < 0.0)[:1]:
            # Nothing takes less than no time; the other one is what it then is.
            change[index] = -known[index]
            other = 1 - index
            change[other] = (target[other] - products[other, index] * change[index]) / products[other, other]
        self.of_verifying, self.of_drafting = np.maximum(known + change, 0.0).tolist()

    def _beside(self, kind: "_Kind") -> float:
        """Seconds that a step of a kind takes beside those of its rows."""
        return self.of_verifying * kind.verifies + self.of_drafting * kind.drafts

    def _weight(self, summary: "_Summary") -> float:
        """Old knowledge yields to new."""
        return summary.number * max(0.5 ** ((self._now - summary.latest) / BIN_HALF_LIFE), LEAST_TRUST)

    def _join(self, summaries: list["_Summary"]) -> tuple[float, float, float, int]:
        """Rows, seconds that these take, weight and time of the latest, of the steps of a bin."""
        weights = [self._weight(each) for each in summaries]
        weight = sum(weights)
        rows = sum(w * each.rows for w, each in zip(weights, summaries, strict=True)) / weight
        seconds = sum(w * (each.seconds - self._beside(each.kind)) for w, each in zip(weights, summaries, strict=True))
        seconds /= weight
        return rows, max(seconds, LEAST_SECONDS), weight, max(each.latest for each in summaries)

    def seconds(self, rows: float) -> float:
        """Expected seconds of a step of so many rows, without drafts; the same for all while nothing is known."""
        knot = bisect_right(self._rows, rows, 1, len(self._rows) - 1)
        start, start_seconds = self._rows[knot - 1], self._seconds[knot - 1]
        slope = (self._seconds[knot] - start_seconds) / (self._rows[knot] - start)
        return start_seconds + (rows - start) * slope


class _Kind(NamedTuple):
    """What a step does with drafts: those of its own, and those of the next."""

    verifies: bool
    drafts: bool


class _Summary(NamedTuple):
    """Steps of a bin that are of one kind.

    Attributes:
        rows: mean.
        seconds: mean of the middle half.
        latest: when the last of them was.
    """

    kind: _Kind
    rows: float
    seconds: float
    number: int
    latest: int


class _Steps:
    """The latest steps of a bin that are of one kind."""

    def __init__(self, kind: _Kind) -> None:
        self._kind = kind
        # When, rows, seconds.
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=BIN_STEPS)
        self._summary: _Summary | None = None

    def append(self, time: int, rows: int, seconds: float) -> None:
        self._steps.append((time, rows, seconds))
        if time - self._steps[0][0] > STEP_LIFE and len(self._steps) > LEAST_STEPS:
            self._steps.popleft()
        self._summary = None

    def summary(self) -> _Summary | None:
        """None where there are too few."""
        if self._summary is None and len(self._steps) >= LEAST_STEPS:
            times, rows, seconds = zip(*self._steps, strict=True)
            count = len(times)
            middle = sorted(seconds)[count // 4 : count - count // 4]
            mean = max(sum(middle) / len(middle), LEAST_SECONDS)
            self._summary = _Summary(self._kind, sum(rows) / count, mean, count, times[-1])
        return self._summary


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


def _non_decreasing(values: Floats, weights: Floats) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] >= value:
            other, other_weight, other_count = pools.pop()
            value = (value * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


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
        self.of_draft: list[float] = []
        """Expected gain of draft k, from k = 1; not increasing in k."""
        self.total = [0.0]
        """Expected gain of the first k drafts, from k = 0."""
        self.prior = REQUEST_PRIOR
        """Skipped steps expected of a request that outweigh what its kind has on average."""
        # Of the looks at single requests: squared steps expected, and squared error beyond what chance explains.
        self._squares = SPREAD_WINDOW / 4 * REQUEST_WINDOW**2
        self._spread = self._squares * DISPERSION / REQUEST_PRIOR

    def observe(self, drafted: int, accepted: int, deepest: int) -> None:
        """A forward with ``drafted`` > 0 drafts skipped ``accepted`` steps, the last of them with draft ``deepest``."""
        self._observed[drafted, accepted, deepest] += 1

    def observe_request(self, accepted: float, expected: float) -> None:
        """Some forwards of one request skipped ``accepted`` steps where the average is ``expected``.

        Of the variance of their ratio over requests, ``DISPERSION / expected`` is chance. What is left, v, says how far
        requests differ, and the best linear estimate of a request's own ratio has ``DISPERSION / v`` steps of prior.
        """
        keep = 1 - 1 / SPREAD_WINDOW
        self._squares = self._squares * keep + expected**2
        self._spread = self._spread * keep + (accepted - expected) ** 2 - DISPERSION * expected
        # The variance, and not the prior, is bounded first: it may come out negative.
        variance = max(self._spread / self._squares, DISPERSION / MOST_PRIOR)
        self.prior = max(DISPERSION / variance, LEAST_PRIOR)

    def fit(self, most: int, steps: int = 0) -> None:
        """Take the observations into account, and expect up to ``most`` drafts, ``steps`` steps after the last time."""
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
        kept = exp(-steps / ENGINE_LIFE)
        self._tried *= kept
        self._skipped *= kept
        gain = np.empty(size)
        expected = 1.0
        for k in range(size):
            prior = PRIOR_FORWARDS * PRIOR_ACCEPTANCE * expected
            gain[k] = expected = (self._skipped[k] + prior) / (self._tried[k] + PRIOR_FORWARDS)
        # Where a step unmasks several positions, a single draft gains nothing that several would: each draft of such a
        # run counts with the run's mean.
        self.of_draft = [-loss for loss in _non_decreasing(-gain, self._tried + PRIOR_FORWARDS)]
        self.total = [0.0, *accumulate(self.of_draft)]


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
    # Not decayed: forwards with drafts that its kind has yet to hear of, and the same of them.
    forwards: int = 0
    late_accepted: int = 0
    late_expected: float = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """A forward with ``drafted`` > 0 drafts skipped ``accepted`` steps."""
        expected = self.gain.total[min(drafted, len(self.gain.total) - 1)]
        keep = 1 - 1 / REQUEST_WINDOW
        self.accepted = self.accepted * keep + accepted
        self.expected = self.expected * keep + expected
        self.factor = (self.accepted + self.gain.prior) / (self.expected + self.gain.prior)
        self.forwards += 1
        self.late_accepted += accepted
        self.late_expected += expected
        if self.forwards == REQUEST_WINDOW:
            self.tell()

    def tell(self) -> None:
        """Tell its kind of late forwards."""
        if self.forwards:
            self.gain.observe_request(self.late_accepted, self.late_expected)
        self.forwards, self.late_accepted, self.late_expected = 0, 0, 0.0

    def gain_of(self, index: int) -> float:
        """Steps that a draft, from 0, is expected to skip."""
        return min(self.factor * self.gain.of_draft[index], 1.0)


class DraftController:
    """Decides the drafts of each step. Not thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._gains: dict[Hashable, DraftGain] = {}
        self._cost = StepCost()
        self._decisions = 0
        # Of the engine, and how many there were at the last decision and at the last look at what was learned.
        self._steps = 0
        self._decided_at = 0
        self._fitted_at = 0
        # Late steps that made drafts, and late ones that had some to use: not every one of the former finds masks left.
        self._drafting_steps = self._usable_steps = USABLE_WINDOW / 2
        self._probes = 0
        # What may be spent on learning: rows, and steps' worth of throughput.
        self._probe_credit = 0.0
        self._control_credit = 0.0
        self._stretch_credit = 0.0

    def add(self, req_id: str, kind: Hashable = None) -> None:
        """A request whose drafts are to be decided.

        Args:
            kind: requests of one kind are expected to gain alike: those with the same policy and verifier.
        """
        self._requests[req_id] = _Request(self._gains.setdefault(kind, DraftGain()))

    def remove(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        if request := self._requests.pop(req_id, None):
            request.tell()

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
        request.observe(drafted, accepted)

    def observe_step(self, num_rows: int, seconds: float, verifies: bool = False, drafts: bool = False) -> None:
        """One step of the engine with ``num_rows`` rows in total took ``seconds``, time without work not counted.

        Args:
            verifies: whether some of the rows were drafts.
            drafts: whether it made drafts for the next.
        """
        self._steps += 1
        self._drafting_steps = min(self._drafting_steps + drafts, MOST_DRAFTING * self._usable_steps)
        if num_rows > 0 and seconds > 0:
            self._cost.observe(num_rows, seconds, verifies, drafts)

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
        available = [drafts for _, drafts in candidates]
        requests = [self._requests[req_id] for req_id, _ in candidates]
        most = max(available, default=0)
        if most == 0:
            return [0] * len(candidates)
        kinds = {id(request.gain): request.gain for request in requests}
        if self._decisions % REFRESH_STEPS == 0 or any(most > len(gain.of_draft) for gain in kinds.values()):
            self._cost.fit()
            for gain in self._gains.values():
                gain.fit(most, self._steps - self._fitted_at)
            self._fitted_at = self._steps
        self._decisions += 1
        since, self._decided_at = self._steps - self._decided_at, self._steps

        self._usable_steps += 1
        if self._usable_steps > USABLE_WINDOW:
            self._usable_steps *= 1 - 1 / USABLE_WINDOW
            self._drafting_steps *= 1 - 1 / USABLE_WINDOW
        of_drafts = self._cost.of_verifying + self._cost.of_drafting * max(self._drafting_steps / self._usable_steps, 1)

        explored = (EXPLORED * self._cost.largest - base_rows) // block_rows
        limit = min(sum(available), max(int(explored), 1))
        steps = len(candidates) if base_steps is None else base_steps
        rate_without = steps / (self._cost.seconds(base_rows) + of_drafts * base_has_drafts)
        # What is ahead of the drafts of this step.
        step = (requests, available, limit, steps, base_rows, block_rows, of_drafts)
        drafts, rate = self._give(*step)
        promise = 1 - rate_without / rate
        if promise < MARGIN or self._is_control_step(promise):
            drafts = [0] * len(candidates)
        elif self._decisions % REFRESH_STEPS == 0:
            more, rate_of_more = self._give(*step, least=STRETCH * sum(drafts))
            if sum(more) > sum(drafts) and self._is_stretch_step(1 - rate_of_more / rate):
                drafts = more
        if promise < MARGIN:
            self._control_credit = 0.0
        self._probe(drafts, available, base_rows, block_rows, min(since, DRAFTING_INTERVAL))
        return drafts

    def _give(
        self,
        requests: Sequence[_Request],
        available: Sequence[int],
        limit: int,
        steps: float,
        rows: int,
        block_rows: int,
        of_drafts: float,
        least: int = 1,
    ) -> tuple[list[int], float]:
        """The most promising drafts, ``least`` if there are as many, and more as long as they raise the steps per
        second; these.

        No draft gains more than the one before it, and no row costs less: once a draft does not raise them, none does.
        """
        drafts = [0] * len(requests)
        rate = 0.0
        # Of drafts that gain the same those of the first requests.
        waiting = [(-request.gain_of(0), index) for index, request in enumerate(requests) if available[index]]
        heapify(waiting)
        for number in range(limit):
            negative_gain, index = waiting[0]
            steps -= negative_gain
            rows += block_rows
            higher = steps / (self._cost.seconds(rows) + of_drafts)
            if higher <= rate and number >= least:
                break
            rate = higher
            drafts[index] += 1
            if drafts[index] < available[index]:
                heapreplace(waiting, (-requests[index].gain_of(drafts[index]), index))
            else:
                heappop(waiting)
        return drafts, rate

    def _is_control_step(self, promise: float) -> bool:
        """Whether this step does without drafts, though they promise this share of its throughput.

        Drafts look cheap once what steps take without them is out of date. As such a step makes none, the next one has
        to do without them too.
        """
        self._control_credit += CONTROL_SHARE
        if self._control_credit < 2 * promise:
            return False
        self._control_credit -= 2 * promise
        return True

    def _is_stretch_step(self, loss: float) -> bool:
        """Whether this step has more drafts than pay, though that is expected to lose this share of its throughput.

        What larger steps take is else taken from smaller ones, and what more drafts gain from their predecessors.
        """
        loss = max(loss, MARGIN)
        self._stretch_credit += STRETCH_SHARE * REFRESH_STEPS
        if self._stretch_credit < loss:
            return False
        self._stretch_credit -= loss
        return True

    def _probe(self, drafts: list[int], available: Sequence[int], base_rows: int, block_rows: int, steps: int) -> None:
        """Now and then give drafts to requests that got none, in turn: without drafts nothing is learned of them.

        Args:
            steps: since the last decision.
        """
        idle = [index for index, most in enumerate(available) if most and not drafts[index]]
        if not idle:
            return
        self._probe_credit += PROBE_SHARE * base_rows * steps
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
