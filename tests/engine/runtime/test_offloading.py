"""KV offloading: what the connector keeps is final K/V, and answers that begin with it are the same."""

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.request import RequestStatus

from tests.engine.harness import (
    MASK,
    engine,
    free_pages,
    generate,
    greedy,
    place_commits,
    preemptions,
    runner_of,
    scheduler_of,
    tensor_parallel_engine,
    tokens_of,
)
from tests.engine.host_memory import HostOffloadingSpec, HostWorker
from tests.engine.runtime.test_isd import CHECKPOINT as IDLM
from tests.engine.runtime.test_nemotron import STATIC
from tests.engine.runtime.test_streaming_sessions import FURTHER, PROMPT, add, answers
from tests.paths import BUNDLED
from tests.reference.decode import Options, StepSkipping
from tests.reference.drafts import FreeDave
from tests.reference.nemotron import FAMILY as NEMOTRON
from vllm_dllm.runtime.scheduling.timing import StartSteps

PAGE = 32
SDAR = Options(block_length=8, mask_id=MASK, policy="threshold", threshold=0.5)


class Kind(NamedTuple):
    """Requests and their engine."""

    family: str
    dllm: Mapping[str, Any] = MappingProxyType({})
    skipping: StepSkipping | None = None
    extra_args: Mapping[str, Any] = MappingProxyType({})
    options: Options | None = SDAR
    overrides: Mapping[str, Any] = MappingProxyType({"mask_token_id": MASK})

    def params(self, max_tokens: int) -> SamplingParams:
        params = greedy(self.options, self.skipping, max_tokens=max_tokens)
        params.extra_args = {**(params.extra_args or {}), **self.extra_args}
        return params


SHIFTED = dataclasses.replace(SDAR, sub_block_length=4, shifted=True)
KINDS = {
    "sdar": Kind("sdar"),
    # Windows of several blocks, finished and not.
    "sdar, eager": Kind("sdar", {"eager": True, "max_drafts": 7}, FreeDave(8)),
    # A step of its own commits a block.
    "fast_dllm_v2": Kind("fast_dllm_v2", {"sub_block_length": 4}, None, {}, SHIFTED),
    "fef": Kind("sdar", {"max_drafts": 7}, None, {"dllm_verify": "fef"}, None),
    "s2d2": Kind("sdar", {"verify": "s2d2", "window": 7}, None, {}, None),
    "multi_block": Kind("sdar", {"eager": 3}, None, {"dllm_policy": "multi_block"}, None),
    # Blocks begin anywhere, and the last token's K/V is not final.
    "linear_spec": Kind(NEMOTRON, {}, None, {"dllm_verify": "linear_spec"}, STATIC, {}),
    "isd": Kind(str(IDLM.parent), {"block_length": 7}, None, {}, None, {}),
}
PROMPTS = [[first + place for place in range(length)] for first, length in ((20, 45), (70, 64), (140, 30), (180, 65))]
"""One ends with a page, one behind a page."""


def connector_of(pages_per_chunk: int = 1) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": HostOffloadingSpec.__name__,
            "spec_module_path": HostOffloadingSpec.__module__,
            "cpu_bytes_to_use": 1 << 24,
            "offload_prompt_only": False,
            "blocks_per_chunk": pages_per_chunk,
        },
    }


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        place_commits(monkeypatch, "in turn")
    return request.param


def engines(kind: Kind, *, pages: int = 16, pages_per_chunk: int = 1, **more: Any) -> tuple[LLM, LLM]:
    """The engine under test, its caches empty, and one that offloads nothing.

    Args:
        pages: that the scheduler has.
    """
    options = {
        "block_size": PAGE,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "hf_overrides": dict(kind.overrides),
        "dllm": {"block_length": (kind.options or SDAR).block_length, **kind.dllm},
        **more,
    }
    checkpoint = BUNDLED / kind.family / "checkpoint"
    # The window of a draft touches a page, and one of several blocks two.
    scratch = 8 * 7 * (2 if "eager" in kind.dllm else 1) if kind.dllm.keys() & {"max_drafts", "window"} else 0
    fresh = engine(checkpoint, num_gpu_blocks_override=65 + scratch, **options)
    config = connector_of(pages_per_chunk)
    llm = engine(checkpoint, num_gpu_blocks_override=pages + scratch, kv_transfer_config=config, **options)
    # vLLM has one connector for all engines of a process, and would give it to those that offload nothing.
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    finish(llm)
    assert llm.reset_prefix_cache(reset_connector=True)
    return llm, fresh


def finish(llm: LLM) -> None:
    """Take the steps that are left after the last answer."""
    while scheduler_of(llm).has_requests():
        llm.llm_engine.engine_core.get_output()


def stored(llm: LLM) -> Iterator[tuple[bytes, list[torch.Tensor]]]:
    """The hash of every chunk that may be loaded, of all text up to its end, and K/V of its last page by layer."""
    worker = runner_of(llm).kv_connector.kv_connector.connector_worker.worker
    assert isinstance(worker, HostWorker)
    for key, chunk in scheduler_of(llm).connector.scheduler.manager._policy.chunks.items():
        if chunk.is_ready:
            yield key, worker.chunks[chunk.chunk_id, worker.pages_per_chunk - 1]


def assert_sound(llm: LLM, fresh: LLM, texts: list[list[int]], checked: set[bytes]) -> None:
    """Every chunk equals the page of an engine that has just prefilled the same text."""
    new = {key: tensors for key, tensors in stored(llm) if key not in checked}
    if not new:
        return
    expected: dict[bytes, list[torch.Tensor]] = {}
    pool, caches = scheduler_of(fresh).kv_cache_manager.block_pool, runner_of(fresh).kv_caches
    for text in texts:
        fresh.reset_prefix_cache()
        generate(fresh, [text], greedy(max_tokens=1))
        for page in pool.blocks:
            if page.block_hash is not None:
                expected[page.block_hash] = [cache[page.block_id].flatten() for cache in caches]
    for key, tensors in new.items():
        assert key in expected, "a page of text that no request has emitted"
        for ours, theirs in zip(tensors, expected[key], strict=True):
            torch.testing.assert_close(ours.view(torch.float32), theirs, atol=1e-4, rtol=1e-4)
        checked.add(key)


@pytest.mark.parametrize(("kind", "abort_after"), [*((kind, None) for kind in KINDS), ("sdar", 9), ("linear_spec", 9)])
def test_chunks_are_sound_after_every_step(kind: str, abort_after: int | None, asynchronous: bool) -> None:
    """Requests run, finish, are aborted and, with 15 pages for more text than fits, preempted."""
    llm, fresh = engines(KINDS[kind], async_scheduling=asynchronous)
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    texts: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS * 2):
        core.add_request(str(index), {"prompt_token_ids": prompt}, KINDS[kind].params(70 + 3 * index))
    steps, checked = 0, set[bytes]()
    with preemptions(llm) as preempted:
        while core.has_unfinished_requests():
            core.step()
            steps += 1
            texts |= {request.request_id: list(request.all_token_ids) for request in scheduler.requests.values()}
            if steps == abort_after:
                core.abort_request(["0", "2"])
            if steps % 4 == 0:
                assert_sound(llm, fresh, [[*text, 1] for text in texts.values()], checked)
    finish(llm)
    assert_sound(llm, fresh, [[*text, 1] for text in texts.values()], checked)
    assert len(checked) > len(PROMPTS)
    assert preempted or abort_after


@pytest.mark.parametrize(
    ("kind", "pages_per_chunk"),
    [("sdar", 1), ("sdar", 2), ("sdar, eager", 1), ("fast_dllm_v2", 1), ("linear_spec", 1)],
)
def test_answers_that_begin_with_loaded_pages_are_the_same(kind: str, pages_per_chunk: int, asynchronous: bool) -> None:
    llm, fresh = engines(KINDS[kind], pages=65, pages_per_chunk=pages_per_chunk, async_scheduling=asynchronous)
    pages, chunk = free_pages(llm), pages_per_chunk * PAGE
    first = tokens_of(generate(llm, PROMPTS[:1], KINDS[kind].params(70))[0])
    finish(llm)
    # Texts that end before, with and behind a page.
    turns = [[*PROMPTS[0], *first][:length] for length in (63, 64, 65, 96, 100)]
    params = KINDS[kind].params(30)
    for batch in (*([turn] for turn in turns), turns):
        assert llm.reset_prefix_cache()
        fresh.reset_prefix_cache()
        found = generate(llm, batch, params)
        finish(llm)
        for output, expected in zip(found, generate(fresh, batch, params), strict=True):
            assert tokens_of(output) == tokens_of(expected)
            length = len(output.prompt_token_ids)
            # A chunk may hold the page of the last token, which is computed. Requests of a batch share pages.
            loaded = min(length // chunk * chunk, (length - 1) // PAGE * PAGE)
            assert output.num_cached_tokens == loaded or (len(batch) > 1 and output.num_cached_tokens > loaded)
    assert llm.reset_prefix_cache()
    assert free_pages(llm) == pages


def test_the_scheduler_knows_how_many_chunks_the_worker_has() -> None:
    """Drafts have pages behind those that the scheduler hands out."""
    llm, _ = engines(KINDS["sdar, eager"], pages=65)
    worker = runner_of(llm).kv_connector.kv_connector.connector_worker
    assert scheduler_of(llm).connector.scheduler.manager._num_chunks == worker.spec.num_chunks


@pytest.mark.parametrize("is_full", [False, True])
def test_sessions_load_what_their_answers_left(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the memory ``is_full``, nothing is stored until the session ends, with pages that others have by then."""
    params = KINDS["sdar"].params(40)
    llm, fresh = engines(KINDS["sdar"])
    manager = scheduler_of(llm).connector.scheduler.manager
    if is_full:
        monkeypatch.setattr(manager, "prepare_store", lambda *_: None)
    text: list[int] = []
    for prompt in (PROMPT, *FURTHER):
        add(llm, "session", prompt, params=params)
        text += prompt
        fresh.reset_prefix_cache()
        expected = tokens_of(generate(fresh, [text], params)[0])
        assert answers(llm) == {"session": expected}
        text += expected
        # The pages that the session had are free, and others write to them.
        generate(llm, PROMPTS, params)
        assert llm.reset_prefix_cache()
    monkeypatch.undo()
    add(llm, "session", None, params=params)
    assert not answers(llm)
    finish(llm)
    checked = set[bytes]()
    outputs = [tokens_of(each) for each in generate(fresh, PROMPTS, params)]
    assert_sound(llm, fresh, [text[:-1], *([*a, *b, 1] for a, b in zip(PROMPTS, outputs, strict=True))], checked)
    assert is_full or checked


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("aborts", [False, True])
def test_new_weights_leave_no_old_pages(steps: int, aborts: bool, asynchronous: bool) -> None:
    """Not even those that a request loads, one that was aborted loads, or a step in flight has."""
    llm, _ = engines(KINDS["sdar"], pages=65, async_scheduling=asynchronous)
    params = KINDS["sdar"].params(40)
    expected = [tokens_of(each) for each in generate(llm, PROMPTS, params)]
    finish(llm)
    assert llm.reset_prefix_cache()
    core, scheduler, pages = llm.llm_engine, scheduler_of(llm), free_pages(llm)
    for index, prompt in enumerate(PROMPTS):
        core.add_request(str(index), {"prompt_token_ids": prompt}, params)
    for _ in range(steps):
        core.step()
    loading = [each for each in scheduler.requests.values() if each.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
    assert loading or steps > 1
    if aborts:
        core.abort_request([str(index) for index in range(len(PROMPTS))])
    # What is loaded is of the old weights.
    with torch.inference_mode():
        for _, tensors in stored(llm):
            for tensor in tensors:
                tensor.zero_()
    # vLLM empties the caches after each of an update's calls.
    for _ in range(2):
        scheduler.reset_for_new_weights()
    assert not list(stored(llm))
    found: dict[str, list[int]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            found[output.request_id] = tokens_of(output)
            assert not output.num_cached_tokens or not loading
    finish(llm)
    assert found == ({} if aborts else {str(index): tokens for index, tokens in enumerate(expected)})
    assert free_pages(llm) == pages
    assert [tokens_of(each) for each in generate(llm, PROMPTS, params)] == expected


def test_new_weights_find_requests_that_wait_with_loaded_pages() -> None:
    """There is no page for what they have to compute."""
    llm, fresh = engines(KINDS["sdar"], pages=12)
    params, core, scheduler = KINDS["sdar"].params(90), llm.llm_engine, scheduler_of(llm)
    generate(llm, PROMPTS, params)
    finish(llm)
    assert llm.reset_prefix_cache()
    prompts = {str(index): PROMPTS[index % len(PROMPTS)] for index in range(24)}
    waiting, found = list(prompts.items()), dict[str, list[int]]()
    for index in range(3):
        core.add_request(f"long {index}", {"prompt_token_ids": [300 + index] * 30}, params)
    were_loaded = False
    while waiting or core.has_unfinished_requests():
        if waiting:
            name, prompt = waiting.pop(0)
            core.add_request(name, {"prompt_token_ids": prompt}, params)
        for _ in range(6):
            found |= {output.request_id: tokens_of(output) for output in core.step() if output.finished}
        held = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        states = {each.status for each in scheduler.requests.values() if held.get(each.request_id)}
        if not were_loaded and states & {RequestStatus.WAITING, RequestStatus.PREEMPTED}:
            were_loaded = True
            scheduler.reset_for_new_weights()
            running = {request.request_id for request in scheduler.running}
            assert not [name for name, pages in held.items() if pages and name in scheduler.requests.keys() - running]
    assert were_loaded
    for name, prompt in prompts.items():
        assert found[name] == tokens_of(generate(fresh, [prompt], params)[0])


@pytest.mark.parametrize("kind", ["sdar", "sdar, eager"])
def test_an_engine_takes_its_first_steps(kind: str) -> None:
    """Of requests whose pages have no names, and some of which fill pages."""
    llm, _ = engines(KINDS[kind], pages=65)
    steps = StartSteps(scheduler_of(llm), llm.llm_engine.engine_core.engine_core.model_executor)
    geometry, pages = scheduler_of(llm).geometry, free_pages(llm)
    steps._rehearse(geometry)
    scheduler_of(llm).learn_costs(steps.cost([1] * PAGE, {"dllm_policy": "static"}))
    assert not list(stored(llm))
    assert free_pages(llm) == pages


@pytest.mark.slow
def test_ranks_load_their_own_parts() -> None:
    options = {"block_size": PAGE, "max_model_len": 256, "max_num_seqs": 8}
    params = KINDS["sdar"].params(40)
    with tensor_parallel_engine(
        BUNDLED / "sdar" / "checkpoint", dllm={"block_length": 8}, kv_transfer_config=connector_of(), **options
    ) as llm:
        first = [tokens_of(each) for each in generate(llm, PROMPTS, params)]
        assert llm.reset_prefix_cache()
        again = generate(llm, PROMPTS, params)
    assert [tokens_of(each) for each in again] == first
    assert [each.num_cached_tokens for each in again] == [(len(each) - 1) // PAGE * PAGE for each in PROMPTS]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "cpu": ("sdar", {"kv_offloading_size": 1.0}, r"KV offloading \(--kv-offloading-size\) on a CPU"),
    "connector": (
        "sdar",
        {"kv_transfer_config": {**connector_of(), "kv_connector": "ExampleConnector"}},
        r"kv_connector='ExampleConnector' \(--kv-transfer-config\), only with OffloadingConnector",
    ),
    "tiers": (
        "sdar",
        {"kv_transfer_config": {**connector_of(), "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec"}}},
        r"spec_name='TieringOffloadingSpec' \(--kv-transfer-config\), only with CPUOffloadingSpec",
    ),
    "backend": (
        "sdar",
        {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
        r"kv_offloading_backend='lmcache' \(--kv-offloading-backend\), only with native",
    ),
    "prefix caching": (
        "sdar",
        {"kv_transfer_config": connector_of(), "enable_prefix_caching": False},
        "KV offloading without prefix caching",
    ),
    "full attention": ("llada", {"kv_transfer_config": connector_of()}, "K/V depends on the whole text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_work_is_refused_at_start(case: str) -> None:
    family, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        engine(BUNDLED / family / "checkpoint", dllm={"block_length": 8}, **options)
