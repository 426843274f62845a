"""One ``vllm serve`` process: started on a free port, ended with everything it started.

For benchmarks and for the tests of the server.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import openai
from prometheus_client.parser import text_string_to_metric_families

MODEL = "tiny"
"""Name under which the checkpoint is served."""
MAX_MODEL_LEN = 510
"""Ends in the midst of a block."""
MAX_NUM_SEQS = 32
MAX_DRAFTS = 7
"""As many as FreeDave's default needs."""
FLAGS = {
    "--served-model-name": MODEL,
    "--dtype": "float32",
    "--max-model-len": str(MAX_MODEL_LEN),
    "--max-num-seqs": str(MAX_NUM_SEQS),
    # Pages for every request at its longest, some to remember prefixes in, and those of drafts.
    "--kv-cache-memory-bytes": str(128 << 20),
    "--additional-config": json.dumps({"dllm": {"max_drafts": MAX_DRAFTS}}),
    # The small models have seen no JSON, and would go on with spaces for long.
    "--structured-outputs-config": json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
}
"""Of a server of one of the small diffusion models."""

IDLE_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm_dllm:scratch_pages_used",
)
"""Gauges that are 0 on an idle server; the last one is there where drafts have pages of their own."""
IDLE_DEADLINE = 30.0
"""Seconds in which a server that nobody asks anything has let go of everything."""

START_DEADLINE = 300.0
"""Seconds from the command to a healthy server; about 20 on an idle machine."""
STOP_DEADLINE = 15.0


class Process(Protocol):
    """What is asked of a server's process."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        process: the API server, whose children are the engine and its workers.
    """

    address: str
    log: Path
    process: Process

    @property
    def pid(self) -> int:
        return self.process.pid

    def connect(self) -> openai.OpenAI:
        """A client that takes no second try: the first answer is what a test is about."""
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    def connect_async(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    def is_healthy(self) -> bool:
        """Whether it answers, and its engine lives."""
        try:
            _read(f"{self.address}/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name, each summed over its labels."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(_read(f"{self.address}/metrics")):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def metric(self, name: str) -> float:
        """Value of a Prometheus sample, summed over its labels.

        Raises:
            KeyError: there is no such sample.
        """
        return self.metrics()[name]

    def wait_for_metric(self, name: str, value: float, deadline: float = 30.0) -> None:
        """Return once a sample has this value.

        Raises:
            TimeoutError: it has another one still.
        """
        end = time.monotonic() + deadline
        while (current := self.metric(name)) != value:
            if time.monotonic() > end:
                raise TimeoutError(f"{name} is {current} after {deadline} s, not {value}")
            time.sleep(0.1)

    def held(self, deadline: float = IDLE_DEADLINE) -> dict[str, float]:
        """What a server still holds that nobody asks anything, by gauge; empty as soon as that is nothing."""
        end = time.monotonic() + deadline
        while True:
            metrics = self.metrics()
            held = {gauge: metrics[gauge] for gauge in IDLE_GAUGES if metrics.get(gauge)}
            if not held or time.monotonic() > end:
                return held
            time.sleep(0.2)


def start_process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Start a command in a process group of its own, so that the engine's processes can be ended with it."""
    with log.open("wb") as sink:
        return subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


@contextmanager
def serve(
    checkpoint: Path, log: Path, flags: Mapping[str, str], start: Callable[..., Process] = start_process
) -> Iterator[Server]:
    """Run ``vllm serve`` on a checkpoint until the block ends.

    Args:
        flags: of the command, with their values.
        start: like `start_process`.

    Raises:
        RuntimeError: the server ended, or was not healthy in time; with the end of its log.
    """
    port = _free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint), "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += [word for flag in flags.items() for word in flag]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Longer than any client keeps a connection. The server's timer of an idle connection runs on while the machine
        # stands still, and closes a connection whose next request has come meanwhile and was not read yet.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
        # Other programs share the machine's cores with the server, its clients at least.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    process = start(command, log, environment)
    try:
        server = Server(f"http://127.0.0.1:{port}", log, process)
        _wait_until_healthy(server, process)
        yield server
    finally:
        _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def _wait_until_healthy(server: Server, process: Process) -> None:
    end = time.monotonic() + START_DEADLINE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}\n{_tail(server.log)}")
        if server.is_healthy():
            return
        time.sleep(0.25)
    raise RuntimeError(f"the server was not healthy within {START_DEADLINE} s\n{_tail(server.log)}")


def _tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _end(process: Process) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_DEADLINE)
    # Whatever of the group is left, the server included. Where nothing is, there is no group either.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
