"""A pytest plugin: processor seconds by test file, which say what a test costs on a machine that is busy too.

``pytest -p tests.cpu_seconds ...`` prints them at the end, child processes included. Programs
that start warm (`tests.warm`) are no children.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

_seconds: defaultdict[str, float] = defaultdict(float)


def _now() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _now()
    try:
        return (yield)
    finally:
        _seconds[item.nodeid.split("::")[0]] += _now() - before


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """pytest-xdist's process has ended: take its figures."""
    for file, seconds in getattr(node, "workeroutput", {}).get("cpu_seconds", {}).items():
        _seconds[file] += seconds


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["cpu_seconds"] = dict(_seconds)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("processor seconds by file")
    for file, seconds in sorted(_seconds.items(), key=lambda pair: -pair[1]):
        terminalreporter.write_line(f"{seconds:8.1f}  {file}")
    terminalreporter.write_line(f"{_now():8.1f}  in all, with imports and collection")
