"""Steps of an engine under a load that does not change: their time, their parts and their launches.

The engine runs in this process, so that its scheduler and its model runner can be looked into.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_cells import Job, Level
from gpu_probe import HostClock, Parts, Stopwatch, clock_of, costliest_functions, profiled, runner_of, watched
from systems import System

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

MAX_MODEL_LEN = 4096
WARM_UP_STEPS = 4
"""Untimed steps once all requests decode."""
PARTS_STEPS = 12
"""Steps whose parts are timed on one clock, and steps whose functions are profiled."""
PROFILED_STEPS = 4
"""Steps whose launches are counted: the profiler takes long to read more."""
PROFILED_TOKENS_PER_STEP = 1
"""Launches and functions do not depend on how many tokens a step unmasks."""
PREFILL_STEPS = 200
"""Steps in which all requests must have come to decode."""


@dataclass(frozen=True)
class LevelResult:
    """Steps at one level. Times in milliseconds.

    Attributes:
        step_ms: median of the timed steps.
        tokens_per_forward: tokens that a request got in a step, on average over the timed steps.
        context: positions of a request with K/V, on average over the requests.
        rows, logits_rows: of a step, of all requests together; 0 where they are not known.
        graph: CUDA graphs that ran the model in these steps: ``full``, ``piecewise`` or ``none``.
        parts: medians of ``total``, ``plan``, ``forward`` (logits included) and ``sampler``, on the device.
        host_parts: the same of the host, which launches what the device does.
        functions: what takes most of the host's time (``gpu_probe.FunctionCost``).
        launches: per step (``gpu_probe.Launches``); None on a CPU.
        note: why some of these are missing.
        samples: the timed steps.
    """

    concurrency: int
    tokens_per_step: int
    step_ms: float
    tokens_per_second: float
    tokens_per_forward: float
    context: float
    rows: int = 0
    logits_rows: int = 0
    graph: str = ""
    parts: dict[str, float] | None = None
    host_parts: dict[str, float] | None = None
    launches: dict[str, float] | None = None
    note: str = ""
    samples: list[float] = field(default_factory=list)
    functions: list[dict[str, Any]] = field(default_factory=list)


def freedave_depth(drafts: int) -> int:
    """FreeDave's d, which counts the block itself."""
    return drafts + 1


def verifying(drafts: int) -> dict[str, str | int]:
    """Request options for so many drafts of FreeDave."""
    if not drafts:
        return {"dllm_verify": "none"}
    return {"dllm_verify": "freedave", "dllm_drafts": freedave_depth(drafts)}


def sampling(max_tokens: int, extra_args: dict[str, Any] | None, **more: Any) -> "SamplingParams":
    """Greedy."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        extra_args=extra_args,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **more,
    )


class Load:
    """Requests that decode for as long as anybody looks.

    Args:
        period: steps after which every request has got as many tokens as after the last so many; None: unknown.
    """

    def __init__(self, llm: "LLM", period: int | None) -> None:
        self.engine: Any = llm.llm_engine
        self.scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
        self.period = period

    @property
    def emitted(self) -> list[int]:
        """Tokens of each request so far."""
        return [request.num_output_tokens for request in self.scheduler.requests.values()]

    @property
    def context(self) -> float:
        """Positions of a request with K/V, on average."""
        computed = [request.num_computed_tokens for request in self.scheduler.requests.values()]
        return sum(computed) / len(computed)

    @contextmanager
    def of(self, prompts: Sequence[list[int]], params: "SamplingParams") -> Iterator[None]:
        """Let these prompts decode; they are aborted at the end.

        Raises:
            RuntimeError: some of them do not come to decode, or end.
        """
        names = [
            self.engine.add_request(f"{time.monotonic_ns()}-{index}", {"prompt_token_ids": prompt}, params)
            for index, prompt in enumerate(prompts)
        ]
        for _ in range(PREFILL_STEPS):
            self.engine.step()
            running = self.scheduler.running
            decoding = [each for each in running if each.num_computed_tokens >= each.num_prompt_tokens]
            if len(decoding) == len(names):
                break
        else:
            raise RuntimeError(f"only {len(decoding)} of {len(names)} requests decode after {PREFILL_STEPS} steps")
        yield
        if len(self.scheduler.running) != len(names):
            raise RuntimeError(f"only {len(self.scheduler.running)} of {len(names)} requests are still decoding")
        self.engine.abort_request(names, internal=True)
        assert not self.engine.has_unfinished_requests()

    def run(self, steps: int) -> None:
        """Take steps."""
        for _ in range(steps):
            self.engine.step()

    def timed(self, steps: int) -> tuple[list[float], int]:
        """Seconds of at least ``steps`` steps, and the tokens that all requests got in them.

        Tokens come when a block is finished, so the steps end as they began: after whole periods, or when the first
        request has just finished a block.
        """
        if self.period is None:
            self._until_a_block_ends()
        before, seconds = sum(self.emitted), []
        while True:
            last, begin = self.emitted[0], time.perf_counter()
            self.engine.step()
            seconds.append(time.perf_counter() - begin)
            ends = self.emitted[0] != last if self.period is None else len(seconds) % self.period == 0
            if ends and len(seconds) >= steps:
                return seconds, sum(self.emitted) - before

    def _until_a_block_ends(self) -> None:
        last = self.emitted[0]
        for _ in range(PREFILL_STEPS):
            self.engine.step()
            if self.emitted[0] != last:
                return
        raise RuntimeError(f"the first request finished no block in {PREFILL_STEPS} steps")


def speeds(llm: "LLM", job: Job) -> Iterator[dict[str, Any]]:
    """Measure every level of a cell; ``join`` takes what this yields.

    Profilers come last, as what they hook into CUDA may slow down all launches that follow.
    """
    for level in job.cell.levels:
        yield asdict(measure(llm, job, level))
    for level in job.cell.levels:
        if level.tokens_per_step == PROFILED_TOKENS_PER_STEP:
            yield asdict(level) | profile(llm, job, level)


def join(events: Iterable[dict[str, Any]]) -> list[LevelResult]:
    """The results of the levels, from what ``speeds`` yields of each at two times."""
    levels: dict[tuple[int, int], dict[str, Any]] = {}
    for event in events:
        levels.setdefault((event["concurrency"], event["tokens_per_step"]), {}).update(event)
    return [LevelResult(**levels[key]) for key in sorted(levels)]


def measure(llm: "LLM", job: Job, level: Level) -> LevelResult:
    """Time steps, then their parts, each in steps of its own."""
    runner = runner_of(llm)
    load = Load(llm, period_of(job, level))
    with load.of(make_prompts(llm, job, level), params_of(job, level)):
        load.run(WARM_UP_STEPS)
        seconds, tokens = load.timed(job.steps)
        context = load.context
        try:
            result = look_into(load, runner)
        except Exception as error:  # The time of the steps counts without their parts.
            result = {"note": f"parts: {error!r}"}
    return LevelResult(
        concurrency=level.concurrency,
        tokens_per_step=level.tokens_per_step,
        step_ms=median(seconds) * 1e3,
        tokens_per_second=tokens / sum(seconds),
        tokens_per_forward=tokens / len(seconds) / level.concurrency,
        context=context,
        samples=[each * 1e3 for each in seconds],
        **result,
    )


def params_of(job: Job, level: Level) -> "SamplingParams":
    """Of all requests of a level."""
    cell = job.cell
    extra_args: dict[str, Any] | None = None
    if cell.system == System.DLLM:
        extra_args = {"dllm_policy": "static", "dllm_tokens_per_step": level.tokens_per_step}
        extra_args |= verifying(cell.drafts)
    return sampling(MAX_MODEL_LEN - job.prompt_tokens, extra_args, ignore_eos=True)


def period_of(job: Job, level: Level) -> int | None:
    """``Load``'s of a level."""
    if job.cell.system != System.DLLM:
        return 1
    return None if job.cell.drafts else -(-job.cell.block_length // level.tokens_per_step)


def profile(llm: "LLM", job: Job, level: Level) -> dict[str, Any]:
    """What steps of a level launch, and where the host's time goes, as fields of `LevelResult`."""
    runner, found = runner_of(llm), dict[str, Any]()
    load = Load(llm, period_of(job, level))
    with load.of(make_prompts(llm, job, level), params_of(job, level)):
        load.run(WARM_UP_STEPS)
        costs = costliest_functions(lambda: load.run(PARTS_STEPS), PARTS_STEPS)
        found["functions"] = [asdict(cost) for cost in costs]
        if runner.device.type == "cuda" and load.engine.vllm_config.use_v2_model_runner:
            try:
                found["launches"] = asdict(profiled(runner, lambda: load.run(PROFILED_STEPS), PROFILED_STEPS))
            except Exception as error:  # The rest counts without them.
                found["note"] = f"launches: {error!r}"
    return found


def look_into(load: Load, runner: Any) -> dict[str, Any]:
    """What further steps are made of, as fields of `LevelResult`; nothing with vLLM's older model runner."""
    if not load.engine.vllm_config.use_v2_model_runner:
        return {}
    found: dict[str, Any] = {}
    for name, clock in (("parts", clock_of(runner.device)), ("host_parts", HostClock())):
        stopwatch = Stopwatch(clock)
        with watched(runner, stopwatch.around) as steps:
            load.run(PARTS_STEPS)
        parts = asdict(Parts.median(stopwatch.parts()))
        found[name] = {part: seconds * 1e3 for part, seconds in parts.items()}
    # A step that takes up a finished block may have more rows than the others.
    found |= asdict(sorted(steps, key=lambda step: step.rows)[len(steps) // 2])
    return found


def make_prompts(llm: "LLM", job: Job, level: Level) -> list[list[int]]:
    """Random tokens, other ones for every level, so that no prompt finds a prefix of its own in the cache."""
    config = llm.llm_engine.vllm_config.model_config.hf_config
    ordinary = np.setdiff1d(np.arange(config.vocab_size), [config.mask_token_id])
    rng = np.random.default_rng([level.concurrency, level.tokens_per_step])
    return [rng.choice(ordinary, job.prompt_tokens).tolist() for _ in range(level.concurrency)]
