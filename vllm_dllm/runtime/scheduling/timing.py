"""Steps that the engine takes when it starts: to compile what steps do, and to time them.

The engine's own scheduler and executor decode requests that nobody sent, so a step does what a step of the running
engine does, and takes as long. The workers compile in these steps, and in no others (``runtime.compiled``). What timed
steps cost says how many drafts pay, and when rows for commits do.

``vllm_dllm.patches.scheduler_warm_up`` lends the scheduler the executor, which has its K/V cache and, on a GPU, its
graphs by then. No other place knows both: the executor drops what ``compile_or_warm_up_model`` returns, and workers of
other processes and nodes send nothing before the first request.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

from vllm import SamplingParams
from vllm.config import ParallelConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request, RequestStatus

from vllm_dllm.decoding.adaptive import DraftController
from vllm_dllm.decoding.commits import CommitRows
from vllm_dllm.decoding.step_cost import StepCost
from vllm_dllm.geometry import Geometry
from vllm_dllm.observe.vllm_log import module_logger
from vllm_dllm.options.resolve import DEFAULT_POLICY
from vllm_dllm.runtime.compiled import NOBODYS

logger = module_logger(__name__)

TIMED_STEPS = 12
"""Steps of each number of requests and kind that are timed. The first with a number of rows is left out: kernels may be
compiled in it, or chosen."""
MOST_STEPS = 32
"""Steps after which a size is given up: not every step has drafts."""
REHEARSED_STEPS = 64
"""Steps with blocks of one size, at most."""
LONG_CONTEXT = 1024
"""Tokens of a long prompt. FlashAttention 4 has other kernels for groups of many rows."""
MANY_REQUESTS = 257
"""More groups of rows than FlashAttention 4 has its kernel for small batches for."""
MOST_SECONDS = 2.0
"""Time of steps after which no larger size is begun, but for the time that kernels take to be compiled."""
VERIFYING: Mapping[str, dict[str, float]] = {
    "span": {"dllm_min_span": 1},
    "score": {"dllm_score_cost": 0.0, "dllm_score_threshold": 0.0},
    "hysteresis": {"dllm_score_cost": 0.0, "dllm_score_on": -1.0, "dllm_score_off": -2.0},
}
"""Request options with which S2D2 verifies whatever it drafts, by its route."""

GREEDY: Mapping[str, float] = {"temperature": 0.0}
DRAWN: Mapping[str, float] = {"temperature": 1.0}
RESHAPED: Mapping[str, float] = {"temperature": 1.0, "top_p": 0.9}
LOGPROBS: Mapping[str, float] = {"temperature": 1.0, "logprobs": 0}
"""Sampling parameters of requests: likeliest tokens, draws, draws from distributions that are reshaped first, and draws
with log-probabilities, as in reinforcement learning. Step maps and step events have the forms of the last."""


class FixedDrafts(DraftController):
    """Gives every request up to ``most`` of the drafts that it has, and learns nothing."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def observe(self, *args: Any) -> None:
        pass

    def allot(self, candidates: Sequence[tuple[str, int]], *args: Any) -> list[int]:
        return [min(number, self._most) for _, number in candidates]


class FixedCommits(CommitRows):
    """Gives no step rows for commits beside those of the blocks."""

    def beside(self, rows: int, commit_rows: int) -> bool:
        return False


def is_alone(parallel: ParallelConfig) -> bool:
    """Whether no other scheduler must take the same steps as this one.

    Those of a data-parallel engine must, and those of an external launcher, which has one for each rank. How many steps
    are timed depends on free pages and on time, and what they take is another time on each rank.
    """
    return parallel.data_parallel_size == 1 and parallel.distributed_executor_backend != "external_launcher"


class StartSteps:
    """Takes steps of an engine that has no requests.

    Args:
        scheduler: asks the controller in its attribute ``draft_controller`` how many drafts each request gets.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler: Any = scheduler
        self._executor = executor
        self._timed: list[tuple[int, bool, float]] = []
        # A stop token that no request comes to.
        self._mask = getattr(scheduler.vllm_config.model_config.hf_config, "mask_token_id", None)
        self._is_alone = is_alone(scheduler.parallel_config)

    def take(self, geometry: Geometry, *, timed: bool) -> StepCost | None:
        """Take the steps that an engine of a diffusion model wants at its start; what steps cost, if they are timed."""
        options = geometry.options
        if options.compile_steps:
            self._rehearse(geometry)
        prompt = [int(self._mask == 0)] * geometry.block_length
        if not timed or self._scheduler.max_model_len <= len(prompt):
            return None
        # One position per step, so that drafts are there for as many steps as can be.
        plain: dict[str, Any] = {"dllm_policy": "static", "dllm_tokens_per_step": 1, "dllm_verify": "none"}
        if (options.policy or DEFAULT_POLICY) == "threshold":
            # No confidence is above it, and what the engine compiled for its own policy serves here too.
            plain |= {"dllm_policy": "threshold", "dllm_threshold": 1.0}
        if not geometry.max_drafts:
            return self.cost(prompt, plain)
        plain["dllm_drafts"] = 0
        auto = plain | {"dllm_verify": "freedave", "dllm_drafts": "auto", "dllm_match": "exact"}
        return self.cost(prompt, plain, auto, geometry.max_drafts)

    def cost(
        self,
        prompt: list[int],
        plain: dict[str, Any] | None,
        drafting: dict[str, Any] | None = None,
        most_drafts: int = 0,
    ) -> StepCost:
        """Time the steps of requests with this prompt: without drafts, with one draft each, and with all drafts.

        What a few drafts of one request cost does not follow from what many cost: a step with few rows is the host's
        work and the reading of the weights, a step with many is their arithmetic.

        Args:
            plain: ``extra_args`` of requests without drafts.
            drafting: ``extra_args`` of requests with drafts.
            most_drafts: that a request may have.
        """
        limit = self._scheduler.max_model_len - len(prompt)
        for most in sorted({0, min(1, most_drafts), most_drafts}):
            self._scheduler.draft_controller = FixedDrafts(most)
            asked = drafting if most else plain
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=limit, ignore_eos=True, extra_args=asked)
            self._run_all(params, prompt)
        return StepCost(self._timed)

    def _rehearse(self, geometry: Geometry) -> None:
        """Take steps of requests that ask for nothing, of every kind that the workers have something to compile for."""
        scheduler, block = self._scheduler, [int(self._mask == 0)] * geometry.block_length
        begin, most = time.perf_counter(), scheduler.max_num_running_reqs
        # Or no step might have drafts to verify.
        asked = VERIFYING.get(geometry.options.route or "", {}) if geometry.options.verify == "s2d2" else {}
        # Two requests, two beside one that prefills, then one, and one beside another: a form that is compiled for
        # several requests serves one, too. All but one position of their first blocks are known, so they soon commit.
        prompt = block + block[1:]
        together = [[prompt] * min(2, most), [prompt]][: max(1, most - 1)]
        alone = [[prompt]] * min(2, most)
        steps = min(2 * len(block) + 4, REHEARSED_STEPS) // 3
        longest = _most_tokens(geometry, min(3, most), len(prompt))
        decode = partial(self._decode, most_tokens=longest, extra_args=asked)
        with self._nobodys_pages():
            for sampling in (GREEDY, DRAWN, RESHAPED, LOGPROBS):
                for arrivals in (together, alone):
                    decode(arrivals, steps, sampling)
            if scheduler.scheduler_config.async_scheduling:
                decides, scheduler.commit_rows = scheduler.commit_rows, FixedCommits()
                for arrivals in (together, alone):
                    decode(arrivals, steps, GREEDY)
                scheduler.commit_rows = decides
            # A long prompt, and many requests, which attention kernels have variants for.
            length = min(LONG_CONTEXT, scheduler.max_model_len - 2 * len(block))
            if length > 0:
                decode([[block[:1] * length]], 3 + length // geometry.step_rows, GREEDY)
            # They all have drafts in the same steps, which requests that came one by one need not have.
            many = [[block] * min(MANY_REQUESTS, most, geometry.step_rows // len(block))]
            for sampling in (GREEDY, DRAWN, RESHAPED):
                decode(many, 4, sampling)
            decode([_prompts_of_many_groups(geometry, most, block[0])], 1, GREEDY)
            # A prompt that fills its block predicts the first token of the next where commits do.
            decode([[block]], 2, RESHAPED)
        logger.info("Took steps of requests that nobody sent, to compile them, in %.1f s", time.perf_counter() - begin)

    def _decode(
        self,
        arrivals: list[list[list[int]]],
        steps: int,
        sampling: Mapping[str, float],
        *,
        most_tokens: int,
        extra_args: Mapping[str, float],
    ) -> None:
        """Decode prompts, those of each arrival together, and take so many steps after each arrival.

        All ranks of a data-parallel engine take the same number of steps.
        """
        names: list[str] = []
        for prompts in arrivals:
            for prompt in prompts:
                limit = min(self._scheduler.max_model_len - len(prompt), most_tokens)
                if limit > 0:
                    names.append(f"{NOBODYS}{len(names)}")
                    params = SamplingParams(
                        **sampling,
                        seed=0,
                        max_tokens=limit,
                        stop_token_ids=[self._mask],
                        extra_args=dict(extra_args),
                    )
                    self._add_request(names[-1], prompt, params)
            for _ in range(steps):
                self._step()
        self._end(names)

    def _add_request(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        request = Request(name, prompt, params, None)
        # The request has no hashes of its pages, by which KV offloading would look the pages up.
        request.skip_reading_prefix_cache = True
        self._scheduler.add_request(request)

    def _end(self, names: list[str]) -> None:
        scheduler = self._scheduler
        scheduler.finish_requests(scheduler.requests.keys() & names, RequestStatus.FINISHED_ABORTED)
        # The workers hear of it with the next step.
        self._step()

    @contextmanager
    def _nobodys_pages(self) -> Iterator[None]:
        """Turn prefix caching off meanwhile, so that no real request finds the pages of these requests."""
        manager = self._scheduler.kv_cache_manager
        caching = {each: each.enable_caching for each in (manager, *manager.coordinator.single_type_managers)}
        for each in caching:
            each.enable_caching = False
        try:
            yield
        finally:
            for each, enable_caching in caching.items():
                each.enable_caching = enable_caching

    def _run_all(self, params: SamplingParams, prompt: list[int]) -> None:
        """Time steps of 1, 2, 4, ... requests with these parameters and this prompt."""
        if not self._is_alone:
            return
        begin, number, taken = time.perf_counter(), 1, 0.0
        with self._nobodys_pages():
            while number <= self._scheduler.max_num_running_reqs and (steps := self._run(number, params, prompt)):
                number *= 2
                taken += median(steps) * len(steps)
                if taken > MOST_SECONDS:
                    break
        seconds = time.perf_counter() - begin
        logger.info("Timed steps of up to %d requests in %.1f s, to learn what their rows cost", number // 2, seconds)

    def _run(self, number: int, params: SamplingParams, prompt: list[int]) -> list[float]:
        """Time steps of ``number`` requests.

        Returns:
            Seconds of all steps, compilation included; none if a step has no room for so many.
        """
        scheduler = self._scheduler
        names = [f"{NOBODYS}{index}" for index in range(number)]
        for name in names:
            self._add_request(name, prompt, params)
        timed: list[tuple[int, bool, float]] = []
        steps: list[float] = []
        seen: set[int] = set()
        for _ in range(MOST_STEPS):
            begin = time.perf_counter()
            output = self._step()
            steps.append(seconds := time.perf_counter() - begin)
            is_whole = len(output.num_scheduled_tokens) == number and not output.scheduled_new_reqs
            kind = self._verified_and_made_drafts()
            if is_whole and kind is not None:
                rows = output.total_num_scheduled_tokens
                if rows in seen:
                    timed.append((rows, kind, seconds))
                seen.add(rows)
            if len(timed) == TIMED_STEPS or not scheduler.requests:
                break
        self._end(names)
        self._timed += timed
        return steps if seen else []

    def _verified_and_made_drafts(self) -> bool | None:
        """True: the last step verified drafts and made new drafts; False: it did neither; None: it did one of both.

        The steps of an engine with a draft model have no observations, and count as False.
        """
        seen = getattr(self._scheduler, "observations", {}).values()
        verified = any(each.drafted for each in seen)
        return verified if verified == any(each.drafting for each in seen) else None

    def _step(self) -> SchedulerOutput:
        """One step, as vLLM's ``EngineCore.step`` takes it."""
        scheduler, executor = self._scheduler, self._executor
        output = scheduler.schedule()
        result = executor.execute_model(output, non_block=True).result()
        if result is None:
            result = executor.sample_tokens(scheduler.get_grammar_bitmask(output), non_block=True).result()
        scheduler.update_from_output(output, result)
        if output.total_num_scheduled_tokens and not scheduler.scheduler_config.async_scheduling:
            drafts = executor.take_draft_token_ids()
            if drafts is not None:
                scheduler.update_draft_token_ids(drafts)
        return output


def _prompts_of_many_groups(geometry: Geometry, most: int, token: int) -> list[list[int]]:
    """Prompts that one step prefills in ``MANY_REQUESTS`` groups or more, where it has room for them.

    A prompt has a group of rows for each of its blocks, and one for what is left of it.
    """
    length, number = geometry.block_length, min(MANY_REQUESTS // 2 + 1, most)
    blocks = min(MANY_REQUESTS // number, (geometry.step_rows // number - 1) // length)
    return [[token] * (max(0, blocks) * length + 1)] * number


def _most_tokens(geometry: Geometry, num_requests: int, prompt_length: int) -> int:
    """``max_tokens`` with which so many requests with such prompts have room for all their drafts in one step.

    With full attention a draft has a row for every token that its request is to write. Otherwise a draft has a block.
    """
    if not geometry.traits.sees_whole_text:
        return sys.maxsize
    rows = geometry.step_rows // (num_requests * (1 + geometry.max_drafts)) - prompt_length
    return max(rows, 2 * geometry.block_length)
