"""The bridge's side of the link: streams the view to every extender, takes their claims.

Only the leader speaks; a follower says who leads. What is published is encoded once and shared by
all streams. A client that reads too slowly loses its queue and gets the whole view next: memory is
bounded, and it never falls behind for good. Everything runs on the event loop of the bridge, so
nothing here is locked.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
import msgspec

from slurmbridge.clock import Clock
from slurmbridge.link import codec
from slurmbridge.link import fault as faults
from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.address import Address, check_security, parse_address
from slurmbridge.link.delta import difference
from slurmbridge.link.fault import Fault, abort, fault_of
from slurmbridge.link.freshness import TermGuard
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
    """How much at once. queue: messages that a stream may be behind before it starts anew."""

    watchers: int = 64
    claims: int = 128
    queries: int = 8
    queue: int = 16


class LinkCounts(msgspec.Struct):
    """What happened since the start, for metrics."""

    wholes: int = 0
    deltas: int = 0
    heartbeats: int = 0
    collapsed: int = 0
    claims: int = 0
    overloaded: int = 0


class _Published(NamedTuple):
    view: View
    policy: Policy
    policy_bytes: bytes
    born: float
    """Our monotonic time at which the reading behind the view began."""


class _Change(NamedTuple):
    generation: int
    delta: bytes
    policy: bytes | None
    born: float


class _Watcher:
    """One stream: what it has not been sent yet."""

    def __init__(self, bound: int) -> None:
        self.queue: deque[_Change] = deque()
        self.wants_whole = True
        self.over: Fault | None = None
        self.wake = asyncio.Event()
        self._bound = bound

    def offer(self, change: _Change) -> bool:
        """Queue a change; whether that made the queue collapse into "whole view next"."""
        self.wake.set()
        if self.wants_whole:
            return False
        if len(self.queue) >= self._bound:
            self.start_anew()
            return True
        self.queue.append(change)
        return False

    def start_anew(self) -> None:
        self.queue.clear()
        self.wants_whole = True
        self.wake.set()

    def end(self, fault: Fault) -> None:
        self.over = fault
        self.wake.set()


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
        self._limits = limits
        self._claims = _Lane(limits.claims)
        self._questions = _Lane(limits.queries)
        self._server: grpc.aio.Server | None = None
        self._watchers: set[_Watcher] = set()
        self._leads = False
        self._hint = ""
        self._term = ""
        self._terms = TermGuard()
        self._published: _Published | None = None
        self._whole: bytes | None = None
        self.counts = LinkCounts()

    @property
    def address(self) -> str:
        """Where it listens, with the port that was found for port 0."""
        return str(self._address)

    @property
    def watchers(self) -> int:
        """Open streams."""
        return len(self._watchers)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is taken or not ours, or the certificates cannot be used.

        """
        calls = self._limits.watchers + self._limits.claims + self._limits.queries
        # Twice: calls over a limit of ours are to be told so, not cut off.
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=2 * calls)
        server.add_generic_rpc_handlers((self._handlers(),))
        self._address = self._address._replace(port=self._bind(server))
        await server.start()
        self._server = server
        _log.info("link listens", address=self.address, tls=self._tls is not None)

    async def stop(self) -> None:
        """End all streams and calls; may be called twice."""
        self._leads = False
        for watcher in self._watchers:
            watcher.end(Fault(faults.UNAVAILABLE, text="the bridge stops"))
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(STOP_S)

    def set_leader(self, is_leader: bool, leader_hint: str = "", *, term: str = "") -> None:
        """Lead or follow.

        Args:
            is_leader: whether we hold the Lease.
            leader_hint: address of the leader as clients reach it, as far as known.
            term: what the views of this leadership will carry, as `make_term` makes it. Empty: that
                of the first view published.

        """
        self._hint = leader_hint
        if is_leader and self._leads and term in ("", self._term):
            return
        if self._leads:
            # Whatever comes later of this leadership (a reading that was under way) is void, also
            # when we lead again: others have granted claims meanwhile.
            self._terms.retire(self._term, self._clock.monotonic())
            self._published, self._whole, self._term = None, None, ""
            for watcher in self._watchers:
                watcher.end(self._not_leader())
        self._leads = is_leader
        if is_leader and term:
            self._take_up(term)

    def publish(self, view: View, policy: Policy) -> None:
        """Stream a view; to be called for each new view, also when only `as_of` is newer.

        Does nothing while we follow, and nothing with a view of another leadership.

        Cost at 5,000 nodes: see docs/adr/0004-link-encoding.md; independent of the watchers but for
        one queue entry each.

        Raises:
            InvariantError: the generation went back, or stands while the content changed.

        """
        if not self._leads:
            return
        if view.term != self._term and not (self._term == "" and self._take_up(view.term)):
            _log.warning("view of another term not published", of=view.term, term=self._term)
            return
        old, now = self._published, self._clock.monotonic()
        if old is None:
            born = now - max(self._clock.wall() - view.as_of, 0.0)
            new = _Published(view, policy, codec.encode(policy), born)
            self._published, self._whole = new, None
            for watcher in self._watchers:
                watcher.start_anew()
            return
        delta = difference(old.view, view)
        if view.as_of == old.view.as_of:
            # The same reading does not get younger when someone sets the wall clock.
            born = old.born
        else:
            born = now - max(self._clock.wall() - view.as_of, 0.0)
        same_policy = policy == old.policy
        policy_bytes = old.policy_bytes if same_policy else codec.encode(policy)
        self._published = _Published(view, policy, policy_bytes, born)
        self._whole = None
        if delta is None:
            for watcher in self._watchers:
                watcher.start_anew()
            return
        change = _Change(
            view.generation, codec.encode(delta), None if same_policy else policy_bytes, born
        )
        for watcher in self._watchers:
            self.counts.collapsed += watcher.offer(change)

    def _take_up(self, term: str) -> bool:
        if not self._terms.admits(term, self._clock.monotonic()):
            return False
        self._term = term
        return True

    # Below: what the clients call.

    async def _watch(self, request: pb.WatchRequest, context: _Context) -> None:
        arrived = self._clock.monotonic()
        await self._admit(context)
        if request.version < VERSION:
            text = f"this bridge speaks version {VERSION} of the link, not {request.version}"
            await abort(context, Fault(faults.REJECTED, text=text, reason="version"))
        if len(self._watchers) >= self._limits.watchers:
            await self._overloaded(context, "too many watchers")
        watcher = _Watcher(self._limits.queue)
        self._watchers.add(watcher)
        _log.info("watcher came", client=request.client, peer=context.peer())
        try:
            fault = await self._feed(watcher, arrived, context)
        finally:
            self._watchers.discard(watcher)
            _log.info("watcher left", client=request.client, peer=context.peer())
        await abort(context, fault)

    async def _feed(self, watcher: _Watcher, arrived: float, context: _Context) -> Fault:
        is_first = True
        while watcher.over is None:
            message = self._next(watcher)
            if message is None and not is_first:
                watcher.wake.clear()
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await watcher.wake.wait()
                    continue
                except TimeoutError:
                    pass
            if message is None:
                message = self._heartbeat()
            is_first = False
            message.sent_s = self._clock.monotonic() - arrived
            try:
                async with asyncio.timeout(WRITE_S):
                    await context.write(message)
            except TimeoutError:
                return Fault(faults.UNAVAILABLE, text=f"did not read for {WRITE_S:g} s")
        return watcher.over

    def _next(self, watcher: _Watcher) -> pb.ViewMessage | None:
        """What the stream is to be sent now, aged as of now; None: it has everything."""
        published, now = self._published, self._clock.monotonic()
        if published is None:
            return None
        if watcher.wants_whole:
            watcher.wants_whole = False
            self.counts.wholes += 1
            if self._whole is None:
                self._whole = codec.encode(published.view)
            return pb.ViewMessage(
                version=VERSION,
                term=self._term,
                age_s=now - published.born,
                generation=published.view.generation,
                whole=self._whole,
                policy=published.policy_bytes,
            )
        if not watcher.queue:
            return None
        change = watcher.queue.popleft()
        self.counts.deltas += 1
        return pb.ViewMessage(
            version=VERSION,
            term=self._term,
            age_s=now - change.born,
            generation=change.generation,
            delta=change.delta,
            policy=change.policy,
        )

    def _heartbeat(self) -> pb.ViewMessage:
        self.counts.heartbeats += 1
        published = self._published
        if published is None:
            return pb.ViewMessage(version=VERSION, term=self._term)
        return pb.ViewMessage(
            version=VERSION,
            term=self._term,
            age_s=self._clock.monotonic() - published.born,
            generation=published.view.generation,
        )

    async def _claim(self, request: pb.ClaimRequest, context: _Context) -> pb.ClaimReply:
        await self._admit(context)
        if request.term and request.term != self._term:
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
        if not self._leads:
            await abort(context, self._not_leader())

    async def _overloaded(self, context: _Context, text: str) -> NoReturn:
        self.counts.overloaded += 1
        await abort(context, Fault(faults.OVERLOADED, text=text))

    def _not_leader(self) -> Fault:
        return Fault(faults.NOT_LEADER, text="this bridge does not lead", leader=self._hint)

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
