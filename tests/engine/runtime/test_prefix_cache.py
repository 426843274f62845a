"""Every page that the prefix cache offers holds the K/V of its finished text, at every point of a request's life."""

import dataclasses
from typing import Any

import pytest
import torch
from vllm import LLM

from tests.engine.harness import (
    MASK,
    engine_of,
    generate,
    greedy,
    place_commits,
    runner_of,
    scheduler_of,
    tokens_of,
)
from tests.reference.decode import Options
from vllm_dllm.runtime.scheduling import DllmAsyncScheduler

PAGE = 32
OPTIONS = {
    "sdar": Options(block_length=8, mask_id=MASK, policy="threshold", threshold=0.5),
    "fast_dllm_v2": Options(
        block_length=8, mask_id=MASK, policy="threshold", threshold=0.5, sub_block_length=4, shifted=True
    ),
}
PROMPTS = [list(range(20, 20 + 45)), list(range(100, 100 + 61)), list(range(200, 200 + 30))]


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        place_commits(monkeypatch, "in turn")
    return request.param


def engines(family: str, asynchronous: bool) -> tuple[LLM, LLM]:
    """The engine under test, and one that only ever prefills into an empty cache."""
    common: dict[str, Any] = {"block_size": PAGE, "max_model_len": 256, "async_scheduling": asynchronous}
    llm, fresh = (engine_of(family, OPTIONS[family], num_gpu_blocks_override=pages, **common) for pages in (16, 17))
    assert isinstance(scheduler_of(llm), DllmAsyncScheduler) == asynchronous
    return llm, fresh


def cached_pages(llm: LLM) -> dict[bytes, int]:
    """Pages that a request may hit: their hash (of all text up to their end) and number."""
    pool = scheduler_of(llm).kv_cache_manager.block_pool
    return {block.block_hash: block.block_id for block in pool.blocks if block.block_hash is not None}


def page_contents(llm: LLM, page: int) -> list[torch.Tensor]:
    """K/V of a page, by layer."""
    return [cache[page].clone() for cache in runner_of(llm).kv_caches]


def assert_sound(llm: LLM, fresh: LLM, texts: list[list[int]], checked: set[bytes]) -> None:
    """Every page in the cache equals that of an engine which has just prefilled the same text."""
    new = {hash_: page for hash_, page in cached_pages(llm).items() if hash_ not in checked}
    if not new:
        return
    fresh.reset_prefix_cache()
    expected: dict[bytes, int] = {}
    for text in texts:
        generate(fresh, [text], greedy(max_tokens=1))
        expected |= cached_pages(fresh)
    for hash_, page in new.items():
        assert hash_ in expected, "a page of text that no request has emitted"
        for ours, theirs in zip(page_contents(llm, page), page_contents(fresh, expected[hash_]), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        checked.add(hash_)


@pytest.mark.parametrize("family", OPTIONS)
@pytest.mark.parametrize("abort_after", [None, 3, 9, 14])
def test_pages_are_sound_after_every_step(family: str, abort_after: int | None, asynchronous: bool) -> None:
    """Requests run, finish, are aborted and, with 15 pages for more text than fits, preempted."""
    llm, fresh = engines(family, asynchronous)
    llm.reset_prefix_cache()
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    texts: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS * 2):
        name = f"{abort_after}-{index}"
        core.add_request(name, {"prompt_token_ids": prompt}, greedy(OPTIONS[family], max_tokens=70 + 3 * index))
    steps, checked = 0, set[bytes]()
    while core.has_unfinished_requests():
        core.step()
        steps += 1
        for request in scheduler.requests.values():
            texts[request.request_id] = list(request.all_token_ids)
        if steps == abort_after:
            core.abort_request([f"{abort_after}-0", f"{abort_after}-2"])
        if steps % 3 == 0 or steps == abort_after:
            # One token more, so that the last full page is prefilled as a page of its own and not left out.
            assert_sound(llm, fresh, [[*text, 1] for text in texts.values()], checked)
    assert checked


@pytest.mark.parametrize("family", OPTIONS)
def test_pages_of_a_step_that_a_request_is_preempted_in_are_not_offered(
    family: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By priority, vLLM takes rows of this step back from a request that it had given them to."""
    common: dict[str, Any] = {"block_size": PAGE, "max_model_len": 256, "async_scheduling": asynchronous}
    options = dataclasses.replace(OPTIONS[family], policy="static", tokens_per_step=4)
    llm = engine_of(family, options, num_gpu_blocks_override=9, scheduling_policy="priority", **common)
    fresh = engine_of(family, options, num_gpu_blocks_override=17, **common)
    llm.reset_prefix_cache()
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    evict, evicted = scheduler.kv_cache_manager.evict_blocks, set[int]()

    def noting(pages: set[int]) -> None:
        evicted.update(pages & set(cached_pages(llm).values()))
        evict(pages)

    monkeypatch.setattr(scheduler.kv_cache_manager, "evict_blocks", noting)
    texts, checked = dict[str, list[int]](), set[bytes]()
    for index in range(3):
        prompt = [20 + 13 * index + place for place in range(40)]
        core.add_request(str(index), {"prompt_token_ids": prompt}, greedy(options, max_tokens=100), priority=10 - index)
        for _ in range(2 * (index == 0)):
            core.step()
    while core.has_unfinished_requests():
        core.step()
        texts |= {request.request_id: list(request.all_token_ids) for request in scheduler.requests.values()}
        assert_sound(llm, fresh, [[*text, 1] for text in texts.values()], checked)
    # With a step in flight a page is complete a step later, and here no request is preempted in that one.
    assert evicted or asynchronous


@pytest.mark.parametrize("family", OPTIONS)
def test_generated_text_is_hit_by_the_next_turn_and_read_right(family: str, asynchronous: bool) -> None:
    llm, fresh = engines(family, asynchronous)
    llm.reset_prefix_cache()
    params = greedy(OPTIONS[family], max_tokens=90)
    first = tokens_of(generate(llm, [PROMPTS[0]], params)[0])
    for length in (PAGE, 60, 75, 90):
        turn = [*PROMPTS[0], *first[:length], 7, 8, 9]
        hit = generate(llm, [turn], greedy(OPTIONS[family], max_tokens=40))[0]
        fresh.reset_prefix_cache()
        missed = generate(fresh, [turn], greedy(OPTIONS[family], max_tokens=40))[0]
        assert missed.num_cached_tokens == 0
        assert hit.num_cached_tokens > len(PROMPTS[0]) // PAGE * PAGE
        assert tokens_of(hit) == tokens_of(missed)


@pytest.mark.parametrize("family", OPTIONS)
def test_the_last_block_of_a_request_is_not_offered(family: str, asynchronous: bool) -> None:
    """It is emitted, and the request ends, before anybody writes its K/V."""
    llm, _ = engines(family, asynchronous)
    llm.reset_prefix_cache()
    prompt = PROMPTS[2]
    # The text ends with a page and with a block.
    generate(llm, [prompt], greedy(OPTIONS[family], max_tokens=2 * PAGE - len(prompt)))
    assert len(cached_pages(llm)) == 1
    generate(llm, [PROMPTS[1][:3] + prompt], greedy(OPTIONS[family], max_tokens=2 * PAGE - len(prompt) - 3 + 1))
    assert len(cached_pages(llm)) == 3
