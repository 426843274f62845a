"""Multi-block decoding: the plain reference's tokens and forwards, and the same whatever happens around a request."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.harness import (
    MASK,
    assert_nothing_left,
    checkpoint_of,
    drafting_engine,
    free_pages,
    generate,
    greedy,
    nfe_of,
    preemptions,
    reference_model,
    runner_of,
    scheduler_of,
    tensor_parallel_engine,
    tokens_of,
)
from tests.engine.step_maps import map_of, mapped
from tests.reference.decode import Decoded, Options
from tests.reference.multi_block import MultiBlock, decode_multi_block
from vllm_dllm import request_stats
from vllm_dllm.decoding.records import Progress
from vllm_dllm.methods import Policy
from vllm_dllm.runtime.kept_windows import KeptWindows
from vllm_dllm.runtime.logits.rows import LogitsReader, RowGroups
from vllm_dllm.runtime.scheduling import DllmAsyncScheduler

WINDOWS = {"sdar": (4, 4), "llada2_moe": (8, 3)}
"""Block length, and blocks of a window, of each family's engine."""

RULES = [
    {"threshold": 0.6},
    {"threshold": 0.4},
    {"threshold": 0.9},
    {"threshold": 0.5, "block_add_threshold": 0.5, "decoded_token_threshold": 0.5},
    {"threshold": 0.7, "block_add_threshold": 1.0},
    {"threshold": 0.5, "decoded_token_threshold": 0.0},
]
"""Thresholds that some positions of an untrained model reach, and not all."""

LENGTHS = (37, 5, 64, 12, 7, 90)
NEIGHBOURS: list[dict[str, Any]] = [
    {"dllm_policy": "threshold", "dllm_threshold": 0.05},
    {"dllm_verify": "freedave", "dllm_drafts": 8},
    {"dllm_policy": "sequential", "dllm_tokens_per_step": 2, "dllm_verify": "spiffy"},
]


class Outcome(NamedTuple):
    """What a request is given; equal for equal requests."""

    tokens: list[int]
    nfe: int
    steps: Any
    logprobs: Any


def args_of(rule: dict[str, float]) -> dict[str, Any]:
    return {"dllm_policy": "multi_block", **{f"dllm_{name}": value for name, value in rule.items()}}


def prompt_of(index: int) -> list[int]:
    return [(11 * index + 5 * i) % 300 for i in range(LENGTHS[index % len(LENGTHS)])]


@functools.cache
def requests_of(count: int = 12) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded, every other with log-probabilities; all with a step map."""
    found = []
    for index in range(count):
        params = greedy(
            max_tokens=30 + 3 * index,
            extra_args=args_of(RULES[index % len(RULES)]),
            temperature=float(index % 4 == 3),
            seed=index,
            logprobs=2 if index % 2 else None,
        )
        found.append((prompt_of(index), mapped(params)))
    return found


def neighbours() -> list[tuple[list[int], SamplingParams]]:
    return [(prompt_of(index + 2), greedy(max_tokens=40, extra_args=args)) for index, args in enumerate(NEIGHBOURS)]


def engine_for(family: str = "sdar", **more: Any) -> LLM:
    length, blocks = WINDOWS[family]
    return drafting_engine(family, Options(block_length=length, mask_id=MASK), dllm={"eager": blocks}, **more)


def outcome_of(output: RequestOutput) -> Outcome:
    found = output.outputs[0].logprobs
    logprobs = None
    if found is not None:
        logprobs = [{token: round(each.logprob, 4) for token, each in place.items()} for place in found]
    return Outcome(tokens_of(output), nfe_of(output), map_of(output), logprobs)


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    return generate(llm, *zip(*requests, strict=True))


@functools.cache
def alone(index: int) -> Outcome:
    """What a request gets when it has an engine to itself."""
    return outcome_of(run(engine_for(), [requests_of()[index]])[0])


def expected() -> list[Outcome]:
    return [alone(index) for index in range(len(requests_of()))]


def assert_reference(family: str, output: RequestOutput, prompt: list[int], theirs: Decoded, name: Any) -> None:
    length = WINDOWS[family][0]
    assert tokens_of(output) == theirs.tokens, name
    assert nfe_of(output) == theirs.nfe, name
    found = map_of(output)
    forwards = {position: call for call, commits in enumerate(theirs.steps) for position, _ in commits}
    first: dict[int, int] = {}
    for position, call in forwards.items():
        first[position // length] = min(call, first.get(position // length, call))
    places = range(len(prompt), len(prompt) + len(theirs.tokens))
    assert found.forwards == tuple(forwards[place] for place in places), name
    # Steps count from the one that wrote first in the block.
    assert found.steps == tuple(forwards[place] - first[place // length] for place in places), name
    assert found.blocks == tuple(place // length - len(prompt) // length for place in places), name


@pytest.mark.parametrize("family", WINDOWS)
def test_tokens_forwards_and_steps_are_those_of_the_plain_reference(family: str) -> None:
    length, blocks = WINDOWS[family]
    llm, model = engine_for(family), reference_model(family)
    cases = [(rule, prompt_of(index), early) for index, rule in enumerate(RULES) for early in (False, True)]
    # Tokens that the model writes often, as stop tokens.
    seen = tokens_of(generate(llm, [prompt_of(0)], greedy(max_tokens=24))[0])
    ahead = 0
    requests, decoded = [], []
    for number, (rule, prompt, early) in enumerate(cases):
        stop_ids = frozenset(seen[number : number + 2]) if number % 3 else frozenset[int]()
        options = Options(
            block_length=length,
            mask_id=MASK,
            stop_ids=stop_ids,
            eos_early_stop=early,
            threshold_inclusive=llm.llm_engine.vllm_config.model_config.hf_config.geometry.traits.threshold_inclusive,
        )
        theirs = decode_multi_block(model, prompt, 26, options, MultiBlock(window_blocks=blocks, **rule))
        ahead += sum(len({position // length for position, _ in commits}) > 1 for commits in theirs.steps)
        args = args_of(rule) | {"dllm_eos_early_stop": early}
        requests.append((prompt, mapped(greedy(max_tokens=26, extra_args=args, stop_token_ids=sorted(stop_ids)))))
        decoded.append(theirs)
    for case, output, theirs in zip(cases, run(llm, requests), decoded, strict=True):
        assert_reference(family, output, case[1], theirs, case)
    assert ahead > len(cases), "hardly any forward writes to several blocks"


EDITS = [(0.1, 4), (0.3, 1), (0.2, 16), (0.1, 0)]
"""``edit_threshold`` and ``max_post_edit_steps``, such that an untrained model edits something."""


def test_edits_are_those_of_the_plain_reference_alone_and_in_batches() -> None:
    family = "llada2_moe"
    length, blocks = WINDOWS[family]
    llm, model = engine_for(family), reference_model(family)
    requests, decoded = [], []
    rewritten = settled_by_the_limit = 0
    for index, (threshold, most) in enumerate(EDITS * 2):
        rule, prompt = RULES[index % len(RULES)], prompt_of(index)
        options = Options(
            block_length=length,
            mask_id=MASK,
            edit_threshold=threshold,
            max_post_edit_steps=most,
            threshold_inclusive=llm.llm_engine.vllm_config.model_config.hf_config.geometry.traits.threshold_inclusive,
        )
        settings = MultiBlock(window_blocks=blocks, **rule)
        theirs = decode_multi_block(model, prompt, 26, options, settings)
        unlimited = decode_multi_block(
            model, prompt, 26, dataclasses.replace(options, max_post_edit_steps=99), settings
        )
        settled_by_the_limit += most > 0 and theirs.steps != unlimited.steps
        places = [position for commits in theirs.steps for position, _ in commits]
        rewritten += len(places) - len({*places})
        args = args_of(rule) | {"dllm_edit_threshold": threshold, "dllm_max_post_edit_steps": most}
        requests.append((prompt, mapped(greedy(max_tokens=26, extra_args=args))))
        decoded.append(theirs)
    assert rewritten > len(decoded), "hardly any token is edited"
    assert settled_by_the_limit, "every block is settled before the limit"
    neighbour = prompt_of(3), greedy(max_tokens=40, extra_args=args_of(RULES[0]))
    plain = tokens_of(run(llm, [neighbour])[0])
    *outputs, beside = run(llm, [*requests, neighbour])
    assert tokens_of(beside) == plain
    for number, (output, theirs) in enumerate(zip(outputs, decoded, strict=True)):
        assert_reference(family, output, requests[number][0], theirs, number)
    for request, output in list(zip(requests, outputs, strict=True))[:3]:
        assert outcome_of(run(llm, [request])[0]) == outcome_of(output)


def test_in_batches_with_neighbours_of_other_policies_with_drafts_and_without() -> None:
    llm = engine_for()
    before = free_pages(llm)
    plain = [tokens_of(output) for output in run(llm, neighbours())]
    for turn in (1, -1):
        requests = [*neighbours(), *requests_of()][::turn]
        outputs = run(llm, requests)[::turn]
        assert [outcome_of(output) for output in outputs[len(plain) :]] == expected()
        assert [tokens_of(output) for output in outputs[: len(plain)]] == plain
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


SCRATCH_PAGES = 7 * 8 * 2
"""A draft's window may begin in one page and end in the next."""
SCARCE = {"block_size": 32, "max_num_batched_tokens": 160, "max_model_len": 192}
"""Too few pages for all requests, and prompts that do not fit in a step beside the blocks."""


def scarce_engine(family: str = "sdar", **more: Any) -> LLM:
    """Pages for some three requests, behind those that the drafts of eight have."""
    return engine_for(family, num_gpu_blocks_override=SCRATCH_PAGES + 14, **(SCARCE | more))


@functools.cache
def edited_requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded requests that edit tokens, with and without log-probabilities and stop tokens."""
    found = []
    for index, (threshold, most) in enumerate(EDITS * 3):
        args = args_of(RULES[index % len(RULES)])
        args |= {"dllm_edit_threshold": threshold, "dllm_max_post_edit_steps": most}
        params = greedy(
            max_tokens=30 + 2 * index,
            extra_args=args,
            temperature=float(index % 3 == 2),
            seed=index,
            logprobs=2 if index % 2 else None,
            stop_token_ids=[*range(0, 500, 40)] if index % 5 == 4 else [],
        )
        found.append((prompt_of(index), mapped(params)))
    return found


@functools.cache
def edited_alone() -> list[Outcome]:
    llm = engine_for("llada2_moe")
    return [outcome_of(run(llm, [request])[0]) for request in edited_requests()]


def scarce_case(edits: bool, **more: Any) -> tuple[LLM, list[tuple[list[int], SamplingParams]], list[Outcome]]:
    """An engine with few pages, requests, and what each of them gets alone."""
    if edits:
        more["max_num_batched_tokens"] = 200
        return scarce_engine("llada2_moe", **more), edited_requests(), edited_alone()
    return scarce_engine(**more), requests_of(), expected()


@pytest.mark.parametrize("edits", [False, True])
def test_after_preemption_with_chunked_prefill_and_hits_in_the_prefix_cache(edits: bool) -> None:
    llm, requests, theirs = scarce_case(edits)
    before = free_pages(llm)
    with preemptions(llm) as preempted:
        outputs = run(llm, requests)
    assert preempted
    # Their forwards too: a preempted request goes on with the window that it had.
    assert [outcome_of(output) for output in outputs] == theirs
    for number in range(2):
        again = run(llm, requests[5:6])
        assert outcome_of(again[0]) == theirs[5]
        assert again[0].num_cached_tokens or not number
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)
    generate(llm, [[1, 2, 3]], greedy(max_tokens=1))
    assert not runner_of(llm).model_state.kept_windows._kept, "a window is left"


def test_requests_that_end_while_they_are_preempted_leave_nothing() -> None:
    llm = scarce_engine()
    engine = llm.llm_engine
    with preemptions(llm) as preempted:
        for index, (prompt, params) in enumerate(requests_of()):
            engine.add_request(f"aborted-{index}", {"prompt_token_ids": prompt}, params)
        while not preempted:
            engine.step()
        engine.abort_request([f"aborted-{index}" for index in range(len(requests_of()))])
    for _ in range(2):
        generate(llm, [[1, 2, 3]], greedy(max_tokens=1))
    assert not runner_of(llm).model_state.kept_windows._kept, "a window is left"
    assert outcome_of(run(llm, requests_of()[1:2])[0]) == alone(1)


@pytest.mark.parametrize("edits", [False, True])
def test_with_asynchronous_scheduling_after_preemption(edits: bool) -> None:
    _, requests, theirs = scarce_case(edits)
    llm, *_ = scarce_case(edits, async_scheduling=True)
    assert isinstance(scheduler_of(llm), DllmAsyncScheduler)
    with preemptions(llm) as preempted:
        outputs = run(llm, requests)
    assert preempted
    for output, alone_ in zip(outputs, theirs, strict=True):
        got = outcome_of(output)
        assert got.tokens == alone_.tokens
        assert got.steps.steps == alone_.steps.steps
        assert got.logprobs == alone_.logprobs


def test_a_window_goes_on_after_the_cache_was_reset_under_it() -> None:
    """As for new weights: what is computed is thrown away, and the tokens of unfinished blocks stay."""
    llm = engine_for()
    engine = llm.llm_engine
    prompt, params = requests_of()[0]
    engine.add_request("reset", {"prompt_token_ids": prompt}, params)
    outputs: list[RequestOutput] = []
    for number in range(200):
        outputs += [output for output in engine.step() if output.finished]
        if outputs:
            break
        if number % 3 == 2:
            assert scheduler_of(llm).reset_prefix_cache(reset_running_requests=True)
    assert tokens_of(outputs[0]) == alone(0).tokens
    assert map_of(outputs[0]).steps == alone(0).steps.steps


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_new_weights_find_no_window_of_the_old_ones(asynchronous: bool) -> None:
    """What follows the emitted tokens is what a request that begins behind them gets. The weights are the same here."""
    llm = engine_for(async_scheduling=asynchronous)
    engine, args = llm.llm_engine, args_of({"threshold": 0.97, "block_add_threshold": 0.1})
    for steps in range(2, 20):
        prompt = prompt_of(steps)
        engine.add_request(f"r{steps}", {"prompt_token_ids": prompt}, greedy(max_tokens=40, extra_args=args))
        emitted: list[int] = []
        for _ in range(steps):
            emitted = next(iter(map(tokens_of, engine.step())), emitted)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint_of("sdar"))})
        tokens = emitted
        while engine.has_unfinished_requests():
            tokens = next(iter(map(tokens_of, engine.step())), tokens)
        # Asynchronously, a step was in flight.
        known = prompt + tokens[: len(emitted)]
        assert tokens[: len(emitted)] == emitted
        fresh = generate(llm, [known], greedy(max_tokens=40 - len(emitted), extra_args=args))[0]
        assert tokens[len(emitted) :] == tokens_of(fresh), steps
    assert not runner_of(llm).model_state.kept_windows._kept, "a window is left"


def test_a_window_that_is_ahead_of_the_text_is_not_taken_up() -> None:
    """As where vLLM drops the tokens of a step in flight. A window that still holds them emits them again."""
    llm = engine_for()
    states = runner_of(llm).model_state.states
    kept = KeptWindows(states)
    row = states.rows.gpu[2]
    row.zero_()
    columns = [field.name for field in dataclasses.fields(Progress)]
    start, first = columns.index("block_start"), columns.index("first")
    states.asked["policy"][2], states.asked["keeps_window"][2] = Policy.MULTI_BLOCK, True
    for num_tokens, taken in ((36, 4), (32, 0), (31, None)):
        row[start], row[first] = 32, 8
        kept.leave("a", 2)
        row[start], row[first] = 28, 1
        kept.leave("a", None)
        kept.enter("a", 2, num_tokens, was_preempted=True)
        kept.apply()
        assert [row[start].item(), row[first].item()] == ([28, 1] if taken is None else [32, taken])
    kept.leave("a", 2)
    kept.leave("a", None)
    kept.enter("a", 2, 36, was_preempted=False)
    kept.apply()
    assert not kept._kept


DRAWN = [
    ("sdar", {"threshold": 0.97, "block_add_threshold": 0.25}),
    ("llada2_moe", {"threshold": 0.97, "block_add_threshold": 0.25}),
    ("llada2_moe", {"threshold": 0.3, "decoded_token_threshold": 0.3, "edit_threshold": 0, "max_post_edit_steps": 1}),
    ("llada2_moe", {"threshold": 0.3, "decoded_token_threshold": 0.3, "edit_threshold": 0, "max_post_edit_steps": 2}),
]


@pytest.mark.parametrize(("family", "rule"), DRAWN, ids=str)
def test_a_masked_position_is_drawn_anew_in_every_forward(
    family: str, rule: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the forward before unmasked nothing in its block, and where it edited the block in front of it."""
    llm, seen = engine_for(family), []
    measure = LogitsReader.measure

    def recorded(reader: LogitsReader, rows: RowGroups, **how: Any) -> Any:
        column = rows.positions - rows.window_start.unsqueeze(1)
        masked = rows.window.gather(1, column) == MASK
        places = torch.stack((rows.positions[masked], rows.rounds[masked]), dim=1).tolist()
        seen.extend((number, *place) for place in places)
        return measure(reader, rows, **how)

    monkeypatch.setattr(LogitsReader, "measure", recorded)
    for number in range(6):
        params = greedy(max_tokens=40, temperature=1.0, seed=number, extra_args=args_of(rule))
        generate(llm, [prompt_of(number)], params)
    assert len(seen) == len(set(seen)) > 200


def test_bad_words_do_not_come_together_over_the_border_of_two_blocks() -> None:
    llm = engine_for()
    prompt, rule = prompt_of(1), args_of(RULES[1])
    free = tokens_of(generate(llm, [prompt], greedy(max_tokens=40, extra_args=rule))[0])
    words = sorted({*itertools.pairwise(free)})
    params = greedy(max_tokens=40, extra_args=rule)
    params._bad_words_token_ids = [list(word) for word in words]
    tokens = tokens_of(generate(llm, [prompt], params)[0])
    assert not {*itertools.pairwise(tokens)} & {*words}


def test_more_tokens_per_forward_than_one_block_at_a_time() -> None:
    llm, prompt = engine_for(), prompt_of(0)
    one, several = (
        request_stats(generate(llm, [prompt], greedy(max_tokens=48, extra_args=args))[0]).nfe
        for args in ({"dllm_policy": "threshold", "dllm_threshold": 0.6}, args_of(RULES[0]))
    )
    assert several < one


def test_verifiers_are_refused() -> None:
    for verifier in ({"dllm_verify": "freedave"}, {"dllm_verify": "spiffy"}):
        with pytest.raises(VLLMValidationError, match=r"verify=.* is not allowed with policy='multi_block'"):
            generate(engine_for(), [[1]], greedy(extra_args=args_of(RULES[0]) | verifier))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdar", "llada2_moe"])
def test_with_tensor_parallel_two(family: str) -> None:
    """The second one's requests edit tokens."""
    requests, theirs = (edited_requests(), edited_alone()) if family == "llada2_moe" else (requests_of(), expected())
    length, blocks = WINDOWS[family]
    with tensor_parallel_engine(
        checkpoint_of(family),
        dllm={"block_length": length, "eager": blocks, "max_drafts": 7},
        max_num_seqs=8,
        num_gpu_blocks_override=SCRATCH_PAGES + 14,
        **{**SCARCE, "max_num_batched_tokens": 200},
    ) as llm:
        for output, alone_ in zip(run(llm, requests), theirs, strict=True):
            assert (tokens_of(output), nfe_of(output)) == (alone_.tokens, alone_.nfe)
