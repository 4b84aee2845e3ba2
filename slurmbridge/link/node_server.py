"""The bridge's side of the agents' reports: who may speak for which node, and what was said last.

Served on the link's own port (`NodeService.handlers` is added to its gRPC server). A node speaks
only for itself: with TLS one name of the client's certificate must be that of the node.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import msgspec

from slurmbridge.link import fault as faults
from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.fault import Fault, abort
from slurmbridge.link.message import VERSION, NodeSaid
from slurmbridge.log import get_logger
from slurmbridge.pool.errors import UNREADABLE
from slurmbridge.pool.noderecord import NodeOrders, NodeReport

_log = get_logger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Node"].full_name
SILENCE_S: Final = 3.0
"""A stream that brings no report for so long is dead; agents report each second."""
MOST_AGE_S: Final = 60.0
MOST_ACKED: Final = 64
"""Acknowledgements that an agent may still name; it names the newest that it has."""
CERTIFICATE_NAMES: Final = ("{node}", "system:node:{node}", "{node}.nodes.slurmbridge")
"""Names of which an agent's certificate must have one; {node} is the Kubernetes node name."""
NODES: Final = "system:nodes"
"""Organisation in the subject of a kubelet's client certificate (Kubernetes' node authorizer)."""
_NAME_KEYS: Final = ("x509_subject_alternative_name", "x509_common_name")

_COMMA_RE: Final = re.compile(r"(?<!\\),")

_reports: Final = msgspec.msgpack.Decoder(NodeReport)


class OnReport(Protocol):
    """Takes a report over; must not block."""

    def __call__(self, said: NodeSaid, /) -> None: ...  # noqa: D102


class OnLost(Protocol):
    """Told that an agent's stream has ended: what it said ages from now on."""

    def __call__(self, node: str, /) -> None: ...  # noqa: D102


class NodeService:
    """Takes the reports of all agents.

    Args:
        on_report: called with every report.
        on_lost: called when a node's stream ends and no newer one of it stands.
        orders: the newest orders for a node, None: none.
        leads: why this replica takes no reports (it follows), None when it does.
        moment: a number that grows with each thing that the bridge learns; > 0.
        has_tls: whether the port asks for client certificates; without, the name is believed.
        names: forms of certificate names.
        organisation: what the subject of a certificate must name as its O; "": anything. TLS does
            not tell which of several authorities has signed, and Kubernetes' signs for users too.
        limit: most agents at once.

    """

    def __init__(
        self,
        *,
        on_report: OnReport,
        on_lost: OnLost,
        orders: Callable[[str], NodeOrders | None],
        leads: Callable[[], Fault | None],
        moment: Callable[[], int],
        has_tls: bool,
        names: tuple[str, ...] = CERTIFICATE_NAMES,
        organisation: str = "",
        limit: int = 8192,
    ) -> None:
        self._on_report = on_report
        self._on_lost = on_lost
        self._orders = orders
        self._leads = leads
        self._moment = moment
        self._has_tls = has_tls
        self._names = names
        self._organisation = organisation
        self._limit = limit
        self._streams: dict[str, object] = {}

    @property
    def agents(self) -> int:
        """Agents that are connected."""
        return len(self._streams)

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Report": grpc.stream_stream_rpc_method_handler(
                    self._report,
                    pb.NodeReportMessage.FromString,
                    pb.NodeAck.SerializeToString,
                )
            },
        )

    async def _report(
        self, messages: AsyncIterator[pb.NodeReportMessage], context: _Context
    ) -> AsyncIterator[pb.NodeAck]:
        mark = object()
        node = ""
        sent: NodeOrders | None = None
        # What had been learnt when a report was acknowledged, by its sequence.
        acked: dict[int, int] = {}
        try:
            while True:
                follows = self._leads()
                if follows is not None:
                    await abort(context, follows)
                try:
                    async with asyncio.timeout(SILENCE_S):
                        message = await anext(messages)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    text = f"no report for {SILENCE_S:g} s"
                    await abort(context, Fault(faults.UNAVAILABLE, text=text))
                if message.node != node or not node:
                    await self._admit(message, node, context)
                    node = message.node
                    self._streams[node] = mark
                    _log.info("agent came", node=node, run=message.run)
                if self._streams.get(node) is not mark:
                    text = "a newer stream of this node has come"
                    await abort(context, Fault(faults.UNAVAILABLE, text=text))
                after = acked.get(message.after, 0)
                # None older is named any more.
                acked = {n: moment for n, moment in acked.items() if n >= message.after}
                self._on_report(await self._read(message, after, context))
                orders = self._orders(node)
                acked[message.sequence] = self._moment()
                while len(acked) > MOST_ACKED:
                    del acked[next(iter(acked))]
                ack = pb.NodeAck(sequence=message.sequence)
                if orders is not None and orders is not sent:
                    sent = orders
                    ack.orders = msgspec.msgpack.encode(orders)
                yield ack
        finally:
            if node and self._streams.get(node) is mark:
                del self._streams[node]
                _log.info("agent left", node=node)
                self._on_lost(node)

    async def _admit(self, message: pb.NodeReportMessage, before: str, context: _Context) -> None:
        if not message.node or before:
            text = "a stream speaks for one node, and says its name"
            await abort(context, Fault(faults.REJECTED, text=text, reason="form"))
        if message.version < VERSION:
            text = f"this bridge speaks version {VERSION} of the link, not {message.version}"
            await abort(context, Fault(faults.REJECTED, text=text, reason="version"))
        if self._has_tls:
            auth = context.auth_context()
            names = [n.decode(errors="replace") for key in _NAME_KEYS for n in auth.get(key, ())]
            if not speaks_for(message.node, names, self._names):
                _log.warning("agent refused", node=message.node, names=names[:8])
                text = f"no name of the certificate is that of node {message.node}"
                await abort(context, Fault(faults.FORBIDDEN, text=text))
            subjects = [s.decode(errors="replace") for s in auth.get("x509_subject", ())]
            if not is_of(self._organisation, subjects):
                _log.warning("agent refused", node=message.node, subjects=subjects[:8])
                text = f"the certificate is not of organisation {self._organisation}"
                await abort(context, Fault(faults.FORBIDDEN, text=text))
        if message.node not in self._streams and len(self._streams) >= self._limit:
            await abort(context, Fault(faults.OVERLOADED, text="too many agents"))

    async def _read(self, message: pb.NodeReportMessage, after: int, context: _Context) -> NodeSaid:
        try:
            report = _reports.decode(message.report)
        except UNREADABLE as error:
            text = f"report cannot be read: {error}"
            return await abort(context, Fault(faults.REJECTED, text=text, reason="form"))
        return NodeSaid(
            node=message.node,
            run=message.run,
            sequence=message.sequence,
            age_s=min(max(message.age_s, 0.0), MOST_AGE_S),
            after=after,
            report=report,
        )


def speaks_for(node: str, names: Iterable[str], forms: Iterable[str]) -> bool:
    """Whether one of a certificate's names is that of the node, in one of the forms."""
    wanted = {form.replace("{node}", node) for form in forms}
    return any(name in wanted for name in names)


def is_of(organisation: str, subjects: Iterable[str]) -> bool:
    """Whether a certificate's subject (RFC 2253: a comma within a value is escaped) names an O."""
    parts = {part for subject in subjects for part in _COMMA_RE.split(subject)}
    return not organisation or f"O={organisation}" in parts
