"""The server of the pages: that of the server tests, but with the model that the pages name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import block_length, client, config, tokenizer
from tests.server.server import Server, serve
from vllm_dllm.commands.engine import BUNDLED_MODEL

__all__ = ["block_length", "client", "config", "tokenizer"]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return BUNDLED_MODEL


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(checkpoint, tmp_path_factory.mktemp("serve-pages") / "server.log") as running:
        yield running
