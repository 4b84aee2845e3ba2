"""`slurmbridge-extender` as a process, with a real bridge link and a real API server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import aiohttp
import pytest

from slurmbridge.link.message import ClaimGrant
from slurmbridge.pool import keys
from tests.support.extender import ROOT, ExtenderProcess, choice
from tests.support.kube_objects import pod
from tests.support.link import bridges, until
from tests.support.pool_view import make_node

pytestmark = pytest.mark.kube

PODS = "/api/v1/namespaces/team-a/pods"
RIGHTS = [
    {"apiGroups": [""], "resources": ["pods/binding"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
]


@pytest.fixture(scope="module")
def kube(kube_cluster):
    kube = kube_cluster()
    kube.create_nodes(["a", "b"], hollow=False)
    return kube


@pytest.fixture(scope="module")
def kubeconfig(kube):
    """Of a service account with exactly the rights that the extender needs."""
    path = kube.kubeconfig_for_service_account("slurmbridge", "extender")
    kube.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}})
    kube.api.create(
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": "team-a"},
        }
    )
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "extender"}}
    kube.api.create(rbac | {"kind": "ClusterRole", "rules": RIGHTS})
    kube.api.create(
        rbac
        | {
            "kind": "ClusterRoleBinding",
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "extender",
            },
            "subjects": [
                {"kind": "ServiceAccount", "namespace": "slurmbridge", "name": "extender"}
            ],
        }
    )
    return path


class Here:
    """The process, its bridge, and the API server."""

    def __init__(self, kube, bridge, process, session):
        self.kube, self.bridge, self.process, self.session = kube, bridge, process, session

    async def post(self, verb, body):
        url = f"http://127.0.0.1:{self.process.port}/{verb}"
        async with self.session.post(url, json=body) as reply:
            assert 200 == reply.status
            return await reply.json()

    def create(self, name, **how):
        """A pod of team-a; its bind body for a node."""
        made = self.kube.api.create(pod(name, gpus=1, namespace="team-a", **how))
        return lambda node: {
            "PodName": name,
            "PodNamespace": "team-a",
            "PodUID": made["metadata"]["uid"],
            "Node": node,
        }

    def pod(self, name):
        return self.kube.api.get(f"{PODS}/{name}")


@pytest.fixture
async def here(kube, kubeconfig):
    async with bridges() as (bridge,):
        bridge.lead("t1", make_node("a"), make_node("b"))
        process = await asyncio.to_thread(
            ExtenderProcess, "--bridge", bridge.address, "--kubeconfig", kubeconfig
        )
        async with aiohttp.ClientSession() as session:
            try:
                await process.ready(session)
                yield Here(kube, bridge, process, session)
            finally:
                status = await asyncio.to_thread(process.stop)
        assert 0 == status
        assert [] == [line for line in process.lines if line.get("level") == "error"]


async def test_a_pod_is_bound_with_its_claim_in_the_same_write(here):
    bind = here.create("one")
    assert {"Error": ""} == await here.post("bind", bind("a"))
    bound = await asyncio.to_thread(here.pod, "one")
    uid = bound["metadata"]["uid"]
    assert "a" == bound["spec"]["nodeName"]
    assert {keys.CLAIM: f"4711/{uid}", keys.GPUS: "0-3,6"} == bound["metadata"]["annotations"]
    (line,) = here.process.events("bound")
    assert ("team-a/one", f"4711/{uid}") == (line["pod"], line["claim"])
    assert line["cause"].startswith(f"{uid}/")
    assert [line["cause"]] == [ask.cause for ask, _ in here.bridge.claims]


async def test_after_a_restart_a_second_bind_is_still_a_success(here, kubeconfig):
    bind = here.create("twice")
    assert {"Error": ""} == await here.post("bind", bind("a"))
    other = await asyncio.to_thread(
        ExtenderProcess, "--bridge", here.bridge.address, "--kubeconfig", kubeconfig
    )
    try:
        await other.ready(here.session)
        there = Here(here.kube, here.bridge, other, here.session)
        assert {"Error": ""} == await there.post("bind", bind("a"))
        answer = await there.post("bind", bind("b"))
        assert "another node" in answer["Error"]
    finally:
        await asyncio.to_thread(other.stop)
    assert "a" == (await asyncio.to_thread(here.pod, "twice"))["spec"]["nodeName"]


async def test_a_pod_that_is_bound_elsewhere_gives_its_claim_back(here, kubeconfig):
    bind = here.create("elsewhere")
    uid = bind("b")["PodUID"]
    await asyncio.to_thread(
        here.kube.api.request,
        "POST",
        f"{PODS}/elsewhere/binding",
        {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": "elsewhere"},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "b"},
        },
    )
    answer = await here.post("bind", bind("a"))
    assert "bound to b" in answer["Error"]
    await until(lambda: here.bridge.releases)
    assert [(uid, 4711)] == [(r.uid, r.job_id) for r in here.bridge.releases]


async def test_a_pod_that_is_gone_or_was_made_again_gives_its_claim_back(here):
    bind = here.create("gone")
    await asyncio.to_thread(here.kube.api.delete, f"{PODS}/gone", 0)
    assert "binding refused" in (await here.post("bind", bind("a")))["Error"]
    await until(lambda: len(here.bridge.releases) == 1)
    again = here.create("gone")
    assert bind("a")["PodUID"] != again("a")["PodUID"]
    assert {"Error": ""} != await here.post("bind", bind("a"))
    assert {"Error": ""} == await here.post("bind", again("a"))


async def test_a_plain_pod_on_a_pool_node_is_bound_without_a_claim(here):
    """Where the extender has no managedResources, kube-scheduler sends it every pod."""
    made = await asyncio.to_thread(here.kube.api.create, pod("plain", gpus=0, namespace="team-a"))
    uid = made["metadata"]["uid"]
    await here.post("filter", {"Pod": made, "NodeNames": ["a"]})
    body = {"PodName": "plain", "PodNamespace": "team-a", "PodUID": uid, "Node": "a"}
    assert {"Error": ""} == await here.post("bind", body)
    assert [] == here.bridge.claims
    assert "a" == (await asyncio.to_thread(here.pod, "plain"))["spec"]["nodeName"]


async def test_sigterm_lets_a_bind_under_way_come_to_its_end(kube, kubeconfig):
    async with bridges() as (bridge,), aiohttp.ClientSession() as session:
        bridge.lead("t1", make_node("a"), make_node("b"))
        asked = asyncio.Event()

        async def slowly(_):
            asked.set()
            await asyncio.sleep(1.5)
            return ClaimGrant(9, "0", 2)

        bridge.on_claim = slowly
        process = await asyncio.to_thread(
            ExtenderProcess, "--bridge", bridge.address, "--kubeconfig", kubeconfig
        )
        await process.ready(session)
        there = Here(kube, bridge, process, session)
        bind = there.create("late")
        call = asyncio.create_task(there.post("bind", bind("a")))
        await asked.wait()
        assert 0 == await asyncio.to_thread(process.stop)
        await asyncio.gather(call, return_exceptions=True)
        bound = await asyncio.to_thread(there.pod, "late")
        assert "a" == bound["spec"]["nodeName"]


async def test_the_whole_process_is_small(here):
    await here.post("filter", choice(["a", "b"]))
    with open(f"/proc/{here.process.pid}/status") as status:
        rss_kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert rss_kib < 150 * 1024


async def _check(*args):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "extender", "check", "-o", "json", "--within-s", "2", *map(str, args)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    out, _ = await process.communicate()
    return process.returncode, json.loads(out or b"[]")


class TestCheck:
    async def test_all_is_well(self, here, kubeconfig):
        status, findings = await _check("--bridge", here.bridge.address, "--kubeconfig", kubeconfig)
        assert (0, 3) == (status, len(findings))
        assert all(finding["ok"] for finding in findings)
        assert "2 nodes" in findings[0]["text"]

    async def test_each_thing_that_is_wrong_is_named(self, here, kube, tmp_path):
        await asyncio.to_thread(kube.kubeconfig_for_service_account, "team-a", "nobody")
        nobody = kube.dir / "team-a.nobody.kubeconfig"
        status, findings = await _check("--bridge", "127.0.0.1:1", "--kubeconfig", nobody)
        assert 1 == status
        told = {finding["what"]: finding["text"] for finding in findings if not finding["ok"]}
        assert "no leader found" in told["bridge"]
        assert {"bridge", "API server: create pods/binding", "API server: get pods"} == set(told)

    @pytest.mark.parametrize(
        "args",
        [
            ("--kubeconfig", "/nowhere"),
            ("--tls-cert", "/nowhere", "--tls-key", "/nowhere"),
            ("--tls-cert", "/nowhere"),
            ("--tls-client-ca", "/nowhere"),
            ("--bridge-tls-cert", "/nowhere"),
        ],
        ids=" ".join,
    )
    async def test_wrong_use_is_said_and_fails(self, args):
        status, findings = await _check("--bridge", "127.0.0.1:1", *args)
        assert status in (1, 2)
        assert status == 2 or not all(finding["ok"] for finding in findings)
