"""What the audit finds on a real node: told as an event, a metric and a report, and closed by policy."""

import base64
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmbridge.node import slurm_script as script
from slurmbridge.node._gen import deviceplugin_pb2 as pb
from tests.support.node_pool import unique, wait

NODE = "gpu002"
LAST = 7
SEEN_BY_ALL = "/dev/kmsg"
"""A device that every machine has, and of all pods only the privileged ones."""
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


def events(pool, reason, kind="Node", name=NODE):
    which = f"involvedObject.kind={kind},involvedObject.name={name}"
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


def test_a_pod_whose_image_shows_all_gpus_and_one_that_mounts_all_devices_are_named(strict):
    pool = strict
    shows, mounts = unique("shows-all"), unique("mounts-all")
    # As of an image: the pod's spec says nothing of it, its process has it.
    every = pool.pod(shows, 0, spec={"nodeName": NODE})
    (container,) = every["spec"]["containers"]
    container["command"] = ["env", "NVIDIA_VISIBLE_DEVICES=all", "sleep", "1000"]
    pool.kube.api.create(every)
    other = pool.pod(mounts, 0, spec={"nodeName": NODE})
    other["spec"]["volumes"].append({"name": "dev", "hostPath": {"path": "/dev"}})
    other["spec"]["containers"][0]["volumeMounts"].append({"name": "dev", "mountPath": "/all"})
    pool.kube.api.create(other)

    def named():
        return sorted(
            text.split(" can reach GPUs past its claim: ") for text in found(pool, "loose_pod")
        )

    expected = [
        [f"pod default/{mounts}", "hostPath /dev"],
        [f"pod default/{shows}", "it runs with NVIDIA_VISIBLE_DEVICES=all"],
    ]
    wait(lambda: named() == sorted(expected), 40, "findings", pool.snapshot, NODE)
    # They have no GPU of their own that could be closed.
    assert pool.node[NODE].allocatable() == pool.gpus
    for name in (shows, mounts):
        pool.delete(name, grace_s=0)
        wait(lambda n=name: not pool.get(n), 30, "gone")


def put_device(path, rdev):
    part = path.with_suffix(".part")
    os.mknod(part, 0o20666, rdev)
    part.rename(path)


@pytest.fixture
def privileged(strict):
    """A privileged pod without a claim that has GPU 7 open: it finds it in its own /dev.

    No driver is behind the tests' devices: so GPU 7 is one that this machine really has.
    """
    pool, path = strict, strict.device(LAST)
    before = path.stat().st_rdev
    put_device(path, os.stat(SEEN_BY_ALL).st_rdev)
    name = unique("privileged")
    script_text = f"exec 3<{SEEN_BY_ALL}; echo > $M/start/$NAME; exec sleep 1000"
    body = pool.pod(name, 0, script=script_text, spec={"nodeName": NODE})
    body["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    uid = pool.kube.api.create(body)["metadata"]["uid"]
    pool.wait_running(name)
    yield name, uid
    pool.delete(name, grace_s=0)
    wait(lambda: not pool.pod_pids(NODE, uid), 30, "its processes end")
    put_device(path, before)
    pool.wait_gpus(NODE)


def test_a_privileged_pod_is_named_and_the_gpu_that_it_uses_is_closed_to_pods(strict, privileged):
    pool, (name, uid) = strict, privileged
    way = f"pod default/{name} can reach GPUs past its claim: privileged"
    wait(lambda: found(pool, "loose_pod") == [way], 20, "the way", pool.snapshot, NODE)
    wait(lambda: found(pool, "outside_claim"), 20, "the use", pool.snapshot, NODE)
    (use,) = found(pool, "outside_claim")
    assert use.endswith(f"(sleep) of pod {uid} uses GPU {LAST}, not given to it")
    for kind, subject in (("Node", NODE), ("Pod", name)):
        for reason, text in (("LoosePod", way), ("OutsideClaim", use)):
            told = lambda r=reason, k=kind, s=subject: events(pool, r, k, s)  # noqa: E731
            wait(lambda t=told, x=text: x in t(), 20, f"{reason} of {subject}", told)
    metrics = pool.metrics(NODE)
    for kind in ("loose_pod", "outside_claim"):
        assert f'slurmbridge_node_findings{{kind="{kind}"}} 1.0' in metrics
    wait(lambda: pool.node[NODE].allocatable() == pool.gpus - 1, 20, "quarantine")


@pytest.mark.parametrize("agent", ["is asked", "is down"])
def test_a_gpu_that_a_privileged_pod_uses_is_not_handed_to_a_native_job(
    strict, privileged, figures, agent
):
    pool, (name, uid) = strict, privileged
    if agent == "is down":
        pool.kill9_agent(NODE)
    try:
        with pool.other_hooks(NODE, prolog_wait_s=0.5):
            job = pool.native(pool.gpus, node=NODE, run_s=0.2)
            taken_back = lambda: pool.job_field(job, "Restarts") not in ("", "0")  # noqa: E731
            wait(taken_back, 60, "taken back", pool.slurm.run, "squeue")
        assert not (pool.marks / "start" / f"job-{job}").exists()
        assert "drain" not in pool.slurm.run("sinfo", "-h", "-n", NODE, "-o", "%T")
        assert pool.pod_pids(NODE, uid)
        pool.delete(name, grace_s=0)
        wait(lambda: not pool.pod_pids(NODE, uid), 30, "the pod ends")
        # A job that was requeued waits two minutes by itself.
        pool.slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        start = pool.marks / "start" / f"job-{job}"
        wait(start.exists, 90, "the job at last", pool.slurm.run, "squeue")
        figures.count(starts=2)
    finally:
        if agent == "is down":
            pool.start_agent(NODE)
            wait(lambda: pool.is_registered(NODE), 30, "the agent is back")


def test_the_kubelet_takes_cdi_names_of_the_claims_gpus_and_keeps_them(strict):
    """What it hands to the runtime is up to its version: containerd 1.6 knows no CDI devices."""
    pool = strict
    name = unique("cdi")
    claim = runs(pool, name, 2)
    checkpoint = pool.node[NODE].plugins / "kubelet_internal_checkpoint"

    def entries():
        every = json.loads(checkpoint.read_text())["Data"]["PodDeviceEntries"]
        return [e for e in every or () if e["PodUID"] == claim.uid]

    wait(entries, 20, "checkpoint")
    (entry,) = entries()
    answer = pb.ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
    uuids = [pool.uuid(NODE, index) for index in claim.gpus]
    assert [d.name for d in answer.cdi_devices] == [f"nvidia.com/gpu={uuid}" for uuid in uuids]
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == ",".join(uuids)
    pool.delete(name)
    wait(lambda: not pool.get(name), 30, "gone")
