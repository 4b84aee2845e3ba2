"""The next owner of a GPU starts only after the last process of the one before has ended.

Each case: a pod with all GPUs of a node that ignores SIGTERM; something ends it or its claim; the
next owner is a native job or a pod. Every pod and job locks its GPUs without waiting, so an overlap
is found exactly; the gap is from the pod's last sign of life (every 20 ms) to the next one's start.
"""

import contextlib
import shutil
import subprocess
import time

import pytest

from tests.support.node_pool import NodePool, unique, wait

NODE = "gpu001"
GRACE_S = 1
GPUS = 7
"""A shell has seven file numbers to lock them with; the eighth stays free."""


def force_delete(pool, pod):
    pool.delete(pod.name, grace_s=0)


def evict_later(pool, pod):
    """What the bridge does when Slurm has ended a claim."""
    time.sleep(0.3)
    pool.delete(pod.name, grace_s=GRACE_S)


def scancel(pool, pod):
    pool.slurm.run("scancel", str(pod.job_id))
    evict_later(pool, pod)


def time_limit(pool, pod):
    pool.slurm.run("scontrol", "update", f"jobid={pod.job_id}", "EndTime=now")
    wait(lambda: pool.job_state(pod.job_id) != "RUNNING", 90, "time limit")
    evict_later(pool, pod)


def slurmd_restart(pool, pod):
    pool.slurm.run("scancel", str(pod.job_id))
    time.sleep(0.5)
    pool.slurm.kill9_slurmd(NODE)
    pool.slurm.start_slurmd(NODE)
    time.sleep(1.0)
    pool.delete(pod.name, grace_s=GRACE_S)


def kubelet_stopped(pool, pod):
    pool.node[NODE].kill9_kubelet()
    pool.delete(pod.name, grace_s=0)
    time.sleep(2.0)
    assert pool.pod_pids(NODE, pod.uid)
    pool.node[NODE].start_kubelet()


def agent_stopped(pool, pod):
    pool.kill9_agent(NODE)
    pool.delete(pod.name, grace_s=0)


def containerd_restart(pool, pod):
    pool.delete(pod.name, grace_s=0)
    pool.node[NODE].kill9_containerd()
    time.sleep(1.0)
    pool.node[NODE].start_containerd()


CASES = {
    "force delete": force_delete,
    "scancel of the claim": scancel,
    "time limit of the claim": time_limit,
    "slurmd restarts meanwhile": slurmd_restart,
    "kubelet stopped": kubelet_stopped,
    "agent stopped": agent_stopped,
    "containerd restarts": containerd_restart,
}


@pytest.fixture
def whole(pool):
    """The node as every test expects it, also after this one."""
    yield pool
    node = pool.node[NODE]
    with contextlib.suppress(Exception):
        if node.poll("kubelet") is not None:
            node.start_kubelet()
    if node.poll("agent") is not None:
        pool.start_agent(NODE)
    wait(lambda: pool.is_registered(NODE), 30, "agent is back")
    pool.wait_gpus(NODE)


@pytest.mark.parametrize("following", ["native job", "pod"])
@pytest.mark.parametrize("case", CASES)
def test_the_next_owner_waits_for_the_last_process(whole, figures, case, following):
    pool = whole
    found = len(pool.overlaps())
    name = unique("first")
    body = pool.pod(name, GPUS, ignore_term=True, grace_s=GRACE_S, every=0.02)
    placed = []
    wait(lambda: placed.append(pool.place(body, NODE)) or placed[-1], 30, "room for the first")
    first = placed[-1]
    pool.wait_running(name)
    wait((pool.marks / "beat" / name).exists, 5, "first beat")
    if following == "native job":
        job = pool.native(GPUS, node=NODE, run_s=0.2)
        after = f"job-{job}"
    else:
        after = unique("second")
    CASES[case](pool, first)
    if following == "pod":
        if pool.node[NODE].poll("agent") is not None:
            # As the bridge does: pods only go where an agent is registered.
            pool.start_agent(NODE)
        wait(lambda: pool.is_registered(NODE), 30, "registered")
        pool.wait_gpus(NODE)
        again = pool.pod(after, GPUS, run_s=0.2)
        wait(lambda: pool.place(again, NODE), 90, "room for the second")
    wait(
        (pool.marks / "start" / after).exists,
        90,
        f"start of {after}",
        lambda: pool.slurm.run("squeue") + str(pool.get(after)),
    )
    gap = pool.started(after) - pool.last_beat(name)
    figures.count(starts=2, overlaps=len(pool.overlaps()) - found)
    figures.gap(gap)
    print(f"{case:<28} {following:<11} gap {gap * 1000:8.0f} ms")
    assert pool.overlaps()[found:] == []
    assert gap >= 0
    pool.delete(after)
    wait(lambda: not pool.get(name), 30, "first is gone")
    wait(lambda: not pool.get(after), 30, "second is gone")


@pytest.fixture(scope="module")
def preempting():
    """A node whose claims a partition may preempt."""
    partitions = (
        "PartitionName=main Nodes=ALL Default=YES State=UP PreemptMode=OFF PriorityTier=1",
        "PartitionName=claims Nodes=ALL State=UP RootOnly=YES PreemptMode=CANCEL PriorityTier=1",
        "PartitionName=urgent Nodes=ALL State=UP PreemptMode=OFF PriorityTier=10",
    )
    extra = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL")
    with NodePool(nodes=1, slurm_config={"partitions": partitions, "extra": extra}) as pool:
        yield pool


@pytest.mark.parametrize("following", ["native job", "pod"])
def test_who_comes_after_a_preempted_claim_waits_for_the_pods_last_process(
    preempting, figures, following
):
    pool, found = preempting, len(preempting.overlaps())
    name = unique("victim")
    body = pool.pod(name, GPUS, ignore_term=True, grace_s=GRACE_S, every=0.02)
    placed = []
    wait(lambda: placed.append(pool.place(body, NODE)) or placed[-1], 30, "room for the victim")
    victim = placed[-1]
    pool.wait_running(name)
    wait((pool.marks / "beat" / name).exists, 5, "first beat")
    job = pool.native(GPUS, node=NODE, run_s=0.2, partition="urgent")
    wait(lambda: pool.job_state(victim.job_id) != "RUNNING", 90, "preemption")
    after = f"job-{job}"
    if following == "pod":
        # The preemptor goes away while the claim is still held: a pod may be next.
        pool.slurm.run("scancel", str(job))
        after = unique("second")
    evict_later(pool, victim)
    if following == "pod":
        again = pool.pod(after, GPUS, run_s=0.2)
        wait(lambda: pool.place(again, NODE), 90, "room for the second")
    start = pool.marks / "start" / after
    wait(start.exists, 90, f"{after} starts", lambda: pool.slurm.run("squeue"))
    gap = pool.started(after) - pool.last_beat(name)
    print(f"{'preemption by a partition':<28} {following:<11} gap {gap * 1000:8.0f} ms")
    figures.count(starts=2, overlaps=len(pool.overlaps()) - found)
    figures.gap(gap)
    assert pool.overlaps()[found:] == []
    assert gap >= 0
    pool.delete(after)
    wait(lambda: not pool.get(name), 30, "the victim is gone")
    wait(lambda: not pool.get(after), 30, "the second is gone")


def slurm_state(pool):
    return pool.slurm.dir / "state"


def save_slurm_state(pool):
    """What slurmctld has on its disk from now on, should it crash before it writes again."""
    kept = slurm_state(pool).with_name("state-kept")
    pool.slurm.stop_slurmctld()
    subprocess.run(["cp", "-a", "--", str(slurm_state(pool)), str(kept)], check=True, timeout=30)
    pool.slurm.start_slurmctld()
    pool.slurm.wait_nodes()
    return kept


def crash_slurmctld(pool, kept):
    """kill -9; it starts again with what it had on its disk: younger jobs are forgotten."""
    pool.slurm.kill9_slurmctld()
    shutil.rmtree(slurm_state(pool))
    kept.rename(slurm_state(pool))
    pool.slurm.start_slurmctld()
    pool.slurm.wait_nodes()
    pool.slurm.wait_scheduling()


def handovers(pool):
    return sum(pool.snapshot(name)["hooks"].get("handover", 0) for name in pool.names)


def test_native_jobs_on_the_gpus_of_claims_that_slurmctld_forgot_are_fenced_by_the_prolog(
    whole, figures
):
    """slurmctld loses claims in a crash, while native jobs wait for exactly these GPUs."""
    pool = whole
    found = len(pool.overlaps())
    wait(lambda: not pool.pods(), 60, "the nodes are empty")
    wait(lambda: not pool.slurm.run("squeue", "-h", "-o", "%i").split(), 60, "no job is left")
    # In the queue before the claims, so that slurmctld remembers them, and held until it is back.
    jobs = {
        name: [pool.native(4, node=name, run_s=0.2, options=("--hold",)) for _ in range(2)]
        for name in pool.names
    }
    every = [job for some in jobs.values() for job in some]
    kept = save_slurm_state(pool)
    pods = {}
    for node in pool.names:
        pods[node] = []
        for _ in range(2):
            body = pool.pod(unique("covered"), 4, ignore_term=True, every=0.02)
            wait(lambda b=body, n=node: pool.place(b, n), 30, "room")
            pods[node].append(pool.claims[body["metadata"]["name"]])
    for claim in [one for some in pods.values() for one in some]:
        # Not before: the agent starts no container of a claim that slurmctld cannot confirm.
        pool.wait_running(claim.name)
    asked = handovers(pool)
    crash_slurmctld(pool, kept)
    for claim in [one for some in pods.values() for one in some]:
        assert pool.job_state(claim.job_id) == "", "forgotten"
        # Its number will be another job's: nobody may end that one with the pod.
        pool.claims.pop(claim.name)
    pool.slurm.run("scontrol", "release", ",".join(map(str, every)))
    for job in every:
        wait(
            lambda job=job: pool.job_field(job, "Restarts") not in ("", "0"),
            90,
            f"job {job} was given the GPUs and taken back",
            lambda: pool.slurm.run("squeue", "-o", "%i %T %r %N %S"),
        )
    assert handovers(pool) - asked >= len(every)
    assert not [job for job in every if (pool.marks / "start" / f"job-{job}").exists()]
    for node in pool.names:
        assert "drain" not in pool.slurm.run("sinfo", "-h", "-n", node, "-o", "%T")
        assert all(pool.pod_pids(node, claim.uid) for claim in pods[node])
    assert pool.overlaps()[found:] == []
    for node in pool.names:
        for claim in pods[node]:
            pool.delete(claim.name, grace_s=0)
            wait(lambda c=claim, n=node: not pool.pod_pids(n, c.uid), 30, "pod ends")
    for job in every:
        # A job that was requeued waits two minutes by itself.
        pool.slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
    for node, mine in jobs.items():
        last = max(pool.last_beat(claim.name) for claim in pods[node])
        for job in mine:
            wait(
                (pool.marks / "start" / f"job-{job}").exists,
                90,
                f"job {job} starts at last",
                lambda: pool.slurm.run("squeue", "-o", "%i %T %r %N %S"),
            )
            figures.gap(pool.started(f"job-{job}") - last)
            assert pool.started(f"job-{job}") >= last
    figures.count(starts=8, overlaps=len(pool.overlaps()) - found)
    assert pool.overlaps()[found:] == []


def pod_that_lost_its_claim(pool, gpus):
    """A pod that runs on and minds no SIGTERM, while Slurm has its GPUs back."""
    name = unique("covered")
    body = pool.pod(name, gpus, ignore_term=True)
    placed = []
    wait(lambda: placed.append(pool.place(body, NODE)) or placed[-1], 30, "room")
    pool.wait_running(name)
    pool.without_epilog(lambda: pool.slurm.run("scancel", str(placed[-1].job_id)))
    return placed[-1]


def end_pod(pool, pod):
    pool.delete(pod.name, grace_s=0)
    wait(lambda: not pool.pod_pids(NODE, pod.uid), 30, "pod ends")


def test_a_native_job_on_a_pods_gpus_drains_the_node_where_the_site_says_so(whole):
    """The same fence with `on_busy: drain`: nothing runs, and a person must look."""
    pool = whole
    pod = pod_that_lost_its_claim(pool, 2)
    state = lambda: pool.slurm.run("scontrol", "show", "node", "-o", NODE)  # noqa: E731
    with pool.other_hooks(NODE, on_busy="drain", prolog_wait_s=0.2):
        job = pool.native(pool.gpus, node=NODE, run_s=0.2)
        wait(lambda: "DRAIN" in state(), 40, "drained", pool.slurm.run, "squeue")
    assert f"Reason=slurmbridge-node: GPU 0,1,2,3,4,5,6,7 given to job {job}: pod " in state()
    wait(lambda: pool.job_state(job) != "RUNNING", 20, "the job does not run")
    assert not (pool.marks / "start" / f"job-{job}").exists()
    assert pool.pod_pids(NODE, pod.uid)
    pool.slurm.run("scancel", str(job))
    end_pod(pool, pod)
    pool.slurm.run("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
    wait(lambda: "DRAIN" not in state(), 20, "resumed", state)


def test_a_job_that_is_taken_back_does_not_start_however_late_slurmd_hears_of_it(whole):
    """slurmctld's word to slurmd is on its way while the Prolog ends."""
    pool = whole
    found = len(pool.overlaps())
    pod = pod_that_lost_its_claim(pool, GPUS)
    asked = handovers(pool)
    with pool.other_hooks(NODE, prolog_wait_s=2.0):
        job = pool.native(pool.gpus, node=NODE, run_s=5.0)
        wait(lambda: handovers(pool) > asked, 30, "its Prolog asks", pool.slurm.run, "squeue")
        pool.slurm.pause_slurmd(NODE)
        try:
            taken_back = lambda: pool.job_field(job, "Restarts") not in ("", "0")  # noqa: E731
            wait(taken_back, 30, "slurmctld has it back", pool.slurm.run, "squeue")
            time.sleep(3.0)
        finally:
            pool.slurm.resume_slurmd(NODE)
        ending = lambda: pool.slurm.run("squeue", "-h", "-t", "CG", "-o", "%i").split()  # noqa: E731
        wait(lambda: not ending(), 60, "its end", pool.slurm.run, "squeue")
    assert not (pool.marks / "start" / f"job-{job}").exists()
    assert pool.overlaps()[found:] == []
    assert "drain" not in pool.slurm.run("sinfo", "-h", "-n", NODE, "-o", "%T")
    assert pool.pod_pids(NODE, pod.uid)
    pool.slurm.run("scancel", str(job))
    end_pod(pool, pod)


def test_an_interactive_job_on_a_pods_gpus_is_cancelled_before_its_task_runs(whole):
    """A job that cannot be requeued, and a claim that Slurm has lost: the same fence."""
    pool = whole
    pod = pod_that_lost_its_claim(pool, GPUS)
    mark = pool.marks / f"ran-{pod.name}"
    done = pool.slurm.run_raw(
        *("srun", "-p", "main", "-w", NODE, "--mem=100", f"--gres=gpu:{GPUS}"),
        *("touch", str(mark)),
    )
    assert "aborted before step completely launched" in done.stderr
    assert not mark.exists()
    assert "drain" not in pool.slurm.run("sinfo", "-h", "-n", NODE, "-o", "%T")
    assert pool.pod_pids(NODE, pod.uid)
    end_pod(pool, pod)
