"""Python blocks and HTTP requests of the pages do what the pages say, and what they quote is what is answered."""

import ast
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import vllm

from tests.engine.shared import shared_engine
from tests.paths import ROOT
from tests.server.server import MODEL, Server
from vllm_dllm.options.errors import OptionError
from vllm_dllm.options.schema import parse_engine_options, parse_request_options

from .blocks import BLOCKS, COMMANDS, Block, Command

pytestmark = pytest.mark.slow

PYTHON = [block for block in BLOCKS if block.language == "python"]
OFFLINE = [block for block in PYTHON if re.search(r"^from vllm import LLM", block.text, re.MULTILINE)]
"""Whole programs with an engine of their own."""
SERVED = ("serving.md", "tutorial.md", "clients.md", "structured-outputs.md")
"""Pages whose Python blocks, one after the other, are a program that asks the server."""
ELSEWHERE = re.compile(r"^import litellm", re.MULTILINE)
"""Programs whose package does not go together with vLLM's."""
OF_OTHER_SERVERS = ("dllm_cfg_scale", '"suffix"', "load_lora_adapter")
CURLS = [
    command
    for command in COMMANDS
    if command.words[0] == "curl" and not any(name in " ".join(command.words) for name in OF_OTHER_SERVERS)
]
"""Requests for any model. `tests/server/test_full_attention.py` asks for what others refuse, and
`tests/server/test_adapters.py` for adapters."""


def for_test_server(text: str, server: Server) -> str:
    """What a page sends to its server, for the server of the tests."""
    return text.replace("http://localhost:8000", server.address).replace('"tiny-sdar"', f'"{MODEL}"')


@pytest.mark.parametrize("block", OFFLINE, ids=str)
def test_a_program_with_an_engine_prints_an_answer(
    block: Block, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    make, used = vllm.LLM, []

    def shared(*args: Any, **kwargs: Any) -> vllm.LLM:
        used.append(args)
        # The default takes most of the machine's memory, which the other tests' processes have too.
        return shared_engine(("docs", str(block)), lambda: make(*args, **{"kv_cache_memory_bytes": 64 << 20, **kwargs}))

    with mock.patch("vllm.LLM", shared):
        exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
    assert used
    assert capfd.readouterr().out.strip()


@pytest.mark.parametrize("block", OFFLINE, ids=str)
def test_a_program_with_an_engine_can_be_imported_by_the_processes_that_it_starts(block: Block) -> None:
    """vLLM's processes import the program again; an engine at its top level would start engines without end."""
    for statement in ast.parse(block.text).body:
        if not isinstance(statement, ast.FunctionDef | ast.If):
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            assert "LLM" not in names, "the main guard is missing"


def printed_by(block: Block) -> str | None:
    """The block without a language that follows: what the page says that the program prints."""
    following = BLOCKS[BLOCKS.index(block) + 1 :]
    if not following or following[0].page != block.page or following[0].language:
        return None
    between = following[0].line - block.line - block.text.count("\n")
    return following[0].text if between <= 3 else None


@pytest.mark.parametrize("page", SERVED)
def test_programs_of_a_page_run_one_after_the_other(
    page: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = [
        block for block in PYTHON if block.page == page and block not in OFFLINE and not ELSEWHERE.search(block.text)
    ]
    assert blocks
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(for_test_server(block.text, server), str(block), "exec"), namespace)
        printed = capsys.readouterr().out
        assert printed.strip()
        assert "None" not in printed
        if (expected := printed_by(block)) is not None:
            assert printed == expected, block


def request_of(command: Command, server: Server) -> urllib.request.Request:
    words = command.words
    (url,) = (word for word in words if word.startswith("http"))
    headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
    data = None
    if "-d" in words:
        body = json.loads(words[words.index("-d") + 1])
        data = json.dumps({**body, "model": MODEL, "max_tokens": min(40, body.get("max_tokens", 40))}).encode()
    return urllib.request.Request(url.replace("http://localhost:8000", server.address), data, headers)


@pytest.mark.parametrize("command", CURLS, ids=str)
def test_a_request_of_a_page_is_answered(command: Command, server: Server) -> None:
    with urllib.request.urlopen(request_of(command, server), timeout=60) as response:
        answer = response.read().decode()
    assert response.status == 200
    if "-d" in command.words:
        assert '"text":"' in answer or '"content":' in answer or '"content":[' in answer


def keywords(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Values of a keyword argument in the Python blocks that are only read."""
    for block in PYTHON:
        if block in OFFLINE:
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.keyword) and node.arg == name and isinstance(node.value, ast.Dict):
                yield str(block), ast.literal_eval(node.value)


def test_options_in_programs_are_options() -> None:
    engine, request = list(keywords("additional_config")), list(keywords("extra_args"))
    assert len(engine) > 3
    assert len(request) > 1
    for _, value in engine:
        parse_engine_options(value)
    for _, value in request:
        parse_request_options(value)


def quoted(page: str, beginning: str) -> str:
    """The line of a page that begins like this."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith(beginning))
    return line


def test_the_error_of_a_wrong_engine_option_is_the_quoted_one() -> None:
    with pytest.raises(OptionError) as error:
        parse_engine_options({"dllm": {"policy": "best"}})
    assert quoted("serving.md", "Value error, engine option") == f"Value error, {error.value}"


def test_the_error_of_a_wrong_request_option_is_the_quoted_one(server: Server) -> None:
    (block,) = (block for block in BLOCKS if block.page == "options.md" and block.text.startswith('{"error"'))
    body = {"model": MODEL, "prompt": "x", "vllm_xargs": {"dllm_threshold": 2}}
    request = urllib.request.Request(
        f"{server.address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    assert json.loads(error.value.read()) == json.loads(block.text)
