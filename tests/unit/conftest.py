"""Tests that need no vLLM, and hold the code that they test to that."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SIMULATIONS = (
    "test_at_high_load_throughput",
    "test_a_single_request_is_nearly_as_fast",
    "test_a_request_alone_does_not_pay",
    "test_a_machine_that_halves_its_speed",
)
"""Thousands of simulated engine steps: `make test` runs them, `make test-unit` does not."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("unit")
            if item.name.startswith(SIMULATIONS):
                item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    before = "vllm" in sys.modules
    report = yield
    if isinstance(collector, pytest.Module) and "vllm" in sys.modules and not before:
        report.outcome, report.longrepr = "failed", f"{collector.nodeid} imports vLLM; its place is tests/engine"
    return report


@pytest.fixture(autouse=True)
def _no_vllm() -> Iterator[None]:
    before = "vllm" in sys.modules
    yield
    assert before or "vllm" not in sys.modules, "this test imports vLLM; its place is tests/engine"
