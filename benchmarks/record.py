"""What a benchmark writes: the figures of its tables, which are kept in git, and its raw samples, which are not."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = ROOT / "checkpoints"
"""Of the bundled models."""
RESULTS = ROOT / "benchmarks" / "results"
"""Figures behind the tables of ``docs``."""
RAW = ROOT / "build" / "raw"
"""Everything that the benchmarks of this checkout have measured. Git ignores the folder."""

SAMPLES = frozenset({"samples", "timings", "functions"})
"""Keys of raw samples and profiles, wherever they stand in a result."""


def marks(writer: str) -> tuple[str, str]:
    """What stands on a page before and behind the place that a program writes to."""
    return f"<!-- Written by {writer}. Do not edit. -->", f"<!-- End of what {writer} wrote. -->"


def replace_marked(page: str, text: str, writer: str) -> str:
    """A page with ``text`` between the marks of a program.

    Raises:
        ValueError: the page lacks them.
    """
    begin, end = marks(writer)
    if begin not in page or end not in page:
        raise ValueError(f"the page has no place for the figures, between {begin!r} and {end!r}")
    before, rest = page.split(begin, 1)
    after = rest.split(end, 1)[1]
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def script_marks(script: str) -> tuple[str, str]:
    """The marks of a script of this folder, such as ``__file__``."""
    return marks(_script_name(script))


def write_docs(page: Path, text: str, script: str) -> None:
    """Replace what stands between the two marks of a script on a page.

    Raises:
        ValueError: the page lacks them.
    """
    page.write_text(replace_marked(page.read_text(), text, _script_name(script)))


def _script_name(script: str) -> str:
    return f"benchmarks/{Path(script).name}"


def write_result(result: dict[str, Any], path: Path) -> None:
    """Write a result without its samples, and the whole of it into ``RAW`` under the same name."""
    for file, content in ((path, without_samples(result)), (RAW / path.name, result)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dumps(content) + "\n")


def without_samples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_samples(inner) for key, inner in value.items() if key not in SAMPLES}
    return [without_samples(inner) for inner in value] if isinstance(value, list) else value


def dumps(value: Any, indent: str = "") -> str:
    """JSON with a line per row: a list of records or a record of records has a line for each of them."""
    inner = indent + "  "
    match value:
        case dict() if not indent or any(_is_table(each) for each in value.values()):
            parts = [f"{inner}{json.dumps(key)}: {dumps(each, inner)}" for key, each in value.items()]
            return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
        case list() if _is_table(value):
            return "[\n" + ",\n".join(inner + dumps(each, inner) for each in value) + f"\n{indent}]"
    return json.dumps(value)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)
