"""Our writes against a real API server: idempotent, for one UID, and of single keys only."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from slurmbridge.kube.session import KubeSession
from slurmbridge.kube.write import (
    delete_pod,
    evict_pod,
    fetch_pod,
    lift_gate,
    nominate_node,
    patch_node_annotations,
    patch_node_condition,
    patch_pod_annotations,
    post_binding,
)
from slurmbridge.pool import keys
from slurmbridge.pool.errors import Conflict, ParseError, PeerRejected, PeerUnavailable
from slurmbridge.pool.podspec import read_node
from slurmbridge.pool.raw import RawNode
from slurmbridge.pool.record import GpuRequest
from tests.support.fault_proxy import (
    Answer,
    FaultProxy,
    LoseAnswer,
    Seen,
    Silence,
    status_body,
    writes,
)
from tests.support.kube import KubeCluster
from tests.support.kube_objects import GPU, node, pod

pytestmark = pytest.mark.kube

RESOURCES = {GPU: ""}
NOTE = {keys.CLAIM: "17/uid", keys.GPUS: "0-3"}
OTHER_UID = "00000000-0000-0000-0000-000000000000"


class Place:
    """A namespace with the means to set scenes and to look."""

    def __init__(self, kube: KubeCluster, namespace: str) -> None:
        self.kube = kube
        self.namespace = namespace

    def make(self, name: str = "p", **how: Any) -> tuple[str, str, str]:
        """A pod; its namespace, name and UID."""
        made = self.kube.api.create(pod(name, namespace=self.namespace, gpus=4, **how))
        return self.namespace, name, made["metadata"]["uid"]

    def path(self, name: str = "p") -> str:
        return self.kube.api.path("Pod", name, self.namespace)

    def get(self, name: str = "p") -> dict[str, Any]:
        return self.kube.api.get(self.path(name))

    def run(self, name: str = "p") -> None:
        """Play the kubelet: the pod runs and is ready."""
        condition = {"type": "Ready", "status": "True"}
        status = {"status": {"phase": "Running", "conditions": [condition]}}
        self.kube.api.patch(self.path(name) + "/status", status)


@pytest.fixture
def place(kube: KubeCluster, namespace: str) -> Place:
    return Place(kube, namespace)


def bindings(seen: Seen) -> bool:
    return seen.path.endswith("/binding")


# Looking


async def test_a_pod_is_looked_at_by_its_uid(session: KubeSession, place: Place) -> None:
    namespace, name, uid = place.make()
    found = await fetch_pod(session, namespace, name, RESOURCES, uid)
    assert found is not None
    assert (found.uid, found.gpu, found.phase) == (uid, GpuRequest(4), "Pending")
    assert await fetch_pod(session, namespace, name, RESOURCES) == found
    assert await fetch_pod(session, namespace, name, RESOURCES, OTHER_UID) is None
    assert await fetch_pod(session, namespace, "nobody", RESOURCES) is None
    assert await fetch_pod(session, "no-such-namespace", name, RESOURCES) is None


NO_ANSWERS = {
    "404 of something else": Answer(404, b"<html>not found</html>"),
    "404 without a name": Answer(404, status_body(404, "NotFound")),
    "empty object": Answer(200, b"{}"),
    "no JSON": Answer(200, b"OK"),
    "server error": Answer(500, status_body(500, "InternalError")),
    "bad token": Answer(401, status_body(401, "Unauthorized")),
}


@pytest.mark.parametrize("answer", NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_no_answer_never_means_that_there_is_no_pod(
    proxied: KubeSession, proxy: FaultProxy, place: Place, answer: Answer
) -> None:
    namespace, name, uid = place.make()
    proxy.add(answer)
    with pytest.raises((PeerUnavailable, PeerRejected)):
        await fetch_pod(proxied, namespace, name, RESOURCES, uid)


# Binding


async def test_a_binding_brings_its_annotations_along(session: KubeSession, place: Place) -> None:
    target = place.make()
    await post_binding(session, *target, "gpu-1", NOTE)
    seen = place.get()
    assert seen["spec"]["nodeName"] == "gpu-1"
    assert seen["metadata"]["annotations"] == NOTE


async def test_binding_again_to_the_same_node_is_a_success(
    session: KubeSession, place: Place
) -> None:
    target = place.make()
    await post_binding(session, *target, "gpu-1", NOTE)
    await post_binding(session, *target, "gpu-1", NOTE)


async def test_binding_to_another_node_is_a_conflict(session: KubeSession, place: Place) -> None:
    target = place.make()
    await post_binding(session, *target, "gpu-1", NOTE)
    with pytest.raises(Conflict, match="gpu-1") as caught:
        await post_binding(session, *target, "gpu-2", NOTE)
    assert caught.value.reason == "elsewhere"


async def test_a_new_pod_of_the_same_name_is_not_bound(session: KubeSession, place: Place) -> None:
    namespace, name, _ = place.make()
    with pytest.raises(PeerRejected) as caught:
        await post_binding(session, namespace, name, OTHER_UID, "gpu-1", NOTE)
    assert caught.value.reason == "notfound"
    assert "nodeName" not in place.get()["spec"]


async def test_a_pod_that_is_gone_is_not_found(session: KubeSession, namespace: str) -> None:
    with pytest.raises(PeerRejected) as caught:
        await post_binding(session, namespace, "nobody", OTHER_UID, "gpu-1", NOTE)
    assert caught.value.reason == "notfound"


async def test_a_gated_pod_is_not_bound(session: KubeSession, place: Place) -> None:
    target = place.make(gates=[keys.GATE])
    with pytest.raises(PeerRejected):
        await post_binding(session, *target, "gpu-1", NOTE)
    assert "nodeName" not in place.get()["spec"]


async def test_an_answer_that_was_lost_does_not_lose_the_binding(
    proxied: KubeSession, proxy: FaultProxy, place: Place
) -> None:
    target = place.make()
    proxy.add(LoseAnswer(), when=bindings)
    await post_binding(proxied, *target, "gpu-1", NOTE)
    assert place.get()["spec"]["nodeName"] == "gpu-1"
    assert proxy.count(bindings) == 1


async def test_a_binding_that_was_not_made_is_said_to_be_unknown(
    proxied: KubeSession, proxy: FaultProxy, place: Place
) -> None:
    target = place.make()
    proxy.add(Silence(), when=bindings)
    with pytest.raises(PeerUnavailable):
        await post_binding(proxied, *target, "gpu-1", NOTE, deadline_s=0.5)


async def test_a_hundred_tries_at_once_bind_once_and_all_succeed(
    session: KubeSession, place: Place
) -> None:
    target = place.make()
    await asyncio.gather(*(post_binding(session, *target, "gpu-1", NOTE) for _ in range(100)))
    assert place.get()["spec"]["nodeName"] == "gpu-1"


async def test_of_two_nodes_one_wins(session: KubeSession, place: Place) -> None:
    target = place.make()
    ends = await asyncio.gather(
        *(post_binding(session, *target, f"gpu-{i % 2}", NOTE) for i in range(20)),
        return_exceptions=True,
    )
    assert {type(e) for e in ends} == {type(None), Conflict}
    assert len([e for e in ends if e is None]) == 10


# Annotations, gates, nomination


async def test_annotations_are_set_and_removed_and_those_of_others_stay(
    session: KubeSession, place: Place
) -> None:
    target = place.make(annotations={"other": "x", keys.REASON: "old"})
    assert await patch_pod_annotations(session, *target, {keys.REASON: None, keys.WAKE: "1"})
    assert place.get()["metadata"]["annotations"] == {"other": "x", keys.WAKE: "1"}


async def test_a_patch_never_hits_a_new_pod_of_the_same_name(
    session: KubeSession, place: Place
) -> None:
    namespace, name, _ = place.make()
    assert not await patch_pod_annotations(session, namespace, name, OTHER_UID, {keys.WAKE: "1"})
    assert not await patch_pod_annotations(session, namespace, "nobody", OTHER_UID, {"a": "b"})
    assert keys.WAKE not in place.get()["metadata"].get("annotations", {})


async def test_our_gate_is_lifted_together_with_annotations_and_other_gates_stay(
    session: KubeSession, place: Place
) -> None:
    target = place.make(gates=["other/gate", keys.GATE])
    for _ in range(2):
        assert await lift_gate(session, *target, keys.GATE, NOTE)
        seen = place.get()
        assert seen["spec"]["schedulingGates"] == [{"name": "other/gate"}]
        assert seen["metadata"]["annotations"] == NOTE


async def test_the_only_gate_is_lifted(session: KubeSession, place: Place) -> None:
    target = place.make(gates=[keys.GATE])
    assert await lift_gate(session, *target, keys.GATE, {})
    assert not place.get()["spec"].get("schedulingGates")


async def test_a_node_is_nominated_for_a_gated_pod(session: KubeSession, place: Place) -> None:
    target = place.make(gates=[keys.GATE])
    assert await nominate_node(session, *target, "gpu-1")
    found = await fetch_pod(session, target[0], target[1], RESOURCES)
    assert found is not None
    assert (found.nominated, found.gates) == ("gpu-1", (keys.GATE,))


async def test_a_pod_that_was_refused_before_is_no_more_when_a_node_is_nominated_anew(
    session: KubeSession, place: Place
) -> None:
    target = place.make()
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    place.kube.api.patch(f"{place.path()}/status", {"status": {"conditions": [refused]}})
    assert await nominate_node(session, *target, "gpu-1", is_anew=True)
    found = await fetch_pod(session, target[0], target[1], RESOURCES)
    assert found is not None
    assert (found.nominated, found.waiting_on_us) == ("gpu-1", False)
    conditions = [c for c in place.get()["status"]["conditions"] if c["type"] == "PodScheduled"]
    assert [c["reason"] for c in conditions] == ["ClaimedAnew"]


# Ending pods


async def test_an_eviction_runs_the_grace_period_of_the_pod(
    session: KubeSession, place: Place
) -> None:
    target = place.make(grace_s=45, node_name="gpu-1")
    place.run()
    assert await evict_pod(session, *target)
    meta = place.get()["metadata"]
    assert meta["deletionGracePeriodSeconds"] == 45


async def test_a_given_grace_counts_and_is_never_zero(session: KubeSession, place: Place) -> None:
    first, second = place.make("a", node_name="gpu-1"), place.make("b", node_name="gpu-1")
    place.run("a")
    place.run("b")
    assert await evict_pod(session, *first, grace_s=90)
    assert await delete_pod(session, *second, grace_s=0)
    assert place.get("a")["metadata"]["deletionGracePeriodSeconds"] == 90
    assert place.get("b")["metadata"]["deletionGracePeriodSeconds"] == 1


async def test_a_disruption_budget_is_heard(
    kube: KubeCluster, session: KubeSession, place: Place
) -> None:
    namespace, *_ = target = place.make(node_name="gpu-1", labels={"app": "x"})
    place.run()
    kube.api.create(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "b", "namespace": namespace},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}},
        }
    )
    with pytest.raises(PeerRejected) as caught:
        await evict_pod(session, *target)
    assert caught.value.reason == "pdb"
    assert await delete_pod(session, *target)


async def test_an_overloaded_server_is_not_a_disruption_budget(
    proxied: KubeSession, proxy: FaultProxy, place: Place
) -> None:
    target = place.make()
    proxy.add(Answer(429, status_body(429, "TooManyRequests"), {"Retry-After": "1"}), when=writes)
    with pytest.raises(PeerUnavailable):
        await evict_pod(proxied, *target)


async def test_ending_never_hits_a_new_pod_of_the_same_name(
    session: KubeSession, place: Place
) -> None:
    namespace, name, _ = place.make()
    assert not await evict_pod(session, namespace, name, OTHER_UID)
    assert not await delete_pod(session, namespace, name, OTHER_UID)
    assert not await evict_pod(session, namespace, "nobody", OTHER_UID)
    assert not await delete_pod(session, namespace, "nobody", OTHER_UID)
    assert "deletionTimestamp" not in place.get()["metadata"]


# Nodes


async def test_two_writers_on_a_node_keep_each_others_keys(
    kube: KubeCluster, session: KubeSession, namespace: str
) -> None:
    kube.api.create(node(namespace, hollow=False))
    await asyncio.gather(
        *(patch_node_annotations(session, namespace, {f"x/{i}": str(i)}) for i in range(20))
    )
    assert await patch_node_annotations(session, namespace, {keys.POOL: "{}", "x/0": None})
    annotations = kube.api.get(f"/api/v1/nodes/{namespace}")["metadata"]["annotations"]
    assert {k: v for k, v in annotations.items() if k.startswith("x/")} == {
        f"x/{i}": str(i) for i in range(1, 20)
    }
    assert annotations[keys.POOL] == "{}"
    assert not await patch_node_annotations(session, "no-such-node", {"a": "b"})


async def test_a_condition_of_a_node_is_set_beside_those_of_others(
    kube: KubeCluster, session: KubeSession, namespace: str
) -> None:
    kube.api.create(node(namespace, hollow=False))

    def condition() -> dict[str, dict[str, str]]:
        conditions = kube.api.get(f"/api/v1/nodes/{namespace}")["status"]["conditions"]
        return {c["type"]: c for c in conditions}

    before = condition()["Ready"]
    for status in (True, False):
        assert await patch_node_condition(
            session,
            namespace,
            "SlurmAvailable",
            status=status,
            reason="Drained",
            message="by an operator",
            since=1_796_050_800.0,
        )
    ours = condition()["SlurmAvailable"]
    assert (ours["status"], ours["reason"]) == ("False", "Drained")
    assert ours["lastTransitionTime"] == "2026-11-30T15:00:00Z"
    assert condition()["Ready"] == before
    raw = msgspec.json.decode(await session.request("GET", f"/api/v1/nodes/{namespace}"))
    record = read_node(msgspec.convert(raw, RawNode))
    assert (record.ready, record.gpus) == (True, {GPU: 8})


async def test_a_name_from_outside_cannot_lead_elsewhere(session: KubeSession) -> None:
    with pytest.raises(ParseError):
        await patch_node_annotations(session, "../namespaces/default", {"a": "b"})
    with pytest.raises(ParseError):
        await fetch_pod(session, "default", "..", RESOURCES)
