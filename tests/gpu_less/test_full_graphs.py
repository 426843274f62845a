"""CUDA graphs with attention, on a CPU: a graph is a forward that is run again as it was captured.

A captured forward has the tensors of its capture: input buffers, metadata, block tables. Run again, it computes what
the graph would compute on a GPU. vLLM's own manager captures and chooses the graphs, and attention is vLLM's Triton
backend in Triton's interpreter, whose kernels read everything from those tensors.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

from tests.engine.harness import (
    bundled,
    case_params,
    drafting_engine,
    engine_of,
    generate,
    golden,
    nfe_of,
    runner_of,
    tokens_of,
)
from tests.engine.runtime import test_isd
from tests.engine.runtime.test_s2d2 import assert_as, model_of, options_of, params_of, s2d2_engine
from tests.gpu_less.test_triton_attention import CONFIGURATIONS, assert_triton, cheapest, triton_attention
from tests.reference.s2d2 import Rule, decode

__all__ = ["triton_attention"]


class Captured:
    """A graph: a forward as it was captured, and how often it has been replayed."""

    def __init__(self, forward: Callable[[CUDAGraphMode], None]) -> None:
        self.forward, self.count = forward, 0

    def replay(self) -> None:
        self.count += 1
        self.forward(CUDAGraphMode.NONE)


@torch.inference_mode()
def capture(self: CudaGraphManager, create_forward: Any, *_: Any) -> None:
    """Stands for vLLM's: what a GPU would record is kept as it is."""
    for desc in self._capture_descs[CUDAGraphMode.FULL]:
        forward = create_forward(desc, warmup=False)
        forward(CUDAGraphMode.NONE)
        self.graphs[desc] = Captured(forward)
    self._graphs_captured = True


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM, list[int]], ModelCudaGraphManager]:
    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _: None)

    def capture_of(llm: LLM, sizes: list[int]) -> ModelCudaGraphManager:
        runner = runner_of(llm)
        config = runner.vllm_config.compilation_config
        monkeypatch.setattr(config, "cudagraph_capture_sizes", sizes)
        monkeypatch.setattr(config, "max_cudagraph_capture_size", max(sizes))
        manager = ModelCudaGraphManager(
            runner.vllm_config,
            runner.device,
            CUDAGraphMode.FULL_DECODE_ONLY,
            decode_query_len=runner.decode_query_len,
            varlen_decode=False,
        )
        state = runner.model_state
        state.make_graph_views(max(sizes), runner.block_tables)
        parts = (runner.input_buffers, None, runner.block_tables, runner.attn_groups, runner.kv_cache_config)
        manager.capture(runner.model, state, *parts)
        monkeypatch.setattr(runner, "cudagraph_manager", manager)
        return manager

    return capture_of


@pytest.mark.parametrize(("family", "drafts"), [("sdar", 0), ("sdar", 3), ("fast_dllm_v2", 0)])
def test_steps_in_graphs_give_the_golden_tokens(family: str, drafts: int, with_graphs: Any) -> None:
    fixed = CONFIGURATIONS[family]
    cases = [c for c in golden(family).cases if (c.options.block_length, c.options.sub_block_length) == fixed]
    cases = cheapest(cases, 1 if drafts else 2)
    options = cases[0].options
    llm = (drafting_engine if drafts else engine_of)(golden(family), options, seed=21)
    assert_triton(llm)
    length = options.block_length
    # The second one is of more blocks than the requests have groups: a block and a commit, or a block and drafts.
    manager = with_graphs(llm, [2 * length, 5 * length])
    params = [case_params(case) for case in cases]
    if drafts:
        for each in params:
            each.extra_args |= {"dllm_verify": "freedave", "dllm_drafts": drafts + 1}
    outputs = generate(llm, [c.prompt for c in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        assert tokens_of(output) == case.tokens, case.name
    # All of them but those beside which a prompt is computed, the first block of a prompt included.
    assert sum(graph.count for graph in manager.graphs.values()) >= max(map(nfe_of, outputs)) - 1


def test_strides_in_graphs(with_graphs: Any) -> None:
    """All rows are causal, in graphs too."""
    llm = test_isd.engine_of(seed=21)
    assert_triton(llm)
    manager = with_graphs(llm, [7, 14])
    prompts = [test_isd.prompt_of(length) for length in (9, 20)]
    outputs = test_isd.assert_as_reference(llm, prompts, [test_isd.params(14)] * 2)
    assert sum(graph.count for graph in manager.graphs.values()) >= max(map(nfe_of, outputs)) - 1


def test_the_causal_rows_of_a_block_in_graphs(with_graphs: Any) -> None:
    """S2D2's ``causal_drafts``: a block has two views, and only the device knows where the first of them ends."""
    options, rule = options_of("sdar"), Rule(window=2, causal_drafts=True)
    checkpoint, prompt, tokens = bundled("sdar").checkpoint, [485, 77, 202, 333, 24, 37], 10
    llm = s2d2_engine(checkpoint, options, dllm={"window": 2, "causal_drafts": True}, seed=21)
    assert_triton(llm)
    manager = with_graphs(llm, [2 * options.block_length, 5 * options.block_length])
    (output,) = generate(llm, [prompt], [params_of(options, rule, max_tokens=tokens)])
    rules = rule, replace(rule, causal_drafts=False)
    expected, other = (decode(model_of(checkpoint), prompt, tokens, options, each) for each in rules)
    assert expected.nfe != other.nfe, "the causal rows change nothing"
    assert_as(expected, output, rule)
    assert sum(graph.count for graph in manager.graphs.values()) >= expected.nfe - 1
