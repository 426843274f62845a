"""Nemotron-Labs-Diffusion: blocks whose first token is the autoregressive one, and whose others predict themselves."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm import LLM, RequestOutput
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.harness import (
    assert_nothing_left,
    engine,
    free_pages,
    generate,
    greedy,
    nfe_of,
    preemptions,
    reference_model,
    runner_of,
    scheduler_of,
    tokens_of,
)
from tests.engine.runtime.test_pangu import Case, expected_of
from tests.engine.runtime.test_prefix_cache import assert_sound
from tests.engine.step_maps import expected_of as expected_map_of
from tests.engine.step_maps import mapped, misplaced
from tests.paths import BUNDLED
from tests.reference.decode import Options, StepSkipping
from tests.reference.drafts import PSD, FreeDave
from tests.reference.golden import Case as GoldenCase
from tests.reference.golden import golden_or_skip
from tests.reference.model import ReferenceModel, causal_context
from tests.reference.nemotron import EOS, FAMILY, MASK, SEEDED, NemotronGolden, load_nemotron

CHECKPOINT = BUNDLED / FAMILY / "checkpoint"
PAGE, LENGTH = 32, 8
STATIC = replace(SEEDED, block_length=LENGTH)
THRESHOLD = replace(STATIC, policy="threshold", threshold=0.5)
DENOISED = replace(THRESHOLD, commit_predicts=False)
LENGTHS = (1, 7, 9, 31, 33, 50, 64, 71)
"""Prompts that end before, on and behind borders of pages, of blocks, and of the model's original length, 64."""


@pytest.fixture(scope="module")
def golden() -> NemotronGolden:
    return golden_or_skip(load_nemotron)


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return reference_model_of(load_nemotron(BUNDLED))


def reference_model_of(golden: NemotronGolden) -> ReferenceModel:
    return reference_model(golden)  # type: ignore[arg-type]  # it has a checkpoint


def engine_of(
    options: Options = STATIC, *, dllm: dict[str, Any] | None = None, checkpoint: Any = None, **more: Any
) -> LLM:
    fixed: dict[str, Any] = {"block_length": options.block_length}
    if not options.commit_predicts:
        fixed["first_token"] = "denoised"
    return engine(
        checkpoint or CHECKPOINT,
        dllm={**fixed, **(dllm or {})},
        hf_overrides={},
        **{"block_size": PAGE, "max_num_seqs": 8, **more},
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A text as the model was trained on: runs of numbers with a step each."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    text: list[int] = []
    while len(text) < length:
        first, step, number = (int(torch.randint(*bounds, (1,), generator=generator)) for bounds in BOUNDS)
        text += [1, 12 + step, *[101 + (first + step * index) % 218 for index in range(number)]]
    return text[:length]


BOUNDS = ((0, 200), (1, 6), (4, 20))


def cases_of(options: Options, lengths: Sequence[int] = LENGTHS) -> list[Case]:
    """Every other one ends early."""
    both = [options, replace(options, eos_early_stop=True)]
    return [Case(prompt_of(length), 20 + index % 5, both[index % 2]) for index, length in enumerate(lengths)]


def assert_as_reference(
    llm: LLM, reference: ReferenceModel, cases: Sequence[Case], skipping: StepSkipping | None = None
) -> list[RequestOutput]:
    params = [greedy(case.options, skipping, max_tokens=case.max_tokens) for case in cases]
    outputs = generate(llm, [case.prompt for case in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        expected = expected_of(reference, case.prompt, case.max_tokens, case.options, skipping)
        assert (tokens_of(output), nfe_of(output)) == (expected.tokens, expected.nfe), len(case.prompt)
    return outputs


def golden_params(case: GoldenCase) -> Any:
    return mapped(greedy(case.options, max_tokens=case.max_new_tokens))


@pytest.mark.parametrize("first_token", ["autoregressive", "denoised"])
@pytest.mark.parametrize("length", [4, 8, 16, 32])
def test_golden_tokens_forwards_and_steps(length: int, first_token: str, golden: NemotronGolden) -> None:
    """A batch of all cases, and some alone."""
    seeded = first_token == "autoregressive"
    cases = [c for c in golden.cases if (c.options.block_length, c.options.commit_predicts) == (length, seeded)]
    if not cases:
        pytest.skip(f"no case with blocks of {length}")
    llm = engine_of(cases[0].options, checkpoint=golden.checkpoint)
    together = generate(llm, [case.prompt for case in cases], [golden_params(case) for case in cases])
    alone = [generate(llm, [case.prompt], golden_params(case))[0] for case in cases[:2]]
    for case, output in zip([*cases, *cases[:2]], [*together, *alone], strict=True):
        assert tokens_of(output) == case.tokens, case.name
        assert nfe_of(output) == case.nfe, case.name
        assert not misplaced(output, len(case.prompt), expected_map_of(case)), case.name


@pytest.mark.parametrize("skipping", [FreeDave(4), PSD(3)], ids=str)
@pytest.mark.parametrize("options", [THRESHOLD, DENOISED], ids=["autoregressive", "denoised"])
def test_drafts(options: Options, skipping: StepSkipping, reference: ReferenceModel) -> None:
    llm = engine_of(options, dllm={"max_drafts": 3})
    cases = cases_of(options)
    drafted = assert_as_reference(llm, reference, cases, skipping)
    plain = assert_as_reference(llm, reference, cases)
    if isinstance(skipping, FreeDave):
        assert [tokens_of(output) for output in drafted] == [tokens_of(output) for output in plain]
        assert sum(map(nfe_of, drafted)) < sum(map(nfe_of, plain))


def test_chunks_of_a_prompt_end_anywhere(reference: ReferenceModel) -> None:
    llm = engine_of(THRESHOLD, max_num_batched_tokens=19, max_num_seqs=4, enable_prefix_caching=False)
    assert_as_reference(llm, reference, cases_of(THRESHOLD))


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("options", [THRESHOLD, DENOISED], ids=["autoregressive", "denoised"])
def test_after_preemption_blocks_lie_where_they_lay(
    options: Options, async_scheduling: bool, reference: ReferenceModel
) -> None:
    # Too few pages for all of them to the end.
    llm = engine_of(options, max_model_len=256, num_gpu_blocks_override=13, async_scheduling=async_scheduling)
    before = free_pages(llm)
    cases = [Case(prompt_of(length, seed=1), 50 + length, options) for length in (5, 13, 21, 30, 34, 47, 52, 66)]
    with preemptions(llm) as preempted:
        outputs = generate(llm, [c.prompt for c in cases], [greedy(options, max_tokens=c.max_tokens) for c in cases])
    assert preempted
    for case, output in zip(cases, outputs, strict=True):
        assert tokens_of(output) == expected_of(reference, case.prompt, case.max_tokens, case.options).tokens
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("options", [STATIC, DENOISED], ids=["autoregressive", "denoised"])
def test_pages_in_the_prefix_cache_are_sound_after_every_step(options: Options, async_scheduling: bool) -> None:
    llm = engine_of(options, max_model_len=256, num_gpu_blocks_override=13, async_scheduling=async_scheduling)
    fresh = engine_of(options, max_model_len=256, num_gpu_blocks_override=14)
    llm.reset_prefix_cache()
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    texts: dict[str, list[int]] = {}
    for index, length in enumerate((23, 31, 61)):
        params = greedy(options, max_tokens=40 + 3 * index)
        core.add_request(str(index), {"prompt_token_ids": prompt_of(length, seed=3)}, params)
    checked = set[bytes]()
    while core.has_unfinished_requests():
        core.step()
        for request in scheduler.requests.values():
            texts[request.request_id] = list(request.all_token_ids)
        # One token more, so that the last full page is prefilled as a page of its own and not left out.
        assert_sound(llm, fresh, [[*text, 1] for text in texts.values()], checked)
    assert checked


def test_generated_text_is_hit_by_the_next_turn_and_read_right(reference: ReferenceModel) -> None:
    llm = engine_of(THRESHOLD)
    llm.reset_prefix_cache()
    prompt = prompt_of(27)
    first = expected_of(reference, prompt, 90, THRESHOLD).tokens
    assert_as_reference(llm, reference, [Case(prompt, 90, THRESHOLD)])
    for kept in (5, 61, 90):
        turn = [*prompt, *first[:kept], 120, 121]
        hit = generate(llm, [turn], greedy(THRESHOLD, max_tokens=30))[0]
        assert hit.num_cached_tokens == min((len(prompt) + kept) // PAGE * PAGE, (len(turn) - 1) // PAGE * PAGE)
        assert tokens_of(hit) == expected_of(reference, turn, 30, THRESHOLD).tokens


@pytest.mark.parametrize("options", [THRESHOLD, DENOISED], ids=["autoregressive", "denoised"])
def test_draws_do_not_depend_on_neighbours_nor_on_the_first_tokens_way(options: Options) -> None:
    """The first token of a block is drawn alike from a prompt's last row and from a commit's."""
    llm = engine_of(options)

    def sampled(length: int) -> Any:
        return greedy(options, max_tokens=3 * LENGTH, temperature=0.9, top_p=0.95, seed=length)

    alone = [tokens_of(generate(llm, [prompt_of(n)], sampled(n))[0]) for n in LENGTHS[:4]]
    together = generate(llm, [prompt_of(n) for n in LENGTHS], [sampled(n) for n in LENGTHS])
    assert [tokens_of(output) for output in together[:4]] == alone
    assert alone[0] != tokens_of(generate(llm, [prompt_of(LENGTHS[0])], greedy(options, max_tokens=24))[0])
    for length, output in zip(LENGTHS, together, strict=True):
        # Going on from the finished first block.
        resumed = generate(llm, [prompt_of(length) + tokens_of(output)[:LENGTH]], sampled(length))[0]
        assert tokens_of(resumed)[: 2 * LENGTH] == tokens_of(output)[LENGTH:]


def test_logits_of_prompts_and_blocks_equal_the_official_ones(
    golden: NemotronGolden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the original length too. The block stands half decided behind its prompt, as after a preemption."""
    for case in golden.logits:
        options = replace(SEEDED, block_length=len(case.block))
        llm = engine_of(options, checkpoint=golden.checkpoint)
        model, seen = runner_of(llm).model, list[torch.Tensor]()
        hook = model.register_forward_hook(lambda _model, _inputs, output, seen=seen: seen.append(output.clone()))
        try:
            llm.reset_prefix_cache()
            generate(llm, [case.prompt.tolist()], greedy(max_tokens=1))
        finally:
            hook.remove()
        prefill = model.compute_logits(seen[0][: len(case.prompt)])
        torch.testing.assert_close(prefill, case.prefill, atol=1e-4, rtol=0)
        # Of the block's first denoising forward, which sees its first token and masks.
        block = torch.full_like(case.block, MASK)
        block[0] = prefill[-1].argmax()
        ids = torch.cat((case.prompt, block))
        expected = reference_model_of(golden)(ids, causal_context(len(ids), len(case.prompt)))[len(case.prompt) :]
        denoised = model.compute_logits(seen[1][: len(block)])
        torch.testing.assert_close(denoised[1:], expected[1:], atol=1e-4, rtol=0)


def write_tokenizer(folder: Path) -> Path:
    """A token for each byte, around the stop token and the mask token."""
    names = iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    special = {EOS: "<eos>", MASK: "<mask>"}
    vocabulary = {special.get(i) or next(names, f"<unused {i}>"): i for i in range(320)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", mask_token="<mask>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [THRESHOLD, DENOISED], ids=["autoregressive", "denoised"])
def test_structured_outputs_hold(options: Options, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first token of a block, of a prompt and of a commit, is masked like the others."""
    tokenizer = str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    llm, read = (
        engine_of(options, skip_tokenizer_init=False, tokenizer=tokenizer),
        AutoTokenizer.from_pretrained(tokenizer),
    )
    pattern = r"First, [0-9]{1,2} \+ [0-9]{2} = (apples|pens)\. [ab]{2,4}#"
    constrained = StructuredOutputsParams(regex=pattern)
    asked = [
        greedy(options, max_tokens=60, temperature=heat, seed=3, ignore_eos=False, detokenize=True)
        for heat in (0.0, 0.9, 0.0)
        for _ in LENGTHS
    ]
    for index, one in enumerate(asked):
        one.structured_outputs = constrained if index % 3 else None
    outputs = generate(llm, [prompt_of(length) for length in LENGTHS] * 3, asked)
    for index, output in enumerate(outputs):
        if index % 3:
            # The text of the output begins with what the prompt's last bytes need to make a letter.
            text = read.decode(tokens_of(output), skip_special_tokens=True)
            assert re.fullmatch(pattern, text), text
