"""``drafts="auto"`` in the engine: what the worker does for drafts that the scheduler takes, and that it takes back.

How many the controller gives is decided here, not by the machine's pace.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm import LLM

from tests.engine.harness import (
    MASK,
    assert_nothing_left,
    drafting_engine,
    free_pages,
    generate,
    greedy,
    runner_of,
    scheduler_of,
    tokens_of,
)
from tests.reference.decode import Options
from vllm_dllm.decoding.adaptive import DRAFTING_INTERVAL, DraftController
from vllm_dllm.runtime.policy_rounds import PolicyRounds
from vllm_dllm.runtime.sampler import BlockDiffusionSampler
from vllm_dllm.runtime.scheduling import timing
from vllm_dllm.runtime.scheduling.timing import TIMED_STEPS, StartSteps

OPTIONS = Options(block_length=8, mask_id=MASK, policy="static")
PROMPTS = [[5, 9, 17, 33, 7], [101, 55, 20], [11] * 9]
MAX_TOKENS = 64


class Step(NamedTuple):
    """One that decodes."""

    branches: int
    """Of the request with most."""
    logits_groups: int
    """Blocks whose logits were computed."""
    offered: bool
    """Whether the host took any request for one with drafts."""
    drafts: bool
    """Whether it made some for the next."""


@contextlib.contextmanager
def steps_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Step]]:
    """The steps meanwhile."""
    steps: list[Step] = []
    runner = runner_of(llm)
    denoise, draft = BlockDiffusionSampler._denoise, PolicyRounds.propose
    made: list[bool] = []

    def noting_draft(rounds, *args):  # type: ignore[no-untyped-def]
        made.append(True)
        return draft(rounds, *args)

    def noting_denoise(sampler, logits, batch, plan):  # type: ignore[no-untyped-def]
        made.clear()
        offered = bool(sampler.states.may_have_drafts(batch.idx_mapping_np[: plan.num_decodes]).any())
        decision = denoise(sampler, logits, batch, plan)
        steps.append(Step(plan.sight.present.shape[1], len(plan.run_requests_np), offered, bool(made)))
        return decision

    with monkeypatch.context() as patch:
        patch.setattr(PolicyRounds, "propose", noting_draft)
        patch.setattr(type(runner.sampler), "_denoise", noting_denoise)
        yield steps


def allotting(number: int, monkeypatch: pytest.MonkeyPatch, *, none_every: int = 0) -> None:
    """Have the controller give every request so many drafts, but none in one of ``none_every`` steps that could."""
    calls = itertools.count(1)

    def allot(controller: DraftController, candidates: Sequence[tuple[str, int]], *args: object) -> list[int]:
        can = any(available for _, available in candidates)
        has_none = none_every and can and next(calls) % none_every == 0
        return [0 if has_none else min(number, available) for _, available in candidates]

    monkeypatch.setattr(DraftController, "allot", allot)


def params_with(drafts: int | str):  # type: ignore[no-untyped-def]
    params = greedy(OPTIONS, max_tokens=MAX_TOKENS)
    assert params.extra_args is not None
    params.extra_args |= {"dllm_verify": "freedave", "dllm_drafts": drafts}
    return params


def expected(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [tokens_of(output) for output in generate(llm, prompts, greedy(OPTIONS, max_tokens=MAX_TOKENS))]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "together"])
def test_drafts_that_are_always_taken_back_are_hardly_ever_made(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = drafting_engine("sdar", OPTIONS)
    tokens = expected(llm, prompts)
    allotting(0, monkeypatch)
    generate(llm, prompts, params_with("auto"))  # it has learned that none are used
    with steps_of(llm, monkeypatch) as steps:
        outputs = generate(llm, prompts, params_with("auto"))
    assert [tokens_of(output) for output in outputs] == tokens
    # Blocks are finished and committed meanwhile, beside the next: rows as those of a draft, but no drafts.
    assert {step.branches for step in steps} == {1}
    assert all(step.logits_groups <= len(prompts) for step in steps)
    assert len(steps) >= MAX_TOKENS
    assert 1 <= sum(step.drafts for step in steps) <= len(steps) / DRAFTING_INTERVAL + 1


def test_drafts_that_are_taken_are_made_again_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting_engine("sdar", OPTIONS)
    tokens = expected(llm, PROMPTS[:1])
    allotting(0, monkeypatch)
    generate(llm, PROMPTS[:1], params_with("auto"))
    allotting(2, monkeypatch)
    for _ in range(2):
        generate(llm, PROMPTS[:1], params_with("auto"))  # within 16 steps some are offered, and used
    with steps_of(llm, monkeypatch) as steps:
        (output,) = generate(llm, PROMPTS[:1], params_with("auto"))
    assert [tokens_of(output)] == tokens
    assert all(step.drafts for step in steps)
    # A block's first forward has none, nor one that has a single mask left.
    assert sum(step.branches == 1 for step in steps) <= 2 * (MAX_TOKENS // OPTIONS.block_length + 1)
    assert max(step.branches for step in steps) == 3


def test_a_lone_step_without_drafts_does_not_stop_their_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller has such steps to learn what drafts cost."""
    llm = drafting_engine("sdar", OPTIONS)
    tokens = expected(llm, PROMPTS[:1])
    allotting(2, monkeypatch)
    for _ in range(2):
        generate(llm, PROMPTS[:1], params_with("auto"))  # what an earlier test has taught is forgotten
    allotting(2, monkeypatch, none_every=4)
    with steps_of(llm, monkeypatch) as steps:
        (output,) = generate(llm, PROMPTS[:1], params_with("auto"))
    assert [tokens_of(output)] == tokens
    assert any(step.offered and step.branches == 1 for step in steps)
    # Such a step makes none for the next either.
    assert all(step.drafts == (step.branches > 1 or not step.offered) for step in steps)


def test_a_block_that_is_only_written_has_no_logits_beside_neighbours_with_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = drafting_engine("sdar", OPTIONS)
    tokens = expected(llm, PROMPTS)
    with steps_of(llm, monkeypatch) as steps:
        outputs = generate(llm, PROMPTS, params_with(2))
    assert [tokens_of(output) for output in outputs] == tokens
    # FreeDave's 2 are the block itself and one draft.
    assert max(step.logits_groups for step in steps) == 2 * len(PROMPTS)
    alone = [step for step in steps if step.branches == 1]
    assert alone
    assert all(step.logits_groups <= len(PROMPTS) for step in alone)


def test_what_a_slot_drafted_for_the_request_before_says_nothing_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting_engine("sdar", OPTIONS)
    core, states = llm.llm_engine, runner_of(llm).model_state.states
    for _ in range(3):
        core.add_request("aborted", {"prompt_token_ids": PROMPTS[1]}, params_with(3))
        # The prompt, and a step that leaves masks to draft for.
        core.step()
        core.step()
        assert states.may_have_drafts(np.arange(8)).any()
        core.abort_request(["aborted"])
        core.add_request("next", {"prompt_token_ids": PROMPTS[0]}, params_with(3))
        with steps_of(llm, monkeypatch) as steps:
            while core.has_unfinished_requests():
                core.step()
        assert not steps[0].offered
        assert any(step.offered for step in steps)


def test_a_start_times_steps_without_drafts_with_one_and_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting_engine("sdar", OPTIONS)
    scheduler, executor = scheduler_of(llm), llm.llm_engine.engine_core.engine_core.model_executor
    monkeypatch.setattr(scheduler, "draft_controller", scheduler.draft_controller)
    monkeypatch.setattr(timing, "MOST_SECONDS", float("inf"))
    before = free_pages(llm)
    start = StartSteps(scheduler, executor)
    start.take(scheduler.geometry, timed=True)
    assert_nothing_left(llm, before)
    sizes = Counter((rows // OPTIONS.block_length, drafts) for rows, drafts, _ in start._timed)
    # Of one request and of eight; not all that may have seven drafts have so many masks left.
    assert sizes[1, False] == sizes[8, False] == TIMED_STEPS
    assert sizes[2, True] >= TIMED_STEPS
    assert sizes[16, True] >= TIMED_STEPS
    assert any(drafts and blocks >= 4 * 8 for blocks, drafts in sizes)


def test_a_start_times_every_size_though_a_step_of_the_first_compiles_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = drafting_engine("sdar", OPTIONS)
    scheduler, executor = scheduler_of(llm), llm.llm_engine.engine_core.engine_core.model_executor
    monkeypatch.setattr(scheduler, "draft_controller", scheduler.draft_controller)
    start, now, steps = StartSteps(scheduler, executor), 0.0, 0
    step = start._step

    def slow_at_first() -> object:
        nonlocal now, steps
        steps += 1
        now += 10 * timing.MOST_SECONDS if steps == 2 else 0.001
        return step()

    monkeypatch.setattr(start, "_step", slow_at_first)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    start.take(scheduler.geometry, timed=True)
    assert max(rows // OPTIONS.block_length for rows, drafts, _ in start._timed if not drafts) == 8


@pytest.mark.parametrize(
    ("name", "value"), [("data_parallel_size", 2), ("distributed_executor_backend", "external_launcher")]
)
def test_ranks_that_step_together_time_nothing(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many steps they would time depends on the free pages of each, and one would wait for the other forever."""
    llm = drafting_engine("sdar", OPTIONS)
    scheduler, executor = scheduler_of(llm), llm.llm_engine.engine_core.engine_core.model_executor
    monkeypatch.setattr(scheduler, "draft_controller", scheduler.draft_controller)
    monkeypatch.setattr(scheduler.parallel_config, name, value)
    start = StartSteps(scheduler, executor)
    monkeypatch.setattr(start, "_step", lambda: pytest.fail("a step was taken"))
    cost = start.take(scheduler.geometry, timed=True)
    assert cost is not None
    assert not cost.knows_sizes


@pytest.mark.parametrize(
    ("block_length", "step_rows", "most", "can_be_many"),
    [
        (32, 8192, 256, True),
        (16, 8192, 100, True),
        (32, 8192, 20, True),
        (4, 2048, 512, True),
        (64, 2048, 256, False),
        (32, 64, 4, False),
    ],
)
def test_a_start_prefills_more_groups_than_flash_attention_has_its_first_kernel_for(
    block_length: int, step_rows: int, most: int, can_be_many: bool
) -> None:
    geometry: Any = SimpleNamespace(block_length=block_length, step_rows=step_rows)
    prompts = timing._prompts_of_many_groups(geometry, most, 7)
    assert len(prompts) <= most
    assert sum(map(len, prompts)) <= step_rows
    groups = sum(-(-len(prompt) // block_length) for prompt in prompts)
    assert (groups >= timing.MANY_REQUESTS) == can_be_many
