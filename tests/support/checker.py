"""The independent judge: reads slurmctld and the API server itself and names broken promises.

It shares no code with the product: own parsing of `scontrol`, own reading of pods.

Read skew. A sample reads the pods, then the jobs, then the pods again. Only a pod whose UID, node,
claim, indices and liveness are the same in both readings is judged: it stood unchanged while the
jobs were read. All jobs come in one answer that slurmctld packs under its job lock, so they are one
moment of Slurm, which lies between the two moments of Kubernetes. A reported violation was thus
really true at that moment; what changed meanwhile is left to the next sample.

Who holds a GPU: jobs that are RUNNING, SUSPENDED, COMPLETING (Slurm gives a GPU on only when the
Epilog has ended) or in a state between. Of a COMPLETING job Slurm 22.05 no longer lists the GPUs:
the checker remembers them from the job's earlier samples. Which of the violations a story allows, and for how long
(an eviction takes its grace), is the test's to say: `Watch.violations` has first and last time.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from tests.support.slurm import SlurmError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CLAIM = "slurmbridge.dev/claim"
GPUS = "slurmbridge.dev/gpus"
SHARE = "slurmbridge.dev/share"
GPU = "nvidia.com/gpu"
HOLDING = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT"}
    | {"STOPPED"}
)
FINAL = frozenset({"Succeeded", "Failed"})


class UnreadError(RuntimeError):
    """Slurm or Kubernetes gave no answer: no sample, so nothing is known."""


@dataclass(frozen=True)
class Violation:
    """One broken promise. `kind` is one of:

    double-owned: two jobs hold one GPU of a node. no-claim: a live pod on a pool node names none.
    foreign-claim: its claim was made for another pod. claim-not-running: the job is gone, or in
    another state. wrong-node: it runs elsewhere. too-few: fewer GPUs than the pod asks.
    wrong-indices: other GPUs than the pod was told. shared-claim: two pods name one job that is no
    group's, and one of them was told no share of it. shared-index: two pods were told the same GPU.
    """

    kind: str
    subject: str
    text: str


@dataclass(frozen=True)
class Job:
    """A job of Slurm. gpus: node → (count, indices); indices are empty when Slurm has no numbers.

    claim: it carries the bridge's comment; group: the comment is a group's. start: as Slurm writes
    it; tells two jobs of one id apart. pod: UID in the comment.
    """

    id: int
    state: str
    gpus: Mapping[str, tuple[int, frozenset[int]]]
    nodes: frozenset[str] = frozenset()
    claim: bool = False
    group: bool = False
    start: str = ""
    pod: str = ""


@dataclass(frozen=True)
class Pod:
    """A live pod on a node, as far as it is judged. asked: GPUs in its limits.

    share: of its gang's claim, "" where it has one of its own.
    """

    uid: str
    name: str
    node: str
    asked: int
    claim: str
    gpus: str
    share: str = ""


@dataclass(frozen=True)
class Sample:
    """One moment. owners: (node, index) → jobs that hold it.

    bound: live pods with GPUs on pool nodes. native_running, claims_running: RUNNING jobs that are
    not, or are, the bridge's. gpus_used: GPUs that jobs hold, of gpus_total. idle_claims: running
    claims that no live pod names (one in flight, or leaked if it stays).
    """

    violations: tuple[Violation, ...]
    bound: int
    native_running: int
    claims_running: int
    gpus_used: int
    gpus_total: int
    idle_claims: tuple[int, ...]
    owners: Mapping[tuple[str, int], tuple[int, ...]]
    at: float = 0.0


class Reading(NamedTuple):
    """What both sides said: pods as the API server tells them, before and after the jobs.

    totals: GPUs by Slurm node.
    """

    before: list[dict[str, Any]]
    jobs: list[Job]
    after: list[dict[str, Any]]
    totals: dict[str, int]


class _Slurm(Protocol):
    def run(self, *argv: str, timeout_s: float = ...) -> str: ...


class _Api(Protocol):
    def items(self, path: str, **query: str) -> list[dict[str, Any]]: ...


class _Kube(Protocol):
    @property
    def api(self) -> _Api: ...


class Checker:
    """Samples of one Slurm and one Kubernetes cluster (SlurmCluster, KubeCluster)."""

    def __init__(
        self,
        slurm: _Slurm,
        kube: _Kube,
        slurm_node: Callable[[str], str] = lambda name: name,
        read_s: float = 5.0,
        totals_s: float = 0.0,
    ) -> None:
        """Args:

        slurm_node: gives the Slurm name of a Kubernetes node.
        read_s: how long a Slurm command may take; without a slurmctld it would try for 9 s.
        totals_s: how old the nodes' numbers of GPUs may be.
        """
        self._slurm = slurm
        self._kube = kube
        self._slurm_node = slurm_node
        self._read_s = read_s
        self._totals_s = totals_s
        self._totals: dict[str, int] = {}
        self._totals_at = float("-inf")
        self._known: dict[tuple[int, str], Mapping[str, tuple[int, frozenset[int]]]] = {}

    def sample(self) -> Sample:
        """Read both sides once and judge.

        Raises:
            UnreadError: one of them did not answer.

        """
        reading = self.read()
        pods = [read_pods(items, self._slurm_node) for items in (reading.before, reading.after)]
        return judge(pods[0], reading.jobs, pods[1], reading.totals)

    def read(self) -> Reading:
        """Read both sides once.

        Raises:
            UnreadError: one of them did not answer.

        """
        try:
            before = self._kube.api.items("/api/v1/pods")
            jobs = self._with_remembered(read_jobs(self._scontrol("job")))
            after = self._kube.api.items("/api/v1/pods")
            if time.monotonic() - self._totals_at >= self._totals_s:
                self._totals = read_nodes(self._scontrol("node"))
                self._totals_at = time.monotonic()
        except (OSError, RuntimeError, subprocess.TimeoutExpired, HTTPException) as error:
            raise UnreadError(str(error)) from error
        return Reading(before, jobs, after, self._totals)

    def _with_remembered(self, jobs: list[Job]) -> list[Job]:
        known, self._known = self._known, {}
        full = []
        for job in jobs:
            key = (job.id, job.start)
            if job.state in HOLDING and not job.gpus and key in known:
                # Its nodes are those whose Epilogs have not ended: the others have given theirs back.
                left = {n: held for n, held in known[key].items() if n in job.nodes}
                full.append(dataclasses.replace(job, gpus=left))
            else:
                full.append(job)
            if full[-1].gpus and job.state in HOLDING:
                self._known[key] = full[-1].gpus
        return full

    def watch(self, interval_s: float = 1.0) -> Watch:
        """Samples in the background: `with checker.watch(0.5) as seen: ...`."""
        return Watch(self, interval_s)

    def _scontrol(self, what: str) -> str:
        try:
            return self._slurm.run("scontrol", "show", what, "-d", "-o", timeout_s=self._read_s)
        except SlurmError as error:
            raise UnreadError(str(error)) from error


@dataclass
class Seen:
    """A violation with the seconds since the watch began of its first and last sample."""

    violation: Violation
    first: float
    last: float
    times: int = 1

    @property
    def lasted_s(self) -> float:
        """Seconds between first and last sight: 0 when it was seen once."""
        return self.last - self.first


@dataclass
class Watch:
    """Takes samples in a thread from `start` to `stop`, or as a context manager."""

    checker: Checker
    interval_s: float
    samples: list[Sample] = field(default_factory=list)
    unread: int = 0
    _seen: dict[tuple[str, str], Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checker", daemon=True)
        self._began = 0.0

    @property
    def violations(self) -> list[Seen]:
        """Each violation once (by kind and subject), in the order of first sight."""
        return list(self._seen.values())

    @property
    def double_owned(self) -> list[Seen]:
        """Those in which one GPU had two owners: jobs, or pods that were told the same index."""
        return [s for s in self.violations if s.violation.kind in {"double-owned", "shared-index"}]

    def start(self) -> Self:
        """Begin to take samples."""
        self._began = time.monotonic()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take no more; returns when the last sample is judged."""
        self._end.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while True:
            at = time.monotonic() - self._began
            try:
                sample = self.checker.sample()
            except UnreadError:
                self.unread += 1
            else:
                self._note(at, sample)
            if self._end.wait(self.interval_s):
                return

    def _note(self, at: float, sample: Sample) -> None:
        # Owners of thousands of GPUs are not kept for every second of a long run.
        self.samples.append(dataclasses.replace(sample, owners={}, at=at))
        for violation in sample.violations:
            known = self._seen.get((violation.kind, violation.subject))
            if known is None:
                self._seen[violation.kind, violation.subject] = Seen(violation, at, at)
            else:
                known.last = at
                known.times += 1


# Judging: pure


def judge(
    before: Iterable[Pod], jobs: Iterable[Job], after: Iterable[Pod], totals: Mapping[str, int]
) -> Sample:
    """The sample that two readings of pods, and the jobs and nodes (GPUs by name) between, give."""
    second = set(after)
    pods = [pod for pod in before if pod in second and pod.node in totals]
    by_id = {job.id: job for job in jobs}
    owners: dict[tuple[str, int], list[int]] = defaultdict(list)
    used = 0
    for job in by_id.values():
        if job.state not in HOLDING:
            continue
        for node, (count, indices) in job.gpus.items():
            used += 0 if indices else count
            for index in indices:
                owners[node, index].append(job.id)
    found = [
        Violation("double-owned", f"{node}/{index}", f"jobs {ids}")
        for (node, index), ids in owners.items()
        if len(ids) > 1
    ]
    found += [violation for pod in pods for violation in _judge_pod(pod, by_id)]
    found += _judge_pairs(pods, by_id)
    named = {job_of(pod) for pod in pods} | {job_of(pod) for pod in second}
    running = [job for job in by_id.values() if job.state == "RUNNING"]
    return Sample(
        violations=tuple(found),
        bound=len(pods),
        native_running=sum(not job.claim for job in running),
        claims_running=sum(job.claim for job in running),
        gpus_used=used + len(owners),
        gpus_total=sum(totals.values()),
        idle_claims=tuple(sorted(j.id for j in running if j.claim and j.id not in named)),
        owners={place: tuple(ids) for place, ids in owners.items()},
    )


def _judge_pod(pod: Pod, jobs: Mapping[int, Job]) -> list[Violation]:
    def one(kind: str, text: str) -> list[Violation]:
        return [Violation(kind, pod.name, text)]

    job_id = job_of(pod)
    if job_id is None:
        return one("no-claim", f"on {pod.node} with {pod.asked} GPUs, annotation {pod.claim!r}")
    if pod.claim != f"{job_id}/{pod.uid}":
        return one("foreign-claim", f"annotation {pod.claim!r}, UID {pod.uid}")
    job = jobs.get(job_id)
    if job is None or job.state != "RUNNING":
        state = "unknown to Slurm" if job is None else job.state
        return one("claim-not-running", f"job {job_id} is {state}")
    is_its = pod.share.startswith(f"{job_id}/") if job.group else job.pod in ("", pod.uid)
    if not job.claim or not is_its:
        return one("claim-not-running", f"job {job_id} is another's by now")
    if pod.node not in job.gpus and pod.node not in job.nodes:
        return one("wrong-node", f"pod on {pod.node}, job {job_id} on {sorted(job.nodes)}")
    count, held = job.gpus.get(pod.node, (0, frozenset()))
    if count < pod.asked:
        return one("too-few", f"asks {pod.asked}, job {job_id} holds {count} on {pod.node}")
    told = indices(pod.gpus)
    # Members of a group share one job: each has some of its GPUs, and exactly what it asked.
    right = told <= held and len(told) == pod.asked if job.group and held else told == held
    if not right:
        text = f"told {sorted(told)}, job {job_id} holds {sorted(held)} on {pod.node}"
        return one("wrong-indices", text)
    return []


def _judge_pairs(pods: Iterable[Pod], jobs: Mapping[int, Job]) -> list[Violation]:
    by_job: dict[int, list[Pod]] = defaultdict(list)
    by_index: dict[tuple[str, int], list[Pod]] = defaultdict(list)
    for pod in pods:
        job_id = job_of(pod)
        if job_id is not None:
            by_job[job_id].append(pod)
        for index in indices(pod.gpus):
            by_index[pod.node, index].append(pod)
    shared = [
        Violation("shared-claim", f"job {job_id}", ", ".join(sorted(pod.name for pod in named)))
        for job_id, named in by_job.items()
        if len(named) > 1
        and not (job_id in jobs and jobs[job_id].group)
        # Of a job that Slurm has forgotten, or whose id is another's by now, the pods tell.
        and not all(pod.share.startswith(f"{job_id}/") for pod in named)
    ]
    return shared + [
        Violation("shared-index", f"{node}/{index}", ", ".join(sorted(pod.name for pod in told)))
        for (node, index), told in by_index.items()
        if len(told) > 1
    ]


def job_of(pod: Pod) -> int | None:
    """The job that a pod names as its claim."""
    match = re.fullmatch(r"(\d+)/.+", pod.claim)
    return int(match[1]) if match else None


# Reading


def read_pods(items: Iterable[Mapping[str, Any]], slurm_node: Callable[[str], str]) -> list[Pod]:
    """Live pods with GPUs that are bound: no final phase, object exists (also while deleted)."""
    pods = []
    for item in items:
        meta, spec = item["metadata"], item["spec"]
        limits = [c.get("resources", {}).get("limits", {}) for c in spec["containers"]]
        asked = sum(int(limit.get(GPU, 0)) for limit in limits)
        if not asked or not spec.get("nodeName") or item["status"].get("phase") in FINAL:
            continue
        notes = meta.get("annotations") or {}
        pods.append(
            Pod(
                uid=meta["uid"],
                name=f"{meta['namespace']}/{meta['name']}",
                node=slurm_node(spec["nodeName"]),
                asked=asked,
                claim=notes.get(CLAIM, ""),
                gpus=notes.get(GPUS, ""),
                share=notes.get(SHARE, ""),
            )
        )
    return pods


def read_jobs(text: str) -> list[Job]:
    """Jobs of `scontrol show job -d -o`, one a line."""
    return [_read_job(line) for line in text.splitlines() if line.startswith("JobId=")]


def _read_job(line: str) -> Job:
    job_id = int(re.findall(r"JobId=(\d+)", line)[0])
    # Users write the name before and the comment after this stretch.
    fixed = line[line.index(" JobState=") :].split(" MinCPUsNode=", maxsplit=1)[0]
    gpus: dict[str, tuple[int, frozenset[int]]] = {}
    for nodes, gres in re.findall(r"\sNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", fixed):
        for node in hosts(nodes):
            gpus[node] = _gres(gres)
    comment = re.search(r"\sComment=(slurmbridge/.*)", line)
    node_list = re.search(r"\sNodeList=(\S+)", fixed)
    return Job(
        id=job_id,
        state=re.findall(r"JobState=(\w+)", fixed)[0],
        gpus={node: held for node, held in gpus.items() if held[0]},
        nodes=frozenset(hosts(node_list[1])) if node_list else frozenset(),
        claim=comment is not None,
        group=comment is not None and " group=" in comment[1].partition(" ref=")[0],
        start=re.findall(r" StartTime=(\S+)", fixed)[0],
        pod=_word(comment[1], "pod") if comment else "",
    )


def _word(comment: str, name: str) -> str:
    found = re.search(rf" {name}=(\S+)", comment.partition(" ref=")[0])
    return found[1] if found else ""


def read_nodes(text: str) -> dict[str, int]:
    """Configured GPUs by node, of `scontrol show node -d -o`."""
    totals = {}
    for line in text.splitlines():
        match = re.match(r"NodeName=(\S+)", line)
        gres = re.search(r"\sGres=(\S*)", line)
        if match and gres:
            totals[match[1]] = _gres(gres[1])[0]
    return totals


def _gres(text: str) -> tuple[int, frozenset[int]]:
    """Count and indices of the GPUs in `gpu:a100:4(IDX:0-3),gpu:h100:1(IDX:4)`."""
    count, found = 0, frozenset[int]()
    for number, numbers in re.findall(r"gpu(?::[^:,()]+)?:(\d+)(?:\(IDX:([^)]*)\))?", text):
        count += int(number)
        found |= indices(numbers)
    return count, found


def indices(text: str) -> frozenset[int]:
    """`0-3,6` as a set; empty for `` and `N/A`."""
    found: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def hosts(text: str) -> list[str]:
    """Names in `gpu[001-003,007],x1`; one bracket a name. `(null)` is none."""
    found = []
    for prefix, ranges in re.findall(r"([^\[\],()]+)(?:\[([^\]]*)\])?", text.replace("(null)", "")):
        if not ranges:
            found.append(prefix)
            continue
        for part in ranges.split(","):
            low, _, high = part.partition("-")
            width = len(low)
            found += [f"{prefix}{n:0{width}d}" for n in range(int(low), int(high or low) + 1)]
    return found
