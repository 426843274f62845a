"""What a benchmark writes: figures with a line per row, raw samples apart."""

import json
import sys
from pathlib import Path

import pytest

from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import record

RESULT = {
    "environment": {"cores": 2},
    "rows": [{"speed": 1.5, "at": {"p50": 1}}, {"speed": 2.0, "at": {"p50": 2}}],
    "runs": [{"right": 3, "samples": [{"at": 0.1}]}],
    "timings": [{"seconds": 1.0}],
}


def test_raw_samples_are_written_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RAW", tmp_path / "raw")
    record.write_result(RESULT, tmp_path / "figures" / "some.json")
    figures = json.loads((tmp_path / "figures" / "some.json").read_text())
    assert figures == {"environment": {"cores": 2}, "rows": RESULT["rows"], "runs": [{"right": 3}]}
    assert json.loads((tmp_path / "raw" / "some.json").read_text()) == RESULT


def test_a_row_has_a_line() -> None:
    lines = record.dumps(RESULT).splitlines()
    assert '    {"speed": 1.5, "at": {"p50": 1}},' in lines
    assert '  "environment": {"cores": 2},' in lines


def test_results_in_git_hold_no_samples() -> None:
    for file in record.RESULTS.glob("*.json"):
        result = json.loads(file.read_text())
        assert record.without_samples(result) == result, file.name
        assert file.read_text() == record.dumps(result) + "\n", file.name
