"""Groups of every convention, with real objects, and what their members may wish.

12 nodes with a100 GPUs in three racks of 4, 4 with h100 in a fourth; racks 0 and 1 are zone 0. The
API server has the built-in PodGroup on; pods of Jobs are made by the real Job controller.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import PODS, bound, claims, clear, get_pod, submit, wait_for, wait_seen_free
from tests.support import group_objects as groups
from tests.support.kube_objects import GPU, pod
from tests.support.product import Product
from tests.support.slurm import NodeGroup, SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e
GPUS = 16 * 8
ZONE, RACK = "topology.kubernetes.io/zone", "example.org/rack"
H100 = "example.org/h100"
BUILT_IN = "/apis/scheduling.k8s.io/v1beta1/namespaces/default/podgroups"
POLICY = Path(__file__).parents[2] / "manifests/planned/policy.yaml"


def rack_of(node: str) -> int:
    return 3 if node.startswith("hgx") else (int(node[3:]) - 1) // 4


def labels(i: int, name: str) -> dict[str, str]:
    rack = rack_of(name)
    return {ZONE: f"z{rack // 2}", RACK: f"r{rack}"}


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    config = SlurmConfig(groups=(NodeGroup(12), NodeGroup(4, prefix="hgx", gpu_type="h100")))
    started = cluster(
        config,
        scheduler=False,
        labels=labels,
        controller_manager=True,
        api_args=groups.BUILT_IN_ARGS,
    )
    api = started.kube.api
    for name in config.all_groups()[1].names:
        amounts = {GPU: None, H100: "8"}
        body = {"status": {"capacity": amounts, "allocatable": amounts}}
        api.patch(f"/api/v1/nodes/{name}/status", body)
    groups.define_all(api)
    # The policy names the resources of the pool: here there is a second one.
    text = POLICY.read_text().replace(
        f"['{GPU}']",
        f"['{GPU}', '{H100}']",
    )
    assert H100 in text
    started.kube.kubectl("apply", "-f", "-", stdin=text)
    opted = {"metadata": {"labels": {"slurmbridge.dev/planned": "true"}}}
    api.patch("/api/v1/namespaces/default", opted)

    def is_gated() -> bool:
        made = api.request("POST", f"{PODS}?dryRun=All", pod("p", gpus=1))
        return "schedulingGates" in made["spec"]

    wait_for("the policy is in force", is_gated, 20, 0.2)
    assert groups.is_served(api, BUILT_IN)
    sections = {"pool": {"topologyLabels": [ZONE, RACK]}, "rules": {"groupS": 4}}
    policy = {"resources": {GPU: "a100", H100: "h100"}}
    with Product(started, policy=policy, sections=sections) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    wait_seen_free(product, GPUS)
    yield product.cluster
    groups.delete_all(product.cluster.kube.api, BUILT_IN)
    clear(product.cluster)


def nodes_of(pool: Cluster, prefix: str, by: str = "") -> list[str]:
    """Nodes of the bound pods, in the order of a number in a label or annotation, else of names."""

    def order(each: dict[str, Any]) -> tuple[int, str]:
        meta = each["metadata"]
        told = (meta.get("labels") or {}) | (meta.get("annotations") or {})
        return int(told.get(by, 0)), meta["name"]

    return [p["spec"]["nodeName"] for p in sorted(bound(pool, prefix), key=order)]


def wait_bound(pool: Cluster, prefix: str, count: int, timeout_s: float = 40) -> list[str]:
    wait_for(f"{count} are bound", lambda: len(bound(pool, prefix)) == count, timeout_s)
    return nodes_of(pool, prefix)


def reason(pool: Cluster, name: str) -> str:
    made = get_pod(pool, name) or {}
    return str(made.get("metadata", {}).get("annotations", {}).get(keys.REASON, ""))


def explain(product: Product, name: str) -> dict[str, Any]:
    found: dict[str, Any] = product.cli("explain", f"default/{name}")["group"]
    return found


def built_in(pool: Cluster, name: str, count: int) -> dict[str, Any]:
    body = {
        "apiVersion": "scheduling.k8s.io/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": name},
        "spec": {"schedulingPolicy": {"gang": {"minCount": count}}},
    }
    return pool.kube.api.request("POST", BUILT_IN, body)


# Conventions, with their objects


def test_pods_of_an_indexed_job_stand_in_one_rack_in_the_order_of_their_index(
    pool: Cluster, product: Product
) -> None:
    pool.kube.api.create(groups.job("ij", 4, 8, {keys.GROUP_SIZE: "4"}))
    wait_bound(pool, "ij-", 4)
    nodes = nodes_of(pool, "ij-", by="batch.kubernetes.io/job-completion-index")
    assert len({rack_of(n) for n in nodes}) == 1
    assert nodes == sorted(nodes)
    told = explain(product, bound(pool, "ij-")[0]["metadata"]["name"])
    assert (told["kind"], told["size"], told["level"]) == ("job", 4, "rack")


def test_a_jobset_counts_the_pods_of_all_its_jobs_also_those_without_gpus(
    pool: Cluster, product: Product
) -> None:
    def replicated(name: str, replicas: int, pods: int) -> dict[str, Any]:
        spec = {"parallelism": pods, "completions": pods}
        return {"name": name, "replicas": replicas, "template": {"spec": spec}}

    spec = {"replicatedJobs": [replicated("driver", 1, 1), replicated("workers", 2, 2)]}
    made = groups.make(pool.kube.api, groups.JOBSET, "js", spec)
    driver, *workers = groups.jobs_of_jobset(made, {"driver": 0, "workers": 8})
    pool.kube.api.create(driver)
    pool.kube.api.create(workers[0])
    wait_for(
        "two of four workers wait",
        lambda: any(
            "waits for all of its 5 pods" in reason(pool, p["metadata"]["name"])
            or "not all of its 5 pods" in reason(pool, p["metadata"]["name"])
            for p in pool.kube.api.items(PODS)
        ),
        20,
        0.3,
    )
    assert not claims(pool)
    pool.kube.api.create(workers[1])
    nodes = wait_bound(pool, "js-workers", 4)
    assert len({rack_of(n) for n in nodes}) == 1
    told = explain(product, bound(pool, "js-workers")[0]["metadata"]["name"])
    assert (told["kind"], told["size"], told["withoutGpus"]) == ("jobset", 5, 1)


def test_pods_of_a_job_that_name_a_group_are_counted_by_its_parallelism(
    pool: Cluster, product: Product
) -> None:
    pool.kube.api.create(groups.job("pj", 3, 8, {keys.GROUP: "train"}))
    nodes = wait_bound(pool, "pj-", 3)
    assert len({rack_of(n) for n in nodes}) == 1
    assert explain(product, bound(pool, "pj-")[0]["metadata"]["name"])["size"] == 3


def test_each_replicated_job_of_a_jobset_that_starts_in_order_is_a_gang(
    pool: Cluster, product: Product
) -> None:
    template = {"spec": {"parallelism": 2, "completions": 2}}
    jobs = [{"name": name, "replicas": 1, "template": template} for name in ("data", "train")]
    spec = {"startupPolicy": {"startupPolicyOrder": "InOrder"}, "replicatedJobs": jobs}
    made = groups.make(pool.kube.api, groups.JOBSET, "io", spec)
    first, second = groups.jobs_of_jobset(made, {"data": 8, "train": 8})
    pool.kube.api.create(first)
    wait_bound(pool, "io-data", 2)
    pool.kube.api.create(second)
    nodes = wait_bound(pool, "io-train", 2)
    assert len({rack_of(n) for n in nodes}) == 1
    told = explain(product, bound(pool, "io-train")[0]["metadata"]["name"])
    assert (told["name"], told["size"]) == ("io/train", 2)
    assert len(claims(pool)) == 2


def test_where_not_all_that_came_fit_a_pod_group_starts_with_as_many_as_it_must(
    pool: Cluster,
) -> None:
    nodes = [f"gpu{i:03}" for i in range(1, 11)]
    busy = [submit(pool, "--gres=gpu:8", "--mem=100", f"--nodelist={n}")[0] for n in nodes]
    wait_for("they run", lambda: pool.checker.sample().gpus_used == 80, 20)
    groups.make(pool.kube.api, groups.COSCHEDULING, "mm", {"minMember": 2})
    marks = {"scheduling.x-k8s.io/pod-group": "mm"}
    pool.kube.api.create_all([pod(f"mm-{i}", gpus=8, labels=marks) for i in range(3)])
    assert sorted(wait_bound(pool, "mm-", 2)) == ["gpu011", "gpu012"]
    pool.slurm.run("scancel", str(busy[0]))
    wait_bound(pool, "mm-", 3)
    assert pool.checker.sample().violations == ()


def test_a_leaderworkerset_is_one_gang_with_the_leader_first(
    pool: Cluster, product: Product
) -> None:
    template = {"leaderWorkerTemplate": {"size": 3}, "replicas": 1}
    made = groups.make(pool.kube.api, groups.LWS, "lw", template)
    pool.kube.api.create_all(reversed(groups.lws_pods(made, 8)))
    nodes = wait_bound(pool, "lw-", 3)
    assert len({rack_of(n) for n in nodes}) == 1
    assert nodes == sorted(nodes)
    told = explain(product, "lw-0")
    assert (told["kind"], told["size"]) == ("lws", 3)


def test_a_pod_group_of_scheduler_plugins_tells_the_size(pool: Cluster, product: Product) -> None:
    groups.make(pool.kube.api, groups.COSCHEDULING, "pg", {"minMember": 3})
    marks = {"scheduling.x-k8s.io/pod-group": "pg"}
    pool.kube.api.create_all([pod(f"pg-{i}", gpus=8, labels=marks) for i in range(3)])
    nodes = wait_bound(pool, "pg-", 3)
    assert len({rack_of(n) for n in nodes}) == 1
    assert explain(product, "pg-0")["size"] == 3


def test_a_built_in_pod_group_tells_the_size(pool: Cluster, product: Product) -> None:
    built_in(pool, "bg", 3)
    spec = {"schedulingGroup": {"podGroupName": "bg"}}
    pods = [pod(f"bg-{i}", gpus=8, spec=spec) for i in range(3)]
    pool.kube.api.create_all(pods[:2])
    wait_for("they wait for the third", lambda: "its 3 pods" in reason(pool, "bg-0"), 20, 0.2)
    assert not claims(pool)
    pool.kube.api.create(pods[2])
    nodes = wait_bound(pool, "bg-", 3)
    assert len({rack_of(n) for n in nodes}) == 1
    assert explain(product, "bg-0")["kind"] == "schedulinggroup"


def test_a_pytorch_job_puts_its_master_first(pool: Cluster, product: Product) -> None:
    spec = {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 2}}}
    made = groups.make(pool.kube.api, groups.PYTORCH, "pt", spec)
    pool.kube.api.create_all(groups.kubeflow_pods(made, {"Master": 8, "Worker": 8}))
    nodes = wait_bound(pool, "pt-", 3)
    assert len({rack_of(n) for n in nodes}) == 1
    assert nodes == sorted(nodes)
    told = explain(product, "pt-master-0")
    assert (told["kind"], told["size"]) == ("kubeflow", 3)
    assert told["members"][0]["pod"] == "default/pt-master-0"


def test_the_workers_of_an_mpi_job_start_before_its_launcher_has_come(
    pool: Cluster, product: Product
) -> None:
    spec = {"mpiReplicaSpecs": {"Launcher": {"replicas": 1}, "Worker": {"replicas": 2}}}
    made = groups.make(pool.kube.api, groups.MPI, "mpi", spec)
    pool.kube.api.create_all(groups.mpi_workers(made, 8))
    nodes = wait_bound(pool, "mpi-worker-", 2)
    assert len({rack_of(n) for n in nodes}) == 1
    assert explain(product, "mpi-worker-0")["size"] == 2
    pool.kube.api.create(groups.mpi_launcher(made, 1))
    wait_bound(pool, "mpi-launcher-", 1)


# Life of groups


def test_a_group_that_never_completes_is_given_up_with_a_reason_and_holds_nothing(
    pool: Cluster,
) -> None:
    groups.make(pool.kube.api, groups.COSCHEDULING, "nc", {"minMember": 4})
    marks = {"scheduling.x-k8s.io/pod-group": "nc"}
    pool.kube.api.create_all([pod(f"nc-{i}", gpus=8, labels=marks) for i in range(3)])
    wait_for(
        "it is told",
        lambda: "given up, not all of its 4 pods have come" in reason(pool, "nc-0"),
        40,
        0.3,
    )
    assert not claims(pool)


def test_a_second_pod_group_of_the_same_name_does_not_count_the_pods_of_the_first(
    pool: Cluster,
) -> None:
    marks = {"scheduling.x-k8s.io/pod-group": "sg"}
    groups.make(pool.kube.api, groups.COSCHEDULING, "sg", {"minMember": 2})
    pool.kube.api.create_all([pod(f"sg-a{i}", gpus=8, labels=marks) for i in range(2)])
    wait_bound(pool, "sg-a", 2)
    time.sleep(1.1)  # the API server's times are whole seconds
    pool.kube.api.delete(f"{groups.place_of(groups.COSCHEDULING)}/sg")
    groups.make(pool.kube.api, groups.COSCHEDULING, "sg", {"minMember": 2})
    pool.kube.api.create(pod("sg-b0", gpus=8, labels=marks))
    wait_for("it waits", lambda: "its 2 pods" in reason(pool, "sg-b0"), 20, 0.2)
    assert len(claims(pool)) == 1
    pool.kube.api.create(pod("sg-b1", gpus=8, labels=marks))
    wait_bound(pool, "sg-b", 2)
    assert len(bound(pool, "sg-a")) == 2


def test_a_pod_that_the_job_controller_makes_again_gets_the_node_of_its_index_back(
    pool: Cluster,
) -> None:
    index = "batch.kubernetes.io/job-completion-index"
    # One node of each rack is in use while the gang starts, and free afterwards: a replaced member
    # has more than one node to choose from.
    first = submit(pool, "--gres=gpu:8", "--mem=100", "--nodelist=gpu001")
    wait_for("it runs", lambda: pool.checker.sample().gpus_used == 8, 20)
    pool.kube.api.create(groups.job("rp", 3, 8, {keys.GROUP_SIZE: "3"}))
    wait_bound(pool, "rp-", 3)
    before = nodes_of(pool, "rp-", by=index)
    pool.slurm.run("scancel", str(first[0]))
    wait_for("the node is free", lambda: pool.checker.sample().gpus_used == 24, 30)
    old = {p["metadata"]["uid"] for p in bound(pool, "rp-")}
    victim = next(p for p in bound(pool, "rp-") if p["metadata"]["annotations"][index] == "1")
    pool.kube.api.delete(f"{PODS}/{victim['metadata']['name']}")
    wait_for(
        "it is made and bound again",
        lambda: (
            len({p["metadata"]["uid"] for p in bound(pool, "rp-")} - old) == 1
            and len(bound(pool, "rp-")) == 3
        ),
        40,
    )
    assert nodes_of(pool, "rp-", by=index) == before


# Wishes


def test_each_segment_stands_in_one_rack(pool: Cluster, product: Product) -> None:
    # Six whole nodes as 4 + 2 would use the fewest racks; in segments of 3 they are 3 + 3.
    pool.kube.api.create_all(groups.own_pods("se", 6, 8, {keys.SEGMENT: "3:rack"}))
    nodes = wait_bound(pool, "se-", 6)
    racks = [rack_of(n) for n in nodes]
    assert [len(set(racks[:3])), len(set(racks[3:])), len(set(racks))] == [1, 1, 2]
    told = explain(product, "se-0")
    assert (told["segment"], told["level"], told["spread"]["rack"]) == ("3:rack", "zone", 2)


def test_members_of_two_gpu_types_stand_in_the_lowest_domain_that_has_both(
    pool: Cluster, product: Product
) -> None:
    pods = groups.own_pods("tt", 3, 8)
    for body in pods[1:]:
        resources = body["spec"]["containers"][0]["resources"]
        resources["limits"] = {H100: "8"}
    pool.kube.api.create_all(pods)
    nodes = wait_bound(pool, "tt-", 3)
    assert rack_of(nodes[0]) == 2
    assert [rack_of(n) for n in nodes[1:]] == [3, 3]
    assert explain(product, "tt-0")["level"] == "zone"


def test_a_preferred_rack_climbs_after_its_time_and_not_before(pool: Cluster) -> None:
    wish = {keys.TOPOLOGY: "preferred:rack@12s"}
    pool.kube.api.create_all(groups.own_pods("pr", 5, 8, wish))
    wait_for("the short level is named", lambda: "no rack holds it" in reason(pool, "pr-0"), 10)
    assert not claims(pool)
    nodes = wait_bound(pool, "pr-", 5, 40)
    made = min(p["metadata"]["creationTimestamp"] for p in bound(pool, "pr-"))
    when = [
        c["lastTransitionTime"]
        for p in bound(pool, "pr-")
        for c in p["status"]["conditions"]
        if c["type"] == "PodScheduled"
    ]
    assert seconds(min(when)) - seconds(made) >= 11
    assert len({rack_of(n) for n in nodes}) == 2


def seconds(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def test_a_required_rack_never_climbs(pool: Cluster) -> None:
    wish = {keys.TOPOLOGY: "required:rack"}
    pool.kube.api.create_all(groups.own_pods("rq", 5, 8, wish))
    wait_for("the short level is named", lambda: "no rack holds it" in reason(pool, "rq-0"), 15)
    assert "lacks room for 1 pod (8 GPUs)" in reason(pool, "rq-0")
    time.sleep(15)
    assert not claims(pool)
