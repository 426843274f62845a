"""The package is built in layers: modules import from their own layer or from a lower one, and never in a circle.

Every import counts: those of a module, those inside of a function and those under ``TYPE_CHECKING``, because a reader
has to follow all of them. ``training/`` and ``tiny/``, which makes the bundled models, stand apart: they may import
everything, and nothing else may import them.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import vllm_dllm

PACKAGE = Path(vllm_dllm.__file__).parent

LAYERS = (
    {"", "plugin", "commands", "filled"},  # "" is the package's own __init__
    {"models"},
    {"runtime", "speculators"},
    {"observe"},
    {"patches"},
    {"options", "geometry"},
    {"kernels", "decoding"},
    {"cpu", "traits", "methods", "versions"},
)
"""Names directly under ``vllm_dllm``, from the top layer to the bottom layer."""

UPWARD: dict[tuple[str, str], str] = {
    ("observe.metrics", "runtime.plan.scratch"): "pages that the plan sets aside for drafts",
    ("observe.startup", "runtime.plan.scratch"): "pages that the plan sets aside for drafts",
    ("options.admission", "runtime.plan.spans"): "scheduler, row plan and admission count the rows of a request alike",
}
"""Imports that point upwards, (importer, imported): reason."""

LONGEST = {"file": 400, "class": 300, "function": 80}
"""Lines."""

LONGER: dict[str, str] = {}
"""``file`` or ``file:class or function`` that is longer: reason."""


def read_modules() -> dict[str, ast.Module]:
    """Syntax trees of all modules by their name inside of the package, ``runtime.sampler``; "" is the package."""
    trees = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


MODULES = read_modules()
APART = {"training", "tiny"}
LAYERED = sorted(name for name in MODULES if name.partition(".")[0] not in APART)


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Every dotted name that a module imports, at any depth: ``a.b`` and ``a.b.c`` for ``from a.b import c``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(name: str) -> set[str]:
    """Modules of the package that module ``name`` imports; packages with an empty ``__init__`` do not count."""
    inside = {dotted.removeprefix("vllm_dllm.") for dotted in imported_names(MODULES[name]) if dotted != "vllm_dllm"}
    return {dotted for dotted in inside & set(MODULES) if MODULES[dotted].body} - {name}


GRAPH = {name: imports_of(name) for name in LAYERED}


def layer_of(name: str) -> int:
    """0 is the top layer; what stands apart lies above it."""
    top = name.partition(".")[0]
    return -1 if top in APART else next(depth for depth, names in enumerate(LAYERS) if top in names)


def test_every_module_has_a_layer() -> None:
    assert {name.partition(".")[0] for name in LAYERED} <= set().union(*LAYERS)


def test_no_module_imports_from_a_higher_layer() -> None:
    upward = {(name, other) for name, others in GRAPH.items() for other in others if layer_of(other) < layer_of(name)}
    assert upward == set(UPWARD)


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("name", [name for name in LAYERED if name.startswith("decoding.")])
def test_algorithms_do_without_vllm(name: str) -> None:
    assert "vllm" not in {dotted.partition(".")[0] for dotted in imported_names(MODULES[name])}


def too_long() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith("training/"):
            continue
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > LONGEST["file"]:
            yield place
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                assert node.end_lineno is not None
                limit = LONGEST["class" if isinstance(node, ast.ClassDef) else "function"]
                if node.end_lineno - node.lineno + 1 > limit:
                    yield f"{place}:{node.name}"


def test_no_file_class_or_function_is_too_long() -> None:
    assert set(too_long()) <= set(LONGER)
