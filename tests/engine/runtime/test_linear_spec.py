"""LinearSpec: diffusion drafts, the autoregressive model verifies, and the text is the autoregressive one."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.harness import (
    assert_nothing_left,
    case_params,
    free_pages,
    generate,
    greedy,
    nfe_of,
    preemptions,
    scheduler_of,
    tensor_parallel_engine,
    tokens_of,
)
from tests.engine.runtime.test_nemotron import DENOISED, LENGTH, LENGTHS, PAGE, STATIC, THRESHOLD, engine_of, prompt_of
from tests.engine.runtime.test_pangu import expected_of
from tests.engine.runtime.test_prefix_cache import assert_sound
from tests.paths import BUNDLED
from tests.reference.drafts import FreeDave
from tests.reference.golden import golden_or_skip
from tests.reference.linear_spec import greedy_text
from tests.reference.model import ReferenceModel, causal_context
from tests.reference.nemotron import MASK, NemotronGolden, SpeculativeCase, load_nemotron
from vllm_dllm import request_stats

SPECULATES = {"dllm_verify": "linear_spec"}


@pytest.fixture(scope="module")
def golden() -> NemotronGolden:
    return golden_or_skip(load_nemotron)


@functools.cache
def reference() -> ReferenceModel:
    return ReferenceModel(load_nemotron(BUNDLED).checkpoint)


@functools.cache
def text_of(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return greedy_text(reference(), list(prompt), max_tokens, MASK, frozenset())


def params(max_tokens: int, *, args: dict[str, Any] | None = None, **more: Any) -> SamplingParams:
    return greedy(max_tokens=max_tokens, extra_args={**SPECULATES, **(args or {})}, **more)


def params_of(case: SpeculativeCase) -> SamplingParams:
    args = {"dllm_threshold": case.threshold}
    return params(case.max_new_tokens, args=args, stop_token_ids=sorted(case.stop_ids))


def assert_as_golden(case: SpeculativeCase, output: RequestOutput) -> None:
    assert tokens_of(output) == case.tokens, case.name
    # A text that its first token ends, or of one token, takes the draft that emits the token.
    assert nfe_of(output) == max(case.nfe, 1), case.name
    stats = request_stats(output)
    assert stats.drafted == len(case.drafts) * (case.block_length - 1), case.name
    accepted = [_agreed(case, index) for index in range(len(case.drafts))]
    assert stats.accepted == sum(accepted), case.name
    assert sum(stats.acceptance_histogram) == len(accepted), case.name
    assert all(stats.acceptance_histogram[depth] == accepted.count(depth) for depth in accepted), case.name


def _agreed(case: SpeculativeCase, index: int) -> int:
    """Drafts that a round accepted: NVIDIA's count of the last one ends at the stop token."""
    if index < len(case.drafts) - 1:
        return case.accepted[index] - 1
    done = len(case.prompt) + 1 + sum(case.accepted[:index])
    text = text_of(tuple(case.prompt), done - len(case.prompt) + case.block_length)[done - len(case.prompt) :]
    draft = case.drafts[index][1:]
    return next((i for i, (a, b) in enumerate(zip(draft, text, strict=False)) if a != b), len(draft))


@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "adapter"])
@pytest.mark.parametrize("length", [4, 8, 16, 32])
def test_golden_texts_in_as_many_forwards(length: int, adapter: bool, golden: NemotronGolden) -> None:
    """In a batch, forwards have rows that draft and rows that verify, and the adapter is for the former alone."""
    cases = [case for case in golden.speculative if (case.block_length, case.lora) == (length, adapter)]
    if not cases:
        pytest.skip(f"no case with blocks of {length}")
    # With the adapter as the default has it.
    dllm = {"block_length": length, **({} if adapter else {"draft_adapter": False})}
    llm = engine_of(STATIC, dllm=dllm, checkpoint=golden.checkpoint)
    together = generate(llm, [case.prompt for case in cases], [params_of(case) for case in cases])
    alone = [generate(llm, [case.prompt], params_of(case))[0] for case in cases[:2]]
    for case, output in zip([*cases, *cases[:2]], [*together, *alone], strict=True):
        assert_as_golden(case, output)


def test_golden_texts_of_one_token_at_a_time(golden: NemotronGolden) -> None:
    llm = engine_of(STATIC, checkpoint=golden.checkpoint)
    prompts = [prompt for prompt, _ in golden.autoregressive]
    outputs = generate(llm, prompts, [params(len(tokens)) for _, tokens in golden.autoregressive])
    assert [tokens_of(output) for output in outputs] == [tokens for _, tokens in golden.autoregressive]


def assert_autoregressive(llm: LLM, prompts: list[list[int]], asked: list[SamplingParams]) -> list[RequestOutput]:
    outputs = generate(llm, prompts, asked)
    for prompt, one, output in zip(prompts, asked, outputs, strict=True):
        assert tokens_of(output) == text_of(tuple(prompt), one.max_tokens or 0), len(prompt)
    return outputs


@pytest.mark.parametrize(("threshold", "asynchronous"), [(0.0, False), (0.5, True)])
def test_any_prompt_gets_the_autoregressive_text_beside_requests_of_other_kinds(
    threshold: float, asynchronous: bool
) -> None:
    more = {"max_num_batched_tokens": 128, **({"async_scheduling": True} if asynchronous else {})}
    llm = engine_of(THRESHOLD, dllm={"max_drafts": 3}, **more)
    prompts = [prompt_of(length, seed) for seed in range(2) for length in LENGTHS]
    args = {"dllm_threshold": threshold}
    asked = [params(17 + index % 9, args=args) for index in range(len(prompts))]
    outputs = assert_autoregressive(llm, prompts, asked)
    # Careful drafts cost more forwards than they save in this model.
    assert threshold or sum(map(nfe_of, outputs)) < 0.9 * sum(len(tokens_of(output)) for output in outputs)
    other, drafting = greedy(THRESHOLD, max_tokens=20), greedy(THRESHOLD, FreeDave(4), max_tokens=20)
    every = [
        each
        for index, prompt in enumerate(prompts)
        for each in ((prompt, asked[index]), (prompt, other), (prompt, drafting))
    ]
    mixed = generate(llm, [prompt for prompt, _ in every], [one for _, one in every])
    for (prompt, one), output in zip(every, mixed, strict=True):
        expected = expected_of(reference(), prompt, 20, THRESHOLD).tokens
        if one is not other and one is not drafting:
            expected = text_of(tuple(prompt), one.max_tokens or 0)
        assert tokens_of(output) == expected, one.extra_args


def test_beside_requests_with_bad_words() -> None:
    """Verifying rows stand in front of their windows, where no place of a bad word is."""
    llm = engine_of(STATIC)
    prompt = prompt_of(9)
    barred = greedy(STATIC, max_tokens=24, extra_args={"dllm_verify": "none"})
    barred._bad_words_token_ids = [[generate(llm, [prompt], barred)[0].outputs[0].token_ids[0]]]
    biased = params(24, logit_bias={5: 2.0})
    alone = [tokens_of(generate(llm, [prompt], one)[0]) for one in (barred, biased)]
    assert barred._bad_words_token_ids[0][0] not in alone[0]
    assert [*map(tokens_of, generate(llm, [prompt] * 2, [barred, biased]))] == alone


def test_texts_end_at_max_tokens_at_a_stop_token_and_at_the_longest_text() -> None:
    llm = engine_of(STATIC, max_model_len=3 * PAGE, num_gpu_blocks_override=12)
    prompt = prompt_of(50)
    assert_autoregressive(llm, [prompt] * 12, [params(number) for number in range(1, 13)])
    whole = text_of(tuple(prompt), 3 * PAGE - len(prompt))
    (longest,) = generate(llm, [prompt], params(len(whole)))
    assert (tokens_of(longest), longest.outputs[0].finish_reason) == (whole, "length")
    for stop in dict.fromkeys(whole[:20]):
        (output,) = generate(llm, [prompt], params(30, stop_token_ids=[stop]))
        assert tokens_of(output) == whole[: whole.index(stop) + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        assert request_stats(output).committed_tokens == whole.index(stop) + 1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_after_preemption_and_with_asynchronous_scheduling(async_scheduling: bool) -> None:
    # Too few pages for all of them to the end.
    llm = engine_of(STATIC, max_model_len=256, num_gpu_blocks_override=13, async_scheduling=async_scheduling)
    before = free_pages(llm)
    lengths = (5, 13, 21, 30, 34, 47, 52, 66)
    prompts = [prompt_of(length, seed=1) for length in lengths]
    drawn = [params(50 + n, temperature=0.8, seed=n, args={"dllm_threshold": n % 2 * 0.5}) for n in lengths]
    with preemptions(llm) as preempted:
        assert_autoregressive(llm, prompts, [params(50 + length) for length in lengths])
        outputs = generate(llm, prompts, drawn)
    assert preempted
    # What is drawn depends on the seed and the positions alone: not on drafts, on rounds, nor on the requests beside.
    roomy = engine_of(STATIC, dllm={"block_length": 16})
    for one in drawn:
        one.extra_args = SPECULATES
    assert [*map(tokens_of, generate(roomy, prompts, drawn))] == [*map(tokens_of, outputs)]
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_pages_in_the_prefix_cache_are_sound_after_every_step(async_scheduling: bool) -> None:
    llm = engine_of(STATIC, max_model_len=256, num_gpu_blocks_override=13, async_scheduling=async_scheduling)
    fresh = engine_of(STATIC, max_model_len=256, num_gpu_blocks_override=14)
    assert_pages_sound(llm, fresh, params, lambda prompt, number: text_of(tuple(prompt), number))


def assert_pages_sound(
    llm: LLM,
    fresh: LLM,
    params_of: Callable[[int], SamplingParams],
    text_of: Callable[[list[int], int], list[int]],
) -> None:
    """Of an engine with few pages, after every step; ``fresh`` prefills texts, and ``text_of`` says what is written."""
    llm.reset_prefix_cache()
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    texts: dict[str, list[int]] = {}
    for index, length in enumerate((23, 31, 61)):
        core.add_request(str(index), {"prompt_token_ids": prompt_of(length, seed=3)}, params_of(60 + 3 * index))
    checked = set[bytes]()
    while core.has_unfinished_requests():
        core.step()
        for request in scheduler.requests.values():
            texts[request.request_id] = list(request.all_token_ids)
        # One token more, so that the last full page is prefilled as a page of its own and not left out.
        assert_sound(llm, fresh, [[*text, 1] for text in texts.values()], checked)
    # Text is hit as soon as a round has written it.
    prompt = prompt_of(23, seed=3)
    turn = [*prompt, *text_of(prompt, 50)]
    (hit,) = generate(llm, [turn], params_of(20))
    assert hit.num_cached_tokens == len(turn) // PAGE * PAGE
    assert tokens_of(hit) == text_of(turn, 20)


@pytest.mark.slow
def test_with_tensor_parallel_two(golden: NemotronGolden) -> None:
    """Each rank has its share of the adapter. Blocks beside them are denoised without it."""
    cases = [case for case in golden.speculative if (case.block_length, case.lora) == (LENGTH, True)]
    blocks = [
        case for case in golden.cases if (case.options.block_length, case.options.commit_predicts) == (LENGTH, True)
    ]
    asked = [*map(params_of, cases), *map(case_params, blocks)]
    options = {"hf_overrides": {}, "block_size": PAGE, "max_num_seqs": 8}
    with tensor_parallel_engine(golden.checkpoint, dllm={"block_length": LENGTH}, **options) as llm:
        outputs = generate(llm, [case.prompt for case in (*cases, *blocks)], asked)
    for case, output in zip(cases, outputs, strict=False):
        assert_as_golden(case, output)
    for block, output in zip(blocks, outputs[len(cases) :], strict=True):
        assert (tokens_of(output), nfe_of(output)) == (block.tokens, block.nfe), block.name


ALLOWED = [104, 111, 118, 125]
DRAWS = 1000


def test_draws_have_the_autoregressive_distribution() -> None:
    """Chi-square of three tokens out of four each, at temperature 1.3: 64 texts."""
    prompt, temperature = prompt_of(33), 1.3
    llm = engine_of(THRESHOLD, dllm={"max_drafts": 3}, max_num_batched_tokens=128)
    asked = [
        params(
            3, temperature=temperature, seed=seed, allowed_token_ids=ALLOWED, args={"dllm_threshold": seed % 2 * 0.5}
        )
        for seed in range(DRAWS)
    ]
    outputs = generate(llm, [prompt] * DRAWS, asked)
    assert_drawn_from(reference(), prompt, temperature, outputs)
    # Drafts drawn with the same noise are accepted more often than drafts drawn with any.
    stats = [request_stats(output) for output in outputs]
    assert sum(each.accepted for each in stats) > 0


def assert_drawn_from(
    model: ReferenceModel, prompt: list[int], temperature: float, outputs: Sequence[RequestOutput]
) -> None:
    """Chi-square of the first three tokens of ``ALLOWED``, each drawn from what the model says of the text before."""
    found = Counter(tuple(tokens_of(output)) for output in outputs)
    expected = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, probability in expected.items():
            ids = torch.tensor([*prompt, *text])
            logits = model(ids, causal_context(len(ids), len(ids)))[-1, ALLOWED]
            for token, share in zip(ALLOWED, (logits / temperature).softmax(dim=0).tolist(), strict=True):
                longer[(*text, token)] = probability * share
        expected = longer
    # Texts that are rare make one cell.
    cells = [(found[text], DRAWS * share) for text, share in expected.items() if DRAWS * share >= 8]
    rest = (sum(found.values()) - sum(a for a, _ in cells), DRAWS - sum(b for _, b in cells))
    cells += [rest] if rest[1] >= 1 else []
    assert len(cells) > 10
    statistic = sum((a - b) ** 2 / b for a, b in cells)
    # The normal approximation of its distribution; one run in a million is above.
    freedom = len(cells) - 1
    assert statistic < freedom + 4.8 * (2 * freedom) ** 0.5, (statistic, freedom)


@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_are_the_autoregressive_ones(logprobs_mode: str) -> None:
    assert_logprobs(engine_of(STATIC, logprobs_mode=logprobs_mode), reference(), params, logprobs_mode)


def assert_logprobs(
    llm: LLM, model: ReferenceModel, params_of: Callable[..., SamplingParams], logprobs_mode: str
) -> None:
    """Those of ``model`` over the text, plain and with sampling parameters."""
    processed, prompt = logprobs_mode.startswith("processed"), prompt_of(31)
    asked = {"min_tokens": 12, "logit_bias": {150: 1.0}, "temperature": 0.7, "seed": 5, "stop_token_ids": [11, 160]}
    outputs = generate(llm, [prompt] * 2, [params_of(20, logprobs=2), params_of(20, logprobs=2, **asked)])
    for output, parameters in zip(outputs, ({}, asked), strict=True):
        tokens, given = tokens_of(output), output.outputs[0].logprobs
        assert given is not None
        ids = torch.tensor([*prompt, *tokens])
        logits = model(ids, causal_context(len(ids), len(ids)))[len(prompt) - 1 : -1].clone()
        if parameters and processed:
            logits[:, 150] += 1.0
            logits[:12, [11, 160]] = -torch.inf
            logits[:, MASK] = -torch.inf
            logits /= 0.7
        expected = logits.log_softmax(dim=1)
        ours = torch.tensor([given[i][token].logprob for i, token in enumerate(tokens)])
        torch.testing.assert_close(ours, expected[torch.arange(len(tokens)), tokens], atol=1e-4, rtol=0)
        assert all(len(each) >= 2 for each in given)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty does not go with dllm_verify='linear_spec'"),
        ({"frequency_penalty": 0.5}, "frequency_penalty does not go with"),
        ({"repetition_penalty": 1.2}, "repetition_penalty does not go with"),
        ({"args": {"dllm_step_map": True}}, "step_map=True is not allowed with verify='linear_spec'"),
        ({"args": {"dllm_drafts": 4}}, "drafts=4 is not allowed with verify='linear_spec'"),
        ({"args": {"dllm_edit_threshold": 0.5}}, "edit_threshold=0.5 is not allowed"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(more: dict[str, Any], message: str) -> None:
    llm = engine_of(STATIC)
    with pytest.raises(VLLMValidationError, match=message):
        generate(llm, [[1, 2, 3]], params(4, **more))


def test_models_that_cannot_do_it_refuse_it_by_name() -> None:
    from tests.engine.harness import drafting_engine
    from tests.reference.decode import Options

    sdar = drafting_engine("sdar", Options(block_length=LENGTH, mask_id=511))
    with pytest.raises(VLLMValidationError, match="verify='linear_spec' is not allowed: SDAR models do not decode"):
        generate(sdar, [[1, 2, 3]], params(4))
    with pytest.raises(VLLMValidationError, match="with the engine option first_token='denoised'; allowed: 'autoreg"):
        generate(engine_of(DENOISED), [[1, 2, 3]], params(4))
