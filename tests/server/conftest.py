"""The server of these tests and of ``tests/stress``: one process for all of them."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.paths import BUNDLED
from vllm_dllm.commands.engine import BUNDLED_MODEL

from .server import Server, serve


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first tiny-sdar, which has seen source code and goes on with any text for long; the bundled one ends it."""
    if not (BUNDLED_MODEL / "config.json").is_file():
        pytest.skip(f"there is no model in {BUNDLED_MODEL}")
    # The same in the folders that have these fixtures, which share the server.
    folder = tmp_path_factory.getbasetemp() / "checkpoints" / BUNDLED_MODEL.name
    folder.mkdir(parents=True, exist_ok=True)
    for source in (BUNDLED / "s2d2" / "sdar_tiny" / "checkpoint", BUNDLED_MODEL):
        for file in source.iterdir():
            if not (folder / file.name).exists():
                (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="session")
def config(checkpoint: Path) -> dict[str, Any]:
    """``config.json`` of the served model."""
    return json.loads((checkpoint / "config.json").read_text())


@pytest.fixture(scope="session")
def block_length(config: dict[str, Any]) -> int:
    return config["block_size"]


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


_running: list[tuple[ExitStack, Server]] = []
"""The server of this process, once it was asked for. ``tests/stress`` has these fixtures too, and shares it."""


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not _running:
        stack = ExitStack()
        _running.append(
            (stack, stack.enter_context(serve(checkpoint, tmp_path_factory.mktemp("serve") / "server.log")))
        )
    yield _running[0][1]
    # Both folders' fixtures end with the session; the first of them ends the server.
    _running[0][0].close()


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.connect() as connected:
        yield connected
