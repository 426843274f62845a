"""The reference of models with full attention does what the official implementations do."""

import functools
from collections import Counter
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from tests.paths import BUNDLED, GOLDEN
from tests.reference.bidirectional import (
    BidirectionalModel,
    Decoded,
    Options,
    decode,
    decode_as_released,
    decode_with_drafts,
)
from tests.reference.golden import (
    BIDIRECTIONAL_FAMILIES,
    BidirectionalCase,
    BidirectionalGolden,
    golden_or_skip,
    load_bidirectional,
    read_cases,
)


def groups(*samplers: str) -> list[tuple[str, str]]:
    """Family and group of the cases that one of ``samplers`` made."""
    return [
        (family, group)
        for family in BIDIRECTIONAL_FAMILIES
        if (GOLDEN / family).is_dir()
        for group in dict.fromkeys(case.group for case in load_bidirectional(family).cases)
        if group.split("-")[0] in samplers
    ]


def cases_of(family: str, group: str) -> list[BidirectionalCase]:
    return [case for case in load_bidirectional(family).cases if case.group == group]


@pytest.fixture(params=BIDIRECTIONAL_FAMILIES)
def golden(request: pytest.FixtureRequest) -> BidirectionalGolden:
    return golden_or_skip(load_bidirectional, request.param)


@pytest.fixture(params=BIDIRECTIONAL_FAMILIES)
def bundled(request: pytest.FixtureRequest) -> BidirectionalGolden:
    """For tests with prompts and options of their own."""
    return load_bidirectional(request.param, BUNDLED)


def test_logits_equal_the_official_ones(golden: BidirectionalGolden) -> None:
    for ids, logits in golden.logits:
        torch.testing.assert_close(golden.model(ids[None])[0][0], logits, rtol=0, atol=1e-4)


def test_no_case_is_left_out(golden: BidirectionalGolden) -> None:
    folder = golden.checkpoint.parent
    names = {
        case.name
        for family, group in groups("fastdllm", "baseline", "freedave")
        if family == folder.name
        for case in cases_of(family, group)
    }
    assert names == {case["name"] for case in read_cases(folder)["cases"]} != set()


def differences(case: BidirectionalCase, got: Decoded, nfe: int) -> list[str]:
    """Names of what differs from the official run."""
    equal = {"tokens": got.tokens == case.tokens, "nfe": got.nfe == nfe, "steps": got.steps == case.steps}
    return [name for name, same in equal.items() if not same]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "group"), groups("fastdllm", "baseline"))
def test_decoding_equals_the_official_samplers(family: str, group: str) -> None:
    failures = {case.name: differences(case, case.as_released, case.nfe) for case in cases_of(family, group)}
    assert {name: different for name, different in failures.items() if different} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "group"), groups("freedave"))
def test_freedave_equals_the_official_one_in_its_rounds(family: str, group: str) -> None:
    failures = {case.name: differences(case, case.as_released, case.nfe) for case in cases_of(family, group)}
    assert {name: different for name, different in failures.items() if different} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "group"), groups("freedave"))
def test_a_forward_per_round_gives_the_official_tokens_in_the_forwards_that_were_needed(
    family: str, group: str
) -> None:
    failures = []
    for case in cases_of(family, group):
        got = decode_with_drafts(case.model, case.prompt, case.options)
        if (got.tokens, got.nfe) != (case.tokens, case.needed_nfe):
            failures.append(f"{case.name}: {got.nfe} forwards, {case.nfe} official ones, {case.wasted} wasted")
    assert not failures


def test_official_forwards_are_wasted_only_with_a_threshold(golden: BidirectionalGolden) -> None:
    """Where a refresh finished the block, or the denoising step from the last accepted draft did."""
    wasted = Counter(f"{case.group.split('-')[0]}-{case.options.policy}" for case in golden.cases if case.wasted)
    baseline = {"baseline-threshold"} if golden.model.config["model_type"] == "llada" else set()
    expected = {"freedave-threshold", *baseline}
    assert wasted.keys() <= expected, "in Dream a refresh never finishes a block"
    assert wasted.keys() == expected or GOLDEN != BUNDLED


def test_the_first_release_of_fast_dllm_wastes_what_freedaves_baseline_does() -> None:
    llada = golden_or_skip(load_bidirectional, "llada")
    cases = [case for case in llada.cases if case.nfe_at_first not in (None, case.nfe)]
    assert cases or GOLDEN != BUNDLED
    for case in cases:
        got = decode(case.model, case.prompt, replace(case.options, always_two_forwards=True))
        assert (got.tokens, got.nfe, got.nfe - got.wasted) == (case.tokens, case.nfe_at_first, case.nfe), case.name


@functools.cache
def baseline_of(model: BidirectionalModel, prompt: tuple[int, ...], options: Options) -> Decoded:
    return decode(model, list(prompt), options)


@pytest.mark.parametrize(("family", "group"), groups("freedave"))
def test_freedave_changes_the_tokens_of_the_baseline_only_where_the_official_one_does(family: str, group: str) -> None:
    for case in cases_of(family, group):
        plain = replace(case.options, verify="none", drafts=1, always_two_forwards=True)
        baseline = baseline_of(case.model, tuple(case.prompt), plain)
        assert baseline.nfe == case.baseline_nfe, case.name
        assert (baseline.tokens == case.tokens) == case.same_as_baseline, case.name
        assert case.same_as_baseline or case.options.policy != "static", case.name


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(510, (length,), generator=generator).tolist() for length in lengths]


def options_of(bundled: BidirectionalGolden, **options: Any) -> Options:
    shifted = bundled.model.config["model_type"] == "Dream"
    return Options(**{"mask_id": bundled.mask_id, "gen_length": 32, "block_length": 8, "shifted": shifted} | options)


def test_a_slice_computes_what_the_whole_sequence_does_when_its_context_is_up_to_date(
    bundled: BidirectionalGolden,
) -> None:
    ids = bundled.logits[2][0]
    logits, cache = bundled.model(ids[None])
    states = torch.stack([ids[8:16], ids[16:24]])
    dual, own = bundled.model(states, 8, cache)
    torch.testing.assert_close(dual[0], logits[0, 8:16])
    torch.testing.assert_close(own[1][0][0], cache[1][0][0, 8:16])
    moved, _ = bundled.model(torch.cat([ids[:8], ids[16:24], ids[16:]])[None])
    assert (dual[1] - moved[0, 8:16]).abs().max() > 1e-3, "the context is that of the other state"
    prefix, _ = bundled.model(ids[None, 8:], 8, [(k[:, :8], v[:, :8]) for k, v in cache])
    torch.testing.assert_close(prefix[0], logits[0, 8:])


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("policy", ["static", "threshold", "factor"])
def test_with_a_refresh_in_every_step_a_cache_is_none(cache: str, policy: str) -> None:
    """But for shifted logits, where the first step of a block would decide more without a cache."""
    bundled = load_bidirectional("llada", BUNDLED)
    for prompt in prompts(5):
        none = decode(bundled.model, prompt, options_of(bundled, policy=policy, cache="none"))
        refreshed = options_of(bundled, policy=policy, cache=cache, refresh_interval=1)
        assert decode(bundled.model, prompt, refreshed) == none
    stale = options_of(bundled, policy=policy, cache=cache)
    assert decode(bundled.model, prompt, stale) != none


def test_a_window_as_long_as_the_block_leaves_nothing_behind_it(bundled: BidirectionalGolden) -> None:
    for prompt in prompts(5):
        dual, prefix = (
            decode(bundled.model, prompt, options_of(bundled, cache=cache, generation_window=8))
            for cache in ("dual", "prefix")
        )
        assert dual == prefix
        everything = decode(bundled.model, prompt, options_of(bundled))
        assert decode(bundled.model, prompt, options_of(bundled, generation_window=32)) == everything
    assert dual != everything


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize(
    "policy",
    [
        {"policy": "static"},
        {"policy": "static", "steps": 20},
        {"policy": "static", "refresh_interval": 3},
        {"policy": "threshold", "threshold": 0.7},
        {"policy": "threshold", "threshold": 0.7, "refresh_interval": 3},
        {"policy": "factor"},
        {"policy": "entropy", "steps": 16},
    ],
    ids=lambda policy: "-".join(map(str, policy.values())),
)
def test_with_exact_match_drafts_change_no_token(
    bundled: BidirectionalGolden, cache: str, policy: dict[str, Any]
) -> None:
    fewer = 0
    for prompt in prompts(2):
        options = options_of(bundled, **policy, cache=cache, drafts=4)
        plain, got = decode(bundled.model, prompt, options), decode_with_drafts(bundled.model, prompt, options)
        assert got.tokens == plain.tokens
        assert got.nfe <= plain.nfe
        assert decode_with_drafts(bundled.model, prompt, replace(options, finished_drafts=True)) == got
        assert decode_with_drafts(bundled.model, prompt, replace(options, drafts=1)) == plain
        fewer += got.nfe < plain.nfe
    assert fewer or policy["policy"] != "static"


def test_with_the_subset_rule_finished_drafts_make_up_the_difference_to_the_official_code(
    bundled: BidirectionalGolden,
) -> None:
    for prompt, d, threshold in zip(prompts(16), cycle((4, 8, 16)), cycle((0.4, 0.5, 0.6, 0.7)), strict=False):
        assert_finished_drafts_suffice(bundled, prompt, subset_options(bundled, d, threshold))


def test_without_finished_drafts_the_subset_rule_may_end_a_block_otherwise() -> None:
    """No golden case tells the two apart; this prompt does."""
    bundled, prompt = load_bidirectional("dream", BUNDLED), [146, 223, 304, 229, 381, 470, 145, 405]
    options = subset_options(bundled, 4, 0.5)
    official = assert_finished_drafts_suffice(bundled, prompt, options)
    got = decode_with_drafts(bundled.model, prompt, options)
    assert (got.tokens == official.tokens, got.nfe, official.nfe) == (False, 17, 18)


def subset_options(bundled: BidirectionalGolden, drafts: int, threshold: float) -> Options:
    return options_of(bundled, policy="threshold", threshold=threshold, drafts=drafts, match="subset")


def assert_finished_drafts_suffice(bundled: BidirectionalGolden, prompt: list[int], options: Options) -> Decoded:
    """Returns the run in the official rounds."""
    official = decode_as_released(bundled.model, prompt, options)
    got = decode_with_drafts(bundled.model, prompt, replace(options, finished_drafts=True))
    assert (got.tokens, got.nfe) == (official.tokens, official.nfe - official.wasted)
    return official
