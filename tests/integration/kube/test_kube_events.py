"""Events in a real API server: found the way `kubectl describe` looks for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.kube import events as events_module
from slurmbridge.kube.events import EventTeller, Subject
from slurmbridge.kube.session import KubeSession
from tests.support.kube import KubeCluster
from tests.support.kube_objects import node, pod

pytestmark = pytest.mark.kube


def teller_of(session: KubeSession) -> EventTeller:
    return EventTeller(session, "slurmbridge", "pod-0", clock=SystemClock(), uniform=lambda: 0.5)


def described(kube: KubeCluster, kind: str, made: dict[str, Any]) -> list[dict[str, Any]]:
    """What `kubectl describe` asks for: events by name, kind and UID of their object."""
    meta = made["metadata"]
    selector = {
        "involvedObject.kind": kind,
        "involvedObject.name": meta["name"],
        "involvedObject.uid": meta["uid"],
    }
    if meta.get("namespace"):
        selector["involvedObject.namespace"] = meta["namespace"]
    text = ",".join(f"{k}={v}" for k, v in selector.items())
    return kube.api.items("/api/v1/events", fieldSelector=text)


async def test_events_of_pods_and_nodes_are_found_by_describe(
    kube: KubeCluster, session: KubeSession, namespace: str
) -> None:
    a_pod = kube.api.create(pod("p", namespace=namespace))
    a_node = kube.api.create(node(namespace, hollow=False))
    teller = teller_of(session)
    on_pod = Subject("Pod", "p", a_pod["metadata"]["uid"], namespace)
    on_node = Subject("Node", namespace, a_node["metadata"]["uid"])
    teller.tell(on_pod, "ClaimGranted", "GPUs 0-3 of gpu-1")
    teller.tell(on_node, "Drained", "by an operator", warning=True)
    await teller.flush()
    (first,) = described(kube, "Pod", a_pod)
    assert (first["reason"], first["type"], first["count"]) == ("ClaimGranted", "Normal", 1)
    assert first["source"] == {"component": "slurmbridge"}
    (second,) = described(kube, "Node", a_node)
    assert (second["reason"], second["type"]) == ("Drained", "Warning")
    assert teller.written == 2


async def test_repetitions_raise_the_count_of_the_same_event(
    kube: KubeCluster,
    session: KubeSession,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events_module, "REPEAT_S", 0.2)
    made = kube.api.create(pod("p", namespace=namespace))
    teller = teller_of(session)
    task = asyncio.create_task(teller.run())
    try:
        for _ in range(20):
            teller.tell(
                Subject("Pod", "p", made["metadata"]["uid"], namespace), "NoRoom", "no 8 free GPUs"
            )
            await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            while teller.written < 20:
                await asyncio.sleep(0.05)
    finally:
        task.cancel()
    (event,) = described(kube, "Pod", made)
    assert event["count"] == 20
    assert event["lastTimestamp"] >= event["firstTimestamp"]


async def test_an_event_for_a_namespace_that_is_gone_is_dropped(session: KubeSession) -> None:
    teller = teller_of(session)
    teller.tell(Subject("Pod", "p", "u", "no-such-namespace"), "NoRoom", "x")
    await teller.flush()
    assert (teller.written, teller.dropped) == (0, 1)
