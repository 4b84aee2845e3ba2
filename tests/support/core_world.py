"""A small exact world around `Machine`: slurmctld, the API server, extenders, and bad luck.

`SlurmModel` gives GPUs lowest first and never twice, keeps a cancelled job COMPLETING for a while,
and a restart takes it back to what it had saved up to 5 s before: younger claims are forgotten,
their ids are used again, cancelled claims run again. `World` lets any operation happen at any
moment, answers late, twice or never, kills the machine, and checks after each step what the design
promises. Everything is decided by the integers that are passed in, so a story can be told again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from ClusterShell.NodeSet import NodeSet

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core import publish
from slurmbridge.core.aside import Aside
from slurmbridge.core.machine import Machine
from slurmbridge.core.settings import Eviction, Settings
from slurmbridge.core.state import Phase
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Claim, ClaimId, claim_of, group_uid, write_comment
from slurmbridge.pool.gres import format_indices, parse_indices
from slurmbridge.pool.ledger import GpuState
from slurmbridge.pool.policy import Granularity, Policy
from slurmbridge.pool.record import (
    GpuCount,
    GpuRequest,
    GpuUse,
    JobState,
    KubeNode,
    NodeState,
    PodRecord,
    SlurmConfig,
    SlurmJob,
    SlurmNode,
    SlurmSnapshot,
)
from slurmbridge.topology.generation import make
from tests.support.core_agents import Agents

T0 = 1_800_000_000.0
CLUSTER = "blue"
OWNER = 64030
GPUS = 4
NODES = ("n1", "n2")
SAVE_S = 5.0
EPILOG_S = 2.0
MIN_JOB_AGE_S = 30.0
PREEMPT_S = 15.0
KILL_S = 3.0
"""How long processes of a force-deleted pod live on (measured: 2.8-3.1 s)."""
LONG_S = 45.0
"""How long they may live on where an agent has to tell: longer than the bridge would wait."""
BIND_S = 5.0
"""An extender gives up on a Binding after this."""
MOST_PODS = 10
HEALED_POLLS = 4
"""A pod that Slurm has held its GPUs for so many readings long is owed everything again."""

SETTINGS = Settings(
    policy=Policy(cluster=CLUSTER, granularity=Granularity.GPU),
    slurm_cluster="s",
    owner_uid=OWNER,
    eviction=Eviction(per_minute=20, share=0.5, at_least=4),
)


class Poison(dict[str, str]):
    """Annotations over which our code fails: a fault of ours that one pod brings to light."""

    def get(self, key: str, default: Any = None) -> Any:
        raise ZeroDivisionError(f"poisoned at {key}")


class BrokenPromise(AssertionError):
    """The machine did what it must never do. what: word for the soak's counters."""

    def __init__(self, what: str, text: str) -> None:
        self.what = what
        super().__init__(f"{what}: {text}")


@dataclass
class ModelJob:
    """A job of the model. uid: of a claim of ours; comment, name, user: who it says it is.

    rest: what a gang's claim holds on other nodes than the first. wants: of one that waits in the
    queue, how many members with how many GPUs each; never: nodes that it must not get. made: tells
    it from another of the same id.
    """

    id: int
    node: str
    gpus: tuple[int, ...]
    name: str
    comment: str
    user_id: int
    start: float
    end: float
    state: str = "RUNNING"
    completing_until: float = 0.0
    ended_at: float = 0.0
    revived_at: float = 0.0
    preempted_at: float | None = None
    serial: int = 0
    untold: bool = False
    rest: dict[str, tuple[int, ...]] = field(default_factory=dict)
    wants: tuple[int, int] = (0, 0)
    never: tuple[str, ...] = ()
    made: int = 0

    @property
    def held(self) -> dict[str, tuple[int, ...]]:
        """GPUs by node."""
        return {self.node: self.gpus, **self.rest} if self.node else {}

    def on(self, node: str) -> tuple[int, ...]:
        return self.held.get(node, ())

    @property
    def holds(self) -> bool:
        return self.state in ("RUNNING", "SUSPENDED", "COMPLETING")

    @property
    def uid(self) -> str:
        owner = claim_of(self.record(), CLUSTER, OWNER)
        return "" if owner is None else owner.uid

    def record(self) -> SlurmJob:
        completing = self.state == "COMPLETING"
        base = "CANCELLED" if completing else self.state
        return SlurmJob(
            id=self.id,
            name=self.name,
            comment=self.comment,
            user_id=self.user_id,
            account="",
            partition="",
            qos="",
            state=JobState(base, frozenset({"COMPLETING"} if completing else ())),
            nodes=tuple(self.held),
            gpus=None if completing or self.untold else {n: use(g) for n, g in self.held.items()},
            start=self.start,
            end=self.end,
            preempted_at=self.preempted_at,
        )


def use(gpus: tuple[int, ...]) -> GpuUse:
    return GpuUse((GpuCount("", len(gpus)),) if gpus else (), gpus)


class SlurmModel:
    """slurmctld, exact in what it gives to whom."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.jobs: dict[int, ModelJob] = {}
        self.next_id = 10
        self.serial = 0
        self.boot = now - 1000
        self.down: set[str] = set()
        self.forgets_use: set[str] = set()
        self._saved = (copy.deepcopy(self.jobs), self.next_id)
        self._saved_at = now

    def advance(self, now: float) -> None:
        self.now = now
        for job in list(self.jobs.values()):
            if job.preempted_at is not None and now - job.preempted_at > PREEMPT_S:
                self.cancel(job)
            if job.state == "COMPLETING" and now >= job.completing_until:
                job.state = "CANCELLED"
                job.ended_at = now
            is_over = not job.holds and job.state != "PENDING"
            if is_over and now - job.ended_at > MIN_JOB_AGE_S:
                del self.jobs[job.id]
        self.schedule()
        if now - self._saved_at >= SAVE_S:
            self.save()

    def save(self) -> None:
        self._saved = (copy.deepcopy(self.jobs), self.next_id)
        self._saved_at = self.now

    def owner(self, node: str, gpu: int) -> ModelJob | None:
        for job in self.jobs.values():
            if job.holds and gpu in job.on(node):
                return job
        return None

    def free(self, node: str) -> list[int]:
        return [g for g in range(GPUS) if self.owner(node, g) is None]

    def is_completing(self, node: str) -> bool:
        return any(j.state == "COMPLETING" and node in j.held for j in self.jobs.values())

    def allocate(
        self,
        node: str,
        count: int,
        name: str,
        comment: str,
        user_id: int,
        minutes: int,
        exactly: tuple[int, ...] | None = None,
    ) -> ModelJob | None:
        if node in self.down or self.is_completing(node):
            return None
        free = self.free(node)
        gpus = tuple(free[:count]) if exactly is None else exactly
        if len(gpus) < count or not set(gpus) <= set(free):
            return None
        self.serial += 1
        start = self.now + 1e-6 * self.serial  # no two jobs have the same
        end = self.now + 60 * minutes
        job = ModelJob(self.next_id, node, gpus, name, comment, user_id, start, end)
        job.serial = job.made = self.serial
        self.next_id += 1
        self.jobs[job.id] = job
        return job

    def queue(
        self,
        members: int,
        count: int,
        name: str,
        comment: str,
        user_id: int,
        minutes: int,
        *,
        never: tuple[str, ...] = (),
        starts: bool = True,
    ) -> ModelJob:
        """A job that waits until there is room for all members on other nodes than `never`."""
        self.serial += 1
        start = self.now + 1e-6 * self.serial
        job = ModelJob(self.next_id, "", (), name, comment, user_id, start, start + 60 * minutes)
        job.serial = job.made = self.serial
        job.state, job.wants, job.never = "PENDING", (members, count), never
        self.next_id += 1
        self.jobs[job.id] = job
        if starts:
            self.schedule()
        return job

    def allocate_group(
        self,
        nodes: tuple[str, ...],
        members: int,
        count: int,
        name: str,
        comment: str,
        user_id: int,
        minutes: int,
    ) -> ModelJob | None:
        """A job for all members on exactly these nodes, at once or not at all."""
        # As many on each of the nodes that are asked for.
        given = self._lay(nodes, members, count, members // len(nodes))
        if given is None or set(given) != set(nodes):
            return None
        job = self.queue(members, count, name, comment, user_id, minutes, starts=False)
        self._start(job, given)
        return job

    def schedule(self) -> None:
        """Start what waits and fits, oldest first."""
        for job in self.jobs.values():
            if job.state != "PENDING":
                continue
            members, count = job.wants
            nodes = tuple(name for name in NODES if name not in job.never)
            if (given := self._lay(nodes, members, count, members)) is not None:
                self._start(job, given)

    def _lay(
        self, nodes: tuple[str, ...], members: int, count: int, most: int
    ) -> dict[str, tuple[int, ...]] | None:
        """GPUs by node for all members, each node as full as can be; None: there is no room.

        most: members on one node.
        """
        given: dict[str, tuple[int, ...]] = {}
        for node in nodes:
            if node in self.down or self.is_completing(node):
                continue
            free = self.free(node)
            here = min(members, most, len(free) // count)
            if here:
                given[node] = tuple(free[: here * count])
                members -= here
        return None if members else given

    def _start(self, job: ModelJob, given: dict[str, tuple[int, ...]]) -> None:
        self.serial += 1
        length = job.end - job.start
        job.start = self.now + 1e-6 * self.serial
        job.state, job.end, job.serial = "RUNNING", job.start + length, self.serial
        (job.node, job.gpus), *others = given.items()
        job.rest = dict(others)

    def cancel(self, job: ModelJob) -> None:
        if job.state == "PENDING":
            job.state, job.ended_at = "CANCELLED", self.now
        if job.state in ("RUNNING", "SUSPENDED"):
            job.state = "COMPLETING"
            job.completing_until = self.now + EPILOG_S

    def fail_node(self, node: str) -> None:
        self.down.add(node)
        for job in self.jobs.values():
            if node in job.held and job.holds:
                job.state, job.ended_at = "NODE_FAIL", self.now

    def restart(self, under_reports: bool) -> None:
        """kill -9 and start: back to what was saved last."""
        before = self.jobs
        jobs, self.next_id = copy.deepcopy(self._saved)
        for job in jobs.values():
            was = before.get(job.id)
            if job.holds and (was is None or not was.holds or was.comment != job.comment):
                job.revived_at = self.now
        self.jobs = jobs
        self.boot = max(self.now, self.boot + 1)
        self.forgets_use = set(NODES) if under_reports else set()
        # What completed meanwhile has run its Epilog long ago.
        for job in jobs.values():
            if job.state == "COMPLETING":
                job.completing_until = self.now + 0.5
            elif job.held.keys() & self.down and job.holds:
                job.state, job.ended_at = "NODE_FAIL", self.now
        self.save()

    def snapshot(self, began: float) -> SlurmSnapshot:
        nodes = {}
        for name in NODES:
            used = tuple(
                sorted(
                    g
                    for j in self.jobs.values()
                    if j.state in ("RUNNING", "SUSPENDED")
                    for g in j.on(name)
                )
            )
            if name in self.forgets_use:
                used = used[1:]
            base = "DOWN" if name in self.down else "MIXED" if used else "IDLE"
            flags = {"COMPLETING"} if self.is_completing(name) else set()
            nodes[name] = SlurmNode(
                name=name,
                state=NodeState(base, frozenset(flags)),
                cpus_total=64,
                cpus_used=0,
                memory_mib=100_000,
                memory_used_mib=0,
                gpus=(GpuCount("", GPUS),),
                gpus_used=use(used),
            )
        return SlurmSnapshot(
            began=began,
            ended=self.now,
            config=SlurmConfig("s", "22.05.8", self.boot, told_at=self.now),
            nodes=nodes,
            jobs={j.id: j.record() for j in self.jobs.values()},
        )


@dataclass
class ModelPod:
    """A pod of the model. uses: the GPUs that its containers got when it was bound.

    runs_until: when the processes of a force-deleted pod are gone; None: with the pod.
    fault: Slurm has ended or forgotten a claim that it was promised; ended: not only forgotten;
    taken: its GPUs have been another's since, or its node was down; all until it is healed.
    covered_polls: readings since Slurm has held exactly its GPUs for it without a break.
    stays_until: when the last process ends of a pod that is over by its phase. left_in: `made` of the
    claim that it named when it was over or gone.
    """

    record: PodRecord
    uses: tuple[int, ...] = ()
    is_gone: bool = False
    runs_until: float | None = None
    fault: bool = False
    ended: bool = False
    taken: bool = False
    evicted: bool = False
    covered_polls: int = 0
    dies_at: float | None = None
    stays_until: float = 0.0
    left_in: int = 0

    @property
    def node(self) -> str:
        return self.record.node

    def runs(self, now: float) -> bool:
        """Whether it has processes on a node."""
        if not self.record.node:
            return False
        if self.record.is_over:
            return now < self.stays_until
        return not self.is_gone or (self.runs_until is not None and now < self.runs_until)


@dataclass
class Binding:
    """A Binding under way."""

    uid: str
    node: str
    job_id: int
    gpus: str
    until: float


@dataclass
class World:
    """Everything, and one machine in the middle. `step` does one thing.

    agents: None: no node has one, and none is needed.
    """

    agents: Agents | None = None
    now: float = T0
    slurm: SlurmModel = field(default_factory=lambda: SlurmModel(T0))
    pods: dict[str, ModelPod] = field(default_factory=dict)
    not_ready: set[str] = field(default_factory=set)
    twin: str = ""
    poisoned: set[str] = field(default_factory=set)
    aside: tuple[Aside, ...] = ()
    watch: deque[ev.Event] = field(default_factory=deque)
    actions: list[act.Action] = field(default_factory=list)
    answers: list[ev.Event] = field(default_factory=list)
    bindings: list[Binding] = field(default_factory=list)
    asks: dict[int, str] = field(default_factory=dict)
    late_poll: SlurmSnapshot | None = None
    story: list[str] = field(default_factory=list)
    machine: Machine = field(init=False)
    terms: int = 0
    ahead_s: float = 0.0
    ops: int = 0
    made: int = 0
    steps: int = 0
    issued: dict[int, int] = field(default_factory=dict)
    base_settings: ClassVar[Settings] = SETTINGS
    more_weights: ClassVar[Mapping[str, int]] = {}
    told: set[tuple[int, str, float | None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._start_machine()

    # The operations. `pick` chooses among what is there, `how` in which way.

    def step(self, name: str, pick: int, how: int) -> None:
        self.steps += 1
        self.story.append(f"{self.now - T0:.1f} {name} {pick} {how}")
        getattr(self, name)(pick, how)
        self.check()

    def wait(self, pick: int, how: int) -> None:
        self._advance((0.1, 0.1, 0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 6.0, 25.0)[pick % 10])

    def poll(self, pick: int, how: int) -> None:
        """A reading, at once; or it comes in late, with something in between."""
        snapshot = self.slurm.snapshot(self.now)
        if how % 4 == 0:
            self.late_poll = snapshot
        else:
            self._take_poll(snapshot)

    def poll_wrong(self, pick: int, how: int) -> None:
        """No answer, or one of a Slurm that is not ours and knows nothing."""
        if how % 2:
            self._handle(ev.PollFailed("cut"))
            return
        true = self.slurm.snapshot(self.now)
        config = SlurmConfig("another", true.config.version, true.config.boot_time)
        self._handle(ev.Polled(msgspec.structs.replace(true, config=config, jobs={})))

    def poll_late(self, pick: int, how: int) -> None:
        if self.late_poll is not None:
            snapshot, self.late_poll = self.late_poll, None
            self._take_poll(snapshot)

    def look_queued(self, pick: int, how: int) -> None:
        """Room is made for what waits in Slurm's queue, and the quick look at that tells so.

        A reading that had begun before may come in after it.
        """
        before = self.slurm.snapshot(self.now)
        self.native_ends(pick, how)
        self._advance((0.0, 0.5, 2.0)[pick % 3])
        for job_id, uid in self.machine.queued_jobs.items():
            job = self.slurm.jobs.get(job_id)
            self._handle(ev.JobLooked(uid, job_id, None if job is None else job.record()))
        if how % 2:
            self._handle(ev.Ticked())
            self._take_poll(before)

    def tick(self, pick: int, how: int) -> None:
        self._handle(ev.Ticked())

    def make_pod(self, pick: int, how: int) -> None:
        if sum(not p.is_gone for p in self.pods.values()) >= MOST_PODS:
            return
        self.made += 1
        uid = f"u{self.made}"
        record = PodRecord(
            uid=uid,
            namespace="d",
            name=f"p{pick % 5}",
            phase="Pending",
            gpu=GpuRequest(1 + how % 3),
            cpus=1,
            memory_mib=1,
            created=self.now,
            grace_s=5,
            gates=(keys.GATE,) if how % 5 in (1, 2) else (),
            waiting_on_us=how % 5 == 0,
        )
        self.pods[uid] = ModelPod(record)
        self.watch.append(ev.PodChanged(record))

    def see(self, pick: int, how: int) -> None:
        """The watch tells the machine some of what has happened."""
        for _ in range(1 + how % 6):
            if self.watch:
                self._handle(self.watch.popleft())

    def relist(self, pick: int, how: int) -> None:
        self.watch = deque(e for e in self.watch if isinstance(e, (ev.NodeChanged, ev.NodeGone)))
        self._handle(ev.PodsListed(self._listing()))

    def ask(self, pick: int, how: int) -> None:
        waiting = [
            p
            for p in self.pods.values()
            if not p.is_gone and not p.record.is_over and not p.record.gates
        ]
        if how % 9:
            waiting = [p for p in waiting if not p.node]
        if not waiting:
            return
        pod = waiting[pick % len(waiting)].record
        # Mostly a pod is tried on one node; sometimes the scheduler changes its mind.
        node = pod.nominated or NODES[int(pod.uid[1:]) % 2]
        if how % 5 == 0:
            node = NODES[how % 2]
        if not self._can_use(pod.uid, node):
            return
        self.ops += 1
        self.asks[self.ops] = pod.uid
        self._handle(ev.ClaimAsked(self.ops, pod.uid, pod.namespace, pod.name, node))

    def act(self, pick: int, how: int) -> None:
        """One action under way is done, in one of many ways."""
        if self.actions:
            self._carry_out(self.actions.pop(pick % len(self.actions)), how)

    def answer(self, pick: int, how: int) -> None:
        """One late answer comes in, perhaps twice."""
        if self.answers:
            event = self.answers.pop(pick % len(self.answers))
            self._handle(event)
            # That one is a call of an extender, and not repeated.
            if how % 6 == 0 and not isinstance(event, ev.UnboundReleased):
                self._handle(event)

    def bind(self, pick: int, how: int) -> None:
        if self.bindings:
            self._bind(self.bindings.pop(pick % len(self.bindings)), how)

    def native(self, pick: int, how: int) -> None:
        """A job of somebody else; some say in their comment that they are ours."""
        name, comment, user_id = "train", "", 1001
        if how % 7 == 1:
            uid = f"u{1 + pick % max(1, self.made)}"
            name, comment = f"slurmbridge-{CLUSTER}", write_comment(ClaimId(CLUSTER, uid), "d/x")
        elif how % 7 == 2:
            uid = f"u{1 + pick % max(1, self.made)}"
            name, comment = "slurmbridge-red", write_comment(ClaimId("red", uid), "d/x")
            user_id = OWNER
        node = NODES[pick % 2]
        self.slurm.allocate(node, 1 + how % 2, name, comment, user_id, 100_000)

    def native_ends(self, pick: int, how: int) -> None:
        jobs = [j for j in self.slurm.jobs.values() if j.holds and not j.uid]
        if jobs:
            self.slurm.cancel(jobs[pick % len(jobs)])

    def claim_ends(self, pick: int, how: int) -> None:
        """Scancel, time limit, preemption, or suspension of a claim by Slurm."""
        states = ("RUNNING", "PENDING")
        claims = [j for j in self.slurm.jobs.values() if j.state in states and j.uid]
        if not claims:
            return
        job = claims[pick % len(claims)]
        if job.state == "PENDING":
            self.slurm.cancel(job)
        elif how % 5 == 0:
            job.state = "SUSPENDED"
        elif how % 5 == 1:
            job.preempted_at = self.now
        else:
            self.slurm.cancel(job)
        self._fault(job.uid, ended=True)

    def claim_resumes(self, pick: int, how: int) -> None:
        claims = [j for j in self.slurm.jobs.values() if j.state == "SUSPENDED"]
        if claims:
            claims[pick % len(claims)].state = "RUNNING"

    def restart_slurm(self, pick: int, how: int) -> None:
        before = {(j.id, j.comment) for j in self.slurm.jobs.values() if j.state == "RUNNING"}
        uids = {j.id: j.uid for j in self.slurm.jobs.values()}
        self.slurm.restart(how % 2 == 0)
        after = {(j.id, j.comment) for j in self.slurm.jobs.values() if j.state == "RUNNING"}
        for job_id, _ in before - after:
            self._fault(uids[job_id])
        for pod in self.pods.values():
            job = self._said(pod) if pod.node else None
            if job is not None and job.uid in self._uids(pod):
                job.untold = False  # as `_bind`: it was told, and slurmctld saves that with the job

    def node_fails(self, pick: int, how: int) -> None:
        if how % 3:
            return
        node = NODES[pick % 2]
        for job in self.slurm.jobs.values():
            if node in job.held and job.holds:
                self._fault(job.uid, ended=True)
        self.slurm.fail_node(node)

    def node_returns(self, pick: int, how: int) -> None:
        self.slurm.down.discard(NODES[pick % 2])

    def kubelet(self, pick: int, how: int) -> None:
        """A bound pod starts, ends, or finishes its grace period."""
        pods = [
            p
            for p in self.pods.values()
            if p.node and not p.is_gone and p.node not in self.not_ready
        ]
        if not pods:
            return
        pod = pods[pick % len(pods)]
        if pod.record.is_over:
            if pod.record.deleting_since is not None or how % 2:
                self._vanish(pod)
        elif pod.record.deleting_since is not None:
            if self.now >= (pod.dies_at or 0.0):
                self._over(pod, "Failed", how)
        elif pod.record.phase == "Pending":
            self._change(pod, phase="Running")
        elif how % 4 == 0:
            self._over(pod, "Succeeded", how)

    def _over(self, pod: ModelPod, phase: str, how: int) -> None:
        """A pod is over by its phase. Where an agent has to tell, that may not be true yet."""
        if self.agents is not None:
            pod.stays_until = self.now + (0.0, KILL_S, LONG_S)[how // 4 % 3]
        self._leave(pod)
        self._change(pod, phase=phase)

    def delete(self, pick: int, how: int) -> None:
        pods = [p for p in self.pods.values() if not p.is_gone and p.record.deleting_since is None]
        if pods:
            self._delete(pods[pick % len(pods)])

    def force_delete(self, pick: int, how: int) -> None:
        pods = [p for p in self.pods.values() if not p.is_gone]
        if pods and how % 2 == 0:
            self._vanish(pods[pick % len(pods)])

    def node_silent(self, pick: int, how: int) -> None:
        node = NODES[pick % 2]
        if node in self.not_ready:
            self.not_ready.discard(node)
            for pod in self.pods.values():
                if pod.node == node and pod.is_gone and pod.runs(self.now):
                    pod.runs_until = self.now + KILL_S
        elif how % 3 == 0:
            self.not_ready.add(node)
            for pod in self.pods.values():
                if pod.node == node and pod.is_gone and pod.runs(self.now):
                    pod.runs_until = float("inf")
        self.watch.append(ev.NodeChanged(self._kube_node(node)))

    def node_twin(self, pick: int, how: int) -> None:
        """A second Kubernetes node comes that is one of Slurm's nodes, by its name; or it goes."""
        if self.twin:
            gone, self.twin = self._kube_node(self.twin), ""
            self.watch.append(ev.NodeGone(gone))
        elif how % 2:
            self.twin = f"{NODES[pick % 2]}.twin"
            self.watch.append(ev.NodeChanged(self._kube_node(self.twin)))

    def poison(self, pick: int, how: int) -> None:
        """From now on the bridge fails over a pod."""
        pods = [p for p in self.pods.values() if not p.is_gone]
        if pods and how % 2:
            pod = pods[pick % len(pods)]
            self.poisoned.add(pod.record.uid)
            self._change(pod)

    def kill_machine(self, pick: int, how: int, aside: tuple[Aside, ...] = ()) -> None:
        """The bridge is lost; what it had under way is done by nobody, or unseen."""
        self.aside = aside
        zombies, self.actions = self.actions, []
        self.answers.clear()
        self.asks.clear()
        self.told.clear()
        self.late_poll = None
        for index, action in enumerate(zombies):
            if (how >> (index % 8)) & 1:
                self._effect(action)
        self._start_machine()

    def untell(self, pick: int, how: int) -> None:
        """Slurm does not tell the GPUs of a claim any more, whose pod nobody has bound."""
        claims = [
            j
            for j in self.slurm.jobs.values()
            if j.state == "RUNNING" and j.uid in self.pods and not self.pods[j.uid].node
        ]
        if claims:
            claims[pick % len(claims)].untold = True

    def step_clock(self, pick: int, how: int) -> None:
        """Somebody sets the clock of the bridge's host; Slurm's and time itself stay as they are."""
        self.ahead_s = (0.0, 90.0, -90.0, 3600.0, -3600.0, 1e6)[pick % 6]

    def breaker(self, pick: int, how: int) -> None:
        if self.machine.state.breaker_since is not None:
            self._handle(ev.BreakerAnswered(confirm=how % 2 == 0))

    def deploy(self, pick: int, how: int) -> None:
        """A waiting pod goes the good way, without anything in between."""
        waiting = [
            p
            for p in self.pods.values()
            if not p.is_gone
            and not p.node
            and not p.record.gates
            and p.record.uid not in self.asks.values()
        ]
        if not waiting:
            self.make_pod(pick, 5 * how)
            waiting = list(self.pods.values())[-1:]
        if not waiting or waiting[0].is_gone or waiting[0].node or waiting[0].record.gates:
            return
        uid = waiting[pick % len(waiting)].record.uid
        pod = self.pods[uid].record
        while self.watch:
            self._handle(self.watch.popleft())
        self._take_poll(self.slurm.snapshot(self.now))
        self._all_report()
        self.ops += 1
        self.asks[self.ops] = uid
        self._handle(ev.ClaimAsked(self.ops, uid, pod.namespace, pod.name, NODES[how % 2]))
        for action in [a for a in self.actions if isinstance(a, act.Allocate) and a.uid == uid]:
            if action in self.actions:
                self.actions.remove(action)
                self._carry_out(action, 0)
        for binding in [b for b in self.bindings if b.uid == uid]:
            self.bindings.remove(binding)
            self._bind(binding, 0)
        if self.pods[uid].node:
            self._change(self.pods[uid], phase="Running")
        while self.watch:
            self._handle(self.watch.popleft())

    def report(self, pick: int, how: int) -> None:
        """An agent reports, mostly well; or its report comes later."""
        if self.agents is None:
            return
        look = self.agents.look(self, NODES[pick % 2], registered=how % 7 != 0, whole=how % 5 != 0)
        if how % 4 == 0:
            self.agents.late.append(look)
        else:
            self.agents.bring(self, look, ack=how % 3 != 0)

    def report_late(self, pick: int, how: int) -> None:
        if self.agents is not None and self.agents.late:
            late = self.agents.late
            look = late[pick % len(late)] if how % 3 == 0 else late.pop(pick % len(late))
            self.agents.bring(self, look)

    def agent_lost(self, pick: int, how: int) -> None:
        if self.agents is not None:
            self.agents.lose(self, NODES[pick % 2])

    def hear(self, event: ev.AgentReported | ev.AgentLost, age_s: float) -> None:
        """What an agent says comes in."""
        if isinstance(event, ev.AgentReported):
            event = msgspec.structs.replace(event, age_s=age_s)
        self._handle(event)

    # What follows from them.

    def _start_machine(self) -> None:
        self.terms += 1
        self.machine = Machine(self.settings(), f"t{self.terms}", aside=self.aside)
        if self.agents is not None:
            self.agents.forget()
        self.watch.clear()
        self._handle(ev.TopologyRead(""))
        self._handle(ev.NodesListed(tuple(self._kube_node(n) for n in self._node_names())))
        self._handle(ev.PodsListed(self._listing()))

    def settings(self) -> Settings:
        return msgspec.structs.replace(
            self.base_settings, agents_required=self.agents is not None, gangs_as_one=True
        )

    def _running_on(self, node: str) -> Iterator[tuple[PodRecord, tuple[int, ...]]]:
        """Pods that have processes on a node, and the GPUs of these."""
        for pod in self.pods.values():
            if pod.node == node and pod.runs(self.now):
                yield pod.record, pod.uses

    def _node_names(self) -> tuple[str, ...]:
        return NODES + self._twins()

    def _twins(self) -> tuple[str, ...]:
        return (self.twin,) if self.twin else ()

    def _listing(self) -> tuple[PodRecord, ...]:
        return tuple(p.record for p in self.pods.values() if not p.is_gone)

    def _kube_node(self, name: str) -> KubeNode:
        return KubeNode(
            name=name,
            uid=name,
            ready=name not in self.not_ready,
            unschedulable=False,
            gpus={"nvidia.com/gpu": GPUS},
        )

    def _advance(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 3)
        self.slurm.advance(self.now)
        self.bindings = [b for b in self.bindings if self.now < b.until]

    def _take_poll(self, snapshot: SlurmSnapshot) -> None:
        for pod in self.pods.values():
            if pod.covered_polls:
                pod.covered_polls += 1
            if pod.covered_polls >= HEALED_POLLS and not pod.is_gone and not self._has_left(pod):
                pod.fault = pod.ended = pod.taken = False
        self._handle(ev.Polled(snapshot))

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, (ev.Allocated, ev.Covered)):
            self.told.add((event.claim.job_id, event.uid, event.claim.started))
        try:
            actions = self.machine.handle(event, self.now, self.ahead_s)
        except ZeroDivisionError as error:
            self._begin_anew(error)
            return
        for action in actions:
            self.story.append(f"    -> {_short(action)}")
            self._watch_action(action)
            if isinstance(action, act.Reply):
                self._take_reply(action)
            else:
                self.actions.append(action)
                self.issued[id(action)] = self.slurm.serial

    def _begin_anew(self, error: ZeroDivisionError) -> None:
        """The bridge has failed over a pod: it starts anew without it."""
        found = self.machine.blame(error)
        self._demand(found is not None, "blame", f"nobody is to blame for {error}")
        poisoned = {uid for p in self.poisoned for uid in self._uids(self.pods[p])}
        self._demand(found.key in poisoned, "blame", f"{found} is to blame for {error}")
        self.story.append(f"    {found}")
        self.kill_machine(0, len(self.story), (*self.machine.aside, found))

    def _is_aside(self, pod: ModelPod) -> bool:
        return any(self.machine.state.aside.of_uid(uid) is not None for uid in self._uids(pod))

    def _take_reply(self, reply: act.Reply) -> None:
        uid = self.asks.pop(reply.op, None)
        if uid is None:
            raise BrokenPromise("answers", f"op {reply.op} was answered twice, or never asked")
        if reply.reason:
            return
        job = self.slurm.jobs.get(reply.job_id)
        node = self.machine.state.book[uid].kube_node
        gpus = set(parse_indices(reply.gpus))
        known = self.machine.state.pods | self.machine.state.aside.pods
        for other in self.pods.values():
            is_known = other.record.uid in known and known[other.record.uid].node == node
            if other.record.uid != uid and is_known and other.runs(self.now):
                self._demand(
                    not gpus & set(other.uses), "double_owned", f"{uid} was promised {gpus}"
                )
        if job is None or job.uid not in self._uids(self.pods[uid]):
            self._fault(uid)
        if self.agents is not None:
            ok = self.agents.may_take(node, self.now)
            self._demand(ok, "no_agent", f"{uid} was promised {node}: {self.agents.told}")
        self.bindings.append(Binding(uid, node, reply.job_id, reply.gpus, self.now + BIND_S))

    def _watch_action(self, action: act.Action) -> None:
        """Is this an action that must never be taken?"""
        if isinstance(action, act.Evict):
            pod = self.pods[action.uid]
            pod.evicted |= any(
                mate.fault and (mate.ended or mate.taken) and mate.covered_polls < HEALED_POLLS
                for mate in self._mates(pod)
            )
            self._demand(
                pod.evicted or not pod.runs(self.now), "wrong_evictions", f"{action.uid} is evicted"
            )
        elif isinstance(action, act.Extend):
            # Slurm ends a claim by its own clock, whatever the host's says.
            ok = action.ends >= self.now + 60
            self._demand(ok, "renewed_short", f"{action.job_id} is to end at {action.ends}")
        elif isinstance(action, act.End):
            job = self.slurm.jobs.get(action.job_id)
            if job is None or job.state != "RUNNING" or job.uid != action.claim_id.uid:
                return
            laid = [
                entry.uid
                for entry in self.machine.state.entries_of(job.uid)
                if entry.job_id == job.id and entry.phase in (Phase.HELD, Phase.BOUND)
            ]
            self._demand(not laid, "ended_in_use", f"End of {job.id}, given to {laid}")
            for pod in self._pods_of(job.uid):
                needed = pod.runs(self.now) and self._covers(job, pod)
                if pod.record.group is not None and job.uid != pod.record.uid:
                    # A later gang of the name may have been given what an earlier one still uses:
                    # where slurmctld has forgotten that one's claim, even under the same id. What
                    # is left of pods that are over or gone is in the claim of then, and in no other.
                    is_left = pod.is_gone or pod.record.is_over
                    needed = needed and self._said(pod) is job
                    needed = needed and not (is_left and pod.left_in != job.made)
                others = [
                    j for j in self.slurm.jobs.values() if j.id != job.id and self._covers(j, pod)
                ]
                self._demand(not needed or bool(others), "ended_in_use", f"End of {job.id}")

    def _covers(self, job: ModelJob, pod: ModelPod) -> bool:
        return (
            job.state == "RUNNING"
            and job.uid in self._uids(pod)
            and pod.node in job.held
            and set(pod.uses) <= set(job.on(pod.node))
        )

    def _said(self, pod: ModelPod) -> ModelJob | None:
        """The job that a pod says is its claim."""
        job_id, _, uid = dict(pod.record.annotations).get(keys.CLAIM, "").partition("/")
        return self.slurm.jobs.get(int(job_id)) if uid == pod.record.uid else None

    def _uids(self, pod: ModelPod) -> tuple[str, ...]:
        """UIDs of the claims that a pod may live in: its own, and its gang's."""
        group = pod.record.group
        return (pod.record.uid,) if group is None else (pod.record.uid, group_uid(group.key))

    def _pods_of(self, claim_uid: str) -> list[ModelPod]:
        return [pod for pod in self.pods.values() if claim_uid in self._uids(pod)]

    def _mates(self, pod: ModelPod) -> list[ModelPod]:
        """The pod, and those that go with it."""
        return self._pods_of(self._uids(pod)[-1])

    def _carry_out(self, action: act.Action, how: int) -> None:
        """0-9: well; 10, 11: late answer; 12: twice; 13: done, no answer; 14: not done, no answer
        to tell; 15: never."""
        way = how % 16
        if isinstance(action, act.BuildTopology) and way > 12:
            way = 0  # it is our own thread that does it
        if way == 15 and not isinstance(action, (act.LookJob, act.LookPod)):
            self.story.append(f"    {_short(action)} lost")
            return
        if way in (13, 14):
            if way == 13:
                self._effect(action)
            failed = self._no_answer(action)
            if failed is not None:
                self._handle(failed)
            return
        event = self._effect(action)
        if way == 12:
            second = self._effect(action)
            event = event or second
        if event is None:
            return
        if way in (10, 11):
            self.answers.append(event)
        else:
            self._handle(event)

    def _no_answer(self, action: act.Action) -> ev.Event | None:
        match action:
            case act.Allocate(uid=uid) | act.Queue(uid=uid):
                return ev.AllocateUnknown(uid, 0, "timed out")
            case (
                act.End(claim_id=claim_id, job_id=job_id)
                | act.Extend(claim_id=claim_id, job_id=job_id)
            ):
                return ev.ActionFailed(type(action).__name__, claim_id.uid, job_id, "timed out")
            case (
                act.Cover(uid=uid)
                | act.LookPod(uid=uid)
                | act.Evict(uid=uid)
                | act.QueueGroup(uid=uid)
                | act.AllocateGroup(uid=uid)
            ):
                return ev.ActionFailed(type(action).__name__, uid, 0, "timed out")
            case act.LookJob(uid=uid, job_id=job_id):
                return ev.ActionFailed("LookJob", uid, job_id, "timed out")
            case _:
                return None

    def _effect(self, action: act.Action) -> ev.Event | None:
        """Do it, and give the true answer."""
        match action:
            case act.Allocate(uid=uid, request=request):
                job = self._claim(request, None)
                if job is None:
                    return ev.AllocateRefused(uid, "busy", "Requested nodes are busy")
                return ev.Allocated(uid, self._as_claim(job, request.id))
            case act.AllocateGroup(uid=uid, request=request):
                job = self.slurm.allocate_group(
                    request.nodes,
                    request.members,
                    request.ask.gpu.count,
                    request.id.job_name,
                    write_comment(request.id, request.ref),
                    OWNER,
                    request.ask.minutes,
                )
                if job is None:
                    return ev.GroupRefused(uid, "busy", "Requested nodes are busy")
                return ev.GroupAllocated(uid, job.record())
            case act.QueueGroup(uid=uid, request=request):
                job = self.slurm.queue(
                    request.members,
                    request.ask.gpu.count,
                    request.id.job_name,
                    write_comment(request.id, request.ref),
                    OWNER,
                    request.ask.minutes,
                    never=tuple(NodeSet(request.exclude)),
                    # Slurm looks at its queue at once, or in its next cycle.
                    starts=self.slurm.serial % 2 == 0,
                )
                return ev.GroupQueued(uid, job.id)
            case act.Cover(uid=uid, request=request, indices=indices):
                if self.slurm.is_completing(request.slurm_node):
                    return ev.ActionFailed("Cover", uid, 0, "jobs are ending on the node")
                job = self._claim(request, indices)
                if job is None:
                    self.pods[uid].taken |= request.slurm_node in self.slurm.down
                    return ev.CoverRefused(uid, "indices", "others have them")
                return ev.Covered(uid, self._as_claim(job, request.id))
            case act.End(claim_id=claim_id, job_id=job_id):
                job = self.slurm.jobs.get(job_id)
                if job is not None and job.uid == claim_id.uid:
                    if job.serial > self.issued[id(action)]:
                        # Same pod, same id, another claim: slurmctld has restarted in between.
                        self._fault(job.uid, ended=True)
                    self.slurm.cancel(job)
                return ev.Ended(claim_id.uid, job_id)
            case act.Extend(claim_id=claim_id, job_id=job_id, ends=ends):
                job = self.slurm.jobs.get(job_id)
                if job is None or job.uid != claim_id.uid:
                    return ev.ActionFailed("Extend", claim_id.uid, job_id, "no such job")
                job.end = max(job.end, ends)
                return ev.Extended(claim_id.uid, job_id, job.end)
            case act.BuildTopology(sources=sources):
                return ev.TopologyBuilt(sources, make(sources))
            case act.LookJob(uid=uid, job_id=job_id):
                job = self.slurm.jobs.get(job_id)
                return ev.JobLooked(uid, job_id, None if job is None else job.record())
            case act.LookPod(uid=uid):
                pod = self.pods.get(uid)
                found = None if pod is None or pod.is_gone else pod.record
                return ev.PodLooked(uid, found)
            case act.Evict(uid=uid):
                pod = self.pods[uid]
                if not pod.is_gone and pod.record.deleting_since is None:
                    self._delete(pod)
                return ev.Evicted(uid)
            case act.Lift(uid=uid, kube_node=node, gate=gate, annotations=annotations):
                pod = self.pods[uid]
                if not pod.is_gone and not pod.node:
                    left = tuple(g for g in pod.record.gates if g != gate)
                    refused = pod.record.waiting_on_us and bool(gate)
                    self._annotate(
                        pod, annotations, gates=left, nominated=node, waiting_on_us=refused
                    )
                return ev.Lifted(uid)
            case act.AnnotatePod(uid=uid, annotations=annotations):
                pod = self.pods[uid]
                if not pod.is_gone:
                    self._annotate(pod, annotations)
                return None
            case _:
                return None

    def _claim(self, request: Any, indices: tuple[int, ...] | None) -> ModelJob | None:
        return self.slurm.allocate(
            request.slurm_node,
            request.ask.gpu.count,
            request.id.job_name,
            write_comment(request.id, request.ref),
            OWNER,
            request.ask.minutes,
            exactly=indices,
        )

    def _as_claim(self, job: ModelJob, claim_id: ClaimId) -> Claim:
        return Claim(
            id=claim_id,
            job_id=job.id,
            slurm_node=job.node,
            gpus=use(job.gpus),
            state=JobState("RUNNING"),
            granted=self.now,
            ends=job.end,
            started=job.start,
        )

    def _bind(self, binding: Binding, how: int) -> None:
        pod = self.pods[binding.uid]
        if how % 8 == 7:
            return  # lost on the way; the extender does not know
        can = not pod.is_gone and not pod.node and pod.record.deleting_since is None
        can = can and not pod.record.gates  # the API server refuses it
        if can and how % 8 != 6:
            job = self.slurm.jobs.get(binding.job_id)
            if job is None or job.uid not in self._uids(pod) or job.state != "RUNNING":
                pod.fault = True
            elif job.untold:
                job.untold = False
            pod.uses = parse_indices(binding.gpus)
            self._change(
                pod,
                node=binding.node,
                annotations={
                    **pod.record.annotations,
                    keys.CLAIM: f"{binding.job_id}/{binding.uid}",
                    keys.GPUS: binding.gpus,
                },
            )
        elif pod.node != binding.node or pod.is_gone:
            self.answers.append(ev.UnboundReleased(binding.uid, binding.job_id))

    def _annotate(
        self, pod: ModelPod, annotations: Mapping[str, str | None], **fields: Any
    ) -> None:
        merged = {**pod.record.annotations, **annotations}
        kept = {k: v for k, v in merged.items() if v is not None}
        self._change(pod, annotations=kept, **fields)

    def _change(self, pod: ModelPod, **fields: Any) -> None:
        if pod.record.uid in self.poisoned:
            fields["annotations"] = Poison(fields.get("annotations", pod.record.annotations))
        pod.record = msgspec.structs.replace(pod.record, **fields)
        self.watch.append(ev.PodChanged(pod.record))

    def _delete(self, pod: ModelPod) -> None:
        if not pod.node:
            self._vanish(pod)
            return
        pod.dies_at = self.now + 2
        self._change(pod, deleting_since=self.now)

    def _vanish(self, pod: ModelPod) -> None:
        if pod.runs(self.now):
            kill_s = KILL_S if self.agents is None or len(self.story) % 3 else LONG_S
            pod.runs_until = float("inf") if pod.node in self.not_ready else self.now + kill_s
        self._leave(pod)
        pod.is_gone = True
        self.watch.append(ev.PodGone(pod.record))

    def _leave(self, pod: ModelPod) -> None:
        """From now on only what is left of it needs a claim."""
        if not pod.record.is_over:
            job = self._said(pod)
            pod.left_in = 0 if job is None else job.made

    def _has_left(self, pod: ModelPod) -> bool:
        """Whether processes of an earlier life of a pod may still run."""
        return False

    def _fault(self, uid: str, ended: bool = False) -> None:
        for pod in self._pods_of(uid):
            pod.fault, pod.ended = True, pod.ended or ended
            pod.covered_polls = 0

    # What must hold at every moment.

    def _demand(self, fact: bool, what: str, text: str) -> None:
        if not fact:
            raise BrokenPromise(what, text)

    def check(self) -> None:
        for pod in self.pods.values():
            if not pod.runs(self.now):
                continue
            if any(self._covers(j, pod) for j in self.slurm.jobs.values() if not j.preempted_at):
                pod.covered_polls = pod.covered_polls or 1
            else:
                pod.covered_polls = 0
            for gpu in pod.uses:
                owner = self.slurm.owner(pod.node, gpu)
                mine = owner is not None and owner.uid in self._uids(pod)
                pod.taken |= not mine and (owner is not None or pod.node in self.slurm.down)
                self._demand(
                    mine or pod.fault,
                    "double_owned",
                    f"GPU {gpu} of {pod.node} is used by {pod.record.uid}, owner: {owner}",
                )
            for other in self.pods.values():
                shared = set(pod.uses) & set(other.uses)
                ok = other is pod or other.node != pod.node or not other.runs(self.now)
                ok = ok or pod.fault or other.fault or not shared
                self._demand(ok, "double_owned", f"{pod.record.uid}, {other.record.uid}: {shared}")
        self._check_book()
        self._check_view()

    def _check_book(self) -> None:
        """The indexes of the book agree with it."""
        state = self.machine.state
        by_node = {(e.slurm_node, e.uid) for e in state.book.values()}
        found = {(n, u) for n, entries in state.by_node.items() for u in entries}
        self._demand(by_node == found, "book", f"by_node: {by_node ^ found}")
        for job_id, uid in state.by_job.items():
            ok = any(entry.job_id == job_id for entry in state.entries_of(uid))
            self._demand(ok, "book", f"by_job: {job_id} {uid}")
        sharing = {(g, u) for g, uids in state.sharing.items() for u in uids}
        wanted = {(e.group, e.uid) for e in state.book.values() if e.group}
        self._demand(sharing == wanted, "book", f"sharing: {sharing ^ wanted}")
        held = {e.uid for e in state.book.values() if e.phase in ("held", "queued")}
        self._demand(held == set(state.held), "book", f"held: {held ^ set(state.held)}")
        for entry in state.book.values():
            ok = not entry.waiters or entry.phase == "asking"
            self._demand(ok, "answers", f"{entry.uid} has waiters in phase {entry.phase}")
            if entry.job_id and entry.phase not in ("doubt", "lost"):
                ok = state.by_job.get(entry.job_id) == entry.claim_uid
                self._demand(ok, "book", f"job {entry.job_id} of {entry.uid} is not in by_job")

    def _check_view(self) -> None:
        state = self.machine.state
        if not state.is_synced or state.snapshot is None:
            return
        publish.refresh(state)
        for name in NODES:
            ledger, view = state.ledgers[name], state.views.get(name)
            free = set(ledger.in_state(GpuState.FREE))
            if name not in state.kube_of:
                free = set()  # nobody knows which Kubernetes node it is: it offers nothing
            for uid, known in state.pods.items():
                pod = self.pods[uid]
                if known.node == name and not known.is_over and pod.runs(self.now):
                    text = f"{uid} uses {pod.uses} of {name}, free: {free}"
                    self._demand(not free & set(pod.uses), "freed_in_view", text)
            for uid, known in state.aside.pods.items():
                if known.node == name and not known.is_over and self.pods[uid].runs(self.now):
                    offers = view is not None and view.free_total
                    taken = free & set(self.pods[uid].uses) if offers else ()
                    self._demand(not taken, "freed_in_view", f"{uid} is set aside and uses {taken}")
            for job in self.slurm.jobs.values():
                is_known = (
                    job.start < state.snapshot.began and job.revived_at < state.snapshot.began
                ) or ((job.id, job.uid, job.start) in self.told and not job.revived_at)
                if name in job.held and job.holds and is_known:
                    text = f"job {job.id} holds {job.on(name)} of {name}, free: {free}"
                    self._demand(not free & set(job.on(name)), "freed_in_view", text)
            offered = 0 if view is None else view.free_total
            self._demand(offered <= len(free), "freed_in_view", f"view of {name}")

    # What must come true in the end.

    def settle(self, seconds: int = 260) -> None:
        """No more bad luck: everything is answered, read and carried out for a while."""
        self.story.append(f"{self.now - T0:.1f} settle")
        self.slurm.down.clear()
        if self.twin:
            self.node_twin(0, 0)
        for node in sorted(self.not_ready):
            self.node_silent(NODES.index(node), 0)
        for job in self.slurm.jobs.values():
            if job.state == "SUSPENDED":
                job.state = "RUNNING"
            if job.preempted_at is not None:
                self.slurm.cancel(job)
        for second in range(seconds):
            if second == seconds - 120:
                self._check_nobody_waits_beside_room()
                # The planner would go on for ever to place pods that wait.
                for pod in self.pods.values():
                    if not pod.is_gone and not pod.node:
                        self._delete(pod)
            self.go_well()
        self._check_settled()

    def go_well(self) -> None:
        """One second in which everything is answered, read and carried out."""
        self._schedule()
        while self.watch:
            self._handle(self.watch.popleft())
        for event in self.answers:
            self._handle(event)
        self.answers.clear()
        self.poll(0, 1)
        self._all_report()
        self.tick(0, 0)
        for _ in range(200):
            if not self.actions:
                break
            self.act(0, 0)
        for binding in self.bindings:
            self._bind(binding, 0)
        self.bindings.clear()
        for pod in list(self.pods.values()):
            mine = [
                p
                for p in self.pods.values()
                if p.node and not p.is_gone and p.node not in self.not_ready
            ]
            if pod.record.deleting_since is not None and pod in mine:
                self.kubelet(mine.index(pod), 1)
        if self.machine.state.breaker_since is not None:
            self._handle(ev.BreakerAnswered(confirm=True))
        self._advance(1.0)
        self.check()

    def _all_report(self) -> None:
        if self.agents is not None:
            for node in NODES:
                look = self.agents.look(self, node, registered=True, whole=True)
                self.agents.bring(self, look)

    def _check_nobody_waits_beside_room(self) -> None:
        """No pod behind the gate waits for ever while a node would take it."""
        state = self.machine.state
        publish.refresh(state)
        room = max(
            (v.free_total for v in state.views.values() if v.agent and not v.blocked), default=0
        )
        for uid, known in state.pods.items():
            alone = keys.GATE in known.gates and known.group is None and not known.node
            if alone and not known.is_over and known.deleting_since is None:
                fits = known.gpu is not None and known.gpu.count <= room
                self._demand(
                    uid in state.book or not fits, "stuck", f"{uid} waits, {room} are free"
                )

    def _can_use(self, uid: str, node: str) -> bool:
        """Whether kube-scheduler finds nothing against a node."""
        return True

    def _schedule(self) -> None:
        """kube-scheduler binds the pods that a node was nominated for."""
        for uid, held in list(self.machine.state.held.items()):
            pod = self.pods[uid]
            is_open = not pod.is_gone and not pod.node and not pod.record.gates
            is_open = is_open and self._can_use(uid, held.kube_node)
            if is_open and pod.record.nominated == held.kube_node and uid not in self.asks.values():
                self.ops += 1
                self.asks[self.ops] = uid
                record = pod.record
                self._handle(
                    ev.ClaimAsked(self.ops, uid, record.namespace, record.name, held.kube_node)
                )

    def _check_settled(self) -> None:
        state = self.machine.state
        claims: dict[str, list[ModelJob]] = {}
        for job in self.slurm.jobs.values():
            if (job.holds or job.state == "PENDING") and job.uid:
                claims.setdefault(job.uid, []).append(job)
        for uid, jobs in claims.items():
            if state.aside.of_uid(uid) is not None:
                continue
            needs = any(pod.runs(self.now) for pod in self._pods_of(uid))
            # It may be kept for fear of what a pod that is set aside uses beside it.
            nodes = {node for job in jobs for node in job.held}
            needs |= any(self._is_aside(p) and p.node in nodes for p in self.pods.values())
            self._demand(needs, "leaked_claims", f"{jobs} of {uid}, whose pod needs none")
            self._demand(len(jobs) == 1, "leaked_claims", f"{uid} has several: {jobs}")
        for pod in self.pods.values():
            if pod.runs(self.now) and not self._is_aside(pod):
                mine = [j for uid in self._uids(pod) for j in claims.get(uid, [])]
                jobs = [j for j in mine if self._covers(j, pod)]
                ok = len(jobs) == 1
                self._demand(ok, "uncovered", f"{pod.record.uid} runs, claims: {jobs}")
                notes = dict(pod.record.annotations)
                written = notes.get(keys.CLAIM)
                self._demand(
                    written == f"{jobs[0].id}/{pod.record.uid}"
                    and notes.get(keys.GPUS) == format_indices(pod.uses),
                    "annotations",
                    f"{pod.record.uid} says {written}, not {jobs[0].id}",
                )
        self._demand(not self.asks, "answers", f"never answered: {self.asks}")
        self._demand(not state.ending and not state.orphans, "leaked_state", "ending, orphans")
        self._demand(not state.waiting.tickets, "leaked_state", f"{state.waiting.tickets}")
        for entry in state.book.values():
            pod = self.pods[entry.uid]
            ok = entry.phase == "bound" and pod.runs(self.now)
            ok = ok or (entry.phase == "aside" and self._is_aside(pod) and not pod.is_gone)
            self._demand(ok, "leaked_state", f"{entry}")


def _short(action: act.Action) -> str:
    text = repr(action)
    return text if len(text) < 160 else text[:157] + "..."


AGENT_WEIGHTS: dict[str, int] = {"report": 20, "report_late": 4, "agent_lost": 2}
"""Operations of a world with agents, besides."""
WEIGHTS: dict[str, int] = {
    "wait": 14,
    "poll": 14,
    "poll_late": 4,
    "look_queued": 2,
    "poll_wrong": 1,
    "tick": 8,
    "make_pod": 7,
    "see": 14,
    "relist": 1,
    "ask": 10,
    "deploy": 8,
    "act": 26,
    "answer": 4,
    "bind": 12,
    "native": 5,
    "native_ends": 4,
    "claim_ends": 2,
    "claim_resumes": 1,
    "restart_slurm": 3,
    "node_fails": 1,
    "node_returns": 2,
    "kubelet": 10,
    "delete": 2,
    "force_delete": 2,
    "node_silent": 2,
    "node_twin": 1,
    "poison": 1,
    "kill_machine": 1,
    "breaker": 1,
    "step_clock": 1,
    "untell": 1,
}
"""How often each operation happens in a soak; the keys are all operations."""
