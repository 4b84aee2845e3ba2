"""A claim whose pod cannot be ended: after the longest hold the node is drained, and people told."""

from tests.support.node_pool import NodePool, unique, wait

NODE = "gpu001"


def test_after_the_longest_hold_the_node_is_drained_with_our_reason_and_an_alarm(figures):
    with NodePool(nodes=1, gpus=2, hooks={"longest_hold_s": 3.0}) as pool:
        name = unique("stuck")
        pod = pool.place(pool.pod(name, 2, ignore_term=True, grace_s=1), NODE)
        pool.wait_running(name)
        # A kubelet that does nothing: as if the pod's process could not be killed.
        pool.node[NODE].pause_kubelet()
        job = pool.native(2, node=NODE, run_s=0.2)
        pool.slurm.run("scancel", str(pod.job_id))
        state = lambda: pool.slurm.run("scontrol", "show", "node", "-o", NODE)  # noqa: E731
        wait(lambda: "DRAIN" in state(), 40, "drained", state)
        assert f"Reason=slurmbridge-node: claim {pod.job_id} held" in state()
        assert pool.pod_pids(NODE, pod.uid)

        def alarms():
            found = pool.snapshot(NODE)["report"].get("findings", ())
            return [f["text"] for f in found if f["kind"] == "alarm"]

        wait(alarms, 10, "the alarm is in the agent's report")
        assert f"claim {pod.job_id} held" in alarms()[0]
        assert 'slurmbridge_node_findings{kind="alarm"} 1.0' in pool.metrics(NODE)
        # The job that waits for these GPUs does not get them, and nobody but a person resumes.
        assert pool.job_state(job) == "PENDING"
        pool.node[NODE].resume_kubelet()
        pool.delete(name, grace_s=0)
        wait(lambda: not pool.pod_pids(NODE, pod.uid), 30, "the pod ends")
        assert "DRAIN" in state()
        pool.slurm.run("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
        start = pool.marks / "start" / f"job-{job}"
        wait(start.exists, 90, "the job runs at last", lambda: pool.slurm.run("squeue"))
        assert pool.overlaps() == []
        figures.count(starts=2)
        figures.gap(pool.started(f"job-{job}") - pool.last_beat(name))
