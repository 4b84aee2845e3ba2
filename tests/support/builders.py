"""Fluent builders of what Slurm and Kubernetes say: only what a test is about is written out.

`make_node("gpu1").gpus(8).used("0-3")`, `make_pod("a").gpus(2).on("gpu1")`: each call changes one
thing; `.obj` is the frozen record. Snapshots, machines and stories take builders and records alike.
"""

from __future__ import annotations

from typing import Any

import msgspec

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core.machine import Machine
from slurmbridge.core.settings import Settings
from slurmbridge.core.state import Entry
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Claim, ClaimId, write_comment
from slurmbridge.pool.gres import parse_indices
from slurmbridge.pool.policy import Granularity, Policy
from slurmbridge.pool.record import (
    GpuCount,
    GpuRequest,
    GpuUse,
    JobState,
    KubeNode,
    NodeState,
    Partition,
    PodRecord,
    Reservation,
    SlurmConfig,
    SlurmJob,
    SlurmNode,
    SlurmSnapshot,
)
from slurmbridge.topology.generation import make

T0 = 1_800_000_000.0
CLUSTER = "blue"
OWNER = 64030
BOOT = T0 - 86_400.0


def plain(thing: Any) -> Any:
    """The record of a builder; a record stays as it is."""
    return getattr(thing, "obj", thing)


def use(indices: str | None = None, count: int = 0, kind: str = "") -> GpuUse:
    """GPUs in use: by index list (`"0-3"`), or by count where they are not numbered."""
    if indices is None:
        return GpuUse((GpuCount(kind, count),) if count else ())
    numbers = parse_indices(indices)
    return GpuUse((GpuCount(kind, len(numbers)),) if numbers else (), numbers)


class _Builder:
    obj: Any

    def but(self, **fields: Any) -> Any:
        """Any field, by its name."""
        self.obj = msgspec.structs.replace(self.obj, **fields)
        return self


class NodeBuilder(_Builder):
    """A Slurm node: IDLE, 64 CPUs, 500,000 MiB, 8 numbered GPUs, none used."""

    def __init__(self, name: str) -> None:
        self.obj = SlurmNode(
            name=name,
            state=NodeState("IDLE"),
            cpus_total=64,
            cpus_used=0,
            memory_mib=500_000,
            memory_used_mib=0,
            gpus=(GpuCount("", 8),),
            gpus_used=use(""),
        )

    def gpus(self, count: int, kind: str = "") -> NodeBuilder:
        return self.but(gpus=(GpuCount(kind, count),))

    def types(self, **counts: int) -> NodeBuilder:
        return self.but(gpus=tuple(GpuCount(k, n) for k, n in counts.items()))

    def used(self, indices: str, kind: str | None = None) -> NodeBuilder:
        return self.but(gpus_used=use(indices, kind=self._kind(kind)))

    def used_count(self, count: int, kind: str | None = None) -> NodeBuilder:
        return self.but(gpus_used=use(count=count, kind=self._kind(kind)))

    def _kind(self, kind: str | None) -> str:
        if kind is not None:
            return kind
        return self.obj.gpus[0].type if self.obj.gpus else ""

    def used_unknown(self) -> NodeBuilder:
        return self.but(gpus_used=None)

    def state(self, text: str) -> NodeBuilder:
        base, *flags = text.split("+")
        return self.but(state=NodeState(base, frozenset(flags)))


class JobBuilder(_Builder):
    """A job: RUNNING, of user alice (uid 1001), on no node yet."""

    def __init__(self, job_id: int) -> None:
        self.obj = SlurmJob(
            id=job_id,
            name="train",
            comment="",
            user_id=1001,
            account="science",
            partition="gpu",
            qos="normal",
            state=JobState("RUNNING"),
            gpus={},
            start=T0 - 60,
            user="alice",
        )

    def on(self, node: str, indices: str | None = None, count: int = 0) -> JobBuilder:
        """GPUs on one more node."""
        gpus = {**(self.obj.gpus or {}), node: use(indices, count)}
        return self.but(nodes=(*self.obj.nodes, node), gpus=gpus)

    def on_unknown(self, *nodes: str) -> JobBuilder:
        """On these nodes, and Slurm does not say with how many GPUs."""
        return self.but(nodes=nodes, gpus=None)

    def state(self, text: str) -> JobBuilder:
        base, *flags = text.split("+")
        return self.but(state=JobState(base, frozenset(flags)))

    def planned(self, start: float, *nodes: str) -> JobBuilder:
        return self.state("PENDING").but(start=start, planned_nodes=nodes)


class PodBuilder(_Builder):
    """A pod `default/NAME` with UID `uid-NAME` that asks for one GPU and waits."""

    def __init__(self, name: str) -> None:
        self.obj = PodRecord(
            uid=f"uid-{name}",
            namespace="default",
            name=name,
            phase="Pending",
            gpu=GpuRequest(1),
            cpus=4,
            memory_mib=1000,
            created=T0 - 5,
        )

    def gpus(self, count: int, kind: str = "") -> PodBuilder:
        return self.but(gpu=GpuRequest(count, kind))

    def on(self, node: str, job_id: int = 0, gpus: str = "", phase: str = "Running") -> PodBuilder:
        """Bound; with a job id: through us, with these annotations."""
        self.but(node=node, phase=phase)
        if job_id:
            self.wrote(CLAIM=f"{job_id}/{self.obj.uid}", GPUS=gpus)
        return self

    def wrote(self, **annotations: str) -> PodBuilder:
        """Annotations by the names of `slurmbridge.pool.keys`: `DURATION="1h"`."""
        more = {getattr(keys, name): value for name, value in annotations.items()}
        return self.but(annotations={**self.obj.annotations, **more})

    def over(self, phase: str = "Succeeded") -> PodBuilder:
        return self.but(phase=phase)

    def deleting(self, at: float = T0) -> PodBuilder:
        return self.but(deleting_since=at)

    def refused(self, priority: int = 0) -> PodBuilder:
        """Kube-scheduler has said unschedulable."""
        return self.but(waiting_on_us=True, priority=priority)


class KubeNodeBuilder(_Builder):
    """A ready Kubernetes node that offers 8 GPUs."""

    def __init__(self, name: str) -> None:
        self.obj = KubeNode(
            name=name,
            uid=f"node-{name}",
            ready=True,
            unschedulable=False,
            gpus={"nvidia.com/gpu": 8},
            cpus=64,
            memory_mib=500_000,
        )

    def gpus(self, count: int, resource: str = "nvidia.com/gpu") -> KubeNodeBuilder:
        return self.but(gpus={resource: count})

    def not_ready(self) -> KubeNodeBuilder:
        return self.but(ready=False)


def make_node(name: str) -> NodeBuilder:
    return NodeBuilder(name)


def make_job(job_id: int) -> JobBuilder:
    return JobBuilder(job_id)


def make_pod(name: str) -> PodBuilder:
    return PodBuilder(name)


def make_kube_node(name: str) -> KubeNodeBuilder:
    return KubeNodeBuilder(name)


def make_claim_job(job_id: int, pod: Any, node: str = "", indices: str | None = None) -> JobBuilder:
    """The job of a claim of ours."""
    pod = plain(pod)
    claim_id = ClaimId(CLUSTER, pod.uid)
    job = JobBuilder(job_id).but(
        name=claim_id.job_name,
        comment=write_comment(claim_id, pod.ref),
        user_id=OWNER,
        user="slurmbridge",
    )
    return job.on(node, indices) if node else job


def make_claim(
    job_id: int, pod: Any, node: str, indices: str | None, count: int = 0, granted: float = T0
) -> Claim:
    """The claim as an adapter gives it."""
    return Claim(
        id=ClaimId(CLUSTER, plain(pod).uid),
        job_id=job_id,
        slurm_node=node,
        gpus=use(indices, count),
        state=JobState("RUNNING"),
        granted=granted,
    )


def make_snapshot(
    *things: Any,
    began: float = T0,
    boot: float = BOOT,
    scheduler: str = "",
    version: str = "22.05.8",
) -> SlurmSnapshot:
    """A reading of nodes, jobs, partitions and reservations; it took 10 ms."""
    records = [plain(t) for t in things]
    parameters = frozenset(scheduler.split(",")) if scheduler else frozenset()
    return SlurmSnapshot(
        began=began,
        ended=began + 0.01,
        config=SlurmConfig("s", version, boot, scheduler_parameters=parameters),
        nodes={r.name: r for r in records if isinstance(r, SlurmNode)},
        jobs={r.id: r for r in records if isinstance(r, SlurmJob)},
        reservations=tuple(r for r in records if isinstance(r, Reservation)),
        partitions={r.name: r for r in records if isinstance(r, Partition)},
    )


def make_policy(**fields: Any) -> Policy:
    return Policy(**{"cluster": CLUSTER, "granularity": Granularity.GPU} | fields)


def make_settings(policy: Policy | None = None, **fields: Any) -> Settings:
    return Settings(**{"policy": policy or make_policy(), "owner_uid": OWNER} | fields)


class Story:
    """A machine, a clock, and the actions that came out; told line by line in a test.

    `poll` reads what `slurm` says now; what is said with `at=` moves the clock there first
    (seconds after `T0`). Every method returns the actions of its event alone, and those of the
    topology that it has called for, which is built at once unless `builds` is False.
    """

    def __init__(self, *nodes: str, settings: Settings | None = None) -> None:
        self.settings = settings or make_settings()
        self.machine = Machine(self.settings, "t1")
        self.now = T0
        self.nodes: dict[str, Any] = {n: make_node(n) for n in nodes}
        self.kube_nodes: dict[str, Any] = {n: make_kube_node(n) for n in nodes}
        self.jobs: dict[int, Any] = {}
        self.reservations: list[Any] = []
        self.boot = BOOT
        self.partitions: list[Partition] = []
        self.scheduler = ""
        self.version = "22.05.8"
        self.builds = True
        self.actions: list[act.Action] = []
        self._op = 0

    def handle(self, event: ev.Event, at: float | None = None) -> list[act.Action]:
        if at is not None:
            self.now = T0 + at
        done = self.machine.handle(event, self.now)
        for action in done if self.builds else ():
            if isinstance(action, act.BuildTopology):
                built = ev.TopologyBuilt(action.sources, make(action.sources))
                done = [*done, *self.machine.handle(built, self.now)]
        self.actions += done
        return done

    def start(self, *pods: Any) -> Story:
        """The first readings of both sides, and one second."""
        self.handle(ev.TopologyRead(""))
        self.handle(ev.PodsListed(tuple(plain(p) for p in pods)))
        self.handle(ev.NodesListed(tuple(plain(n) for n in self.kube_nodes.values())))
        self.poll()
        self.now += 1
        return self

    def again(self, *pods: Any) -> Story:
        """The bridge is killed and started again: only Slurm and Kubernetes remember."""
        self.machine = Machine(self.settings, "t2")
        return self.start(*pods)

    def slurm(self, *jobs: Any, without: tuple[int, ...] = ()) -> Story:
        """These jobs are in Slurm from now on; `without`: these no more."""
        for job in jobs:
            self.jobs[plain(job).id] = job
        for job_id in without:
            self.jobs.pop(job_id, None)
        return self

    def poll(self, at: float | None = None, began: float | None = None) -> list[act.Action]:
        """A reading that begins now, or began at that second, and is in at once."""
        if at is not None:
            self.now = T0 + at
        snapshot = make_snapshot(
            *self.nodes.values(),
            *self.jobs.values(),
            *self.reservations,
            *self.partitions,
            began=self.now if began is None else T0 + began,
            boot=self.boot,
            scheduler=self.scheduler,
            version=self.version,
        )
        return self.handle(ev.Polled(snapshot))

    def tick(self, at: float | None = None) -> list[act.Action]:
        return self.handle(ev.Ticked(), at)

    def pass_time(self, seconds: float, step: float = 1.0) -> list[act.Action]:
        """Readings and ticks, one a second."""
        found: list[act.Action] = []
        end = self.now + seconds
        while self.now + step <= end:
            self.now += step
            found += self.poll()
            found += self.tick()
        return found

    def see(self, pod: Any, at: float | None = None) -> list[act.Action]:
        return self.handle(ev.PodChanged(plain(pod)), at)

    def gone(self, pod: Any, at: float | None = None) -> list[act.Action]:
        return self.handle(ev.PodGone(plain(pod)), at)

    def ask(self, pod: Any, node: str, at: float | None = None) -> list[act.Action]:
        """An extender asks for a claim."""
        pod = plain(pod)
        self._op += 1
        return self.handle(ev.ClaimAsked(self._op, pod.uid, pod.namespace, pod.name, node), at)

    def grant(self, pod: Any, job_id: int, node: str, indices: str) -> list[act.Action]:
        """Slurm grants: the job is there, and the answer is in."""
        self.slurm(make_claim_job(job_id, pod, node, indices))
        claim = make_claim(job_id, pod, node, indices, granted=self.now)
        return self.handle(ev.Allocated(plain(pod).uid, claim))

    def bind(self, pod: Any, job_id: int, node: str, indices: str) -> list[act.Action]:
        """The extender's Binding is seen by the watch, the pod runs."""
        return self.see(pod.on(node, job_id, indices))

    def run(self, pod: Any, job_id: int, node: str, indices: str) -> Story:
        """The whole good way of a pod, to RUNNING."""
        self.see(pod)
        self.ask(pod, node)
        self.grant(pod, job_id, node, indices)
        self.now += 0.1
        self.bind(pod, job_id, node, indices)
        self.now += 1
        self.poll()
        self.now += 1
        return self

    def entry(self, pod: Any) -> Entry | None:
        return self.machine.state.book.get(plain(pod).uid)

    def phase(self, pod: Any) -> str:
        """The phase of the pod's claim; "" for none."""
        entry = self.entry(pod)
        return "" if entry is None else str(entry.phase)

    def free(self, node: str) -> int:
        """GPUs that the view offers on a node."""
        return self.machine.view().nodes[node].free_total

    def of(self, kind: type[Any]) -> list[Any]:
        """All actions of a kind since the last call of `forget`."""
        return [a for a in self.actions if isinstance(a, kind)]

    def forget(self) -> Story:
        self.actions.clear()
        return self


def kinds(actions: list[act.Action]) -> list[str]:
    """Names of actions, in order."""
    return [type(a).__name__ for a in actions]


def only(actions: list[act.Action], kind: type[Any]) -> Any:
    """The one action of a kind."""
    found = [a for a in actions if isinstance(a, kind)]
    assert len(found) == 1, f"{kind.__name__}: {found}"
    return found[0]


def none(actions: list[act.Action], *types: type[Any]) -> bool:
    """Whether there is no action of these kinds."""
    return not [a for a in actions if isinstance(a, types)]
