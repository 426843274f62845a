"""Masks anywhere in a text: filled in as the plain reference does, whatever the cache, the policy and the batch."""

import random
from typing import Any

import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.full_attention import FAMILIES, bundled
from tests.engine.harness import (
    assert_nothing_left,
    engine,
    free_pages,
    generate,
    greedy,
    nfe_of,
    preemptions,
    read_by_policy,
    runner_of,
    tensor_parallel_engine,
    tokens_of,
)
from tests.paths import CHECKPOINTS
from tests.reference.bidirectional import Options
from tests.reference.infill import Filled, fill_in
from vllm_dllm import filled, request_stats

CACHES = ("none", "prefix", "dual")
LENGTH, WINDOW = 8, 16
POLICIES: list[dict[str, Any]] = [
    {"policy": "static"},
    {"policy": "static", "steps": 3},
    {"policy": "threshold", "threshold": 0.4},
    {"policy": "factor", "factor": 0.9},
    {"policy": "maskgit_plus", "steps": 5},
    {"policy": "topk_margin", "steps": 6},
]
HOLES: list[list[tuple[int, int]]] = [
    [(20, 12)],  # a block and a half
    [(7, 3), (15, 1), (30, 9)],  # a block in three holes
    [(0, 10)],  # nothing before it
    [(33, 15)],  # nothing behind it
    [(1, 1), (3, 1), (5, 1), (7, 1), (9, 1)],
    [(10, 17), (29, 7)],
]
SKIPPING: list[dict[str, Any]] = [
    {"dllm_verify": "freedave", "dllm_drafts": 4},
    {"dllm_verify": "spiffy", "dllm_drafts": 3},
    {"dllm_verify": "psd", "dllm_drafts": 2},
]
TEXT = 48


def engine_for(family: str, cache: str, **more: Any) -> LLM:
    sizes = {"max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 4096}
    options = {"block_length": LENGTH, "cache": cache, "max_drafts": 3, "generation_window": WINDOW}
    return engine(bundled(family).checkpoint, dllm=options, **{**sizes, **more})


def mask_of(family: str) -> int:
    return bundled(family).mask_id


def texts(family: str) -> list[list[int]]:
    draw, mask = random.Random(0), mask_of(family)
    found = []
    for holes in HOLES:
        text = [draw.randrange(1, 100) for _ in range(TEXT)]
        for start, length in holes:
            text[start : start + length] = [mask] * length
        found.append(text)
    return found


def reference_options(family: str, cache: str, policy: dict[str, Any]) -> Options:
    return Options(
        mask_id=mask_of(family),
        gen_length=LENGTH,
        block_length=LENGTH,
        shifted=family == "dream",
        cache=cache,  # type: ignore[arg-type]
        generation_window=WINDOW,
        **policy,
    )


def params_of(policy: dict[str, Any], **more: Any) -> SamplingParams:
    names = {"policy": "dllm_policy", "steps": "dllm_denoising_steps", "threshold": "dllm_threshold"}
    args = {names.get(name, f"dllm_{name}"): value for name, value in policy.items()}
    args = read_by_policy({**args, **more}, timesteps=True)
    return greedy(max_tokens=1, extra_args={**args, "dllm_infill": True})


def cases(family: str) -> list[tuple[list[int], dict[str, Any]]]:
    return [(text, policy) for text in texts(family) for policy in POLICIES]


def fill(llm: LLM, family: str, **more: Any) -> list[RequestOutput]:
    asked = cases(family)
    return generate(llm, [text for text, _ in asked], [params_of(policy, **more) for _, policy in asked])


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_forwards_are_those_of_the_reference(family: str, cache: str) -> None:
    llm = engine_for(family, cache)
    pages = free_pages(llm)
    outputs = fill(llm, family)
    for (text, policy), output in zip(cases(family), outputs, strict=True):
        wanted: Filled = fill_in(bundled(family).model, text, reference_options(family, cache, policy))
        assert (tokens_of(output), nfe_of(output)) == (wanted.tokens, wanted.nfe), (text, policy)
        assert output.prompt_token_ids == text
    assert_nothing_left(llm, pages)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_drafts_change_no_token(family: str, cache: str) -> None:
    llm = engine_for(family, cache)
    plain = fill(llm, family)
    for skipping in SKIPPING[:2]:
        drafted = fill(llm, family, **skipping)
        assert [tokens_of(o) for o in drafted] == [tokens_of(o) for o in plain]
        assert sum(map(nfe_of, drafted)) < sum(map(nfe_of, plain))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hole_at_the_end_is_a_prompt_with_max_tokens(family: str, cache: str) -> None:
    llm = engine_for(family, cache)
    prompt, mask = list(range(3, 22)), mask_of(family)
    for more in ({}, *SKIPPING, {"dllm_policy": "random"}):
        args = {"dllm_denoising_steps": 4} if not more else dict(more)
        for temperature in (0.0, 0.9):
            asked = SamplingParams(max_tokens=3 * LENGTH, temperature=temperature, seed=5, ignore_eos=True)
            wanted, filled = asked.clone(), asked.clone()
            wanted.extra_args, filled.extra_args = args, {**args, "dllm_infill": True}
            texts = [prompt, prompt + [mask] * 3 * LENGTH]
            behind, within = generate(llm, texts, [wanted, filled])
            assert (tokens_of(within), nfe_of(within)) == (tokens_of(behind), nfe_of(behind)), (more, temperature)


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_among_neighbours_that_fill_in_nothing(family: str) -> None:
    llm = engine_for(family, "dual")
    asked = [(text, params_of(POLICIES[2], **SKIPPING[i % 3])) for i, text in enumerate(texts(family))]
    alone = [generate(llm, [text], [params])[0] for text, params in asked]
    neighbours = [(list(range(3, 3 + n)), greedy(max_tokens=20)) for n in (1, 9, 17, 30)]
    apart = generate(llm, [text for text, _ in neighbours], [params for _, params in neighbours])
    everyone = asked + neighbours
    together = generate(llm, [text for text, _ in everyone], [params for _, params in everyone])
    for one, other in zip(alone + apart, together, strict=True):
        assert (tokens_of(one), nfe_of(one)) == (tokens_of(other), nfe_of(other))


@pytest.mark.parametrize("family", FAMILIES)
def test_after_preemption(family: str) -> None:
    roomy, mask = engine_for(family, "prefix"), mask_of(family)
    texts = [[3 + i] * 5 + [mask] * 30 + [40 + i] * 4 + [mask] * 50 + [70 + i] for i in range(12)]
    params = [params_of(policy) for policy in POLICIES[:3]] * 4
    wanted = [tokens_of(output) for output in generate(roomy, texts, params)]
    scratch = runner_of(roomy).model_state.layout.scratch
    # Too few pages for all of them to the end.
    tight = engine_for(family, "prefix", num_gpu_blocks_override=3 * 16 * scratch.pages_per_draft + 15)
    with preemptions(tight) as preempted:
        assert [tokens_of(output) for output in generate(tight, texts, params)] == wanted
    assert preempted


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_with_tensor_parallel_two(family: str) -> None:
    wanted = [tokens_of(output) for output in fill(engine_for(family, "dual"), family)]
    options = {"block_length": LENGTH, "cache": "dual", "max_drafts": 3, "generation_window": WINDOW}
    sizes = {"max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 4096}
    with tensor_parallel_engine(bundled(family).checkpoint, dllm=options, **sizes) as llm:
        assert [tokens_of(output) for output in fill(llm, family)] == wanted


def test_one_mask_stands_for_max_tokens() -> None:
    llm, mask = engine_for("llada", "dual"), mask_of("llada")
    before, behind = [5, 6, 7], [8, 9, 10, 11]
    args = {"dllm_infill": "max_tokens"}
    short = generate(llm, [[*before, mask, *behind]], [greedy(max_tokens=13, extra_args=args)])[0]
    long = generate(llm, [before + 13 * [mask] + behind], [greedy(extra_args={"dllm_infill": True})])[0]
    assert tokens_of(short) == tokens_of(long)
    assert len(tokens_of(short)) == 13


def test_a_stop_token_ends_a_single_hole_and_no_other() -> None:
    llm, family = engine_for("llada", "dual"), "llada"
    text = texts(family)[0]
    free = tokens_of(generate(llm, [text], [params_of(POLICIES[0])])[0])
    stop = free[4]
    params = params_of(POLICIES[0])
    params.stop_token_ids, params.ignore_eos = [stop], False
    output = generate(llm, [text], [params])[0]
    assert tokens_of(output) == free[: free.index(stop) + 1]
    assert output.outputs[0].finish_reason == "stop"
    text = texts(family)[1]
    free = tokens_of(generate(llm, [text], [params_of(POLICIES[0])])[0])
    params = params_of(POLICIES[0])
    params.stop_token_ids, params.ignore_eos = [free[1]], False
    output = generate(llm, [text], [params])[0]
    assert tokens_of(output) == free
    assert output.outputs[0].finish_reason == "length"


def test_step_maps_of_filled_masks() -> None:
    llm = engine_for("dream", "dual")
    params = params_of(POLICIES[0], dllm_step_map=True)
    output = generate(llm, [texts("dream")[1]], [params])[0]
    step_map = request_stats(output).step_map
    assert step_map is not None
    assert step_map.blocks == (0,) * 8 + (1,) * 5
    # The first of each hole has its logits outside of the block.
    assert [step_map.steps[i] for i in (0, 3, 4)] == [0, 0, 0]
    assert sorted(step_map.steps[8:]) == [0, 1, 2, 3, 4]


def test_guidance_of_filled_masks_is_that_of_a_hole_at_the_end() -> None:
    checkpoint = bundled("llada").checkpoint
    llm = engine(
        checkpoint,
        dllm={"block_length": LENGTH, "cache": "dual", "guidance": True},
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=4096,
    )
    prompt, mask = list(range(3, 22)), mask_of("llada")
    args = {"dllm_cfg_scale": 1.5}
    behind = generate(llm, [prompt], [greedy(max_tokens=16, extra_args=args)])[0]
    within = generate(llm, [prompt + 16 * [mask]], [greedy(extra_args={**args, "dllm_infill": True})])[0]
    assert tokens_of(within) == tokens_of(behind)


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ([3, 4, 5], {}, "no mask token"),
        ([3, "mask", "mask", 5], {"dllm_infill": "max_tokens"}, "has 2"),
        (["mask", "mask"], {}, "nothing but mask tokens"),
        ([3, "mask", 5], {"dllm_infill": "yes, please"}, "max_tokens"),
    ],
)
def test_what_cannot_be_filled_in_is_refused(text: list[Any], more: dict[str, Any], message: str) -> None:
    llm, mask = engine_for("llada", "dual"), mask_of("llada")
    prompt = [mask if token == "mask" else token for token in text]
    with pytest.raises(VLLMValidationError, match=message):
        generate(llm, [prompt], [greedy(extra_args={"dllm_infill": True, **more})])


def test_parameters_that_read_one_text_are_refused_with_several_holes() -> None:
    llm, mask = engine_for("llada", "dual"), mask_of("llada")
    params = greedy(extra_args={"dllm_infill": True}, min_tokens=7, max_tokens=10)
    with pytest.raises(VLLMValidationError, match="min_tokens=7"):
        generate(llm, [[3, mask, 5, mask, 6]], [params])


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_the_bundled_models_texts_are_put_together(name: str) -> None:
    llm = engine(CHECKPOINTS / f"tiny-{name}", max_model_len=128, skip_tokenizer_init=False, hf_overrides={})
    tokenizer = llm.get_tokenizer()
    mask = llm.llm_engine.vllm_config.model_config.hf_config.mask_token_id
    pieces = ["We compute 12 + 7 = ", ". So Ada has ", " apples.\n#### 19"]
    ids = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    prompt = ids[0] + [mask] * 2 + ids[1] + [mask] * 3 + ids[2]
    output = llm.generate([{"prompt_token_ids": prompt}], greedy(extra_args={"dllm_infill": True}), use_tqdm=False)[0]
    whole = filled(llm, output)
    assert [len(hole) <= most for hole, most in zip(whole.holes, (2, 3), strict=True)] == [True, True]
    assert whole.token_ids == ids[0] + whole.holes[0] + ids[1] + whole.holes[1] + ids[2]
    assert whole.text == tokenizer.decode(whole.token_ids, skip_special_tokens=True)
    params = greedy(max_tokens=5, extra_args={"dllm_infill": "max_tokens"})
    short = llm.generate([{"prompt_token_ids": ids[0] + [mask] + ids[1]}], params, use_tqdm=False)[0]
    (hole,) = filled(llm, short).holes
    assert hole == list(short.outputs[0].token_ids)[: len(hole)]
    assert filled(llm, short).token_ids == ids[0] + hole + ids[1]
    plain = llm.generate([{"prompt_token_ids": ids[0]}], greedy(max_tokens=4), use_tqdm=False)[0]
    with pytest.raises(ValueError, match="no mask token"):
        filled(llm, plain)
