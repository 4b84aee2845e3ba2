"""Leader election with real Leases."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.kube.lease import LeaderLease, LeadershipLost
from slurmbridge.kube.session import KubeSession
from slurmbridge.pool.errors import PeerRejected
from tests.support.fault_proxy import FaultProxy
from tests.support.kube import KubeCluster

pytestmark = pytest.mark.kube

NAME = "slurmbridge"


class Replica:
    """A replica whose work only notes that it runs."""

    def __init__(self, session: KubeSession, namespace: str, identity: str) -> None:
        self.lease = LeaderLease(
            session,
            namespace,
            NAME,
            identity,
            clock=SystemClock(),
            uniform=lambda: 0.5,
            duration_s=3,
            renew_s=0.3,
        )
        self.terms: list[int] = []
        self.working = False
        self.fails = asyncio.Event()
        self.task = asyncio.create_task(self.lease.lead(self._work))

    async def _work(self, term: int) -> None:
        self.terms.append(term)
        self.working = True
        try:
            await self.fails.wait()
            raise RuntimeError("the work died")
        finally:
            self.working = False

    async def end(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, LeadershipLost, RuntimeError):
            await self.task


async def until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.01)


def ship(kube: KubeCluster, namespace: str) -> None:
    """The empty Lease of the manifests, with a label."""
    kube.api.create(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": NAME, "namespace": namespace, "labels": {"app": "slurmbridge"}},
            "spec": {},
        }
    )


def read(kube: KubeCluster, namespace: str) -> dict[str, Any]:
    path = kube.api.path("Lease", NAME, namespace, "coordination.k8s.io/v1")
    return kube.api.get(path)


async def test_a_shipped_lease_is_taken_at_once_renewed_and_given_back(
    kube: KubeCluster, session: KubeSession, namespace: str
) -> None:
    ship(kube, namespace)
    a = Replica(session, namespace, "a")
    await until(lambda: a.working)
    first = read(kube, namespace)
    await until(lambda: read(kube, namespace)["spec"]["renewTime"] > first["spec"]["renewTime"])
    later = read(kube, namespace)
    assert first["spec"]["holderIdentity"] == later["spec"]["holderIdentity"] == "a"
    assert first["spec"]["acquireTime"] == later["spec"]["acquireTime"]
    assert later["spec"]["leaseDurationSeconds"] == 3
    assert later["metadata"]["labels"] == {"app": "slurmbridge"}
    await a.end()
    assert "holderIdentity" not in read(kube, namespace)["spec"]


async def test_the_next_replica_leads_as_soon_as_the_first_one_is_stopped(
    kube: KubeCluster, session: KubeSession, namespace: str
) -> None:
    ship(kube, namespace)
    a = Replica(session, namespace, "a")
    await until(lambda: a.working)
    b = Replica(session, namespace, "b")
    await asyncio.sleep(0.5)
    assert (b.working, b.lease.holder) == (False, "a")
    await a.end()
    await until(lambda: b.working)
    assert (a.terms, b.terms) == ([1], [2])
    await b.end()


async def test_a_replica_whose_work_died_gives_the_lease_to_the_next(
    kube: KubeCluster, session: KubeSession, namespace: str
) -> None:
    ship(kube, namespace)
    a = Replica(session, namespace, "a")
    await until(lambda: a.working)
    b = Replica(session, namespace, "b")
    a.fails.set()
    await until(lambda: b.working)
    with pytest.raises(RuntimeError, match="the work died"):
        await a.task
    await b.end()


async def test_a_replica_that_is_cut_off_stops_before_the_next_begins(
    kube: KubeCluster,
    session: KubeSession,
    proxied: KubeSession,
    proxy: FaultProxy,
    namespace: str,
) -> None:
    ship(kube, namespace)
    a = Replica(proxied, namespace, "a")
    await until(lambda: a.working)
    b = Replica(session, namespace, "b")
    await asyncio.sleep(0.3)
    proxy.mute()
    while not b.lease.is_leader:
        assert not (a.lease.is_leader and b.lease.is_leader)
        await asyncio.sleep(0.01)
    assert not a.working
    with pytest.raises(LeadershipLost):
        await a.task
    proxy.unmute()
    await b.end()


async def test_where_there_is_no_lease_one_is_made_and_one_replica_leads_after_a_pause(
    kube: KubeCluster, session: KubeSession, namespace: str
) -> None:
    began = time.monotonic()
    replicas = [Replica(session, namespace, name) for name in "abc"]
    await until(lambda: any(r.working for r in replicas))
    assert time.monotonic() - began > 1.5
    await asyncio.sleep(0.7)
    assert [len(r.terms) for r in replicas if r.terms] == [1]
    for replica in replicas:
        await replica.end()


async def test_a_restart_of_the_api_server_does_not_cost_the_lease(
    kube: KubeCluster, session: KubeSession, namespace: str
) -> None:
    ship(kube, namespace)
    a = Replica(session, namespace, "a")
    await until(lambda: a.working)
    kube.pause_api()
    await asyncio.sleep(1.0)
    kube.resume_api()
    await asyncio.sleep(1.5)
    assert (a.working, a.terms) == (True, [1])
    await a.end()


async def test_the_rights_of_the_manifests_are_enough_and_less_is_told(
    kube: KubeCluster, namespace: str, open_session: Any
) -> None:
    ship(kube, namespace)
    session = await open_session(kube.kubeconfig_for_service_account(namespace, "bridge"))
    a = Replica(session, namespace, "a")
    with pytest.raises(PeerRejected) as caught:
        await a.task
    assert caught.value.reason == "forbidden"
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    for kind, spec in {
        "Role": {
            "rules": [
                rule | {"verbs": ["create"]},
                rule | {"verbs": ["get", "patch"], "resourceNames": [NAME]},
            ]
        },
        "RoleBinding": {
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": "lease",
            },
            "subjects": [{"kind": "ServiceAccount", "name": "bridge", "namespace": namespace}],
        },
    }.items():
        kube.api.create(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": kind,
                "metadata": {"name": "lease", "namespace": namespace},
            }
            | spec
        )
    await asyncio.sleep(0.5)
    b = Replica(session, namespace, "b")
    await until(lambda: b.working)
    await b.end()
    assert "holderIdentity" not in read(kube, namespace)["spec"]
