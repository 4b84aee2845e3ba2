"""The guard can fail: without the Epilog's hold the same test finds the overlap."""

from tests.support.node_pool import NodePool, unique, wait

NODE = "gpu001"


def test_without_the_hold_two_owners_are_on_one_gpu_and_the_test_sees_it():
    # No agent's Prolog either: the hold alone is what keeps them apart.
    with NodePool(nodes=1, hold=False) as pool:
        name = unique("first")
        pod = pool.place(pool.pod(name, 7, ignore_term=True, grace_s=5), NODE)
        pool.wait_running(name)
        job = pool.native(7, node=NODE, run_s=0.5)
        # A kubelet that is slow to kill (it takes 2 s at best), however fast this machine is.
        pool.node[NODE].pause_kubelet()
        pool.delete(name, grace_s=0)
        wait((pool.marks / "start" / f"job-{job}").exists, 30, "the job starts")
        assert pool.pod_pids(NODE, pod.uid), "the pod's process lives on"
        wait(pool.overlaps, 5, "the overlap is found")
        pool.node[NODE].resume_kubelet()
        assert pool.overlaps()[0].startswith(f"job-{job} GPU-{NODE}-")
