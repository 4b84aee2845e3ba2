"""The HTTP side of the extender: POST /filter, /prioritize, /preempt, /bind.

kube-scheduler believes status 200 alone; of any other answer it throws the body away and tells the
user a bare code (`scheduler/extender.go`). Hence:

| what happened | filter, bind | prioritize | preempt |
|---|---|---|---|
| nothing can be decided now, or a bug | 200, `Error` | 200, `[]` | 200, no node |
| JSON, but not of the protocol | 200, `Error` | 200, `[]` | 200, no node |
| not JSON | 400 | 400 | 400 |
| too large / too many at once / too slow | 413 / 503 with Retry-After / 408 | the same | the same |

One slow answer holds up the whole scheduler (its cycle is serial), so every wait here has an end
and nothing queues without bound.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from ssl import SSLContext
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from extender import filter as decide
from extender import wire
from extender.bind import Binder
from extender.inflight import InFlight, Size
from extender.metrics import Metrics
from extender.sight import Sight
from slurmbridge.clock import Clock
from slurmbridge.log import cause_scope, get_logger
from slurmbridge.pool.errors import ConfigError, ParseError, Problem
from slurmbridge.pool.podspec import read_pod
from slurmbridge.pool.raw import RawPod
from slurmbridge.pool.reason import Reason
from slurmbridge.pool.record import PodRecord
from slurmbridge.pool.verdict import NO_ROW

_log = get_logger(__name__)

KEEPALIVE_S: Final = 3600.0
"""Idle connections stay open: the side that closes one races with a request on it, and Go does not
repeat a POST. So kube-scheduler is the one to close."""
STOP_S: Final = 1.0
NO_NODES: Final = b'{"NodeNameToMetaVictims":{}}'
BUG_TEXT: Final = "slurmbridge: internal error of the extender, see its log"


class Bounds(msgspec.Struct, frozen=True):
    """What the server takes on at a time.

    body_bytes: largest request; 5,000 whole nodes of 20 kB are 100 MB, names alone 0.2 MB.
    held_bytes: of all bodies being read together.
    requests: of filter, prioritize and preempt. binds: of bind.
    read_s: longest time for a body to come in.
    """

    body_bytes: int = 128 << 20
    held_bytes: int = 256 << 20
    requests: int = 64
    binds: int = 512
    read_s: float = 4.0


class Reply(NamedTuple):
    """An answer: its body, and a word for metrics and log."""

    body: bytes
    outcome: str
    uid: str = ""


class ExtenderServer:
    """Serves kube-scheduler.

    Args:
        sight, binder, inflight: the parts behind it.
        metrics: where requests are counted.
        clock: for latencies.
        bounds: limits.
        token: short random text, the first part of cause ids of this process.

    """

    def __init__(
        self,
        sight: Sight,
        binder: Binder,
        inflight: InFlight,
        metrics: Metrics,
        clock: Clock,
        *,
        bounds: Bounds,
        token: str,
    ) -> None:
        self._sight = sight
        self._binder = binder
        self._inflight = inflight
        self._metrics = metrics
        self._clock = clock
        self._bounds = bounds
        self._token = token
        self._serial = itertools.count(1)
        self._active = {"bind": 0, "other": 0}
        self._held_bytes = 0
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int, tls: SSLContext | None) -> None:
        """Listen. host "" means all addresses, port 0 any free port.

        Raises:
            ConfigError: the address cannot be used.

        """
        app = web.Application(client_max_size=self._bounds.body_bytes)
        for verb, act, otherwise in (
            ("filter", self._filter, wire.write_error),
            ("prioritize", self._prioritize, lambda _: b"[]"),
            ("preempt", self._preempt, lambda _: NO_NODES),
            ("bind", self._bind, wire.write_error),
        ):
            app.router.add_post(f"/{verb}", self._handler(verb, act, otherwise))
        runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=STOP_S
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host or None, port, ssl_context=tls).start()
        except OSError as error:
            await runner.cleanup()
            text = f"cannot listen on {host or '*'}:{port}: {error.strerror or error}"
            raise ConfigError([Problem("--listen", text)]) from error
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections; may be called twice."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def _handler(
        self,
        verb: str,
        act: Callable[[bytes, str], Awaitable[Reply]],
        otherwise: Callable[[str], bytes],
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """The frame around each verb: bounds, faults, log, metrics."""
        lane = "bind" if verb == "bind" else "other"
        most = self._bounds.binds if verb == "bind" else self._bounds.requests

        async def handle(request: web.Request) -> web.Response:
            began = self._clock.monotonic()
            size = request.content_length
            size = self._bounds.body_bytes if size is None else size
            if size > self._bounds.body_bytes:
                self._metrics.answered(verb, "too_large", 0.0)
                return _plain(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request is too large\n")
            if self._active[lane] >= most or self._held_bytes + size > self._bounds.held_bytes:
                self._metrics.answered(verb, "overloaded", 0.0)
                return _plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once\n")
            self._active[lane] += 1
            self._held_bytes += size
            self._metrics.active.inc()
            status, outcome = HTTPStatus.OK, "bug"
            try:
                with cause_scope(cause := f"{self._token}-{next(self._serial):x}", verb=verb):
                    status, reply = await self._answer(request, act, otherwise, cause)
                outcome = reply.outcome
            finally:
                self._active[lane] -= 1
                self._held_bytes -= size
                self._metrics.active.dec()
                self._metrics.answered(verb, outcome, self._clock.monotonic() - began)
            if status is not HTTPStatus.OK:
                return _plain(status, reply.body.decode())
            return web.Response(body=reply.body, content_type="application/json")

        return handle

    async def _answer(
        self,
        request: web.Request,
        act: Callable[[bytes, str], Awaitable[Reply]],
        otherwise: Callable[[str], bytes],
        cause: str,
    ) -> tuple[HTTPStatus, Reply]:
        try:
            async with asyncio.timeout(self._bounds.read_s):
                body = await request.read()
        except TimeoutError:
            return HTTPStatus.REQUEST_TIMEOUT, Reply(b"body took too long\n", "slow")
        except (ConnectionError, web.RequestPayloadError):
            return HTTPStatus.BAD_REQUEST, Reply(b"body was cut off\n", "cut")
        except web.HTTPRequestEntityTooLarge:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, Reply(
                b"request is too large\n", "too_large"
            )
        try:
            reply = await act(body, cause)
        except wire.NotJson as error:
            _log.warning("request is not JSON", bytes=len(body), error=error.text)
            return HTTPStatus.BAD_REQUEST, Reply(f"{error.text}\n".encode(), "faulty")
        except ParseError as error:
            _log.warning("request is not of the protocol", bytes=len(body), error=str(error))
            return HTTPStatus.OK, Reply(otherwise(f"slurmbridge: {error}"), "faulty")
        except Exception:  # noqa: BLE001 - one faulty request must not end the server
            _log.exception("request failed")
            return HTTPStatus.OK, Reply(otherwise(BUG_TEXT), "bug")
        _log.debug("answered", uid=reply.uid, outcome=reply.outcome)
        return HTTPStatus.OK, reply

    async def _filter(self, body: bytes, _cause: str) -> Reply:
        choice = wire.read_choice(body)
        pod, there = self._look(choice.pod)
        answer = decide.choose(pod, choice.names, there)
        self._metrics.refused(answer.reasons)
        self._sight.note_outside(choice.names[position] for position in answer.outside)
        if answer.error:
            return Reply(wire.write_error(answer.error), "error", pod.uid)
        if answer.all:
            return Reply(wire.write_all(choice), "untouched", pod.uid)
        if answer.refused:
            return Reply(wire.write_refused(choice, answer.refused), "refused", pod.uid)
        return Reply(wire.write_passed(choice, answer.passed), "passed", pod.uid)

    async def _prioritize(self, body: bytes, _cause: str) -> Reply:
        choice = wire.read_choice(body)
        pod, there = self._look(choice.pod)
        scores = decide.grade(pod, choice.names, there)
        return Reply(wire.write_scores(choice.names, scores), "scored", pod.uid)

    async def _preempt(self, body: bytes, _cause: str) -> Reply:
        asked = wire.read_preempt(body)
        pod, there = self._look(asked.pod)
        spared = decide.spare(pod, list(asked.victims), there)
        left = {node: asked.victims[node] for node in spared}
        return Reply(wire.write_victims(left), "answered", pod.uid)

    async def _bind(self, body: bytes, cause: str) -> Reply:
        bind = wire.read_bind(body)
        there = self._sight.situation(bind.uid)
        index = there.index
        if index is None:
            # Whether the node is of the pool is not known; without a claim it must not be bound.
            return Reply(wire.write_error(Reason.BLIND.text), "error", bind.uid)
        # A node that has come since the view was made may be one of the pool.
        in_pool = index.row_of.get(bind.node, NO_ROW) != NO_ROW or (
            there.freshness is not decide.Freshness.FRESH and bind.node not in there.outside
        )
        with cause_scope(f"{bind.uid}/{cause}", pod=bind.ref):
            outcome = await self._binder.bind(
                bind, in_pool=in_pool, term=index.view.term, cause=f"{bind.uid}/{cause}"
            )
        body = wire.write_error(outcome.error) if outcome.error else wire.write_bound()
        return Reply(body, outcome.word, bind.uid)

    def _look(self, raw: RawPod) -> tuple[PodRecord, decide.Situation]:
        """The pod in our words, and all that is known now."""
        there = self._sight.situation(raw.metadata.uid)
        pod = read_pod(raw, there.policy.resources if there.policy is not None else {})
        if pod.gpu is not None:
            self._inflight.remember(pod.uid, Size(pod.gpu, pod.cpus, pod.memory_mib))
        elif there.policy is not None and not decide.wants_gpus(pod):
            self._inflight.remember(pod.uid, None)
        return pod, there


def _plain(status: HTTPStatus, text: str) -> web.Response:
    headers = {"Retry-After": "1"} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
    return web.Response(status=status, text=text, headers=headers)
