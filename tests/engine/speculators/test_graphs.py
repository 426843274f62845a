"""A drafter whose rounds run in graphs of fixed sizes drafts what it drafts without, as far as a CPU can show."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform

from tests.engine.harness import generate, runner_of, tokens_of
from tests.engine.speculators.engines import CONTEXTS, engine, sampled
from vllm_dllm.speculators import graphs
from vllm_dllm.speculators.graphs import DrafterGraphs, graphs_of

PROMPTS = [[1 + place % 20 for place in range(length)] for length in (37, 5, 64)]
SIZES = [8, 16, 40, 64]


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives an engine's speculator graphs of ``SIZES`` rows, whose replay is a call of the model."""

    def give(llm: Any) -> DrafterGraphs:
        speculator = runner_of(llm).speculator
        config = speculator.vllm_config.compilation_config
        monkeypatch.setattr(config, "cudagraph_capture_sizes", SIZES)
        monkeypatch.setattr(config, "max_cudagraph_capture_size", SIZES[-1])
        monkeypatch.setattr(type(current_platform), "_global_graph_pool", 0, raising=False)
        monkeypatch.setattr(graphs, "has_compiled_submodule", lambda model: True)
        speculator.init_cudagraph_manager(CUDAGraphMode.FULL_AND_PIECEWISE)
        made = speculator.graphs
        assert isinstance(made, DrafterGraphs)
        monkeypatch.setattr(speculator, "graphs", made)
        with mock.patch("vllm.v1.worker.gpu.cudagraph_utils.graph_capture"):
            speculator.capture()
        return made

    return give


@pytest.mark.parametrize(
    ("context", "length"), [*((context, "fixed") for context in CONTEXTS), ("block-causal", "failfast")]
)
def test_drafts_are_those_without_graphs(context: str, length: str, with_graphs: Any) -> None:
    speculative = {"draft_length": length, "draft_length_start": 2} if length == "failfast" else None
    llm = engine(context, "keep", speculative=speculative)
    speculator = runner_of(llm).speculator
    asked = (sampled(3), sampled(2, temperature=0.0))
    plain = [generate(llm, PROMPTS, params) for params in asked]
    made = with_graphs(llm)
    addresses, sizes = (made.input_ids.data_ptr(), made.positions.data_ptr()), []

    def replay(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
        assert (inputs["input_ids"].data_ptr(), inputs["positions"].data_ptr()) == addresses
        sizes.append(len(inputs["input_ids"]))
        # What stands in padding is no row's.
        return model(**inputs)

    with mock.patch.object(made, "run_pw_graph", replay):
        drafted = [generate(llm, PROMPTS, params) for params in asked]
    speculator.graphs = None
    for with_graph, without in zip(drafted, plain, strict=True):
        assert [tokens_of(output) for output in with_graph] == [tokens_of(output) for output in without]
    assert set(sizes) <= set(SIZES)
    assert len(set(sizes)) > 1


def test_each_size_is_captured_once_and_rounds_take_the_smallest_that_has_room(with_graphs: Any) -> None:
    llm = engine("causal", "keep")
    speculator = runner_of(llm).speculator
    taken: list[tuple[int, CUDAGraphMode]] = []
    run = speculator._run
    with mock.patch.object(
        speculator, "_run", lambda ids, *args: (taken.append((len(ids), args[-1])), run(ids, *args[:-1]))
    ):
        made = with_graphs(llm)
    speculator.graphs = None
    both = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE)
    assert taken == [(size, mode) for size in reversed(SIZES) for mode in both]
    for rows, size in ((1, 8), (8, 8), (9, 16), (17, 40), (64, 64)):
        ids, positions, mode = made.place(torch.arange(rows, dtype=torch.int32), torch.arange(rows))
        assert (len(ids), len(positions), mode) == (size, size, CUDAGraphMode.PIECEWISE)
        assert ids[:rows].tolist() == positions[:rows].tolist() == list(range(rows))
    given = torch.zeros(65, dtype=torch.int32)
    assert made.place(given, given.long())[0] is given


def test_an_engine_without_piecewise_graphs_has_none_for_the_drafter() -> None:
    llm = engine("causal", "keep")
    speculator = runner_of(llm).speculator
    config, model = speculator.vllm_config, speculator.model
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.PIECEWISE):
        # The last one is asked for, but this engine compiles nothing that could be cut in pieces.
        assert graphs_of(model, mode, config, speculator.device) is None
