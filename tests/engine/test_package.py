"""The wheel that users install: every file that the package has in the repository, and its entry points."""

import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # A build leaves files behind, so it has a copy of what it reads.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "vllm_dllm", source / "vllm_dllm", ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "wheels",
        ".",
    ]
    subprocess.run(command, cwd=source, check=True)
    (path,) = (source / "wheels").iterdir()
    return zipfile.ZipFile(path)


def test_the_wheel_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "vllm_dllm"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert "vllm_dllm/py.typed" in tracked
    packed = {name for name in wheel.namelist() if name.startswith("vllm_dllm/")}
    assert set(tracked) - packed == set()


def test_the_wheel_has_the_entry_points_of_vllm(wheel: zipfile.ZipFile) -> None:
    (path,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    entry_points = ConfigParser()
    entry_points.read_string(wheel.read(path).decode())
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        assert set(entry_points[group]) == {"vllm_dllm", "dllm"}


def test_what_the_wheel_holds_runs_without_the_repository(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "import vllm_dllm, vllm_dllm.decoding.draft_graph as graphs, sys;"
        "print(vllm_dllm.__file__, graphs.default_graph('SDAR').family);"
        "from vllm_dllm.commands.cli import app; sys.argv = ['vllm-dllm', '--version']; app()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    where, version, vllm = done.stdout.splitlines()
    assert where == f"{tmp_path / 'vllm_dllm' / '__init__.py'} SDAR"
    assert version.startswith("vllm-dllm ")
    assert vllm.startswith("vllm")
