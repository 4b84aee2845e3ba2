"""Gangs on real components: 64 nodes in 8 racks and 2 zones."""

from __future__ import annotations

import random  # noqa: TID251 - seeded: the scene can be set again
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from slurmbridge.pool import keys
from slurmbridge.topology.labels import TOPOGRAPH_DOMAIN
from tests.e2e.scene import (
    PODS,
    bound,
    claims,
    clear,
    event_of,
    get_pod,
    submit,
    wait_for,
    wait_seen_free,
)
from tests.support import gang_judge
from tests.support import group_objects as groups
from tests.support.checker import read_jobs
from tests.support.group_objects import own_pods
from tests.support.kube_objects import pod
from tests.support.pod_history import PodHistory
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e
NODES, PER_RACK = 64, 8
GPUS = NODES * 8
ZONE, RACK = "topology.kubernetes.io/zone", "example.org/rack"


def labels(i: int, name: str) -> dict[str, str]:
    # NVLink domains cut across the racks, so they are a dimension of their own.
    return {ZONE: f"z{i // 32}", RACK: f"r{i // PER_RACK}", TOPOGRAPH_DOMAIN: f"a{i % 4}"}


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    started = cluster(
        SlurmConfig(nodes=NODES, gpus_per_node=8, min_job_age_s=900),
        scheduler=False,
        labels=labels,
        controller_manager=True,
    )
    groups.define_all(started.kube.api)
    policy = Path(__file__).parents[2] / "manifests/planned/policy.yaml"
    started.kube.kubectl("apply", "-f", str(policy))
    opted = {"metadata": {"labels": {"slurmbridge.dev/planned": "true"}}}
    started.kube.api.patch("/api/v1/namespaces/default", opted)
    probe = f"{PODS}?dryRun=All"

    def is_gated() -> bool:
        made = started.kube.api.request("POST", probe, pod("p", gpus=1))
        return "schedulingGates" in made["spec"]

    wait_for("the policy is in force", is_gated, 20, 0.2)
    sections = {"pool": {"topologyLabels": [ZONE, RACK]}, "logLevel": "debug"}
    with Product(started, sections=sections) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    wait_seen_free(product, GPUS)
    yield product.cluster
    groups.delete_all(product.cluster.kube.api)
    clear(product.cluster)


def racks_of(pods: list[dict[str, Any]]) -> list[int]:
    """Rack of each pod, by rank."""
    ordered = sorted(pods, key=lambda p: int(p["metadata"]["name"].rpartition("-")[2]))
    return [(int(p["spec"]["nodeName"][3:]) - 1) // PER_RACK for p in ordered]


def test_a_gang_lands_in_one_rack_with_its_ranks_in_order_and_all_at_once(
    pool: Cluster, product: Product
) -> None:
    pool.kube.api.create_all(own_pods("a", 8, 8))
    wait_for("all are bound", lambda: len(bound(pool, "a-")) == 8, 40)
    assert len(set(racks_of(bound(pool, "a-")))) == 1
    nodes = [p["spec"]["nodeName"] for p in bound(pool, "a-")]
    assert len(set(nodes)) == 8
    told = product.cli("explain", "default/a-3")["group"]
    assert told["size"] == 8
    assert told["level"] == "rack"
    assert [m["pod"] for m in told["members"]] == [f"default/a-{i}" for i in range(8)]
    assert "claimed together in rack" in event_of(pool, "a-0", "GangPlaced")


def test_a_gang_that_is_not_complete_claims_nothing_and_says_what_it_waits_for(
    pool: Cluster,
) -> None:
    pool.kube.api.create_all(own_pods("b", 4, 8)[:3])
    wait_for(
        "it is told",
        lambda: "waits for all of its 4 pods" in _reason(pool, "b-0"),
        40,
    )
    assert not claims(pool)
    pool.kube.api.create(own_pods("b", 4, 8)[3])
    wait_for("all are bound", lambda: len(bound(pool, "b-")) == 4, 40)


def _reason(pool: Cluster, name: str) -> str:
    made = get_pod(pool, name) or {}
    return made.get("metadata", {}).get("annotations", {}).get(keys.REASON, "")


def test_a_required_rack_that_cannot_be_met_stays_pending_with_the_short_level_named(
    pool: Cluster, product: Product
) -> None:
    pool.kube.api.create_all(own_pods("c", 9, 8, {keys.TOPOLOGY: "required:rack"}))
    wait_for("it is told", lambda: "no rack holds it" in _reason(pool, "c-0"), 40)
    assert "lacks room for 1 pod (8 GPUs)" in _reason(pool, "c-0")
    assert not claims(pool)
    assert "no rack holds it" in product.cli("explain", "default/c-0")["group"]["waits"]


def test_a_required_rack_and_segments_of_nvlink_domains_across_the_racks_both_hold(
    pool: Cluster,
) -> None:
    notes = {keys.TOPOLOGY: "required:rack", keys.SEGMENT: "2:accelerator"}
    pool.kube.api.create_all(own_pods("d", 4, 8, notes))
    wait_for("all are bound", lambda: len(bound(pool, "d-")) == 4, 40)
    pods = sorted(bound(pool, "d-"), key=rank_of)
    assert len(set(racks_of(pods))) == 1
    links = [(int(p["spec"]["nodeName"][3:]) - 1) % 4 for p in pods]
    assert links[0] == links[1]
    assert links[2] == links[3]


def test_two_gangs_that_do_not_both_fit_never_hold_half_each(
    pool: Cluster, product: Product
) -> None:
    # 6 whole nodes are free.
    submit(pool, "--gres=gpu:8", "--mem=100", count=NODES - 6)
    wait_seen_free(product, 6 * 8)
    one, two = own_pods("x", 4, 8), own_pods("y", 4, 8)
    pool.kube.api.create_all([p for pair in zip(one, two, strict=True) for p in pair])
    wait_for("one is bound", lambda: len(bound(pool, "x-")) + len(bound(pool, "y-")) == 4, 40)
    first = "x-" if bound(pool, "x-") else "y-"
    assert len(bound(pool, first)) == 4
    # The other one waits in Slurm's queue, as one job, and holds nothing.
    wait_for("the other one is queued", lambda: len(claims(pool, "PD")) == 1, 40)
    assert len(claims(pool, "R")) == 1
    for i in range(4):
        pool.kube.api.delete(f"{PODS}/{first}{i}")
    other = "y-" if first == "x-" else "x-"
    wait_for("the other one follows", lambda: len(bound(pool, other)) == 4, 60)


def test_a_member_that_is_replaced_comes_back_to_its_rack(pool: Cluster) -> None:
    pool.kube.api.create_all(own_pods("m", 6, 8))
    wait_for("all are bound", lambda: len(bound(pool, "m-")) == 6, 40)
    (rack,) = set(racks_of(bound(pool, "m-")))
    pool.kube.api.delete(f"{PODS}/m-2")
    wait_for("it is gone", lambda: get_pod(pool, "m-2") is None, 40)
    pool.kube.api.create(own_pods("m", 6, 8)[2])
    wait_for("it is bound again", lambda: len(bound(pool, "m-")) == 6, 40)
    assert set(racks_of(bound(pool, "m-"))) == {rack}


def test_single_pods_of_both_ways_go_into_the_rack_in_use(pool: Cluster, product: Product) -> None:
    submit(pool, "--gres=gpu:8", "--mem=100", "--nodelist=gpu043")
    wait_for("it is seen", lambda: product.cli("status")["gpus"]["native"] == 8, 20, 0.3)
    api = pool.kube.api
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "plain"}}
    api.create(space)
    where = "/api/v1/namespaces/plain/pods"
    wait_for("pods may be made", lambda: api.find(f"{where[:-5]}/serviceaccounts/default"), 20)
    api.create(pod("planned", gpus=8))
    api.create(pod("reactive", gpus=8, namespace="plain"))

    def nodes() -> list[str]:
        found = [api.find(f"{PODS}/planned"), api.find(f"{where}/reactive")]
        return [p["spec"]["nodeName"] for p in found if p and p["spec"].get("nodeName")]

    wait_for("both are bound", lambda: len(nodes()) == 2, 20)
    assert [TREE.rack(node) for node in nodes()] == [5, 5]
    api.delete(f"{where}/reactive")
    wait_for("it is gone", lambda: api.find(f"{where}/reactive") is None, 20)


GANGS = (
    *((5, 8), (10, 3), (3, 8), (4, 2), (6, 4), (16, 1), (2, 8), (5, 3), (12, 2), (2, 1)),
    *((9, 2), (3, 3), (4, 8), (7, 2), (2, 6), (6, 1), (5, 4), (3, 2), (4, 4), (8, 1)),
)
"""Pods, and GPUs of each."""
KINDS = ("own", "indexed", "podgroup", "jobset")
TREE = gang_judge.Tree(
    rack=lambda node: (int(node[3:]) - 1) // PER_RACK, zone=lambda node: (int(node[3:]) - 1) // 32
)
INDEX = "batch.kubernetes.io/job-completion-index"


def start_gang(pool: Cluster, name: str, kind: str, size: int, gpus: int) -> None:
    """Objects and pods of a gang; pods of Jobs are made by the Job controller."""
    api = pool.kube.api
    if kind == "own":
        api.create_all(own_pods(name, size, gpus))
    elif kind == "indexed":
        api.create(groups.job(name, size, gpus, {keys.GROUP_SIZE: str(size)}))
    elif kind == "podgroup":
        groups.make(api, groups.COSCHEDULING, name, {"minMember": size})
        marks = {"scheduling.x-k8s.io/pod-group": name}
        api.create_all([pod(f"{name}-{i}", gpus=gpus, labels=marks) for i in range(size)])
    else:
        spec = {"parallelism": size, "completions": size}
        one = {"name": "w", "replicas": 1, "template": {"spec": spec}}
        made = groups.make(api, groups.JOBSET, name, {"replicatedJobs": [one]})
        api.create_all(groups.jobs_of_jobset(made, {"w": gpus}))


def rank_of(each: dict[str, Any]) -> int:
    notes = each["metadata"]["annotations"]
    told = notes.get(keys.RANK) or notes.get(INDEX)
    return int(told or each["metadata"]["name"].rpartition("-")[2])


def bound_in(history: PodHistory) -> set[str]:
    """Names of the pods of which the history knows a node."""
    pods = [moment.pod for moment in history.moments]
    return {p["metadata"]["name"] for p in pods if p["spec"].get("nodeName")}


def on_their_way(pool: Cluster, history: PodHistory) -> set[str]:
    """Gangs that have claims, and of which no member is bound."""
    found = re.findall(r" ref=default/(g\d\d)", "\n".join(claims(pool, "R").values()))
    return set(found) - begun_in(history)


def begun_in(history: PodHistory) -> set[str]:
    """Gangs of which the history knows a bound member."""
    return {name[:3] for name in bound_in(history) if name.startswith("g")}


def test_twenty_mixed_gangs_among_native_jobs_with_the_bridge_killed_twice_and_the_extender_once(
    pool: Cluster, product: Product
) -> None:
    """First while gangs are claimed and not bound, then while members are being bound."""
    names = [f"g{i:02}" for i in range(len(GANGS))]
    sizes = {name: size for name, (size, _) in zip(names, GANGS, strict=True)}
    luck = random.Random(4)
    native = 0
    for number in luck.sample(range(1, NODES + 1), 24):
        size, where = luck.randint(1, 5), f"gpu{number:03}"
        submit(pool, f"--gres=gpu:{size}", "--mem=100", f"--nodelist={where}", "--time=60")
        native += size
    wait_for(
        "all run, and are seen",
        lambda: product.cli("status")["gpus"]["native"] == native,
        60,
        0.3,
    )
    before = product.log("bridge-0")

    def leaders() -> int:
        return product.log("bridge-0").removeprefix(before).count('"leading"')

    with PodHistory(pool.kube) as history, pool.checker.watch(0.5) as watch:
        for i, (name, (size, gpus)) in enumerate(zip(names, GANGS, strict=True)):
            start_gang(pool, name, KINDS[i % 4], size, gpus)
            if i % 3 == 2:
                submit(pool, f"--gres=gpu:{luck.randint(1, 2)}", "--mem=100", "--time=60")
            if i == 8:
                wait_for("some are claimed", lambda: len(claims(pool)) >= 4, 60, 0.01)
                product.kill9_bridge()
                print("claimed and not bound at the first kill:", on_their_way(pool, history))
                product.start_bridge()
            if i == 13:
                # Those that come now are bound by the second leader.
                wait_for("the next one leads", lambda: leaders() == 1, 60)
                begun = begun_in(history)
        wait_for("members are being bound", lambda: begun_in(history) - begun, 60, 0.002)
        product.kill9_bridge()
        product.kill9_extender()
        at_work = {name: sum(n.startswith(name) for n in bound_in(history)) for name in names}
        print("bound at the second kill:", at_work)
        product.start_bridge()
        product.start_extender()
        product.wait_bridge(timeout_s=60)
        product.wait_extender(timeout_s=60)
        every = sum(sizes.values())
        # What may be left in a claim that is found has to be waited for, 30 s by each leader.
        wait_for("all are bound", lambda: len(bound(pool, "g")) == every, 240, 0.3)
        wait_for("the history has it", lambda: len(bound_in(history)) == every, 60, 0.3)
    assert watch.violations == []
    jobs = pool.slurm.run("scontrol", "show", "job", "-d", "-o")
    members = {n: sorted(bound(pool, f"{n}-"), key=rank_of) for n in names}
    assert {n: len(pods) for n, pods in members.items()} == sizes

    # No gang was ever bound in part: when the first member was, all had their claims, for good.
    started = {job.id: job for job in read_jobs(jobs)}
    for name, pods in members.items():
        first = min(
            m.at
            for m in history.moments
            if m.pod["metadata"]["name"].startswith(f"{name}-") and m.pod["spec"].get("nodeName")
        )
        for each in pods:
            claim = started[int(each["metadata"]["annotations"][keys.CLAIM].partition("/")[0])]
            assert claim.state == "RUNNING"
            assert gang_judge.local_time(claim.start) <= first, (name, claim)

    # Ranks are in order: a walk by rank never comes back to a node or a rack that it has left.
    for name, pods in members.items():
        nodes = [p["spec"]["nodeName"] for p in pods]
        assert gang_judge.breaks(nodes) == 0, (name, nodes)
        assert gang_judge.breaks([TREE.rack(n) for n in nodes]) == 0, (name, nodes)

    # Each plan in the log is the least that the room which it saw allowed, and it saw the truth.
    log = product.log("bridge-0").removeprefix(before)
    plans = gang_judge.read_plans(log)
    planned = {ref.partition("/")[2].partition("-")[0] for p in plans for ref, *_ in p.seats}
    assert planned == set(names)
    for name, pods in members.items():
        placed = [
            gang_judge.Placed(
                f"default/{p['metadata']['name']}",
                p["spec"]["nodeName"],
                started[int(p["metadata"]["annotations"][keys.CLAIM].partition("/")[0])],
            )
            for p in pods
        ]
        assert gang_judge.unplanned(placed, plans) == [], name
    for plan in plans:
        key = gang_judge.key_of(plan, TREE)
        if plan.beside:
            height = gang_judge.best_beside(plan, TREE)
            assert height is not None
            assert key[0] <= height, plan
        else:
            assert key == gang_judge.least(plan, TREE), plan
    truth = gang_judge.Truth(jobs, total=8, slack_s=5)
    names_of_nodes = [f"gpu{n:03}" for n in range(1, NODES + 1)]
    assert gang_judge.untrue(plans, truth, names_of_nodes, gang_judge.refusals(log)) == []
