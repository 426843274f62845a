"""Offline simulation of ``drafts="auto"``: synthetic machines and requests, against every fixed number of drafts.

``python benchmarks/auto_drafts.py --help``; ``docs/auto-drafts.md`` says what is simulated.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from record import RAW
from rich.console import Console
from rich.progress import track
from sheet import Sheet

from vllm_dllm.decoding.adaptive import DraftController, Drafting
from vllm_dllm.decoding.step_cost import StepCost

BLOCK_LENGTH = 32
BLOCKS_PER_REQUEST = 8
PROMPT_ROWS = 256
FIXED_DRAFTS = (0, 1, 2, 3, 4, 6, 8)
MOST_DRAFTS = max(FIXED_DRAFTS)
TIMED_STEPS = 12
"""Of each number of requests without drafts, with one draft each, and with all drafts, at the start."""
SPIKE = 4.0
"""Factor of a step that something else on the machine holds up."""

HIGH_LOAD = 64
HIGH_LOAD_BOUND = 0.97
SINGLE_BOUND = 0.95

GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, spread requests evenly, so that a short simulation has about the mean acceptance."""


@dataclass(frozen=True)
class Machine:
    """How long a step takes.

    Attributes:
        overhead: seconds of every step.
        floor: seconds that its rows take at least.
        per_row: seconds that each of them takes beyond the knee.
        sharpness: of the knee.
        noise: standard deviation of the logarithm of the seconds that are timed at the start.
        spikes: share of steps timed ``SPIKE`` times as long.
        slowdown: factor from the middle of the simulation on, as if another program had started.
        verifying: seconds more of a step that has drafts.
        drafting: seconds more of a step that makes drafts for the next.
        drift: standard deviation of the logarithm of the machine's pace while its steps are timed.
    """

    overhead: float
    floor: float
    per_row: float
    sharpness: float
    noise: float = 0.03
    spikes: float = 0.0
    slowdown: float = 1.0
    verifying: float = 0.0
    drafting: float = 0.0
    drift: float = 0.0

    def seconds(self, rows: int, verifies: bool = False, drafts: bool = False) -> float:
        """Without noise, slowdown and drift."""
        work = (self.floor**self.sharpness + (self.per_row * rows) ** self.sharpness) ** (1 / self.sharpness)
        return self.overhead + work + self.verifying * verifies + self.drafting * drafts


# 8 B parameters in bfloat16: 8 ms to read them, as long as 512 rows take to compute.
GPU = Machine(overhead=2e-3, floor=8e-3, per_row=8e-3 / 512, sharpness=6.0)
# 100 M parameters on two cores.
CPU = Machine(overhead=4e-3, floor=1e-3, per_row=0.5e-3, sharpness=2.0)
# 3 M parameters on two cores: what drafts take on the host is a tenth of a large step.
TINY = Machine(overhead=4e-3, floor=1e-3, per_row=20e-6, sharpness=2.0, verifying=1.5e-3, drafting=2.5e-3)

MACHINES = {
    "gpu": GPU,
    "cpu": CPU,
    "gpu, noisy": replace(GPU, noise=0.2, spikes=0.02),
    "cpu, noisy": replace(CPU, noise=0.2, spikes=0.02),
    "cpu, slows": replace(CPU, slowdown=2.0),
    "tiny, noisy": replace(TINY, noise=0.2, spikes=0.02),
    "tiny, drifts": replace(TINY, drift=0.25),
}


@dataclass(frozen=True)
class Acceptance:
    """How likely a draft is accepted once those before it are.

    Attributes:
        low, high: bounds of that probability. Requests are spread between them.
        two_kinds: requests have one bound or the other instead.
        period: steps in which all requests swing from ``low`` to ``high`` and back instead; 0: they do not.
        jumps: share of denoising steps that unmask two positions, and that only a pair of drafts therefore skips.
    """

    low: float
    high: float
    two_kinds: bool = False
    period: int = 0
    jumps: float = 0.0

    def of_request(self, index: int) -> float:
        """Probability of the request with this number."""
        place = index * GOLDEN_RATIO % 1
        if self.two_kinds:
            place = round(place)
        return self.low + (self.high - self.low) * place

    def at(self, step: int) -> float:
        """Probability of all requests, where it swings."""
        return self.low + (self.high - self.low) * (1 - np.cos(2 * np.pi * step / self.period)) / 2


ACCEPTANCES = {
    "0.3": Acceptance(0.3, 0.3),
    "0.5": Acceptance(0.5, 0.5),
    "0.7": Acceptance(0.7, 0.7),
    "0.85": Acceptance(0.85, 0.85),
    "0.95": Acceptance(0.95, 0.95),
    "0.3 to 0.95": Acceptance(0.3, 0.95),
    "0.3 or 0.95": Acceptance(0.3, 0.95, two_kinds=True),
    "drifting": Acceptance(0.3, 0.95, period=1000),
    "jumps": Acceptance(0.7, 0.7, jumps=0.8),
}


@dataclass(frozen=True)
class Outcome:
    """Of one simulation.

    Attributes:
        throughput: denoising steps, skipped ones included, per second.
        host_seconds: per step, spent in the controller.
    """

    throughput: float
    host_seconds: float


@dataclass(frozen=True)
class Row:
    """``auto`` beside fixed numbers of drafts.

    Attributes:
        vs_none: throughput over that without drafts.
        vs_best: throughput over that of the best fixed number, ``best``.
        host_us: microseconds per step, spent in the controller.
    """

    machine: str
    acceptance: str
    batch: int
    vs_none: float
    best: int
    vs_best: float
    host_us: float

    @property
    def reached(self) -> bool:
        """Whether it meets the bound of its load, where there is one."""
        if self.batch == 1:
            return self.vs_best >= SINGLE_BOUND
        return self.batch < HIGH_LOAD or self.vs_none >= HIGH_LOAD_BOUND


def simulate(
    machine: Machine, acceptance: Acceptance, batch: int, num_drafts: int | None, steps: int, seed: int
) -> Outcome:
    """``steps`` engine steps from a cold start, always with ``batch`` requests.

    Throughput counts the machine's own seconds; what the controller timed at the start has noise.

    Args:
        num_drafts: of every request that has as many masks to draft for; None: the controller decides.
    """
    rng = np.random.default_rng(seed)
    controller = DraftController(timed(machine, rng)) if num_drafts is None else None
    drafting, was_drafting = Drafting(), False
    requests = list(range(batch))
    if controller:
        for request in requests:
            controller.add(str(request))
    # Requests stand at different points of their blocks and answers, as those of a running engine do.
    masks = rng.integers(1, BLOCK_LENGTH + 1, batch)
    blocks = rng.integers(1, BLOCKS_PER_REQUEST + 1, batch)
    chance = np.array([acceptance.of_request(request) for request in requests])
    fresh = np.ones(batch, dtype=bool)
    prompts, denoised, elapsed, host = batch, 0, 0.0, 0.0
    for step in range(steps):
        # A block's first forward has no drafts, and commits the block before.
        available = np.where(fresh | (not was_drafting), 0, np.minimum(MOST_DRAFTS, masks - 1))
        decode_rows = BLOCK_LENGTH * (batch + int(fresh.sum()))
        if controller:
            drafts = np.zeros(batch, dtype=np.int64)
            having = np.flatnonzero(available)
            candidates = [(str(requests[i]), int(available[i])) for i in having]
            start = perf_counter()
            allotted = controller.allot(candidates, decode_rows, BLOCK_LENGTH, batch)
            host += perf_counter() - start
            drafts[having] = allotted
            was_drafting = drafting.decide(bool(available.any()), bool(drafts.any()))
        else:
            drafts = np.minimum(available, num_drafts or 0)
            was_drafting = bool(num_drafts)
        does = (bool(drafts.any()), was_drafting)
        if acceptance.period:
            chance[:] = acceptance.at(step)
        accepted, deepest = _verify(rng, drafts, chance, acceptance.jumps)

        rows = decode_rows + BLOCK_LENGTH * int(drafts.sum()) + PROMPT_ROWS * prompts
        elapsed += machine.seconds(rows, *does) * (machine.slowdown if 2 * step > steps else 1.0)
        if controller:
            seen = zip(requests, drafts.tolist(), accepted.tolist(), deepest.tolist(), strict=True)
            start = perf_counter()
            for request, num_drafted, num_accepted, last in seen:
                controller.observe(str(request), num_drafted, num_accepted, last)
            host += perf_counter() - start

        denoised += int((1 + accepted).sum())
        masks -= 1 + deepest
        fresh = masks <= 0
        masks[fresh] = BLOCK_LENGTH
        blocks -= fresh
        ended = np.flatnonzero(blocks == 0)
        prompts = len(ended)
        for i in ended:
            blocks[i] = BLOCKS_PER_REQUEST
            request, requests[i] = requests[i], max(requests) + 1
            chance[i] = acceptance.of_request(requests[i])
            if controller:
                controller.remove(str(request))
                controller.add(str(requests[i]))
    return Outcome(denoised / elapsed, host / steps)


def timed(machine: Machine, rng: np.random.Generator) -> StepCost:
    """What an engine on this machine times at its start, noise and pace of the moment included."""
    pace = machine.drift * rng.standard_normal()

    def measure(rows: int, drafts: bool) -> float:
        noise = np.exp(pace + machine.noise * rng.standard_normal(TIMED_STEPS))
        spikes = np.where(rng.random(TIMED_STEPS) < machine.spikes, SPIKE, 1.0)
        return float(np.median(machine.seconds(rows, drafts, drafts) * noise * spikes))

    requests = [1 << doubling for doubling in range(9)]
    return StepCost(
        [
            (rows, drafts > 0, measure(rows, drafts > 0))
            for drafts in (0, 1, MOST_DRAFTS)
            for rows in (BLOCK_LENGTH * (1 + drafts) * each for each in requests)
        ]
    )


def _verify(
    rng: np.random.Generator, drafts: NDArray[np.int64], chance: NDArray[np.float64], jumps: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Skipped steps and deepest accepted draft of each request."""
    shape = (len(drafts), MOST_DRAFTS)
    reached = (1 + (rng.random(shape) < jumps)).cumsum(axis=1)
    follows = (rng.random(shape) < chance[:, None]).cumprod(axis=1) > 0
    passes = follows & (reached <= drafts[:, None])
    return passes.sum(axis=1), np.where(passes, reached, 0).max(axis=1)


@cache
def fixed_throughput(machine: Machine, acceptance: Acceptance, batch: int, steps: int, seed: int) -> dict[int, float]:
    """Of every fixed number of drafts."""
    return {drafts: simulate(machine, acceptance, batch, drafts, steps, seed).throughput for drafts in FIXED_DRAFTS}


def compare(machine: str, acceptance: str, batch: int, steps: int, seed: int) -> Row:
    """``auto`` and the fixed numbers."""
    model, profile = MACHINES[machine], ACCEPTANCES[acceptance]
    # How steps are timed changes nothing without a controller.
    fixed = fixed_throughput(replace(model, noise=0.0, spikes=0.0, drift=0.0), profile, batch, steps, seed)
    auto = simulate(model, profile, batch, None, steps, seed)
    best = max(fixed, key=lambda drafts: fixed[drafts])
    return Row(
        machine=machine,
        acceptance=acceptance,
        batch=batch,
        vs_none=auto.throughput / fixed[0],
        best=best,
        vs_best=auto.throughput / fixed[best],
        host_us=auto.host_seconds * 1e6,
    )


def make_sheet(rows: Sequence[Row], machine: str, batches: Sequence[int]) -> Sheet:
    """Rows of one machine: acceptance down, batch across."""
    table = []
    for acceptance in dict.fromkeys(row.acceptance for row in rows):
        cells = [
            f"{'' if row.reached else '[red]'}{row.vs_none:.2f} / {row.vs_best:.2f} ({row.best})"
            for row in rows
            if (row.machine, row.acceptance) == (machine, acceptance)
        ]
        table.append([acceptance, *cells])
    title = f"{machine}: throughput over none / over the best fixed number (which)"
    return Sheet(title, ["acceptance", *(f"batch {batch}" for batch in batches)], table, num_labels=1)


def main(
    machine: Annotated[list[str], typer.Option(help="Which machines.")] = [*MACHINES],  # noqa: B006
    acceptance: Annotated[list[str], typer.Option(help="Which requests.")] = [*ACCEPTANCES],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="Concurrent requests.")] = [1, 4, 16, 64, 128],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Engine steps of each simulation.")] = 3000,
    seed: Annotated[int, typer.Option(help="Of noise and acceptance.")] = 0,
    processes: Annotated[int, typer.Option(help="Simulations at a time.")] = os.cpu_count() or 1,
    out: Annotated[Path, typer.Option(help="JSON.")] = RAW / "auto_drafts.json",
) -> None:
    """Simulate and compare."""
    console = Console(width=None if Console().is_terminal else 140)
    cases = list(product(acceptance, batch, machine))
    with ProcessPoolExecutor(processes) as pool:
        futures = [pool.submit(compare, where, profile, size, steps, seed) for profile, size, where in cases]
        rows = [future.result() for future in track(futures, "simulating", console=console, transient=True)]
    for where in machine:
        console.print(make_sheet(rows, where, batch).rich())
    missed = [row for row in rows if not row.reached]
    console.print(
        f"bounds: {HIGH_LOAD_BOUND} of none from batch {HIGH_LOAD} on, {SINGLE_BOUND} of the best fixed number at "
        f"batch 1; missed by {len(missed)} of {sum(row.batch == 1 or row.batch >= HIGH_LOAD for row in rows)}"
    )
    result = {
        "steps": steps,
        "seed": seed,
        "rows": [asdict(row) | {"reached": row.reached} for row in rows],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
