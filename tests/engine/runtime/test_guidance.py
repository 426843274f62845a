"""Classifier-free guidance: the text and its unconditional branch in one forward, each with K/V of its own."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine import harness
from tests.engine.full_attention import bundled, engine_of, params_of
from tests.engine.harness import (
    MASK,
    assert_nothing_left,
    free_pages,
    generate,
    nfe_of,
    preemptions,
    tokens_of,
)
from tests.reference.bidirectional import BidirectionalModel, Decoded, Options, decode
from tests.reference.guidance import GuidedModel, llada_sample
from vllm_dllm.runtime.logits.guidance import Guidance

LENGTH = 8
PAGE = 32
STATIC = Options(mask_id=MASK, gen_length=40, block_length=LENGTH, policy="static", steps=20)
THRESHOLD = Options(mask_id=MASK, gen_length=40, block_length=LENGTH, policy="threshold", threshold=0.6)
LENGTHS = (1, 6, 24, 33, 50)
"""Texts of 41 to 90 positions: with and without a page border in the last block."""
SCALES = (0.25, 0.5, 0.75)
"""Larger ones make this model so sure of many positions that single precision cannot order them, as ``static`` asks."""
LARGE_SCALES = (1.5, 3.0)


@functools.cache
def model_of(family: str) -> BidirectionalModel:
    return BidirectionalModel(bundled(family).checkpoint)


def options_of(family: str, options: Options, cache: Any = "dual") -> Options:
    # Where the refresh decides the first position, the reference spreads what is left over the steps that are left.
    steps = None if family == "dream" else options.steps
    return replace(options, cache=cache, shifted=family == "dream", steps=steps)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 500, (length,), generator=generator).tolist()


def reference(family: str, prompt: list[int], options: Options, cfg_scale: float) -> Decoded:
    return _reference(family, tuple(prompt), options, cfg_scale)


@functools.cache
def _reference(family: str, prompt: tuple[int, ...], options: Options, cfg_scale: float) -> Decoded:
    guided = GuidedModel(model_of(family), len(prompt), cfg_scale, MASK)
    return decode(guided, list(prompt), options)  # type: ignore[arg-type]


def guided_engine(family: str, options: Options, *, dllm: dict[str, Any] | None = None, **more: Any) -> LLM:
    return engine_of(family, options, dllm={"guidance": True, **(dllm or {})}, **{"block_size": PAGE, **more})


def params(options: Options, cfg_scale: float | None = None, **more: Any) -> SamplingParams:
    made = params_of(options, **more)
    if cfg_scale is not None:
        assert made.extra_args is not None
        made.extra_args["dllm_cfg_scale"] = cfg_scale
    return made


Case = tuple[list[int], Options, float | None]


def run(llm: LLM, cases: Sequence[Case]) -> list[tuple[list[int], int]]:
    """Tokens and forwards of each case, all in a batch."""
    outputs = generate(llm, [prompt for prompt, _, _ in cases], [params(o, scale) for _, o, scale in cases])
    return [(tokens_of(output), nfe_of(output)) for output in outputs]


def expected(family: str, cases: Sequence[Case]) -> list[tuple[list[int], int]]:
    decoded = [reference(family, prompt, options, scale or 0.0) for prompt, options, scale in cases]
    return [(result.tokens, result.nfe) for result in decoded]


@pytest.mark.parametrize("options", [STATIC, THRESHOLD], ids=["static", "threshold"])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_tokens_and_forwards_are_those_of_the_plain_reference(family: str, cache: str, options: Options) -> None:
    options = options_of(family, options, cache)
    llm = guided_engine(family, options)
    cases: list[Case] = [
        (prompt_of(length), options, SCALES[index % len(SCALES)]) for index, length in enumerate(LENGTHS)
    ]
    scales = SCALES if options.policy == "static" else SCALES + LARGE_SCALES
    cases += [(cases[3][0], options, scale) for scale in scales]
    assert run(llm, cases) == expected(family, cases)


def test_the_cases_tell_scales_apart() -> None:
    """One text per scale, and forwards with several tokens where the policy says so."""
    prompt = prompt_of(LENGTHS[3])
    decoded = [reference("llada", prompt, THRESHOLD, scale) for scale in (0.0, *SCALES, *LARGE_SCALES)]
    assert len({tuple(result.tokens) for result in decoded}) == len(decoded)
    assert all(result.nfe < len(result.tokens) for result in decoded[1:])


@pytest.mark.parametrize("cfg_scale", SCALES)
def test_without_a_cache_it_is_lladas_own_sampler(cfg_scale: float) -> None:
    options = options_of("llada", STATIC, "none")
    prompts = [prompt_of(length, seed=1) for length in LENGTHS]
    outputs = run(guided_engine("llada", options), [(prompt, options, cfg_scale) for prompt in prompts])
    for prompt, (tokens, nfe) in zip(prompts, outputs, strict=True):
        assert options.steps is not None
        assert tokens == llada_sample(
            model_of("llada"),
            prompt,
            mask_id=MASK,
            gen_length=options.gen_length,
            block_length=LENGTH,
            steps=options.steps,
            cfg_scale=cfg_scale,
        )
        assert nfe == options.steps


def test_the_window_of_an_unconditional_branch_moves_with_the_texts() -> None:
    options = replace(THRESHOLD, generation_window=2 * LENGTH, refresh_interval=2)
    cases: list[Case] = [(prompt_of(length, seed=2), options, 1.5) for length in LENGTHS]
    assert run(guided_engine("llada", options), cases) == expected("llada", cases)


def test_a_mask_token_in_the_prompt_is_masked_in_both() -> None:
    prompt = prompt_of(20)
    prompt[7] = MASK
    cases: list[Case] = [(prompt, THRESHOLD, 1.5)]
    assert run(guided_engine("llada", THRESHOLD), cases) == expected("llada", cases)


def test_scale_0_is_no_guidance() -> None:
    llm = guided_engine("llada", THRESHOLD)
    prompts = [prompt_of(length, seed=3) for length in LENGTHS]
    plain = run(llm, [(prompt, THRESHOLD, None) for prompt in prompts])
    assert run(llm, [(prompt, THRESHOLD, 0.0) for prompt in prompts]) == plain
    assert run(engine_of("llada", THRESHOLD), [(prompt, THRESHOLD, None) for prompt in prompts]) == plain


def test_the_engines_scale_is_the_default_and_makes_its_own_room() -> None:
    llm = engine_of("llada", THRESHOLD, dllm={"cfg_scale": 1.5})
    prompt = prompt_of(33)
    cases: list[Case] = [(prompt, THRESHOLD, 1.5), (prompt, THRESHOLD, 0.0), (prompt, THRESHOLD, 4.0)]
    given: list[Case] = [(prompt, THRESHOLD, None), *cases[1:]]
    assert run(llm, given) == expected("llada", cases)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_neighbours_change_nothing(family: str) -> None:
    """Guided and unguided requests of a batch, with drafts among the latter; confidences to the bit."""
    options = options_of(family, THRESHOLD)
    llm = guided_engine(family, options, dllm={"max_drafts": 3}, max_num_seqs=8)
    drafting = replace(options, verify="freedave", drafts=4)
    cases: list[Case] = [
        (prompt_of(length, seed=4), drafting if scale == 0 else options, scale)
        for length, scale in zip((5, 40, 18, 33, 27, 9, 21), (1.5, 0.0, 0.0, 4.0, 0.0, 0.5, 1.5), strict=True)
    ]

    def logprobs(some: Sequence[Case]) -> list[list[float]]:
        made = [params(o, scale, logprobs=0) for _, o, scale in some]
        outputs = generate(llm, [prompt for prompt, _, _ in some], made)
        return [[next(iter(at.values())).logprob for at in output.outputs[0].logprobs] for output in outputs]

    together = run(llm, cases)
    alone = [run(llm, [case])[0] for case in cases]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    assert together == expected_with_drafts(family, cases, together)
    pairs = zip(logprobs(cases), [logprobs([case])[0] for case in cases], strict=True)
    assert all(of_batch == pytest.approx(of_one, abs=1e-5) for of_batch, of_one in pairs)


def expected_with_drafts(
    family: str, cases: Sequence[Case], found: Sequence[tuple[list[int], int]]
) -> list[tuple[list[int], int]]:
    """Of requests with drafts the tokens alone: how many forwards they save is not the matter here."""
    plain = expected(family, cases)
    return [
        (tokens, nfe if options.verify == "none" else seen)
        for (tokens, nfe), (_, options, _), (_, seen) in zip(plain, cases, found, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values_at_a_time", [1, 40, 1 << 20])
def test_logits_without_guidance_keep_their_bits(dtype: torch.dtype, values_at_a_time: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 20, generator=generator).to(dtype)
    before = logits.clone()
    weight = torch.tensor([2.5, 2.5, 1.25]).unsqueeze(1)
    Guidance(torch.tensor([4, 5, 1]), weight).apply(logits, values_at_a_time)
    untouched = [0, 2, 3, 6, 7, 8]
    assert torch.equal(logits[untouched], before[untouched])
    text, unconditional = before[[4, 5, 1]].float(), before[6:].float()
    assert torch.equal(logits[[4, 5, 1]], (unconditional + weight * (text - unconditional)).to(dtype))


def test_after_preemption_a_guided_request_ends_with_the_same_text() -> None:
    # A guided request may have 2 x 4 pages, and never needs less than 2 x 3.
    options = replace(THRESHOLD, gen_length=80, generation_window=LENGTH)
    llm = guided_engine(
        "llada", options, max_model_len=128, max_num_batched_tokens=280, num_gpu_blocks_override=1 + 8 + 9
    )
    before = free_pages(llm)
    cases: list[Case] = [
        (prompt_of(length, seed=5), options, 0.0 if length == 14 else 1.5) for length in (3, 9, 14, 21, 24, 29, 30, 31)
    ]
    with preemptions(llm) as preempted:
        found = run(llm, cases)
    assert preempted
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected("llada", cases)]
    assert_nothing_left(llm, before)


def test_an_aborted_guided_request_leaves_nothing_behind() -> None:
    llm = guided_engine("llada", THRESHOLD)
    before, core = free_pages(llm), llm.llm_engine
    kept, gone = prompt_of(33, seed=6), prompt_of(50, seed=6)
    for steps in range(1, 6):
        for name, prompt, scale in (("gone", gone, 4.0), ("kept", kept, 1.5)):
            core.add_request(f"{name}{steps}", {"prompt_token_ids": prompt}, params(THRESHOLD, scale))
        outputs = [output for _ in range(steps) for output in core.step()]
        core.abort_request([f"gone{steps}"])
        while core.has_unfinished_requests():
            outputs += core.step()
        done = [output for output in outputs if output.finished and output.request_id == f"kept{steps}"]
        assert [tokens_of(output) for output in done] == [reference("llada", kept, THRESHOLD, 1.5).tokens]
    assert not harness.scheduler_of(llm).asked
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("guidance", [False, True])
def test_the_last_block_may_reach_beyond_the_longest_text_and_onto_another_page(guidance: bool) -> None:
    options = replace(STATIC, gen_length=LENGTH, steps=None)
    llm = engine_of(
        "llada",
        options,
        dllm={"guidance": guidance},
        block_size=PAGE,
        max_model_len=2 * PAGE,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=1 + 3 * (1 + guidance),
    )
    before = free_pages(llm)
    # Of the last block one to three tokens are in reach, and it ends on the page behind.
    cases: list[Case] = [(prompt_of(2 * PAGE - room, seed=7), options, 1.5 if guidance else None) for room in (1, 2, 3)]
    for case, (tokens, _) in zip(cases * 2, [run(llm, [c])[0] for c in cases] + run(llm, cases), strict=True):
        whole = reference("llada", case[0], options, case[2] or 0.0).tokens
        assert tokens == whole[: 2 * PAGE - len(case[0])]
    assert_nothing_left(llm, before)


def test_too_few_pages_for_a_text_and_its_unconditional_branch_are_refused_at_start() -> None:
    with pytest.raises(ValueError, match=r"there are 6 KV pages .*max_model_len=64 .*, twice for guidance, needs 7;"):
        guided_engine(
            "llada", STATIC, max_model_len=2 * PAGE, max_num_batched_tokens=256, num_gpu_blocks_override=1 + 5
        )


def test_a_guided_text_must_fit_in_a_step_twice() -> None:
    llm = guided_engine("llada", STATIC, max_num_batched_tokens=160)
    fits: Case = (prompt_of(40), STATIC, 1.5)
    assert run(llm, [fits, (prompt_of(100), STATIC, None)])[0] == expected("llada", [fits])[0]
    with pytest.raises(VLLMValidationError, match=r"make 81\. LLaDA .* whole, with cfg_scale=1.5 twice, .* 160 tokens"):
        run(llm, [(prompt_of(41), STATIC, 1.5)])
    assert not harness.scheduler_of(llm).requests


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dllm_cfg_scale": -0.5}, "dllm_cfg_scale=-0.5 is not allowed.*greater than or equal to 0"),
        ({"dllm_cfg_scale": float("inf")}, "dllm_cfg_scale=inf is not allowed.*less than or equal to 1000"),
        ({"dllm_cfg_scale": 1, "dllm_verify": "freedave"}, r"cfg_scale=1.0 is not allowed.*verify='freedave'"),
    ],
)
def test_what_a_guided_request_may_not_ask_is_refused(more: dict[str, Any], message: str) -> None:
    llm = guided_engine("llada", THRESHOLD, dllm={"max_drafts": 3}, max_num_seqs=8)
    made = params_of(THRESHOLD)
    made.extra_args = {**(made.extra_args or {}), **more}
    with pytest.raises(VLLMValidationError, match=message):
        generate(llm, [prompt_of(9)], made)


def test_engines_without_room_and_other_families_refuse_guidance() -> None:
    with pytest.raises(VLLMValidationError, match=r"cfg_scale=1.5 is not allowed.*engine option guidance=True"):
        run(engine_of("llada", THRESHOLD), [(prompt_of(9), THRESHOLD, 1.5)])
    sdar = harness.bundled("sdar").checkpoint
    with pytest.raises(VLLMValidationError, match=r"cfg_scale=1.5 is not allowed: SDAR models"):
        generate(harness.engine(sdar), [prompt_of(9)], harness.greedy(extra_args={"dllm_cfg_scale": 1.5}))
    for option in ({"guidance": True}, {"cfg_scale": 1.5}):
        with pytest.raises(ValueError, match=r"(guidance=True|cfg_scale=1.5) is not allowed"):
            harness.engine(sdar, dllm=option)
