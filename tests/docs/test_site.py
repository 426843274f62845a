"""The site of the documentation builds, and every link and anchor of its pages leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``mkdocs build --strict``, which fails for a page outside of the navigation and for a link that leads nowhere."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def test_readme_is_the_first_page_and_what_it_shows_is_there(site: Path) -> None:
    html = (site / "index.html").read_text(encoding="utf-8")
    pictures = re.findall(r'<img alt="[^"]+" src="([^"]+)"', html)
    assert pictures
    assert all((site / picture).is_file() for picture in pictures)
    assert 'href="install/"' in html


def test_files_that_pages_link_to_are_copied(site: Path) -> None:
    linked = re.findall(r"\]\(\.\./(patches/[^)]+)\)", (ROOT / "docs/options.md").read_text(encoding="utf-8"))
    assert len(linked) > 10
    assert all((site / path).read_bytes() == (ROOT / path).read_bytes() for path in linked)


def test_readers_load_nothing_from_other_sites(site: Path) -> None:
    html = (site / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<(?:script|img|iframe)[^>]* src="(https?:[^"]*)"', html) == []
    assert re.findall(r'<link[^>]* rel="stylesheet"[^>]* href="(https?:[^"]*)"', html) == []
