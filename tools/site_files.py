"""Hook of mkdocs: the site also has what pages of ``docs`` link to elsewhere in the repository.

README.md is the site's first page. Other Markdown files become pages at their own path, further files are copied, and a
link to a folder becomes plain text, since a site lists no folders.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FIRST_PAGE = "README.md"

LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
"""An inline link or picture whose target is not an anchor alone."""

_repository_paths: dict[str, str] = {}
"""Where each page of the site stands in the repository."""


def site_path(path: str) -> str:
    """Where a file of the repository stands on the site."""
    return "index.md" if path == FIRST_PAGE else path.removeprefix("docs/")


def linked_path(page: str, target: str) -> str | None:
    """The path in the repository that a page of the repository links to; ``None`` if nothing is there."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    inside = "://" not in target and not path.startswith("..")
    return path if inside and (ROOT / path).exists() else None


def rewrite_links(page: str, text: str, met: Callable[[str], None] = lambda path: None) -> str:
    """Point the links of a page of the repository to where their targets stand on the site.

    Args:
        met: called with the path of every file that the page links to.
    """

    def rewritten(match: re.Match[str]) -> str:
        path = linked_path(page, match["target"])
        if path is None:
            return match[0]
        if (ROOT / path).is_dir():
            return match["text"][1:-1]
        met(path)
        target = posixpath.relpath(site_path(path), posixpath.dirname(site_path(page)) or ".")
        return f"{match['text']}({target}{match['anchor'] or ''})"

    return LINK.sub(rewritten, text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, and all that pages link to outside of ``docs``."""
    _repository_paths.clear()
    waiting = [FIRST_PAGE, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)

    def meet(path: str) -> None:
        if path not in seen:
            seen.add(path)
            waiting.append(path)

    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(site_path(path)) is None:
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            _repository_paths[site_path(path)] = path
            rewrite_links(path, (ROOT / path).read_text(encoding="utf-8"), meet)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    return rewrite_links(_repository_paths[page.file.src_uri], markdown)
