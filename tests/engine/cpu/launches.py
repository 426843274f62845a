"""Runs one vLLM function twice: on the Triton kernel, interpreted, and on what takes its place on CPU."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  # first of all, as in vLLM's CPU worker: plain memory for "UVA"
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_dllm.cpu import install as cpu

# Taken while tests are collected, before an engine in this process replaces any of them.
LAUNCHES = {replacement.symbol: (cpu.resolve(replacement), replacement) for replacement in cpu.REPLACEMENTS}


def run_both(
    monkeypatch: pytest.MonkeyPatch, symbol: str, function: str, *arguments: Any, **options: Any
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Call ``function``, which launches ``symbol`` or is it, on copies of the arguments.

    Returns ((result, arguments after the call) of Triton, the same of the replacement).
    """
    (owner, attribute, kernel), replacement = LAUNCHES[symbol]
    outcomes = []
    for launched in (kernel, cpu.stand_in_for(kernel, cpu.implementation(replacement))):
        monkeypatch.setattr(owner, attribute, launched)
        given = copy.deepcopy((arguments, options))
        outcomes.append((getattr(owner, function)(*given[0], **given[1]), given))
    return outcomes[0], outcomes[1]


def triton_method(symbol: str) -> Callable[..., Any]:
    """Return vLLM's own method ``Class.method``."""
    (_, _, method), _ = LAUNCHES[symbol]
    return method


def run_both_methods(symbol: str, tables: BlockTables, *arguments: Any) -> tuple[Any, Any]:
    """Call the method ``symbol`` on copies of ``tables``; returns both (result, tables) pairs."""
    _, replacement = LAUNCHES[symbol]
    outcomes = []
    for method in (triton_method(symbol), cpu.implementation(replacement)):
        target = copy.deepcopy(tables)
        target.init_block_table_layout_tensors()  # the addresses of the copies
        outcomes.append((method(target, *copy.deepcopy(arguments)), target))
    return outcomes[0], outcomes[1]


def assert_same(triton: Any, ours: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare nested results; tensors bit by bit unless told otherwise, with equal infinities."""
    if isinstance(triton, torch.Tensor):
        torch.testing.assert_close(ours, triton, rtol=rtol, atol=atol, equal_nan=True)
    elif isinstance(triton, tuple | list):
        assert len(triton) == len(ours)
        for left, right in zip(triton, ours, strict=True):
            assert_same(left, right, rtol=rtol, atol=atol)
    elif isinstance(triton, dict):
        assert_same(list(triton.values()), list(ours.values()), rtol=rtol, atol=atol)
    elif isinstance(triton, np.ndarray):
        np.testing.assert_array_equal(ours, triton)
    elif isinstance(triton, SimpleNamespace):
        assert_same(vars(triton), vars(ours), rtol=rtol, atol=atol)
    else:
        assert triton == ours
