"""S2D2 in the engine: the published code's greedy runs, the plain reference, and the distribution of what it draws."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.harness import (
    MASK,
    assert_nothing_left,
    bundled,
    engine,
    free_pages,
    generate,
    greedy,
    nfe_of,
    preemptions,
    tensor_parallel_engine,
    tokens_of,
)
from tests.engine.runtime.test_golden import options_with
from tests.reference.decode import Options
from tests.reference.decode import decode as decode_plainly
from tests.reference.golden import golden_or_skip
from tests.reference.model import ReferenceModel, block_causal
from tests.reference.s2d2 import Decoded, Rule, decode
from tests.reference.s2d2_golden import S2D2Case, S2D2Golden, load_s2d2
from vllm_dllm import request_stats
from vllm_dllm.methods import ROUTES

PROMPTS = [[5, 6, 7], list(range(20, 57)), [9] * 5 + [3], list(range(100, 131)), [1]]
TOKENS = 20


@pytest.fixture(scope="module")
def golden() -> S2D2Golden:
    return golden_or_skip(load_s2d2)


@cache
def model_of(checkpoint: Path) -> ReferenceModel:
    return ReferenceModel(checkpoint)


def args_of(options: Options, rule: Rule, **more: Any) -> dict[str, Any]:
    """What a request asks for to be decoded by the ``rule``."""
    names = {"estimator_parameter": "number"}
    read = {f"dllm_{name}": getattr(rule, names.get(name, name)) for name in ROUTES[rule.route]}
    args = {"dllm_verify": "s2d2", "dllm_route": rule.route, "dllm_threshold": options.threshold, **read}
    if options.edit_threshold != math.inf:
        args["dllm_edit_threshold"] = options.edit_threshold
        args["dllm_max_post_edit_steps"] = options.max_post_edit_steps
    args["dllm_eos_early_stop"] = options.eos_early_stop
    return {**args, "dllm_window": min(rule.window, options.block_length), **more}


def s2d2_engine(checkpoint: Path, options: Options, *, dllm: dict[str, Any] | None = None, **more: Any) -> LLM:
    fixed = {"block_length": options.block_length, "verify": "s2d2", "window": min(options.block_length, 8)}
    if options.sub_block_length is not None:
        fixed["sub_block_length"] = options.sub_block_length
    sizes = {"hf_overrides": {"mask_token_id": options.mask_id}, "max_num_seqs": 8}
    return engine(checkpoint, dllm={**fixed, **(dllm or {})}, **{**sizes, **more})


def params_of(options: Options, rule: Rule, **more: Any) -> SamplingParams:
    args = args_of(options, rule, **more.pop("args", {}))
    return greedy(extra_args=args, stop_token_ids=sorted(options.stop_ids), **{"max_tokens": TOKENS, **more})


def assert_as(expected: Decoded, output: RequestOutput, what: object) -> None:
    stats = request_stats(output)
    assert tokens_of(output) == expected.tokens, what
    assert nfe_of(output) == expected.nfe, what
    assert stats.drafted == sum(length for _, length in expected.spans), what
    assert stats.accepted == sum(expected.accepted), what


def test_golden_greedy_runs_in_as_many_forwards(golden: S2D2Golden) -> None:
    """The published code's forwards but for those that saw the whole draft in advance."""
    cases = [case for case in golden.cases if case.is_greedy]
    assert len(cases) >= 18
    assert sum(case.rule.causal_drafts for case in cases) == 6
    for fixed in sorted({_fixed(case) for case in cases}, key=str):
        some = [case for case in cases if _fixed(case) == fixed]
        options, rule = some[0].options, some[0].rule
        modes = {"causal_cache": rule.causal_cache, "causal_drafts": rule.causal_drafts}
        llm = s2d2_engine(fixed[0], options, dllm={"window": options.block_length, **modes})
        outputs = generate(
            llm,
            [case.prompt for case in some],
            [params_of(case.options, case.rule, max_tokens=case.max_new_tokens) for case in some],
        )
        for case, output in zip(some, outputs, strict=True):
            model = model_of(case.checkpoint)
            expected = decode(model, case.prompt, case.max_new_tokens, case.options, case.rule)
            official = (case.drafts, case.verifications, case.spans, case.accepted)
            assert (expected.drafts, expected.verifications, expected.spans, expected.accepted) == official, case.name
            assert_as(expected, output, case.name)


def _fixed(case: S2D2Case) -> tuple[Path, int, int | None, bool, bool]:
    options, rule = case.options, case.rule
    return case.checkpoint, options.block_length, options.sub_block_length, rule.causal_cache, rule.causal_drafts


RULES = (
    Rule(),
    Rule(window=3),
    Rule(route="span", min_span=4),
    Rule(route="score", score_cost=1.0, score_threshold=0.2),
    Rule(route="score", score_cost=0.5, score_cost_per="token", estimator="hard_margin_threshold", number=0.05),
    Rule(route="hysteresis", score_on=1.2, score_off=0.4, estimator="soft_confidence_power", number=1.0),
)
LENGTHS = {"sdar": 8, "fast_dllm_v2": 32, "llada2_moe": 8}


def options_of(family: str) -> Options:
    options = replace(options_with(bundled(family), LENGTHS[family]), stop_ids=frozenset(), eos_early_stop=False)
    options = replace(options, policy="threshold", threshold=0.6, tokens_per_step=1, denoising_steps=None)
    if family == "llada2_moe":
        # `eos_early_stop` ends no block whose tokens may still be edited.
        return replace(options, edit_threshold=0.6, max_post_edit_steps=4, eos_early_stop=True)
    return replace(options, edit_threshold=math.inf, sub_block_length=16 if family == "fast_dllm_v2" else None)


@cache
def expected_of(family: str, prompt: tuple[int, ...], rule: Rule, tokens: int = TOKENS) -> Decoded:
    return decode(model_of(bundled(family).checkpoint), list(prompt), tokens, options_of(family), rule)


@pytest.mark.parametrize(
    ("family", "causal_drafts"), [*((family, False) for family in LENGTHS), ("sdar", True), ("fast_dllm_v2", True)]
)
def test_requests_of_every_rule_equal_the_reference_in_one_batch_and_alone(family: str, causal_drafts: bool) -> None:
    options, rules = options_of(family), [replace(rule, causal_drafts=causal_drafts) for rule in RULES]
    llm = s2d2_engine(bundled(family).checkpoint, options, dllm={"causal_drafts": causal_drafts})
    asked = [(prompt, rule) for index, prompt in enumerate(PROMPTS[:4]) for rule in rules[index % 2 :: 2]]
    params = [params_of(options, rule) for _, rule in asked]
    whole = {"dllm_eos_early_stop": options.eos_early_stop}
    plain = greedy(max_tokens=TOKENS, extra_args={"dllm_verify": "none", "dllm_threshold": 0.6, **whole})
    prompts = [prompt for prompt, _ in asked]
    together = generate(llm, [*prompts, PROMPTS[0]], [*params, plain])
    alone = generate(llm, prompts[:1], params[:1])
    for (prompt, rule), output in zip([*asked, asked[0]], [*together[:-1], *alone], strict=True):
        assert_as(expected_of(family, tuple(prompt), rule), output, (rule, len(prompt)))
    assert sum(request_stats(output).accepted for output in together) > 0
    # A request without drafts sees its blocks as ever.
    unedited = replace(options, edit_threshold=math.inf)
    unverified = decode_plainly(model_of(bundled(family).checkpoint), PROMPTS[0], TOKENS, unedited)
    assert (tokens_of(together[-1]), nfe_of(together[-1])) == (unverified.tokens, unverified.nfe)


@pytest.mark.parametrize(("async_scheduling", "causal_drafts"), [(False, True), (True, False)])
def test_after_preemption_and_in_chunks(async_scheduling: bool, causal_drafts: bool) -> None:
    """The switch of hysteresis outlives a preemption."""
    family = "sdar"
    options, dllm = options_of(family), {"causal_drafts": causal_drafts}
    llm = s2d2_engine(
        bundled(family).checkpoint,
        options,
        dllm=dllm,
        max_model_len=128,
        max_num_batched_tokens=256,
        # 64 pages are for drafts. The others are too few for all requests to the end.
        num_gpu_blocks_override=64 + 7,
        async_scheduling=async_scheduling,
    )
    before = free_pages(llm)
    rules = [replace(RULES[index], causal_drafts=causal_drafts) for index in (5, 0, 5, 2, 5, 3, 5, 1)]
    prompts = [[(7 * index + step) % 500 for step in range(5 + 3 * index)] for index in range(8)]
    params = [params_of(options, rule, max_tokens=40) for rule in rules]
    drawn = [params_of(options, rule, max_tokens=40, temperature=0.8, seed=n) for n, rule in enumerate(rules)]
    with preemptions(llm) as preempted:
        outputs = generate(llm, prompts, params)
        draws = generate(llm, prompts, drawn)
    assert preempted
    for prompt, rule, output in zip(prompts, rules, outputs, strict=True):
        assert tokens_of(output) == expected_of(family, tuple(prompt), rule, 40).tokens, rule
    roomy = s2d2_engine(bundled(family).checkpoint, options, dllm=dllm)
    assert [*map(tokens_of, generate(roomy, prompts, drawn))] == [*map(tokens_of, draws)]
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("causal_drafts", [False, True])
def test_prefix_cache_and_causal_cache(causal_drafts: bool) -> None:
    """With a causal cache, where all drafts are verified, the text is what blocks of one position would hold."""
    options, family = options_of("sdar"), "sdar"
    rule, prompt = Rule(causal_cache=True, causal_drafts=causal_drafts), list(range(40, 111))
    modes = {"causal_cache": True, "causal_drafts": causal_drafts}
    llm = s2d2_engine(bundled(family).checkpoint, options, dllm=modes)
    for _ in range(2):
        (output,) = generate(llm, [prompt], params_of(options, rule))
        assert_as(expected_of(family, tuple(prompt), rule), output, rule)
    assert output.num_cached_tokens
    text, model = list(prompt), model_of(bundled(family).checkpoint)
    for _ in range(TOKENS):
        ids = torch.tensor([*text, MASK])
        text.append(int(model(ids, block_causal(len(ids), 1))[-1, :MASK].argmax()))
    assert tokens_of(output) == text[len(prompt) :]


@pytest.mark.parametrize("edits", [(True, False), (False, True)])
def test_requests_that_edit_beside_others_that_are_processed(edits: tuple[bool, bool]) -> None:
    """Draws of requests with sampling parameters are verified apart from those of others."""
    options = options_of("llada2_moe")
    llm = s2d2_engine(bundled("llada2_moe").checkpoint, options)
    asked = [
        params_of(
            options if is_edited else replace(options, edit_threshold=math.inf),
            RULES[0],
            temperature=1.0,
            seed=number,
            logit_bias={5: 2.0} if number else None,
        )
        for number, is_edited in enumerate(edits)
    ]
    alone = [tokens_of(generate(llm, [PROMPTS[0]], params)[0]) for params in asked]
    assert [*map(tokens_of, generate(llm, [PROMPTS[0]] * 2, asked))] == alone


@pytest.mark.slow
def test_with_tensor_parallel_two() -> None:
    options, family = options_of("sdar"), "sdar"
    rules = [replace(RULES[index], causal_drafts=True) for index in (0, 5)]
    dllm = {"block_length": LENGTHS[family], "verify": "s2d2", "window": 8, "causal_drafts": True}
    with tensor_parallel_engine(bundled(family).checkpoint, dllm=dllm, max_num_seqs=4) as llm:
        outputs = generate(llm, [PROMPTS[1]] * 2, [params_of(options, rule) for rule in rules])
        drawn = generate(llm, [PROMPTS[1]], params_of(options, rules[0], temperature=0.8, seed=1))
    for rule, output in zip(rules, outputs, strict=True):
        assert_as(expected_of(family, tuple(PROMPTS[1]), rule), output, rule)
    one = s2d2_engine(bundled(family).checkpoint, options, dllm={"causal_drafts": True})
    assert tokens_of(drawn[0]) == tokens_of(
        generate(one, [PROMPTS[1]], params_of(options, rules[0], temperature=0.8, seed=1))[0]
    )


ALLOWED, DRAWS = [104, 111, 118, 125], 500


@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2"])
def test_draws_have_the_verifiers_distribution(family: str) -> None:
    """Chi-square over two tokens out of four: each is a draw from what the model says as blocks of one position."""
    options, temperature, length = options_of(family), 1.3, 8
    # A request is answered once its block is whole, so blocks are short.
    options = replace(options, block_length=length, sub_block_length=length if options.shifted else None)
    llm = s2d2_engine(bundled(family).checkpoint, options)
    # The block begins with a fixed token, which Fast-dLLM v2 would take from the text before.
    prompt = list(range(30, 30 + length + 1))
    asked = [
        params_of(options, Rule(window=8), max_tokens=2, temperature=temperature, seed=seed, allowed_token_ids=ALLOWED)
        for seed in range(DRAWS)
    ]
    outputs = generate(llm, [prompt] * DRAWS, asked)
    found = Counter(tuple(tokens_of(output)) for output in outputs)
    model, expected = model_of(bundled(family).checkpoint), {(): 1.0}
    for _ in range(2):
        longer = {}
        for text, probability in expected.items():
            ids = torch.tensor([*prompt, *text, *([] if options.shifted else [MASK])])
            visible = block_causal(len(ids), length)
            visible[length:] = visible[length:].tril(length)
            logits = model(ids, visible)[-1, ALLOWED]
            for token, share in zip(ALLOWED, (logits / temperature).softmax(dim=0).tolist(), strict=True):
                longer[(*text, token)] = probability * share
        expected = longer
    cells = [(found[text], DRAWS * share) for text, share in expected.items() if DRAWS * share >= 8]
    rest = (sum(found.values()) - sum(a for a, _ in cells), DRAWS - sum(b for _, b in cells))
    cells += [rest] if rest[1] >= 1 else []
    assert len(cells) > 4
    statistic, freedom = sum((a - b) ** 2 / b for a, b in cells), len(cells) - 1
    # The normal approximation of its distribution; one run in a million is above.
    assert statistic < freedom + 4.8 * (2 * freedom) ** 0.5, (statistic, freedom)
    stats = [request_stats(output) for output in outputs]
    assert 0 < sum(each.accepted for each in stats) < sum(each.drafted for each in stats)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dllm_tokens_per_step": 2}, "tokens_per_step=2 is not allowed with verify='s2d2'"),
        ({"dllm_policy": "multi_block"}, "policy='multi_block' is not allowed"),
        ({"dllm_min_span": 3}, "min_span=3 is not allowed with route='always', which does not read it; read by span"),
        ({"dllm_route": "hysteresis", "dllm_score_on": -6}, "score_on=-6.0 is not allowed with score_off=-5.0"),
        ({"dllm_route": "sometimes"}, "dllm_route='sometimes'"),
        ({"dllm_drafts": 4}, "drafts=4 is not allowed with verify='s2d2'"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(args: dict[str, Any], message: str) -> None:
    llm = s2d2_engine(bundled("sdar").checkpoint, options_of("sdar"))
    given = {"dllm_verify": "s2d2", **args}
    with pytest.raises(VLLMValidationError, match=message):
        generate(llm, [[1, 2, 3]], greedy(max_tokens=4, extra_args=given))


def test_engines_that_cannot_do_it_refuse_it_by_name() -> None:
    llm = engine(bundled("sdar").checkpoint, dllm={"block_length": 8, "max_drafts": 7}, max_num_seqs=8)
    with pytest.raises(VLLMValidationError, match="started with verify='none'; start it with verify='s2d2'"):
        generate(llm, [[1, 2, 3]], greedy(max_tokens=4, extra_args={"dllm_verify": "s2d2"}))


@pytest.mark.parametrize(
    ("family", "fixed", "message"),
    [
        ("llada2_moe", {}, "causal_drafts=True is not allowed: LLaDA2 models edit tokens before the first mask"),
        ("sdar", {"block_length": 1, "window": 1}, "causal_drafts=True is not allowed with block_length=1"),
        ("sdar", {"verify": "none", "window": None}, "causal_drafts=True goes with verify='s2d2'"),
    ],
)
def test_causal_drafts_that_cannot_be_are_refused_at_start(family: str, fixed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        s2d2_engine(bundled(family).checkpoint, options_of(family), dllm={"causal_drafts": True, **fixed})
