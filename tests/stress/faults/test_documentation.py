"""The page on reliability names tests that there are."""

import ast
import re

import pytest

from tests.paths import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
TESTS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+)(?:\[([^]`]+)\])?)?`", PAGE)
"""File, function and case of each test that the page names."""


def test_every_fault_of_the_table_has_a_test() -> None:
    table = PAGE.partition("## Faults")[2].partition("\n\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::test_\w+", row)] == []


@pytest.mark.parametrize("test", sorted(set(TESTS)), ids=lambda test: "::".join(filter(None, test)))
def test_a_test_that_the_page_names_is_there(test: tuple[str, str, str]) -> None:
    file, function, case = test
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    if function:
        assert function in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    if case:
        assert case in {node.value for node in ast.walk(module) if isinstance(node, ast.Constant)}
