"""FailFast: drafts grow while the drafter is sure, drafts and counts are the reference's, and texts the target's."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm import LLM

from tests.engine.harness import (
    assert_nothing_left,
    free_pages,
    generate,
    greedy,
    preemptions,
    runner_of,
    schedule_asynchronously,
    scheduler_of,
    tokens_of,
)
from tests.engine.shared import shared_engine
from tests.engine.speculators.engines import (
    DEFAULTS,
    Drafted,
    drafted,
    engine,
    reference_drafter,
    reference_target,
    sampled,
    verified,
)
from tests.engine.speculators.test_lossless import LENGTH, PROMPT, SMALL, assert_distribution, joint_distribution
from tests.reference.deer import target_logits
from tests.reference.failfast import BlockDrafter, Rule, draft_of_one_forward
from tests.reference.failfast_golden import FOLDER, FailFastCase, load_failfast
from vllm_dllm.speculators.cut import counts_of_requests
from vllm_dllm.speculators.scheduler import DrafterAsyncScheduler, DrafterScheduler

CASES = load_failfast()


def golden_engine(**options: Any) -> LLM:
    """The golden target and its untrained Fast-dLLM v2 drafter, with forwards for any rule."""
    speculative = {
        "method": "dllm",
        "model": str(FOLDER / "checkpoint"),
        "draft_length": "failfast",
        "num_speculative_tokens": 80,
        "draft_forwards": 64,
    }
    options = {**DEFAULTS, "max_model_len": 384, "max_num_batched_tokens": 2048, **options}
    key = ("failfast", *sorted(options.items()))
    return shared_engine(key, lambda: LLM(str(FOLDER / "target"), speculative_config=speculative, **options))


@contextmanager
def growing(llm: LLM, rule: Rule) -> Iterator[None]:
    """The drafts of an engine grow by this rule meanwhile."""
    speculator = runner_of(llm).speculator
    growth = replace(speculator.growth, **vars(rule))
    with mock.patch.object(speculator, "growth", growth):
        yield


def by_text(seen: list[Drafted]) -> dict[tuple[int, ...], list[int]]:
    """The drafts behind every text; the same text has the same drafts."""
    found: dict[tuple[int, ...], list[int]] = {}
    for round_ in seen:
        assert found.setdefault(tuple(round_.text), round_.drafts) == round_.drafts
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_golden_rounds_are_drafted_token_for_token_among_others(case: FailFastCase) -> None:
    """Every round's text is a prompt, but for its last token, which the target writes."""
    llm = golden_engine()
    rounds = [round_ for round_ in case.rounds if round_["context"] > case.num_prompt]
    with growing(llm, case.rule), drafted(llm) as seen:
        outputs = generate(llm, [case.text[: r["context"] - 1] for r in rounds], greedy(max_tokens=2))
    assert [tokens_of(output)[0] for output in outputs] == [case.text[r["context"] - 1] for r in rounds]
    found = by_text(seen)
    assert [found[tuple(case.text[: r["context"]])] for r in rounds] == [r["draft"] for r in rounds]


SURE = Rule(threshold=0.1, first=4, step=6, most=40)
"""Some drafts of the golden drafter grow by it, and some do not."""


def run_golden(llm: LLM, indices: list[int], max_tokens: int = 60) -> tuple[list[list[int]], dict[Any, list[int]]]:
    """The texts behind some prompts of the golden cases, every third drawn, and what was drafted."""
    prompts = [CASES[index].text[: CASES[index].num_prompt] for index in indices]
    params = [sampled(i, max_tokens) if i % 3 == 2 else greedy(max_tokens=max_tokens) for i in indices]
    llm.reset_prefix_cache()
    with growing(llm, SURE), drafted(llm) as seen:
        outputs = generate(llm, prompts, params)
    return [tokens_of(output) for output in outputs], by_text(seen)


@functools.cache
def alone() -> tuple[list[list[int]], dict[Any, list[int]]]:
    texts, drafts = [], {}
    for index in range(8):
        own, of_own = run_golden(golden_engine(), [index])
        texts += own
        drafts |= of_own
    return texts, drafts


def assert_as_alone(found: tuple[list[list[int]], dict[Any, list[int]]]) -> None:
    texts, drafts = alone()
    assert found[0] == texts
    shared = drafts.keys() & found[1].keys()
    assert len(shared) > 0.9 * len(drafts)
    assert {text: found[1][text] for text in shared} == {text: drafts[text] for text in shared}


def test_lengths_differ_and_greedy_texts_are_the_targets() -> None:
    texts, drafts = alone()
    assert len(Counter(map(len, drafts.values()))) > 3
    for index in (0, 1, 3, 4, 6, 7):
        case = CASES[index]
        assert texts[index] == case.text[case.num_prompt :][:60]


def test_among_others_in_another_order_in_chunks_and_with_prefix_hits() -> None:
    everyone = list(range(8))
    assert_as_alone(run_golden(golden_engine(), everyone))
    texts, drafts = run_golden(golden_engine(), everyone[::-1])
    assert_as_alone((texts[::-1], drafts))
    assert_as_alone(run_golden(golden_engine(max_num_batched_tokens=224, enable_prefix_caching=False), everyone))
    llm = golden_engine()
    with mock.patch.object(llm, "reset_prefix_cache"):
        assert_as_alone(run_golden(llm, everyone))


def test_after_preemption() -> None:
    llm = golden_engine(num_gpu_blocks_override=50)
    before = free_pages(llm)
    with preemptions(llm) as preempted:
        texts, drafts = run_golden(llm, list(range(8)))
    assert preempted
    assert [texts[index] for index in (0, 1, 3, 4, 6, 7)] == [alone()[0][index] for index in (0, 1, 3, 4, 6, 7)]
    shared = drafts.keys() & alone()[1].keys()
    assert {text: drafts[text] for text in shared} == {text: alone()[1][text] for text in shared}
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def counts(llm: LLM) -> dict[str, int]:
    """Of vLLM's metrics, which are of the latest engine."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    metrics = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    return {name: metrics[name].value for name in names}


@pytest.mark.parametrize("scheduling", ["synchronous", "asynchronous"])
def test_counts_are_of_drafts_that_were_proposed(monkeypatch: pytest.MonkeyPatch, scheduling: str) -> None:
    """Of the rows that asynchronous scheduling reserves, no count has those behind a draft's end."""
    if scheduling == "asynchronous":
        schedule_asynchronously(monkeypatch)
    llm = golden_engine(max_num_seqs=9 if scheduling == "asynchronous" else 10)
    kind = DrafterAsyncScheduler if scheduling == "asynchronous" else DrafterScheduler
    assert type(scheduler_of(llm)) is kind
    cases = [CASES[index] for index in (0, 1, 3, 4)]
    before = counts(llm)
    with verified(llm) as rounds, growing(llm, SURE), drafted(llm) as seen:
        outputs = generate(llm, [case.text[: case.num_prompt] for case in cases], greedy(max_tokens=60))
    drafts = by_text(seen)
    for case, output in zip(cases, outputs, strict=True):
        assert tokens_of(output) == case.text[case.num_prompt :][:60]
        length = case.num_prompt + 1
        for round_ in rounds[output.request_id]:
            own = drafts[tuple(case.text[:length])]
            matches = [one == other for one, other in zip(own, case.text[length:], strict=False)]
            accepted = [*matches, False].index(False)
            assert round_.accepted == accepted
            assert round_.drafted == len(own)
            length += accepted + 1
        assert length >= case.num_prompt + 60
    of_all = [round_ for own in rounds.values() for round_ in own]
    after = counts(llm)
    assert {name: after[name] - before[name] for name in before} == {
        "num_drafts": len(of_all),
        "num_draft_tokens": sum(round_.drafted for round_ in of_all),
        "num_accepted_tokens": sum(round_.accepted for round_ in of_all),
    }


def small_rule(threshold: float) -> dict[str, Any]:
    return {"draft_length": "failfast", "draft_length_start": 1, "draft_length_step": 2, "draft_length_max": 7} | {
        "draft_length_threshold": threshold,
        "draft_sample_method": "greedy",
    }


@pytest.mark.parametrize("context", ["causal", "block-causal"])
def test_drafts_of_other_drafters_are_the_references(context: str) -> None:
    """Those that make all drafts in one forward, and those whose rows predict their own position."""
    asked, rule = small_rule(0.25), Rule(first=1, step=2, most=7, threshold=0.25, sub_block_length=2)
    if context == "block-causal":
        asked |= {"sub_block_length": 2, "unmask_threshold": 0.3, "draft_forwards": 40}
        rule = replace(rule, unmask_threshold=0.3)
    llm = engine(context, num_drafts=9, seed=0, speculative=asked)
    drafter = reference_drafter(context, 9, seed=0)
    prompts = [[1 + place * step % 40 for place in range(30 + step)] for step in range(1, 9)]
    with drafted(llm) as seen:
        outputs = generate(llm, prompts, greedy(max_tokens=12))
    assert len(Counter(len(round_.drafts) for round_ in seen)) > 2
    for round_ in seen:
        if context == "causal":
            assert round_.drafts == draft_of_one_forward(drafter, rule, round_.text)
        else:
            assert round_.drafts == BlockDrafter(drafter, rule).draft(round_.text).tokens
    for prompt, output in zip(prompts, outputs, strict=True):
        text = [*prompt, *tokens_of(output)]
        assert target_logits(reference_target(), text, len(prompt))[:-1].argmax(-1).tolist() == tokens_of(output)


def test_how_long_drafts_are_does_not_depend_on_their_temperature() -> None:
    asked = {**small_rule(0.25), "draft_sample_method": "probabilistic", "draft_temperature_factor": 0.25}
    llm, drafter = engine("causal", num_drafts=9, seed=0, speculative=asked), reference_drafter("causal", 9, seed=0)
    rule = Rule(first=1, step=2, most=7, threshold=0.25, sub_block_length=2)
    with drafted(llm) as seen:
        generate(llm, [[1 + place * step % 40 for place in range(30)] for step in range(1, 9)], greedy(max_tokens=12))
    assert [round_.drafts for round_ in seen] == [draft_of_one_forward(drafter, rule, each.text) for each in seen]
    assert len({len(round_.drafts) for round_ in seen}) > 2


DRAWS = 1000
FIRST_SEED = 300_000
"""With this prompt, vLLM's noise of seeds 0 to 1999 at positions 4 and 5 is an unlikely sample. Of 200 such samples of
2000 seeds this one fits its distribution least (p = 8e-5); all 400 000 seeds together fit it (p = 0.8), and so do seeds
0 to 1999 at other positions. ``tests/engine/cpu/test_sampling.py`` tests that small seeds are no worse than others."""


@pytest.mark.parametrize("context", ["causal", "shifted-block-causal"])
def test_sampled_texts_have_the_targets_joint_distribution(context: str) -> None:
    """Drafts whose length depends on what was drawn before, and on the drafter's confidence in it."""
    asked = {**small_rule(0.5), "draft_sample_method": "probabilistic", "draft_length_step": 1, "draft_length_max": 3}
    if context == "shifted-block-causal":
        # The first draft behind the prompt is drawn from the block before.
        asked |= {"sub_block_length": 1, "unmask_threshold": 1.0, "draft_forwards": 8}
    llm = engine(
        context,
        num_drafts=3,
        vocab=SMALL,
        max_model_len=32,
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        speculative=asked,
    )
    with verified(llm) as rounds:
        outputs = generate(llm, [PROMPT] * DRAWS, [sampled(FIRST_SEED + seed, LENGTH) for seed in range(DRAWS)])
    assert_distribution([tokens_of(output) for output in outputs], joint_distribution())
    drafts = Counter(round_.drafted for own in rounds.values() for round_ in own)
    assert len(drafts) > 1
    assert 0.05 < sum(r.accepted for own in rounds.values() for r in own) / sum(drafts.elements()) < 0.9


def test_what_is_counted_beside_the_tokens_is_of_requests() -> None:
    """NaNs, which vLLM counts by row, and else the drafts that were proposed."""
    is_draft = torch.tensor([False, True, True, False, False, True, False])
    bounds = torch.tensor([0, 4, 6, 7])
    assert counts_of_requests(is_draft, None, bounds).tolist() == [-3, -2, -1]
    nans = torch.tensor([0, 0, 0, 0, 2, 1, 0], dtype=torch.int32)
    assert counts_of_requests(is_draft, nans, bounds).tolist() == [-3, 3, -1]
