"""Clients of ``docs/clients.md`` that cannot be installed beside vLLM, by their requests; and ``vllm bench serve``."""

import asyncio
import json
import urllib.request
from typing import Any

import pytest
from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.paths import ROOT
from tests.server.server import MODEL, Server

from .blocks import BLOCKS, COMMANDS, Block

pytestmark = pytest.mark.slow

BODIES = [block for block in BLOCKS if block.page == "clients.md" and block.language == "json"]


@pytest.mark.parametrize("block", BODIES, ids=str)
def test_the_request_of_a_client_is_answered(block: Block, server: Server) -> None:
    body = {**json.loads(block.text), "model": MODEL}
    request = urllib.request.Request(
        f"{server.address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        (choice,) = json.load(response)["choices"]
    assert "####" in choice["message"]["content"]


def test_vllm_measures_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = (command for command in COMMANDS if command.words[:3] == [".venv/bin/vllm", "bench", "serve"])
    words = [word.replace("http://localhost:8000", server.address) for word in command.words[3:]]
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    arguments = parser.parse_args([MODEL if word == "tiny-sdar" else word for word in words])
    monkeypatch.chdir(ROOT)
    result: dict[str, Any] = asyncio.run(main_async(arguments))
    assert result["completed"] == arguments.num_prompts
    assert result["failed"] == 0
    printed = capsys.readouterr().out
    assert "Denoising steps per canvas" in printed
    assert "Committed per denoising step" in printed
