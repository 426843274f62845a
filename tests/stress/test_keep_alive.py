"""A server that stands still for a while, and what becomes of requests over connections that were idle before.

The HTTP server of ``vllm serve``, without an engine: whose connections are lost does not depend on one.
"""

import http.client
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import warm

pytestmark = pytest.mark.slow

SERVER = """
import asyncio, sys
from fastapi import FastAPI
from vllm import envs
from vllm.entrypoints.launchers import launcher

app = FastAPI()
app.state.engine_client = None
app.get("/health")(lambda: "well")

async def main():
    sock = launcher.create_server_socket(("127.0.0.1", int(sys.argv[1])), reuse_port=False)
    keep_alive = envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE  # as vllm serve does
    await (await launcher.serve_http(app, sock=sock, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning",
                                     timeout_keep_alive=keep_alive))

asyncio.run(main())
"""

CONNECTIONS = 30
STANDSTILL = 6.5
"""Seconds; vLLM's default lets a connection be idle for 5."""


def lost(log: Path, **environment: str) -> int:
    """Requests that got no answer, of one over each connection, sent while the server stood still."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"}
    server = warm.Process(["-c", SERVER, str(port)], stdout=log, env={**inherited, **environment})
    try:
        end = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.2)
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=30) for _ in range(CONNECTIONS)]
        for connection in connections:
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'"well"'
        time.sleep(0.3)
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(1)
        for connection in connections:
            connection.request("GET", "/health")
        time.sleep(STANDSTILL - 1)
        os.kill(server.pid, signal.SIGCONT)
        return sum(not _answered(connection) for connection in connections)
    finally:
        server.kill()
        server.wait()


def _answered(connection: http.client.HTTPConnection) -> bool:
    try:
        return connection.getresponse().read() == b'"well"'
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()


def test_a_standstill_loses_requests_over_connections_that_are_not_kept_for_longer(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        kept = pool.submit(lost, tmp_path / "kept", VLLM_HTTP_TIMEOUT_KEEP_ALIVE="300")
        # None are lost if the server was at work just then, and not waiting for requests.
        assert any(lost(tmp_path / "log") for _ in range(3))
    assert kept.result() == 0
