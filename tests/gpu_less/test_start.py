"""What a GPU worker does when it starts and a CPU worker does not, on a CPU: warm-up, dummy steps, graph capture."""

from itertools import product
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
from vllm.v1.worker.gpu.warmup import warmup_kernels

from tests.engine.harness import generate, runner_of, tokens_of
from tests.engine.runtime import test_isd
from tests.engine.speculators.engines import CACHES, CONTEXTS, sampled
from tests.engine.speculators.engines import engine as engine_with_drafter
from tests.gpu_less.replay import replayed, replayed_drafter
from tests.gpu_less.test_steps import BLOCKS, ENGINES, FULL_ATTENTION, PROMPTS, VERIFIERS, engine_called, params

SIZES = (512, 256, 40, 8, 1)
"""Rows of dummy steps."""
UNUSED: dict[str, Any] = {
    # vLLM turns its warm-up off where a user asks for eager mode.
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"},
}
"""Options of engines that no other test asks for: vLLM's warm-up takes the slots of an engine without requests."""


@torch.inference_mode()
def start_as_on_a_gpu(llm: LLM) -> None:
    runner = runner_of(llm)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    assert worker.vllm_config.kernel_config.enable_jit_warmup
    warmup_kernels(runner, worker.execute_model, worker.sample_tokens)
    for rows in SIZES:
        runner._dummy_run(min(rows, runner.max_num_tokens))
    runner._dummy_run(runner.decode_query_len, uniform_decode=True)
    state = runner.model_state
    # A drafter's target is an autoregressive model of vLLM's.
    if has_full_graphs := getattr(state, "spans", True) is None:
        state.make_graph_views(max(SIZES), runner.block_tables)
    for rows, full in product(SIZES, (False, True) if has_full_graphs else (False,)):
        prepare_inputs_to_capture(
            min(rows, runner.max_num_reqs),
            min(rows, runner.max_num_tokens),
            runner.model_state,
            runner.input_buffers,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            full_cudagraph=full,
        )


WINDOW = {"generation_window": 32}
"""Of full attention, so that the requests of vLLM's warm-up, which are longer, fit ``max_model_len``."""


def unused_engine(name: str, *, drafts: bool, **more: Any) -> LLM:
    dllm = WINDOW if name in FULL_ATTENTION else {}
    return engine_called(name, drafts=drafts, dllm=dllm, **{"max_model_len": 256, **UNUSED, **more})


def assert_starts(llm: LLM, other: LLM, drafts: bool) -> None:
    """The start runs, on a GPU too, and leaves nothing behind that an answer could depend on."""
    with replayed(llm) as found:
        start_as_on_a_gpu(llm)
    assert found.problems() == {}
    assert found.different == []
    asked = params(VERIFIERS["freedave"] if drafts else {})
    answers = [[tokens_of(output) for output in generate(engine, PROMPTS, asked)] for engine in (llm, other)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_start(engine: str, drafts: bool) -> None:
    other = engine_called(engine, drafts=drafts, dllm=WINDOW if engine in FULL_ATTENTION else {})
    assert_starts(unused_engine(engine, drafts=drafts), other, drafts)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("engine", BLOCKS)
def test_asynchronous_start(engine: str, drafts: bool) -> None:
    other = engine_called(engine, drafts=drafts)
    assert_starts(unused_engine(engine, drafts=drafts, async_scheduling=True), other, drafts)


def test_start_with_strides() -> None:
    llm = test_isd.engine_of(max_model_len=256, async_scheduling=True, **UNUSED)
    assert_starts(llm, test_isd.engine_of(async_scheduling=True), drafts=False)


@pytest.mark.parametrize("max_model_len", [168, 169])
def test_requests_of_the_warm_up_fit(max_model_len: int) -> None:
    """A prompt of 1 + 4 windows, and 5 more steps; a window of 32 positions and 3 drafts, blocks of 8."""
    llm = unused_engine("dream", drafts=True, max_model_len=max_model_len)
    assert runner_of(llm).vllm_config.kernel_config.enable_jit_warmup == (max_model_len == 169)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_start_of_a_drafter(context: str, cache: str) -> None:
    llm = engine_with_drafter(context, cache, **UNUSED)
    with replayed_drafter(llm) as found:
        start_as_on_a_gpu(llm)
    assert found.problems() == {}
    greedy = sampled(3, temperature=0.0)
    prompt = [1, 2, 3]
    assert tokens_of(generate(llm, [prompt], greedy)[0]) == tokens_of(
        generate(engine_with_drafter(context, cache), [prompt], greedy)[0]
    )
