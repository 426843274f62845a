"""What a server logs from its start to its end: nothing that looks like a fault."""

import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import httpx
import openai
import pytest

from .ask import CODE, completion
from .server import MODEL, Server, serve

pytestmark = pytest.mark.slow

USERS = (
    "Enforce eager set",  # the test's flag
    "Inductor compilation was disabled by user settings",
)
MACHINES = ("Found ulimit", "libtcmalloc is not found", "libiomp is not found")
"""Warnings about what the machine lacks, by vLLM."""
MOST_OTHERS = 1
"""vLLM's about a kind of model that is not served."""


def serve_as_users_do(checkpoint: Path, log: Path) -> AbstractContextManager[Server]:
    """A server without what an engine of this process has left in the environment, and vLLM warns of."""
    os.environ.pop("VLLM_DIST_IDENT", None)
    return serve(checkpoint, log, is_warm=False)


@pytest.fixture(scope="module")
def log(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a server that refused requests, and was told to end (SIGTERM) in the midst of a stream."""
    path = tmp_path_factory.mktemp("stop") / "server.log"
    with mock.patch.dict(os.environ), serve_as_users_do(checkpoint, path) as server, server.connect() as client:
        for stream in (False, True):
            body = {"vllm_xargs": {"dllm_policy": "best"}, "stream": stream}
            with pytest.raises(openai.BadRequestError, match="best"):
                client.completions.create(**completion(CODE, stream=stream, dllm_policy="best"))
            with pytest.raises(openai.BadRequestError, match="best"):
                client.responses.create(model=MODEL, input=CODE, extra_body=body)
            message = {"model": MODEL, "messages": [{"role": "user", "content": CODE}], "max_tokens": 9, **body}
            answer = httpx.post(f"{server.address}/v1/messages", json=message)
            assert answer.status_code == 400
            assert "best" in answer.json()["error"]["message"]
        scoring = {"model": MODEL, "query": CODE, "items": ["x"], "label_token_ids": [5, 6]}
        assert httpx.post(f"{server.address}/generative_scoring", json=scoring).status_code == 400
        going_on = client.completions.create(**completion(CODE, stream=True, max_tokens=400, dllm_policy="static"))
        next(iter(going_on))
    return path.read_text()


def test_a_server_that_was_told_to_end_logs_no_error(log: str) -> None:
    assert "[shutdown] API server: shutdown triggered" in log
    assert "Application shutdown complete" in log
    ugly = re.compile(r" (ERROR|CRITICAL) |Traceback|nanobind|Exception ignored")
    assert [line for line in log.splitlines() if ugly.search(line)] == []


def test_a_refused_message_is_one_line_of_the_log(log: str) -> None:
    told = [line for line in log.splitlines() if "Refused a request" in line]
    assert all(" INFO " in line for line in told)
    assert ["policy='best'" in line for line in told] == [True, True, False]


def test_the_start_warns_of_nothing_that_is_ours(log: str) -> None:
    warnings = {line.split("] ", 1)[1] for line in log.splitlines() if re.match(r"\(\w.* WARNING ", line)}
    others = [warning for warning in warnings if not warning.startswith((*USERS, *MACHINES))]
    assert len(others) <= MOST_OTHERS, others
    assert not any("scheduler" in warning or "Triton" in warning or "dllm" in warning for warning in warnings)
