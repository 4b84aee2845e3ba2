"""Requests and streams to the API server, with our deadlines and our errors.

Thin on purpose: bytes in, bytes out, one error tree. No retries except after a 401, and only when
there are new credentials: whoever asks knows best whether to ask again. The models of the official
client are not used, since they cost 26 times the time of a typed msgspec decoding per list and 11
times per watch event.

A network that swallows packets gives no error: requests end by their deadline, streams by their
idle limit, and the kernel's keep-alive finds a dead peer on connections that are merely kept.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from slurmbridge.kube.status import PEER, Answer, error_of
from slurmbridge.pool.errors import (
    AnswerTooLong,
    ParseError,
    PeerProtocolError,
    PeerTimeout,
    PeerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

    from slurmbridge.kube.access import Access

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"

CONNECT_S: Final = 5.0
"""Deadline of connecting, within the deadline of the request."""
MAX_ANSWER_BYTES: Final = 1 << 25
"""Longest answer: 32 MiB, of which reading takes some three times the memory. A page of 500 real
objects is a fifth of it; who asks for less of what is larger gets it."""
MAX_LINE_BYTES: Final = 1 << 24
"""Longest line of a watch: 16 MiB. etcd holds objects up to 1.5 MiB, JSON is at most some times
longer; the official client gives up at 4 MiB."""
KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A silent peer is asked after 15 s and dropped after three unanswered questions: 30 s."""


def resource_path(*segments: str) -> str:
    """A path of the API: `resource_path("api", "v1", "nodes", name)`.

    Raises:
        ParseError: a segment is empty, `.`, `..`, or holds a slash or a percent sign, as Kubernetes
            forbids for names: nothing that comes from outside may lead to another resource.

    """
    for segment in segments:
        if segment in ("", ".", "..") or "/" in segment or "%" in segment:
            raise ParseError(segment, "this cannot be a name in Kubernetes")
    return "/" + "/".join(quote(segment, safe="") for segment in segments)


class KubeSession:
    """A pool of connections to one API server. Use as an async context manager, in one loop.

    Args:
        access: where and as whom.
        connections: most connections at once; watches hold one each. Requests wait for a free one
            within their deadline.

    """

    def __init__(self, access: Access, connections: int = 64) -> None:
        self._access = access
        self._connections = connections
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Load the credentials; connections are made on demand.

        Raises:
            ConfigError: the credentials are incomplete.

        """
        await self._access.load()
        connector = aiohttp.TCPConnector(
            limit=self._connections, socket_factory=_socket, keepalive_timeout=30.0
        )
        self._client = aiohttp.ClientSession(
            connector=connector,
            trust_env=True,  # HTTPS_PROXY and NO_PROXY count, as for kubectl
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                # Compressing costs both sides more than it saves inside a cluster.
                "Accept-Encoding": "identity",
                "User-Agent": "slurmbridge",
            },
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = JSON,
        params: Mapping[str, str] | None = None,
        deadline_s: float = 10.0,
    ) -> bytes:
        """One request, the body of its answer.

        Args:
            method: `GET`, `POST`, `PUT`, `PATCH` or `DELETE`.
            path: from `resource_path`.
            body: bytes as they are; anything else is encoded as JSON; None: no body.
            content_type: of the body; a patch must say `MERGE_PATCH` or `STRATEGIC_PATCH`.
            params: query.
            deadline_s: for all of it: waiting for a connection, connecting, asking, reading.

        Raises:
            PeerRejected, Conflict: a definite no, see `slurmbridge.kube.status.error_of`.
            PeerTimeout: the deadline passed; the request may have been carried out.
            PeerUnavailable: no answer.
            PeerProtocolError: not an answer of Kubernetes.

        """
        answer = await self.exchange(
            method, path, body, content_type=content_type, params=params, deadline_s=deadline_s
        )
        if not answer.is_ok:
            raise error_of(f"{method} {path}", answer)
        return answer.body

    async def exchange(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = JSON,
        params: Mapping[str, str] | None = None,
        deadline_s: float = 10.0,
    ) -> Answer:
        """Like `request`, but any HTTP status is an answer.

        Raises:
            PeerTimeout, PeerUnavailable, PeerProtocolError: as in `request`.

        """
        op = f"{method} {path}"
        limits = aiohttp.ClientTimeout(total=deadline_s, sock_connect=min(CONNECT_S, deadline_s))
        payload = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        content = {} if payload is None else {"Content-Type": content_type}
        with _our_errors(op):
            async with self._open(method, path, limits, params, payload, content) as response:
                chunks, size = [], 0
                async for chunk in response.content.iter_any():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > MAX_ANSWER_BYTES:
                        raise AnswerTooLong(PEER, op, f"answer above {MAX_ANSWER_BYTES} bytes")
                return Answer(response.status, b"".join(chunks), _retry_after(response))

    async def stream(
        self,
        path: str,
        params: Mapping[str, str],
        *,
        idle_s: float = 90.0,
        total_s: float = 600.0,
    ) -> AsyncGenerator[bytes, None]:
        """The lines of an answer as they come, without their line ends; ends when the server ends.

        Close it (`contextlib.aclosing`) when leaving early.

        Args:
            path: of the collection.
            params: query, with `watch`.
            idle_s: longest silence.
            total_s: longest life; give the server a shorter `timeoutSeconds`.

        Raises:
            PeerRejected: the server refused to begin.
            PeerTimeout: idle or total limit passed.
            PeerUnavailable: refused for now, or cut, or cut within a line.
            PeerProtocolError: a line above `MAX_LINE_BYTES`.

        Cost: O(bytes); one copy of a line only where it spans reads.

        """
        op = f"WATCH {path}"
        limits = aiohttp.ClientTimeout(
            total=total_s, sock_connect=min(CONNECT_S, idle_s), sock_read=idle_s
        )
        with _our_errors(op):
            async with self._open("GET", path, limits, params) as response:
                if response.status != 200:
                    body = await response.content.read(MAX_LINE_BYTES)
                    raise error_of(op, Answer(response.status, body, _retry_after(response)))
                async for line in _lines(response.content, op):
                    yield line

    @contextlib.asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        limits: aiohttp.ClientTimeout,
        params: Mapping[str, str] | None = None,
        payload: bytes | None = None,
        content: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, with new credentials once if the present ones are refused."""
        if self._client is None:
            raise RuntimeError("the session has not been entered")
        for attempt in (1, 2):
            headers = await self._access.headers()
            more: dict[str, Any] = {}
            if self._access.context is not None:
                more["ssl"] = self._access.context
            if self._access.server_name:
                more["server_hostname"] = self._access.server_name
            try:
                response = await self._client.request(
                    method,
                    URL(self._access.server + path, encoded=True),
                    params=params,
                    data=payload,
                    headers={"Accept": JSON, **(content or {}), **headers},
                    timeout=limits,
                    allow_redirects=False,  # they would carry the token elsewhere
                    proxy=self._access.proxy,
                    **more,
                )
            except aiohttp.ClientConnectorCertificateError:
                # A rotated CA looks like this; the next request will use it.
                await self._access.reload_after_refusal(headers)
                raise
            async with response:
                if (
                    response.status == 401
                    and attempt == 1
                    and await self._access.reload_after_refusal(headers)
                ):
                    continue
                try:
                    yield response
                finally:
                    _drop_unread(response)
                return


def _drop_unread(response: aiohttp.ClientResponse) -> None:
    """Give up the connection of an answer that was not read to its end.

    Closing it would wait half a minute for the farewell of a TLS peer that may be dead.
    """
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


async def _lines(content: aiohttp.StreamReader, op: str) -> AsyncIterator[bytes]:
    """Complete lines of a body.

    Raises:
        PeerUnavailable: the body ends within a line.
        PeerProtocolError: a line is longer than `MAX_LINE_BYTES`.

    """
    parts: list[bytes] = []
    size = 0
    async for chunk in content.iter_any():
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            _check_size(size + len(piece), op)
            yield b"".join((*parts, piece)) if parts else piece
            parts, size = [], 0
        if rest:
            parts.append(rest)
            size += len(rest)
            _check_size(size, op)
    if parts:
        raise PeerUnavailable(PEER, op, f"the stream ended within a line, after {size} bytes of it")


def _check_size(size: int, op: str) -> None:
    if size > MAX_LINE_BYTES:
        raise PeerProtocolError(PEER, op, f"a line above {MAX_LINE_BYTES} bytes")


@contextlib.contextmanager
def _our_errors(op: str) -> Iterator[None]:
    """Turn what aiohttp raises into our error tree."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise PeerUnavailable(PEER, op, "no connection within the time allowed") from error
    except TimeoutError as error:
        raise PeerTimeout(PEER, op, "no (further) answer within the time allowed") from error
    except (aiohttp.ClientError, OSError) as error:
        raise PeerUnavailable(PEER, op, f"{type(error).__name__}: {error}") from error


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Retry-After in seconds; the date form, which Kubernetes does not use, counts as absent."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 9 else None


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose kernel notices when the peer's host is gone."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in KEEPALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, seconds)
    # Unanswered data counts too: without this the kernel resends for a quarter of an hour.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    return made
