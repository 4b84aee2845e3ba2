"""The admin port of both daemons: health, metrics and the state as it is in memory.

`/livez` and `/readyz` answer 200 or 503 with one line per check, in the form of kube-apiserver's
`?verbose`; `/metrics` is Prometheus text; `/debug/snapshot` is JSON for `explain` offline. Debug
pages carry names of users' pods: they are served to this host only (`kubectl port-forward` is)
unless said otherwise. Everything here only reads.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

from aiohttp import web
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

from slurmbridge.log import get_logger
from slurmbridge.pool.errors import ConfigError, Problem

_log = get_logger(__name__)

Checks = Mapping[str, str]
"""Name of a check -> "" when it holds, else why not (short, for people)."""

ANSWER_S: Final = 10.0
"""Longest time that a page may take to be made."""
STOP_S: Final = 1.0

_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Page(NamedTuple):
    """One page: its bytes and what they are."""

    body: bytes
    content_type: str = "application/json"


PageMaker = Callable[[], Page | Awaitable[Page]]


class AdminServer:
    """The HTTP server; it shares the event loop of the daemon.

    Args:
        live: checks of liveness: a failing one makes the kubelet restart the daemon, so it holds
            only what a restart can cure.
        ready: checks of readiness.
        snapshot: JSON of the whole state.
        registry: what `/metrics` shows.
        pages: further pages by path (`/pool`); those below `/debug/` are for this host only.
        debug_remote: serve `/debug/` to every peer.

    """

    def __init__(
        self,
        *,
        live: Callable[[], Checks],
        ready: Callable[[], Checks],
        snapshot: Callable[[], bytes | Awaitable[bytes]],
        registry: CollectorRegistry = REGISTRY,
        pages: Mapping[str, PageMaker] | None = None,
        debug_remote: bool = False,
    ) -> None:
        async def snapshot_page() -> Page:
            made = snapshot()
            return Page(await made if inspect.isawaitable(made) else made)

        self._debug_remote = debug_remote
        self._app = web.Application(middlewares=[self._guard])
        self._app.router.add_get("/livez", _health(live))
        self._app.router.add_get("/readyz", _health(ready))
        self._app.router.add_get("/metrics", make_aiohttp_handler(registry))
        for path, maker in {"/debug/snapshot": snapshot_page, **(pages or {})}.items():
            self._app.router.add_get(path, _page(maker))
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port it listens on; 0 before `start`."""
        return self._port

    async def start(self, host: str, port: int) -> None:
        """Listen. host "" means all addresses of IPv4 and IPv6, port 0 any free port.

        Raises:
            ConfigError: the address cannot be used.

        """
        runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=STOP_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, host or None, port).start()
        except OSError as error:
            await runner.cleanup()
            text = f"cannot listen on {host or '*'}:{port}: {error.strerror or error}"
            raise ConfigError([Problem("$.admin", text)]) from error
        self._runner = runner
        self._port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections; may be called twice."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        if request.path.startswith("/debug/") and not (self._debug_remote or _is_local(request)):
            return _text(HTTPStatus.FORBIDDEN, "debug pages are served to this host only\n")
        try:
            async with asyncio.timeout(ANSWER_S):
                response = await handler(request)
        except web.HTTPException:
            raise
        except TimeoutError:
            _log.warning("admin page took too long", path=request.path, limit_s=ANSWER_S)
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "took too long\n")
        except Exception:  # noqa: BLE001 - one faulty page must not end the daemon's server
            _log.exception("admin page failed", path=request.path)
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "failed; see the log\n")
        response.headers.update(_HEADERS)
        return response


def _health(checks: Callable[[], Checks]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_request: web.Request) -> web.Response:
        found = checks()
        lines = [f"[-]{name}: {why}" if why else f"[+]{name} ok" for name, why in found.items()]
        is_well = not any(found.values())
        lines.append("ok" if is_well else "failed")
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        return _text(status, "\n".join(lines) + "\n")

    return answer


def _page(maker: PageMaker) -> Callable[[web.Request], Awaitable[web.Response]]:
    busy = asyncio.Lock()

    async def answer(_request: web.Request) -> web.Response:
        if busy.locked():
            # Large pages take the event loop's time: never two at once, never a queue of them.
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "being made for someone else\n")
        async with busy:
            made = maker()
            page = await made if inspect.isawaitable(made) else made
        return web.Response(body=page.body, content_type=page.content_type)

    return answer


def _text(status: HTTPStatus, text: str) -> web.Response:
    return web.Response(status=status, text=text, headers=_HEADERS)


def _is_local(request: web.Request) -> bool:
    peer = request.transport.get_extra_info("peername") if request.transport else None
    if not isinstance(peer, tuple):
        return False
    address = ipaddress.ip_address(peer[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
