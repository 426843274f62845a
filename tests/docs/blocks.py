"""Fenced blocks of README.md and of the pages of ``docs``, and the shell commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

SHELL = frozenset({"console", "bash"})
"""Languages of blocks with commands. A block without a language is a formula, a picture or what a command prints."""

SEPARATORS = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<"})


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: file name of the page.
        line: line of the page on which the text begins.
        language: what follows the fence; empty if nothing does.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a block: its words without assignments of variables, and these assignments."""

    block: Block
    words: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        return f"{self.block} {' '.join(self.words)[:60]}"


def read_blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks of a page, from its top to its bottom."""
    lines = page.read_text(encoding="utf-8").splitlines()
    begin, indent, language = None, "", ""
    for number, line in enumerate(lines):
        fence = re.fullmatch(r"(\s*)```(\w*)", line)
        if fence and begin is None:
            begin, indent, language = number + 1, fence[1], fence[2]
        elif fence:
            text = "\n".join(each.removeprefix(indent) for each in lines[begin:number])
            yield Block(page.name, begin + 1, language, text + "\n")
            begin = None
    assert begin is None, f"{page.name}: a block does not end"


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def split_commands(text: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Words and variables of each command of a short script. ``NAME=value`` alone sets ``$NAME`` of the rest."""
    variables: dict[str, str] = {}
    line = ""
    for part in text.splitlines():
        line += part
        if part.endswith("\\"):
            line = line[:-1]
            continue
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation goes on
            line += "\n"
            continue
        line = ""
        command: list[str] = []
        for word in [*words, ";"]:
            if word not in SEPARATORS:
                command.append(word)
                continue
            environment = {}
            while command and (assignment := re.fullmatch(r"(\w+)=(.*)", command[0], re.DOTALL)):
                environment[assignment[1]] = assignment[2]
                command = command[1:]
            if command:
                yield command, environment
            else:
                variables |= environment
            command = []
    assert not line, f"a quotation does not end: {line}"


COMMANDS = [
    Command(block, words, environment)
    for block in BLOCKS
    if block.language in SHELL
    for words, environment in split_commands(block.text)
]
