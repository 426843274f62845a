"""Hostile requests to a real server: is each of them answered or refused, and does the engine go on as before?

``python benchmarks/fuzz.py --help``; ``docs/benchmarks.md`` says what is sent and what is checked.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import serving
import typer
from engine import ROOT
from fuzz_bodies import COMPLETIONS, ENDPOINTS, Body, draw_bodies, encoded
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from serving import FLAGS, MODEL, Server

TIMEOUT = 120.0
"""Seconds for an answer. What takes longer counts as never."""
CONCURRENCY = 16
PROBE_INTERVAL = 12
"""Bodies between two requests whose answer is known."""
PROBES: tuple[dict[str, Any], ...] = (
    {"prompt": "Two and three", "max_tokens": 24, "vllm_xargs": {"dllm_policy": "static"}},
    {"prompt": "def add(first, second):\n", "max_tokens": 40, "vllm_xargs": {"dllm_verify": "psd"}},
    {"prompt": "Ada has 12 apples.", "max_tokens": 30, "temperature": 1.0, "seed": 7},
    {"prompt": "Once upon a time", "max_tokens": 18, "vllm_xargs": {"dllm_verify": "fef", "dllm_window": 4}},
)
"""Requests whose answers must not change, whatever is sent beside them."""


@dataclass(frozen=True)
class Reply:
    """What came of a body.

    Attributes:
        status: of HTTP, or of the error that a stream ended with; None where none came.
        fault: what is wrong with it, if anything.
        text: of the answer, the beginning.
    """

    status: int | None
    fault: str | None
    text: str


@dataclass
class Findings:
    """Of a run.

    Attributes:
        statuses: how many replies of each status each endpoint gave.
        faults: bodies that were neither answered nor refused, with what came instead.
        changed: probes whose answer changed.
        held: what the idle server holds that it did not before.
        died: the server does not answer any more.
    """

    statuses: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    faults: list[tuple[Body, Reply]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    died: bool = False
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.faults or self.changed or self.held or self.died)


def judge(status: int, content: bytes, content_type: str) -> Reply:
    """Whether a reply is one that a client can work with."""
    text = content[:2000].decode(errors="replace")
    if status >= 500 or not (200 <= status < 300 or status >= 400):
        return Reply(status, f"status {status}", text)
    if "text/event-stream" in content_type:
        return _judge_stream(status, content, text)
    try:
        answer = json.loads(content)
    except ValueError:
        return Reply(status, "no JSON", text)
    if status >= 400 and not _is_error(answer):
        return Reply(status, "an error without a message", text)
    return Reply(status, None, text)


def _is_error(answer: Any) -> bool:
    if not isinstance(answer, dict):
        return False
    # A body whose bytes cannot be read is answered by the HTTP framework, not by vLLM.
    error = answer.get("error", {"message": answer.get("detail")})
    return isinstance(error, dict) and bool(error.get("message"))


def _judge_stream(status: int, content: bytes, text: str) -> Reply:
    """A stream has sent status 200 before it knows; an error is an event of its own, and the end another."""
    events = [event.removeprefix(b"data: ") for event in content.split(b"\n\n") if event.strip()]
    if not events or events[-1] != b"[DONE]":
        return Reply(status, "a stream without an end", text[-500:])
    for event in events[:-1]:
        try:
            chunk = json.loads(event)
        except ValueError:
            return Reply(status, "a chunk that is no JSON", event.decode(errors="replace")[:500])
        if isinstance(chunk, dict) and "error" in chunk:
            code = chunk["error"].get("code")
            status = code if isinstance(code, int) else 500
            return Reply(status, None if 400 <= status < 500 else f"status {status} in a stream", text[-500:])
    return Reply(status, None, text)


class Attacker:
    """Sends bodies to a server, and asks what it knows the answer to in between.

    Args:
        address: of the server.
        probes: requests whose answers must not change; the endpoint is that of completions.
    """

    def __init__(self, address: str, model: str = MODEL, probes: Sequence[dict[str, Any]] = PROBES):
        self.address = address
        self.probes = [{"model": model, "temperature": 0, "return_token_ids": True, **probe} for probe in probes]
        self.known: list[list[int] | None] = [None] * len(probes)
        self.findings = Findings()

    async def run(self, bodies: Sequence[Body], concurrency: int, tick: Callable[[Reply], None]) -> None:
        """Learn the probes' answers, send all bodies, and ask the probes anew."""
        begin = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        connector = aiohttp.TCPConnector(limit=concurrency, force_close=True)
        async with aiohttp.ClientSession(self.address, timeout=timeout, connector=connector) as session:
            self.session = session
            for index in range(len(self.probes)):
                self.known[index] = await self._ask(index)
                if self.known[index] is None:
                    raise RuntimeError(f"the server does not answer {self.probes[index]}")
            waiting = iter(enumerate(bodies))

            async def work() -> None:
                for number, body in waiting:
                    reply = await self.send(body)
                    self.findings.statuses[body.path, reply.status] += 1
                    if reply.fault is not None:
                        self.findings.faults.append((body, reply))
                    tick(reply)
                    if number % PROBE_INTERVAL == 0:
                        await self._probe(number // PROBE_INTERVAL % len(self.probes))

            await asyncio.gather(*(work() for _ in range(concurrency)))
            for index in range(len(self.probes)):
                await self._probe(index)
        self.findings.seconds = time.monotonic() - begin

    async def send(self, body: Body) -> Reply:
        """Send a body and wait for the end of what comes."""
        headers = {"Content-Type": body.content_type}
        try:
            async with self.session.post(body.path, data=body.content, headers=headers) as response:
                return judge(response.status, await response.read(), response.content_type)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Reply(None, f"no answer: {type(error).__name__}", str(error))

    async def _ask(self, index: int) -> list[int] | None:
        try:
            async with self.session.post(COMPLETIONS, json=self.probes[index]) as response:
                answer = await response.json()
                return answer["choices"][0]["token_ids"] if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def _probe(self, index: int) -> None:
        answer = await self._ask(index)
        if answer != self.known[index]:
            self.findings.changed.append(f"{self.probes[index]}: {answer} instead of {self.known[index]}")


def attack(
    server: Server,
    bodies: Sequence[Body],
    *,
    model: str = MODEL,
    concurrency: int = CONCURRENCY,
    tick: Callable[[Reply], None] = lambda _: None,
) -> Findings:
    """Send bodies to an idle server, and see how it is afterwards."""
    attacker = Attacker(server.address, model)
    asyncio.run(attacker.run(bodies, concurrency, tick))
    findings = attacker.findings
    findings.died = not server.is_healthy()
    if not findings.died:
        findings.held = server.held()
    return findings


def send(server: Server, body: Body, *, model: str = MODEL) -> Reply:
    """What comes of one body."""
    attacker = Attacker(server.address, model, ())

    async def alone() -> Reply:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        async with aiohttp.ClientSession(server.address, timeout=timeout) as attacker.session:
            return await attacker.send(body)

    return asyncio.run(alone())


def simplest(server: Server, body: Body, *, model: str = MODEL) -> Body:
    """The body with as few fields as still bring a fault about; itself where it has none to leave out, or none does."""
    fields = dict(body.fields or {})
    for name in body.fields or {}:
        fewer = {key: value for key, value in fields.items() if key != name}
        if server.is_healthy() and send(server, Body(body.path, encoded(fewer)), model=model).fault is not None:
            fields = fewer
    return Body(body.path, encoded(fields), fields=fields) if len(fields) < len(body.fields or {}) else body


def table_of(findings: Findings) -> Table:
    """Replies by endpoint and status."""
    statuses = sorted({status for _, status in findings.statuses}, key=lambda status: status or 0)
    table = Table(title="Replies by endpoint and status")
    table.add_column("endpoint")
    for status in statuses:
        table.add_column("none" if status is None else str(status), justify="right")
    for path in ENDPOINTS:
        table.add_row(path, *(str(findings.statuses[path, status]) for status in statuses))
    return table


def explained(findings: Findings, server: Server | None = None, most: int = 10) -> str:
    """What went wrong, with bodies to send again, a line each."""
    lines = [f"{name} is {value} on the idle server" for name, value in findings.held.items()]
    lines += [f"a probe's answer changed: {each}" for each in findings.changed[:most]]
    for body, reply in findings.faults[:most]:
        if server is not None:
            body = simplest(server, body)
        lines.append(f"{reply.fault}: {body.path} ({body.content_type}) {body.content[:1500]!r} -> {reply.text[:500]}")
    if findings.died:
        lines.append("the server died")
    return "\n".join(lines)


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint to serve.")] = ROOT / "checkpoints" / "tiny-sdar",
    bodies: Annotated[int, typer.Option(min=1, help="Bodies to send.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the bodies.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Bodies on their way at a time.")] = CONCURRENCY,
    log: Annotated[Path, typer.Option(help="Of the server.")] = ROOT / "build" / "fuzz-server.log",
) -> None:
    """Send hostile bodies to a server of its own; ends with status 1 if one is neither answered nor refused."""
    console = Console()
    log.parent.mkdir(parents=True, exist_ok=True)
    drawn = draw_bodies(MODEL, bodies, seed)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with serving.serve(model, log, FLAGS) as server, Progress(*columns, console=console) as progress:
        task = progress.add_task("bodies", total=len(drawn))
        findings = attack(server, drawn, concurrency=concurrency, tick=lambda _: progress.advance(task))
        explanation = explained(findings, server)
    console.print(table_of(findings))
    console.print(f"{bodies} bodies of seed {seed} in {findings.seconds:.0f} s")
    if not findings.clean:
        console.print(explanation, markup=False, highlight=False)
        raise typer.Exit(1)
    console.print("All answered or refused; probes answered as before; nothing held afterwards.")


if __name__ == "__main__":
    typer.run(main)
