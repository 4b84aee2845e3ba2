"""The bridge with the agents of real nodes: pods go only where one is, and leave only by its word."""

import signal
import time

import pytest

from tests.support.node_pool import CLUSTER, NodePool, unique, wait
from tests.support.product import Product

NODE, OTHER = "gpu001", "gpu002"
GPUS = 4


class Joined:
    """Two real nodes with agents, a bridge, an extender and kube-scheduler."""

    def __init__(self, pool, product):
        self.pool, self.product = pool, product

    def create(self, name, gpus, node, **how):
        """A pod that kube-scheduler places on a node; its UID."""
        where = {"schedulerName": "default-scheduler", "nodeSelector": {"node": node}}
        body = self.pool.pod(name, gpus, spec=where, **how)
        return self.pool.kube.api.create(body)["metadata"]["uid"]

    def runs(self, name, gpus, node, **how):
        """The same, once its process has started; (UID, job id of its claim)."""
        uid = self.create(name, gpus, node, **how)
        self.wait_running(name)
        return uid, self.claim_of(name)

    def wait_running(self, name):
        mark = self.pool.marks / "start" / name
        wait(lambda: mark.exists() or self.pool.phase(name) == "Failed", 60, name, self.told, name)
        assert mark.exists(), self.story(name)

    def story(self, name):
        """What everybody says of a pod that failed."""
        pod = self.pool.get(name)
        uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName", "")
        lines = [str(pod["metadata"].get("annotations")), str(pod["status"])]
        logs = [self.product.log(part) for part in ("bridge-0", "extender-0")]
        logs += [self.pool.node[node].log("agent").read_text()] if node else []
        lines += [line for log in logs for line in log.splitlines() if uid in line or name in line]
        return "\n".join(lines)[-12000:]

    def claim_of(self, name):
        notes = self.pool.get(name)["metadata"]["annotations"]
        return int(notes["slurmbridge.dev/claim"].partition("/")[0])

    def blocked(self, node):
        return self.product.cli("who", node)["blocked"]

    def is_ready(self, node):
        """Whether a bridge leads and takes pods for a node."""
        try:
            return self.blocked(node) == ""
        except RuntimeError:
            return False

    def refusals(self, name):
        """Classes of nodes for a pod that waits."""
        return self.product.cli("explain", f"default/{name}")["waits"]["nodes"]

    def told(self, name):
        """What to look at when something does not come true."""
        return (
            f"{self.pool.get(name)}\n{self.product.cli('status')}\n{self.pool.slurm.run('squeue')}"
        )


@pytest.fixture(scope="module")
def joined():
    with NodePool(nodes=2, gpus=GPUS, agents=False, releaser=False) as pool:
        for name in pool.names:
            label = {"metadata": {"labels": {"node": name}}}
            pool.kube.api.patch(f"/api/v1/nodes/{name}", label)
        sections = {"rules": {"agents": "required"}}
        with Product(pool, policy={"cluster": CLUSTER}, sections=sections) as product:
            pool.node_config = {"bridge": [product.link()]}
            for name in pool.names:
                pool.start_agent(name)
            for name in pool.names:
                pool.wait_gpus(name)
            joined = Joined(pool, product)
            for name in pool.names:
                wait(lambda n=name: joined.blocked(n) == "", 30, "ready", joined.blocked, name)
            yield joined


def sampled_release(joined, job_id, node, uid, timeout_s=60):
    """Wait until Slurm no longer runs a claim; the pod's processes seen after that moment."""
    pool = joined.pool
    deadline = time.monotonic() + timeout_s
    while pool.job_state(job_id) == "RUNNING":
        assert time.monotonic() < deadline, joined.product.cli("who", node)
        time.sleep(0.02)
    return pool.pod_pids(node, uid)


def test_a_claim_is_released_only_after_the_last_process_of_a_force_deleted_pod(joined, figures):
    pool = joined.pool
    found = len(pool.overlaps())
    name = unique("stubborn")
    uid, job_id = joined.runs(name, GPUS, NODE, ignore_term=True, every=0.02)
    native = pool.native(GPUS, node=NODE, run_s=0.2)
    pool.delete(name, grace_s=0)
    wait(lambda: pool.get(name) is None, 10, "the object is gone")
    assert pool.pod_pids(NODE, uid), "its processes are not"
    assert sampled_release(joined, job_id, NODE, uid) == []
    after = f"job-{native}"
    wait((pool.marks / "start" / after).exists, 60, "the next owner", joined.told, name)
    gap = pool.started(after) - pool.last_beat(name)
    figures.gap(gap)
    figures.count(starts=2, overlaps=len(pool.overlaps()) - found)
    assert gap >= 0
    assert pool.overlaps()[found:] == []


@pytest.mark.parametrize("end", ["by itself", "deleted"])
def test_a_pod_that_ends_well_gives_its_claim_back_within_seconds(joined, figures, end):
    pool = joined.pool
    name = unique("short")
    uid, job_id = joined.runs(name, 2, NODE, run_s=0.5 if end == "by itself" else None)
    if end == "deleted":
        pool.delete(name)
    assert sampled_release(joined, job_id, NODE, uid, 30) == []
    figures.count(starts=1)


def test_without_its_agent_a_node_gets_no_pod_and_gives_no_claim_back(joined, figures):
    pool = joined.pool
    name = unique("kept")
    uid, job_id = joined.runs(name, 2, NODE, ignore_term=True)
    pool.kill9_agent(NODE)
    wait(lambda: "silent" in joined.blocked(NODE), 15, "the bridge knows", joined.blocked, NODE)
    assert joined.blocked(OTHER) == ""
    pool.delete(name, grace_s=0)
    wait(lambda: not pool.pod_pids(NODE, uid), 30, "its processes end")
    waiting = unique("waits")
    joined.create(waiting, 1, NODE)
    wait(lambda: pool.get(waiting)["status"].get("conditions"), 20, "it was tried")
    assert joined.refusals(waiting)["no_agent"]["examples"] == [NODE]
    # Another bridge that knows nothing of all this holds on to the claim as well.
    joined.product.kill9_bridge()
    joined.product.start_bridge()
    joined.product.wait_bridge()
    wait(lambda: joined.is_ready(OTHER), 30, "the other node's agent has reported again")
    until = time.monotonic() + 8
    while time.monotonic() < until:
        assert pool.job_state(job_id) == "RUNNING"
        assert "nodeName" not in pool.get(waiting)["spec"]
        time.sleep(0.2)
    pool.start_agent(NODE)
    assert sampled_release(joined, job_id, NODE, uid) == []
    joined.wait_running(waiting)
    figures.count(starts=2)
    pool.delete(waiting)


def test_a_kubelet_that_does_not_answer_proves_nothing(joined, figures):
    pool = joined.pool
    name = unique("blind")
    uid, job_id = joined.runs(name, 2, OTHER, ignore_term=True, grace_s=1)
    pool.delete(name)
    wait(lambda: pool.get(name)["metadata"].get("deletionTimestamp"), 10, "it is being deleted")
    pool.node[OTHER].kill9_kubelet()
    pool.delete(name, grace_s=0)
    for pid in pool.pod_pids(OTHER, uid):
        # The process ends; nobody but the kubelet could say whether the pod will start another.
        pool.node[OTHER].signal(pid)
    until = time.monotonic() + 6
    while time.monotonic() < until:
        assert pool.job_state(job_id) == "RUNNING"
        time.sleep(0.2)
    pool.node[OTHER].start_kubelet()
    assert sampled_release(joined, job_id, OTHER, uid) == []
    wait(lambda: joined.blocked(OTHER) == "", 30, "registered again", joined.blocked, OTHER)
    pool.wait_gpus(OTHER)
    figures.count(starts=1)


def test_a_node_that_is_out_of_service_gives_its_claims_back(joined, figures):
    pool = joined.pool
    name = unique("lost")
    _, job_id = joined.runs(name, 1, OTHER)
    pool.kill9_agent(OTHER)
    wait(lambda: "silent" in joined.blocked(OTHER), 15, "the bridge knows")
    pool.delete(name, grace_s=0)
    path = f"/api/v1/nodes/{OTHER}"
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "shutdown", "effect": "NoExecute"}
    assert pool.job_state(job_id) == "RUNNING"
    pool.kube.api.patch(path, {"spec": {"taints": [taint]}})
    wait(lambda: pool.job_state(job_id) != "RUNNING", 20, "fenced", joined.told, name)
    pool.kube.api.patch(path, {"spec": {"taints": []}})
    pool.start_agent(OTHER)
    wait(lambda: joined.blocked(OTHER) == "", 30, "ready again", joined.blocked, OTHER)
    figures.count(starts=1)


def test_people_and_metrics_see_the_agents(joined, figures):
    pool, product = joined.pool, joined.product
    name = unique("seen")
    uid, job_id = joined.runs(name, 2, NODE)
    status = product.cli("status")["agents"]
    assert (status["needed"], status["ready"], status["absent"]) == (True, 2, 0)

    def pods():
        return {p["uid"]: p["pod"] for p in product.cli("who", NODE)["agent"]["pods"]}

    wait(lambda: pods().get(uid) == f"default/{name}", 10, "the agent tells of it", pods)
    metrics = product.metrics()
    assert metrics['slurmbridge_agents{state="ready"}'] == 2
    assert metrics["slurmbridge_agent_reports_total"] > 2
    # The agent is told who owns each GPU: its audit compares that with what runs.
    assert product.cli("status")["agents"]["findings"] == {}
    figures.count(starts=1)
    pool.delete(name)
    assert sampled_release(joined, job_id, NODE, uid) == []


def test_a_node_that_was_rebooted_gives_its_claims_back_before_its_agent_is_up(joined, figures):
    pool, node = joined.pool, joined.pool.node[OTHER]
    name = unique("powered")
    uid, job_id = joined.runs(name, 2, OTHER, ignore_term=True)
    # The power fails: everything ends at once, and /run is empty afterwards.
    pool.kill9_agent(OTHER)
    node.kill9_kubelet()
    node.kill9_containerd()
    for pid in pool.pod_pids(OTHER, uid):
        node.signal(pid)
    for left in ("node.json", "node.sock"):
        (pool.run_folder(OTHER) / left).unlink(missing_ok=True)
    pool.delete(name, grace_s=0)
    wait(lambda: "silent" in joined.blocked(OTHER), 15, "the bridge knows")
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert pool.job_state(job_id) == "RUNNING"
        time.sleep(0.2)
    node.set_boot_id("11111111-2222-4333-8444-555555555555")
    node.start_containerd()
    node.start_kubelet()
    wait(lambda: pool.job_state(job_id) != "RUNNING", 40, "fenced", joined.told, name)
    assert joined.product.cli("who", OTHER)["agent"]["ready"] is False
    pool.start_agent(OTHER)
    wait(lambda: joined.is_ready(OTHER), 30, "ready again", joined.blocked, OTHER)
    pool.wait_gpus(OTHER)
    after = unique("after")
    joined.runs(after, GPUS, OTHER)
    given = (pool.marks / "start" / after).read_text().split()
    assert given == [pool.uuid(OTHER, i) for i in range(GPUS)]
    figures.count(starts=2)
    pool.delete(after)


JOBS = "/apis/batch/v1/namespaces/default/jobs"
LOST = 2


def job_of(pool, name):
    """A Job whose pods take one GPU each, all at once."""
    where = {"schedulerName": "default-scheduler", "nodeSelector": {"node": NODE}}
    spec = pool.pod(name, 1, run_s=0.2, spec=where)["spec"]
    for env in spec["containers"][0]["env"]:
        if env["value"] == name:
            del env["value"]
            env["valueFrom"] = {"fieldRef": {"fieldPath": "metadata.name"}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "completions": LOST,
            "parallelism": LOST,
            # Each pod that a kubelet fails counts.
            "backoffLimit": LOST,
            "template": {"spec": spec},
        },
    }


def test_pods_that_a_kubelet_fails_at_its_start_give_their_claims_back_and_are_made_anew(
    joined, figures
):
    """The kubelet dies with pods that it has not started, and its plugin cannot be back in time."""
    pool, node = joined.pool, joined.pool.node[NODE]
    pool.kube.start_controller_manager("job-controller,garbage-collector-controller")
    name = unique("anew")
    wait(lambda: joined.is_ready(NODE), 30, "ready", joined.blocked, NODE)
    pool.wait_gpus(NODE)

    def pods():
        return {p["metadata"]["name"]: p for p in pool.pods() if name in p["metadata"]["name"]}

    def bound():
        return [n for n, p in pods().items() if p["spec"].get("nodeName")]

    node.pause_kubelet()
    pool.kube.api.create(job_of(pool, name))
    wait(lambda: len(bound()) == LOST, 30, "all are bound", joined.product.cli, "who", NODE)
    lost = bound()
    claims = {n: joined.claim_of(n) for n in lost}
    node.send("agent", signal.SIGSTOP)
    try:
        node.kill9_kubelet()
        node.start_kubelet()
        wait(lambda: all(pool.phase(n) == "Failed" for n in lost), 60, "they fail", pods)
    finally:
        node.send("agent", signal.SIGCONT)
    back = time.monotonic()
    for one in lost:
        assert pool.get(one)["status"]["reason"] == "UnexpectedAdmissionError"
        assert not (pool.marks / "start" / one).exists(), "none of it ever ran"
        ended = lambda n=one: pool.job_state(claims[n]) not in ("RUNNING", "PENDING")  # noqa: E731
        wait(ended, 60, "its claim is given back", joined.told, one)
    print(f"claims given back {time.monotonic() - back:.1f} s after the agent's return")
    job = lambda: pool.kube.api.get(f"{JOBS}/{name}")["status"]  # noqa: E731
    # The Job's controller waits 10 s, and twice that for each failure more.
    wait(lambda: job().get("succeeded") == LOST, 180, "the Job ends well", job)
    print(f"the Job has ended {time.monotonic() - back:.1f} s after the agent's return")
    assert job()["failed"] == LOST
    figures.count(starts=LOST)
    pool.kube.api.request(
        "DELETE",
        f"{JOBS}/{name}",
        {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"},
    )
    wait(lambda: not pods(), 60, "all are gone", pods)
