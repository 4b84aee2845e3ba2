"""GPU contexts outlive cgroups: the driver is asked too before a claim's GPUs are given away."""

import asyncio
import json
import time

import pytest

from slurmbridge.node import slurm_script as script
from slurmbridge.node.book import Book, NativeJob
from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.gate import Gate
from slurmbridge.node.inventory import Usage
from slurmbridge.node.look import NodeLook
from slurmbridge.pool.errors import PeerUnavailable

UID = "d47a0a28-e567-4794-9f2d-6c38d3f13c99"
JOB_CGROUP = "0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n"


def process(tree, pid, cgroup="0::/system.slice/ssh.service\n", command="python", mounts="", uid=0):
    folder = tree / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "ns").mkdir()
    (folder / "ns/mnt").symlink_to(f"mnt:[{pid}]")
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mounts)
    (folder / "comm").write_text(f"{command}\n")
    (folder / "status").write_text(f"Name:\t{command}\nUid:\t{uid}\t0\t0\t0\n")


OWNERS = {
    "of a pod": (f"0::/kubepods/pod{UID}/x\n", "", (UID, 0)),
    "of a pod, seen from another cgroup namespace": (f"0::/../pod{UID}/x\n", "", (UID, 0)),
    "of a job": (JOB_CGROUP, "", ("", 12)),
    "of a job with cgroup v1": ("4:devices:/slurm/uid_0/job_7/step_0\n1:x:/\n", "", ("", 7)),
    "moved out of its pod": (
        "0::/\n",
        f"1 2 254:0 /pods/{UID}/etc-hosts /etc/hosts rw - e v rw\n",
        (UID, 0),
    ),
    "of the node": ("0::/system.slice/ssh.service\n", "", ("", 0)),
}


@pytest.mark.parametrize("case", OWNERS)
def test_whose_a_process_is_is_known(tree, case):
    cgroup, mounts, expected = OWNERS[case]
    process(tree, 30, cgroup, mounts=mounts)
    assert script.owner_of(30) == expected
    assert script.owner_of(31) == ("", 0)


# Without the agent: nvidia-smi.


@pytest.fixture
def alone(tree, monkeypatch):
    """Hooks without an agent on a node with a driver, which says what `says` writes."""
    driver, tool = tree / "driver", tree / "nvidia-smi"
    driver.write_text("")
    monkeypatch.setattr(script, "DRIVER", str(driver))
    state = {"gpus": [{"index": i, "uuid": f"GPU-{i}"} for i in range(2)], "pods": []}
    (tree / "node.json").write_text(json.dumps({"version": 1, **state}))

    def says(text, code=0):
        (tree / "rows").write_text(text)
        tool.write_text(f"#!/bin/sh\ncat {tree}/rows\nexit {code}\n")
        tool.chmod(0o755)
        conf = {"nvidia_smi": str(tool), "state": str(tree / "node.json")}
        return script.contexts_left("0", {**script.DEFAULTS, **conf})

    return says


def test_a_context_of_a_process_that_has_left_its_pod_is_found(tree, alone):
    process(tree, 30)
    assert alone("30, GPU-0\n") == "process 30 of no pod has a context on GPU 0"
    assert alone("30, GPU-1\n") == ""
    assert alone("") == ""
    # A MIG device stands under a UUID that the file does not have.
    assert alone("30, GPU-of-the-parts\n").startswith("process 30 of no pod")
    assert alone("404, GPU-0\n").startswith("process 404 of no pod")


def test_contexts_of_other_pods_of_jobs_and_of_monitors_hold_nothing(tree, alone):
    process(tree, 30, JOB_CGROUP)
    process(tree, 31, command="nv-hostengine")
    assert alone("17, GPU-0\n30, GPU-0\n31, GPU-0\n") == ""


@pytest.mark.parametrize("uid", [1000, 70000])
def test_a_users_process_that_is_called_like_a_monitor_holds(tree, alone, uid):
    process(tree, 30, command="nvidia-smi", uid=uid)
    assert alone("30, GPU-0\n") == "process 30 of no pod has a context on GPU 0"


@pytest.mark.parametrize(("rows", "code"), [("", 9), ("[N/A], GPU-0\n", 0)])
def test_a_driver_that_does_not_answer_holds(alone, rows, code):
    assert alone(rows, code).startswith("not known who uses the GPUs")


def test_without_a_driver_nobody_is_asked(alone, monkeypatch):
    monkeypatch.setattr(script, "DRIVER", "/none")
    assert alone("30, GPU-0\n", 1) == ""


@pytest.mark.parametrize("is_noted", [True, False])
def test_the_prolog_asks_the_driver_too_where_no_agent_is(tree, alone, monkeypatch, is_noted):
    process(tree, 30)
    (tree / "cgroup/kubepods" / f"pod{UID}" / "cgroup.procs").unlink()
    (tree / "cgroup/kubepods" / f"pod{UID}").rmdir()
    alone("30, GPU-0\n")
    if not is_noted:
        (tree / "node.json").unlink()
    said = []
    monkeypatch.setattr(script, "drain", lambda job, why, conf: said.append(why))
    monkeypatch.setattr(script, "told_before", lambda job, conf: ("", 0))
    for name, value in {"ID": "8", "GPUS": "0", "UID": "1000"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    conf = {
        **script.DEFAULTS,
        "socket": str(tree / "none.sock"),
        "state": str(tree / "node.json"),
        "nvidia_smi": str(tree / "nvidia-smi"),
        "prolog_wait_s": 0.0,
        "on_busy": "drain",
    }
    assert script.prolog(conf) == 1
    assert len(said) == 1
    assert "process 30 of no pod has a context on GPU " in said[0]
    alone("")
    assert script.prolog(conf) == 0


# With the agent: NVML.


class Driver:
    def __init__(self, *pids):
        self.pids = pids

    def find(self):
        return []

    def usage(self):
        if self.pids == ("down",):
            raise PeerUnavailable("nvml", "usage", "driver is being replaced")
        return {"GPU-0": Usage(pids=self.pids)}


class Kubelet:
    async def list(self, deadline_s=1.0):
        return []


class NoPods:
    def known(self):
        return []


async def verify(_pod):
    return ""


def look_at(tree, driver):
    gpus = tuple(Gpu(i, f"GPU-{i}", i, str(tree / "nvidia0")) for i in range(1))
    book = Book(str(tree / "book.json"))
    look = NodeLook({}, lambda: DeviceMap(gpus=gpus), driver, Kubelet(), book, time.monotonic)
    return look, Gate("", look, book, NoPods(), verify, print, time.monotonic), book


def hold(gate, uids=("gone",), gpus="0"):
    question = {"ask": "hold", "job": {"id": "7", "gpus": gpus}, "uids": uids and list(uids)}
    return asyncio.run(gate._answer(question))


def test_the_agent_holds_a_claim_while_a_context_is_left_on_its_gpus(tree):
    process(tree, 30)
    _, gate, _ = look_at(tree, Driver(30))
    assert hold(gate) == "process 30 of no pod has a context on GPU 0"
    assert gate.held == {7: "process 30 of no pod has a context on GPU 0"}
    assert hold(gate, gpus="3") == ""
    _, gate, _ = look_at(tree, Driver(404))
    assert hold(gate) == "process 404 of no pod has a context on GPU 0"
    _, gate, _ = look_at(tree, Driver())
    assert hold(gate) == ""


def test_a_context_holds_a_gangs_claim_whose_pods_are_forgotten(tree):
    process(tree, 30)
    (tree / "cgroup/kubepods" / f"pod{UID}" / "cgroup.procs").unlink()
    (tree / "cgroup/kubepods" / f"pod{UID}").rmdir()
    _, gate, _ = look_at(tree, Driver(30))
    assert hold(gate, uids=None) == "process 30 of no pod has a context on GPU 0"
    _, gate, _ = look_at(tree, Driver())
    assert hold(gate, uids=None) == ""


def test_contexts_of_jobs_and_on_a_later_jobs_gpus_do_not_hold_a_claim(tree):
    process(tree, 30, JOB_CGROUP)
    _, gate, _ = look_at(tree, Driver(17, 30))
    assert hold(gate) == ""
    process(tree, 31)
    _, gate, book = look_at(tree, Driver(31))
    book.native[9] = NativeJob(9, "alice", "", "", (0,))
    assert hold(gate) == ""


def test_a_driver_that_cannot_be_asked_does_not_let_go(tree):
    _, gate, _ = look_at(tree, Driver("down"))
    with pytest.raises(PeerUnavailable, match="being replaced"):
        hold(gate)


def test_a_claim_of_unknown_pods_waits_for_every_pod_that_nobody_knows(tree):
    _, gate, book = look_at(tree, Driver())
    assert hold(gate, uids=None) == f"nobody can say which pods this claim covers, maybe {UID}"
    book.adopt(UID, "a/b", 8, [1])
    assert hold(gate, uids=None) == ""


def test_who_uses_a_gpu_is_told_with_pod_or_job(tree):
    process(tree, 30, JOB_CGROUP)
    look, _, _ = look_at(tree, Driver(30, 404))
    users = {u.pid: (u.pod, u.job, u.command) for u in asyncio.run(look.users([0]))}
    assert users == {17: (UID, 0, "train"), 30: ("", 12, "python"), 404: ("", 0, "")}


def test_what_a_pods_processes_were_started_with_is_seen(tree):
    look, _, _ = look_at(tree, Driver())
    assert asyncio.run(look.sample()).visible == {UID: {"all"}}
    # Read again after a while only; then a process that has ended is passed over.
    (tree / "proc/17/environ").unlink()
    assert asyncio.run(look.sample()).visible == {UID: {"all"}}
    look, _, _ = look_at(tree, Driver())
    assert asyncio.run(look.sample()).visible == {UID: set()}


@pytest.mark.parametrize("lost", ["nvidia0", "cgroup/cgroup.controllers"])
def test_a_look_that_cannot_see_everything_is_not_whole(tree, lost):
    look, _, _ = look_at(tree, Driver())
    assert asyncio.run(look.sample()).is_whole
    if lost == "nvidia0":
        (tree / lost).unlink()
    else:
        (tree / "cgroup").rename(tree / "elsewhere")
    sample = asyncio.run(look.sample())
    assert not sample.is_whole
    assert "cannot be read" in sample.faults[0]
    with pytest.raises(PeerUnavailable):
        asyncio.run(look.busy("another", [0]))
