"""Step events: what a stream tells after each forward of what is unmasked so far."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import llm_engine
from vllm.v1.metrics.stats import IterationStats

from tests.engine import full_attention
from tests.engine.harness import (
    assert_nothing_left,
    configuration_of,
    drafting_engine,
    engine_of,
    free_pages,
    generate,
    golden,
    greedy,
    preemptions,
    skipping_options,
)
from tests.engine.runtime.test_golden import _fixed_for_engine
from tests.reference.drafts import PSD, FreeDave, Spiffy
from vllm_dllm import StepEvent, request_stats, step_event
from vllm_dllm.observe.recorder import Round, recording

PROMPTS = [[5, 6, 7], list(range(20, 57)), [9] * 5 + [3], list(range(100, 131)), [1], list(range(300, 316))]
MAX_TOKENS = 27
"""Cuts a block."""

WANTED = {"dllm_step_events": True, "dllm_step_map": True}


class Watched(NamedTuple):
    """One request's stream."""

    events: list[StepEvent]
    outputs: int
    """That the stream had."""
    tokens: list[int]
    last: RequestOutput


def watch(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Watched]:
    """Stream the answers to all prompts in one batch."""
    engine = llm.llm_engine
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        each = each.clone()
        each.output_kind = RequestOutputKind.DELTA
        engine.add_request(str(number), {"prompt_token_ids": prompt}, each)
    outputs: dict[str, list[RequestOutput]] = defaultdict(list)
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return [
        Watched(
            [event for output in found if (event := step_event(output)) is not None],
            len(found),
            [token for output in found for token in output.outputs[0].token_ids],
            found[-1],
        )
        for found in (outputs[str(number)] for number in range(len(prompts)))
    ]


def wanting(**args: Any) -> SamplingParams:
    return greedy(max_tokens=MAX_TOKENS, extra_args={**WANTED, **args})


@contextmanager
def windows(llm: LLM) -> Iterator[dict[str, list[list[int | None]]]]:
    """The generated tokens of the window after each forward of every request, by the request's id."""
    mask_id = llm.llm_engine.vllm_config.model_config.hf_config.mask_token_id
    found: dict[str, list[list[int | None]]] = defaultdict(list)

    def note(round_: Round) -> None:
        for index, req_id in enumerate(round_.req_ids):
            tokens = round_.tokens[index, int(round_.first[index]) :].tolist()
            found[req_id.split("-")[0]].append([None if token == mask_id else token for token in tokens])

    with recording(llm, note):
        yield found


def assert_events_tell_the_answer(found: Watched) -> None:
    """Every forward has its event, and together they say what the step map says."""
    stats = request_stats(found.last)
    assert [event.forward for event in found.events] == list(range(stats.nfe))
    assert stats.step_map is not None
    text: list[int | None] = []
    written = [-1] * len(found.tokens)
    for event in found.events:
        end = event.start + len(event.tokens)
        assert event.start <= len(text)
        assert end <= MAX_TOKENS
        text[event.start : end] = event.tokens
        assert set(event.drafted) <= set(event.unmasked)
        for offset in event.unmasked:
            assert event.tokens[offset] is not None
            if event.start + offset < len(written):
                written[event.start + offset] = event.forward
    assert text[: len(found.tokens)] == found.tokens
    assert tuple(written) == stats.step_map.forwards


CONFIGURATIONS = {
    "sdar": ("sdar", (8, None), {}),
    "eager": ("sdar", (8, None), {"eager": True}),
    "sub-blocks": ("sdar", (8, 4), {"sub_block_length": 4}),
    "shifted": ("fast_dllm_v2", (8, 4), {}),
}
"""Family, lengths of its golden cases, and engine options."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_events_are_the_windows_of_every_forward(name: str) -> None:
    family, wanted, dllm = CONFIGURATIONS[name]
    configuration = configuration_of(family, (wanted[0], None if "sub_block_length" in dllm else wanted[1]))
    options = next(c.options for c in golden(family).cases if _fixed_for_engine(c) == configuration)
    llm = drafting_engine(golden(family), options, dllm=dllm)
    verifiers = [{}, skipping_options(FreeDave(5)), skipping_options(Spiffy([], 3)), skipping_options(FreeDave(3))]
    params = [wanting(**args) for _, args in zip(PROMPTS, itertools.cycle(verifiers), strict=False)]
    with windows(llm) as expected:
        found = watch(llm, PROMPTS, params)
    for number, each in enumerate(found):
        assert_events_tell_the_answer(each)
        for event, window in zip(each.events, expected[str(number)], strict=False):
            assert list(event.tokens) == window[: MAX_TOKENS - event.start]
    accepted = sum(request_stats(each.last).accepted for each in found)
    drafted = sum(len(event.drafted) for each in found for event in each.events)
    assert (accepted > 0) == (drafted > 0)


@pytest.mark.parametrize(
    "args",
    [
        skipping_options(PSD(3)),
        skipping_options(FreeDave(5, "subset")),
        {"dllm_verify": "fef", "dllm_resample_steps": 2},
        {"dllm_edit_threshold": 0.0, "dllm_max_post_edit_steps": 4},
    ],
    ids=["psd", "freedave, subset", "fef", "editing"],
)
def test_events_of_what_masks_or_edits_again(args: dict[str, Any]) -> None:
    family = "llada2_moe" if "dllm_edit_threshold" in args else "sdar"
    llm = drafting_engine(golden(family), golden(family).cases[0].options)
    for found in watch(llm, PROMPTS, [wanting(**args)] * len(PROMPTS)):
        assert_events_tell_the_answer(found)


@pytest.mark.parametrize("family", full_attention.FAMILIES)
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_events_of_full_attention(family: str, cache: str) -> None:
    model = full_attention.golden(family)
    options = next(case.options for case in model.cases if case.options.cache == cache)
    llm = full_attention.drafting_engine(model, options, max_num_seqs=3)
    params = [wanting(), wanting(**skipping_options(FreeDave(4)))] * 3
    for found in watch(llm, PROMPTS, params):
        assert_events_tell_the_answer(found)


def test_neighbours_get_their_own_outputs_only_and_nobody_other_tokens() -> None:
    llm = drafting_engine(golden("sdar"), golden("sdar").cases[0].options, async_scheduling=True)
    plain = greedy(max_tokens=MAX_TOKENS, extra_args=skipping_options(FreeDave(5)))
    wanted = wanting(**skipping_options(FreeDave(5)))
    alone = watch(llm, PROMPTS, [plain] * len(PROMPTS))
    mixed = watch(llm, PROMPTS, [plain, wanted] * 3)
    for number, (before, after) in enumerate(zip(alone, mixed, strict=True)):
        assert after.tokens == before.tokens
        if number % 2:
            assert_events_tell_the_answer(after)
            assert after.outputs == request_stats(after.last).nfe
        else:
            assert not after.events
            assert after.outputs == before.outputs


def test_events_after_preemption_tell_of_the_forwards_that_counted() -> None:
    few = {"block_size": 32, "num_gpu_blocks_override": 7, "max_model_len": 96, "enable_prefix_caching": False}
    llm = engine_of(golden("sdar"), golden("sdar").cases[0].options, **few)
    before = free_pages(llm)
    with preemptions(llm) as preempted:
        found = watch(llm, PROMPTS * 2, [wanting()] * 12)
    assert preempted
    for each in found:
        assert_events_tell_the_answer(each)
    assert_nothing_left(llm, before)


def test_logprobs_and_the_first_output_are_those_without_events() -> None:
    llm = engine_of(golden("sdar"), golden("sdar").cases[0].options)
    with_events, without = (
        watch(llm, PROMPTS[:1], [greedy(max_tokens=MAX_TOKENS, logprobs=2, extra_args=args)])[0]
        for args in (WANTED, {})
    )
    assert with_events.tokens == without.tokens
    assert with_events.last.num_cached_tokens == without.last.num_cached_tokens
    assert with_events.last.outputs[0].cumulative_logprob == without.last.outputs[0].cumulative_logprob
    assert without.last.kv_transfer_params is None


@pytest.mark.parametrize("args", [{}, WANTED])
def test_latencies_are_those_of_outputs_with_tokens(args: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[IterationStats] = []
    monkeypatch.setattr(llm_engine, "IterationStats", lambda: measured.append(IterationStats()) or measured[-1])
    llm = engine_of(golden("sdar"), golden("sdar").cases[0].options, disable_log_stats=False)
    # The first block takes several forwards, so events come before the first tokens.
    (found,) = watch(llm, PROMPTS[1:2], [greedy(max_tokens=MAX_TOKENS, extra_args=args)])
    with_tokens = [stats for stats in measured if stats.num_generation_tokens]
    assert sum(stats.num_generation_tokens for stats in measured) == len(found.tokens) == MAX_TOKENS
    assert [stats for stats in measured if stats.time_to_first_tokens_iter] == with_tokens[:1]
    assert [stats for stats in measured if stats.inter_token_latencies_iter] == with_tokens[1:]
    assert with_tokens[0].num_prompt_tokens == len(PROMPTS[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_kind": RequestOutputKind.FINAL_ONLY}, "goes with a stream"),
        ({"n": 2, "output_kind": RequestOutputKind.DELTA}, "n=1, not n=2"),
    ],
)
def test_requests_that_could_not_read_events_are_refused(changes: dict[str, Any], reason: str) -> None:
    llm = engine_of(golden("sdar"), golden("sdar").cases[0].options)
    params = SamplingParams(max_tokens=4, extra_args={"dllm_step_events": True})
    for name, value in changes.items():
        setattr(params, name, value)
    with pytest.raises(VLLMValidationError, match=f"dllm_step_events=True goes with .*{reason.rpartition('with ')[2]}"):
        llm.llm_engine.add_request("refused", {"prompt_token_ids": [1, 2]}, params)
    assert not llm.llm_engine.has_unfinished_requests()
    assert generate(llm, [[1, 2]], greedy(max_tokens=2))[0].outputs[0].token_ids
