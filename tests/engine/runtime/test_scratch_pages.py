"""Scratch pages: what a draft writes is nobody else's business, and nobody else's K/V is a draft's."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.engine.harness import (
    MASK,
    Forward,
    assert_nothing_left,
    drafting_engine,
    engine_of,
    free_pages,
    generate,
    greedy,
    nfe_of,
    preemptions,
    recorded,
    runner_of,
    scheduler_of,
    tokens_of,
)
from tests.engine.runtime.test_prefix_cache import assert_sound, cached_pages
from tests.reference.decode import Options, StepSkipping
from tests.reference.drafts import PSD, FreeDave, Spiffy
from vllm_dllm.kernels.page_copy import PageCopy
from vllm_dllm.runtime.plan.scratch import ScratchPages, pages_per_draft

PAGE = 32
MAX_DRAFTS, MAX_NUM_SEQS = 7, 8
PROMPTS = [list(range(20, 20 + 45)), list(range(100, 100 + 61)), list(range(200, 200 + 30)), list(range(300, 307))]
EXACT: list[StepSkipping] = [FreeDave(8), Spiffy([], 3)]
SKIPPING: list[StepSkipping] = [*EXACT, PSD(3), FreeDave(5, "subset")]


def options_of(block_length: int, family: str = "sdar") -> Options:
    shifted = family == "fast_dllm_v2"
    return Options(
        block_length=block_length,
        mask_id=MASK,
        threshold=0.6,
        shifted=shifted,
        sub_block_length=block_length if shifted else None,
    )


def requests_of(
    block_length: int, family: str = "sdar", count: int = 8, *, eager: bool = False
) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that end anywhere in a page, each with another verifier."""
    options = options_of(block_length, family)
    verifiers = EXACT if eager else SKIPPING
    return [
        (PROMPTS[i % len(PROMPTS)], greedy(options, verifiers[(i + i // 4) % len(verifiers)], max_tokens=50 + 3 * i))
        for i in range(count)
    ]


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[tuple[list[int], int, list[Forward]]]:
    prompts, params = zip(*requests, strict=True)
    with recorded(llm) as forwards:
        outputs = generate(llm, prompts, params)
    return [(tokens_of(o), nfe_of(o), forwards[o.request_id]) for o in outputs]


def scratch_of(llm: LLM) -> ScratchPages:
    return runner_of(llm).model_state.layout.scratch


def scratch_ids(llm: LLM) -> range:
    scratch = scratch_of(llm)
    return range(scratch.first_page, runner_of(llm).kv_caches[0].shape[0])


def slots_with_heads(llm: LLM) -> list[int]:
    """Slots of requests whose scratch pages hold what stands before the block."""
    runner = runner_of(llm)
    slots = torch.tensor(list(runner.req_states.req_id_to_index.values()), dtype=torch.int64)
    return slots[runner.model_state.states.gather(slots).progress.prefix_copied > 0].tolist()


@contextlib.contextmanager
def before_every_step(llm: LLM, act: Any) -> Iterator[None]:
    """Call ``act`` with the scheduler's output before the worker hears of it."""
    runner = runner_of(llm)
    original = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        act(scheduler_output)
        return original(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    try:
        yield
    finally:
        del runner.execute_model


# Who has which pages.


@pytest.mark.parametrize(("window", "length", "pages"), [(4, 4, 1), (32, 32, 1), (8, 4, 2), (36, 4, 2), (40, 4, 3)])
def test_a_window_touches_no_more_pages_than_a_draft_has(window: int, length: int, pages: int) -> None:
    assert pages_per_draft(window, length, PAGE) == pages
    for start in range(0, 2 * PAGE, length):
        assert (start + window - 1) // PAGE - start // PAGE < pages


@pytest.mark.parametrize("eager", [False, True])
def test_every_slot_and_draft_has_pages_of_its_own_behind_those_of_the_pool(eager: bool) -> None:
    llm = drafting_engine("sdar", options_of(8), dllm={"eager": eager})
    scratch = scratch_of(llm)
    slots, drafts, index = torch.meshgrid(
        torch.arange(MAX_NUM_SEQS), torch.arange(MAX_DRAFTS), torch.arange(scratch.pages_per_draft), indexing="ij"
    )
    pages = scratch.page(slots, drafts, index).flatten().tolist()
    assert sorted(pages) == list(scratch_ids(llm))
    pool = scheduler_of(llm).kv_cache_manager.block_pool
    assert max(block.block_id for block in pool.blocks) < scratch.first_page


@pytest.mark.parametrize("eager", [False, True])
def test_no_request_is_ever_given_a_scratch_page(eager: bool) -> None:
    llm = drafting_engine("sdar", options_of(8), dllm={"eager": eager})
    runner, seen = runner_of(llm), set[int]()

    def look(_: Any) -> None:
        slots = list(runner.req_states.req_id_to_index.values())
        seen.update(runner.block_tables.block_tables[0].gpu[slots].flatten().tolist())

    with before_every_step(llm, look):
        generate(llm, *zip(*requests_of(8, eager=eager), strict=True))
    assert seen
    assert not seen & set(scratch_ids(llm))


# What is in them.


@pytest.mark.parametrize(
    ("family", "block_length", "eager"),
    [
        ("sdar", 32, False),
        ("sdar", 8, False),
        ("sdar", 4, False),
        ("sdar", 4, True),
        ("fast_dllm_v2", 8, False),
        ("llada2_moe", 16, False),
    ],
)
def test_nothing_is_read_that_was_not_written_for_the_reader(family: str, block_length: int, eager: bool) -> None:
    """Before every step all scratch pages, but those that hold heads of pages, and all pages that nobody holds are
    poisoned.

    Where blocks do not fill pages, the CPU kernel multiplies what stands behind the last block in its page by
    probabilities of zero, so the poison is a number there.
    """
    poison_value = torch.nan if block_length == PAGE else 1e6
    llm = drafting_engine(family, options_of(block_length, family), dllm={"eager": eager})
    requests = requests_of(block_length, family, eager=eager)
    llm.reset_prefix_cache()
    expected = run(llm, requests)
    scratch, pool = scratch_of(llm), scheduler_of(llm).kv_cache_manager.block_pool
    per_slot = scratch.max_drafts * scratch.pages_per_draft
    poisoned = 0

    def poison(_: Any) -> None:
        nonlocal poisoned
        kept = {scratch.first_page + slot * per_slot + i for slot in slots_with_heads(llm) for i in range(per_slot)}
        pages = [page for page in scratch_ids(llm) if page not in kept]
        pages += [block.block_id for block in pool.blocks if block.ref_cnt == 0 and block.block_hash is None]
        for cache in runner_of(llm).kv_caches:
            cache[pages] = poison_value
        poisoned += len(pages)

    llm.reset_prefix_cache()
    with before_every_step(llm, poison):
        assert run(llm, requests) == expected
    assert poisoned
    for cache in runner_of(llm).kv_caches:
        cache.zero_()
    llm.reset_prefix_cache()


class CountedCopy(PageCopy):
    """Counts what it copies."""

    def __init__(self, copy: PageCopy):
        super().__init__(copy.caches)
        self.copies: list[tuple[int, int]] = []

    def __call__(self, source: torch.Tensor, target: torch.Tensor, wanted: torch.Tensor) -> None:
        self.copies += zip(source[wanted].tolist(), target[wanted].tolist(), strict=True)
        super().__call__(source, target, wanted)


@pytest.mark.parametrize("block_length", [4, 8, 32])
def test_the_head_of_a_page_is_copied_once_per_block_and_draft(
    block_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = drafting_engine("sdar", options_of(block_length))
    prompt, drafts = PROMPTS[0], min(4, block_length - 2)
    count = 3 * PAGE - len(prompt) % PAGE
    scratch = scratch_of(llm)
    counted = CountedCopy(scratch.copy)
    monkeypatch.setitem(scratch.__dict__, "copy", counted)
    static = Options(block_length=block_length, mask_id=MASK, policy="static")
    with recorded(llm) as forwards:
        output = generate(llm, [prompt], greedy(static, FreeDave(5), max_tokens=count))[0]
    assert max(forward.drafts for forward in forwards[output.request_id]) == drafts
    end = len(prompt) + count
    starts = range(len(prompt) // block_length * block_length, end, block_length)
    # A block that begins a page has nothing before it; one with two masks has no drafts.
    with_heads = [
        start for start in starts if start % PAGE and min(start + block_length - len(prompt), block_length) > 2
    ]
    assert len(counted.copies) == drafts * len(with_heads)
    assert len({target for _, target in counted.copies}) == (drafts if with_heads else 0)
    assert all(target >= scratch.first_page > source for source, target in counted.copies)


# What is left.


@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2"])
@pytest.mark.parametrize("abort_after", [None, 3, 9, 14])
def test_pages_of_the_prefix_cache_are_sound_after_every_step(family: str, abort_after: int | None) -> None:
    """Requests draft, finish, are aborted and, with 15 pages for more text than fits, preempted."""
    options = options_of(8, family)
    scratch = MAX_DRAFTS * MAX_NUM_SEQS
    small: dict[str, Any] = {"block_size": PAGE, "max_model_len": 256}
    llm = drafting_engine(family, options, num_gpu_blocks_override=scratch + 16, **small)
    fresh = engine_of(family, options, num_gpu_blocks_override=17, **small)
    llm.reset_prefix_cache()
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    before = free_pages(llm)
    texts: dict[str, list[int]] = {}
    for index, (prompt, params) in enumerate(requests_of(8, family)):
        core.add_request(f"{abort_after}-{index}", {"prompt_token_ids": prompt}, params)
    steps, checked = 0, set[bytes]()
    with preemptions(llm) as preempted:
        while core.has_unfinished_requests():
            core.step()
            steps += 1
            for request in scheduler.requests.values():
                texts[request.request_id] = list(request.all_token_ids)
            if steps == abort_after:
                core.abort_request([f"{abort_after}-0", f"{abort_after}-2"])
            if steps % 4 == 0 or steps == abort_after:
                assert_sound(llm, fresh, [[*text, 1] for text in texts.values()], checked)
    assert preempted
    assert checked
    assert max(cached_pages(llm).values()) < scratch_of(llm).first_page
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("verify", SKIPPING, ids=str)
def test_requests_aborted_in_any_round_leave_nothing_to_those_that_take_their_slots(verify: StepSkipping) -> None:
    options = options_of(8)
    llm = drafting_engine("sdar", options)
    llm.reset_prefix_cache()
    before, core = free_pages(llm), llm.llm_engine
    kept = greedy(options, verify, max_tokens=40)
    expected = tokens_of(generate(llm, [PROMPTS[1]], kept)[0])
    for steps in range(1, 10):
        for name in range(MAX_NUM_SEQS):
            params = greedy(options, SKIPPING[name % len(SKIPPING)], max_tokens=60)
            core.add_request(f"aborted{name}", {"prompt_token_ids": PROMPTS[name % len(PROMPTS)]}, params)
        for _ in range(steps):
            core.step()
        core.abort_request([f"aborted{name}" for name in range(MAX_NUM_SEQS)])
        finished = []
        for name in ("a", "b", "c"):
            core.add_request(name, {"prompt_token_ids": PROMPTS[1]}, kept)
        while core.has_unfinished_requests():
            finished += [output for output in core.step() if output.finished]
        assert [tokens_of(output) for output in finished if output.request_id in "abc"] == [expected] * 3
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_an_engine_whose_scratch_pages_leave_too_little_is_refused_with_the_numbers() -> None:
    message = (
        "max_drafts=7 and max_num_seqs=8 set 56 KV pages of 32 tokens aside for drafts, which leaves 8 of 64, and one "
        "request of max_model_len=256 with its last block needs 9; lower max_num_seqs or max_drafts"
    )
    with pytest.raises(ValueError, match=message):
        drafting_engine("sdar", options_of(8), num_gpu_blocks_override=64, max_model_len=256)


def test_a_window_may_reach_past_the_page_that_the_longest_text_ends_in() -> None:
    options = options_of(4)
    prompt = (PROMPTS[1] * 5)[:250]
    texts = []
    for verify in (FreeDave(1), FreeDave(8)):
        llm = drafting_engine(
            "sdar", options, dllm={"eager": True}, block_size=128, max_model_len=288, kv_cache_memory_bytes=256 << 20
        )
        texts.append(tokens_of(generate(llm, [prompt], greedy(options, verify, max_tokens=None))[0]))
    assert texts[0] == texts[1]
    assert len(texts[0]) == 288 - 250
