"""The extender under a real kube-scheduler: what its answers do to real pods."""

from __future__ import annotations

import asyncio
import itertools
from typing import NamedTuple

import aiohttp
import pytest

from slurmbridge.link.message import ClaimGrant
from slurmbridge.pool import keys
from slurmbridge.pool.errors import PeerRejected
from slurmbridge.pool.reason import Reason
from tests.support.extender import ExtenderProcess
from tests.support.kube_objects import pod
from tests.support.link import bridges
from tests.support.pool_view import make_node
from tests.support.ports import reserve

pytestmark = pytest.mark.kube

PODS = "/api/v1/namespaces/default/pods"
NODES = [f"gpu{i:02d}" for i in range(6)]


class Stage(NamedTuple):
    """A control plane with a scheduler that asks an extender at a fixed port."""

    kube: object
    port: int


@pytest.fixture(scope="module")
def stage(kube_cluster):
    kube = kube_cluster()
    kube.create_nodes([*NODES, "outside"], hollow=False)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    kube.api.create(account | {"metadata": {"name": "default", "namespace": "default"}})
    ports = reserve(1)
    kube.start_scheduler(
        extenders=[
            {
                "urlPrefix": f"http://127.0.0.1:{ports[0]}",
                "filterVerb": "filter",
                "prioritizeVerb": "prioritize",
                "bindVerb": "bind",
                "preemptVerb": "preempt",
                "weight": 100,
                "nodeCacheCapable": True,
                "ignorable": False,
                "httpTimeout": "5s",
                "managedResources": [{"name": "nvidia.com/gpu"}],
            }
        ]
    )
    return Stage(kube, ports[0])


class Play:
    """One test: a bridge with a view, an extender, pods."""

    def __init__(self, stage, bridge, process):
        self.kube, self.bridge, self.process = stage.kube, bridge, process
        self._jobs = itertools.count(1)
        self.free = dict.fromkeys(NODES, 8)
        self.bridge.on_claim = self.grant

    async def grant(self, ask):
        """Like slurmctld: the only one who counts; each claim is of one GPU."""
        if self.free[ask.kube_node] < 1:
            raise PeerRejected("slurmctld", "salloc", "Requested nodes are busy", "busy")
        self.free[ask.kube_node] -= 1
        view = self.publish()
        return ClaimGrant(next(self._jobs), str(self.free[ask.kube_node]), view.generation)

    def publish(self, **blocked):
        return self.bridge.publish(
            *(
                make_node(
                    name, free=free, claimed=8 - free, memory_free_mib=512_000,
                    blocked=blocked.get(name, ""),
                )
                for name, free in self.free.items()
            )
        )  # fmt: skip

    async def show(self, **blocked):
        """Publish, and wait until the extender sees it."""
        wanted = f"slurmbridge_extender_view_generation {self.publish(**blocked).generation}.0"
        url = f"http://127.0.0.1:{self.process.admin_port}/metrics"
        async with asyncio.timeout(30), aiohttp.ClientSession() as session:
            while True:
                async with session.get(url) as reply:
                    if wanted in await reply.text():
                        return
                await asyncio.sleep(0.01)

    async def create(self, name, gpus=1, **how):
        await asyncio.to_thread(self.kube.api.create, pod(name, gpus=gpus, **how))

    async def pod(self, name):
        return await asyncio.to_thread(self.kube.api.get, f"{PODS}/{name}")

    async def node_of(self, name, within_s=20.0):
        async with asyncio.timeout(within_s):
            while not (node := (await self.pod(name))["spec"].get("nodeName")):
                await asyncio.sleep(0.02)
        return node

    async def said_of(self, name, within_s=20.0):
        """The message of its PodScheduled condition, once there is one."""
        async with asyncio.timeout(within_s):
            while True:
                for condition in (await self.pod(name))["status"].get("conditions", []):
                    if condition["type"] == "PodScheduled" and condition["status"] == "False":
                        return condition["reason"], condition["message"]
                await asyncio.sleep(0.02)

    async def wake(self, name):
        await asyncio.to_thread(
            self.kube.api.patch,
            f"{PODS}/{name}",
            {"metadata": {"annotations": {keys.WAKE: f"w-{next(self._jobs)}"}}},
        )


@pytest.fixture
async def play(stage):
    async with bridges() as (bridge,), aiohttp.ClientSession() as session:
        bridge.lead("t1", *(make_node(name) for name in NODES))
        process = await asyncio.to_thread(
            ExtenderProcess,
            *("--bridge", bridge.address, "--kubeconfig", stage.kube.kubeconfig),
            listen=f"127.0.0.1:{stage.port}",
        )
        play = Play(stage, bridge, process)
        try:
            await process.ready(session)
            await play.show()
            yield play
        finally:
            await asyncio.to_thread(process.stop)
            await asyncio.to_thread(stage.kube.api.delete, PODS, 0)


async def test_pods_fill_one_node_before_the_next_and_carry_their_claims(play):
    names = [f"p{i}" for i in range(10)]
    for name in names:
        await play.create(name)
        await play.node_of(name)
    nodes = [await play.node_of(name) for name in names]
    assert 2 == len(set(nodes)), "best fit: eight on one node, two on another"
    assert 8 == max(map(nodes.count, nodes))
    notes = [(await play.pod(name))["metadata"]["annotations"] for name in names]
    assert 10 == len({note[keys.CLAIM] for note in notes})
    assert "outside" not in nodes


async def test_many_pods_at_once_get_exactly_the_gpus_there_are(play):
    play.free = dict.fromkeys(NODES, 2)
    await play.show()
    names = [f"q{i}" for i in range(20)]
    affinity = {"nodeSelector": {"kubernetes.io/os": "linux"}, "affinity": _not("outside")}
    await asyncio.gather(*(play.create(name, spec=affinity) for name in names))

    async def bound():
        pods = await asyncio.to_thread(play.kube.api.items, PODS)
        return [p for p in pods if p["spec"].get("nodeName")]

    async with asyncio.timeout(30):
        while len(await bound()) < 12:
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    where = [
        (p["spec"]["nodeName"], p["metadata"]["annotations"][keys.GPUS]) for p in await bound()
    ]
    assert 12 == len(where) == len(set(where))
    assert {0} == set(play.free.values())


async def test_a_refused_pod_is_told_why_and_comes_back_when_woken(play):
    await play.show(**dict.fromkeys(NODES, "DRAIN"))
    await play.create("waits", spec={"affinity": _not("outside")})
    reason, message = await play.said_of("waits")
    assert "Unschedulable" == reason
    assert f"6 {Reason.SLURM_STATE.text}" in message
    await play.show()
    await play.wake("waits")
    assert await play.node_of("waits", 5.0) in NODES


async def test_a_pod_of_a_node_outside_the_pool_needs_no_claim(play):
    await play.show(**dict.fromkeys(NODES, "DRAIN"))
    await play.create("else")
    assert "outside" == await play.node_of("else")
    assert [] == play.bridge.claims
    assert not (await play.pod("else"))["metadata"].get("annotations")


async def test_a_pod_without_gpus_is_not_sent_to_us(play):
    await play.show(**dict.fromkeys(NODES, "DRAIN"))
    await play.create("cpu", gpus=0)
    assert await play.node_of("cpu")
    assert [] == play.bridge.claims


async def test_a_lost_bridge_is_an_error_that_heals_by_itself(stage):
    async with bridges() as (bridge,), aiohttp.ClientSession() as session:
        process = await asyncio.to_thread(
            ExtenderProcess,
            *("--bridge", bridge.address, "--kubeconfig", stage.kube.kubeconfig),
            listen=f"127.0.0.1:{stage.port}",
        )
        play = Play(stage, bridge, process)
        try:
            await play.create("early")
            reason, message = await play.said_of("early")
            assert ("SchedulerError", True) == (reason, Reason.BLIND.text in message)
            bridge.lead("t1", *(make_node(name) for name in NODES))
            play.publish()
            await process.ready(session)
            assert await play.node_of("early")
        finally:
            await asyncio.to_thread(process.stop)
            await asyncio.to_thread(stage.kube.api.delete, PODS, 0)


async def test_no_pod_is_evicted_where_slurm_would_not_give_the_node(play):
    """kubernetes/kubernetes#92866: a node full of pods, but drained in Slurm."""
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    await asyncio.to_thread(play.kube.api.create, priority | {"metadata": {"name": "high"}})
    low = {"affinity": _only(NODES[:2])}
    names = [f"low{i}" for i in range(16)]
    await asyncio.gather(*(play.create(name, spec=low) for name in names))
    for name in names:
        await play.node_of(name)
    await play.show(**{NODES[0]: "DRAIN"})
    await play.create("vip", gpus=8, spec=low | {"priorityClassName": "high"})
    async with asyncio.timeout(20):
        while True:
            pods = await asyncio.to_thread(play.kube.api.items, PODS)
            left = [
                p
                for p in pods
                if p["metadata"]["name"].startswith("low")
                and not p["metadata"].get("deletionTimestamp")
            ]
            if len(left) == 8:
                break
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    pods = await asyncio.to_thread(play.kube.api.items, PODS)
    left = {
        p["spec"]["nodeName"]
        for p in pods
        if p["metadata"]["name"].startswith("low") and not p["metadata"].get("deletionTimestamp")
    }
    assert {NODES[0]} == left, "only the pods of the node that eviction can free are gone"


def _only(names, operator="In"):
    term = {"key": "kubernetes.io/hostname", "operator": operator, "values": list(names)}
    required = {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _not(name):
    return _only([name], "NotIn")
