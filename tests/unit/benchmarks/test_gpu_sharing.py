"""Engines of the GPU benchmark that share a device: who starts, who is timed, and what memory they take."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from rich.console import Console

from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import gpu
from gpu_cells import FULL_SCALE, Cell, Dtype, Level, golden
from gpu_shapes import SHAPES, Model
from gpu_sharing import Memory, engine_bytes, hold

CELL = Cell(Model.SDAR_8B, levels=(Level(4, 3), Level(8, 1)))


def test_engines_start_together_and_are_timed_alone(tmp_path: Path) -> None:
    """Two processes lock the file as cells do."""
    script = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from gpu_sharing import hold\n"
        "def tell(what): print(what, time.monotonic(), flush=True)\n"
        f"lock = {str(tmp_path / 'lock')!r}\n"
        "print('ready', flush=True); input()\n"
        "with hold(lock, alone=False):\n    tell('starts'); time.sleep(2); tell('started')\n"
        "with hold(lock, alone=True):\n    tell('works'); time.sleep(0.5); tell('done')\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    told = [
        {what: float(when) for what, when in map(str.split, process.communicate()[0].splitlines())}
        for process in processes
    ]
    first, second = sorted(told, key=lambda each: each["works"])
    assert max(first["starts"], second["starts"]) < min(first["started"], second["started"])
    assert max(first["started"], second["started"]) <= first["works"]
    assert first["done"] <= second["works"]


def test_an_interrupted_command_ends_all_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run, those that wait for memory, and those that wait for a place."""
    file = tmp_path / "worker.py"
    file.write_text(
        "import json, sys, time\n"
        "job = json.loads(sys.stdin.readline())\n"
        "print('{}', flush=True); time.sleep(0 if job['cell']['drafts'] == 1 else 60)\n"
    )
    monkeypatch.setattr(gpu, "WORKER", file)
    plan = [replace(CELL, drafts=drafts) for drafts in range(8)]

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    begin = time.monotonic()
    two_engines = 70 << 30
    with pytest.raises(KeyboardInterrupt):
        gpu.run_plan(plan, FULL_SCALE, SHAPES, begin + 300, 300.0, Console(quiet=True), interrupt, two_engines)
    assert time.monotonic() - begin < 30
    assert not gpu.RUNNING


def test_an_engine_by_itself_holds_no_lock() -> None:
    with hold("", alone=True), hold("", alone=True):
        pass


def test_engines_take_no_more_memory_than_there_is() -> None:
    memory, changes = Memory(10), []

    def take(amount: int) -> None:
        with memory.take(amount):
            changes.append(min(amount, 10))
            time.sleep(0.02)
            changes.append(-min(amount, 10))

    with ThreadPoolExecutor(8) as pool:
        # An engine that needs more than there is runs by itself.
        list(pool.map(take, [6, 4, 6, 3, 3, 12, 5]))
    taken = list(accumulate(changes))
    assert max(taken) == 10
    assert taken[-1] == 0


def test_an_engine_has_room_for_its_requests_at_the_level_that_needs_most(tmp_path: Path) -> None:
    def job(cell: Cell, *, shared: bool = True) -> gpu.Job:
        return gpu.make_job(cell, FULL_SCALE, SHAPES, tmp_path, shared=shared)

    shape = SHAPES[Model.SDAR_8B]
    of_position = 2 * shape.kv_entries
    plain, drafting = job(CELL), job(replace(CELL, drafts=3))
    assert plain.kv_bytes == of_position * 8 * (512 + 64 + 32)
    assert drafting.kv_bytes == of_position * 8 * (512 + 64 * 4 + 4 * 32)
    assert job(replace(CELL, dtype=Dtype.FLOAT32)).kv_bytes == 2 * plain.kv_bytes
    assert job(replace(CELL, levels=(Level(1, 1),))).kv_bytes > of_position * 4096
    assert engine_bytes(plain) > 2 * shape.parameters.total + plain.kv_bytes
    assert plain.lock == drafting.lock != ""
    by_itself = job(CELL, shared=False)
    assert (by_itself.kv_bytes, by_itself.lock) == (0, "")
    assert job(golden(4)).kv_bytes == 0
    assert engine_bytes(job(golden(4))) < engine_bytes(plain)
