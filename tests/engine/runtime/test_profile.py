"""What vLLM does on a GPU to measure its memory, before there is a K/V cache."""

from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu import model_runner

from tests.engine.harness import MASK, drafting_engine, generate, greedy, runner_of, tokens_of
from tests.reference.decode import Options
from vllm_dllm.kernels.confidence import Draws, RowStats
from vllm_dllm.kernels.row_stats import row_stats
from vllm_dllm.runtime.logits import rows
from vllm_dllm.runtime.logits.truncation import ROWS

OPTIONS = Options(block_length=8, mask_id=MASK)
MANY_ROWS = 4096
"""Of logits, many more than requests."""


@torch.inference_mode()
def test_the_sampler_is_profiled_with_more_rows_than_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting_engine("sdar", OPTIONS, max_num_seqs=8)
    (before,) = generate(llm, [[1, 2, 3]], greedy(OPTIONS))
    runner = runner_of(llm)
    taken: list[torch.Size] = []
    # vLLM 0.33 profiles sampling parameters, too, but not on a CPU.
    monkeypatch.setattr(model_runner, "current_platform", SimpleNamespace(is_cpu=lambda: False), raising=False)
    monkeypatch.setattr(runner.model_state, "layout", None)
    monkeypatch.setattr(runner.sampler, "_take_memory", lambda logits: taken.append(logits.shape))
    with mock.patch.object(runner.model_state, "plan", None):
        runner._dummy_sampler_run(torch.zeros(MANY_ROWS, runner.model_config.get_hidden_size()))
    assert taken
    assert set(taken) == {torch.Size((MANY_ROWS, runner.model_config.get_vocab_size()))}
    monkeypatch.undo()
    # Nothing of these requests stays.
    (after,) = generate(llm, [[1, 2, 3]], greedy(OPTIONS))
    assert tokens_of(after) == tokens_of(before)


@torch.inference_mode()
def test_what_sampling_parameters_take_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = runner_of(drafting_engine("sdar", OPTIONS, max_num_seqs=8)).sampler.reader
    logits = torch.randn(70, 512).bfloat16()
    before, taken = logits.clone(), list[tuple[int, bool]]()
    original = topk_topp_sampler.apply_top_k_top_p

    def apply(some: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
        taken.append((len(some), top_k is not None))
        return original(some, top_k, top_p)

    monkeypatch.setattr(topk_topp_sampler, "apply_top_k_top_p", apply)
    reader.take_memory(logits)
    assert torch.equal(logits, before)
    # All 70 rows with `top_p` alone, and with `top_k` beside it.
    assert taken == [(ROWS, False)] * 2 + [(ROWS, True)] * 2


@torch.inference_mode()
def test_the_kernels_of_all_statistics_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a kernel is compiled when it is launched first. No request is to wait for that."""
    reader = runner_of(drafting_engine("sdar", OPTIONS, max_num_seqs=8)).sampler.reader
    ways = set()

    def measure(logits: torch.Tensor, draws: Draws | None, **how: Any) -> RowStats:
        drawn = None if draws is None else "applied" if draws.temperature_applied else "drawn"
        ways.add((logits.dtype, drawn, how["with_entropy"], how["with_margin"]))
        return row_stats(logits, draws, **how)

    monkeypatch.setattr(rows, "row_stats", measure)
    reader.take_memory(torch.randn(70, 512).bfloat16())
    plain = set(product([torch.bfloat16], [None, "drawn"], [False, True], [False, True]))
    assert ways == plain | set(product([torch.float32], [None, "applied"], [False, True], [False, True]))
