"""Gangs in the queue of a real Slurm: they wait there with native jobs, and keep their place."""

from __future__ import annotations

import re
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import PODS, bound, clear, event_of, events_of, get_pod, submit, wait_for
from tests.support.group_objects import JOBS
from tests.support.group_objects import job as job_of_pods
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig
from tests.support.slurm_config import NodeGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e
FULL = ("--gres=gpu:8", "--mem=100")


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    pool = cluster(SlurmConfig(nodes=4, bf_interval_s=1), scheduler=False)
    with Product(pool) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def gang(name: str, size: int, gpus: int, **notes: str) -> list[dict[str, Any]]:
    made = []
    for i in range(size):
        own = {keys.GROUP: name, keys.GROUP_SIZE: str(size), keys.RANK: str(i)} | notes
        made.append(pod(f"{name}-{i}", gpus=gpus, annotations=own, gates=[keys.GATE]))
    return made


def reason(pool: Cluster, name: str) -> str:
    made = get_pod(pool, name) or {}
    return str(made.get("metadata", {}).get("annotations", {}).get(keys.REASON, ""))


def jobs_of_gangs(pool: Cluster, states: str = "R,PD") -> dict[int, str]:
    """Jobs of gangs in Slurm by id: state and nodes."""
    text = pool.slurm.run(
        *("squeue", "-h", "-a", "--name=slurmbridge-test", f"--states={states}"),
        "--format=%A %T %N %k",
    )
    rows = [line.split(" ", 3) for line in text.splitlines() if " group=" in line]
    return {int(job): f"{state} {nodes}".strip() for job, state, nodes, _ in rows}


def queued(pool: Cluster, name: str) -> int:
    """The job as which a gang waits in Slurm, once its pods say so."""
    told: list[str] = []

    def is_told() -> bool:
        waiting = [str(job) for job in jobs_of_gangs(pool, "PD")]
        told[:] = re.findall(r"waits in Slurm's queue as job (\d+) \(", reason(pool, f"{name}-0"))
        return bool(told) and told == waiting

    wait_for("it waits in Slurm, and its pods say so", is_told, 60)
    return int(told[0])


def start_of(pool: Cluster, job: int) -> str:
    return str(pool.slurm.job_field(str(job), "StartTime"))


def fill(pool: Cluster, *nodes: str, limit: str = "60") -> list[int]:
    jobs = [submit(pool, *FULL, f"--nodelist={name}", f"--time={limit}")[0] for name in nodes]
    wait_for("they run", lambda: pool.checker.sample().native_running >= len(jobs), 60)
    return jobs


def test_a_gang_waits_in_slurm_and_starts_before_a_larger_job_whose_start_stays_where_it_was(
    pool: Cluster, product: Product
) -> None:
    """And the bridge is killed while it waits: it starts all the same."""
    short = fill(pool, "gpu001", "gpu002", limit="30")
    fill(pool, "gpu003", limit="60")
    large = submit(pool, *FULL, "--nodes=4", "--time=60")[0]
    wait_for("the large job has its plan", lambda: start_of(pool, large) != "Unknown", 60)
    planned = start_of(pool, large)
    pool.kube.api.create_all(gang("g", 3, 8, **{keys.DURATION: "20m"}))
    job = queued(pool, "g")
    told = product.cli("explain", "default/g-1")["group"]
    assert told["slurmJob"]["jobId"] == job
    assert told["slurmJob"]["state"] == "PENDING"
    assert "no cluster holds it" not in told["waits"]
    product.kill9_bridge()
    pool.slurm.run("scancel", *map(str, short))
    wait_for("Slurm starts it", lambda: jobs_of_gangs(pool, "R"), 60)
    assert not bound(pool)
    product.start_bridge()
    product.wait_bridge()
    # Without agents what may be left in a claim that is found has to be waited for.
    wait_for("all are bound", lambda: len(bound(pool, "g-")) == 3, 90)
    assert jobs_of_gangs(pool) == {job: "RUNNING gpu[001-002,004]"}
    time.sleep(3)
    assert start_of(pool, large) == planned
    assert pool.checker.sample().violations == ()
    assert product.cli("explain", "default/g-1")["group"]["slurmJob"]["members"] == 3


def test_ranks_are_laid_on_what_slurm_gives_and_the_claim_ends_with_the_last_member(
    pool: Cluster, product: Product
) -> None:
    jobs = fill(pool, "gpu001", "gpu002", "gpu003")
    # Room for five members will be 8 + 8 + 4 GPUs: nodes with unequal numbers of members.
    submit(pool, "--gres=gpu:4", "--mem=100", "--nodelist=gpu004")
    wait_for("it runs", lambda: pool.checker.sample().native_running == 4, 60)
    pool.kube.api.create_all(gang("r", 5, 4))
    job = queued(pool, "r")
    with pool.checker.watch(0.3) as watch:
        pool.slurm.run("scancel", *map(str, jobs[:2]))
        wait_for("all are bound", lambda: len(bound(pool, "r-")) == 5, 60)
    assert watch.violations == []
    nodes = [p["spec"]["nodeName"] for p in sorted(bound(pool, "r-"), key=_name)]
    # Neighbours by rank stand together: no node comes twice.
    assert len(list(groupby(nodes))) == len(set(nodes)) == 3
    for i in range(4):
        pool.kube.api.delete(f"{PODS}/r-{i}")
    wait_for("four are gone", lambda: len(bound(pool, "r-")) == 1, 60)
    assert list(jobs_of_gangs(pool)) == [job]
    pool.kube.api.delete(f"{PODS}/r-4")
    wait_for("the claim is given back", lambda: not jobs_of_gangs(pool), 60)


def _name(made: dict[str, Any]) -> str:
    return str(made["metadata"]["name"])


def test_slurmctld_and_the_api_server_restart_and_it_keeps_its_place(
    pool: Cluster, product: Product
) -> None:
    busy = fill(pool, *pool.slurm.node_names)
    pool.kube.api.create_all(gang("k", 2, 8))
    job = queued(pool, "k")
    pool.slurm.wait_saved(job)
    pool.slurm.kill9_slurmctld()
    pool.kube.kill9_api()
    pool.slurm.start_slurmctld()
    pool.kube.start_api()
    pool.slurm.wait_scheduling()
    assert list(jobs_of_gangs(pool)) == [job]
    pool.slurm.run("scancel", *map(str, busy[:2]))
    wait_for("all are bound", lambda: len(bound(pool, "k-")) == 2, 60)
    assert list(jobs_of_gangs(pool)) == [job]
    assert pool.checker.sample().violations == ()


def test_cancelled_on_either_side_it_ends_on_both(pool: Cluster) -> None:
    fill(pool, *pool.slurm.node_names)
    pool.kube.api.create_all(gang("c", 2, 8))
    job = queued(pool, "c")
    pool.slurm.run("scancel", str(job))
    wait_for("its pods are deleted", lambda: not pool.kube.api.items(PODS), 60)
    said = event_of(pool, "c-0", "ClaimCancelled")
    assert f"job {job} of the gang was cancelled in Slurm" in said
    pool.kube.api.create_all(gang("d", 2, 8))
    queued(pool, "d")
    for i in range(2):
        pool.kube.api.delete(f"{PODS}/d-{i}")
    wait_for("its place is given back", lambda: not jobs_of_gangs(pool), 60)


def test_a_running_gang_that_slurm_ends_is_told_and_evicted_as_a_whole(pool: Cluster) -> None:
    busy = fill(pool, *pool.slurm.node_names)
    pool.kube.api.create_all(gang("e", 3, 8))
    job = queued(pool, "e")
    pool.slurm.run("scancel", *map(str, busy[:3]))
    wait_for("all are bound", lambda: len(bound(pool, "e-")) == 3, 60)
    pool.slurm.run("scancel", str(job))
    wait_for("all are gone", lambda: not pool.kube.api.items(PODS), 60)
    for i in range(3):
        event_of(pool, f"e-{i}", "ClaimLost")


def test_a_required_rack_is_the_one_that_has_room_first(cluster: ClusterFactory) -> None:
    """Slurm knows the racks by node features, and Kubernetes by labels."""
    racks = tuple(NodeGroup(2, f"r{i}n", extra=f"Feature=rack{i}") for i in range(2))
    config = SlurmConfig(groups=racks, bf_interval_s=1)
    pool = cluster(config, scheduler=False, labels=lambda _, name: {"example.org/rack": name[:2]})
    sections = {"pool": {"topologyLabels": ["example.org/rack"]}}
    with Product(pool, sections=sections):
        busy = fill(pool, "r0n001", "r1n001", "r1n002")
        pool.kube.api.create_all(gang("q", 4, 4, **{keys.TOPOLOGY: "required:rack"}))
        job = queued(pool, "q")
        # One node of the first rack is free; the second has room first.
        pool.slurm.run("scancel", *map(str, busy[1:]))
        wait_for("all are bound", lambda: len(bound(pool, "q-")) == 4, 60)
        assert jobs_of_gangs(pool) == {job: "RUNNING r1n[001-002]"}
        clear(pool)


def preempting() -> SlurmConfig:
    """Two nodes on which native jobs preempt claims, with ten seconds' notice."""
    partitions = (
        "PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=10",
        (
            "PartitionName=claims Nodes=ALL State=UP MaxTime=INFINITE RootOnly=YES PriorityTier=1"
            " PreemptMode=CANCEL GraceTime=10"
        ),
    )
    extra = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL")
    return SlurmConfig(nodes=2, bf_interval_s=1, partitions=partitions, extra=extra)


def test_a_preempted_gang_is_told_as_a_whole_before_slurm_takes_its_gpus(
    cluster: ClusterFactory,
) -> None:
    pool = cluster(preempting(), scheduler=False)
    with Product(pool):
        pool.kube.api.create_all(gang("p", 4, 4, **{keys.MODE: "queued"}))
        wait_for("all are bound", lambda: len(bound(pool, "p-")) == 4, 60)
        (job,) = jobs_of_gangs(pool)
        native = submit(pool, *FULL, "--nodes=2")[0]
        wait_for("all are told", lambda: _told_lost(pool) == 4, 30)
        assert f"Slurm preempts the claim (job {job})" in event_of(pool, "p-3", "ClaimLost")
        wait_for("all are gone", lambda: not pool.kube.api.items(PODS), 60)
        wait_for("the other one runs", lambda: _runs(pool, native), 60)
        assert jobs_of_gangs(pool) == {}
        clear(pool)


def test_a_preempted_indexed_job_comes_back_behind_its_gates_and_waits_in_the_queue(
    cluster: ClusterFactory,
) -> None:
    pool = cluster(preempting(), scheduler=False, controller_manager=True)
    made = job_of_pods("p", 4, 4, {keys.GROUP_SIZE: "4", keys.MODE: "queued"})
    made["spec"]["template"]["spec"]["schedulingGates"] = [{"name": keys.GATE}]
    with Product(pool):
        pool.kube.api.create(made)
        wait_for("all are bound", lambda: len(bound(pool, "p-")) == 4, 60)
        (first,) = jobs_of_gangs(pool)
        native = submit(pool, *FULL, "--nodes=2")[0]
        wait_for("the other one runs", lambda: _runs(pool, native), 90)

        def is_back() -> bool:
            again = jobs_of_gangs(pool, "PD")
            pods = [
                p for p in pool.kube.api.items(PODS) if "deletionTimestamp" not in p["metadata"]
            ]
            gated = [p for p in pods if p["spec"].get("schedulingGates")]
            return len(again) == 1 and first not in again and len(gated) == len(pods) == 4

        wait_for("it waits in the queue again", is_back, 90, 0.3)
        pool.slurm.run("scancel", str(native))
        wait_for("all are bound again", lambda: len(bound(pool, "p-")) == 4, 60)
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        pool.kube.api.request("DELETE", f"{JOBS}/p", options)
        clear(pool)


def _told_lost(pool: Cluster) -> int:
    return sum("ClaimLost" in events_of(pool, f"p-{i}") for i in range(4))


def _runs(pool: Cluster, job: int) -> bool:
    return pool.slurm.job_field(str(job), "JobState") == "RUNNING"


def test_a_single_pod_that_is_to_be_queued_waits_its_turn_behind_a_native_job(
    pool: Cluster,
) -> None:
    busy = fill(pool, *pool.slurm.node_names)
    (first,) = submit(pool, *FULL, "--nodes=1", "--time=60")
    wait_for("it waits", lambda: pool.slurm.job_field(str(first), "JobState") == "PENDING", 20)
    notes = {keys.MODE: "queued", keys.DURATION: "30m"}
    pool.kube.api.create(pod("solo", gpus=8, annotations=notes, gates=[keys.GATE]))
    wait_for("it waits in Slurm", lambda: list(jobs_of_gangs(pool, "PD")), 20)
    text = "waits in Slurm's queue as job"
    wait_for("it says so", lambda: text in reason(pool, "solo"), 20)
    pool.slurm.run("scancel", str(busy[0]))
    started = lambda: pool.slurm.job_field(str(first), "JobState") == "RUNNING"  # noqa: E731
    wait_for("the native job is first", started, 30)
    assert not bound(pool, "solo")
    pool.slurm.run("scancel", str(busy[1]))
    wait_for("it is bound", lambda: len(bound(pool, "solo")) == 1, 60)
    pool.kube.api.delete(f"{PODS}/solo")
    wait_for("its claim has ended", lambda: not jobs_of_gangs(pool), 60)


def test_a_gang_without_an_end_does_not_start_before_a_larger_job_whose_start_it_would_put_off(
    pool: Cluster,
) -> None:
    short = fill(pool, "gpu001", "gpu002", limit="30")
    fill(pool, "gpu003", limit="60")
    large = submit(pool, *FULL, "--nodes=4", "--time=60")[0]
    wait_for("the large job has its plan", lambda: start_of(pool, large) != "Unknown", 60)
    planned = start_of(pool, large)
    pool.kube.api.create_all(gang("e", 3, 8))
    job = queued(pool, "e")
    assert pool.slurm.job_field(str(job), "TimeLimit") == "1-00:00:00"
    pool.slurm.run("scancel", *map(str, short))
    wait_for("three nodes are free", lambda: pool.checker.sample().native_running == 1, 60)
    time.sleep(6)  # several cycles of backfill
    assert jobs_of_gangs(pool) == {job: "PENDING"}
    assert start_of(pool, large) == planned


def test_once_slurm_has_started_the_job_all_gates_come_off_and_nothing_else_is_waited_for(
    cluster: ClusterFactory,
) -> None:
    """Not for what may be left in a claim that is found: that would take ten minutes here."""
    pool = cluster(SlurmConfig(nodes=4, bf_interval_s=1), scheduler=False)
    with Product(pool, sections={"rules": {"lingerS": 600}}):
        (busy, *_) = fill(pool, *pool.slurm.node_names)
        pool.kube.api.create_all(gang("q", 4, 2, **{keys.DURATION: "20m"}))
        job = queued(pool, "q")
        pool.slurm.run("scancel", str(busy))
        took_s = wait_for("all are bound", lambda: len(bound(pool, "q-")) == 4, 120)
        print(f"the last one is bound {took_s:.2f} s after there was room")
        assert list(jobs_of_gangs(pool)) == [job]
        clear(pool)


def test_a_gang_over_a_limit_waits_in_the_queue_told_why_until_the_limit_is_gone(
    pool: Cluster,
) -> None:
    pool.slurm.run("scontrol", "update", "PartitionName=claims", "MaxTime=10")
    try:
        pool.kube.api.create_all(gang("l", 2, 8, **{keys.DURATION: "20m"}))
        text = "(PartitionTimeLimit)"
        wait_for("it says why", lambda: text in reason(pool, "l-0"), 30, 0.2)
        assert not bound(pool)
    finally:
        pool.slurm.run("scontrol", "update", "PartitionName=claims", "MaxTime=INFINITE")
    wait_for("all are bound", lambda: len(bound(pool, "l-")) == 2, 60)


def test_a_preferred_switch_is_waited_for_in_the_queue(cluster: ClusterFactory) -> None:
    tree = (
        "SwitchName=s1 Nodes=gpu[001-002]\nSwitchName=s2 Nodes=gpu[003-004]\n"
        "SwitchName=top Switches=s[1-2]\n"
    )
    pool = cluster(SlurmConfig(nodes=4, bf_interval_s=1, topology=tree), scheduler=False)
    with Product(pool):
        busy = fill(pool, *pool.slurm.node_names)
        wish = {keys.TOPOLOGY: "preferred:level0@5m", keys.DURATION: "20m"}
        pool.kube.api.create_all(gang("w", 2, 8, **wish))
        job = queued(pool, "w")
        assert "Switches=1@00:05:00" in pool.slurm.run("scontrol", "show", "job", str(job))
        pool.slurm.run("scancel", str(busy[1]), str(busy[2]))
        wait_for("a node of each is free", lambda: pool.checker.sample().native_running == 2, 60)
        time.sleep(4)  # several cycles of backfill
        assert jobs_of_gangs(pool) == {job: "PENDING"}
        pool.slurm.run("scancel", str(busy[0]))
        wait_for("all are bound", lambda: len(bound(pool, "w-")) == 2, 60)
        assert jobs_of_gangs(pool) == {job: "RUNNING gpu[001-002]"}
        clear(pool)
