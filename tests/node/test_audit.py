"""What the audit finds on a real node: told as an event, a metric and a report, and closed by policy."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmbridge.node import slurm_script as script
from tests.support.node_pool import unique, wait

NODE = "gpu002"
HOLD = "import os, sys; os.open(sys.argv[1], os.O_PATH); print(flush=True); sys.stdin.read()"


@pytest.fixture(scope="module")
def strict(pool):
    """The node's agent with quarantine and CDI names, and again as it was."""
    pool.node_config = {"quarantine": "gpu", "response": ["env", "devices", "cdi"]}
    pool.restart_agent(NODE)
    pool.wait_gpus(NODE)
    yield pool
    pool.node_config = {}
    pool.restart_agent(NODE)
    pool.wait_gpus(NODE)


def runs(pool, name, gpus):
    placed = []
    body = pool.pod(name, gpus)
    wait(lambda: placed.append(pool.place(body, NODE)) or placed[-1], 30, "room")
    pool.wait_running(name)
    return placed[-1]


@contextlib.contextmanager
def intruder(pool, uid, device):
    """A process in a pod's cgroup that has a device file open which the pod was not given."""
    argv = [sys.executable, "-c", HOLD, str(device)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            (inside, *_) = pool.pod_pids(NODE, uid)
            for top in script.pod_cgroups(pool.node[NODE].cgroup_root)[uid]:
                for folder, _, _ in os.walk(top):
                    procs = Path(folder) / "cgroup.procs"
                    if str(inside) in procs.read_text().split():
                        procs.write_text(str(child.pid))
            yield child.pid
        finally:
            child.kill()


def found(pool, kind):
    report = pool.snapshot(NODE)["report"] or {}
    return [f["text"] for f in report.get("findings", ()) if f["kind"] == kind]


def events(pool, reason):
    which = f"involvedObject.kind=Node,involvedObject.name={NODE}"
    listed = pool.kube.api.items("/api/v1/namespaces/default/events", fieldSelector=which)
    return [e["message"] for e in listed if e["reason"] == reason]


def test_a_process_on_a_gpu_outside_its_claim_is_an_event_a_metric_and_a_quarantine(strict):
    pool = strict
    name = unique("outside")
    claim = runs(pool, name, 2)
    other = max(set(range(pool.gpus)) - set(claim.gpus))
    told = f"of pod {claim.uid} uses GPU {other}, not given to it"
    with intruder(pool, claim.uid, pool.device(other)) as pid:
        wait(lambda: found(pool, "outside_claim"), 20, "finding", pool.snapshot, NODE)
        assert f"process {pid} (python" in found(pool, "outside_claim")[0]
        assert found(pool, "outside_claim")[0].endswith(told)
        wait(lambda: pool.node[NODE].allocatable() == pool.gpus - 1, 20, "quarantine")
        wait(lambda: events(pool, "OutsideClaim"), 20, "event")
        assert events(pool, "OutsideClaim")[-1].endswith(told)
        assert 'slurmbridge_node_findings{kind="outside_claim"} 1.0' in pool.metrics(NODE)
    pool.wait_gpus(NODE)
    assert found(pool, "outside_claim") == []
    pool.delete(name)
    wait(lambda: not pool.get(name), 30, "gone")
