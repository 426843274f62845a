"""LoRA adapters: each request's answer is that of a checkpoint with its adapter merged, whoever its neighbours are."""

import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from tests.engine.harness import DEFAULTS, engine, greedy, tensor_parallel_engine, tokens_of
from tests.engine.runtime.test_pangu import CONFIG as PANGU
from tests.engine.runtime.test_pangu import save_checkpoint as save_pangu
from tests.paths import BENCHMARKS, BUNDLED

sys.path.insert(0, str(BENCHMARKS))

from adapters import merge, random_adapter, write_adapter
from quantize import Format, write

PROMPTS = [[(7 * i + 13 * row) % 500 for i in range(length)] for row, length in enumerate((3, 9, 16, 37))]
STATIC = {"dllm_policy": "static", "dllm_tokens_per_step": 1}
FREEDAVE = {**STATIC, "dllm_verify": "freedave", "dllm_drafts": 3}

QWEN = re.compile(r"\.(q|k|v|o|gate|up|down)_proj$")
LLADA = re.compile(r"\.(q_proj|k_proj|v_proj|attn_out|ff_proj|up_proj|blocks\.\d+\.ff_out)$")
"""What published adapters of LLaDA change, under LLaDA's names."""
LAYERS = {
    "sdar": QWEN,
    "fast_dllm_v2": QWEN,
    "dream": QWEN,
    "pangu": QWEN,
    "nemotron_labs_diffusion": QWEN,
    "llada": LLADA,
}
MORE: dict[str, dict[str, Any]] = {
    "pangu": {"config_format": "pangu_diffusion"},
    "nemotron_labs_diffusion": {"hf_overrides": {}},
}


class Adapted(NamedTuple):
    """A family's checkpoint, two adapters of different ranks and scales, and the checkpoints with one merged."""

    family: str
    source: Path
    adapters: tuple[LoRARequest, LoRARequest]
    merged: tuple[Path, Path]

    def engine(self, checkpoint: Path | None = None, **more: Any) -> LLM:
        """The engine of a checkpoint; of the source, with room for both adapters, where none is given."""
        lora = {} if checkpoint else {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        dllm = {"block_length": 8, "max_drafts": 3, **more.pop("dllm", {})}
        options = {"max_num_seqs": 8, **lora, **MORE.get(self.family, {}), **more}
        return engine(checkpoint or self.source, dllm=dllm, **options)

    def expected(self, params: SamplingParams) -> list[list[list[int]]]:
        """Answers of the base model, and with each adapter."""
        return [answers(self.engine(each), None, params) for each in (self.source, *self.merged)]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def of(family: str) -> Adapted:
        folder = tmp_path_factory.mktemp(family)
        source = save_pangu(folder, PANGU) if family == "pangu" else BUNDLED / family / "checkpoint"
        pairs = [
            random_adapter(source, LAYERS[family], rank=8, seed=1, size=0.5),
            random_adapter(source, LAYERS[family], rank=4, seed=2, size=0.5),
        ]
        scales = (1, 2)
        requests, merged = [], []
        for number, (pair, scale) in enumerate(zip(pairs, scales, strict=True), 1):
            rank = next(iter(pair.values())).down.shape[0]
            path = write_adapter(pair, folder / f"adapter-{number}", alpha=scale * rank)
            requests.append(LoRARequest(f"adapter-{number}", number, str(path)))
            merged.append(merge(source, pair, folder / f"merged-{number}", scale=scale))
        return Adapted(family, source, (requests[0], requests[1]), (merged[0], merged[1]))

    return of


def answers(llm: LLM, adapters: Sequence[LoRARequest | None] | None, params: SamplingParams) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    lora: Any = None if adapters is None else list(adapters)
    return [tokens_of(output) for output in llm.generate(prompts, params, use_tqdm=False, lora_request=lora)]


def params_of(options: dict[str, Any], **more: Any) -> SamplingParams:
    return greedy(max_tokens=12, extra_args=options, **more)


def assert_each_gets_its_own(
    one: Adapted, llm: LLM, options: dict[str, Any] = STATIC, expected: list[list[list[int]]] | None = None
) -> None:
    """Of batches with both adapters and none, so that each prompt has each of the three in turn."""
    expected = expected or one.expected(params_of(STATIC))
    assert expected[0] != expected[1] != expected[2]
    params, choices = params_of(options), (None, *one.adapters)
    for first in range(3):
        chosen = [(first + row) % 3 for row in range(len(PROMPTS))]
        found = answers(llm, [choices[each] for each in chosen], params)
        assert found == [expected[each][row] for row, each in enumerate(chosen)]


@pytest.mark.parametrize("family", LAYERS)
def test_two_adapters_and_none_in_a_batch(family: str, adapted: Any) -> None:
    one = adapted(family)
    assert_each_gets_its_own(one, one.engine())


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_with_drafts(family: str, adapted: Any) -> None:
    one = adapted(family)
    assert_each_gets_its_own(one, one.engine(), FREEDAVE)


def test_with_linear_spec(adapted: Any) -> None:
    """Drafts then have the request's adapter and the checkpoint's own."""
    one, options = adapted("nemotron_labs_diffusion"), {"dllm_verify": "linear_spec"}
    assert one.engine().llm_engine.model_config.hf_config.geometry.options.draft_adapter
    assert_each_gets_its_own(one, one.engine(), options, one.expected(params_of(options)))


def test_with_drafts_and_asynchronous_scheduling(adapted: Any) -> None:
    """Rows of drafts and commits that are not used are padding within each request's rows."""
    one = adapted("sdar")
    llm = one.engine(block_size=32, async_scheduling=True)
    assert_each_gets_its_own(one, llm)
    assert_each_gets_its_own(one, llm, FREEDAVE)


def test_with_guidance(adapted: Any) -> None:
    """The unconditional text has the adapter of its request, too."""
    one, options, dllm = adapted("llada"), {**STATIC, "dllm_cfg_scale": 1.5}, {"guidance": True, "max_drafts": 0}
    params = params_of(options)
    expected = [answers(one.engine(each, dllm=dllm), None, params) for each in (one.source, *one.merged)]
    assert expected != one.expected(params_of(STATIC))
    assert_each_gets_its_own(one, one.engine(dllm=dllm), options, expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_more_adapters_than_slots_take_turns(asynchronous: bool, adapted: Any) -> None:
    """Also where requests sit a step out, which is not to free the slot of their adapter."""
    one = adapted("sdar")
    slots = {"max_loras": 1, "max_cpu_loras": 2, "async_scheduling": asynchronous}
    assert_each_gets_its_own(one, one.engine(**slots))
    few_rows = {"dllm": {"max_drafts": 0}, "max_num_batched_tokens": 20}
    assert_each_gets_its_own(one, one.engine(**slots, **few_rows))


def test_the_prefix_cache_keeps_adapters_apart(adapted: Any) -> None:
    one = adapted("sdar")
    llm = one.engine(block_size=32)
    expected = one.expected(params_of(STATIC))
    params = params_of(STATIC)
    for _ in range(2):
        for adapter, wanted in zip((None, *one.adapters), expected, strict=True):
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False, lora_request=adapter
            )
            assert [tokens_of(output) for output in outputs] == wanted
    assert outputs[-1].num_cached_tokens > 0


@pytest.mark.slow
def test_with_two_ranks(adapted: Any) -> None:
    one = adapted("sdar")
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_num_seqs": 8}
    expected = one.expected(params_of(STATIC))
    with tensor_parallel_engine(one.source, dllm={"block_length": 8}, **options) as llm:
        assert_each_gets_its_own(one, llm, STATIC, expected)


def test_an_adapter_over_quantised_weights(adapted: Any, tmp_path: Path) -> None:
    """Its answers do not depend on the neighbours, and differ from those without the adapter."""
    one = adapted("sdar")
    write(one.source, tmp_path, Format.AWQ, exact=True)
    llm = engine(
        tmp_path,
        dllm={"block_length": 8, "max_drafts": 3},
        dtype="bfloat16",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_num_seqs=8,
    )
    params, choices = params_of(STATIC), (None, *one.adapters)
    alone = [answers(llm, [choice] * len(PROMPTS), params) for choice in choices]
    assert alone[0] != alone[1] != alone[2]
    mixed = answers(llm, [choices[row % 3] for row in range(len(PROMPTS))], params)
    assert mixed == [alone[row % 3][row] for row in range(len(PROMPTS))]


def test_an_adapter_over_int8_is_refused_by_name(adapted: Any, tmp_path: Path) -> None:
    write(adapted("sdar").source, tmp_path, Format.INT8)
    with pytest.raises(ValueError, match=r"quantization='compressed-tensors' of .*qkv_proj has INT8 weights"):
        LLM(str(tmp_path), enable_lora=True, **DEFAULTS)


def test_adapters_of_embeddings_and_heads_are_refused_by_name(adapted: Any, tmp_path: Path) -> None:
    one = adapted("llada")
    pair = random_adapter(one.source, re.compile(r"transformer\.ff_out$"), rank=4, seed=1, size=0.5)
    assert [*pair] == ["model.transformer.ff_out"]
    head = LoRARequest("head", 7, str(write_adapter(pair, tmp_path)))
    with pytest.raises(ValueError, match=r"expected target modules in .* but received .*lm_head"):
        one.engine().llm_engine.add_lora(head)
