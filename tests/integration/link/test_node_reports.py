"""Agents report to the leading bridge, each for its own node only."""

import asyncio
import random  # noqa: TID251 - jitter

import msgspec
import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.link.client import LinkClient
from slurmbridge.link.message import ClaimGrant
from slurmbridge.link.node_client import NodeClient
from slurmbridge.link.node_server import NODES, NodeService, is_of, speaks_for
from slurmbridge.link.server import LinkServer
from slurmbridge.pool.errors import PeerError
from slurmbridge.pool.noderecord import GpuOwner, NodeGpu, NodeOrders, NodePod, NodeReport
from tests.support.link import Certificates

CLOCK = SystemClock()
REPORT = NodeReport(
    "gpu001",
    registered=True,
    is_whole=True,
    gpus=(NodeGpu(0, "GPU-0", 0),),
    pods=(NodePod("u-1", "a/b", 7, (0,), 3, listed=True),),
)


class Bridge:
    """A link server with a node service that notes what it is told."""

    def __init__(self, tls=None, clients=(), organisation=""):
        self.said = []
        self.lost = []
        self.moment = 1
        self.orders = NodeOrders(as_of=5.0, owners=(GpuOwner(0, "claim", 7, "u-1"),))
        self.service = NodeService(
            on_report=self.said.append,
            on_lost=self.lost.append,
            orders=lambda node: self.orders,
            leads=lambda: self.server.follows,
            moment=lambda: self.moment,
            has_tls=tls is not None,
            organisation=organisation,
        )
        self.server = LinkServer(
            "127.0.0.1:0",
            on_claim=self._none,
            on_release_unbound=self._none,
            queries=self._query,
            clock=CLOCK,
            tls=tls,
            clients=clients,
            services=(self.service.handlers,),
        )

    async def _none(self, *_):
        return ClaimGrant(1, "", 1)

    async def _query(self, *_):
        return b"{}"

    async def start(self, *, leads=True, leader=""):
        await self.server.start()
        self.server.set_leader(leads, leader or self.server.address, term="t")
        return self


async def until(reached, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not reached():
            await asyncio.sleep(0.01)


def agent(addresses, node="kube-1", **how):
    got = []
    client = NodeClient(
        addresses, node, clock=CLOCK, rng=random.random, on_orders=got.append, **how
    )
    return client, got


async def test_a_report_reaches_the_leader_and_orders_come_back():
    bridge = await Bridge().start()
    client, orders = agent([bridge.server.address])
    task = asyncio.create_task(client.run())
    client.tell(REPORT, CLOCK.monotonic() - 0.2, client.acked, now=True)
    await until(lambda: bridge.said and orders)
    said = bridge.said[0]
    assert (said.node, said.report) == ("kube-1", REPORT)
    # An age, and no reading of the sender's clock.
    assert 0.2 <= said.age_s < 60
    assert said.after == 0
    assert orders == [bridge.orders]
    assert client.connected
    count = len(bridge.said)
    changed = NodeReport("gpu001", registered=False, is_whole=True)
    client.tell(changed, CLOCK.monotonic(), client.acked, now=True)
    await until(lambda: bridge.said[-1].report == changed)
    # It goes on each second without a change.
    await until(lambda: len(bridge.said) >= count + 2)
    task.cancel()
    await until(lambda: bridge.lost == ["kube-1"])
    await bridge.server.stop()


async def test_a_look_is_known_to_have_begun_after_what_the_bridge_had_acknowledged_by_then():
    bridge = await Bridge().start()
    client, _ = agent([bridge.server.address])
    task = asyncio.create_task(client.run())
    client.tell(REPORT, CLOCK.monotonic(), client.acked, now=True)
    await until(lambda: client.acked)
    before = client.acked
    bridge.moment = 7
    # This look began before the bridge learnt of 7, however late its report comes.
    client.tell(REPORT, CLOCK.monotonic(), before, now=True)
    await until(lambda: client.acked > before)
    assert bridge.said[-1].after == 1
    client.tell(REPORT, CLOCK.monotonic(), client.acked, now=True)
    await until(lambda: bridge.said[-1].after == 7)
    # A look that began under another stream proves nothing to this one.
    task.cancel()
    await until(lambda: bridge.lost)
    task = asyncio.create_task(client.run())
    count = len(bridge.said)
    await until(lambda: len(bridge.said) > count)
    assert bridge.said[count].after == 0
    task.cancel()
    await bridge.server.stop()


async def test_a_follower_points_to_the_leader():
    leader = await Bridge().start()
    follower = await Bridge().start(leads=False, leader=leader.server.address)
    client, _ = agent([follower.server.address])
    task = asyncio.create_task(client.run())
    client.tell(REPORT, CLOCK.monotonic(), client.acked, now=True)
    await until(lambda: leader.said)
    assert follower.said == []
    task.cancel()
    await leader.server.stop()
    await follower.server.stop()


@pytest.mark.parametrize(("name", "taken"), [("system:node:kube-1", True), ("kube-2", False)])
async def test_a_node_speaks_only_for_itself(tmp_path, name, taken):
    authority = Certificates(tmp_path)
    bridge = await Bridge(authority.issue("bridge", "IP:127.0.0.1", "DNS:bridge")).start()
    client, _ = agent(
        [bridge.server.address],
        tls=authority.issue(name, "DNS:agent"),
        server_name="bridge",
    )
    task = asyncio.create_task(client.run())
    client.tell(REPORT, CLOCK.monotonic(), client.acked, now=True)
    if taken:
        await until(lambda: bridge.said)
    else:
        await asyncio.sleep(1.5)
        assert bridge.said == []
        assert not client.connected
    task.cancel()
    await bridge.server.stop()


async def test_a_kubelets_certificate_reports_for_its_node_and_asks_for_no_claim(tmp_path):
    ours, kubernetes = Certificates(tmp_path), Certificates(tmp_path / "k", "kube")
    files = msgspec.structs.replace(
        ours.issue("bridge", "IP:127.0.0.1", "DNS:bridge"), also_ca=str(kubernetes.ca)
    )
    bridge = await Bridge(files, clients=("slurmbridge-extender.*",), organisation=NODES).start()
    user = kubernetes.issue("system:node:kube-1", into=tmp_path / "user")
    refused, _ = agent(
        [bridge.server.address],
        tls=msgspec.structs.replace(user, ca=str(ours.ca)),
        server_name="bridge",
    )
    trying = asyncio.create_task(refused.run())
    refused.tell(REPORT, CLOCK.monotonic(), refused.acked, now=True)
    await asyncio.sleep(1.5)
    assert bridge.said == [], "Kubernetes' authority signs for users as well"
    trying.cancel()
    issued = kubernetes.issue("system:node:kube-1", organisation=NODES)
    kubelet = msgspec.structs.replace(issued, ca=str(ours.ca))
    client, _ = agent([bridge.server.address], tls=kubelet, server_name="bridge")
    task = asyncio.create_task(client.run())
    client.tell(REPORT, CLOCK.monotonic(), client.acked, now=True)
    await until(lambda: bridge.said)
    for tls, allowed in (
        (kubelet, False),
        (ours.issue("other", "DNS:other.svc"), False),
        (ours.issue("extender", "DNS:slurmbridge-extender.slurmbridge.svc"), True),
    ):
        asker = LinkClient(
            [bridge.server.address],
            clock=CLOCK,
            rng=random.random,
            tls=tls,
            server_name="bridge",
        )
        try:
            answer = await asker.query("status", b"{}", 5.0)
        except PeerError as error:
            assert not allowed
            assert "no name in the certificate is allowed" in str(error)
        else:
            assert allowed
            assert answer == b"{}"
        await asker.close()
    task.cancel()
    await bridge.server.stop()


def test_names_of_certificates_are_compared_as_a_whole():
    forms = ("{node}", "system:node:{node}")
    assert speaks_for("a", ["x", "system:node:a"], forms)
    assert not speaks_for("a", ["system:node:ab", "a.evil"], forms)


@pytest.mark.parametrize(
    ("subjects", "is_so"),
    [
        (["CN=system:node:a,O=system:nodes"], True),
        (["O=system:nodes,CN=system:node:a"], True),
        (["CN=system:node:a"], False),
        (["CN=system:node:a,OU=system:nodes"], False),
        (["CN=system:node:a\\,O=system:nodes"], False),
        (["CN=a,O=system:nodes:not"], False),
        ([], False),
    ],
)
def test_an_organisation_counts_only_as_a_part_of_its_own(subjects, is_so):
    assert is_of(NODES, subjects) is is_so
    assert is_of("", subjects)
