"""The test cluster itself: real Slurm, real Kubernetes, and a judge that sees what is wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.checker import CLAIM, GPUS, Checker, UnreadError
from tests.support.cluster import Cluster
from tests.support.kube_api import KubeError
from tests.support.kube_objects import pod
from tests.support.slurm import SlurmConfig, SlurmError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.fixtures import ClusterFactory, SlurmFactory

pytestmark = [pytest.mark.slurm, pytest.mark.kube]

PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture(scope="module")
def pool(cluster: ClusterFactory) -> Cluster:
    return cluster(SlurmConfig(nodes=8))


@pytest.fixture
def empty(pool: Cluster) -> Iterator[Cluster]:
    """The module's cluster; jobs and pods of the test are gone after it."""
    yield pool
    pool.kube.api.delete(PODS, grace_s=0)
    pool.slurm.run("scancel", "--user", pool.slurm.slurm_user)
    until(lambda: not pool.slurm.run("squeue", "-h"))


def until(reached: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.05)


def claim(cluster: Cluster, node: str, gpus: int, of: str = "") -> str:
    """An immediate allocation without a process; its job id. of: UID that its comment names."""
    argv = ["salloc", "--no-shell", "-I", "-p", "claims", "-w", node, f"--gres=gpu:{gpus}"]
    comment = "slurmbridge/1 cluster=t" + (f" pod={of}" if of else "")
    done = cluster.slurm.run_raw(*argv, "--mem=1000", f"--comment={comment}")
    assert done.returncode == 0, done.stderr
    return str(re.findall(r"job allocation (\d+)", done.stderr)[0])


def bound_pod(cluster: Cluster, name: str, node: str, gpus: int) -> str:
    """A pod that names its node itself; its UID."""
    made = cluster.kube.api.create(pod(name, gpus=gpus, node_name=node))
    return str(made["metadata"]["uid"])


def annotate(cluster: Cluster, name: str, **notes: str) -> None:
    keys = {"claim": CLAIM, "gpus": GPUS}
    body = {"metadata": {"annotations": {keys[key]: value for key, value in notes.items()}}}
    cluster.kube.api.patch(f"{PODS}/{name}", body)


def test_two_native_jobs_on_one_node_get_disjoint_gpu_indices(empty: Cluster) -> None:
    slurm = empty.slurm
    jobs = []
    for gpus in (2, 3):
        more = ["--wrap", "sleep 600", "-o", "/dev/null", "-w", "gpu002"]
        jobs.append(slurm.run("sbatch", "--parsable", f"--gres=gpu:{gpus}", *more).strip())
        until(lambda: slurm.job_field(jobs[-1], "JobState") == "RUNNING")
    assert slurm.job_field(jobs[0], "GRES") == "gpu:a100:2(IDX:0-1)"
    assert slurm.job_field(jobs[1], "GRES") == "gpu:a100:3(IDX:2-4)"
    sample = empty.checker.sample()
    assert sample.native_running == 2
    assert sample.gpus_used == 5
    assert sample.gpus_total == 64
    assert sample.violations == ()


def test_only_root_and_slurm_user_may_submit_to_the_claims_partition(empty: Cluster) -> None:
    done = empty.slurm.run_raw("salloc", "--no-shell", "-I", "-p", "claims", user="nobody")
    assert done.returncode != 0
    assert "Access/permission denied" in done.stderr


def test_a_pod_is_scheduled_by_the_real_scheduler_runs_and_ends(empty: Cluster) -> None:
    api = empty.kube.api
    api.create(pod("brief", gpus=2, run_s=0.3))
    until(lambda: api.get(f"{PODS}/brief")["status"]["phase"] == "Running")
    seen = api.get(f"{PODS}/brief")
    assert seen["spec"]["nodeName"] in empty.slurm.node_names
    assert seen["status"]["containerStatuses"][0]["ready"] is True
    until(lambda: api.get(f"{PODS}/brief")["status"]["phase"] == "Succeeded")


def test_a_deleted_pod_stays_until_its_containers_have_stopped(empty: Cluster) -> None:
    api = empty.kube.api
    api.create(pod("slow", stop_s=0.6))
    until(lambda: api.get(f"{PODS}/slow")["status"]["phase"] == "Running")
    asked = time.monotonic()
    api.delete(f"{PODS}/slow")
    until(lambda: api.find(f"{PODS}/slow") is None)
    assert time.monotonic() - asked >= 0.6


def test_a_node_whose_kubelet_is_dead_keeps_its_deleted_pods(empty: Cluster) -> None:
    api = empty.kube.api
    bound_pod(empty, "kept", "gpu008", 0)
    until(lambda: api.get(f"{PODS}/kept")["status"]["phase"] == "Running")
    label = {"metadata": {"labels": {"hollow.test/kubelet": None}}}
    api.patch("/api/v1/nodes/gpu008", label)
    time.sleep(0.3)
    api.delete(f"{PODS}/kept")
    time.sleep(1.0)
    assert api.get(f"{PODS}/kept")["status"]["phase"] == "Running"
    api.patch("/api/v1/nodes/gpu008", {"metadata": {"labels": {"hollow.test/kubelet": "true"}}})
    until(lambda: api.find(f"{PODS}/kept") is None)


def test_claims_and_their_indices_outlive_kill_9_of_slurmctld(empty: Cluster) -> None:
    slurm = empty.slurm
    job = claim(empty, "gpu003", 4)
    slurm.wait_saved(job)
    slurm.kill9_slurmctld()
    with pytest.raises(UnreadError):
        Checker(slurm, empty.kube, read_s=1.0).sample()
    slurm.start_slurmctld()
    assert slurm.job_field(job, "JobState") == "RUNNING"
    assert slurm.job_field(job, "GRES") == "gpu:a100:4(IDX:0-3)"
    slurm.wait_scheduling()


def test_the_api_server_comes_back_on_its_port_with_its_objects(empty: Cluster) -> None:
    kube = empty.kube
    url = kube.url
    kube.api.create(pod("kept", gates=["example.org/wait"]))
    kube.kill9_api()
    kube.start_api()
    assert kube.url == url
    assert kube.api.get(f"{PODS}/kept")["status"]["phase"] == "Pending"
    assert len(kube.api.items("/api/v1/nodes")) == 8


def test_a_service_account_has_a_token_and_only_the_rights_that_rbac_gives(
    empty: Cluster,
) -> None:
    reader = empty.kube.api_as(empty.kube.kubeconfig_for_service_account("robots", "reader"))
    with pytest.raises(KubeError, match="403"):
        reader.items("/api/v1/nodes")
    kubectl = empty.kube.kubectl
    kubectl("create", "clusterrole", "see-pods", "--verb=list", "--resource=pods")
    binding = ("create", "clusterrolebinding", "see-pods", "--clusterrole=see-pods")
    kubectl(*binding, "--serviceaccount=robots:reader")

    def may_see(path: str) -> bool:
        try:
            reader.items(path)
        except KubeError as error:
            assert error.status == 403
            return False
        return True

    until(lambda: may_see("/api/v1/pods"))
    assert not may_see("/api/v1/nodes")


def test_the_judge_sees_that_the_job_of_a_claim_is_another_pods_by_now(empty: Cluster) -> None:
    job = claim(empty, "gpu004", 2, of="somebody")
    uid = bound_pod(empty, "late", "gpu004", 2)
    annotate(empty, "late", claim=f"{job}/{uid}", gpus="0-1")
    found = empty.checker.sample().violations
    assert [v.kind for v in found] == ["claim-not-running"]


def test_the_judge_is_content_with_a_pod_inside_its_claim(empty: Cluster) -> None:
    job = claim(empty, "gpu004", 2)
    uid = bound_pod(empty, "good", "gpu004", 2)
    annotate(empty, "good", claim=f"{job}/{uid}", gpus="0-1")
    sample = empty.checker.sample()
    assert sample.violations == ()
    assert (sample.bound, sample.claims_running, sample.native_running) == (1, 1, 0)
    assert sample.idle_claims == ()
    assert sample.owners == {("gpu004", 0): (int(job),), ("gpu004", 1): (int(job),)}


def test_the_judge_sees_a_pod_without_claim_and_how_long_it_stays(empty: Cluster) -> None:
    with empty.checker.watch(0.1) as seen:
        bound_pod(empty, "stray", "gpu005", 1)
        until(lambda: [one.times for one in seen.violations if one.times >= 3])
        empty.kube.api.delete(f"{PODS}/stray", grace_s=0)
        until(lambda: seen.samples[-1].violations == ())
    (stray,) = seen.violations
    assert (stray.violation.kind, stray.violation.subject) == ("no-claim", "default/stray")
    # As long as from the first look that found it to the last one.
    at = [sample.at for sample in seen.samples if sample.violations]
    assert (stray.times, stray.lasted_s) == (len(at), at[-1] - at[0])
    assert stray.lasted_s > 0.2
    assert seen.double_owned == []


def test_the_judge_sees_a_claim_that_ended_under_its_pod(empty: Cluster) -> None:
    job = claim(empty, "gpu006", 1)
    uid = bound_pod(empty, "naked", "gpu006", 1)
    annotate(empty, "naked", claim=f"{job}/{uid}", gpus="0")
    empty.slurm.run("scancel", job)
    until(lambda: empty.slurm.job_field(job, "JobState") == "CANCELLED")
    (violation,) = empty.checker.sample().violations
    assert violation.kind == "claim-not-running"
    assert "CANCELLED" in violation.text


def test_the_judge_sees_wrong_indices_and_two_pods_on_one_gpu(empty: Cluster) -> None:
    first, second = claim(empty, "gpu007", 1), claim(empty, "gpu007", 1)
    for name, job in (("one", first), ("two", second)):
        uid = bound_pod(empty, name, "gpu007", 1)
        annotate(empty, name, claim=f"{job}/{uid}", gpus="0")
    kinds = {violation.kind for violation in empty.checker.sample().violations}
    assert kinds == {"wrong-indices", "shared-index"}


def test_the_gpus_of_a_job_in_its_epilog_are_still_its_own(empty: Cluster, tmp_path: Path) -> None:
    hold, epilog = tmp_path / "hold", tmp_path / "epilog"
    epilog.write_text(f"#!/bin/sh\nwhile [ -e {hold} ]; do sleep 0.1; done\n")
    epilog.chmod(0o755)
    hold.touch()
    slurm = empty.slurm
    slurm.reconfigure(epilog=str(epilog))
    job = claim(empty, "gpu001", 2)
    held = {("gpu001", 0): (int(job),), ("gpu001", 1): (int(job),)}
    assert empty.checker.sample().owners == held
    slurm.run("scancel", job)
    until(lambda: slurm.job_field(job, "JobState") == "COMPLETING")
    assert empty.checker.sample().owners == held
    argv = ["salloc", "--no-shell", "-I", "-p", "claims", "--gres=gpu:1", "-w", "gpu001"]
    assert slurm.run_raw(*argv).returncode != 0
    hold.unlink()
    until(lambda: slurm.job_field(job, "JobState") == "CANCELLED")
    assert empty.checker.sample().owners == {}
    slurm.reconfigure(epilog="")


def test_a_daemon_that_cannot_start_is_named_with_its_log(slurm_cluster: SlurmFactory) -> None:
    with pytest.raises(SlurmError, match=r"(?s)slurmctld ended with 1.*NoSuchThing"):
        slurm_cluster(nodes=2, extra=("SchedulerType=sched/NoSuchThing",))


def test_nothing_is_left_after_stop() -> None:
    one = Cluster(SlurmConfig(nodes=4)).start()
    one.slurm.run("sbatch", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 600 & sleep 600")
    until(lambda: len(one.slurm.pids()) > 10)
    pids = one.slurm.pids() + one.kube.pids()
    one.stop()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert not one.slurm.dir.exists()
    assert not one.kube.dir.exists()


def test_nothing_is_left_after_kill_9_of_the_process_that_started_it() -> None:
    program = (
        "import time\n"
        "from tests.support.slurm import SlurmCluster, SlurmConfig\n"
        "slurm = SlurmCluster(SlurmConfig(nodes=2)).start()\n"
        "slurm.wait_scheduling()\n"
        "slurm.run('sbatch', '-o', '/dev/null', '--wrap', 'sleep 600')\n"
        "while len(slurm.pids()) < 7: time.sleep(0.1)\n"
        "print(slurm.dir, *slurm.pids(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as runner:
        assert runner.stdout is not None
        folder, *pids = runner.stdout.readline().split()
        assert len(pids) >= 7
        os.kill(runner.pid, signal.SIGKILL)
    until(lambda: not Path(folder).exists())
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
