"""Structured outputs: what a grammar constrains is valid, whatever the family, the policy and the batch."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.worker.gpu import structured_outputs

from tests.engine.harness import (
    EOS,
    MASK,
    assert_nothing_left,
    checkpoint_of,
    free_pages,
    generate,
    nfe_of,
    preemptions,
    reference_model,
    request_options,
    runner_of,
    tensor_parallel_engine,
    tokens_of,
)
from tests.engine.runtime.grammars import (
    CHOICES,
    CONSTRAINTS,
    Compiled,
    Constraint,
    params,
    structured_engine,
    write_tokenizer,
)
from tests.reference.decode import Options
from tests.reference.grammar import decode
from vllm_dllm.methods import POLICIES, PolicyRow
from vllm_dllm.runtime.logits.grammar import GrammarRows

FAMILIES: dict[str, dict[str, Any]] = {
    "sdar": {"block_length": 16},
    "llada2_moe": {"block_length": 32},
    "fast_dllm_v2": {"block_length": 8, "sub_block_length": 4},
    "llada": {"block_length": 16, "cache": "dual", "generation_window": 32},
    "dream": {"block_length": 8, "cache": "prefix"},
}
"""Engine options of each family: every kind of attention, shifted logits and others."""
PROMPTS = [[1 + (7 * i + j) % 400 for j in range(length)] for i, length in enumerate((16, 5, 33, 8, 24, 17, 40, 1))]
"""Some fill their blocks."""
COMPLETE = "stop"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def policy_args(row: PolicyRow, family: str) -> dict[str, Any]:
    """Options under which a policy unmasks several positions per step."""
    args: dict[str, Any] = {"dllm_policy": row.name}
    if "threshold" in row.options:
        args["dllm_threshold"] = 0.4
    if "tokens_per_step" in row.options:
        args["dllm_tokens_per_step"] = 3
    if row.name == "entropy" and not row.timed:
        args["dllm_entropy_bound"] = 2.0
    return args


def requests_of(family: str, constraints: Sequence[Constraint]) -> list[tuple[Constraint, SamplingParams]]:
    """Every policy with every constraint in turn, drawn and greedy."""
    rows = [row for row in POLICIES if (row.timed is False or family == "dream") and not row.needs_windows]
    made = []
    for number, row in enumerate(rows * 2):
        constraint = constraints[number % len(constraints)]
        temperature = (0.0, 0.8, 1.2)[number % 3]
        asked = params(constraint.asked, args=policy_args(row, family), temperature=temperature, seed=number)
        made.append((constraint, asked))
    return made


def run(llm: LLM, requests: Sequence[tuple[Constraint, SamplingParams]]) -> list[RequestOutput]:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(requests))]
    return generate(llm, prompts, [asked for _, asked in requests])


def assert_valid(requests: Sequence[tuple[Constraint, SamplingParams]], outputs: Sequence[RequestOutput]) -> None:
    """Complete answers are what was asked for, and most answers are complete."""
    complete = 0
    for (constraint, asked), output in zip(requests, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason in (COMPLETE, "length"), (constraint.name, asked.extra_args, answer.text)
        if answer.finish_reason == COMPLETE:
            complete += 1
            assert constraint.holds(answer.text), (constraint.name, asked.extra_args, answer.text)
    assert complete > len(outputs) // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_gives_valid_text_at_every_temperature(family: str, tokenizer: Path) -> None:
    llm = structured_engine(family, tokenizer, FAMILIES[family])
    requests = requests_of(family, CONSTRAINTS)
    assert_valid(requests, run(llm, requests))


OPTIONS = {
    "sdar": {"block_length": 16},
    "llada2_moe": {"block_length": 32},
    "fast_dllm_v2": {"block_length": 8, "sub_block_length": 4, "shifted": True},
}
REFERENCE_POLICIES: list[dict[str, Any]] = [
    {"policy": "static", "tokens_per_step": 1},
    {"policy": "static", "tokens_per_step": 4},
    {"policy": "sequential", "tokens_per_step": 2},
    {"policy": "threshold", "threshold": 0.3},
    {"policy": "entropy", "entropy_bound": 2.5},
    {"policy": "localleap", "threshold": 0.6, "relaxed_threshold": 0.2},
]


@pytest.mark.parametrize("family", OPTIONS)
def test_tokens_and_forwards_are_those_of_the_reference(family: str, tokenizer: Path) -> None:
    llm = structured_engine(family, tokenizer, FAMILIES[family])
    model, grammars = reference_model(family), [Compiled(each, tokenizer) for each in CONSTRAINTS]
    inclusive = {"threshold_inclusive": family == "llada2_moe"}
    ways = [
        Options(**OPTIONS[family], mask_id=MASK, stop_ids=frozenset({EOS}), eos_early_stop=True, **inclusive, **each)
        for each in REFERENCE_POLICIES
    ]
    cases = [*itertools.product(PROMPTS[:6], range(len(ways)))]
    asked = [
        params(CONSTRAINTS[number % 4].asked, args=request_options(ways[way]), max_tokens=40)
        for number, (_, way) in enumerate(cases)
    ]
    outputs = generate(llm, [prompt for prompt, _ in cases], asked)
    for number, ((prompt, way), output) in enumerate(zip(cases, outputs, strict=True)):
        expected = decode(model, prompt, 40, ways[way], grammars[number % 4])
        case = family, len(prompt), REFERENCE_POLICIES[way], CONSTRAINTS[number % 4].name
        assert tokens_of(output) == expected.tokens, case
        assert nfe_of(output) == expected.nfe, case


# The battery.


def mixed(family: str) -> list[tuple[Constraint, SamplingParams]]:
    """Eight structured requests."""
    return requests_of(family, CONSTRAINTS)[:8]


def answers(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], int]]:
    return [(tokens_of(output), nfe_of(output)) for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_among_neighbours_who_notice_nothing(family: str, tokenizer: Path) -> None:
    llm = structured_engine(family, tokenizer, FAMILIES[family])
    requests = mixed(family)
    plain = [params(None, args=asked.extra_args, temperature=asked.temperature, seed=3) for _, asked in requests[:6]]
    alone = [run(llm, [request])[0] for request in requests[:1]]
    first = [generate(llm, [PROMPTS[number]], asked)[0] for number, (_, asked) in enumerate(requests)]
    assert answers(first[:1]) == answers(alone)
    undisturbed = generate(llm, PROMPTS[:6], plain)
    together = generate(llm, [*PROMPTS, *PROMPTS[:6]], [*(asked for _, asked in requests), *plain])
    assert answers(together) == answers([*first, *undisturbed])


def test_beside_requests_with_drafts(tokenizer: Path) -> None:
    """Verifiers are off for structured requests, and stay on for their neighbours."""
    llm = structured_engine("sdar", tokenizer, {"block_length": 16, "max_drafts": 3, "verify": "freedave"})
    requests = mixed("sdar")
    plain = structured_engine("sdar", tokenizer, FAMILIES["sdar"])
    others = [params(None, args={"dllm_policy": "static"}, max_tokens=48) for _ in range(4)]
    undisturbed = generate(llm, PROMPTS[:4], others)
    outputs = generate(llm, [*PROMPTS, *PROMPTS[:4]], [*(asked for _, asked in requests), *others])
    assert answers(outputs) == answers([*run(plain, requests), *undisturbed])


@pytest.mark.parametrize("family", ["sdar", "llada2_moe", "fast_dllm_v2", "llada"])
def test_after_preemption_with_prefix_hits(family: str, tokenizer: Path) -> None:
    requests = requests_of(family, CONSTRAINTS)[:12]
    expected = run(structured_engine(family, tokenizer, FAMILIES[family]), requests)
    few = {"block_size": 32, "num_gpu_blocks_override": 11, "max_model_len": 160, "max_num_batched_tokens": 640}
    llm = structured_engine(family, tokenizer, FAMILIES[family], **few)
    before = free_pages(llm)
    with preemptions(llm) as preempted:
        outputs = run(llm, requests)
    assert preempted
    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in expected]
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2"])
def test_with_chunked_prefill(family: str, tokenizer: Path) -> None:
    requests = mixed(family)
    expected = run(structured_engine(family, tokenizer, FAMILIES[family]), requests)
    llm = structured_engine(family, tokenizer, FAMILIES[family], max_num_batched_tokens=48, max_num_seqs=4)
    assert answers(run(llm, requests)) == answers(expected)


@pytest.mark.parametrize("family", ["sdar", "llada2_moe", "fast_dllm_v2"])
def test_with_asynchronous_scheduling(family: str, tokenizer: Path) -> None:
    requests = mixed(family)
    plain = [params(None, args={"dllm_policy": "static"}, max_tokens=40) for _ in range(4)]
    everyone = ([*PROMPTS, *PROMPTS[:4]], [*(asked for _, asked in requests), *plain])
    expected = generate(structured_engine(family, tokenizer, FAMILIES[family]), *everyone)
    drafts = {**FAMILIES[family], "max_drafts": 2}
    llm = structured_engine(family, tokenizer, drafts, max_num_seqs=17, async_scheduling=True)
    assert [tokens_of(output) for output in generate(llm, *everyone)] == [tokens_of(output) for output in expected]


def test_windows_of_several_blocks(tokenizer: Path) -> None:
    llm = structured_engine("sdar", tokenizer, {"block_length": 16, "max_drafts": 3, "eager": True})
    requests = [
        (constraint, params(constraint.asked, args={"dllm_policy": "threshold", "dllm_threshold": 0.3}, seed=number))
        for number, constraint in enumerate(CONSTRAINTS * 2)
    ]
    outputs = run(llm, requests)
    assert_valid(requests, outputs)
    assert answers(outputs) == answers([generate(llm, [PROMPTS[i]], asked)[0] for i, (_, asked) in enumerate(requests)])


def test_with_guidance(tokenizer: Path) -> None:
    llm = structured_engine("llada", tokenizer, {**FAMILIES["llada"], "guidance": True})
    requests = [
        (each, params(each.asked, args={"dllm_policy": "threshold", "dllm_threshold": 0.3, "dllm_cfg_scale": scale}))
        for each, scale in zip(CONSTRAINTS * 2, itertools.cycle([0.0, 0.5, 1.5]), strict=False)
    ]
    outputs = run(llm, requests)
    assert_valid(requests, outputs)
    alone = [generate(llm, [PROMPTS[number]], asked)[0] for number, (_, asked) in enumerate(requests)]
    assert answers(outputs) == answers(alone)


@pytest.mark.slow
def test_with_tensor_parallel_two(tokenizer: Path) -> None:
    requests = mixed("sdar")
    expected = run(structured_engine("sdar", tokenizer, FAMILIES["sdar"]), requests)
    options = {"skip_tokenizer_init": False, "tokenizer": str(tokenizer)}
    with tensor_parallel_engine(checkpoint_of("sdar"), dllm=FAMILIES["sdar"], **options) as llm:
        assert answers(run(llm, requests)) == answers(expected)


# Other parameters.


def test_no_buffer_has_a_row_for_every_position(tokenizer: Path) -> None:
    """vLLM's has, on the device, whether a request is structured or not."""
    worker = runner_of(structured_engine("sdar", tokenizer, FAMILIES["sdar"])).structured_outputs_worker
    assert isinstance(worker, GrammarRows)
    assert not any(isinstance(value, torch.Tensor) and value.numel() for value in vars(worker).values())


def test_the_mask_reaches_rows_that_32_bits_do_not(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 16,384 rows may have more than 2^31 logits. vLLM's kernel multiplies in ``cu_num_logits``' type."""
    source = Path(structured_outputs.__file__).read_text()
    assert "logits_idx = tl.load(cu_num_logits_ptr + req_idx)" in source
    assert "logits_ptr + logits_idx * logits_stride" in source
    kernel, types = structured_outputs._apply_grammar_bitmask_kernel, []

    class Noting:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **more: Any) -> None:
                types.append(args[3].dtype)
                kernel[grid](*args, **more)

            return launch

    monkeypatch.setattr(structured_outputs, "_apply_grammar_bitmask_kernel", Noting())
    run(structured_engine("sdar", tokenizer, FAMILIES["sdar"]), mixed("sdar"))
    assert set(types) == {torch.int64}


def test_the_guidance_backend(tokenizer: Path) -> None:
    llm = structured_engine("sdar", tokenizer, FAMILIES["sdar"], structured_outputs_config={"backend": "guidance"})
    requests = requests_of("sdar", CONSTRAINTS[:3])
    assert_valid(requests, run(llm, requests))


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 60},
        {"allowed_token_ids": [5, 6, 7]},
        {"bad_words": ["yes", "no", "a", "Ada", "answer", "m"]},
        {"logit_bias": dict.fromkeys(range(400), -100.0)},
        {"top_k": 1},
        {"top_p": 0.1, "min_p": 0.5},
        {"repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": 2.0},
    ],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2"])
def test_the_grammar_precedes_other_parameters(family: str, more: dict[str, Any], tokenizer: Path) -> None:
    llm = structured_engine(family, tokenizer, FAMILIES[family])
    args = {"dllm_policy": "threshold", "dllm_threshold": 0.3}
    requests = [
        (CONSTRAINTS[0], params(CONSTRAINTS[0].asked, args=args, temperature=temperature, seed=1, **more))
        for temperature in (0.0, 1.0)
    ]
    outputs = run(llm, requests)
    assert_valid(requests, outputs)
    assert all(output.outputs[0].finish_reason == COMPLETE for output in outputs)


@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2"])
def test_the_grammar_begins_behind_the_reasoning(family: str, tokenizer: Path) -> None:
    reasoning = {"backend": "xgrammar", "reasoning_parser": "deepseek_r1"}
    llm = structured_engine(family, tokenizer, FAMILIES[family], structured_outputs_config=reasoning)
    end_of_reasoning = EOS - 1
    args = {"dllm_policy": "threshold", "dllm_threshold": 0.2}
    # The stronger the bias, the earlier the random model ends its reasoning.
    asked = [
        params({"choice": CHOICES}, args=args, seed=seed, temperature=0.8, logit_bias={end_of_reasoning: bias})
        for seed, bias in enumerate([100.0, *[9.0, 14.0] * 3, 9.0])
    ]
    outputs = generate(llm, PROMPTS, asked)
    complete = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == COMPLETE]
    assert len(complete) > 2
    lengths = set()
    for answer in complete:
        tokens = list(answer.token_ids)
        if end_of_reasoning in tokens:
            place = tokens.index(end_of_reasoning)
            lengths.add(place)
            text = llm.get_tokenizer().decode(tokens[place + 1 : -1])
            assert text in CHOICES
    assert 0 in lengths
    assert len(lengths) > 1
    alone = generate(llm, PROMPTS[3:4], asked[3])
    assert answers(alone) == answers(outputs[3:4])


def test_strings_of_json_have_no_control_characters(tokenizer: Path) -> None:
    """xgrammar allows them where the length of a string is bounded."""
    llm = structured_engine("sdar", tokenizer, FAMILIES["sdar"])
    schema = {"type": "string", "minLength": 6, "maxLength": 24}
    args = {"dllm_policy": "static", "dllm_tokens_per_step": 4}
    # To xgrammar a special token in a string is its text.
    more = {"temperature": 1.5, "skip_special_tokens": False}
    asked = [params({"json": schema}, args=args, seed=seed, **more) for seed in range(64)]
    texts = [output.outputs[0] for output in generate(llm, PROMPTS * 8, asked)]
    assert sum(text.finish_reason == COMPLETE for text in texts) > 32
    for text in texts:
        if text.finish_reason == COMPLETE:
            assert 6 <= len(json.loads(text.text.removesuffix("<|end|>"))) <= 24


def test_log_probabilities_are_those_under_the_grammar(tokenizer: Path) -> None:
    llm = structured_engine("sdar", tokenizer, FAMILIES["sdar"])
    asked = params({"choice": ["yes", "yes indeed"]}, logprobs=2, args={"dllm_policy": "static"})
    (output,) = generate(llm, PROMPTS[:1], asked)
    answer = output.outputs[0]
    assert answer.text in ("yes", "yes indeed")
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
        assert logprobs[token].logprob <= 0
        # Nothing else of the vocabulary has a share.
        allowed = [each.logprob for each in logprobs.values() if each.logprob > -float("inf")]
        assert len(allowed) <= 10


def test_several_answers(tokenizer: Path) -> None:
    llm = structured_engine("sdar", tokenizer, FAMILIES["sdar"])
    asked = params({"choice": CHOICES}, n=4, temperature=1.0, seed=5)
    (output,) = generate(llm, PROMPTS[:1], asked)
    assert len(output.outputs) == 4
    assert all(answer.text in CHOICES for answer in output.outputs)
    (again,) = generate(llm, PROMPTS[:1], asked)
    assert [answer.text for answer in again.outputs] == [answer.text for answer in output.outputs]


def test_an_answer_that_max_tokens_cuts_is_the_beginning_of_a_valid_one(tokenizer: Path) -> None:
    llm = structured_engine("sdar", tokenizer, FAMILIES["sdar"])
    for limit in (1, 3, 7):
        (output,) = generate(llm, PROMPTS[:1], params({"choice": CHOICES[5:]}, max_tokens=limit))
        text = output.outputs[0].text
        assert len(output.outputs[0].token_ids) <= limit
        assert any(choice.startswith(text) for choice in CHOICES)


def test_a_block_is_denoised_whole_without_early_stopping(tokenizer: Path) -> None:
    llm = structured_engine("sdar", tokenizer, FAMILIES["sdar"])
    asked = [
        params({"choice": ["yes", "no"]}, args={"dllm_policy": policy, "dllm_eos_early_stop": early})
        for policy in ("static", "threshold")
        for early in (True, False)
    ]
    outputs = generate(llm, PROMPTS[:1] * 4, asked)
    assert {output.outputs[0].text for output in outputs} <= {"yes", "no"}
    stopped, whole = nfe_of(outputs[0]), nfe_of(outputs[1])
    assert stopped < whole == 16


def test_tokens_are_drawn_as_the_model_says_among_those_allowed(tokenizer: Path) -> None:
    llm = structured_engine("sdar", tokenizer, FAMILIES["sdar"])
    letters, number = "abcdefgh", 2000
    first = params({"regex": f"[{letters}]"}, temperature=1.0, args={"dllm_policy": "static"}, max_tokens=1, logprobs=8)
    (output,) = generate(llm, PROMPTS[:1], first)
    assert output.outputs[0].logprobs is not None
    # One forward decides the first position, so its distribution is known.
    shares = {
        each.decoded_token: math.exp(each.logprob)
        for each in output.outputs[0].logprobs[0].values()
        if each.logprob > -math.inf
    }
    drawn = [
        params({"regex": f"[{letters}]"}, temperature=1.0, seed=seed, args={"dllm_policy": "static"}, max_tokens=1)
        for seed in range(number)
    ]
    counts = Counter(output.outputs[0].text for output in generate(llm, PROMPTS[:1] * number, drawn))
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-3)
    assert counts.keys() <= shares.keys()
    names = sorted(shares)
    observed = [counts[name] for name in names]
    expected = [shares[name] * number / sum(shares.values()) for name in names]
    assert stats.chisquare(observed, expected).pvalue > 1e-4
