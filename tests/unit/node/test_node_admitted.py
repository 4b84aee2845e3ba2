"""Which pod the plugin takes for the one being admitted while the watch is behind the kubelet."""

from __future__ import annotations

import asyncio

from slurmbridge.clock import SystemClock
from slurmbridge.node import plugin as plugin_module
from slurmbridge.node.book import Book
from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.identity import Listed, PodFacts, Veto, Want
from slurmbridge.node.plugin import DevicePlugin, Response

DEVICES = DeviceMap(gpus=tuple(Gpu(i, f"GPU-{i}", i, f"/dev/nvidia{i}") for i in range(8)))

MAIN = (Want("main", 1),)


def pod(name, gpu, uid="", wants=MAIN, **more):
    return PodFacts(uid or f"uid-{name}", "a", name, wants, 7 + gpu, (gpu,), **more)


RUNNING = pod("running", 0, wants=(Want("prepare", 1, "init"), Want("main", 1)))
RUNS = Listed("a", "running", {"main": frozenset({"GPU-0"})})
"""The kubelet never lists what the init container had."""


class Pods:
    """The API server (all) and our watch, which is behind (seen)."""

    def __init__(self, seen, *more):
        self.seen, self.all, self.asked = seen, {p.name: p for p in (*seen, *more)}, []

    def known(self):
        return self.seen

    async def fetch(self, namespace, name):
        self.asked.append(name)
        return self.all.get(name)


async def admitted(tmp_path, pods, *listing, served=()):
    class Kubelet:
        async def list(self, deadline_s=1.0):
            return list(listing)

    async def nothing(*_):
        return ""

    book = Book(str(tmp_path / "book.json"))
    for one in served:
        for want in one.wants:
            book.give(one.uid, one.ref, one.job_id, want.container, ["GPU-0"], [0])
    plugin = DevicePlugin(
        devices=lambda: DEVICES,
        healthy=list,
        pods=pods,
        lister=Kubelet(),
        book=book,
        verify=nothing,
        busy=nothing,
        response=Response(),
        clock=SystemClock(),
    )
    return await plugin._admitted(())


async def test_a_new_pod_is_not_taken_for_one_whose_init_container_has_ended(tmp_path):
    new = pod("new", 1)
    pods = Pods([RUNNING], new)
    found = await admitted(tmp_path, pods, RUNS, Listed("a", "new"), served=[RUNNING])
    assert found == new


async def test_a_new_pod_is_not_taken_for_the_old_one_of_its_name(tmp_path):
    old, new = pod("web-0", 0, created="1"), pod("web-0", 1, uid="uid-new", created="2")
    found = await admitted(tmp_path, Pods([old], new), Listed("a", "web-0"), served=[old])
    assert found == new


async def test_who_was_given_all_is_meant_where_nobody_else_waits(tmp_path):
    pods = Pods([RUNNING], PodFacts("u", "a", "cpu-only"))
    found = await admitted(tmp_path, pods, RUNS, Listed("a", "cpu-only"), served=[RUNNING])
    assert found == RUNNING


async def test_nothing_is_asked_for_a_new_pod_that_is_known(tmp_path):
    new = pod("new", 1)
    pods = Pods([RUNNING, new])
    listing = [RUNS, Listed("a", "new"), Listed("a", "cpu-only")]
    assert await admitted(tmp_path, pods, *listing, served=[RUNNING]) == new
    assert pods.asked == []


async def test_all_that_the_watch_lacks_is_asked_at_once(tmp_path):
    new = [PodFacts(f"u-{i}", "a", f"cpu-{i}") for i in range(40)] + [pod("new", 1)]
    all_asked = asyncio.Event()

    class Together(Pods):
        async def fetch(self, namespace, name):
            self.asked.append(name)
            if len(self.asked) == len(new):
                all_asked.set()
            async with asyncio.timeout(5):
                await all_asked.wait()
            return self.all.get(name)

    found = await admitted(tmp_path, Together([], *new), *(Listed("a", p.name) for p in new))
    assert found == new[-1]


async def test_an_api_server_that_is_silent_holds_the_kubelet_up_no_longer_than_once(
    tmp_path, monkeypatch
):
    class Silent(Pods):
        async def fetch(self, namespace, name):
            await asyncio.Event().wait()

    monkeypatch.setattr(plugin_module, "FETCH_S", 0.01)
    new = [pod(f"new-{i}", i) for i in range(8)]
    found = await admitted(tmp_path, Silent([], *new), *(Listed("a", p.name) for p in new))
    assert isinstance(found, Veto)
    assert found.code == "unknown"
