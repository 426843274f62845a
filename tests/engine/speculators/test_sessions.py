"""Streaming sessions of an autoregressive target with a diffusion drafter: turns end among accepted drafts."""

import pytest
from vllm import LLM
from vllm.v1.engine import EngineCoreOutput, FinishReason

from tests.engine.harness import assert_nothing_left, free_pages, greedy, schedule_asynchronously
from tests.engine.runtime.test_streaming_sessions import add, answers, outputs_of
from tests.engine.speculators.engines import engine, plain_engine

TURNS = [([5, 6, 7, 30, 2], 3), ([9], 6), ([11, 12], 1), ([3], 2), (list(range(20, 40)), 9)]
"""Prompts and tokens of the answers; some prompts are shorter than the drafts that an answer ended among."""


def converse(llm: LLM) -> list[dict[str, list[int]]]:
    """The answers of three sessions, turn by turn."""
    got = []
    for turn, (prompt, max_tokens) in enumerate(TURNS):
        for name in "123":
            add(llm, name, [*([int(name)] if turn == 0 else []), *prompt], max_tokens, greedy(max_tokens=max_tokens))
        got.append(answers(llm))
    for name in "123":
        add(llm, name, None, params=greedy(max_tokens=1))
    answers(llm)
    return got


@pytest.mark.parametrize("cache", ["keep", "recompute"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_answers_are_those_without_drafts(asynchronous: bool, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which leave the last token of a turn out of the session, as vLLM does with tokens that nobody has computed."""
    if asynchronous:
        schedule_asynchronously(monkeypatch)
    # The drafter has the target's weights, so that drafts are accepted.
    llm = engine("causal", cache, seed=0, num_drafts=7, max_num_seqs=7 if asynchronous else 8)
    before = free_pages(llm)
    assert converse(llm) == converse(plain_engine())
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("early", [False, True])
def test_a_prompt_that_the_text_has_no_room_for_is_left_out(early: bool) -> None:
    """vLLM's own scheduler would write beyond its tables, and end the engine."""
    llm = engine("causal", "keep", seed=0, num_drafts=7, per_request_spec_decode_metrics="detailed")
    before, found = free_pages(llm), list[EngineCoreOutput]()
    length = llm.model_config.max_model_len
    for prompt, number in (([5, 6, 7, 30, 2], 12), ([9] * (length - 10), 5), ([7] * (length - 40), 9)):
        add(llm, "session", prompt, params=greedy(max_tokens=number))
        if not early:
            found += outputs_of(llm)
    found += outputs_of(llm)
    reasons = [output.finish_reason for output in found if output.finish_reason is not None]
    assert reasons == [FinishReason.LENGTH] * 3
    assert sum(len(output.new_token_ids) for output in found) == 12 + 9
    add(llm, "session", None, params=greedy(max_tokens=1))
    answers(llm)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)
