"""Tables of benchmarks, in the terminal, in results and on the pages."""

import json
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.paths import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

import record
from environment import FILE_WIDTH
from sheet import Sheet, publish, wanted_sheet


def test_figures_go_between_the_marks_of_a_page_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = record.script_marks("step_skipping.py")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    for text in ("new", "newer"):
        record.write_docs(page, text, "/somewhere/step_skipping.py")
        assert page.read_text() == f"before\n{begin}\n\n{text}\n\n{end}\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="no place for the figures"):
        record.write_docs(page, "new", "step_skipping.py")


@pytest.mark.parametrize(
    ("page", "script"),
    [
        ("step-skipping", "step_skipping.py"),
        ("step-skipping", "short_blocks.py"),
        ("step-skipping", "psd.py"),
        ("draft-graphs", "draft_graphs.py"),
        ("fef", "fef.py"),
        ("full-attention", "full_attention.py"),
        ("deer", "deer.py"),
        ("s2d2", "s2d2.py"),
    ],
)
def test_the_documentation_has_a_place_for_the_figures(page: str, script: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    begin, end = record.script_marks(script)
    assert text.index(begin) < text.index(end)


def test_a_result_is_published_in_all_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RAW", tmp_path / "raw")
    page = tmp_path / "deer.md"
    page.write_text("\n".join(record.script_marks("deer.py")))
    sheet = Sheet("Speeds", ["system", "k", "speed"], [["DEER", "4", "2.00×"]])
    environment = {"date": "2026-01-02T03:04", "cpu": "a processor", "cores": 2}
    console = Console(width=FILE_WIDTH, file=StringIO(), record=True)
    publish(console, [sheet], {"environment": environment, "x": 1}, tmp_path / "out", page, "/a/deer.py")
    assert "2.00×" in console.export_text()
    assert json.loads((tmp_path / "out" / "deer.json").read_text())["x"] == 1
    assert "Measured 2026-01-02, a processor, 2 cores.\n\n**Speeds**" in page.read_text()


def test_a_target_is_reached_or_missed_or_not_known() -> None:
    rows = [("errors", "0", "0", True), ("speed", "above 1", "0.90", False), ("growth", "0", "", None)]
    assert [row[-1] for row in wanted_sheet(rows).rows] == ["pass", "miss", ""]
