"""``thinking_token_budget``: the end of reasoning stands in its block before the block is denoised."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from tests.engine import full_attention, harness
from tests.engine.harness import (
    bundled,
    generate,
    greedy,
    nfe_of,
    preemptions,
    reference_model,
    tokens_of,
)
from tests.engine.options.admit import admit, geometry_with
from tests.engine.options.test_admission import TRAITS
from tests.engine.runtime import test_isd
from tests.engine.runtime.test_nemotron import LENGTHS, THRESHOLD, golden_params, prompt_of, reference_model_of
from tests.engine.step_maps import map_of
from tests.paths import BUNDLED
from tests.reference.decode import Options, StepSkipping, decode
from tests.reference.drafts import PSD, FreeDave
from tests.reference.golden import golden_or_skip
from tests.reference.isd import decode_by_strides
from tests.reference.linear_spec import greedy_text
from tests.reference.model import ReferenceModel
from tests.reference.nemotron import MASK, NemotronGolden, load_nemotron
from tests.reference.thinking import Thinking

START, END = 126, 13
PHRASE = (20, 21, END)
"""What ends reasoning by force: a transition, and the natural end."""
NEMOTRON = load_nemotron(BUNDLED).checkpoint


@pytest.fixture(scope="module")
def golden() -> NemotronGolden:
    return golden_or_skip(load_nemotron)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A word for each token: ``t0``, ``t1``, ..."""
    folder = tmp_path_factory.mktemp("words")
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')  # vLLM looks for one
    return str(folder)


def text_of(tokens: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def engine_of(
    checkpoint: Path, tokenizer: str, start: Sequence[int], forced: Sequence[int], block_length: int, **more: Any
) -> LLM:
    """An engine that knows what stands around reasoning."""
    return harness.engine(
        checkpoint,
        dllm={"block_length": block_length, **more.pop("dllm", {})},
        tokenizer=tokenizer,
        skip_tokenizer_init=False,
        reasoning_config={"reasoning_start_str": text_of(start), "reasoning_end_str": text_of(forced)},
        **{"hf_overrides": {}, "block_size": 32, "max_num_seqs": 8, **more},
    )


def budgeted(options: Options, skipping: StepSkipping | None = None, **more: Any) -> SamplingParams:
    budget = None if options.thinking is None else options.thinking.budget
    return greedy(options, skipping, thinking_token_budget=budget, **more)


@pytest.mark.parametrize("index", [0, 1])
def test_golden_cases_of_diffusion(index: int, golden: NemotronGolden, tokenizer: str) -> None:
    case = golden.thinking[index]
    thinking = case.options.thinking
    assert thinking is not None
    drafts = {"dllm": {"max_drafts": 3}}
    llm = engine_of(golden.checkpoint, tokenizer, thinking.start, thinking.forced, case.options.block_length, **drafts)
    params = golden_params(case)
    params.thinking_token_budget = thinking.budget
    other = greedy(case.options, max_tokens=40)
    outputs = generate(llm, [case.prompt, prompt_of(30), case.prompt], [params, other, params])
    for output in (outputs[0], outputs[2]):
        assert tokens_of(output) == case.tokens
        assert nfe_of(output) == case.nfe
        # No step wrote the end, whose forward is the block's first.
        assert map_of(output).steps[thinking.budget : thinking.budget + 1] in ((-1,), ())


def test_golden_case_of_linear_spec(golden: NemotronGolden, tokenizer: str) -> None:
    """As ``test_nemotron_matches_golden`` says, with what NVIDIA's code writes to the cache alone in the text."""
    case = golden.speculative_thinking[0]
    assert case.thinking is not None
    llm = engine_of(golden.checkpoint, tokenizer, case.thinking.start, case.thinking.forced, case.block_length)
    params = greedy(
        max_tokens=case.max_new_tokens,
        thinking_token_budget=case.thinking.budget,
        extra_args={"dllm_verify": "linear_spec", "dllm_threshold": case.threshold},
    )
    model = reference_model_of(golden)
    expected = greedy_text(model, case.prompt, case.max_new_tokens, MASK, frozenset(), case.thinking)
    assert tokens_of(generate(llm, [case.prompt], params)[0]) == expected
    assert expected[case.thinking.budget] == END


def thinking_of(budget: int, forced: Sequence[int] = (END,)) -> Thinking:
    return Thinking(budget, (START,), (END,) if forced == (END,) else tuple(forced), tuple(forced))


BUDGETS = (0, 3, 7, 8, 12, 21, 30, 1000)


def nemotron(tokenizer: str, forced: Sequence[int] = (END,), **more: Any) -> LLM:
    return engine_of(NEMOTRON, tokenizer, (START,), forced, 8, **{"dllm": {"max_drafts": 3}, **more})


def prompts_and_options(options: Options, forced: Sequence[int] = (END,)) -> list[tuple[list[int], Options]]:
    """Reasoning that starts at the end of the prompt, before that, and not at all; that is over already."""
    cases = []
    for index, (length, budget) in enumerate(zip(LENGTHS, BUDGETS, strict=True)):
        prompt = [token for token in prompt_of(length) if token not in (START, END)]
        begun: list[list[int]] = [[*prompt, START], [*prompt, START, 150, 152], prompt, [*prompt, START, END]]
        cases.append((begun[0 if index < 5 else index - 4], replace(options, thinking=thinking_of(budget, forced))))
    return cases


def assert_as_reference(
    llm: LLM,
    model: ReferenceModel,
    cases: Sequence[tuple[list[int], Options]],
    skipping: StepSkipping | None = None,
    max_tokens: int = 44,
    forwards: bool = True,
) -> list[RequestOutput]:
    params = [budgeted(options, skipping, max_tokens=max_tokens) for _, options in cases]
    outputs = generate(llm, [prompt for prompt, _ in cases], params)
    for (prompt, options), output in zip(cases, outputs, strict=True):
        expected = decode(model, prompt, max_tokens, options, skipping)
        assert tokens_of(output) == expected.tokens, (len(prompt), options.thinking)
        assert not forwards or nfe_of(output) == expected.nfe, (len(prompt), options.thinking)
    return outputs


@pytest.mark.parametrize("skipping", [None, FreeDave(4), PSD(3)], ids=str)
@pytest.mark.parametrize("forced", [(END,), PHRASE], ids=["token", "phrase"])
def test_texts_equal_the_reference_in_as_many_forwards(
    forced: Sequence[int], skipping: StepSkipping | None, tokenizer: str
) -> None:
    llm, model = nemotron(tokenizer, forced), reference_model_of(load_nemotron(BUNDLED))
    cases = prompts_and_options(THRESHOLD, forced)
    outputs = assert_as_reference(llm, model, cases, skipping)
    alone = assert_as_reference(llm, model, cases[2:3], skipping)
    assert tokens_of(alone[0]) == tokens_of(outputs[2])
    # Where the prompt ends with the start of the reasoning, the end stands where the budget is spent.
    for (_, options), output in zip(cases[:5], outputs, strict=False):
        assert options.thinking is not None
        budget = options.thinking.budget
        assert tokens_of(output)[budget : budget + len(forced)] == [*forced]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_preemption_the_end_stands_where_it_stood(asynchronous: bool, tokenizer: str) -> None:
    more = {"dllm": {}, "max_model_len": 256, "num_gpu_blocks_override": 13, "async_scheduling": asynchronous}
    llm, model = nemotron(tokenizer, PHRASE, **more), reference_model_of(load_nemotron(BUNDLED))
    cases = [
        ([*prompt_of(length, seed=1), START], replace(THRESHOLD, thinking=thinking_of(budget, PHRASE)))
        for length, budget in zip((5, 13, 21, 30, 34, 47, 52, 66), (5, 16, 31, 40, 46, 55, 62, 63), strict=True)
    ]
    with preemptions(llm) as preempted:
        assert_as_reference(llm, model, cases, max_tokens=72, forwards=False)
    assert preempted


def test_a_text_that_goes_on_from_the_prefix_cache_has_the_rest_of_its_budget(tokenizer: str) -> None:
    llm, model = nemotron(tokenizer, PHRASE), reference_model_of(load_nemotron(BUNDLED))
    options = replace(THRESHOLD, thinking=thinking_of(45, PHRASE))
    prompt = [*prompt_of(20), START]
    first = tokens_of(assert_as_reference(llm, model, [(prompt, options)], max_tokens=64)[0])
    # Before the end, in its midst, and behind it.
    turns = [([*prompt, *first[:kept]], options) for kept in (40, 46, 47, 48, 60)]
    outputs = assert_as_reference(llm, model, turns, max_tokens=24, forwards=False)
    assert all(output.num_cached_tokens for output in outputs)
    assert tokens_of(outputs[0])[5:8] == [*PHRASE]
    assert tokens_of(outputs[1])[:2] == [*PHRASE[1:]]


@pytest.mark.parametrize("forced", [(END,), PHRASE], ids=["token", "phrase"])
def test_isd_ends_reasoning_where_autoregressive_decoding_would(forced: Sequence[int], tokenizer: str) -> None:
    llm = engine_of(test_isd.CHECKPOINT, tokenizer, (START,), forced, 2 * test_isd.STRIDE - 1)
    cases = prompts_and_options(THRESHOLD, forced)
    params = [replaced(budgeted(options, max_tokens=44), extra_args=None) for _, options in cases]
    outputs = generate(llm, [prompt for prompt, _ in cases], params)
    for (prompt, options), output in zip(cases, outputs, strict=True):
        numbers = {"stride": test_isd.STRIDE, "mask_id": MASK, "thinking": options.thinking}
        expected = decode_by_strides(test_isd.reference(), prompt, 44, **numbers)
        assert (tokens_of(output), nfe_of(output)) == (expected.tokens, expected.nfe), len(prompt)


@pytest.mark.parametrize("forced", [(END,), PHRASE], ids=["token", "phrase"])
def test_linear_spec_ends_reasoning_where_autoregressive_decoding_would(forced: Sequence[int], tokenizer: str) -> None:
    llm, model = nemotron(tokenizer, forced), reference_model_of(load_nemotron(BUNDLED))
    cases = prompts_and_options(THRESHOLD, forced)
    args = {"dllm_verify": "linear_spec"}
    params = [replaced(budgeted(options, max_tokens=44), extra_args=args) for _, options in cases]
    outputs = generate(llm, [prompt for prompt, _ in cases], params)
    for (prompt, options), output in zip(cases, outputs, strict=True):
        assert tokens_of(output) == greedy_text(model, prompt, 44, MASK, frozenset(), options.thinking), len(prompt)


def replaced(params: SamplingParams, **fields: Any) -> SamplingParams:
    for name, value in fields.items():
        setattr(params, name, value)
    return params


OTHERS: dict[str, Options] = {
    "sdar": Options(block_length=4, mask_id=harness.MASK, threshold=0.3),
    "fast_dllm_v2": Options(block_length=8, mask_id=harness.MASK, threshold=0.3, sub_block_length=4, shifted=True),
    "llada2_moe": Options(
        block_length=8, mask_id=harness.MASK, threshold=0.3, edit_threshold=0.2, max_post_edit_steps=4
    ),
}
"""Blocks counted from the start of the text, where a prompt may end in the midst of one; logits of the row before;
tokens that may be edited."""


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str, tokenizer: str) -> None:
    options, golden_data, begun = OTHERS[family], bundled(family), (START, 33)
    dllm = {} if options.sub_block_length is None else {"sub_block_length": options.sub_block_length}
    llm = engine_of(
        golden_data.checkpoint,
        tokenizer,
        begun,
        PHRASE,
        options.block_length,
        dllm=dllm,
        hf_overrides={"mask_token_id": options.mask_id},
    )
    cases = [
        ([*range(200, 200 + length), *begun], replace(options, thinking=Thinking(budget, begun, PHRASE, PHRASE)))
        for length, budget in zip(range(8), (0, 1, 2, 5, 9, 11, 14, 17), strict=True)
    ]
    outputs = assert_as_reference(llm, reference_model(golden_data), cases, max_tokens=30)
    for (_, options), output in zip(cases, outputs, strict=True):
        assert options.thinking is not None
        due = options.thinking.budget
        assert tokens_of(output)[due : due + 3] == [*PHRASE]


@pytest.mark.parametrize("commits", harness.COMMITS)
def test_a_text_that_ends_within_the_forced_end(commits: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block has nothing but what it was given, and the block before is committed beside it or before it."""
    harness.place_commits(monkeypatch, commits)
    checkpoint, prompt = bundled("sdar").checkpoint, [*range(200, 207), START]
    options = {"hf_overrides": {"mask_token_id": harness.MASK}, "async_scheduling": True}
    llm = engine_of(checkpoint, tokenizer, (START,), PHRASE, 8, **options)
    args = {"dllm_policy": "static", "dllm_step_map": True}
    output = generate(llm, [prompt], greedy(max_tokens=10, thinking_token_budget=8, logprobs=1, extra_args=args))[0]
    tokens, logprobs = tokens_of(output), output.outputs[0].logprobs
    assert tokens[8:] == [*PHRASE[:2]]
    assert map_of(output).steps[8:] == (-1, -1)
    assert logprobs is not None
    assert all(token in entry for token, entry in zip(tokens, logprobs, strict=True))


def test_tokens_that_a_block_is_given_take_no_steps_of_a_schedule(tokenizer: str) -> None:
    """``paced`` counts what its steps have written."""
    checkpoint, prompt = bundled("sdar").checkpoint, [*range(200, 207), START]
    llm = engine_of(checkpoint, tokenizer, (START,), PHRASE, 8, hf_overrides={"mask_token_id": harness.MASK})
    for budget in (0, 5):
        for policy in ("static", "paced"):
            params = greedy(max_tokens=8, thinking_token_budget=budget, extra_args={"dllm_policy": policy})
            assert nfe_of(generate(llm, [prompt], params)[0]) == 5


@pytest.mark.parametrize("args", [{"dllm_verify": "fef", "dllm_window": 4}, {"dllm_policy": "entropy"}], ids=str)
def test_full_attention_and_fef(args: dict[str, Any], tokenizer: str) -> None:
    """The end stands where it is due whatever unmasks the rest, and a request alone gets what it gets in a batch."""
    llm = engine_of(
        full_attention.bundled("llada").checkpoint,
        tokenizer,
        (START,),
        PHRASE,
        8,
        dllm={"max_drafts": 3},
        hf_overrides={"mask_token_id": harness.MASK},
    )
    budgets = (0, 5, 6, 8, 13, 20)
    prompts = [[*range(200, 205 + n), START] for n in range(len(budgets))]
    params = [
        greedy(max_tokens=32, thinking_token_budget=budget, extra_args=args, temperature=0.8 * (n % 2), seed=n)
        for n, budget in enumerate(budgets)
    ]
    together = [tokens_of(output) for output in generate(llm, prompts, params)]
    for budget, prompt, one, text in zip(budgets, prompts, params, together, strict=True):
        assert text[budget : budget + 3] == [*PHRASE]
        assert tokens_of(generate(llm, [prompt], one)[0]) == text


@pytest.mark.parametrize("args", [{}, {"dllm_verify": "fef", "dllm_window": 4}], ids=str)
def test_log_probabilities_of_the_end_are_the_models(args: dict[str, Any], tokenizer: str) -> None:
    """They are those of the block's first forward: for the first token of a block, the one that predicts it."""
    llm = nemotron(tokenizer)
    args = {**args, "dllm_step_map": True}
    for budget in (0, 5, 8):
        params = greedy(max_tokens=16, thinking_token_budget=budget, extra_args=args, logprobs=2)
        output = generate(llm, [[*prompt_of(9), START]], params)[0]
        tokens, logprobs = tokens_of(output), output.outputs[0].logprobs
        assert tokens[budget] == END
        assert logprobs is not None
        assert [token in entry for token, entry in zip(tokens, logprobs, strict=True)] == [True] * 16
        assert map_of(output).steps[budget] == -1
        # The model would have written another token.
        assert logprobs[budget][END].rank > 1


@pytest.mark.parametrize(
    ("family", "budget", "more"),
    [("dream", 0, {}), ("dream", 8, {}), ("fast_dllm_v2", 9, {"stop_token_ids": [END]})],
    ids=["the answer begins with it", "a block begins with it", "the text ends with it"],
)
def test_log_probabilities_of_the_end_are_the_requests_own(
    family: str, budget: int, more: dict[str, Any], tokenizer: str
) -> None:
    """Whatever the request before left in the slot."""
    golden_data = full_attention.bundled(family) if family == "dream" else bundled(family)
    dllm = {"sub_block_length": 4} if family == "fast_dllm_v2" else {}
    overrides = {"mask_token_id": harness.MASK}
    llm = engine_of(
        golden_data.checkpoint, tokenizer, (START,), PHRASE, 8, dllm=dllm, hf_overrides=overrides, max_num_seqs=1
    )
    prompt = [*range(200, 207), START]
    params = greedy(max_tokens=16, thinking_token_budget=budget, logprobs=2, extra_args={"dllm_step_map": True}, **more)
    found = []
    for before in (310, 400):
        generate(llm, [[*range(before, before + 9)]], greedy(max_tokens=24, logprobs=2))
        output = generate(llm, [prompt], params)[0]
        tokens, logprobs = tokens_of(output), output.outputs[0].logprobs
        assert tokens[budget : budget + 3] == [*PHRASE]
        assert logprobs is not None
        assert all(token in entry for token, entry in zip(tokens, logprobs, strict=True))
        assert map_of(output).steps[budget : budget + 3] == (-1, -1, -1)
        found.append([{token: each.logprob for token, each in entry.items()} for entry in logprobs])
    assert found[0] == found[1]


def test_what_does_not_go_with_a_budget_is_refused_by_name(tokenizer: str) -> None:
    asked: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"eager": 2}, {}, "eager"),
        ({}, {"structured_outputs": StructuredOutputsParams(regex="t1")}, "structured outputs"),
    ]
    for options, more, reason in asked:
        geometry = replace(geometry_with(TRAITS, **options), window_blocks=options.get("eager", 1))
        with pytest.raises(VLLMValidationError, match=reason) as error:
            admit(SamplingParams(thinking_token_budget=5, **more), geometry)
        assert error.value.parameter == "thinking_token_budget"
    # vLLM asks for the configuration of reasoning itself.
    llm = harness.engine(NEMOTRON, dllm={"block_length": 8, "max_drafts": 3}, hf_overrides={}, block_size=32)
    with pytest.raises(VLLMValidationError, match="reasoning_config"):
        generate(llm, [[1, 2]], greedy(max_tokens=4, thinking_token_budget=5))
