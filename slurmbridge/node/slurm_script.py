"""Slurm's Epilog and Prolog of a pool node: one file, Python's standard library only.

    slurm_script.py epilog      # slurm.conf: Epilog=
    slurm_script.py prolog      # slurm.conf: Prolog=

Epilog: the end of a claim of ours is held up until nothing of its pod is left on this node. While
an Epilog runs Slurm gives the node's GPUs of that job to nobody (measured, 22.05.8). Prolog: a
native job may not have a GPU that a pod still uses; this is the last fence, also for a claim that
slurmctld has forgotten in a crash.

Both ask the agent over a unix socket. When it does not answer they look for themselves: at the
cgroups and processes of the pod, and at the file in which the agent has written down who has what.
Not knowing counts as in use: a process or cgroup that ended between listing and reading is gone,
any other error is not. After `longest_hold_s` the node is drained and the Epilog fails.

Configuration: JSON, path in SLURMBRIDGE_HOOKS, else /etc/slurmbridge/hooks.json; see `DEFAULTS`.
The agent uses the same functions to look, so that both always see the same.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import syslog
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

DEFAULT_CONF = "/etc/slurmbridge/hooks.json"
DEFAULTS: dict[str, Any] = {
    # Where the agent listens, and where it writes down its pods and GPUs.
    "socket": "/run/slurmbridge/node.sock",
    "state": "/run/slurmbridge/node.json",
    # Our cluster id, and the Unix users that the bridge may submit as; None: not known, since the
    # configuration cannot be read.
    "cluster": "",
    "owner_uids": [0],
    # Below which folder of a cgroup hierarchy the pods of this node are; "": anywhere.
    "cgroup_root": "",
    # Commands that may hold a GPU open without using it.
    "monitors": ["nvidia-persiste", "nv-hostengine", "dcgm-exporter", "nvidia-smi", "slurmbridge"],
    "poll_s": 0.1,
    "longest_hold_s": 900.0,
    # How long a native job waits for its GPUs (BatchStartTimeout of slurm.conf must be longer), and
    # then: "requeue" it, or "drain" the node.
    "prolog_wait_s": 8.0,
    "on_busy": "requeue",
    "scontrol": "scontrol",
    "nvidia_smi": "nvidia-smi",
    "scancel": "scancel",
    "squeue": "squeue",
}
ASK_S = 5.0
TOLD_S = 10.0
"""How long slurmctld, and then slurmd, may take to know that a job was taken back."""
BLIND_S = 3.0
"""Pause where slurmd's own file of what it was told cannot be found."""
FIRST_USER = 1000
"""User ids below are a node's own accounts (UID_MIN of login.defs)."""
REASON = "slurmbridge-node"
"""First word of the drain reason. Not the prefix of drains that the bridge itself ends: this one is
for a person, since a process is left on a GPU."""

CGROUPS = "/sys/fs/cgroup"
_COMMENT = re.compile(
    r"slurmbridge/1 cluster=(?P<cluster>[a-z0-9-]{1,40}) (?P<kind>pod|group)=(?P<uid>[\w.-]{1,128})"
    r" ref=(?P<ref>[\w./-]{1,520})",
    re.ASCII,
)
_FILLER = re.compile(r"slurmbridge/1 cluster=[a-z0-9-]{1,40} filler=[\w.-]{1,128}", re.ASCII)
_POD_CGROUP = re.compile(
    r"(?:^|[/-])pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4,12}){4})(?:\.slice)?(?:/|$)"
)
_STATIC_POD_CGROUP = re.compile(r"(?:^|[/-])pod(?P<uid>[0-9a-f]{32})(?:\.slice)?(?:/|$)")
_JOB_CGROUP = re.compile(r"/job_(?P<id>[0-9]{1,10})(?:/|$)", re.ASCII)
DRIVER = "/proc/driver/nvidia/version"
"""Is there where NVIDIA's driver is loaded."""
CGROUP_DEPTH = 6
ENDED = frozenset({errno.ENOENT, errno.ESRCH, errno.ENODEV})
"""Errors of a process or cgroup that has ended meanwhile."""


# What is on this node: used by the agent too. OSError: it cannot be known now.


@contextlib.contextmanager
def _unless_ended(*also: int) -> Iterator[None]:
    """What has ended meanwhile is passed over; any other error goes on."""
    try:
        yield
    except OSError as error:
        if error.errno not in ENDED and error.errno not in also:
            raise


def pod_of_cgroup(path: str) -> str:
    """UID of the pod that a cgroup path belongs to; "" when to none.

    Both drivers: `/kubepods/burstable/pod<uid>/<container>` (cgroupfs) and
    `/kubepods.slice/kubepods-pod<uid with underscores>.slice/...` (systemd).
    """
    match = _POD_CGROUP.search(path) or _STATIC_POD_CGROUP.search(path)
    return match["uid"].replace("_", "-") if match else ""


def pod_cgroups(root: str = "", base: str = CGROUPS) -> dict[str, list[str]]:
    """UID -> folders of the pod's cgroup, over all hierarchies; empty folders count.

    The kubelet makes a pod's cgroup before its first container, and removes it after the last
    process has ended: an empty folder is a pod that may start something yet.

    Args:
        root: the kubelet's `cgroupRoot`; "": pods anywhere.
        base: where the hierarchies are mounted.

    Raises:
        OSError: they cannot be read, or none has the root: pods may be anywhere.

    """
    found: dict[str, list[str]] = {}
    below = root.strip("/")
    tops = [(one, os.path.join(one, below) if below else one) for one in _hierarchies(base)]
    if not any(os.path.isdir(top) for _, top in tops):
        raise FileNotFoundError(errno.ENOENT, "no cgroups here", os.path.join(base, below))
    for hierarchy, top in tops:
        for folder in _folders(top, CGROUP_DEPTH):
            uid = pod_of_cgroup(folder[len(hierarchy) :])
            if uid:
                found.setdefault(uid, []).append(folder)
    return found


def _hierarchies(base: str) -> list[str]:
    if os.path.exists(os.path.join(base, "cgroup.controllers")):
        return [base]
    with os.scandir(base) as entries:
        return sorted(e.path for e in entries if e.is_dir(follow_symlinks=False))


def _folders(top: str, depth: int) -> Iterator[str]:
    """Folders of pods below `top`; what is inside a pod's folder is not looked at."""
    folders: list[str] = []
    with _unless_ended(), os.scandir(top) as entries:
        folders = [e.path for e in entries if e.is_dir(follow_symlinks=False)]
    for folder in folders:
        if pod_of_cgroup(os.path.basename(folder)):
            yield folder
        elif depth > 1:
            yield from _folders(folder, depth - 1)


def cgroup_processes(folders: Iterable[str]) -> set[int]:
    """Process ids in cgroup folders and below."""
    pids: set[int] = set()
    for top in folders:
        for folder, _, files in os.walk(top, onerror=_walk_on):
            if "cgroup.procs" in files:
                # A threaded cgroup (v2) has none of its own: they stand in the one above.
                with (
                    _unless_ended(errno.EOPNOTSUPP),
                    open(os.path.join(folder, "cgroup.procs"), encoding="ascii") as file,
                ):
                    pids.update(int(line) for line in file if line.strip() != "0")
    return pids


def _walk_on(error: OSError) -> None:
    with _unless_ended():
        raise error


def all_pids(proc: str = "/proc") -> list[int]:
    """Every process of this node, threads not counted."""
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def mounted_pods(proc: str = "/proc") -> dict[str, set[int]]:
    """UID -> processes whose mount namespace holds a folder of that pod (`pods/<uid>/etc-hosts`).

    Finds a process also when it was moved out of the pod's cgroup. The node's own namespaces hold
    such mounts too (volumes): they are left out, by the mount point below `/pods/<uid>/`.
    """
    found: dict[str, set[int]] = {}
    known: dict[str, frozenset[str]] = {}
    for pid in all_pids(proc):
        # A zombie's mounts are an invalid argument.
        with _unless_ended(errno.EINVAL):
            try:
                namespace = os.readlink(f"{proc}/{pid}/ns/mnt")
            except PermissionError:
                # Only to read the mounts of each namespace once; whether they can be read counts.
                namespace = f"of process {pid}"
            if namespace not in known:
                with open(f"{proc}/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:
                    known[namespace] = frozenset(_pods_of_mounts(file))
            for uid in known[namespace]:
                found.setdefault(uid, set()).add(pid)
    return found


_POD_MOUNT = re.compile(r"/pods/([0-9a-f]{8}(?:-[0-9a-f]{4,12}){4})/(?:etc-hosts|containers/)")


def _pods_of_mounts(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        fields = line.split(" ", 5)
        match = _POD_MOUNT.search(fields[3]) if len(fields) > 5 else None
        if match:
            yield match[1]


def file_identity(path: str) -> tuple[str, int, int] | None:
    """What a device file is, so that any name of it can be told; None: there is none.

    A character device by its numbers, anything else by its place in the file system.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return _identity(found)


def _identity(found: os.stat_result) -> tuple[str, int, int]:
    if stat.S_ISCHR(found.st_mode):
        return "c", os.major(found.st_rdev), os.minor(found.st_rdev)
    return "f", found.st_dev, found.st_ino


def open_devices(
    pids: Iterable[int], wanted: Mapping[tuple[str, int, int], int], proc: str = "/proc"
) -> dict[int, set[int]]:
    """Process id -> the numbers of those wanted devices that it holds open."""
    found: dict[int, set[int]] = {}
    for pid in pids if wanted else ():
        numbers: list[str] = []
        with _unless_ended():
            numbers = os.listdir(f"{proc}/{pid}/fd")
        for number in numbers:
            device = wanted.get(_opened(f"{proc}/{pid}/fd/{number}"))
            if device is not None:
                found.setdefault(pid, set()).add(device)
    return found


def _opened(link: str) -> tuple[str, int, int]:
    """Identity of an open file; one that has been closed is none.

    A file of a user's or a dead file system (FUSE, NFS) cannot be looked at, and is no device: only
    where the link itself is closed to us, or leads into /dev, nothing is known.
    """
    try:
        return _identity(os.stat(link))
    except OSError as error:
        if error.errno not in ENDED:
            with _unless_ended():
                if os.readlink(link).startswith("/dev/"):
                    raise
        return "", 0, 0


def command_of(pid: int, proc: str = "/proc") -> str:
    """First 15 characters of the command's name; "" when the process is gone."""
    with (
        _unless_ended(),
        open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as file,
    ):
        return file.read().strip()
    return ""


def real_uid(pid: int, proc: str = "/proc") -> int | None:
    """Real user id of a process, also of a set-user-id program; None when it cannot be read."""
    try:
        with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace") as file:
            found = re.search(r"^Uid:\s+([0-9]+)\s", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def is_monitor(
    pid: int, command: str, pod: str, job: int, *, given: bool, names: Iterable[str]
) -> bool:
    """Whether a process only watches GPUs.

    Anybody can take such a name. So what counts is what no user can choose: it is in no Slurm job,
    one of the node's own accounts runs it, in a pod root. And never in a pod that was given GPUs:
    what it does there it does as their owner.

    Args:
        pid: of the process. command: its name.
        pod: UID of the pod that it runs in, "" for none. job: id of its Slurm job, 0 for none.
        given: whether that pod was given GPUs, or this is not known.
        names: commands that may be monitors.

    """
    if command not in names or job or (pod and given):
        return False
    uid = real_uid(pid)
    return uid is not None and (uid == 0 if pod else uid < FIRST_USER)


def owner_of(pid: int, proc: str = "/proc") -> tuple[str, int]:
    """UID of the pod and id of the Slurm job that a process runs in; "" and 0: in none, or gone.

    By its cgroup, else by its mounts: a process can be moved out of its pod's cgroup.
    """
    pod, job = "", 0
    with _unless_ended(errno.EINVAL):
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            for path in (line.rstrip("\n").partition(":")[2].partition(":")[2] for line in file):
                match = _JOB_CGROUP.search(path)
                pod, job = pod or pod_of_cgroup(path), int(match["id"]) if match else job
        if not pod and not job:
            with open(f"{proc}/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:
                pod = next(_pods_of_mounts(file), "")
    return pod, job


def left_of_pods(uids: Iterable[str], conf: Mapping[str, Any]) -> str:
    """What is left of pods on this node, for people; "" when nothing is."""
    try:
        return _left_of(set(uids), conf)
    except OSError as error:
        return f"not known what is left of the pod: {error}"


def _left_of(wanted: set[str], conf: Mapping[str, Any]) -> str:
    if not wanted:
        return ""
    groups = {u: f for u, f in pod_cgroups(conf["cgroup_root"]).items() if u in wanted}
    if groups:
        uid = min(groups)
        count = len(cgroup_processes(groups[uid]))
        return f"pod {uid} has a cgroup with {count} processes"
    for uid, pids in mounted_pods().items():
        if uid in wanted:
            return f"pod {uid} has processes outside its cgroup: {_some(pids)}"
    return ""


def users_of(paths: Mapping[int, str], given: Iterable[str], conf: Mapping[str, Any]) -> str:
    """Which pod's process holds one of these device files open (index -> path); "" when none.

    given: UIDs of the pods that have GPUs.
    """
    wanted = {}
    for index, path in sorted(paths.items()):
        identity = file_identity(path)
        if identity is None:
            return f"not known who uses GPU {index}: {path} cannot be looked at"
        wanted[identity] = index
    for uid, folders in pod_cgroups(conf["cgroup_root"]).items():
        for pid, indices in open_devices(cgroup_processes(folders), wanted).items():
            named = command_of(pid)
            if not is_monitor(pid, named, uid, 0, given=uid in given, names=conf["monitors"]):
                return f"process {pid} of pod {uid} holds GPU {_some(indices)} open"
    return ""


def contexts_left(gpus: str, conf: Mapping[str, Any]) -> str:
    """Which process outside all pods and jobs has a context on GPUs (`0,2-3`), by nvidia-smi.

    Such a one has left its pod's cgroup and mounts, or its context outlives it. "": none, or no
    driver of NVIDIA's is loaded. A MIG device stands under the UUID of its GPU, which the agent's
    file does not have: what is not known counts.
    """
    wanted = expand(gpus)
    if not wanted or not os.path.exists(DRIVER):
        return ""
    query = ("--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader")
    shown = run(conf["nvidia_smi"], *query)
    if shown is None:
        return "not known who uses the GPUs: the driver does not answer"
    named = {g["uuid"]: g["index"] for g in (read_state(conf) or {}).get("gpus", [])}
    for line in shown.splitlines():
        pid, _, uuid = (part.strip() for part in line.partition(","))
        if not pid.isdigit():
            return f"not known who uses the GPUs: nvidia-smi says {line[:80]!r}"
        if named.get(uuid, min(wanted)) not in wanted:
            continue
        try:
            is_other = any(owner_of(int(pid))) or is_monitor(
                int(pid), command_of(int(pid)), "", 0, given=False, names=conf["monitors"]
            )
        except OSError as error:
            return f"not known who uses the GPUs: {error}"
        if not is_other:
            return f"process {pid} of no pod has a context on GPU {named.get(uuid, uuid)}"
    return ""


def _some(numbers: Iterable[int]) -> str:
    every = sorted(numbers)
    return ",".join(map(str, every[:5])) + (",..." if len(every) > 5 else "")


# The two scripts.


def read_conf() -> dict[str, Any]:
    """The configuration; without one whose claims are ours is not known: a hook fails closed."""
    path = os.environ.get("SLURMBRIDGE_HOOKS", DEFAULT_CONF)
    conf = dict(DEFAULTS)
    try:
        with open(path, encoding="utf-8") as file:
            conf.update(json.load(file))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        say(f"{path} cannot be read, defaults are used: {error}", syslog.LOG_ERR)
        conf["owner_uids"] = None
    return conf


def is_of_owner(job: Mapping[str, str], conf: Mapping[str, Any], *, unknown: bool) -> bool:
    """Whether a user submitted the job that the bridge may be; unknown: the answer if not known."""
    owners = conf["owner_uids"]
    if owners is None:
        return unknown or job["uid"] == "0"
    return job["uid"] in map(str, owners)


def say(text: str, level: int = syslog.LOG_WARNING) -> None:
    """One line to syslog and to slurmd's log."""
    line = f"job {os.environ.get('SLURM_JOB_ID', '?')}: {text}"
    with contextlib.suppress(OSError):
        syslog.openlog("slurmbridge-hook")
        syslog.syslog(level, line)
    print(f"slurmbridge: {line}", file=sys.stderr, flush=True)


def ask_agent(question: Mapping[str, Any], conf: Mapping[str, Any]) -> dict[str, Any] | None:
    """The agent's answer to one question (JSON lines both ways); None: it gave none in time."""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(ASK_S)
            link.connect(conf["socket"])
            link.sendall(json.dumps(question).encode() + b"\n")
            got = b""
            while not got.endswith(b"\n"):
                part = link.recv(65536)
                if not part:
                    return None
                got += part
        answer = json.loads(got)
    except (OSError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("why"), str) else None


def read_state(conf: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the agent has written down last; {}: it has not, None: it cannot be read."""
    try:
        with open(conf["state"], encoding="utf-8") as file:
            state = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) and state.get("version") == 1 else None


def claimed_pods(job: Mapping[str, str], conf: Mapping[str, Any]) -> set[str] | None:
    """UIDs of the pods that this job covers on this node, by comment and the agent's file.

    None: the job is a claim, but whose cannot be said; an empty set: it is not a claim of ours.
    A comment that is not ours frees nothing: anybody may have changed it, and the configuration may
    have another cluster or owner by now. What the agent has noted for this job still counts, for
    GPUs of this job: its id may have been another's before a crash of slurmctld.
    """
    state = read_state(conf)
    pods = [p for p in (state or {}).get("pods", []) if str(p.get("job_id")) == job["id"]]
    noted = {str(pod["uid"]) for pod in pods}
    gpus = expand(job["gpus"])
    here = {str(p["uid"]) for p in pods if not (gpus and p.get("gpus")) or gpus & set(p["gpus"])}
    comment = job["comment"]
    if _FILLER.fullmatch(comment):
        return here
    match = _COMMENT.fullmatch(comment)
    if match is None:
        if comment:
            return here
        # After a crash of slurmctld the comment may be empty (22.05.8).
        is_known = state is not None or not is_of_owner(job, conf, unknown=True)
        return noted if is_known else None
    if conf["cluster"] not in ("", match["cluster"]) or not is_of_owner(job, conf, unknown=True):
        return here
    if match["kind"] == "pod":
        return noted | {match["uid"]}
    return noted or None


def this_job() -> dict[str, str]:
    """What slurmd tells of the job."""
    env = os.environ
    return {
        "id": env.get("SLURM_JOB_ID", ""),
        "comment": env.get("SLURM_JOB_COMMENT", ""),
        "uid": env.get("SLURM_JOB_UID", ""),
        "user": env.get("SLURM_JOB_USER", ""),
        "account": env.get("SLURM_JOB_ACCOUNT", ""),
        "partition": env.get("SLURM_JOB_PARTITION", ""),
        "gpus": env.get("SLURM_JOB_GPUS", ""),
        "node": env.get("SLURMD_NODENAME", ""),
    }


def epilog(conf: Mapping[str, Any]) -> int:
    """Hold the end of a claim; 0: nothing is left, 1: the node was drained."""
    job = this_job()
    uids = claimed_pods(job, conf)
    if uids is not None and not uids:
        # A native job: the agent may forget it. Nobody waits for that.
        ask_agent({"ask": "ended", "job": job}, conf)
        return 0
    began = time.monotonic()
    said = ""
    while True:
        asked = None if uids is None else sorted(uids)
        answer = ask_agent({"ask": "hold", "job": job, "uids": asked}, conf)
        if answer is not None:
            why = answer["why"]
        else:
            uids = claimed_pods(job, conf)
            why = unknown_left(conf) if uids is None else left_of_pods(uids, conf)
            why = why or contexts_left(job["gpus"], conf)
        if not why:
            return 0
        held = time.monotonic() - began
        if held > conf["longest_hold_s"]:
            drain(job, f"claim {job['id']} held {held:.0f} s: {why}", conf)
            return 1
        if why != said:
            said = why
            say(f"held: {why}", syslog.LOG_INFO)
        time.sleep(conf["poll_s"])


def unknown_left(conf: Mapping[str, Any]) -> str:
    """What is left of a claim of which the agent's file does not say the pods."""
    return strangers({str(pod["uid"]) for pod in (read_state(conf) or {}).get("pods", [])}, conf)


def strangers(known: Iterable[str], conf: Mapping[str, Any]) -> str:
    """Why a claim of unknown pods cannot end: a pod of which nobody knows whose it is."""
    try:
        here = sorted(set(pod_cgroups(conf["cgroup_root"])).difference(known))
    except OSError as error:
        return f"not known which pods are here: {error}"
    return f"nobody can say which pods this claim covers, maybe {here[0]}" if here else ""


def is_for_pods(job: Mapping[str, str], conf: Mapping[str, Any]) -> bool:
    """Whether a job is a claim or a filler of ours: its GPUs may be in use, by its own pod.

    Any user can write such a comment, so it counts only for a user that the bridge may be.
    """
    match = _COMMENT.fullmatch(job["comment"])
    if match is not None and conf["cluster"] not in ("", match["cluster"]):
        return False
    is_marked = match is not None or _FILLER.fullmatch(job["comment"]) is not None
    return is_marked and is_of_owner(job, conf, unknown=False)


def prolog(conf: Mapping[str, Any]) -> int:
    """Refuse GPUs that a pod uses; 0: the job may start (or was requeued), 1: node drained."""
    job = this_job()
    if not job["gpus"] or is_for_pods(job, conf):
        return 0
    deadline = time.monotonic() + conf["prolog_wait_s"]
    told: tuple[str, int] | None = None
    while True:
        answer = ask_agent({"ask": "handover", "job": job}, conf)
        if answer is not None:
            why = answer["why"]
        else:
            why = busy_by_look(job["gpus"], conf) or contexts_left(job["gpus"], conf)
        if not why:
            return 0
        # Before the wait: its user may cancel the job meanwhile, and slurmd is told that once.
        told = told or told_before(job, conf)
        if time.monotonic() >= deadline:
            break
        time.sleep(conf["poll_s"])
    say(f"its GPUs {job['gpus']} are in use: {why}", syslog.LOG_ERR)
    if conf["on_busy"] == "requeue" and take_back(job, told, conf):
        return 0
    drain(job, f"GPU {job['gpus']} given to job {job['id']}: {why}", conf)
    return 1


def busy_by_look(gpus: str, conf: Mapping[str, Any]) -> str:
    """Why GPUs (`0,2-3`) cannot be handed over, without the agent; "" when they can."""
    wanted = expand(gpus)
    if not wanted:
        return f"not known which GPUs {gpus!r} are"
    try:
        here = len(pod_cgroups(conf["cgroup_root"]))
        state = read_state(conf)
        if not state:
            return f"no agent, and {here} pods are here" if here else ""
        pods = state.get("pods", [])
        why = left_of_pods([p["uid"] for p in pods if wanted & set(p.get("gpus", ()))], conf)
        if why or not here:
            return why
        paths = {g["index"]: g["path"] for g in state.get("gpus", []) if g["index"] in wanted}
        if wanted - set(paths):
            return f"not known who uses GPU {_some(wanted - set(paths))}: not in the agent's file"
        return users_of(paths, {p["uid"] for p in pods if p.get("gpus")}, conf)
    except OSError as error:
        return f"not known who uses the GPUs: {error}"


def expand(text: str) -> set[int]:
    """`0,2-3` -> {0, 2, 3}; what cannot be read is left out."""
    found = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def run(*argv: str) -> str | None:
    """Output of a command of Slurm; None when it failed."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        say(f"{' '.join(argv[:2])}: {error}", syslog.LOG_ERR)
        return None
    if done.returncode != 0:
        say(f"{' '.join(argv[:2])}: {done.stderr.strip()[:200]}", syslog.LOG_ERR)
        return None
    return done.stdout


def drain(job: Mapping[str, str], why: str, conf: Mapping[str, Any]) -> None:
    """Drain this node with our reason, and say so loudly."""
    say(f"ALARM, node drained: {why}", syslog.LOG_ALERT)
    reason = f"{REASON}: {why}"[:250]
    node = f"NodeName={job['node']}"
    run(conf["scontrol"], "update", node, "State=DRAIN", f"Reason={reason}")
    ask_agent({"ask": "alarm", "job": job, "text": why}, conf)


def take_back(job: Mapping[str, str], told: tuple[str, int], conf: Mapping[str, Any]) -> bool:
    """Requeue the job from inside its Prolog; whether it will not start.

    One that cannot be requeued (salloc, srun, --no-requeue) is cancelled: it could not run anyway.
    A failing Prolog would drain the node. slurmd looks once more at the job after its Prolog, and
    does not start one that it was told to end meanwhile: so wait until it was, as long as the word
    is on its way. told: of `told_before`.
    """
    if (
        run(conf["scontrol"], "requeue", job["id"]) is None
        and run(conf["scancel"], job["id"]) is None
    ):
        return False
    deadline = time.monotonic() + TOLD_S
    while time.monotonic() < deadline:
        # Not scontrol: a job's name can hold any state.
        shown = run(conf["squeue"], "-h", "-j", job["id"], "-o", "%T")
        if shown is not None and "RUNNING" not in shown:
            return was_told(job["id"], *told)
        time.sleep(0.1)
    return False


def was_told(job_id: str, path: str, before: int) -> bool:
    """Wait until slurmd has been told to end a job; False: it has not, in `TOLD_S`."""
    if not os.path.isdir(os.path.dirname(path)):
        say(f"not known when slurmd hears of it: {path or 'SlurmdSpoolDir'} is not there")
        time.sleep(BLIND_S)
        return True
    deadline = time.monotonic() + TOLD_S
    while time.monotonic() < deadline:
        if revoked(path, job_id) not in (0, before):
            return True
        time.sleep(0.02)
    if not entries(path):
        say(f"not known when slurmd hears of it: {path} cannot be read, or is of another Slurm")
        return True
    say(f"slurmd was not told in {TOLD_S:g} s that the job was taken back", syslog.LOG_ERR)
    # It may have been told before the Prolog looked first.
    return before != 0


def told_before(job: Mapping[str, str], conf: Mapping[str, Any]) -> tuple[str, int]:
    """Where slurmd keeps which jobs it was told to end ("": not known), and when this one last.

    It writes the file as soon as it is told, and before it waits for a Prolog that still runs.
    Source: slurmd's _rpc_terminate_job and save_cred_state (22.05 to 24.05); measured with 22.05.8.
    """
    shown = run(conf["scontrol"], "show", "config") or ""
    found = re.search(r"^SlurmdSpoolDir\s*=\s*(/\S*)", shown, re.MULTILINE)
    if found is None:
        return "", 0
    host = os.uname().nodename.partition(".")[0]
    path = f"{found[1].replace('%n', job['node']).replace('%h', host)}/cred_state"
    return path, revoked(path, job["id"])


_REVOKED = struct.Struct(">Iqqq")
"""Job id, and Unix seconds: told to end (0: not), first seen, to be forgotten."""


def revoked(path: str, job_id: str) -> int:
    """When slurmd was told last to end a job, Unix seconds; 0: it was not, or nobody can say."""
    wanted = int(job_id).to_bytes(4, "big")
    return max((told for number, told in entries(path) if number == wanted), default=0)


def entries(path: str) -> list[tuple[bytes, int]]:
    """Job ids (4 bytes) in slurmd's file, and when it was told to end each (0: not); [] if unread.

    Whatever stands before and after the jobs, or between them in a later Slurm: an entry is known
    by its times.
    """
    try:
        with open(path, "rb") as file:
            body = file.read()
    except OSError:
        return []
    found = []
    for at in range(len(body) - _REVOKED.size + 1):
        _, told, seen, last = _REVOKED.unpack_from(body, at)
        if all(1 << 30 < moment < 1 << 33 for moment in (told or seen, seen, last)):
            found.append((body[at : at + 4], told))
    return found


def main_epilog() -> int:
    """Entry point `slurmbridge-epilog`."""
    return epilog(read_conf())


def main_prolog() -> int:
    """Entry point `slurmbridge-prolog`."""
    return prolog(read_conf())


def main(argv: list[str]) -> int:
    """Run as a file."""
    if argv[1:] not in (["epilog"], ["prolog"]):
        print("usage: slurm_script.py epilog|prolog", file=sys.stderr)
        return 2
    return main_epilog() if argv[1] == "epilog" else main_prolog()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
