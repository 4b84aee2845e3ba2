"""The bridge's side of the link: streams the view to every extender, takes their claims.

Only the leader speaks; a follower says who leads. What is streamed is in `feed`; here are the gRPC
methods, their limits, deadlines and faults. Everything runs on the event loop of the bridge, so
nothing here is locked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
import msgspec

from slurmbridge.clock import Clock
from slurmbridge.link import fault as faults
from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.address import Address, check_security, parse_address
from slurmbridge.link.fault import Fault, abort, fault_of
from slurmbridge.link.feed import Feed, LinkCounts, Watcher
from slurmbridge.link.message import VERSION, ClaimAsk, ClaimGrant, ReleaseAsk
from slurmbridge.link.tls import Tls, peer_is_allowed, server_credentials
from slurmbridge.log import cause_scope, get_logger
from slurmbridge.pool.errors import ConfigError, ParseError, Problem
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.view import View

_log = get_logger(__name__)
_T = TypeVar("_T")
_Context = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Bridge"].full_name
HEARTBEAT_S: Final = 1.0
"""Longest silence of a stream; a client takes three of them for a dead peer."""
WRITE_S: Final = 10.0
"""A client that has not taken one message within this time is cut off."""
LONGEST_CALL_S: Final = 60.0
"""Deadline of a call that came without one."""
STOP_S: Final = 1.0
MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Largest message: a whole view has about 210 bytes a node."""

_OPTIONS: Final = (
    # Without it two servers may listen on one port, and each gets half of the clients.
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", 1024 * 1024),
    # Clients ping every 2 s; the defaults would cut them off for it.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
)


class OnClaim(Protocol):
    """Grants a claim, or raises `PeerRejected` (no), `PeerUnavailable` (nobody knows).

    deadline_s: seconds left. It is cancelled at the deadline and when the client goes away; what
    must not be torn in the middle shields itself.
    """

    def __call__(self, ask: ClaimAsk, deadline_s: float, /) -> Awaitable[ClaimGrant]: ...  # noqa: D102


class OnRelease(Protocol):
    """Notes that a claim's pod was not bound; ends the claim after proof. Errors as `OnClaim`."""

    def __call__(self, ask: ReleaseAsk, deadline_s: float, /) -> Awaitable[None]: ...  # noqa: D102


class Queries(Protocol):
    """Answers a question of the command line with JSON; raises `PeerRejected` for unknown names."""

    def __call__(self, name: str, args: bytes, deadline_s: float, /) -> Awaitable[bytes]: ...  # noqa: D102


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much at once. queue: messages that a stream may be behind before it starts anew.

    agents: node agents, one stream each.
    """

    watchers: int = 64
    claims: int = 128
    queries: int = 8
    queue: int = 16
    agents: int = 8192


class _Lane:
    """Calls of one kind in progress."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.busy = 0


class LinkServer:
    """The server. It follows until `set_leader(True, ...)`.

    Args:
        address: `host:port` (port 0: any free one) or `unix:/path`.
        tls: certificates; every client must show one of the same CA. None: plain text, on this host
            or with `insecure` only.
        insecure: plain text over the network was asked for.
        clients: patterns (`*.slurmbridge.svc`) of which one must match a name in the client's
            certificate; none: every certificate of the CA may come.
        services: further services on the same port (`NodeService.handlers`); they judge their
            clients themselves.

    Raises:
        ConfigError: the address is not one, or plain text is not allowed there.

    """

    def __init__(
        self,
        address: str,
        *,
        on_claim: OnClaim,
        on_release_unbound: OnRelease,
        queries: Queries,
        clock: Clock,
        tls: Tls | None = None,
        insecure: bool = False,
        clients: tuple[str, ...] = (),
        limits: Limits = Limits(),  # noqa: B008 - frozen
        services: Sequence[grpc.GenericRpcHandler] = (),
    ) -> None:
        try:
            self._address = parse_address(address)
        except ParseError as error:
            raise ConfigError([Problem("$.link.listen", str(error))]) from error
        has_tls = tls is not None
        check_security(self._address, has_tls=has_tls, insecure=insecure, path="$.link.listen")
        self._on_claim = on_claim
        self._on_release = on_release_unbound
        self._queries = queries
        self._clock = clock
        self._tls = tls
        self._clients = clients
        self._services = tuple(services)
        self._limits = limits
        self._claims = _Lane(limits.claims)
        self._questions = _Lane(limits.queries)
        self._server: grpc.aio.Server | None = None
        self._feed = Feed(clock, limits.queue)

    @property
    def address(self) -> str:
        """Where it listens, with the port that was found for port 0."""
        return str(self._address)

    @property
    def watchers(self) -> int:
        """Open streams."""
        return len(self._feed.watchers)

    @property
    def follows(self) -> Fault | None:
        """Why this replica takes no calls (it is not the leader); None when it does."""
        return None if self._feed.leads else self._feed.not_leader

    @property
    def counts(self) -> LinkCounts:
        """What happened since the start."""
        return self._feed.counts

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is taken or not ours, or the certificates cannot be used.

        """
        limits = self._limits
        calls = limits.watchers + limits.claims + limits.queries + limits.agents
        # Twice: calls over a limit of ours are to be told so, not cut off.
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=2 * calls)
        server.add_generic_rpc_handlers((self._handlers(), *self._services))
        self._address = self._address._replace(port=self._bind(server))
        await server.start()
        self._server = server
        _log.info("link listens", address=self.address, tls=self._tls is not None)

    async def stop(self) -> None:
        """End all streams and calls; may be called twice."""
        self._feed.end(Fault(faults.UNAVAILABLE, text="the bridge stops"))
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(STOP_S)

    def set_leader(self, is_leader: bool, leader_hint: str = "", *, term: str = "") -> None:
        """Lead or follow; see `Feed.set_leader`."""
        self._feed.set_leader(is_leader, leader_hint, term=term)

    def publish(self, view: View, policy: Policy) -> None:
        """Stream a view; see `Feed.publish`."""
        self._feed.publish(view, policy)

    # Below: what the clients call.

    async def _watch(self, request: pb.WatchRequest, context: _Context) -> None:
        arrived = self._clock.monotonic()
        await self._admit(context)
        if request.version < VERSION:
            text = f"this bridge speaks version {VERSION} of the link, not {request.version}"
            await abort(context, Fault(faults.REJECTED, text=text, reason="version"))
        if self.watchers >= self._limits.watchers:
            await self._overloaded(context, "too many watchers")
        watcher = self._feed.join()
        _log.info("watcher came", client=request.client, peer=context.peer())
        try:
            fault = await self._send(watcher, arrived, context)
        finally:
            self._feed.leave(watcher)
            _log.info("watcher left", client=request.client, peer=context.peer())
        await abort(context, fault)

    async def _send(self, watcher: Watcher, arrived: float, context: _Context) -> Fault:
        is_first = True
        while watcher.over is None:
            message = self._feed.next_for(watcher)
            if message is None and not is_first:
                watcher.wake.clear()
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await watcher.wake.wait()
                    continue
                except TimeoutError:
                    # A change may have come in the same turn: a heartbeat that tells of its
                    # generation before it was sent would be a gap to the client.
                    message = self._feed.next_for(watcher)
            if message is None:
                message = self._feed.heartbeat()
            is_first = False
            message.sent_s = self._clock.monotonic() - arrived
            try:
                async with asyncio.timeout(WRITE_S):
                    await context.write(message)
            except TimeoutError:
                return Fault(faults.UNAVAILABLE, text=f"did not read for {WRITE_S:g} s")
        return watcher.over

    async def _claim(self, request: pb.ClaimRequest, context: _Context) -> pb.ClaimReply:
        await self._admit(context)
        if request.term and request.term != self._feed.term:
            text = "the node was chosen on the view of another leader"
            await abort(context, Fault(faults.UNAVAILABLE, text=text))
        ask = ClaimAsk(
            uid=request.uid,
            namespace=request.namespace,
            name=request.name,
            kube_node=request.kube_node,
            cause=request.cause,
        )
        if not (ask.uid and ask.namespace and ask.name and ask.kube_node):
            text = "uid, namespace, name and kube_node must be given"
            await abort(context, Fault(faults.REJECTED, text=text, reason="form"))
        self.counts.claims += 1
        with cause_scope(ask.cause):
            grant = await self._answer(
                context, self._claims, lambda deadline_s: self._on_claim(ask, deadline_s)
            )
        return pb.ClaimReply(job_id=grant.job_id, gpus=grant.gpus, generation=grant.generation)

    async def _release(
        self, request: pb.ReleaseUnboundRequest, context: _Context
    ) -> pb.ReleaseUnboundReply:
        await self._admit(context)
        ask = ReleaseAsk(
            uid=request.uid,
            namespace=request.namespace,
            name=request.name,
            job_id=request.job_id,
            cause=request.cause,
        )
        with cause_scope(ask.cause):
            await self._answer(
                context, self._claims, lambda deadline_s: self._on_release(ask, deadline_s)
            )
        return pb.ReleaseUnboundReply()

    async def _query(self, request: pb.QueryRequest, context: _Context) -> pb.QueryReply:
        await self._admit(context)
        answer = await self._answer(
            context,
            self._questions,
            lambda deadline_s: self._queries(request.name, request.args, deadline_s),
        )
        return pb.QueryReply(answer=answer)

    async def _answer(
        self, context: _Context, lane: _Lane, work: Callable[[float], Awaitable[_T]]
    ) -> _T:
        """Do the work within the caller's deadline, or end the call with its fault."""
        if lane.busy >= lane.limit:
            await self._overloaded(context, f"{lane.limit} calls are in progress")
        left = context.time_remaining()
        # gRPC gives a call without a deadline one that is centuries away.
        deadline_s = LONGEST_CALL_S if left is None else min(left, LONGEST_CALL_S)
        lane.busy += 1
        try:
            async with asyncio.timeout(deadline_s):
                return await work(deadline_s)
        except Exception as error:  # noqa: BLE001 - the client is told, the log has the story
            fault = fault_of(error)
            if fault.kind == faults.BUG:
                _log.exception("link call failed")
        finally:
            lane.busy -= 1
        return await abort(context, fault)

    async def _admit(self, context: _Context) -> None:
        if not peer_is_allowed(context, self._clients if self._tls else ()):
            _log.warning("client refused: no name of its certificate is allowed")
            text = "no name in the certificate is allowed here"
            await abort(context, Fault(faults.FORBIDDEN, text=text))
        if not self._feed.leads:
            await abort(context, self._feed.not_leader)

    async def _overloaded(self, context: _Context, text: str) -> NoReturn:
        self.counts.overloaded += 1
        await abort(context, Fault(faults.OVERLOADED, text=text))

    def _handlers(self) -> grpc.GenericRpcHandler:
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Watch": grpc.unary_stream_rpc_method_handler(
                    self._watch,
                    pb.WatchRequest.FromString,
                    pb.ViewMessage.SerializeToString,
                ),
                "Claim": unary(
                    self._claim, pb.ClaimRequest.FromString, pb.ClaimReply.SerializeToString
                ),
                "ReleaseUnbound": unary(
                    self._release,
                    pb.ReleaseUnboundRequest.FromString,
                    pb.ReleaseUnboundReply.SerializeToString,
                ),
                "Query": unary(
                    self._query, pb.QueryRequest.FromString, pb.QueryReply.SerializeToString
                ),
            },
        )

    def _bind(self, server: grpc.aio.Server) -> int:
        address: Address = self._address
        target = str(address)
        try:
            if address.path:
                # Made for our own user only; nothing else runs between these lines.
                before = os.umask(0o177)
                try:
                    server.add_insecure_port(target)
                finally:
                    os.umask(before)
                return 0
            if self._tls is None:
                return server.add_insecure_port(target)
            return server.add_secure_port(target, server_credentials(self._tls, "$.link.tls"))
        except RuntimeError as error:
            text = f"cannot listen on {address}: {error}"
            raise ConfigError([Problem("$.link.listen", text)]) from error
