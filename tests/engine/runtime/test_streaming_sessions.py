"""Sessions: a request whose prompt goes on once it is answered."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

import pytest
from vllm import LLM, AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.harness import (
    DEFAULTS,
    MASK,
    assert_nothing_left,
    checkpoint_of,
    drafting_engine,
    engine_of,
    free_pages,
    greedy,
    reference_model,
    scheduler_of,
)
from tests.reference.decode import Options, decode
from tests.reference.drafts import FreeDave
from vllm_dllm.decoding.adaptive import DraftController
from vllm_dllm.observe.stats import RequestStats, observed_stats
from vllm_dllm.observe.step_events import StepEvent, step_event

LENGTH, PAGE = 8, 32
STATIC = Options(block_length=LENGTH, mask_id=MASK, policy="static")
PROMPT = [354, 206, 479, 4, 198, 387, 187, 162, 24, 226, 173, 244, 414]
FURTHER = [[30, 31, 32], list(range(40, 48)), list(range(60, 95)), [7]]
"""Prompts that end before, on and behind the border of a block, and beyond that of a page."""
MAX_TOKENS = (12, 3, 16, 1, 40)
"""Of the answers; some fill their last block, some do not."""
SESSIONS = 3


CONFIGURATIONS = [{}, {"dllm": {"eager": True}}, {"enable_prefix_caching": False}, {"scheduling_policy": "priority"}]


@pytest.fixture(params=CONFIGURATIONS, ids=str)
def llm(request: pytest.FixtureRequest) -> LLM:
    return drafting_engine("sdar", STATIC, block_size=PAGE, **request.param)


def params_of(max_tokens: int) -> SamplingParams:
    return greedy(STATIC, FreeDave(8), max_tokens=max_tokens)


def add(
    llm: LLM, session: str, prompt: list[int] | None, max_tokens: int = 1, params: SamplingParams | None = None
) -> None:
    """Give a session its next prompt; None: there is none."""
    engine = llm.llm_engine
    request = engine.input_processor.process_inputs(
        session,
        {"prompt_token_ids": list(prompt or [0])},  # vLLM goes on with the list
        params or params_of(max_tokens),
        ("generate",),
        resumable=prompt is not None,
    )
    engine.engine_core.add_request(request)


def outputs_of(llm: LLM) -> Iterator[EngineCoreOutput]:
    """Until all sessions wait for their next prompts."""
    core, scheduler = llm.llm_engine.engine_core, scheduler_of(llm)
    while scheduler.running or any(not r.status.name.endswith("STREAMING_REQ") for r in scheduler.requests.values()):
        yield from core.get_output().outputs


def answers(llm: LLM) -> dict[str, list[int]]:
    """What every session is answered."""
    tokens = dict[str, list[int]]()
    for output in outputs_of(llm):
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def add_alone(llm: LLM, name: str, prompt: list[int], max_tokens: int) -> None:
    """Add a request that is no session."""
    engine = llm.llm_engine
    params = greedy(STATIC, max_tokens=max_tokens)
    engine.engine_core.add_request(
        engine.input_processor.process_inputs(name, {"prompt_token_ids": prompt}, params, ("generate",))
    )


@dataclass
class Answer:
    tokens: list[int]
    events: list[StepEvent]
    stats: RequestStats


def told(llm: LLM, session: str) -> list[Answer]:
    """The answers of the only session, with what is told of them."""
    found, tokens, events = list[Answer](), list[int](), list[StepEvent]()
    for output in outputs_of(llm):
        assert output.request_id == session
        tokens += output.new_token_ids
        if (event := step_event(output)) is not None:
            events.append(event)
        if output.finish_reason is not None:
            found.append(Answer(tokens, events, observed_stats(output.spec_decode_metrics)))
            tokens, events = [], []
    return found


def expected_of(texts: list[list[int]], max_tokens: tuple[int, ...]) -> list[list[int]]:
    """Answers to prompts that each follow all before and their answers."""
    text: list[int] = []
    found = []
    for prompt, number in zip(texts, max_tokens, strict=True):
        text += prompt
        found.append(decode(reference_model("sdar"), text, number, STATIC).tokens)
        text += found[-1]
    return found


def inputs_of(number: int) -> list[list[int]]:
    return [PROMPT[number:], *FURTHER[number:], *FURTHER[:number]]


def test_every_answer_is_that_of_the_whole_text(llm: LLM) -> None:
    before = free_pages(llm)
    names = [f"session-{number}" for number in range(SESSIONS)]
    got: dict[str, list[list[int]]] = {name: [] for name in names}
    for turn, max_tokens in enumerate(MAX_TOKENS):
        for number, name in enumerate(names):
            add(llm, name, inputs_of(number)[turn], max_tokens)
        for name, tokens in answers(llm).items():
            got[name].append(tokens)
    for number, name in enumerate(names):
        assert got[name] == expected_of(inputs_of(number), MAX_TOKENS), name
        add(llm, name, None)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)
    # Each prompt of a session arrives anew.
    assert not scheduler_of(llm)._arrival_times


def test_prompts_may_come_before_the_answers_to_those_before_them(llm: LLM) -> None:
    before = free_pages(llm)
    for prompt, max_tokens in zip(inputs_of(0), MAX_TOKENS, strict=True):
        add(llm, "early", prompt, max_tokens)
    assert answers(llm)["early"] == list(itertools.chain(*expected_of(inputs_of(0), MAX_TOKENS)))
    add(llm, "early", None)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def finished(llm: LLM) -> list[EngineCoreOutput]:
    """The ends of the answers of all sessions, whose tokens are those of the whole answer."""
    core, tokens, found = llm.llm_engine.engine_core, dict[str, list[int]](), list[EngineCoreOutput]()
    outputs = [*outputs_of(llm)]
    while scheduler_of(llm).has_finished_requests():
        new = core.get_output().outputs
        # The front end would join them.
        assert len(new) == len({output.request_id for output in new})
        outputs += new
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if output.finish_reason is not None:
            output.new_token_ids = tokens.pop(output.request_id)
            found.append(output)
    return found


@pytest.mark.parametrize("early", [False, True])
def test_a_prompt_that_the_text_has_no_room_for_is_left_out(early: bool) -> None:
    llm = drafting_engine("sdar", STATIC, block_size=PAGE, max_model_len=64)
    before, found = free_pages(llm), list[EngineCoreOutput]()
    # 13 tokens, and 12 of the answer: 38 more leave room for one.
    prompts, numbers = [PROMPT, [9] * 39, [7] * 60, [7] * 38], (12, 5, 5, 5)
    for prompt, number in zip(prompts, numbers, strict=True):
        add(llm, "session", prompt, number)
        if not early:
            found += finished(llm)
    found += finished(llm)
    expected = expected_of([PROMPT, [7] * 38], (12, 1))
    assert [output.new_token_ids for output in found] == [expected[0], [], [], expected[1]]
    assert [output.finish_reason for output in found] == [FinishReason.LENGTH] * 4
    add(llm, "session", None)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_a_session_has_the_log_probabilities_of_its_first_prompt() -> None:
    llm = drafting_engine("sdar", STATIC, block_size=PAGE)
    before = free_pages(llm)
    for session, asked in (("none", (None, 2)), ("two", (2, None))):
        for prompt, number in zip((PROMPT, FURTHER[0]), asked, strict=True):
            add(llm, session, prompt, params=greedy(STATIC, max_tokens=8, logprobs=number))
            for output in outputs_of(llm):
                assert (output.new_logprobs is not None) == (session == "two")
        add(llm, session, None)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_no_answer_keeps_the_stop_token_of_the_answer_before() -> None:
    llm = drafting_engine("sdar", STATIC, block_size=PAGE)
    answer = expected_of([PROMPT], (12,))[0]
    add(llm, "session", PROMPT, params=greedy(STATIC, max_tokens=12, stop_token_ids=[answer[3]]))
    add(llm, "session", FURTHER[0], 8)
    stopped, other = finished(llm)
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, answer[3])
    assert (other.finish_reason, other.stop_reason) == (FinishReason.LENGTH, None)
    add(llm, "session", None)
    llm.reset_prefix_cache()


async def served(prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[int]:
    """What an engine of a server answers in a session."""
    options = {**DEFAULTS, "hf_overrides": {"mask_token_id": MASK}, "block_size": PAGE}
    dllm = {"block_length": LENGTH, "max_drafts": 7}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=str(checkpoint_of("sdar")), additional_config={"dllm": dllm}, **options)
    )

    async def inputs() -> AsyncGenerator[StreamingInput, None]:
        for prompt, number in zip(prompts, max_tokens, strict=True):
            params = params_of(number)
            params.output_kind = RequestOutputKind.DELTA
            yield StreamingInput(TokensPrompt(prompt_token_ids=prompt), params)

    try:
        params = params_of(1)
        params.output_kind = RequestOutputKind.DELTA
        return [
            token
            async for output in engine.generate(inputs(), params, "session")
            for token in output.outputs[0].token_ids
        ]
    finally:
        engine.shutdown()


def test_a_server_answers_sessions() -> None:
    tokens = asyncio.run(served(inputs_of(0)[:3], MAX_TOKENS[:3]))
    assert tokens == list(itertools.chain(*expected_of(inputs_of(0)[:3], MAX_TOKENS[:3])))


class NoDrafts(DraftController):
    """Takes back all drafts of ``auto`` requests, as where no draft pays."""

    def allot(self, candidates: Sequence[tuple[str, int]], *_: object) -> list[int]:
        return [0] * len(candidates)


def test_a_prompt_that_waits_asks_for_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting_engine("sdar", STATIC, block_size=PAGE)
    scheduler = scheduler_of(llm)
    monkeypatch.setattr(scheduler, "draft_controller", NoDrafts())
    before = free_pages(llm)
    fef = greedy(max_tokens=40, extra_args={"dllm_verify": "fef", "dllm_window": 6, "dllm_resample_steps": 1})
    auto = greedy(max_tokens=16, extra_args={"dllm_verify": "freedave", "dllm_drafts": "auto"})
    add(llm, "alone", PROMPT, params=fef)
    expected = answers(llm)["alone"]
    add(llm, "followed", PROMPT, params=fef)
    add(llm, "followed", FURTHER[0], params=auto)
    assert "followed" not in scheduler._auto
    assert answers(llm)["followed"][: len(expected)] == expected
    # The prompt behind has its own options, and the next prompt may have others again.
    assert "followed" in scheduler._auto
    add(llm, "followed", FURTHER[1], params=fef)
    assert "followed" not in scheduler._auto
    answers(llm)
    for name in ("alone", "followed"):
        add(llm, name, None)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_early_prompts_take_no_more_slots_than_there_are() -> None:
    llm = drafting_engine("sdar", STATIC, block_size=PAGE, max_num_seqs=2)
    before = free_pages(llm)
    sessions, others = ("one", "two"), ("three", "four", "five")
    for name in sessions:
        add(llm, name, PROMPT, 12)
        add(llm, name, FURTHER[0], 8)
    for number, name in enumerate(others):
        add_alone(llm, name, PROMPT[number:], 12)
    got = answers(llm)
    for name in sessions:
        assert got[name] == list(itertools.chain(*expected_of([PROMPT, FURTHER[0]], (12, 8))))
        add(llm, name, None)
    for number, name in enumerate(others):
        assert got[name] == expected_of([PROMPT[number:]], (12,))[0]
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_sessions_that_wait_for_a_prompt_hold_no_slots() -> None:
    llm = drafting_engine("sdar", STATIC, block_size=PAGE, max_num_seqs=2)
    before, sessions, others = free_pages(llm), ("one", "two", "three"), ("four", "five", "six")
    got: dict[str, list[list[int]]] = {name: [] for name in sessions}
    for prompt in (PROMPT, FURTHER[0]):
        for name in sessions:
            add(llm, name, prompt, 12)
        for name, tokens in answers(llm).items():
            got[name].append(tokens)
        for number, name in enumerate(others):
            add_alone(llm, name, PROMPT[number:], 12)
        found = answers(llm)
        assert [found[name] for name in others] == [expected_of([PROMPT[n:]], (12,))[0] for n in range(len(others))]
    for name in sessions:
        assert got[name] == expected_of([PROMPT, FURTHER[0]], (12, 12))
        add(llm, name, None)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("new_weights", [False, True])
def test_sessions_that_wait_for_a_prompt_hold_no_pages(new_weights: bool) -> None:
    """Nobody would read the pages, and they would keep the caches from being emptied."""
    llm = drafting_engine("sdar", STATIC, block_size=PAGE)
    scheduler, before = scheduler_of(llm), free_pages(llm)
    add(llm, "session", PROMPT * 3, 12)
    first = answers(llm)["session"]
    assert free_pages(llm) == before
    assert scheduler.get_num_unfinished_requests() == 0
    if new_weights:
        scheduler.reset_for_new_weights()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    add(llm, "session", FURTHER[0], 12)
    assert [first, answers(llm)["session"]] == expected_of([PROMPT * 3, FURTHER[0]], (12, 12))
    add(llm, "session", None)
    assert_nothing_left(llm, before)


def test_a_further_prompt_has_a_turn_among_long_answers() -> None:
    """The answers have a block in every step, which leaves no rows."""
    llm = engine_of("sdar", STATIC, block_size=PAGE, max_num_batched_tokens=32, max_model_len=512)
    core, scheduler, before = llm.llm_engine.engine_core, scheduler_of(llm), free_pages(llm)
    add(llm, "session", PROMPT, params=greedy(STATIC, max_tokens=8))
    answers(llm)
    others = [f"other-{number}" for number in range(7)]
    for number, name in enumerate(others):
        add_alone(llm, name, PROMPT[number:], 160)
    for _ in range(20):
        core.get_output()
    add(llm, "session", FURTHER[1], params=greedy(STATIC, max_tokens=8))
    answered = False
    for _ in range(60):
        answered |= any(output.request_id == "session" for output in core.get_output().outputs)
    assert answered
    assert scheduler.requests.keys() > set(others)
    answers(llm)
    add(llm, "session", None, params=greedy(STATIC))
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


MAP, EVENTS = {"dllm_step_map": True}, {"dllm_step_events": True}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("asked", [(MAP, {}, MAP), ({}, MAP, EVENTS), (EVENTS, {}, EVENTS), (MAP, EVENTS, {})], ids=str)
def test_every_answer_has_the_step_map_and_the_events_that_its_prompt_asks_for(
    asked: tuple[dict[str, bool], ...], early: bool
) -> None:
    llm = drafting_engine("sdar", STATIC, block_size=PAGE)
    before, prompts, numbers = free_pages(llm), [PROMPT, FURTHER[0], FURTHER[1]], (12, 17, 8)
    found: list[Answer] = []
    for prompt, number, options in zip(prompts, numbers, asked, strict=True):
        extra_args = {"dllm_policy": "static", "dllm_tokens_per_step": 1, **options}
        add(llm, "session", prompt, params=greedy(max_tokens=number, extra_args=extra_args))
        if not early:
            found += told(llm, "session")
    found += told(llm, "session")
    assert [answer.tokens for answer in found] == expected_of(prompts, numbers)
    forwards = 0
    for answer, options, number in zip(found, asked, numbers, strict=True):
        step_map = answer.stats.step_map
        assert (step_map is not None) == (options is MAP)
        if step_map is not None:
            assert len(step_map.forwards) == number
            assert step_map.blocks[0] == 0
            assert forwards <= min(step_map.forwards)
            assert max(step_map.forwards) < answer.stats.nfe
        assert bool(answer.events) == (options is EVENTS)
        if answer.events:
            assert [event.forward for event in answer.events] == list(range(forwards, answer.stats.nfe))
            assert answer.events[0].start == 0
            last = answer.events[-1]
            assert list(last.tokens) == answer.tokens[last.start :]
        forwards = answer.stats.nfe
    add(llm, "session", None)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)
