"""Requests of models with full attention: against the plain reference, at their ends, and what they leave behind."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.full_attention import FAMILIES, bundled, engine_of, params_of
from tests.engine.harness import (
    EOS,
    MASK,
    assert_nothing_left,
    free_pages,
    generate,
    greedy,
    nfe_of,
    runner_of,
    scheduler_of,
    tokens_of,
)
from tests.engine.runtime.test_full_attention_invariance import steps_of
from tests.engine.runtime.test_scratch_pages import before_every_step
from tests.reference.bidirectional import Decoded, Options, decode, decode_with_drafts

CACHES = ("none", "prefix", "dual")
LENGTH, MAX_DRAFTS = 8, 3
PROMPT = [354, 206, 479, 4, 198, 387, 187, 162, 24, 226, 173, 244, 414]
SIZES: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 24 << 20,
}


def options_of(family: str, cache: Any, max_tokens: int, **more: Any) -> Options:
    """Reference options whose window holds ``max_tokens`` in whole blocks."""
    window = -(-max_tokens // LENGTH) * LENGTH
    shifted = family == "dream"
    fixed: dict[str, Any] = {"mask_id": MASK, "block_length": LENGTH, "shifted": shifted, "cache": cache}
    return Options(**{**fixed, "gen_length": window, **more})


def engine_for(options: Options, *, dllm: dict[str, Any] | None = None, **more: Any) -> LLM:
    family = "dream" if options.shifted else "llada"
    return engine_of(family, options, dllm={"max_drafts": MAX_DRAFTS, **(dllm or {})}, **{**SIZES, **more})


def reference(options: Options, prompt: list[int]) -> Decoded:
    model = bundled("dream" if options.shifted else "llada").model
    return (decode_with_drafts if options.verify == "freedave" else decode)(model, prompt, options)


def prompt_of(family: str, length: int) -> list[int]:
    longest = max((case.prompt for case in bundled(family).cases), key=len)
    return longest[-length:]


# Against the reference.

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "refresh in every step": {"refresh_interval": 1},
    "refresh in every third step": {"refresh_interval": 3},
    "window of two blocks": {"generation_window": 16},
    "window of three blocks, refreshes, large pages": {
        "generation_window": 24,
        "refresh_interval": 2,
        "block_size": 64,
    },
}
COMBINATIONS = [
    *(("none", name) for name in ("plain", "window of two blocks")),
    *(("prefix", name) for name in ("plain", "refresh in every third step", "window of two blocks")),
    *(("dual", name) for name in ENGINES),
]
LENGTHS = (1, 13, 31, 32, 33, 64, 70, 131)
"""Of prompts: before, on and behind the borders of pages."""
MAX_TOKENS = (24, 20, 33, 7, 64)


def requests_for(family: str, cache: str, **engine: Any) -> list[tuple[list[int], int, Options]]:
    """Prompts, ``max_tokens`` and options: every policy twice, without drafts and behind it with exact ones."""
    policies: list[dict[str, Any]] = [
        {"policy": "static"},
        {"policy": "static", "steps": 4},
        {"policy": "threshold", "threshold": 0.5},
        {"policy": "factor", "factor": 0.9},
        {"policy": "maskgit_plus", "steps": 5},
        {"policy": "topk_margin", "steps": 6},
    ]
    requests = []
    for i, policy in enumerate(policies * 2):
        max_tokens = MAX_TOKENS[i % len(MAX_TOKENS)]
        if "steps" in policy:
            policy = {**policy, "steps": policy["steps"] * -(-max_tokens // LENGTH)}
        prompt = prompt_of(family, LENGTHS[i % len(LENGTHS)])
        for drafts in ({}, {"verify": "freedave", "drafts": 4}):
            options = options_of(family, cache, max_tokens, **policy, **drafts, **engine)
            requests.append((prompt, max_tokens, options))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "name"), COMBINATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_forwards_are_those_of_the_plain_reference(family: str, cache: str, name: str) -> None:
    """With drafts too: every branch computes anew what the cache computes anew, so none of the caches costs exactness
    beside what it costs without drafts. Every third request ends early."""
    fixed = dict(ENGINES[name])
    block_size = {"block_size": fixed.pop("block_size")} if "block_size" in fixed else {}
    requests = requests_for(family, cache, **fixed)
    llm = engine_for(requests[0][2], **block_size)
    assert scheduler_of(llm).block_size == (block_size.get("block_size") or 32)
    params = [params_of(options, max_tokens=max_tokens) for _, max_tokens, options in requests]
    for index, each in enumerate(params):
        each.extra_args["dllm_eos_early_stop"] = index % 3 == 2
    outputs = generate(llm, [prompt for prompt, _, _ in requests], params)
    fewer, plain_nfe = 0, 0
    for index, ((prompt, max_tokens, options), output) in enumerate(zip(requests, outputs, strict=True)):
        expected = reference(options, prompt)
        assert tokens_of(output) == expected.tokens[:max_tokens], (len(prompt), options)
        saved = expected.nfe - nfe_of(output)
        assert saved >= 0 if index % 3 == 2 else saved == 0, (len(prompt), options)
        if options.verify == "none":
            plain_nfe = expected.nfe
        else:
            fewer += nfe_of(output) < plain_nfe
    assert fewer or fixed.get("refresh_interval") in (1, 2), "drafts that are never of use"


def test_a_dual_cache_that_is_refreshed_in_every_step_is_none() -> None:
    """Not so with shifted logits, whose refresh at the start of a block decides its first position alone."""
    tokens = []
    for cache, interval in (("dual", 1), ("none", None)):
        options = options_of("llada", cache, 40, policy="threshold", threshold=0.5, refresh_interval=interval)
        prompts = [prompt_of("llada", length) for length in LENGTHS]
        outputs = generate(engine_for(options), prompts, params_of(options))
        tokens.append([(tokens_of(output), nfe_of(output)) for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_block_may_reach_beyond_max_model_len(family: str, cache: str) -> None:
    """Into a page that no text of ``max_model_len`` needs. What is beyond is denoised and not emitted."""
    limit = 64
    prompts = [prompt_of(family, length)[:length] for length in (13, 30, 57, 59, 63, 1, 14)]
    plain = [options_of(family, cache, limit - len(prompt)) for prompt in prompts]
    drafting = [options_of(family, cache, limit - len(p), verify="freedave", drafts=4) for p in prompts]
    llm = engine_for(plain[0], max_model_len=limit)
    for all_options in (plain, drafting):
        outputs = generate(llm, prompts, [params_of(options, max_tokens=None) for options in all_options])
        for prompt, options, output in zip(prompts, all_options, outputs, strict=True):
            assert tokens_of(output) == reference(options, prompt).tokens[: limit - len(prompt)], len(prompt)


# Where a text ends.


def run(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    return tokens_of(generate(llm, [prompt], params)[0])


def stop_inside_a_block(tokens: list[int]) -> tuple[int, int]:
    """A token that occurs first inside a block, neither at its start nor near its end, and where."""
    for index, token in enumerate(tokens):
        if index >= LENGTH and 0 < index % LENGTH < LENGTH - 2 and token not in tokens[:index]:
            return token, index
    raise AssertionError("no such token")


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_output_ends_with_a_stop_token_inside_a_block(family: str, cache: str) -> None:
    llm = engine_for(options_of(family, cache, 48))
    for drafts in ({"dllm_verify": "none"}, {"dllm_verify": "freedave", "dllm_drafts": 4}):
        args = {"dllm_policy": "sequential", **drafts}
        whole = generate(llm, [PROMPT], greedy(max_tokens=48, extra_args=args))[0]
        stop, index = stop_inside_a_block(tokens_of(whole))
        nfe = {}
        for early in (False, True):
            params = greedy(max_tokens=48, stop_token_ids=[stop], extra_args={**args, "dllm_eos_early_stop": early})
            output = generate(llm, [PROMPT], params)[0]
            assert tokens_of(output) == tokens_of(whole)[: index + 1]
            assert output.outputs[0].finish_reason == "stop"
            nfe[early] = nfe_of(output)
        if drafts["dllm_verify"] == "none":
            # One position at a time, left to right; without the early stop to the end of the block.
            assert nfe == {True: index + 1, False: -(-(index + 1) // LENGTH) * LENGTH}
        assert nfe[True] <= nfe[False]


@pytest.mark.parametrize("family", FAMILIES)
def test_eos_ends_a_request_unless_it_is_ignored(family: str) -> None:
    llm = engine_for(options_of(family, "dual", 20))
    bias = {"logit_bias": {EOS: 100.0}, "max_tokens": 20}
    assert run(llm, greedy(stop_token_ids=[EOS], **bias)) == [EOS]
    assert run(llm, greedy(**bias)) == [EOS] * 20
    tokens = run(llm, greedy(stop_token_ids=[EOS], min_tokens=9, **{**bias, "max_tokens": 30}))
    assert EOS not in tokens[:9]
    assert tokens[9:] == [EOS]


@pytest.mark.parametrize("family", FAMILIES)
def test_several_completions_of_one_prompt(family: str) -> None:
    llm = engine_for(options_of(family, "dual", 24))
    params = {"temperature": 1.0, "max_tokens": 24, "detokenize": False, "ignore_eos": True}
    both = generate(llm, [PROMPT], SamplingParams(n=2, seed=3, **params))[0].outputs
    assert both[0].token_ids != both[1].token_ids
    # vLLM counts the seeds of the others up from the first.
    for completion, seed in zip(both, (3, 4), strict=True):
        assert list(completion.token_ids) == run(llm, SamplingParams(seed=seed, **params))


# What may be asked of the sampler.


class Watched:
    """A reference model that remembers the logits of every forward, and where they begin."""

    def __init__(self, model: Callable[..., Any]):
        self.model, self.seen = model, list[tuple[Tensor, int]]()

    def __call__(self, ids: Tensor, start: int = 0, cache: Any = None) -> tuple[Tensor, Any]:
        logits, kept = self.model(ids, start, cache)
        self.seen.append((logits[0], start))
        return logits, kept


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_step_that_wrote_the_token(family: str, cache: str) -> None:
    count = 20
    plain = options_of(family, cache, count, policy="threshold", threshold=0.5)
    model = Watched(bundled(family).model)
    decoded = decode(model, PROMPT, plain)  # type: ignore[arg-type]
    expected = {}
    for step, (logits, start) in zip(decoded.steps, model.seen, strict=True):
        for position, _ in step:
            expected[position] = logits[position - plain.shifted - start].log_softmax(0)
    for options in (
        plain,
        options_of(family, cache, count, policy="threshold", threshold=0.5, verify="freedave", drafts=4),
    ):
        output = generate(engine_for(options), [PROMPT], params_of(options, max_tokens=count, logprobs=3))[0].outputs[0]
        assert list(output.token_ids) == decoded.tokens[:count]
        assert output.logprobs is not None
        for index, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            logprobs = expected[len(PROMPT) + index]
            assert entry[token].logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
            best = {t for t, value in entry.items() if value.rank is not None and value.rank <= 3}
            assert set(logprobs.topk(3).indices.tolist()) <= best | {token}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_penalties_and_biases_count_the_text_of_finished_blocks(family: str, cache: str) -> None:
    llm = engine_for(options_of(family, cache, 56))
    for drafts in ({"dllm_verify": "none"}, {"dllm_verify": "freedave", "dllm_drafts": 4}):
        tokens = run(llm, greedy(max_tokens=56, presence_penalty=2.0, repetition_penalty=1e6, extra_args=drafts))
        seen = set(PROMPT)
        for start in range(0, 56, LENGTH):
            assert not seen & set(tokens[start : start + LENGTH])
            seen |= set(tokens[start : start + LENGTH])
        assert run(llm, greedy(max_tokens=12, logit_bias={77: 100.0}, extra_args=drafts)) == [77] * 12
        assert set(run(llm, greedy(max_tokens=24, allowed_token_ids=[5, 6], extra_args=drafts))) <= {5, 6}
        assert MASK not in run(llm, greedy(max_tokens=16, logit_bias={MASK: 100.0}, extra_args=drafts))
        params = greedy(max_tokens=20, extra_args=drafts)
        free = run(llm, params)
        params._bad_words_token_ids = [[free[4]], free[7:9]]
        kept_out = run(llm, params)
        assert free[4] not in kept_out
        assert free[7:9] not in [kept_out[i : i + 2] for i in range(len(kept_out))]


# What a request leaves behind.

DRAFTING = {"dllm_verify": "freedave", "dllm_drafts": 4, "dllm_policy": "static"}


@pytest.mark.parametrize("cache", CACHES)
def test_a_request_that_is_aborted_leaves_nothing_behind_wherever_it_is(cache: str) -> None:
    """In the step that it enters with, in refreshes, in steps with drafts, and while it waits."""
    llm = engine_for(options_of("llada", cache, 20, refresh_interval=None if cache == "none" else 3))
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    params = greedy(max_tokens=20, extra_args=DRAFTING)
    expected = run(llm, params)
    before = free_pages(llm)
    for steps in range(14):
        for name in ("aborted", "kept"):
            core.add_request(name, {"prompt_token_ids": PROMPT}, params)
        for _ in range(steps):
            core.step()
        core.abort_request(["aborted"])
        finished = []
        while core.has_unfinished_requests():
            finished += [output for output in core.step() if output.finished]
        assert [tokens_of(o) for o in finished if o.request_id.startswith("kept")] == ([expected])
        kept = (
            scheduler._text_end,
            scheduler._steps,
            scheduler._turns.sitting_out,
            scheduler.asked,
            scheduler._emitted,
        )
        assert not any(kept), steps
    assert_nothing_left(llm, before)


def pages_filled(llm: LLM, pages: Sequence[int], value: float) -> None:
    for layer in runner_of(llm).kv_caches:
        layer[list(pages)] = value


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_read_that_was_not_written_for_the_reader(family: str, cache: str) -> None:
    """Before every step all pages that nobody holds are poisoned, and those of drafts but where they hold what stands
    beside the block.

    The CPU kernel multiplies what stands behind a text in its last page by probabilities of zero, so the poison is a
    number; only where texts fill their pages it need not be.
    """
    texts = [(13, 51), (33, 20), (70, 24), (31, 7)], [(40, 24), (32, 32), (88, 40), (8, 24)]
    llm = engine_for(options_of(family, cache, 8))
    runner, scheduler = runner_of(llm), scheduler_of(llm)
    scratch, pool = runner.model_state.layout.scratch, scheduler.kv_cache_manager.block_pool
    per_slot = scratch.max_drafts * scratch.pages_per_draft
    poisons: list[float] = []

    def poison(_: Any) -> None:
        pages = [block.block_id for block in pool.blocks if block.ref_cnt == 0]
        slots = torch.arange(SIZES["max_num_seqs"])
        for slot, has_copies in enumerate(runner.model_state.states.gather(slots).progress.prefix_copied):
            if not has_copies:
                pages += range(scratch.first_page + slot * per_slot, scratch.first_page + (slot + 1) * per_slot)
        pages_filled(llm, pages, poisons[-1])

    for lengths, worst in zip(texts, (1e6, torch.nan), strict=True):
        prompts = [prompt_of(family, length) for length, _ in lengths]
        params = [greedy(max_tokens=n, extra_args=DRAFTING) for _, n in lengths]
        expected = [tokens_of(o) for o in generate(llm, prompts, params)]
        for value in (1e6, worst):
            poisons.append(value)
            with before_every_step(llm, poison):
                assert [tokens_of(o) for o in generate(llm, prompts, params)] == expected
    pages_filled(llm, range(runner.kv_caches[0].shape[0]), 0.0)


# Rows.


def test_a_large_text_is_not_starved_by_small_ones() -> None:
    """Who comes first in vLLM's order always leaves too few rows for it. A refresh that waited has the next step."""
    llm = engine_for(options_of("llada", "dual", 64), max_num_batched_tokens=144)
    core, number = llm.llm_engine, SIZES["max_num_seqs"]
    small, large = greedy(max_tokens=96), greedy(max_tokens=64)
    expected = run(llm, large, prompt_of("llada", 70))
    done: dict[str, list[int]] = {}
    with steps_of(llm) as steps:
        for i in range(number - 1):
            core.add_request(f"small{i}", {"prompt_token_ids": prompt_of("llada", 20)}, small)
        core.add_request("large", {"prompt_token_ids": prompt_of("llada", 70)}, large)
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    done[output.request_id.split("-")[0]] = tokens_of(output)
    assert len(done) == number
    assert done["large"] == expected
    rows = [{req_id.split("-")[0]: n for req_id, n in step.items()} for step in steps]
    for name in done:
        served = [0, *(i for i, step in enumerate(rows) if name in step)]
        # Everybody else may have waited longer.
        assert max(later - earlier for earlier, later in itertools.pairwise(served)) <= number, name
    refreshes = [i for i, step in enumerate(rows) if step.get("large", 0) > LENGTH]
    assert len(refreshes) == 64 // LENGTH
    assert any(set(rows[i - 1]) != set(done) for i in refreshes), "it never had to wait"


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("drafts", [{"dllm_verify": "psd", "dllm_drafts": 3}, {**DRAFTING, "dllm_match": "subset"}])
def test_drafts_that_no_step_has_room_for_are_refused_with_both_numbers(cache: str, drafts: dict[str, Any]) -> None:
    """Where tokens depend on the number of drafts. The others do with fewer."""
    budget, prompt = 160, prompt_of("llada", 40)
    llm = engine_for(options_of("llada", cache, 64), max_num_batched_tokens=budget, max_num_seqs=2)
    # (1 + 3) branches of: the text; the block and all behind it; the block.
    most = {"none": None, "prefix": 32, "dual": 112}[cache]
    rows = {"none": 48 * 4, "prefix": 48 * 4, "dual": None}[cache]
    if rows is not None:
        max_tokens = rows // 4 - (40 if cache == "none" else 0)
        with pytest.raises(
            VLLMValidationError, match=rf"make {rows}, and .* room for 1\d\d \(max_num_batched_tokens=160"
        ):
            generate(llm, [prompt], greedy(max_tokens=max_tokens, extra_args=drafts))
        assert not scheduler_of(llm).requests
        exact = {**DRAFTING, "dllm_drafts": 4}
        assert len(run(llm, greedy(max_tokens=max_tokens, extra_args=exact), prompt)) == max_tokens
    if most is not None:
        # The largest that is let in ends, also beside another one.
        params = greedy(max_tokens=most, extra_args=drafts)
        assert [len(tokens_of(o)) for o in generate(llm, [prompt] * 3, params)] == [most] * 3


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_every_request_that_is_let_in_ends(cache: str) -> None:
    """Whatever its rows, on an engine with hardly more rows than one request takes."""
    for budget in (61, 64):
        llm = engine_for(
            options_of("llada", cache, 24), max_num_batched_tokens=budget, max_num_seqs=2, max_model_len=64
        )
        let_in = 0
        for length in (1, 12, 30, 36):
            for max_tokens in (8, 30):
                for args in (
                    {"dllm_verify": "psd", "dllm_drafts": 2},
                    {**DRAFTING, "dllm_drafts": 4},
                    {"dllm_verify": "fef", "dllm_window": 4},
                ):
                    params = greedy(max_tokens=max_tokens, extra_args=args)
                    try:
                        llm.llm_engine.add_request("a", {"prompt_token_ids": prompt_of("llada", length)}, params)
                    except VLLMValidationError:
                        continue
                    let_in += 1
                    for _ in range(200):
                        if not llm.llm_engine.has_unfinished_requests():
                            break
                        llm.llm_engine.step()
                    assert not llm.llm_engine.has_unfinished_requests(), (budget, length, max_tokens, args)
        assert let_in > 5


# What is refused.


def test_a_streaming_session_is_refused() -> None:
    """Its next prompt would find a text that has to be computed anew."""
    llm = engine_for(options_of("llada", "dual", 64), max_num_batched_tokens=160, max_num_seqs=2)
    processor = llm.llm_engine.input_processor
    with pytest.raises(VLLMValidationError, match="streaming sessions are not supported with LLaDA"):
        processor.process_inputs(
            "a", {"prompt_token_ids": [1, 2, 3]}, greedy(max_tokens=8), ("generate",), resumable=True
        )


@pytest.mark.parametrize(
    ("prompt_length", "params", "message"),
    [
        (100, {"max_tokens": 60}, r"prompt of 100 tokens and 64 .* make 164\. LLaDA .* room for 160 tokens"),
        (13, {"max_tokens": 20, "extra_args": {"dllm_steps": 16}}, r"steps=16 .* 3 blocks of 8.* a multiple of 3"),
        (13, {"extra_args": {"dllm_policy": "best"}}, "dllm_policy='best' is not allowed.*'maskgit_plus'"),
        (13, {"extra_args": {"dllm_cache": "dual"}}, "unknown request option 'dllm_cache'"),
        (13, {"extra_args": {"dllm_edit_threshold": 0.5}}, "edit_threshold=0.5 is not allowed: LLaDA models do not"),
        (13, {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_is_refused_and_harms_nobody(prompt_length: int, params: dict[str, Any], message: str) -> None:
    llm = engine_for(options_of("llada", "dual", 64), max_num_batched_tokens=160, max_num_seqs=2)
    expected = run(llm, greedy(max_tokens=9))
    with pytest.raises(VLLMValidationError, match=message):
        generate(llm, [prompt_of("llada", prompt_length)], greedy(**params))
    assert not scheduler_of(llm).requests
    assert run(llm, greedy(max_tokens=9)) == expected
