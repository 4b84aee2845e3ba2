"""The next owner of a GPU starts only after the last process of the one before has ended.

Each case: a pod with all GPUs of a node that ignores SIGTERM; something ends it or its claim; the
next owner is a native job or a pod. Every pod and job locks its GPUs without waiting, so an overlap
is found exactly; the gap is from the pod's last sign of life (every 20 ms) to the next one's start.
"""

import contextlib
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


def test_a_job_that_preempts_a_claim_waits_for_the_pods_last_process(figures):
    partitions = (
        "PartitionName=main Nodes=ALL Default=YES State=UP PreemptMode=OFF PriorityTier=1",
        "PartitionName=claims Nodes=ALL State=UP RootOnly=YES PreemptMode=CANCEL PriorityTier=1",
        "PartitionName=urgent Nodes=ALL State=UP PreemptMode=OFF PriorityTier=10",
    )
    extra = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL")
    with NodePool(nodes=1, slurm_config={"partitions": partitions, "extra": extra}) as pool:
        name = unique("victim")
        body = pool.pod(name, GPUS, ignore_term=True, grace_s=GRACE_S, every=0.02)
        victim = pool.place(body, NODE)
        pool.wait_running(name)
        wait((pool.marks / "beat" / name).exists, 5, "first beat")
        job = pool.native(GPUS, node=NODE, run_s=0.2, partition="urgent")
        wait(lambda: pool.job_state(victim.job_id) != "RUNNING", 90, "preemption")
        evict_later(pool, victim)
        start = pool.marks / "start" / f"job-{job}"
        wait(start.exists, 90, "the preemptor starts", lambda: pool.slurm.run("squeue"))
        gap = pool.started(f"job-{job}") - pool.last_beat(name)
        print(f"{'preemption by a partition':<28} {'native job':<11} gap {gap * 1000:8.0f} ms")
        figures.count(starts=2, overlaps=len(pool.overlaps()))
        figures.gap(gap)
        assert pool.overlaps() == []
        assert gap >= 0


def test_a_job_that_was_forgotten_by_slurmctld_is_fenced_by_the_prolog(whole, figures):
    """slurmctld loses the claim in a crash; a native job waits for exactly these GPUs."""
    pool = whole
    found = len(pool.overlaps())
    name = unique("covered")
    body = pool.pod(name, GPUS, ignore_term=True, every=0.02)
    placed = []
    wait(lambda: placed.append(pool.place(body, NODE)) or placed[-1], 30, "room")
    # Not before: the agent starts no container of a claim that slurmctld cannot confirm.
    pool.wait_running(name)
    pool.slurm.kill9_slurmctld()
    pool.slurm.start_slurmctld()
    wait(
        lambda: (
            "idle" in pool.slurm.run("sinfo", "-h", "-n", NODE, "-o", "%T", check=False)
            or "mixed" in pool.slurm.run("sinfo", "-h", "-n", NODE, "-o", "%T", check=False)
        ),
        30,
        "slurmctld is back",
    )
    forgotten = pool.job_state(placed[-1].job_id) != "RUNNING"
    if not forgotten:
        # It was saved in time: take the claim away behind the node's back, without an Epilog.
        pool.without_epilog(lambda: pool.slurm.run("scancel", str(placed[-1].job_id)))
    job = pool.native(GPUS, node=NODE, run_s=0.2)
    pool.slurm.wait_scheduling()
    hooks = lambda: pool.snapshot(NODE)["hooks"].get("handover", 0)  # noqa: E731
    wait(lambda: hooks() > 0, 30, "a handover was asked", lambda: pool.slurm.run("squeue"))
    wait(
        lambda: pool.job_field(job, "Restarts") not in ("", "0"),
        40,
        "requeued",
        pool.job_state,
        job,
    )
    assert not (pool.marks / "start" / f"job-{job}").exists()
    assert "drain" not in pool.slurm.run("sinfo", "-h", "-n", NODE, "-o", "%T")
    assert pool.pod_pids(NODE, placed[-1].uid)
    figures.count(starts=1, overlaps=len(pool.overlaps()) - found)
    assert pool.overlaps()[found:] == []
    pool.delete(name, grace_s=0)
    wait(lambda: not pool.pod_pids(NODE, placed[-1].uid), 30, "pod ends")
    pool.slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
    wait(
        (pool.marks / "start" / f"job-{job}").exists,
        60,
        "job starts at last",
        lambda: pool.slurm.run("squeue"),
    )
    gap = pool.started(f"job-{job}") - pool.last_beat(name)
    figures.gap(gap)
    figures.count(starts=1)
    assert gap >= 0
    assert pool.overlaps()[found:] == []


def test_a_native_job_on_a_pods_gpus_drains_the_node_where_the_site_says_so(whole):
    """The same fence with `on_busy: drain`: nothing runs, and a person must look."""
    pool = whole
    name = unique("covered")
    body = pool.pod(name, 2, ignore_term=True)
    placed = []
    wait(lambda: placed.append(pool.place(body, NODE)) or placed[-1], 30, "room")
    pool.wait_running(name)
    pool.without_epilog(lambda: pool.slurm.run("scancel", str(placed[-1].job_id)))
    state = lambda: pool.slurm.run("scontrol", "show", "node", "-o", NODE)  # noqa: E731
    with pool.other_hooks(NODE, on_busy="drain", prolog_wait_s=0.2):
        job = pool.native(pool.gpus, node=NODE, run_s=0.2)
        wait(lambda: "DRAIN" in state(), 40, "drained", pool.slurm.run, "squeue")
    assert f"Reason=slurmbridge-node: GPU 0,1,2,3,4,5,6,7 given to job {job}: pod " in state()
    wait(lambda: pool.job_state(job) != "RUNNING", 20, "the job does not run")
    assert not (pool.marks / "start" / f"job-{job}").exists()
    assert pool.pod_pids(NODE, placed[-1].uid)
    pool.slurm.run("scancel", str(job))
    pool.delete(name, grace_s=0)
    wait(lambda: not pool.pod_pids(NODE, placed[-1].uid), 30, "pod ends")
    pool.slurm.run("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
    wait(lambda: "DRAIN" not in state(), 20, "resumed", state)


def test_an_interactive_job_on_a_pods_gpus_is_cancelled_before_its_task_runs(whole):
    """A job that cannot be requeued, and a claim that Slurm has lost: the same fence."""
    pool = whole
    name = unique("covered")
    body = pool.pod(name, GPUS, ignore_term=True)
    placed = []
    wait(lambda: placed.append(pool.place(body, NODE)) or placed[-1], 30, "room")
    pool.wait_running(name)
    pool.without_epilog(lambda: pool.slurm.run("scancel", str(placed[-1].job_id)))
    mark = pool.marks / f"ran-{name}"
    done = pool.slurm.run_raw(
        *("srun", "-p", "main", "-w", NODE, "--mem=100", f"--gres=gpu:{GPUS}"),
        *("touch", str(mark)),
    )
    assert "aborted before step completely launched" in done.stderr
    assert not mark.exists()
    assert "drain" not in pool.slurm.run("sinfo", "-h", "-n", NODE, "-o", "%T")
    assert pool.pod_pids(NODE, placed[-1].uid)
    pool.delete(name, grace_s=0)
    wait(lambda: not pool.pod_pids(NODE, placed[-1].uid), 30, "pod ends")
