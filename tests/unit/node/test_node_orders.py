"""The bridge's ledger counts for the audit only while its stream stands."""

from types import SimpleNamespace

import msgspec

from slurmbridge.agent import Agent
from slurmbridge.clock import SystemClock
from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.pool.noderecord import GpuOwner, NodeOrders

OWNERS = (GpuOwner(0, "free"),)


class Stream:
    """A stream with one acknowledgement, which then ends."""

    def __init__(self, node):
        self.node, self.seen = node, []
        orders = msgspec.msgpack.encode(NodeOrders(as_of=5.0, owners=OWNERS, closed=(2,)))
        self.acks = [pb.NodeAck(sequence=1, orders=orders)]

    def stream_stream(self, *_):
        return lambda _messages: self

    async def read(self):
        self.seen.append(self.node._orders.owners)
        return self.acks.pop() if self.acks else None

    def cancel(self):
        pass


async def test_the_ledger_of_a_bridge_that_is_gone_is_forgotten_and_what_it_closed_is_not():
    node = SimpleNamespace(
        name="kube-1",
        _node=SimpleNamespace(tls=None, bridge=["127.0.0.1:7001"], bridge_name=""),
        _config=SimpleNamespace(link=SimpleNamespace(insecure=False)),
        _clock=SystemClock(),
        _plugin=SimpleNamespace(changed=lambda: None),
        _orders=NodeOrders(),
    )
    stream = Stream(node)
    await Agent._link(node)._report(stream)
    assert stream.seen == [(), OWNERS]
    assert node._orders.owners == ()
    assert node._orders.closed == (2,)
