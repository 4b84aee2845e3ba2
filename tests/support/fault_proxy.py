"""A reverse proxy before the real API server that makes the faults which networks and servers make.

    async with FaultProxy(kube.url, kube.ca_crt) as proxy:
        proxy.add(Answer(410, status_body(410, "Expired")), when=watches)
        proxy.add(Cut(after_lines=2, torn=True), when=watches, times=3)
        proxy.mute()                 # nothing moves any more, and nobody is told
        proxy.unmute()

It forwards what it is sent, the Authorization header included, and speaks plain HTTP (or TLS with
`ssl_context`) to its clients. One fault is used up per matching request, in the order they were
added; a request without a fault is passed through, watches as they come.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import aiohttp
from aiohttp import web
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

MOST_SEEN = 10_000
_HOP = {"host", "connection", "transfer-encoding", "content-length", "keep-alive", "date"}


@dataclass(frozen=True)
class Seen:
    """A request that came in."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") in ("true", "1")


@dataclass(frozen=True)
class Answer:
    """Answer in place of the API server, which never sees the request."""

    code: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Delay:
    """Pass the request on only after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Cut:
    """Pass so many lines of the answer, then end it.

    torn: half of the next line is passed too (it must come). abort: close the connection without
    ending the answer; else the answer ends as if it were complete.
    """

    after_lines: int = 0
    torn: bool = False
    abort: bool = True


@dataclass(frozen=True)
class Insert:
    """Pass so many lines, then these bytes, then end the answer."""

    data: bytes
    after_lines: int = 0


@dataclass(frozen=True)
class Silence:
    """Pass so many lines, then nothing, without closing. None: not even the headers."""

    after_lines: int | None = None


@dataclass(frozen=True)
class LoseAnswer:
    """The API server carries the request out; the connection breaks before the answer."""


Fault = Answer | Delay | Cut | Insert | Silence | LoseAnswer


@dataclass
class _Rule:
    fault: Fault
    when: Callable[[Seen], bool]
    left: float
    used: int = 0


def any_request(_: Seen) -> bool:
    return True


def watches(seen: Seen) -> bool:
    return seen.is_watch


def lists(seen: Seen) -> bool:
    return seen.method == "GET" and not seen.is_watch


def writes(seen: Seen) -> bool:
    return seen.method != "GET"


def status_body(code: int, reason: str, message: str = "made by the fault proxy") -> bytes:
    """A Kubernetes Status object."""
    return json.dumps(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
    ).encode()


def error_event(code: int, reason: str) -> bytes:
    """A line of a watch that tells an error in a 200 stream."""
    return b'{"type":"ERROR","object":' + status_body(code, reason) + b"}\n"


class FaultProxy:
    """One proxy; an async context manager. `url` is where clients connect."""

    def __init__(
        self, upstream: str, ca_crt: Path | str, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._upstream = upstream
        self._upstream_ssl = ssl.create_default_context(cafile=str(ca_crt))
        self._ssl = ssl_context
        self._rules: list[_Rule] = []
        self._open = asyncio.Event()
        self._open.set()
        self._runner: web.AppRunner | None = None
        self._client: aiohttp.ClientSession | None = None
        self._transports: set[asyncio.BaseTransport] = set()
        self.port = 0
        self.seen: list[Seen] = []

    # Life

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._upstream_ssl, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._client.close()
        await asyncio.sleep(0.05)  # aborted TLS transports need a turn of the loop to be gone

    @property
    def url(self) -> str:
        return f"{'https' if self._ssl else 'http'}://127.0.0.1:{self.port}"

    def kubeconfig(self, token: str) -> str:
        """A kubeconfig that leads here."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "k", "cluster": {"server": self.url}}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "current-context": "c",
            }
        )

    # Faults

    def add(
        self, fault: Fault, when: Callable[[Seen], bool] = any_request, times: float = 1
    ) -> _Rule:
        """Make a fault of the next `times` requests that match; `used` of the result counts."""
        rule = _Rule(fault, when, times)
        self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """No more faults."""
        self._rules.clear()

    def mute(self) -> None:
        """Like a network that swallows packets: no byte moves, no connection ends."""
        self._open.clear()

    def unmute(self) -> None:
        """Everything moves on."""
        self._open.set()

    def drop_all(self) -> None:
        """Reset all connections."""
        for transport in list(self._transports):
            transport.abort()

    def count(self, when: Callable[[Seen], bool]) -> int:
        """How many requests of a kind have come in."""
        return sum(1 for seen in self.seen if when(seen))

    # Inside

    async def _listen(self) -> None:
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._ssl)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = Seen(request.method, request.path, dict(request.query), dict(request.headers), body)
        if len(self.seen) < MOST_SEEN:
            self.seen.append(seen)
        transport = request.transport
        self._transports.add(transport)
        try:
            await self._open.wait()
            return await self._serve(request, seen, self._fault_for(seen))
        except (aiohttp.ClientError, OSError):
            transport.abort()  # the API server is not there: neither are we
            raise
        finally:
            self._transports.discard(transport)

    def _fault_for(self, seen: Seen) -> Fault | None:
        for rule in self._rules:
            if rule.left > 0 and rule.when(seen):
                rule.left -= 1
                rule.used += 1
                return rule.fault
        return None

    async def _serve(
        self, request: web.Request, seen: Seen, fault: Fault | None
    ) -> web.StreamResponse:
        match fault:
            case Answer(code, body, headers):
                kind = {"Content-Type": "application/json"}
                return web.Response(status=code, body=body, headers=kind | headers)
            case Delay(seconds):
                await asyncio.sleep(seconds)
            case Silence(None):
                await asyncio.Event().wait()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        url = URL(self._upstream + request.raw_path, encoded=True)
        async with self._client.request(
            request.method, url, headers=headers, data=seen.body or None, allow_redirects=False
        ) as answer:
            if isinstance(fault, LoseAnswer):
                await answer.read()
                request.transport.abort()
                return web.Response()
            try:
                return await self._relay(request, answer, fault)
            finally:
                if answer.connection is not None and answer.connection.transport is not None:
                    answer.connection.transport.abort()  # left unread

    async def _relay(
        self, request: web.Request, answer: aiohttp.ClientResponse, fault: Fault | None
    ) -> web.StreamResponse:
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
        reply = web.StreamResponse(status=answer.status, headers=kept)
        await reply.prepare(request)
        if isinstance(fault, Cut | Insert | Silence):
            await self._spoil(request, reply, answer, fault)
        else:
            async for chunk in answer.content.iter_any():
                await self._open.wait()
                await reply.write(chunk)
        if request.transport is not None and not request.transport.is_closing():
            await reply.write_eof()
        return reply

    async def _spoil(
        self,
        request: web.Request,
        reply: web.StreamResponse,
        answer: aiohttp.ClientResponse,
        fault: Cut | Insert | Silence,
    ) -> None:
        lines = _lines(answer)
        for _ in range(fault.after_lines):
            await reply.write(await anext(lines))
        match fault:
            case Silence():
                await asyncio.Event().wait()
            case Insert(data):
                await reply.write(data)
            case Cut(_, torn, abort):
                if torn:
                    line = await anext(lines)
                    await reply.write(line[: len(line) // 2])
                if abort:
                    await asyncio.sleep(0.05)  # let what was written leave first
                    request.transport.abort()


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in answer.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line + b"\n"
    if rest:
        yield rest
