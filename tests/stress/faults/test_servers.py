"""Processes of a server that are killed, and servers that cannot start: who is told what, how soon; what is left."""

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import openai
import psutil
import pytest

from tests import warm
from tests.server.ask import completion
from tests.server.server import FLAGS, START_DEADLINE, Server, serve

from .checkpoints import SDAR, with_tensors

pytestmark = pytest.mark.slow

DEADLINE = 30.0
"""Seconds from the fault to the message. vLLM gives a hanging worker 5 of them; a busy machine takes the others."""
ENDING = 60.0
"""Seconds from the message to the end of the last process. Python takes a while to leave on a busy machine."""
RAY_AGENTS_STARTING = 60.0
"""Seconds that Ray's agents may take to be there once the server is."""
RAY_AGENTS_ENDING = 120.0
"""Seconds more for Ray's agents: if Ray's store ends before them, they seek it for a minute."""
LONG = 450
"""Tokens of answers that nobody gets whole."""
CLIENTS = 24
"""Requests at once, six times as many as are decoded at once. Half of them stream."""
SLOWLY: dict[str, Any] = {"dllm_policy": "static", "dllm_tokens_per_step": 1}
VLLM = str(Path(sys.executable).with_name("vllm"))
DIED = ("EngineCore encountered an issue", "The server had an error while processing your request")
"""What vLLM tells the clients of an engine that died: up to 0.32, and from 0.33 on."""


class Ending(NamedTuple):
    """How a request ended."""

    error: openai.OpenAIError | None
    tokens: int
    """That had come by then."""
    seconds: float
    """After the fault."""


def processes_of(server: Server) -> dict[str, psutil.Process]:
    """The server's processes by name: ``EngineCore``, ``Worker_TP0`` and so on, those of Python's own apart."""
    named = {title.removeprefix("VLLM::"): child for title, child in titles_of(server)}
    return {name: child for name, child in named.items() if re.match("EngineCore|Worker", name)}


def titles_of(server: Server) -> list[tuple[str, psutil.Process]]:
    """All processes of the server, with what they call themselves."""
    children = psutil.Process(server.pid).children(recursive=True)
    return [(title_of(child), child) for child in children]


def title_of(process: psutil.Process) -> str:
    """What a process calls itself; nothing once it has ended."""
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""


@contextmanager
def serving(folder: Path, **flags: str) -> Iterator[Server]:
    with mock.patch.dict(FLAGS, {"--max-num-seqs": "4", **flags}), serve(SDAR, folder / "server.log") as server:
        yield server


async def kill(victim: psutil.Process, server: Server) -> list[Ending]:
    """Kill a process while requests run, wait and stream; how they ended, the last of them sent after the fault."""
    is_running = asyncio.Event()

    async def ask(client: openai.AsyncOpenAI, number: int, stream: bool, max_tokens: int = LONG) -> Ending:
        request = completion(f"Count to {number}:", max_tokens=max_tokens, stream=stream, **SLOWLY)
        error, tokens = None, 0
        try:
            reply = await client.completions.create(**request)
            if stream:
                async for chunk in reply:
                    tokens += len(chunk.choices[0].token_ids or ())
                    is_running.set()
            else:
                tokens = len(reply.choices[0].token_ids)
        except openai.OpenAIError as caught:
            error = caught
        return Ending(error, tokens, time.monotonic())

    async with server.connect_async() as client:
        # A client that has yet to be loaded would hear of the first token when most of the answers are done.
        assert (await ask(client, CLIENTS, True, max_tokens=1)).error is None
        is_running.clear()
        # Alone: a server that gets all at once may first run those that do not stream, minutes on a busy machine.
        requests = [asyncio.ensure_future(ask(client, 0, True))]
        hears = asyncio.ensure_future(is_running.wait())
        await asyncio.wait([*requests, hears], return_when=asyncio.FIRST_COMPLETED)
        assert is_running.is_set(), requests[0].result().error
        requests += [asyncio.ensure_future(ask(client, number, number % 2 == 0)) for number in range(1, CLIENTS)]
        await asyncio.sleep(0.5)
        victim.kill()
        killed_at = time.monotonic()
        await asyncio.sleep(0.5)
        requests.append(asyncio.ensure_future(ask(client, CLIENTS, False)))
        ended = await asyncio.gather(*requests)
    return [ending._replace(seconds=ending.seconds - killed_at) for ending in ended]


def assert_all_told(endings: list[Ending]) -> None:
    """Each got its whole answer, or an error in time; most the latter, as did the one sent after the fault."""
    assert [ending for ending in endings if ending.seconds > DEADLINE] == []
    assert [ending for ending in endings if ending.error is None and ending.tokens < LONG] == []
    assert sum(ending.error is not None for ending in endings) > CLIENTS // 2
    assert endings[-1].error is not None


def assert_told_of_the_engine(endings: list[Ending]) -> None:
    """Every request that failed was told that the engine died; the one sent after the fault may find no server."""
    messages = {str(ending.error) for ending in endings[:-1] if ending.error is not None}
    assert [message for message in messages if not any(text in message for text in DIED)] == []


def assert_all_end(server: Server, processes: Iterable[psutil.Process]) -> None:
    """The server with an error, as who supervises it is to know."""
    assert server.process.wait(ENDING) == 1
    assert [title_of(process) for process in psutil.wait_procs(processes, timeout=ENDING)[1]] == []


def line_of(log: Path, text: str) -> str:
    """The first line of a log with some text."""
    return next((line for line in log.read_text(errors="replace").splitlines() if text in line), "")


@pytest.fixture(scope="module")
def ray_agents() -> Iterator[list[psutil.Process]]:
    """Ray's agents that are to end. The other tests run while they take their time."""
    agents: list[psutil.Process] = []
    yield agents
    assert psutil.wait_procs(agents, timeout=RAY_AGENTS_ENDING)[1] == []


def test_a_killed_ray_worker_fails_all_requests_and_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_agents: list[psutil.Process]
) -> None:
    # Ray of its own, not one that other tests have started on this machine and may end.
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with serving(tmp_path, **{"--tensor-parallel-size": "2", "--distributed-executor-backend": "ray"}) as server:
        # Ray's own, started by the engine, are among them. Its agents take their names late on a busy machine.
        processes = titles_of(server)
        deadline, agents = time.monotonic() + RAY_AGENTS_STARTING, list[psutil.Process]()
        while len(agents) < 2:
            assert time.monotonic() < deadline, [title for title, _ in processes]
            time.sleep(0.2)
            processes = titles_of(server)
            agents = [child for title, child in processes if re.fullmatch(r"ray::\w+Agent", title)]
        workers = [child for title, child in processes if "RayWorkerProc" in title]
        assert len(workers) == 2, [title for title, _ in processes]
        endings = asyncio.run(kill(workers[1], server))
        assert_all_end(server, {child for _, child in processes}.difference(agents))
        ray_agents.extend(agents)
    assert_all_told(endings)
    assert_told_of_the_engine(endings)
    assert re.search(r"RayWorkerProc rank=\[\d\] died unexpectedly", line_of(server.log, "died unexpectedly"))


def test_a_killed_worker_fails_all_requests_and_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other worker waits for the dead one in a reduction and cannot be asked to end. Clients are told when it has.
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    with serving(tmp_path, **{"--tensor-parallel-size": "2"}) as server:
        processes = processes_of(server)
        assert sorted(processes) == ["EngineCore", "Worker_TP0", "Worker_TP1"]
        endings = asyncio.run(kill(processes["Worker_TP1"], server))
        assert_all_end(server, processes.values())
    assert_all_told(endings)
    assert_told_of_the_engine(endings)
    assert "Worker proc VllmWorker-1 died unexpectedly" in line_of(server.log, "died unexpectedly")


def test_a_killed_engine_fails_all_requests_and_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        processes = processes_of(server)
        endings = asyncio.run(kill(processes["EngineCore"], server))
        assert_all_end(server, processes.values())
    assert_all_told(endings)
    assert_told_of_the_engine(endings)
    assert line_of(server.log, "engine core exited unexpectedly")


def test_a_server_that_is_killed_takes_its_engine_along(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        processes = processes_of(server)
        assert_all_told(asyncio.run(kill(psutil.Process(server.pid), server)))
        _, left = psutil.wait_procs(processes.values(), timeout=ENDING)
        assert left == []
    assert f"Process {server.pid}, which started this engine, is gone" in line_of(server.log, "started this engine")


class Start(NamedTuple):
    """How a start ended."""

    status: int
    log: str
    seconds_to_end: float
    """From the message to the end of the last process."""


def failed_start(command: list[str], message: str, log: Path, **environment: str) -> Start:
    """Run a command that ends by itself once it has written a message."""
    process = warm.Process(
        command, stdout=log, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment}
    )
    try:
        end = time.monotonic() + START_DEADLINE
        while not (log.exists() and line_of(log, message)) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        told_at = time.monotonic()
        status = process.wait(START_DEADLINE)
        while _group_lives(process.pid) and time.monotonic() < told_at + START_DEADLINE:
            time.sleep(0.05)
        return Start(status, log.read_text(errors="replace"), time.monotonic() - told_at)
    finally:
        if _group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def serve_command(model: Path, port: int = 0) -> list[str]:
    flags = ["--enforce-eager", "--max-model-len", "64", "--kv-cache-memory-bytes", str(16 << 20)]
    return [VLLM, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]


def test_a_server_does_not_start_on_a_checkpoint_without_a_tensor(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    model = with_tensors(SDAR, tmp_path / "model", lambda tensors: tensors.pop(name))
    message = f"{model} does not hold the model that its config.json describes; missing: {name}"
    start = failed_start(serve_command(model), message, tmp_path / "log")
    assert message in start.log
    assert start.status == 1
    assert start.seconds_to_end < ENDING


def test_a_server_does_not_start_on_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = serve_command(SDAR, taken.getsockname()[1])
        start = failed_start(command, "Address already in use", tmp_path / "log")
    assert "Address already in use" in start.log
    assert start.status == 1
    assert start.seconds_to_end < ENDING
    # Nothing of the model was read.
    assert "Initializing a V1 LLM engine" not in start.log


def test_without_the_plugin_vllm_names_the_model_type_it_does_not_know(tmp_path: Path) -> None:
    code = f"from vllm import LLM; LLM({str(SDAR)!r}, max_model_len=64)"
    message = "has model type `sdar` but Transformers does not recognize this architecture"
    start = failed_start(["-c", code], message, tmp_path / "log", VLLM_PLUGINS="other")
    assert message in start.log
    assert start.status == 1
    assert start.seconds_to_end < ENDING
