"""List and watch of real pods, through a proxy that makes what goes wrong in real life."""

from __future__ import annotations

import asyncio
import contextlib
import random  # noqa: TID251 - seeded by the test
from collections.abc import AsyncIterator, Callable
from math import isfinite
from typing import Any

import msgspec
import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.kube.access import Access
from slurmbridge.kube.reflector import Added, Change, Deleted, Listed, Modified, Reflector
from slurmbridge.kube.session import MAX_ANSWER_BYTES, KubeSession, resource_path
from slurmbridge.pool.errors import SlurmBridgeError
from slurmbridge.pool.podspec import read_node, read_pod
from slurmbridge.pool.raw import RawNode, RawPod
from slurmbridge.pool.record import KubeNode, PodRecord
from tests.support.fault_proxy import (
    Answer,
    Cut,
    FaultProxy,
    Insert,
    Seen,
    Silence,
    error_event,
    lists,
    status_body,
    watches,
)
from tests.support.fixtures import KubeFactory
from tests.support.kube import KubeCluster
from tests.support.kube_objects import GPU, node, pod

pytestmark = pytest.mark.kube

_POD = msgspec.json.Decoder(RawPod)
_NODE = msgspec.json.Decoder(RawNode)


def decode_pod(raw: bytes) -> PodRecord:
    return read_pod(_POD.decode(raw), {GPU: ""})


def decode_node(raw: bytes) -> KubeNode:
    return read_node(_NODE.decode(raw), {GPU})


class Mirror:
    """What a consumer knows: it follows the changes and waits for a state."""

    def __init__(self, session: KubeSession, namespace: str, **how: Any) -> None:
        self.errors: list[SlurmBridgeError] = []
        self.known: dict[str, PodRecord] = {}
        self.changes: list[str] = []
        self.vanished: list[str] = []
        self.reflector = Reflector(
            session,
            resource_path("api", "v1", "namespaces", namespace, "pods"),
            decode_pod,
            clock=SystemClock(),
            uniform=random.Random(1).random,
            report=self.errors.append,
            **how,
        )

    async def take(self, change: Change[PodRecord]) -> None:
        self.changes.append(type(change).__name__)
        match change:
            case Listed(items):
                fresh = {i.name: i for i in items}
                self.vanished += [name for name in self.known if name not in fresh]
                self.known = fresh
            case Deleted(item):
                del self.known[item.name]
            case Added(item) | Modified(item):
                self.known[item.name] = item

    async def until(self, true: Callable[[], bool], within_s: float = 10.0) -> None:
        async with asyncio.timeout(within_s):
            while not true():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(mirror: Mirror) -> AsyncIterator[Mirror]:
    task = asyncio.create_task(mirror.reflector.run(mirror.take))
    try:
        await mirror.until(lambda: bool(mirror.changes))
        yield mirror
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Pods:
    """Makes and removes pods as someone else."""

    def __init__(self, kube: KubeCluster, namespace: str) -> None:
        self._api = kube.api
        self._namespace = namespace

    def add(self, *names: str) -> None:
        self._api.create_all(pod(n, namespace=self._namespace, gpus=1) for n in names)

    def add_fat(self, *names: str) -> None:
        """Each of 1.3 MB, near the 1.5 that etcd takes."""
        env = [{"name": f"E{i}", "value": "y" * 130_000} for i in range(10)]
        for name in names:
            body = pod(name, namespace=self._namespace, gpus=1)
            body["spec"]["containers"][0]["env"] = env
            self._api.create(body)

    def remove(self, *names: str) -> None:
        for name in names:
            self._api.delete(self._path(name), grace_s=0)

    def note(self, name: str, value: str) -> None:
        body = {"metadata": {"annotations": {"slurmbridge.dev/reason": value}}}
        self._api.patch(self._path(name), body)

    def _path(self, name: str) -> str:
        return self._api.path("Pod", name, self._namespace)


@pytest.fixture
def pods(kube: KubeCluster, namespace: str) -> Pods:
    return Pods(kube, namespace)


async def test_what_is_there_and_what_changes_is_told_as_records(
    session: KubeSession, pods: Pods, namespace: str
) -> None:
    pods.add("a", "b")
    async with running(Mirror(session, namespace)) as mirror:
        assert mirror.known.keys() == {"a", "b"}
        assert mirror.known["a"].gpu is not None
        pods.add("c")
        pods.note("a", "waiting")
        pods.remove("b")
        await mirror.until(lambda: mirror.known.keys() == {"a", "c"})
        assert mirror.known["a"].annotations == {"slurmbridge.dev/reason": "waiting"}
        # A pod gets its deletionTimestamp before it is gone.
        assert mirror.changes == ["Listed", "Added", "Modified", "Modified", "Deleted"]
        assert isfinite(mirror.reflector.age_s)


async def test_a_list_of_many_pages_is_whole(
    proxied: KubeSession, proxy: FaultProxy, pods: Pods, namespace: str
) -> None:
    names = {f"p{i}" for i in range(53)}
    pods.add(*names)
    async with running(Mirror(proxied, namespace, page=10)) as mirror:
        assert mirror.known.keys() == names
        assert proxy.count(lists) == 6


async def test_a_selection_is_obeyed_and_what_leaves_it_is_deleted(
    session: KubeSession, pods: Pods, namespace: str, kube: KubeCluster
) -> None:
    pods.add("a", "b")
    selection = {"fieldSelector": "metadata.name=a"}
    async with running(Mirror(session, namespace, selection=selection)) as mirror:
        assert mirror.known.keys() == {"a"}
        pods.add("c")
        pods.remove("a")
        await mirror.until(lambda: not mirror.known)
        assert mirror.changes == ["Listed", "Modified", "Deleted"]


FAULTS: dict[str, Any] = {
    "410 as HTTP status": Answer(410, status_body(410, "Expired")),
    "410 as event in a 200 stream": Insert(error_event(410, "Expired")),
    "500 as event in a 200 stream": Insert(error_event(500, "InternalError")),
    "overloaded": Answer(429, status_body(429, "TooManyRequests"), {"Retry-After": "1"}),
    "gateway": Answer(502, b"<html>"),
    "404 of an ingress": Answer(404, b"<html>"),
    "401 once": Answer(401, status_body(401, "Unauthorized")),
    "empty 200": Answer(200, b""),
    "cut before the first line": Cut(),
    "ended before the first line": Cut(abort=False),
    "cut within a line": Cut(torn=True),
    "ended within a line": Cut(torn=True, abort=False),
    "cut after a line": Cut(after_lines=1),
    "not JSON": Insert(b"<html>\n"),
    "JSON of another kind": Insert(b'{"type":"ADDED","object":{"spec":7}}\n'),
    "an event nobody knows": Insert(b'{"type":"EXPLODED","object":{"metadata":{}}}\n'),
    "silent from the start": Silence(),
    "silent after a line": Silence(after_lines=1),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_after_any_fault_of_a_watch_the_consumer_knows_the_truth(
    proxied: KubeSession, proxy: FaultProxy, pods: Pods, namespace: str, fault: Any
) -> None:
    pods.add("a", "b")
    proxy.add(fault, when=watches, times=2)
    async with running(Mirror(proxied, namespace, idle_s=0.5)) as mirror:
        pods.add("c", "d")
        pods.remove("a")
        pods.note("b", "seen")
        pods.remove("c")
        await mirror.until(
            lambda: (
                mirror.known.keys() == {"b", "d"}
                and mirror.known["b"].annotations == {"slurmbridge.dev/reason": "seen"}
            )
        )


@pytest.mark.parametrize(
    "fault",
    [
        Answer(500, b""),
        Answer(200, b"{}"),
        Answer(200, b'{"kind":"PodList","metadata":{},"items":null'),
        Cut(torn=True),
        Cut(torn=True, abort=False),
    ],
)
async def test_half_a_list_or_no_list_is_never_told(
    proxied: KubeSession, proxy: FaultProxy, pods: Pods, namespace: str, fault: Any
) -> None:
    pods.add("a", "b")
    rule = proxy.add(fault, when=lists, times=2)
    async with running(Mirror(proxied, namespace)) as mirror:
        assert rule.used == 2
        assert mirror.known.keys() == {"a", "b"}


async def test_deletions_that_nobody_saw_are_found_by_the_next_list(
    proxied: KubeSession, proxy: FaultProxy, pods: Pods, namespace: str
) -> None:
    pods.add("a", "b", "c")
    async with running(Mirror(proxied, namespace)) as mirror:
        await mirror.until(lambda: proxy.count(watches) == 1)
        proxy.add(Answer(503, b""), when=watches, times=3)
        proxy.add(Answer(410, status_body(410, "Expired")), when=watches)
        proxy.drop_all()
        pods.remove("b")
        await mirror.until(lambda: mirror.known.keys() == {"a", "c"})
        assert mirror.vanished == ["b"]


async def test_packets_that_are_swallowed_are_noticed_and_made_good(
    proxied: KubeSession, proxy: FaultProxy, pods: Pods, namespace: str
) -> None:
    pods.add("a")
    async with running(Mirror(proxied, namespace, idle_s=0.5)) as mirror:
        await mirror.until(lambda: proxy.count(watches) == 1)
        proxy.mute()
        pods.add("b")
        pods.remove("a")
        await asyncio.sleep(1.0)
        assert mirror.known.keys() == {"a"}
        assert mirror.reflector.age_s > 0.5
        proxy.unmute()
        await mirror.until(lambda: mirror.known.keys() == {"b"})


async def test_a_server_that_closes_each_watch_at_once_is_not_hammered(
    proxied: KubeSession, proxy: FaultProxy, namespace: str
) -> None:
    proxy.add(Answer(200, b""), when=watches, times=1e9)
    async with running(Mirror(proxied, namespace)):
        await asyncio.sleep(2.5)
        assert proxy.count(watches) <= 6


async def test_410_on_each_watch_does_not_become_a_storm_of_lists(
    proxied: KubeSession, proxy: FaultProxy, namespace: str
) -> None:
    proxy.add(Answer(410, status_body(410, "Expired")), when=watches, times=1e9)
    async with running(Mirror(proxied, namespace)):
        await asyncio.sleep(2.5)
        assert proxy.count(lists) <= 6


async def test_an_api_server_that_is_killed_and_comes_back_is_followed(
    kube: KubeCluster, session: KubeSession, pods: Pods, namespace: str
) -> None:
    pods.add("a")
    async with running(Mirror(session, namespace)) as mirror:
        await asyncio.to_thread(kube.kill9_api)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(kube.start_api)
        pods.add("b")
        pods.remove("a")
        await mirror.until(lambda: mirror.known.keys() == {"b"}, within_s=20)


async def test_an_api_server_that_is_set_back_is_believed_from_the_first_moment(
    kube_cluster: KubeFactory,
) -> None:
    """Its versions soon are those again that we have seen: what is there now has to be listed."""
    kube = await asyncio.to_thread(kube_cluster)
    async with KubeSession(Access.from_kubeconfig(str(kube.kubeconfig), SystemClock())) as session:
        pods = Pods(kube, "default")
        pods.add("a")
        async with running(Mirror(session, "default")) as mirror:
            saved = await asyncio.to_thread(kube.save_etcd)
            pods.add("b", "c")
            pods.remove("a")
            await mirror.until(lambda: mirror.known.keys() == {"b", "c"})
            await asyncio.to_thread(kube.restore_etcd, saved)
            for i in range(20):
                pods.note("a", f"{i}")
            await mirror.until(lambda: mirror.known.keys() == {"a"}, within_s=20)
            pods.add("d")
            await mirror.until(lambda: mirror.known.keys() == {"a", "d"}, within_s=20)


async def test_an_api_server_that_stands_still_is_noticed(
    kube: KubeCluster, session: KubeSession, pods: Pods, namespace: str
) -> None:
    pods.add("a")
    async with running(Mirror(session, namespace, idle_s=1.0)) as mirror:
        kube.pause_api()
        try:
            await mirror.until(lambda: bool(mirror.errors))
        finally:
            kube.resume_api()
        pods.add("b")
        await mirror.until(lambda: mirror.known.keys() == {"a", "b"}, within_s=20)


async def test_a_version_from_the_future_does_not_stay_silent_for_ever(
    session: KubeSession, pods: Pods, namespace: str
) -> None:
    """After a restore of etcd a version that we know lies ahead of the server's."""
    pods.add("a")
    mirror = Mirror(session, namespace, idle_s=1.0)
    mirror.reflector._version = "99999999"
    async with running(mirror):
        assert mirror.known.keys() == {"a"}


async def test_nodes_are_followed_too(
    kube: KubeCluster, session: KubeSession, namespace: str
) -> None:
    seen: list[Change[KubeNode]] = []

    async def take(change: Change[KubeNode]) -> None:
        seen.append(change)

    reflector = Reflector(
        session, "/api/v1/nodes", decode_node, clock=SystemClock(), uniform=lambda: 0.5
    )
    task = asyncio.create_task(reflector.run(take))
    try:
        async with asyncio.timeout(10):
            while not seen:
                await asyncio.sleep(0.01)
            kube.api.create(node(namespace, hollow=False))
            while not any(isinstance(c, Modified) and c.item.name == namespace for c in seen):
                kube.api.patch(f"/api/v1/nodes/{namespace}", {"spec": {"unschedulable": True}})
                await asyncio.sleep(0.1)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    last = [c.item for c in seen if isinstance(c, Modified) and c.item.name == namespace][-1]
    assert (last.unschedulable, last.gpus, last.ready) == (True, {GPU: 8}, True)


@pytest.mark.parametrize("seed", range(3))
async def test_the_consumer_converges_whatever_the_network_does(
    proxied: KubeSession, proxy: FaultProxy, pods: Pods, namespace: str, seed: int
) -> None:
    """Random changes under random faults, then quiet: mirror and API server agree."""
    rng = random.Random(seed)
    there: set[str] = set()
    faults = [*FAULTS.values()]

    def any_read(seen: Seen) -> bool:
        return seen.method == "GET"

    async with running(Mirror(proxied, namespace, idle_s=0.3, page=3)) as mirror:
        for number in range(60):
            if there and rng.random() < 0.4:
                name = rng.choice(sorted(there))
                await asyncio.to_thread(pods.remove, name)
                there.remove(name)
            else:
                there.add(f"p{number}")
                await asyncio.to_thread(pods.add, f"p{number}")
            if rng.random() < 0.3:
                proxy.add(rng.choice(faults), when=any_read)
            if rng.random() < 0.1:
                proxy.drop_all()
        proxy.clear()
        await mirror.until(lambda: mirror.known.keys() == there, within_s=30)


async def test_pods_as_fat_as_etcd_takes_are_listed_all_the_same(
    session: KubeSession, pods: Pods, namespace: str
) -> None:
    """Any user can make them, and more of them than one answer may hold."""
    names = {f"fat{i}" for i in range(30)}
    assert len(names) * 1_300_000 > MAX_ANSWER_BYTES
    try:
        await asyncio.to_thread(pods.add_fat, *names)
        async with running(Mirror(session, namespace)) as mirror:
            assert mirror.known.keys() == names
            assert mirror.errors == []
    finally:
        await asyncio.to_thread(pods.remove, *names)  # they would stand in everybody's lists
