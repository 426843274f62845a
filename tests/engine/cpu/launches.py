"""Runs one vLLM function twice: with its Triton kernel, interpreted, and with the fallback for a CPU."""

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  # first of all, as in vLLM's CPU worker: plain memory for "UVA"
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_dllm.cpu import fallbacks

Function = Callable[..., Any]


class Launch(NamedTuple):
    """A symbol of vLLM, where to find it, and its fallback in vLLM's own form."""

    owner: Any
    attribute: str
    original: Function
    fallback: Function


def _launch(symbol: str) -> Launch:
    found = fallbacks.find(symbol, fallbacks.FALLBACKS[symbol])
    fallback = KernelOverride(found.original, found.fallback) if found.is_kernel else found.fallback
    return Launch(found.owner, found.attribute, found.original, fallback)


# Taken while tests are collected, before an engine in this process replaces any of them.
LAUNCHES = {re.sub(r"^[a-z0-9_.]+\.(?=\w+$|[A-Z])", "", symbol): _launch(symbol) for symbol in fallbacks.FALLBACKS}
"""By the name inside of the module: ``_min_p_kernel``, ``BlockTables.gather_block_tables``."""


def run_both(
    monkeypatch: pytest.MonkeyPatch, symbol: str, function: str, *arguments: Any, **options: Any
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Call ``function``, which launches ``symbol`` or is it, on copies of the arguments.

    Returns ((result, arguments after the call) of Triton, the same of the fallback).
    """
    launch = LAUNCHES[symbol]
    outcomes = []
    for launched in (launch.original, launch.fallback):
        monkeypatch.setattr(launch.owner, launch.attribute, launched)
        given = copy.deepcopy((arguments, options))
        outcomes.append((getattr(launch.owner, function)(*given[0], **given[1]), given))
    return outcomes[0], outcomes[1]


def run_both_methods(symbol: str, tables: BlockTables, *arguments: Any) -> tuple[Any, Any]:
    """Call the method ``symbol`` on copies of ``tables``; returns both (result, tables) pairs."""
    outcomes = []
    for method in (LAUNCHES[symbol].original, LAUNCHES[symbol].fallback):
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
