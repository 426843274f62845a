"""openPangu-Diffusion: blocks that begin where the prompt ends, behind a context that is causal."""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from vllm import LLM, RequestOutput

from tests.engine.harness import (
    MASK,
    assert_nothing_left,
    engine,
    free_pages,
    generate,
    greedy,
    nfe_of,
    preemptions,
    runner_of,
    scheduler_of,
    tensor_parallel_engine,
    tokens_of,
)
from tests.engine.runtime.test_prefix_cache import assert_sound
from tests.reference.decode import Decoded, Options, StepSkipping, decode
from tests.reference.drafts import PSD, FreeDave
from tests.reference.model import ReferenceModel

PAGE, LENGTH = 32, 8
CONFIG = {
    "architectures": ["PanguEmbeddedForCausalLM"],
    "model_type": "PanguEmbedded",
    "bias": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 16000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}
STATIC = Options(block_length=LENGTH, mask_id=MASK, policy="static", shifted=True, causal_context=True)
THRESHOLD = replace(STATIC, policy="threshold", threshold=0.3)
SUB_BLOCKS = replace(THRESHOLD, sub_block_length=4)
LENGTHS = (1, 7, 8, 9, 23, 31, 32, 33, 50, 64, 71)
"""Prompts that end before, on and behind borders of pages and of multiples of the block length."""


def save_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Random weights under the published names, the rotary frequencies included that nobody needs."""
    generator = torch.Generator().manual_seed(3)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(vocab, hidden, 3.0),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in {"q_proj": hidden, "k_proj": keys, "v_proj": keys, "o_proj": hidden}.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = matrix(rows, hidden, 2.0)
            tensors[f"{prefix}self_attn.{name}.bias"] = 0.3 * torch.randn(rows, generator=generator)
        tensors[f"{prefix}self_attn.rotary_emb.inv_freq"] = torch.ones(head_dim // 2)
        tensors[f"{prefix}mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[f"{prefix}mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(hidden, inner, 2.0)
        tensors[f"{prefix}input_layernorm.weight"] = norm()
        tensors[f"{prefix}post_attention_layernorm.weight"] = norm()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("pangu"), CONFIG)


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> ReferenceModel:
    return ReferenceModel(checkpoint)


class Case(NamedTuple):
    prompt: list[int]
    max_tokens: int
    options: Options


def expected_of(
    reference: ReferenceModel,
    prompt: list[int],
    max_tokens: int,
    options: Options,
    skipping: StepSkipping | None = None,
) -> Decoded:
    """What the plain decoder gives; many tests ask for the same."""
    return _expected_of(reference, tuple(prompt), max_tokens, options, skipping)


@functools.cache
def _expected_of(reference: ReferenceModel, prompt: tuple[int, ...], *args: Any) -> Decoded:
    return decode(reference, list(prompt), *args)


def engine_of(checkpoint: Path, options: Options = STATIC, *, dllm: dict[str, Any] | None = None, **more: Any) -> LLM:
    fixed: dict[str, Any] = {"block_length": LENGTH, "sub_block_length": options.sub_block_length or LENGTH}
    return engine(
        checkpoint,
        dllm={**fixed, **(dllm or {})},
        config_format="pangu_diffusion",
        **{"block_size": PAGE, "max_model_len": 256, "max_num_seqs": 8, **more},
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 500, (length,), generator=generator).tolist()


def cases_of(options: Options, lengths: Sequence[int] = LENGTHS) -> list[Case]:
    return [Case(prompt_of(length), 20 + index % 5, options) for index, length in enumerate(lengths)]


def assert_as_reference(
    llm: LLM, reference: ReferenceModel, cases: Sequence[Case], skipping: StepSkipping | None = None
) -> list[RequestOutput]:
    params = [greedy(case.options, skipping, max_tokens=case.max_tokens) for case in cases]
    outputs = generate(llm, [case.prompt for case in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        expected = expected_of(reference, case.prompt, case.max_tokens, case.options, skipping)
        assert tokens_of(output) == expected.tokens, len(case.prompt)
        assert nfe_of(output) == expected.nfe, len(case.prompt)
    return outputs


@pytest.mark.parametrize("options", [STATIC, THRESHOLD, SUB_BLOCKS], ids=["static", "threshold", "sub-blocks"])
def test_prompts_of_any_length_decode_as_without_a_cache(
    options: Options, checkpoint: Path, reference: ReferenceModel
) -> None:
    llm = engine_of(checkpoint, options)
    cases = cases_of(options)
    for case in cases:
        assert_as_reference(llm, reference, [case])
    assert_as_reference(llm, reference, cases)
    assert_as_reference(llm, reference, cases[::-1])


def test_the_cases_tell_decoders_apart(reference: ReferenceModel) -> None:
    """Several tokens in a forward where the policy says so, and another text where the prompt sees its blocks whole."""
    cases = cases_of(THRESHOLD)
    decoded = [expected_of(reference, case.prompt, case.max_tokens, case.options) for case in cases]
    assert all(len(set(result.tokens)) > 5 for result in decoded)
    assert sum(result.nfe for result in decoded) < sum(len(result.tokens) for result in decoded)
    whole = replace(THRESHOLD, causal_context=False)
    others = [expected_of(reference, case.prompt, case.max_tokens, whole) for case in cases]
    assert all(a.tokens != b.tokens for a, b in zip(decoded, others, strict=True) if len(a.tokens) > 1)


@pytest.mark.parametrize("skipping", [FreeDave(2), FreeDave(5), PSD(3)], ids=str)
@pytest.mark.parametrize("options", [STATIC, THRESHOLD, SUB_BLOCKS], ids=["static", "threshold", "sub-blocks"])
def test_drafts_beside_a_block_that_lies_on_two_pages(
    options: Options, skipping: StepSkipping, checkpoint: Path, reference: ReferenceModel
) -> None:
    llm = engine_of(checkpoint, options, dllm={"max_drafts": 4})
    cases = cases_of(options)
    assert any(len(case.prompt) % PAGE > PAGE - LENGTH for case in cases)
    drafted = assert_as_reference(llm, reference, cases, skipping)
    if isinstance(skipping, FreeDave):
        plain = generate(llm, [c.prompt for c in cases], [greedy(c.options, max_tokens=c.max_tokens) for c in cases])
        assert [tokens_of(output) for output in drafted] == [tokens_of(output) for output in plain]
        assert sum(map(nfe_of, drafted)) < sum(map(nfe_of, plain))


def test_chunks_of_a_prompt_end_anywhere(checkpoint: Path, reference: ReferenceModel) -> None:
    budget = 19
    llm = engine_of(checkpoint, THRESHOLD, max_num_batched_tokens=budget, max_num_seqs=4, enable_prefix_caching=False)
    chunks: list[int] = []
    runner, execute = runner_of(llm), runner_of(llm).execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafting = scheduler_output.scheduled_spec_decode_tokens
        chunks.extend(n for name, n in scheduler_output.num_scheduled_tokens.items() if name not in drafting)
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    try:
        assert_as_reference(llm, reference, cases_of(THRESHOLD))
    finally:
        del runner.execute_model
    assert any(number % LENGTH and number not in LENGTHS for number in chunks)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
def test_after_preemption_blocks_lie_where_they_lay(
    drafts: int, async_scheduling: bool, checkpoint: Path, reference: ReferenceModel
) -> None:
    llm = engine_of(
        checkpoint,
        THRESHOLD,
        dllm={"max_drafts": drafts},
        # Too few pages for all of them to the end.
        num_gpu_blocks_override=11 + 2 * drafts * 8,
        async_scheduling=async_scheduling,
    )
    before = free_pages(llm)
    cases = [Case(prompt_of(length, seed=1), 60 + length, THRESHOLD) for length in (5, 13, 21, 30, 34, 47, 52, 66)]
    midst: list[int] = []
    state = runner_of(llm).model_state
    add_request = state.add_request

    def note(req_index: int, new: Any) -> None:
        midst.append((len(new.prefill_token_ids) - len(new.prompt_token_ids)) % LENGTH)
        add_request(req_index, new)

    state.add_request = note
    try:
        with preemptions(llm) as preempted:
            skipping = FreeDave(1 + drafts) if drafts else None
            params = [greedy(case.options, skipping, max_tokens=case.max_tokens) for case in cases * 2]
            outputs = generate(llm, [case.prompt for case in cases * 2], params)
    finally:
        del state.add_request
    assert preempted
    for case, output in zip(cases * 2, outputs, strict=True):
        assert tokens_of(output) == expected_of(reference, case.prompt, case.max_tokens, case.options).tokens
    # Some go on behind a whole block, some behind the first token of the next one.
    assert set(midst) == {0, 1}
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_the_last_block_may_reach_beyond_the_longest_text_and_onto_another_page(
    checkpoint: Path, reference: ReferenceModel
) -> None:
    """Also where no page is left for it, and another request has to make room, and where many do so at once."""
    llm = engine_of(checkpoint, STATIC, max_model_len=3 * PAGE, num_gpu_blocks_override=1 + 4 + 2)
    roomy = engine_of(checkpoint, STATIC, max_model_len=3 * PAGE)
    prompts = [prompt_of(length, seed=2) for length in (70, 71, 72, 69, 68)]
    cases = [Case(prompt, 3 * PAGE - len(prompt), STATIC) for prompt in prompts]
    before = free_pages(llm)
    for case in cases:
        assert_as_reference(llm, reference, [case])
    assert_as_reference(roomy, reference, cases)
    outputs = generate(llm, prompts, [greedy(case.options, max_tokens=case.max_tokens) for case in cases])
    for case, output in zip(cases, outputs, strict=True):
        assert tokens_of(output) == expected_of(reference, case.prompt, case.max_tokens, case.options).tokens
    llm.reset_prefix_cache()
    assert_nothing_left(llm, before)


def test_too_few_pages_for_the_last_block_are_refused_at_start(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"are 4 KV pages of 32 .*max_model_len=96 with its last block needs 5;"):
        engine_of(checkpoint, STATIC, max_model_len=3 * PAGE, num_gpu_blocks_override=1 + 3)


@pytest.mark.parametrize("abort_after", [None, 4, 11])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_pages_in_the_prefix_cache_are_sound_after_every_step(
    abort_after: int | None, async_scheduling: bool, checkpoint: Path
) -> None:
    """Prompts whose blocks straddle pages, and ones where the first token of a block is the last one of a page."""
    pages, more_pages = 16, 17
    llm = engine_of(checkpoint, STATIC, num_gpu_blocks_override=pages, async_scheduling=async_scheduling)
    fresh = engine_of(checkpoint, STATIC, num_gpu_blocks_override=more_pages)
    llm.reset_prefix_cache()
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    texts: dict[str, list[int]] = {}
    for index, length in enumerate((23, 31, 45, 61, 30, 47)):
        name = f"{abort_after}-{index}"
        params = greedy(STATIC, max_tokens=70 + 3 * index)
        core.add_request(name, {"prompt_token_ids": prompt_of(length, seed=3)}, params)
    steps, checked = 0, set[bytes]()
    while core.has_unfinished_requests():
        core.step()
        steps += 1
        for request in scheduler.requests.values():
            texts[request.request_id] = list(request.all_token_ids)
        if steps == abort_after:
            core.abort_request([f"{abort_after}-0", f"{abort_after}-2"])
        # One token more, so that the last full page is prefilled as a page of its own and not left out.
        assert_sound(llm, fresh, [[*text, 1] for text in texts.values()], checked)
    assert checked


def test_generated_text_is_hit_by_the_next_turn_and_read_right(checkpoint: Path, reference: ReferenceModel) -> None:
    llm = engine_of(checkpoint, THRESHOLD)
    llm.reset_prefix_cache()
    prompt = prompt_of(27)
    first = expected_of(reference, prompt, 90, THRESHOLD).tokens
    assert_as_reference(llm, reference, [Case(prompt, 90, THRESHOLD)])
    for kept in (5, 40, 61, 90):
        turn = [*prompt, *first[:kept], 7, 8]
        hit = generate(llm, [turn], greedy(THRESHOLD, max_tokens=30))[0]
        assert hit.num_cached_tokens == min((len(prompt) + kept) // PAGE * PAGE, (len(turn) - 1) // PAGE * PAGE)
        assert tokens_of(hit) == expected_of(reference, turn, 30, THRESHOLD).tokens


@pytest.mark.parametrize("dllm", [{}, {"max_drafts": 3}], ids=["plain", "drafts"])
def test_with_asynchronous_scheduling(dllm: dict[str, Any], checkpoint: Path, reference: ReferenceModel) -> None:
    llm = engine_of(checkpoint, THRESHOLD, dllm=dllm, async_scheduling=True)
    assert_as_reference(llm, reference, cases_of(THRESHOLD), FreeDave(4) if dllm else None)


def test_draws_do_not_depend_on_neighbours_nor_on_the_first_tokens_way(checkpoint: Path) -> None:
    """The first token of a block is drawn alike from a prompt's last row and from a commit's."""
    llm = engine_of(checkpoint, THRESHOLD)

    def sampled(length: int) -> Any:
        return greedy(THRESHOLD, max_tokens=3 * LENGTH, temperature=0.9, top_p=0.95, seed=length)

    alone = [tokens_of(generate(llm, [prompt_of(n)], sampled(n))[0]) for n in LENGTHS]
    together = generate(llm, [prompt_of(n) for n in LENGTHS], [sampled(n) for n in LENGTHS])
    assert [tokens_of(output) for output in together] == alone
    assert alone[0] != tokens_of(generate(llm, [prompt_of(LENGTHS[0])], greedy(THRESHOLD, max_tokens=24))[0])
    for length, tokens in zip(LENGTHS, alone, strict=True):
        # Going on from the finished first block.
        resumed = generate(llm, [prompt_of(length) + tokens[:LENGTH]], sampled(length))[0]
        assert tokens_of(resumed)[: 2 * LENGTH] == tokens[LENGTH:]


def test_a_stop_token_in_the_midst_of_a_block_ends_the_request(checkpoint: Path, reference: ReferenceModel) -> None:
    llm = engine_of(checkpoint, STATIC)
    for length in LENGTHS:
        prompt = prompt_of(length)
        tokens = expected_of(reference, prompt, 3 * LENGTH, STATIC).tokens
        # Not the first of all: that one is emitted with a denoising step and counts none in the reference.
        stop = next(token for token in tokens[LENGTH + 3 :] if token != tokens[0])
        options = replace(STATIC, stop_ids=frozenset({stop}), eos_early_stop=True)
        assert_as_reference(llm, reference, [Case(prompt, 3 * LENGTH, options)])


@pytest.mark.slow
def test_with_tensor_parallel_two(checkpoint: Path, reference: ReferenceModel) -> None:
    options = {"config_format": "pangu_diffusion", "block_size": PAGE, "max_model_len": 256, "max_num_seqs": 8}
    dllm = {"block_length": LENGTH, "sub_block_length": SUB_BLOCKS.sub_block_length}
    with tensor_parallel_engine(checkpoint, dllm=dllm, **options) as llm:
        assert_as_reference(llm, reference, cases_of(SUB_BLOCKS))
