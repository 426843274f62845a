"""Engines with quantised weights and quantised K/V: the tokens are those of the dequantised model, in any company."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from vllm.platforms import current_platform

from tests.engine.harness import engine, generate, greedy, nfe_of, runner_of, tensor_parallel_engine, tokens_of
from tests.engine.speculators.engines import drafter, sampled
from tests.engine.speculators.engines import engine_of as drafting_engine_of
from tests.paths import BENCHMARKS, BUNDLED

sys.path.insert(0, str(BENCHMARKS))

from quantize import Format, write

PROMPTS = [[(7 * i + 13 * row) % 500 for i in range(length)] for row, length in enumerate((3, 9, 16, 21, 37, 50))]
FREEDAVE: dict[str, Any] = {"dllm_verify": "freedave", "dllm_drafts": 3}

Folder = Callable[[str, Format], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folder of a family's checkpoint in a format, which has the dequantised one beside it, ``plain``."""
    written: dict[tuple[str, Format], Path] = {}

    def folder_of(family: str, form: Format) -> Path:
        if (family, form) not in written:
            made = written[family, form] = tmp_path_factory.mktemp(f"{family}-{form}")
            write(BUNDLED / family / "checkpoint", made / "q", form, exact=True, dequantized=made / "plain")
        return written[family, form]

    return folder_of


def engine_of(checkpoint: Path, dtype: str, **more: Any) -> LLM:
    return engine(checkpoint, dllm={"block_length": 8, "max_drafts": 3}, dtype=dtype, max_num_seqs=8, **more)


def params(**more: Any) -> SamplingParams:
    return greedy(max_tokens=20, extra_args={"dllm_policy": "static", "dllm_tokens_per_step": 1, **more})


def answers(llm: LLM, prompts: list[list[int]], asked: SamplingParams) -> list[list[int]]:
    return [tokens_of(output) for output in generate(llm, prompts, asked)]


def assert_same_in_any_company(llm: LLM) -> list[list[int]]:
    """Answers alone, together, in reverse, among others and with drafts are one and the same; returns the answers."""
    plain, last = params(), len(PROMPTS) - 1
    alone = [answers(llm, [prompt], plain)[0] for prompt in PROMPTS]
    together = generate(llm, PROMPTS, plain)
    assert [tokens_of(output) for output in together] == alone
    assert answers(llm, PROMPTS[::-1], plain) == alone[::-1]
    others = [[token + 1 for token in prompt] for prompt in PROMPTS]
    assert answers(llm, [*others[:2], PROMPTS[last], *others[2:]], plain)[2] == alone[last]
    drafted = generate(llm, PROMPTS, params(**FREEDAVE))
    assert [tokens_of(output) for output in drafted] == alone
    assert sum(map(nfe_of, drafted)) < sum(map(nfe_of, together))
    return alone


@pytest.mark.parametrize(
    ("family", "form"),
    [("sdar", Format.AWQ), ("fast_dllm_v2", Format.GPTQ), ("llada", Format.AWQ), ("dream", Format.W4A16)],
)
def test_answers_are_those_of_the_dequantised_model(family: str, form: Format, folder: Folder) -> None:
    checkpoints = folder(family, form)
    quantized = assert_same_in_any_company(engine_of(checkpoints / "q", "bfloat16"))
    assert quantized == answers(engine_of(checkpoints / "plain", "bfloat16"), PROMPTS, params())


@pytest.mark.parametrize(
    ("family", "form"), [("sdar", Format.INT8), ("llada", Format.INT8), ("sdar", Format.FP8_CHANNEL)]
)
def test_answers_of_quantised_inputs_are_the_same_in_any_company(family: str, form: Format, folder: Folder) -> None:
    """Each row has a scale of its own."""
    assert_same_in_any_company(engine_of(folder(family, form) / "q", "float32"))


@pytest.mark.parametrize("form", [Format.AWQ, Format.W4A16, Format.FP8_CHANNEL])
def test_weights_may_be_loaded_anew(form: Format, folder: Folder) -> None:
    checkpoint = folder("sdar", form) / "q"
    llm = engine_of(checkpoint, "float32" if form is Format.FP8_CHANNEL else "bfloat16")
    old = answers(llm, PROMPTS, params())
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
    assert answers(llm, PROMPTS, params()) == old
    with pytest.raises(ValueError, match="does not hold the model that"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint.with_name("plain"))})
    assert answers(llm, PROMPTS, params()) == old


def test_a_path_without_a_checkpoint_is_refused_where_nothing_else_can_be_compared() -> None:
    llm = engine_of(BUNDLED / "sdar" / "checkpoint", "bfloat16", quantization="fp8_per_channel")
    old = answers(llm, PROMPTS, params())
    with pytest.raises(ValueError, match="cannot be loaded"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": "no checkpoint"})
    assert answers(llm, PROMPTS, params()) == old


@pytest.mark.skipif(not current_platform.is_cpu(), reason="others load them anew")
def test_int8_weights_are_not_loaded_anew_on_a_cpu(folder: Folder) -> None:
    checkpoint = folder("sdar", Format.INT8) / "q"
    llm = engine_of(checkpoint, "float32")
    old = answers(llm, PROMPTS, params())
    for new in ({"weights_path": str(checkpoint)}, {"weights_iterator": []}):
        with pytest.raises(ValueError, match="has INT8 weights, which vLLM does not load anew on a CPU"):
            llm.collective_rpc("reload_weights", kwargs=new)
    assert answers(llm, PROMPTS, params()) == old


@pytest.mark.parametrize("family", ["sdar", "llada2_moe", "llada"])
def test_answers_with_fp8_keys_and_values_are_the_same_in_any_company(family: str) -> None:
    checkpoint = BUNDLED / family / "checkpoint"
    found = assert_same_in_any_company(engine_of(checkpoint, "bfloat16", kv_cache_dtype="fp8"))
    assert found != answers(engine_of(checkpoint, "bfloat16"), PROMPTS, params())


def test_a_quantised_drafter_drafts_for_its_target(tmp_path: Path) -> None:
    write(drafter("full"), tmp_path / "q", Format.INT8, exact=True, dequantized=tmp_path / "plain")
    greedily, prompts = sampled(None, max_tokens=12, temperature=0.0), [[1, 2, 3], [*range(5, 30)], [9] * 12]
    quantized = drafting_engine_of(tmp_path / "q")
    found = answers(quantized, prompts, greedily)
    assert found == answers(drafting_engine_of(tmp_path / "plain"), prompts, greedily)
    layers = [each for each in runner_of(quantized).speculator.model.modules() if isinstance(each, LinearBase)]
    assert {type(each.quant_method) for each in layers} == {CompressedTensorsLinearMethod}


@pytest.mark.slow
def test_two_ranks_share_packed_weights(folder: Folder) -> None:
    """The sums of two ranks are rounded apart, so that log-probabilities tell and not tokens."""
    checkpoint = folder("sdar", Format.AWQ) / "q"
    one_step = greedy(max_tokens=8, logprobs=1, extra_args={"dllm_policy": "static", "dllm_tokens_per_step": 8})

    def first_step(llm: LLM) -> list[float]:
        texts = [output.outputs[0] for output in generate(llm, PROMPTS, one_step)]
        return [
            entry[token].logprob for each in texts for token, entry in zip(each.token_ids, each.logprobs, strict=True)
        ]

    alone = first_step(engine(checkpoint, dllm={"block_length": 8}, dtype="float16", max_num_seqs=8))
    with tensor_parallel_engine(checkpoint, dllm={"block_length": 8}, dtype="float16", max_num_seqs=8) as llm:
        assert first_step(llm) == pytest.approx(alone, abs=0.03)
