"""What Epilog and Prolog cannot know counts as in use; what has ended meanwhile does not."""

import errno
import json
import os
import struct
import subprocess
import sys
import time

import msgspec
import pytest

from slurmbridge.agent import hooks_conf
from slurmbridge.config import Hooks, parse
from slurmbridge.node import slurm_script as script

UID = "d47a0a28-e567-4794-9f2d-6c38d3f13c99"
COMMENT = f"slurmbridge/1 cluster=lab pod={UID} ref=a/b"
REAL_OPEN, REAL_LISTDIR = open, os.listdir


def refuse(monkeypatch, name, number):
    """The kernel answers a path below with an error; everything else as ever."""

    def guarded(real):
        def call(path, *args, **named):
            if str(path).endswith(name):
                raise OSError(number, os.strerror(number), path)
            return real(path, *args, **named)

        return call

    monkeypatch.setattr("builtins.open", guarded(REAL_OPEN))
    monkeypatch.setattr(os, "listdir", guarded(REAL_LISTDIR))
    monkeypatch.setattr(os, "scandir", guarded(os.scandir))
    monkeypatch.setattr(os, "readlink", guarded(os.readlink))


def conf(tree, **more):
    state = {"version": 1, "gpus": [{"index": 0, "uuid": "GPU-0", "path": str(tree / "nvidia0")}]}
    (tree / "node.json").write_text(json.dumps(state | {"pods": []}))
    return {**script.DEFAULTS, "cluster": "lab", "state": str(tree / "node.json"), **more}


def test_a_node_that_can_be_seen_says_what_is_there(tree):
    made = conf(tree)
    assert script.left_of_pods([UID], made) == f"pod {UID} has a cgroup with 1 processes"
    assert script.left_of_pods(["another"], made) == ""
    assert script.busy_by_look("0", made) == f"process 17 of pod {UID} holds GPU 0 open"


@pytest.mark.parametrize(
    ("uid", "given", "is_monitor"), [(0, False, True), (0, True, False), (1000, False, False)]
)
def test_a_pods_process_that_is_called_like_a_monitor_is_one_only_for_root_without_gpus(
    tree, uid, given, is_monitor
):
    (tree / "proc/17/comm").write_text("nvidia-smi\n")
    (tree / "proc/17/status").write_text(f"Name:\tnvidia-smi\nUid:\t{uid}\t0\t0\t0\n")
    made = conf(tree)
    state = json.loads((tree / "node.json").read_text())
    state["pods"] = [{"uid": UID, "gpus": [1]}] if given else []
    (tree / "node.json").write_text(json.dumps(state))
    expected = "" if is_monitor else f"process 17 of pod {UID} holds GPU 0 open"
    assert script.busy_by_look("0", made) == expected


UNKNOWN = {
    "the cgroups": "cgroup",
    "the folder of pods": "kubepods",
    "the pod's processes": "cgroup.procs",
    "the processes of the node": "proc",
    "its mounts": "mountinfo",
}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_read_holds_and_says_so(tree, monkeypatch, what, number):
    uid = UID if UNKNOWN[what] == "cgroup.procs" else "another"
    refuse(monkeypatch, UNKNOWN[what], number)
    why = script.left_of_pods([uid], conf(tree))
    assert why.startswith("not known what is left of the pod: ")
    assert os.strerror(number) in why


def entry(job_id, told, seen=1 << 31):
    return struct.pack(">Iqqq", job_id, told, seen, 0x7FFFFFFF)


def test_what_slurmd_was_told_is_read_from_its_file(tmp_path):
    path = tmp_path / "cred_state"
    assert script.revoked(str(path), "7") == 0
    # Two jobs, and then what is no job: a credential whose number looks like one.
    path.write_bytes(b"\0\0\0\2" + entry(9, 0) + entry(7, (1 << 31) + 5) + entry(9, 3, 4))
    assert script.revoked(str(path), "7") == (1 << 31) + 5
    assert script.revoked(str(path), "9") == 0
    path.write_bytes(entry(7, 1 << 31)[:-1])
    assert script.revoked(str(path), "7") == 0


@pytest.mark.parametrize(
    ("before", "later", "expected"),
    [
        (0, 1 << 31, True),
        (0, 0, False),
        ((1 << 31) - 9, 1 << 31, True),
        # Its user was quicker than the Prolog's first look: nothing more will come.
        (1 << 31, 1 << 31, True),
    ],
)
def test_a_job_is_taken_back_once_slurmd_was_told_so(
    tmp_path, monkeypatch, before, later, expected
):
    monkeypatch.setattr(script, "TOLD_S", 0.1)
    path = tmp_path / "cred_state"
    path.write_bytes(entry(7, later))
    assert script.was_told("7", str(path), before) is expected


@pytest.mark.parametrize(
    "body", [None, b"", b"\0" * 64, b"a later Slurm writes something else here"]
)
def test_a_file_that_is_not_understood_drains_no_node(tmp_path, monkeypatch, body):
    monkeypatch.setattr(script, "TOLD_S", 0.1)
    path = tmp_path / "cred_state"
    if body is not None:
        path.write_bytes(body)
    assert script.was_told("7", str(path), 0)


def test_where_slurmds_file_is_not_known_a_pause_has_to_do(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert script.was_told("7", "", 0)
    assert script.was_told("7", "/no/such/folder/cred_state", 0)
    assert pauses == [script.BLIND_S] * 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("what", ["kubepods", "cgroup.procs", "fd", "comm"])
def test_gpus_are_not_handed_over_where_their_users_cannot_be_read(tree, monkeypatch, what, number):
    refuse(monkeypatch, what, number)
    assert script.busy_by_look("0", conf(tree)).startswith("not known who uses the GPUs: ")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESRCH])
@pytest.mark.parametrize("what", ["mountinfo", "17/fd", "comm", "ns/mnt"])
def test_a_process_that_has_ended_meanwhile_is_gone(tree, monkeypatch, what, number):
    wanted = {script.file_identity(str(tree / "nvidia0")): 0}
    refuse(monkeypatch, what, number)
    is_seen = {"mountinfo": script.mounted_pods, "ns/mnt": script.mounted_pods}
    assert is_seen.get(what, dict)() == {}
    assert (script.open_devices([17], wanted) == {}) is (what == "17/fd")
    assert (script.command_of(17) == "") is (what == "comm")
    assert script.left_of_pods(["another"], conf(tree)) == ""


def test_a_cgroup_that_is_removed_while_it_is_read_has_no_processes(tree, monkeypatch):
    refuse(monkeypatch, "cgroup.procs", errno.ENODEV)
    folder = str(tree / "cgroup/kubepods" / f"pod{UID}")
    assert script.cgroup_processes([folder]) == set()
    assert script.cgroup_processes([f"{folder}/never"]) == set()


def test_a_namespace_that_may_not_be_named_is_known_by_its_mounts(tree, monkeypatch):
    refuse(monkeypatch, "ns/mnt", errno.EACCES)
    assert script.mounted_pods() == {UID: {17}}


@pytest.mark.parametrize(("target", "is_known"), [("/fuse/data", True), ("/dev/nvidia0", False)])
def test_an_open_file_of_a_dead_file_system_is_no_device(tree, monkeypatch, target, is_known):
    link = tree / "proc/17/fd/3"
    link.unlink()
    link.symlink_to(target)

    def stat(path, real=os.stat, **named):
        if str(path) == str(link):
            raise OSError(errno.ENOTCONN, "not connected", str(path))
        return real(path, **named)

    monkeypatch.setattr(os, "stat", stat)
    why = script.busy_by_look("0", conf(tree))
    assert why == "" if is_known else why.startswith("not known who uses the GPUs: ")


def test_a_cgroup_root_that_is_not_there_holds(tree):
    made = conf(tree, cgroup_root="/site")
    assert "no cgroups here" in script.left_of_pods([UID], made)
    assert "no cgroups here" in script.busy_by_look("0", made)
    assert "no cgroups here" in script.unknown_left(made)


def test_gpus_that_the_agents_file_does_not_name_are_not_handed_over_beside_pods(tree):
    made = conf(tree)
    assert "GPU 3: not in the agent's file" in script.busy_by_look("0,3", made)
    assert "not known which GPUs" in script.busy_by_look("all", made)
    (tree / "nvidia0").unlink()
    assert "nvidia0 cannot be looked at" in script.busy_by_look("0", made)
    (tree / "node.json").unlink()
    assert script.busy_by_look("0", made) == "no agent, and 1 pods are here"


@pytest.mark.parametrize(("uid", "expected"), [("0", None), ("1000", set())])
def test_a_job_without_comment_may_be_a_claim_while_the_agents_file_cannot_be_read(
    tree, uid, expected
):
    made = conf(tree)
    (tree / "node.json").write_text("{")
    job = {"id": "7", "comment": "", "uid": uid, "gpus": "0"}
    assert script.claimed_pods(job, made) == expected
    (tree / "node.json").unlink()
    assert script.claimed_pods(job, made) == set()


# The scripts as slurmd runs them, on a node whose cgroups cannot be found.

TOOL = """\
#!/bin/sh
echo "$(basename "$0") $*" >> "$(dirname "$0")/called"
case "$1" in
  -h) echo PENDING;;
  show) echo "SlurmdSpoolDir          = $(dirname "$0")/spool/%n";;
  requeue) printf 'WORD' > "$(dirname "$0")/spool/gpu001/cred_state";;
esac
"""
TOLD = "".join(f"\\{byte:03o}" for byte in struct.pack(">IIqqq", 1, 7, 1 << 31, 1 << 31, 1 << 31))


def run_hook(tmp_path, hook, **more):
    for name in ("scontrol", "scancel", "squeue"):
        (tmp_path / name).write_text(TOOL.replace("WORD", TOLD))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "spool/gpu001").mkdir(parents=True)
    made = {
        "socket": str(tmp_path / "none.sock"),
        "state": str(tmp_path / "none.json"),
        "cluster": "lab",
        "cgroup_root": "/slurmbridge-has-no-such-root",
        "scontrol": str(tmp_path / "scontrol"),
        "scancel": str(tmp_path / "scancel"),
        "squeue": str(tmp_path / "squeue"),
        "poll_s": 0.01,
        **more,
    }
    (tmp_path / "hooks.json").write_text(json.dumps(made))
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_UID": "0",
        "SLURM_JOB_GPUS": "0,1",
        "SLURMD_NODENAME": "gpu001",
        "SLURM_JOB_COMMENT": COMMENT if hook == "epilog" else "",
        "SLURMBRIDGE_HOOKS": str(tmp_path / "hooks.json"),
        "PATH": os.environ["PATH"],
    }
    argv = [sys.executable, "-I", "-S", script.__file__, hook]
    done = subprocess.run(argv, env=job, capture_output=True, text=True, timeout=30, check=False)
    called = tmp_path / "called"
    return done, called.read_text() if called.exists() else ""


def test_the_epilog_holds_what_it_cannot_know_and_drains_after_the_longest_hold(tmp_path):
    done, called = run_hook(tmp_path, "epilog", longest_hold_s=0.2)
    assert done.returncode == 1
    assert "held: not known what is left of the pod" in done.stderr
    assert "update NodeName=gpu001 State=DRAIN Reason=slurmbridge-node: claim 7 held 0 s" in called
    assert "no cgroups here" in called


def test_the_prolog_drains_the_node_where_the_site_says_so(tmp_path):
    done, called = run_hook(tmp_path, "prolog", prolog_wait_s=0.0, on_busy="drain")
    assert done.returncode == 1
    assert "ALARM, node drained" in done.stderr
    assert called.startswith(
        "scontrol show config\nscontrol update NodeName=gpu001 State=DRAIN Reason=slurmbridge-node: GPU 0,1 given to job 7:"
    )
    assert "requeue" not in called


def test_the_prolog_gives_the_job_back_by_default_and_drains_nothing(tmp_path):
    done, called = run_hook(tmp_path, "prolog", prolog_wait_s=0.0)
    assert done.returncode == 0
    assert called == "scontrol show config\nscontrol requeue 7\nsqueue -h -j 7 -o %T\n"


def test_the_prolog_waits_as_long_as_it_is_told(tmp_path):
    began = time.monotonic()
    done, _ = run_hook(tmp_path, "prolog", prolog_wait_s=0.3, on_busy="drain")
    assert done.returncode == 1
    assert time.monotonic() - began >= 0.3


# The agent writes what the site has configured.


def test_hooks_json_has_what_the_configuration_says_and_nothing_that_the_script_does_not_know():
    text = b"""
apiVersion: slurmbridge.dev/v1
policy: {cluster: lab, granularity: gpu, resources: {nvidia.com/gpu: ""}}
node:
  hooks: {longestHoldS: 60, prologWaitS: 2.5, onBusy: drain}
"""
    body = hooks_conf(parse(text))
    assert body.items() >= {
        ("longest_hold_s", 60.0),
        ("prolog_wait_s", 2.5),
        ("on_busy", "drain"),
        ("cluster", "lab"),
    }
    assert body.keys() <= script.DEFAULTS.keys()
    defaults = msgspec.structs.asdict(Hooks())
    assert defaults == {name: script.DEFAULTS[name] for name in defaults}
