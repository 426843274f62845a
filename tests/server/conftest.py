"""The server of these tests: one process for all of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from vllm_dllm.commands.cli import BUNDLED_MODEL

from .server import Server, serve


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    if not (BUNDLED_MODEL / "config.json").is_file():
        pytest.skip(f"there is no model in {BUNDLED_MODEL}")
    return BUNDLED_MODEL


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


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(checkpoint, tmp_path_factory.mktemp("serve") / "server.log") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.connect() as connected:
        yield connected
