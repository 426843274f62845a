"""The soak's clients: they send a stream of requests, so many at a time, and check what they get."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from soak_oracle import Answer, Case, Choice, matches
from soak_traffic import Malformed, Manner, Sending

TIMEOUT = 300.0
"""Seconds for a request, waiting included."""
MOST_WRONG = 20
"""Wrong answers that are kept whole."""


@dataclass(frozen=True)
class Reply:
    """What came of a request.

    Attributes:
        status: of HTTP, or the code of the error in a stream.
        error: what went wrong, in a few words.
        choices: as far as they came.
        first: seconds to the first chunk of a stream.
        ended: the answer is there to its end.
    """

    status: int | None = None
    error: str | None = None
    choices: Answer = field(default_factory=list)
    first: float | None = None
    ended: bool = False


@dataclass(frozen=True)
class Outcome:
    """A request of the stream with what came of it, and whether it should have.

    Attributes:
        began: seconds since the run began.
        seconds: from sending to the end, waiting included.
        verdict: ``right``, ``wrong``, ``left`` (cancelled; what had come was right), ``refused`` (as it had to be), or
            what went wrong.
    """

    sending: Sending
    began: float
    seconds: float
    first: float | None
    tokens: int
    verdict: str


VERDICTS = ("right", "left", "refused")
"""Those that are good."""


@dataclass(frozen=True)
class Wrong:
    """A wrong answer, with all that it takes to ask again."""

    sending: Sending
    path: str
    body: dict[str, Any]
    expected: Answer
    got: Answer


def judge(sending: Sending, reply: Reply, cases: Sequence[Case], bad: Sequence[Malformed]) -> str:
    """The verdict of an `Outcome`."""
    if sending.manner is Manner.MALFORMED:
        if reply.status is not None and 400 <= reply.status < 500:
            return "refused"
        return f"malformed ({bad[sending.index].name}), yet {reply.error or 'answered'}"
    if reply.error is not None:
        return reply.error
    # A client may leave too late.
    if not matches(reply.choices, cases[sending.index].expected, whole=reply.ended):
        return "wrong"
    return "right" if reply.ended else "left"


class Clients:
    """All clients of a run.

    Attributes:
        outcomes: of all requests so far.
        wrong: the first wrong answers.
    """

    def __init__(self, address: str, model: str, cases: Sequence[Case], bad: Sequence[Malformed]) -> None:
        self._address, self._model = address, model
        self._cases, self._bad = cases, bad
        self.outcomes: list[Outcome] = []
        self.wrong: list[Wrong] = []
        self.begin = time.perf_counter()
        self._dead = False

    async def run(
        self, stream: Iterator[Sending], concurrency: int, tick: Callable[[Outcome], None] = lambda _: None
    ) -> None:
        """Send a stream, ``concurrency`` requests at a time. Ends early where nobody answers any more."""
        # A server may close a connection that it takes for idle just when a request is sent over it, so the client is
        # the first to.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        self.begin = time.perf_counter()
        async with aiohttp.ClientSession(self._address, connector=connector, timeout=timeout) as session:

            async def client() -> None:
                for sending in stream:
                    if self._dead:
                        return
                    tick(await self._ask(session, sending))

            await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _ask(self, session: aiohttp.ClientSession, sending: Sending) -> Outcome:
        began = time.perf_counter()
        if sending.manner is Manner.MALFORMED:
            path, content = self._bad[sending.index].path, self._bad[sending.index].content
        else:
            request = self._cases[sending.index].request
            body = request.body(self._model, stream=sending.manner is not Manner.WHOLE)
            path, content = request.path, json.dumps(body).encode()
        leave_after = sending.chunks if sending.manner is Manner.LEAVE else None
        reply = await _send(session, path, content, leave_after)
        verdict = judge(sending, reply, self._cases, self._bad)
        if verdict == "wrong" and len(self.wrong) < MOST_WRONG:
            expected = self._cases[sending.index].expected
            self.wrong.append(Wrong(sending, path, json.loads(content), expected, reply.choices))
        outcome = Outcome(
            sending=sending,
            began=began - self.begin,
            seconds=time.perf_counter() - began,
            first=reply.first,
            tokens=sum(len(choice.tokens) for choice in reply.choices),
            verdict=verdict,
        )
        self.outcomes.append(outcome)
        self._dead = self._dead or reply.error == REFUSED
        return outcome


REFUSED = "connection refused"


async def _send(session: aiohttp.ClientSession, path: str, content: bytes, leave_after: int | None) -> Reply:
    begin = time.perf_counter()
    try:
        async with session.post(path, data=content, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                await response.read()
                return Reply(response.status, f"status {response.status}")
            if response.content_type != "text/event-stream":
                return _whole(await response.json())
            return await _streamed(response, begin, leave_after)
    except aiohttp.ClientConnectorError:
        return Reply(error=REFUSED)
    except TimeoutError:
        return Reply(error=f"no end after {TIMEOUT:.0f} s")
    except aiohttp.ClientError as error:
        return Reply(error=f"connection lost ({type(error).__name__})")


def _whole(reply: dict[str, Any]) -> Reply:
    choices = [
        Choice(
            choice["message"]["content"] or "" if "message" in choice else choice["text"],
            choice.get("token_ids") or [],
            choice["finish_reason"],
            choice["stop_reason"],
        )
        for choice in sorted(reply["choices"], key=lambda choice: choice["index"])
    ]
    return Reply(200, choices=choices, ended=True)


async def _streamed(response: aiohttp.ClientResponse, begin: float, leave_after: int | None) -> Reply:
    """Put the chunks of a stream together; close it after so many of them."""
    choices: dict[int, Choice] = {}
    first = None
    ended = False
    count = 0
    if leave_after != 0:
        async for event in _events(response):
            count += 1
            if event == "[DONE]":
                ended = True
                break
            chunk = json.loads(event)
            if "error" in chunk:
                code = chunk["error"]["code"]
                return Reply(code, f"status {code} in a stream", first=first)
            if first is None:
                first = time.perf_counter() - begin
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                so_far = choices.get(choice["index"], Choice("", [], None, None))
                choices[choice["index"]] = Choice(
                    so_far.text + (text or ""),
                    so_far.tokens + (choice.get("token_ids") or []),
                    choice["finish_reason"] or so_far.finish_reason,
                    # A stop token may be number 0.
                    so_far.stop_reason if choice.get("stop_reason") is None else choice["stop_reason"],
                )
            if count == leave_after:
                break
    if not ended:
        if leave_after is None:
            return Reply(200, "stream without an end", first=first)
        response.close()
    come = [choices.get(index, Choice("", [], None, None)) for index in range(max(choices, default=-1) + 1)]
    return Reply(200, choices=come, first=first, ended=ended)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Data of server-sent events. vLLM writes each in a line of its own."""
    async for line in response.content:
        text = line.decode().strip()
        if text.startswith("data: "):
            yield text.removeprefix("data: ")
