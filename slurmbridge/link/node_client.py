"""The agent's side of its reports: finds the leading bridge, and tells it the node's state.

A report goes out at each change and at least each second. Only the newest one counts, so there is
no queue: what is overtaken is never sent.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio
import msgspec

from slurmbridge.clock import Clock
from slurmbridge.link import fault as faults
from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.address import Address, check_security, parse_address
from slurmbridge.link.channel import Endpoint, connect, open_channel, resolve
from slurmbridge.link.client import back_off_s
from slurmbridge.link.fault import error_of, read_fault
from slurmbridge.link.message import VERSION
from slurmbridge.link.tls import Tls
from slurmbridge.log import get_logger
from slurmbridge.pool.errors import UNREADABLE, ConfigError, ParseError, PeerError, Problem
from slurmbridge.pool.noderecord import NodeOrders, NodeReport

_log = get_logger(__name__)

BEAT_S: Final = 1.0
SILENCE_S: Final = 4.0
"""A bridge that acknowledges nothing for so long is given up."""
SERVICE: Final = pb.DESCRIPTOR.services_by_name["Node"].full_name

_orders: Final = msgspec.msgpack.Decoder(NodeOrders)


class NodeClient:
    """Tells the leading bridge what `tell` was given last, until `run` is cancelled.

    Args:
        addresses: of the bridges.
        node: Kubernetes node name.
        clock: for ages.
        rng: random numbers in [0, 1), for the back-off.
        tls: certificates; None: plain text, on this host or with `insecure` only.
        insecure: plain text over the network was asked for.
        server_name: name to expect in the bridge's certificate; "": the host of the address.
        on_orders: called with new orders.
        on_lost: called when a stream has ended: the orders may be overtaken.

    Raises:
        ConfigError: an address cannot be used.

    """

    def __init__(
        self,
        addresses: Sequence[str],
        node: str,
        *,
        clock: Clock,
        rng: Callable[[], float],
        tls: Tls | None = None,
        insecure: bool = False,
        server_name: str = "",
        on_orders: Callable[[NodeOrders], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._addresses: list[Address] = []
        for at, text in enumerate(addresses):
            path = f"$.node.bridge[{at}]"
            try:
                address = parse_address(text)
            except ParseError as error:
                raise ConfigError([Problem(path, str(error))]) from error
            check_security(address, has_tls=tls is not None, insecure=insecure, path=path)
            self._addresses.append(address)
        self._node = node
        self._clock = clock
        self._rng = rng
        self._tls = tls
        self._server_name = server_name
        self._on_orders = on_orders
        self._on_lost = on_lost
        self._run = uuid.uuid4().hex[:12]
        self._sequence = 0
        self._newest: tuple[NodeReport, float, int] | None = None
        self._acked = 0
        self._wake = asyncio.Event()
        self._acked_at = float("-inf")

    @property
    def connected(self) -> bool:
        """Whether a bridge has taken a report of ours lately."""
        return self._clock.monotonic() - self._acked_at < SILENCE_S

    @property
    def acked(self) -> int:
        """The newest acknowledgement; to be read before a look begins."""
        return self._acked

    def tell(self, report: NodeReport, began: float, after: int, *, now: bool) -> None:
        """The node's state.

        Args:
            report: all of it.
            began: monotonic seconds, when the look behind it began.
            after: `acked` as it was before that.
            now: it differs from the last one: send it at once.

        """
        self._newest = (report, began, after)
        if now:
            self._wake.set()

    async def run(self) -> None:
        """Keep a stream to the leader, for ever."""
        attempt, said = 0, ""
        while True:
            why = "no address could be resolved"
            for address in self._addresses:
                for endpoint in await resolve(address, self._server_name):
                    before = self._acked_at
                    why = await self._follow(endpoint)
                    if self._acked_at > before:
                        attempt, said = 0, ""
            if why != said:
                said = why
                _log.warning("no bridge takes our reports", why=why)
            await self._clock.sleep(back_off_s(attempt, self._rng()))
            attempt += 1

    async def _follow(self, endpoint: Endpoint, hops: int = 2) -> str:
        """Report to an endpoint, then where it points; why it ended."""
        try:
            channel = open_channel(endpoint, self._tls)
            try:
                await connect(channel, endpoint)
                await self._report(channel)
            finally:
                await channel.close()
        except grpc.aio.AioRpcError as error:
            fault = read_fault(error)
            if fault is not None and fault.kind == faults.NOT_LEADER and fault.leader and hops:
                try:
                    hint = parse_address(fault.leader)
                except ParseError as odd:
                    return str(odd)
                name = self._server_name or (endpoint.name if hint.is_ip else hint.host)
                for target in await resolve(hint, name):
                    return await self._follow(target, hops - 1)
            return str(error_of("Report", error))
        except TimeoutError:
            return f"{endpoint.address}: silent for {SILENCE_S:g} s"
        except (PeerError, ConfigError) as error:
            return str(error)
        return "the stream ended"

    async def _report(self, channel: grpc.aio.Channel) -> None:
        call = channel.stream_stream(
            f"/{SERVICE}/Report",
            pb.NodeReportMessage.SerializeToString,
            pb.NodeAck.FromString,
        )(self._messages())
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    ack: Any = await call.read()
                if not isinstance(ack, pb.NodeAck):
                    return
                if not self.connected:
                    _log.info("the bridge takes our reports")
                self._acked_at = self._clock.monotonic()
                self._acked = ack.sequence
                if ack.orders:
                    try:
                        self._on_orders(_orders.decode(ack.orders))
                    except UNREADABLE as error:
                        _log.warning("orders cannot be read", error=str(error))
        finally:
            call.cancel()
            self._on_lost()

    async def _messages(self) -> AsyncIterator[pb.NodeReportMessage]:
        while True:
            self._wake.clear()
            if self._newest is not None:
                report, began, after = self._newest
                self._sequence += 1
                yield pb.NodeReportMessage(
                    version=VERSION,
                    node=self._node,
                    run=self._run,
                    sequence=self._sequence,
                    age_s=self._clock.monotonic() - began,
                    report=msgspec.msgpack.encode(report),
                    after=after,
                )
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                continue
