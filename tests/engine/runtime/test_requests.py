"""What a request may ask for, and where its output ends."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from tests.engine.harness import (
    EOS,
    MASK,
    assert_nothing_left,
    engine_of,
    free_pages,
    generate,
    greedy,
    nfe_of,
    read_by_policy,
    reference_model,
    request_options,
    scheduler_of,
    tokens_of,
)
from tests.reference.decode import Options, decode
from tests.reference.model import block_causal

LENGTH = 8
STATIC = Options(block_length=LENGTH, mask_id=MASK, policy="static")
THRESHOLD = Options(block_length=LENGTH, mask_id=MASK, policy="threshold", threshold=0.6)
PROMPT = [354, 206, 479, 4, 198, 387, 187, 162, 24, 226, 173, 244, 414]
"""13 tokens: the first block begins with a tail of 5."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine_of("sdar", STATIC)


def run(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    return tokens_of(generate(llm, [prompt], params)[0])


def reference(options: Options, max_tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    return decode(reference_model("sdar"), prompt, max_tokens, options).tokens


@pytest.mark.parametrize("early", [False, True], ids=["whole blocks", "early"])
@pytest.mark.parametrize("options", [STATIC, THRESHOLD], ids=["static", "threshold"])
@pytest.mark.parametrize("max_tokens", [1, 3, 4, 11, 12, 40])
def test_max_tokens_need_not_fill_blocks(llm: LLM, options: Options, max_tokens: int, early: bool) -> None:
    expected = decode(reference_model("sdar"), PROMPT, max_tokens, replace(options, eos_early_stop=early))
    params = greedy(replace(options, eos_early_stop=early), max_tokens=max_tokens)
    output = generate(llm, [PROMPT], params)[0]
    assert (tokens_of(output), nfe_of(output)) == (expected.tokens, expected.nfe)
    assert tokens_of(output) == reference(options, max_tokens)


def test_early_ends_save_forwards(llm: LLM) -> None:
    """Left to right, a request has a forward for each of its tokens, however long the blocks are."""
    for max_tokens in (1, 5, 12):
        params = greedy(max_tokens=max_tokens, extra_args={"dllm_policy": "sequential"})
        assert nfe_of(generate(llm, [PROMPT], params)[0]) == max_tokens


def test_static_decoding_takes_one_forward_per_token_commits_included(llm: LLM) -> None:
    output = generate(llm, [PROMPT], greedy(STATIC, max_tokens=3 + 10 * LENGTH))[0]
    assert nfe_of(output) == 3 + 10 * LENGTH


def test_a_request_ends_where_max_model_len_cuts_a_block() -> None:
    limit = 61
    llm = engine_of("sdar", STATIC, max_model_len=limit)
    output = generate(llm, [PROMPT], greedy(STATIC, max_tokens=None))[0]
    # The block that the limit cuts is denoised whole, so these are the tokens of an engine without the limit.
    assert tokens_of(output) == reference(STATIC, limit - len(PROMPT))
    assert output.outputs[0].finish_reason == "length"
    longest = list(range(100, 100 + limit - 1))
    assert run(llm, greedy(STATIC, max_tokens=None), longest) == reference(STATIC, 1, longest)


def stop_inside_a_block(tokens: list[int]) -> tuple[int, int]:
    """A token that occurs first inside a block, not at its end, and where."""
    for index, token in enumerate(tokens):
        offset = (len(PROMPT) + index) % LENGTH
        if index >= LENGTH and 0 < offset < LENGTH - 2 and token not in tokens[:index]:
            return token, index
    raise AssertionError("no such token")


def test_output_ends_with_a_stop_token_inside_a_block(llm: LLM) -> None:
    whole = generate(llm, [PROMPT], greedy(STATIC, max_tokens=48))[0]
    stop, index = stop_inside_a_block(tokens_of(whole))
    args = request_options(STATIC)
    ends: dict[bool, int] = {}
    for early in (False, True):
        params = greedy(max_tokens=48, stop_token_ids=[stop], extra_args={**args, "dllm_eos_early_stop": early})
        output = generate(llm, [PROMPT], params)[0]
        assert tokens_of(output) == tokens_of(whole)[: index + 1]
        assert output.outputs[0].finish_reason == "stop"
        ends[early] = nfe_of(output)
    assert ends[True] <= ends[False]


def test_early_stop_saves_the_forwards_behind_the_stop_token(llm: LLM) -> None:
    left_to_right = Options(block_length=LENGTH, mask_id=MASK, policy="sequential")
    tokens = run(llm, greedy(left_to_right, max_tokens=48))
    stop, index = stop_inside_a_block(tokens)
    args = {**request_options(left_to_right), "dllm_eos_early_stop": True}
    output = generate(llm, [PROMPT], greedy(max_tokens=48, stop_token_ids=[stop], extra_args=args))[0]
    assert tokens_of(output) == tokens[: index + 1]
    assert nfe_of(output) == index + 1


def test_eos_ends_a_request_unless_it_is_ignored(llm: LLM) -> None:
    bias = {"logit_bias": {EOS: 100.0}, "max_tokens": 20}
    # An engine without a tokenizer knows no end-of-sequence token, so it is given as a stop token.
    stopped = run(llm, greedy(stop_token_ids=[EOS], **bias))
    assert stopped == [EOS]
    assert run(llm, greedy(**bias)) == [EOS] * 20


def test_an_ignored_eos_is_a_token_like_any_other(llm: LLM) -> None:
    for seed in range(6):
        outputs = []
        for early in (False, True):
            params = SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=24,
                ignore_eos=True,
                detokenize=False,
                logit_bias={EOS: 6.0},
                allowed_token_ids=[*range(1, 8), EOS],
                extra_args={"dllm_policy": "sequential", "dllm_eos_early_stop": early},
            )
            outputs.append(run(llm, params))
        assert 0 < outputs[0].count(EOS) < 24
        assert outputs[0] == outputs[1]


def test_a_mask_token_in_the_prompt_is_left_alone(llm: LLM) -> None:
    prompt = [*PROMPT[:9], MASK, 30]
    model = reference_model("sdar")
    block = torch.tensor(prompt + [MASK] * 5)
    for position in range(11, 16):
        logits = model(block, block_causal(16, LENGTH))[position]
        block[position] = logits[:MASK].argmax()
    left_to_right = Options(block_length=LENGTH, mask_id=MASK, policy="sequential")
    assert run(llm, greedy(left_to_right, max_tokens=5), prompt) == block[11:].tolist()


def test_min_tokens_keeps_stop_tokens_out_until_then(llm: LLM) -> None:
    tokens = run(llm, greedy(STATIC, max_tokens=30, stop_token_ids=[EOS], logit_bias={EOS: 100.0}, min_tokens=9))
    assert EOS not in tokens[:9]
    assert tokens[9] == EOS
    assert len(tokens) == 10


def test_end_tokens_that_the_model_lacks_are_none_of_its_logits(llm: LLM) -> None:
    """A tokenizer may have more tokens than the model."""
    params = greedy(STATIC, max_tokens=30, stop_token_ids=[EOS], logit_bias={EOS: 100.0}, min_tokens=9)
    expected = run(llm, params)
    params._all_stop_token_ids |= {512, 10_000}
    assert run(llm, params) == expected


def test_streaming_gives_whole_blocks_that_never_change(llm: LLM) -> None:
    expected = run(llm, greedy(THRESHOLD, max_tokens=30))
    core = llm.llm_engine
    core.add_request(
        "streamed",
        {"prompt_token_ids": PROMPT},
        greedy(THRESHOLD, max_tokens=30, output_kind=RequestOutputKind.DELTA),
    )
    chunks = []
    while core.has_unfinished_requests():
        chunks += [list(output.outputs[0].token_ids) for output in core.step()]
    assert list(itertools.chain(*chunks)) == expected
    # The rest of the first block, then block by block, then what max_tokens leaves of the last.
    assert [len(chunk) for chunk in chunks if chunk] == [3, 8, 8, 8, 3]


def test_aborted_requests_leave_nothing_behind_wherever_they_are(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = free_pages(llm)
    core = llm.llm_engine
    expected = run(llm, greedy(STATIC, max_tokens=30))
    for steps in range(0, 12):
        for name in ("aborted", "kept"):
            core.add_request(name, {"prompt_token_ids": PROMPT}, greedy(STATIC, max_tokens=30))
        for _ in range(steps):
            core.step()
        core.abort_request(["aborted"])
        finished = []
        while core.has_unfinished_requests():
            finished += [output for output in core.step() if output.finished]
        assert [tokens_of(output) for output in finished if output.request_id.startswith("kept")] == [expected]
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_several_completions_of_one_prompt(llm: LLM) -> None:
    output = generate(
        llm,
        [PROMPT],
        SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=24, detokenize=False, ignore_eos=True),
    )[0]
    completions = [tuple(c.token_ids) for c in output.outputs]
    assert len(completions) == 4
    assert len(set(completions)) > 1
    assert all(len(c) == 24 for c in completions)


@pytest.mark.parametrize("options", [STATIC, THRESHOLD], ids=["static", "threshold"])
def test_logprobs_are_those_of_the_step_that_wrote_the_token(llm: LLM, options: Options) -> None:
    count = 20
    output = generate(llm, [PROMPT], greedy(options, max_tokens=count, logprobs=3))[0]
    assert output.outputs[0].logprobs is not None
    assert len(output.outputs[0].logprobs) == count

    # Replay the reference's steps: the distribution each token was taken from.
    decoded = decode(reference_model("sdar"), PROMPT, count, options)
    end = math.ceil((len(PROMPT) + count) / LENGTH) * LENGTH
    canvas = torch.full((end,), MASK)
    canvas[: len(PROMPT)] = torch.tensor(PROMPT)
    expected: dict[int, torch.Tensor] = {}
    for step in decoded.steps:
        block_end = (step[0][0] // LENGTH + 1) * LENGTH
        logits = reference_model("sdar")(canvas[:block_end], block_causal(block_end, LENGTH))
        for position, token in step:
            expected[position] = logits[position].log_softmax(0)
            canvas[position] = token
    for index, (token, entry) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)):
        logprobs = expected[len(PROMPT) + index]
        assert entry[token].logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
        assert entry[token].rank == int((logprobs >= logprobs[token]).sum())
        best = {t for t, value in entry.items() if value.rank is not None and value.rank <= 3}
        assert set(logprobs.topk(3).indices.tolist()) <= best | {token}


def test_logprobs_in_a_batch_with_requests_that_want_none(llm: LLM) -> None:
    alone = generate(llm, [PROMPT], greedy(STATIC, max_tokens=20, logprobs=2))[0]
    params = [greedy(THRESHOLD, max_tokens=20, logprobs=wanted) for wanted in (None, 0, None, 5)]
    params.insert(2, greedy(STATIC, max_tokens=20, logprobs=2))
    outputs = generate(llm, [PROMPT[: 4 + i] if i != 2 else PROMPT for i in range(5)], params)
    assert [o.outputs[0].logprobs is None for o in outputs] == [True, False, False, True, False]
    for ours, theirs in zip(outputs[2].outputs[0].logprobs, alone.outputs[0].logprobs, strict=True):
        assert ours.keys() == theirs.keys()
        for token in ours:
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_logit_bias_and_allowed_tokens(llm: LLM) -> None:
    assert run(llm, greedy(max_tokens=12, logit_bias={77: 100.0})) == [77] * 12
    allowed = [5, 6, 7]
    assert set(run(llm, greedy(max_tokens=24, allowed_token_ids=allowed))) <= set(allowed)


def test_the_mask_token_is_never_written_however_likely(llm: LLM) -> None:
    tokens = run(llm, greedy(STATIC, max_tokens=16, logit_bias={MASK: 100.0}))
    assert MASK not in tokens
    assert len(tokens) == 16


def test_presence_penalty_counts_the_text_of_finished_blocks(llm: LLM) -> None:
    tokens = run(llm, greedy(max_tokens=59, presence_penalty=2.0, repetition_penalty=1e6))
    first = LENGTH - len(PROMPT) % LENGTH
    blocks = [tokens[:first], *(tokens[i : i + LENGTH] for i in range(first, len(tokens), LENGTH))]
    seen = set(PROMPT)
    for block in blocks:
        assert not seen & set(block)
        seen |= set(block)


@pytest.mark.parametrize("policy", ["static", "threshold", "sequential", "entropy"])
def test_bad_words_never_occur_in_whatever_order_a_block_fills(llm: LLM, policy: str) -> None:
    args = read_by_policy({"dllm_policy": policy, "dllm_threshold": 0.2, "dllm_entropy_bound": 20.0})
    prompts = [PROMPT, PROMPT[:4], PROMPT[3:], PROMPT[::-1]]
    free = [tokens_of(o) for o in generate(llm, prompts, greedy(max_tokens=40, extra_args=args))]
    params = []
    for tokens in free:
        words = [[tokens[4]], tokens[7:9], tokens[14:17], tokens[20:22]]
        param = greedy(max_tokens=40, extra_args=args)
        param._bad_words_token_ids = words
        params.append((param, words))
    outputs = generate(llm, prompts, [param for param, _ in params])
    for output, before, (_, words) in zip(outputs, free, params, strict=True):
        tokens = tokens_of(output)
        assert tokens != before
        for word in words:
            assert word not in [tokens[i : i + len(word)] for i in range(len(tokens))]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"extra_args": {"dllm_policy": "greedy"}}, "dllm_policy='greedy' is not allowed.*'static'"),
        (
            {"extra_args": {"dllm_polcy": "static"}},
            r"unknown request option 'dllm_polcy' \(did you mean dllm_policy\?\); allowed: dllm_policy",
        ),
        ({"extra_args": {"dllm_threshold": 2}}, "dllm_threshold=2 is not allowed.*less than or equal to 1"),
        ({"extra_args": {"dllm_edit_threshold": 0.5}}, "edit_threshold=0.5 is not allowed: SDAR"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"bad_words": ["x" * 9000]}, "bad_words are too long"),
    ],
)
def test_bad_options_are_refused_and_harm_nobody(llm: LLM, params: dict[str, object], message: str) -> None:
    expected = run(llm, greedy(STATIC, max_tokens=9))
    with pytest.raises(VLLMValidationError, match=message):
        generate(llm, [PROMPT], greedy(**params))
    assert not scheduler_of(llm).requests
    assert run(llm, greedy(STATIC, max_tokens=9)) == expected


@pytest.mark.parametrize("token", [512, 10**9, -1])
def test_a_token_that_the_model_has_not_is_refused_without_a_tokenizer_too(llm: LLM, token: int) -> None:
    expected = run(llm, greedy(STATIC, max_tokens=9))
    with pytest.raises(VLLMValidationError, match=f"token id {token} is out of vocabulary"):
        generate(llm, [[*PROMPT, token]], greedy())
    assert not scheduler_of(llm).requests
    assert run(llm, greedy(STATIC, max_tokens=9)) == expected
