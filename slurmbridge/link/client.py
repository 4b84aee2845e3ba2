"""The extender's side of the link: finds the leader, keeps its view, asks it for claims.

One stream at a time. What is held is the view of the newest leadership seen, aging from the moment
at which the bridge began to read slurmctld; when the stream ends it goes on aging until another
leader sends its own. Nothing is decided here: the reader looks at `age_s` and judges.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

import grpc
import grpc.aio

from slurmbridge.clock import Clock
from slurmbridge.link import fault as faults
from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.address import Address, check_security, parse_address
from slurmbridge.link.channel import Endpoint, connect, open_channel, resolve
from slurmbridge.link.fault import error_of, read_fault
from slurmbridge.link.message import VERSION, ClaimAsk, ClaimGrant, ReleaseAsk
from slurmbridge.link.replica import LinkStats, OnChange, Replica, Stream
from slurmbridge.link.tls import Tls
from slurmbridge.log import get_logger
from slurmbridge.pool.errors import (
    ConfigError,
    ParseError,
    PeerError,
    PeerProtocolError,
    PeerTimeout,
    PeerUnavailable,
    Problem,
)
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.view import View

_log = get_logger(__name__)
_T = TypeVar("_T")

SILENCE_S: Final = 3.0
"""The server speaks at least each second; after this long without a word it is given up."""
HOPS: Final = 3
"""How many hints are followed in a row: two followers may name each other for a while."""
BACK_OFF_S: Final = 0.1
BACK_OFF_CAP_S: Final = 2.0

_PREFIX: Final = f"/{pb.DESCRIPTOR.services_by_name['Bridge'].full_name}/"


def back_off_s(attempt: int, roll: float) -> float:
    """Seconds to wait after a round without a leader: doubling up to the cap, half of it by chance.

    Args:
        attempt: rounds that failed before this one, >= 0.
        roll: random, in [0, 1).

    """
    span = min(BACK_OFF_CAP_S, BACK_OFF_S * 2.0 ** min(attempt, 16))
    return span * (0.5 + 0.5 * roll)


class _Leader(NamedTuple):
    channel: grpc.aio.Channel
    endpoint: Endpoint


class _Lost(NamedTuple):
    """How a stream ended. hint: where the leader is said to be."""

    had_view: bool
    why: str
    hint: Address | None = None


class LinkClient:
    """The client; `run` keeps it connected until `close`.

    Args:
        addresses: where bridges are (`slurmbridge.ns.svc:7443`, `unix:/path`), all replicas.
        clock: injected clock.
        rng: random numbers in [0, 1), for the back-off.
        tls: certificates; None: plain text, on this host or with `insecure` only.
        insecure: plain text over the network was asked for.
        server_name: name that the server's certificate must be for; "": the host of the address by
            which it was found.
        name: who we are, for the bridge's log.
        on_change: called with (view, policy) after either has changed in content, or was dropped;
            not for a view that only got younger. Must not block.

    Raises:
        ConfigError: no address, one that cannot be read, or plain text where it is not allowed.

    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        clock: Clock,
        rng: Callable[[], float],
        tls: Tls | None = None,
        insecure: bool = False,
        server_name: str = "",
        name: str = "extender",
        on_change: OnChange | None = None,
    ) -> None:
        self._insecure = insecure
        self._tls = tls
        self._addresses = self._checked(addresses)
        self._clock = clock
        self._rng = rng
        self._server_name = server_name
        self._name = name
        self._replica = Replica(clock, on_change)
        self._leader: _Leader | None = None
        self._silent: Endpoint | None = None
        self._running: asyncio.Task[Any] | None = None
        self._is_closed = False

    # What is known.

    @property
    def view(self) -> View | None:
        """The newest view; None before the first, and after a new leader was seen until its own."""
        return self._replica.view

    @property
    def policy(self) -> Policy | None:
        """The policy that came with the view."""
        return self._replica.policy

    @property
    def generation(self) -> int | None:
        """Generation of the view, within its term."""
        view = self._replica.view
        return None if view is None else view.generation

    @property
    def term(self) -> str:
        """The newest leadership seen; "" before the first."""
        return self._replica.term

    @property
    def leader(self) -> str:
        """Address of the bridge that streams to us now, or ""."""
        return "" if self._leader is None else str(self._leader.endpoint.address)

    def age_s(self) -> float | None:
        """Seconds since the reading of slurmctld behind the view began, at most; None: no view."""
        return self._replica.age_s()

    @property
    def stats(self) -> LinkStats:
        """What happened since the start."""
        return self._replica.stats

    # What can be asked.

    async def claim(self, ask: ClaimAsk, deadline_s: float) -> ClaimGrant:
        """A claim for a pod on a node, from the leader of the view.

        Raises:
            PeerRejected: a definite no; `reason` and `peer` are those of whoever said it.
            PeerTimeout: the deadline passed; the claim may exist.
            PeerUnavailable: no leader is connected, or no answer came; the claim may exist.

        """
        leader = self._needed_leader("Claim")
        request = pb.ClaimRequest(
            uid=ask.uid,
            namespace=ask.namespace,
            name=ask.name,
            kube_node=ask.kube_node,
            cause=ask.cause,
            term=self._replica.term,
        )
        call = leader.channel.unary_unary(
            _PREFIX + "Claim", pb.ClaimRequest.SerializeToString, pb.ClaimReply.FromString
        )
        reply = await _answered("Claim", call(request, timeout=deadline_s))
        return ClaimGrant(job_id=reply.job_id, gpus=reply.gpus, generation=reply.generation)

    async def release_unbound(self, ask: ReleaseAsk, deadline_s: float) -> None:
        """Tell the bridge that the pod of a claim was not bound. Errors as `claim`."""
        leader = self._needed_leader("ReleaseUnbound")
        request = pb.ReleaseUnboundRequest(
            uid=ask.uid,
            namespace=ask.namespace,
            name=ask.name,
            job_id=ask.job_id,
            cause=ask.cause,
        )
        call = leader.channel.unary_unary(
            _PREFIX + "ReleaseUnbound",
            pb.ReleaseUnboundRequest.SerializeToString,
            pb.ReleaseUnboundReply.FromString,
        )
        await _answered("ReleaseUnbound", call(request, timeout=deadline_s))

    async def query(self, name: str, args: bytes, deadline_s: float) -> bytes:
        """Answer of the leader to `status`, `explain`, `who`; works without `run`.

        Args:
            name: of the question.
            args: JSON object.
            deadline_s: for all of it, finding the leader included.

        Returns:
            JSON.

        Raises:
            PeerRejected: the bridge does not know the question, or what it is about.
            PeerUnavailable: no leader was found or it did not answer.

        """
        request = pb.QueryRequest(name=name, args=args)

        async def ask(channel: grpc.aio.Channel, left_s: float) -> bytes:
            call = channel.unary_unary(
                _PREFIX + "Query", pb.QueryRequest.SerializeToString, pb.QueryReply.FromString
            )
            return bytes((await call(request, timeout=left_s)).answer)

        end = self._clock.monotonic() + deadline_s
        if self._leader is not None:
            return await _answered("Query", ask(self._leader.channel, deadline_s))
        try:
            async with asyncio.timeout(deadline_s):
                return await self._ask_around("Query", ask, end)
        except TimeoutError as error:
            raise PeerTimeout("bridge", "Query", f"no answer in {deadline_s:g} s") from error

    # How it stays connected.

    async def run(self) -> None:
        """Keep a stream open to the leader until `close` is called or the task is cancelled."""
        self._running = asyncio.current_task()
        attempt, said = 0, ""
        while not self._is_closed:
            why = "no address could be resolved"
            for endpoint in await self._endpoints():
                lost = await self._follow(endpoint)
                why = lost.why
                if lost.had_view:
                    attempt, said = 0, ""
                    break
            if why != said:
                said = why
                _log.warning("no leader streams to us", attempt=attempt, why=why)
            await self._clock.sleep(back_off_s(attempt, self._rng()))
            attempt += 1

    async def close(self) -> None:
        """End `run` and the connection; may be called twice."""
        self._is_closed = True
        task, self._running = self._running, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait([task])

    async def _endpoints(self) -> list[Endpoint]:
        """All places of a round.

        A random one comes first so that clients spread, the one that fell silent last: a stopped
        host takes long to be found dead again.
        """
        found = await asyncio.gather(
            *(resolve(address, self._server_name) for address in self._addresses)
        )
        endpoints = list(dict.fromkeys(endpoint for group in found for endpoint in group))
        start = int(self._rng() * len(endpoints))
        endpoints = endpoints[start:] + endpoints[:start]
        return sorted(endpoints, key=lambda endpoint: endpoint == self._silent)

    async def _follow(self, endpoint: Endpoint) -> _Lost:
        """Watch an endpoint, then where it points, as long as that leads somewhere."""
        lost = await self._watch(endpoint)
        had_view, hops = lost.had_view, 0
        while lost.hint is not None and hops < HOPS:
            hops += 1
            hint, lost = lost.hint, lost._replace(hint=None)
            for target in await self._resolved_hint(hint, endpoint):
                lost = await self._watch(target)
                had_view |= lost.had_view
                if lost.had_view or lost.hint is not None:
                    break
        return lost._replace(had_view=had_view)

    async def _resolved_hint(self, hint: Address, giver: Endpoint) -> list[Endpoint]:
        # A number has no name of its own: the leader shows the certificate of its service.
        name = self._server_name or (giver.name if hint.is_ip else hint.host)
        return await resolve(hint, name)

    async def _watch(self, endpoint: Endpoint) -> _Lost:
        """Hold a stream until it ends."""
        before = self.stats.wholes
        hint: Address | None = None
        try:
            async with self._connected(endpoint) as channel:
                asked = self._clock.monotonic()
                call = channel.unary_stream(
                    _PREFIX + "Watch", pb.WatchRequest.SerializeToString, pb.ViewMessage.FromString
                )(pb.WatchRequest(version=VERSION, client=self._name))
                self.stats.streams += 1
                await self._read(call, channel, endpoint, asked)
            why = "the stream ended"
        except grpc.aio.AioRpcError as error:
            hint = self._hint(error)
            why = str(error_of("Watch", error))
        except TimeoutError:
            self.stats.silences += 1
            self._silent = endpoint
            why = f"{endpoint.address}: silent for {SILENCE_S:g} s"
        except PeerProtocolError as error:
            self.stats.protocol_errors += 1
            _log.warning("link protocol error", peer=str(endpoint.address), error=str(error))
            why = str(error)
        except (PeerError, ConfigError) as error:
            why = str(error)
        finally:
            self._leader = None
        return _Lost(self.stats.wholes > before, why, hint)

    @asynccontextmanager
    async def _connected(self, endpoint: Endpoint) -> AsyncIterator[grpc.aio.Channel]:
        channel = open_channel(endpoint, self._tls)
        try:
            await connect(channel, endpoint)
            yield channel
        finally:
            await channel.close()

    async def _read(
        self,
        call: grpc.aio.UnaryStreamCall[Any, Any],
        channel: grpc.aio.Channel,
        endpoint: Endpoint,
        asked: float,
    ) -> None:
        """Take in messages until the stream ends."""
        stream = Stream(asked)
        while True:
            async with asyncio.timeout(SILENCE_S):
                message = await call.read()
            if not isinstance(message, pb.ViewMessage):
                return
            self._replica.take(stream, message)
            if self._leader is None:
                self._leader = _Leader(channel, endpoint)
                _log.info("leader found", leader=self.leader, term=self.term)

    def _hint(self, error: grpc.aio.AioRpcError) -> Address | None:
        fault = read_fault(error)
        if fault is None or fault.kind != faults.NOT_LEADER or not fault.leader:
            return None
        try:
            return self._checked([fault.leader])[0]
        except ConfigError as refused:
            _log.warning("hint not followed", error=str(refused))
            return None

    def _needed_leader(self, op: str) -> _Leader:
        if self._leader is None:
            raise PeerUnavailable("bridge", op, "no leader is connected")
        return self._leader

    async def _ask_around(
        self, op: str, ask: Callable[[grpc.aio.Channel, float], Awaitable[_T]], end: float
    ) -> _T:
        """Ask each endpoint, and where it points, until one answers."""
        why: PeerError = PeerUnavailable("bridge", op, "no address could be resolved")
        for first in await self._endpoints():
            targets, hops = [first], 0
            while targets:
                target = targets.pop()
                try:
                    async with self._connected(target) as channel:
                        return await ask(channel, max(end - self._clock.monotonic(), 0.001))
                except grpc.aio.AioRpcError as error:
                    why, hint = error_of(op, error), self._hint(error)
                    if not isinstance(why, PeerUnavailable):
                        raise why from error
                    if hint is not None and hops < HOPS:
                        hops += 1
                        targets = await self._resolved_hint(hint, target)
                except PeerUnavailable as error:
                    why = error
        raise why

    def _checked(self, texts: Sequence[str]) -> list[Address]:
        problems: list[Problem] = []
        addresses: list[Address] = []
        for index, text in enumerate(texts):
            path = f"$.link.addresses[{index}]"
            try:
                address = parse_address(text)
                check_security(
                    address, has_tls=self._tls is not None, insecure=self._insecure, path=path
                )
                addresses.append(address)
            except ParseError as error:
                problems.append(Problem(path, str(error)))
            except ConfigError as error:
                problems.extend(error.problems)
        if not addresses and not problems:
            problems.append(Problem("$.link.addresses", "at least one address must be given"))
        if problems:
            raise ConfigError(problems)
        return addresses


async def _answered(op: str, call: Awaitable[_T]) -> _T:
    """The answer of a call, or the error of ours that its failure means."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_of(op, error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # gRPC cancels the calls of a channel that is given up; nobody has cancelled the caller.
        raise PeerUnavailable("bridge", op, "the connection was given up") from error
