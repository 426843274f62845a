"""I-DLM: every forward verifies drafts and makes the next, and the text is the autoregressive one."""

import functools
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.harness import (
    assert_nothing_left,
    engine,
    free_pages,
    generate,
    greedy,
    nfe_of,
    preemptions,
    tensor_parallel_engine,
    tokens_of,
)
from tests.engine.runtime.test_linear_spec import ALLOWED, DRAWS, assert_drawn_from, assert_logprobs, assert_pages_sound
from tests.engine.runtime.test_nemotron import LENGTHS, PAGE, prompt_of
from tests.paths import ROOT
from tests.reference.isd import Strided, decode_by_strides
from tests.reference.linear_spec import greedy_text
from tests.reference.model import ReferenceModel
from vllm_dllm import request_stats
from vllm_dllm.models.draft_adapter import LAYERS

CHECKPOINT = ROOT / "tests/models/idlm/checkpoint"
MASK, STRIDE = 100, 4


def engine_of(stride: int = STRIDE, *, dllm: dict[str, Any] | None = None, **more: Any) -> LLM:
    given = {} if stride == STRIDE else {"block_length": 2 * stride - 1}
    return engine(
        CHECKPOINT, dllm={**given, **(dllm or {})}, hf_overrides={}, **{"block_size": PAGE, "max_num_seqs": 8, **more}
    )


@functools.cache
def reference() -> ReferenceModel:
    return ReferenceModel(CHECKPOINT)


@functools.cache
def expected_of(
    prompt: tuple[int, ...], max_tokens: int, stride: int = STRIDE, stop_ids: frozenset[int] = frozenset()
) -> Strided:
    return decode_by_strides(reference(), list(prompt), max_tokens, stride=stride, mask_id=MASK, stop_ids=stop_ids)


def params(max_tokens: int, *, args: dict[str, Any] | None = None, **more: Any) -> SamplingParams:
    return greedy(max_tokens=max_tokens, extra_args=args, **more)


def assert_as_reference(
    llm: LLM, prompts: Sequence[list[int]], asked: Sequence[SamplingParams], stride: int = STRIDE
) -> list[RequestOutput]:
    outputs = generate(llm, list(prompts), list(asked))
    for prompt, one, output in zip(prompts, asked, outputs, strict=True):
        expected = expected_of(tuple(prompt), one.max_tokens or 0, stride)
        stats = request_stats(output)
        assert (tokens_of(output), nfe_of(output)) == (expected.tokens, expected.nfe), len(prompt)
        assert (stats.drafted, stats.accepted) == (len(expected.accepted) * (stride - 1), sum(expected.accepted))
        assert +Counter(dict(enumerate(stats.acceptance_histogram))) == Counter(expected.accepted)
    return outputs


@pytest.mark.parametrize(("stride", "asynchronous"), [(2, False), (STRIDE, False), (STRIDE, True), (6, True)], ids=str)
def test_any_prompt_gets_the_autoregressive_text_in_as_many_forwards_as_by_hand(
    stride: int, asynchronous: bool
) -> None:
    """Alone, together, and with prompts that come in chunks."""
    prompts = [prompt_of(length, seed) for seed in range(2) for length in LENGTHS]
    asked = [params(17 + index % 9) for index in range(len(prompts))]
    llm = engine_of(stride, async_scheduling=asynchronous, max_num_batched_tokens=64)
    together = assert_as_reference(llm, prompts, asked, stride)
    for prompt, one in zip(prompts[:4], asked, strict=False):
        assert_as_reference(llm, [prompt], [one], stride)
    for prompt, one, output in zip(prompts, asked, together, strict=True):
        text = greedy_text(reference(), prompt, one.max_tokens or 0, MASK, frozenset())
        assert tokens_of(output) == text
    # The model was trained for it: most texts take fewer forwards than tokens.
    assert sum(map(nfe_of, together)) < (0.8 if stride == 2 else 0.6) * sum(len(tokens_of(each)) for each in together)


def qwen3(folder: Path) -> Path:
    """The checkpoint as one of an autoregressive model."""
    shutil.copytree(CHECKPOINT, folder / "model")
    config = json.loads((CHECKPOINT / "config.json").read_text()) | {"mask_token_id": MASK}
    del config["use_regular_causal"]
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "model/config.json").write_text(json.dumps(config))
    return folder / "model"


PENALIZED: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "min_tokens": 9},
    {"repetition_penalty": 1.3},
    {"presence_penalty": -0.5, "frequency_penalty": 0.3, "repetition_penalty": 0.9, "logit_bias": {150: 2.0}},
)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_vllms_own_model_writes_the_same(asynchronous: bool, tmp_path: Path) -> None:
    """The layers are Qwen3's, and so are the checkpoint's tensors. With penalties each token counts those before it."""
    mode = "processed_logprobs"
    autoregressive = LLM(
        str(qwen3(tmp_path)),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 24,
        logprobs_mode=mode,
    )
    prompts = [prompt_of(length, 3) for length in LENGTHS for _ in PENALIZED]
    asked = [params(40, logprobs=0, **PENALIZED[index % len(PENALIZED)]) for index in range(len(prompts))]
    # No text has a mask.
    barred = [params(40, logprobs=0, **one) for one in PENALIZED]
    for one in barred:
        one.logit_bias = {**(one.logit_bias or {}), MASK: -100.0}
    theirs = generate(autoregressive, prompts, [barred[index % len(barred)] for index in range(len(prompts))])
    # Too few pages for all of them to the end.
    llm = engine_of(async_scheduling=asynchronous, logprobs_mode=mode, max_model_len=256, num_gpu_blocks_override=17)
    with preemptions(llm) as preempted:
        ours = generate(llm, prompts, asked)
    assert preempted
    assert [*map(tokens_of, ours)] == [*map(tokens_of, theirs)]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(*map(told_logprobs, (one, other)), atol=1e-4, rtol=0)
    # The penalties change texts.
    assert len({tuple(tokens_of(output)) for output in ours[: len(PENALIZED)]}) > 3


def told_logprobs(output: RequestOutput) -> torch.Tensor:
    told = output.outputs[0].logprobs
    assert told is not None
    return torch.tensor([each[token].logprob for each, token in zip(told, tokens_of(output), strict=True)])


def write_adapter(folder: Path, *targets: str) -> Path:
    """Random, and small enough that some drafts stay right."""
    rank, generator, tensors = 4, torch.Generator().manual_seed(5), {}
    for name, weight in load_file(CHECKPOINT / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(targets):
            outputs, inputs = weight.shape
            for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                drawn = torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = 0.15 * drawn
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": [*targets], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    every = (name for names in LAYERS.values() for name in names)
    return write_adapter(tmp_path_factory.mktemp("adapter"), *every)


def assert_adapted(llm: LLM, adapter: Path) -> None:
    """The text of the model without the adapter, in as many forwards as the adapter's drafts make."""
    model = ReferenceModel(CHECKPOINT, adapter)
    prompts = [prompt_of(length, 4) for length in LENGTHS]
    outputs = generate(llm, prompts, [params(30)] * len(prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = decode_by_strides(model, prompt, 30, stride=STRIDE, mask_id=MASK, drafter=model.adapted)
        assert (tokens_of(output), nfe_of(output)) == (expected.tokens, expected.nfe)
        assert expected.tokens == expected_of(tuple(prompt), 30).tokens
    nfes = sum(map(nfe_of, outputs))
    assert sum(expected_of(tuple(prompt), 30).nfe for prompt in prompts) < nfes < 29 * len(prompts)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_adapter_of_the_masks_changes_drafts_alone(asynchronous: bool, adapter: Path) -> None:
    assert_adapted(engine_of(dllm={"draft_adapter": str(adapter)}, async_scheduling=asynchronous), adapter)


def test_an_adapter_of_some_layers(tmp_path: Path) -> None:
    """Of those that vLLM fuses, not all."""
    adapter = write_adapter(tmp_path, "v_proj", "up_proj")
    assert_adapted(engine_of(dllm={"draft_adapter": str(adapter)}), adapter)


@pytest.mark.slow
def test_an_adapter_of_the_masks_with_tensor_parallel_two(adapter: Path) -> None:
    """Each rank has its share of every layer's."""
    dllm, more = {"draft_adapter": str(adapter)}, {"hf_overrides": {}, "block_size": PAGE, "max_num_seqs": 8}
    with tensor_parallel_engine(CHECKPOINT, dllm=dllm, **more) as llm:
        assert_adapted(llm, adapter)


def test_an_autoregressive_checkpoint_with_an_adapter_of_masks(adapter: Path, tmp_path: Path) -> None:
    llm = engine(
        qwen3(tmp_path), dllm={"draft_adapter": str(adapter)}, hf_overrides={}, config_format="i_dlm", block_size=PAGE
    )
    assert_adapted(llm, adapter)


def test_texts_end_at_max_tokens_at_a_stop_token_and_at_the_longest_text() -> None:
    llm = engine_of(max_model_len=3 * PAGE, num_gpu_blocks_override=12)
    prompt = prompt_of(50)
    assert_as_reference(llm, [prompt] * 12, [params(number) for number in range(1, 13)])
    whole = expected_of(tuple(prompt), 3 * PAGE - len(prompt)).tokens
    (longest,) = generate(llm, [prompt], params(len(whole)))
    assert (tokens_of(longest), longest.outputs[0].finish_reason) == (whole, "length")
    for stop in dict.fromkeys(whole[:20]):
        (output,) = generate(llm, [prompt], params(30, stop_token_ids=[stop]))
        assert tokens_of(output) == whole[: whole.index(stop) + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        assert request_stats(output).committed_tokens == whole.index(stop) + 1
        assert nfe_of(output) == expected_of(tuple(prompt), 30, stop_ids=frozenset([stop])).nfe


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_after_preemption_and_with_asynchronous_scheduling(async_scheduling: bool) -> None:
    # Too few pages for all of them to the end.
    llm = engine_of(max_model_len=256, num_gpu_blocks_override=13, async_scheduling=async_scheduling)
    before = free_pages(llm)
    lengths = (5, 13, 21, 30, 34, 47, 52, 66)
    prompts = [prompt_of(length, seed=1) for length in lengths]
    drawn = [params(50 + n, temperature=0.8, seed=n, presence_penalty=n % 2 * 0.7) for n in lengths]
    with preemptions(llm) as preempted:
        texts = generate(llm, prompts, [params(50 + length) for length in lengths])
        outputs = generate(llm, prompts, drawn)
    assert preempted
    expected = [expected_of(tuple(p), 50 + n).tokens for p, n in zip(prompts, lengths, strict=True)]
    assert [*map(tokens_of, texts)] == expected
    # What is drawn depends on the seed and the positions alone: not on strides, nor on the requests beside.
    roomy = engine_of(3)
    assert [*map(tokens_of, generate(roomy, prompts, drawn))] == [*map(tokens_of, outputs)]
    for prompt, one, output in zip(prompts[:3], drawn, outputs, strict=False):
        assert tokens_of(generate(roomy, [prompt], one)[0]) == tokens_of(output)
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_pages_in_the_prefix_cache_are_sound_after_every_step(async_scheduling: bool) -> None:
    llm = engine_of(max_model_len=256, num_gpu_blocks_override=13, async_scheduling=async_scheduling)
    fresh = engine_of(max_model_len=256, num_gpu_blocks_override=14)
    assert_pages_sound(llm, fresh, params, lambda prompt, number: expected_of(tuple(prompt), number).tokens)


@pytest.mark.slow
def test_with_tensor_parallel_two() -> None:
    prompts = [prompt_of(length, 2) for length in LENGTHS]
    asked = [params(30) for _ in prompts]
    with tensor_parallel_engine(CHECKPOINT, dllm={}, hf_overrides={}, block_size=PAGE, max_num_seqs=8) as llm:
        assert_as_reference(llm, prompts, asked)


def test_draws_have_the_autoregressive_distribution() -> None:
    prompt, temperature = prompt_of(33), 1.3
    asked = [params(3, temperature=temperature, seed=seed, allowed_token_ids=ALLOWED) for seed in range(DRAWS)]
    outputs = generate(engine_of(), [prompt] * DRAWS, asked)
    assert_drawn_from(reference(), prompt, temperature, outputs)
    assert sum(request_stats(output).accepted for output in outputs) > 0


@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_are_the_autoregressive_ones(logprobs_mode: str) -> None:
    assert_logprobs(engine_of(logprobs_mode=logprobs_mode), reference(), params, logprobs_mode)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"args": {"dllm_step_map": True}}, "step_map=True is not allowed with verify='isd'"),
        ({"args": {"dllm_drafts": 4}}, "drafts=4 is not allowed with verify='isd': it goes from left to right"),
        ({"args": {"dllm_threshold": 0.5}}, "threshold=0.5 is not allowed with verify='isd'"),
        ({"args": {"dllm_confidence_top_k": 5}}, "confidence_top_k=5 is not allowed with verify='isd'"),
        ({"args": {"dllm_verify": "none"}}, "verify='none' is not allowed: I-DLM models decode with 'isd' alone"),
        ({"args": {"dllm_verify": "freedave"}}, "verify='freedave' is not allowed: I-DLM models decode with 'isd'"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(more: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        generate(engine_of(), [[1, 2, 3]], params(4, **more))
