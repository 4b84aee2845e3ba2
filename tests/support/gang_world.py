"""The exact world of core_world.py with pods that come as gangs of two or three: all or none.

Whatever happens in between: gates come off only while every member that is there has its claim, or
the gang has begun already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core.settings import Eviction, Settings
from slurmbridge.core.state import UNKNOWN_PROMISES
from slurmbridge.pool import keys
from slurmbridge.pool.claim import group_uid
from slurmbridge.pool.group import Group
from slurmbridge.pool.record import GpuRequest, KubeNode, PodRecord
from tests.support.core_world import MOST_PODS, NODES, SETTINGS, ModelPod, World

OTHER = "x/quota"


class GangWorld(World):
    """All pods are members of gangs."""

    base_settings: ClassVar[Settings] = msgspec.structs.replace(
        SETTINGS, eviction=Eviction(per_minute=4, share=0.01, at_least=1)
    )
    gangs_made = 0
    more_weights: ClassVar[Mapping[str, int]] = {
        "look_queued": 12,
        "make_again": 3,
        "cancel_places": 2,
        "cannot_use": 3,
        "other_gate_off": 3,
        "move_node": 2,
    }

    def __post_init__(self) -> None:
        self.evicted: list[tuple[int, float, str, str]] = []
        self.confirmed: set[str] = set()
        self.let_in: set[str] = set()
        self.zones: dict[str, str] = {}
        self.useless: dict[tuple[str, str], float] = {}
        self.wanted: set[tuple[str, str]] = set()
        super().__post_init__()

    def make_pod(self, pick: int, how: int) -> None:
        size = 2 + pick % 2
        pods = size + (how % 7 == 6)  # one more than have to start together
        if sum(not p.is_gone for p in self.pods.values()) + pods > MOST_PODS:
            return
        self.gangs_made += 1
        group = Group("own", "d", f"g{self.gangs_made}", size=size)
        # One member may be behind a gate of others too, or have none at all.
        first_gates = {3: (keys.GATE, OTHER), 5: (OTHER,), 7: ()}.get(how % 11, (keys.GATE,))
        for rank in range(pods):
            self._make(
                PodRecord(
                    uid="",
                    namespace="d",
                    name=f"g{self.gangs_made}-{rank}",
                    phase="Pending",
                    gpu=GpuRequest(1 + how % 3),
                    # Members that differ have a claim each, others one for all.
                    cpus=1 + (rank if how % 5 == 0 else 0),
                    memory_mib=1,
                    grace_s=5,
                    gates=(keys.GATE,) if rank else first_gates,
                    waiting_on_us=not rank and not first_gates,
                    group=msgspec.structs.replace(group, rank=(rank,)),
                    annotations={keys.MODE: "queued"} if how % 4 < 2 else {},
                )
            )

    def _make(self, like: PodRecord) -> None:
        self.made += 1
        record = msgspec.structs.replace(like, uid=f"u{self.made}", created=self.now)
        self.pods[record.uid] = ModelPod(record)
        self.watch.append(ev.PodChanged(record))

    def deploy(self, pick: int, how: int) -> None:
        self.make_pod(pick, how)

    def make_again(self, pick: int, how: int) -> None:
        """A controller makes members of a gang again: those that are over or gone.

        Before that some, or all, may be deleted by force; the bridge may see none of it, and only
        find what there is after a restart.
        """
        keys_of = dict.fromkeys(pod.record.group.key for pod in self.pods.values())
        begun = {pod.record.group.key for pod in self.pods.values() if pod.runs(self.now)}
        choice = [key for key in keys_of if key in begun] or list(keys_of)[-3:]
        if not choice:
            return
        key = choice[pick % len(choice)]
        mates = [pod for pod in self.pods.values() if pod.record.group.key == key]
        last = {pod.record.group.rank: pod for pod in mates}
        if how % 4 < 2:
            for pod in last.values():
                if not pod.is_gone and (how % 4 == 0 or pod.record.group.rank == (how // 4 % 2,)):
                    self._vanish(pod)
        for pod in last.values():
            there = sum(not p.is_gone for p in self.pods.values())
            if (pod.is_gone or pod.record.is_over) and there < MOST_PODS:
                self._make(
                    msgspec.structs.replace(
                        pod.record,
                        phase="Pending",
                        node="",
                        nominated="",
                        gates=(keys.GATE,),
                        deleting_since=None,
                        bound_at=None,
                        waiting_on_us=False,
                        annotations={
                            k: v for k, v in pod.record.annotations.items() if k == keys.MODE
                        },
                    )
                )
        if how % 3 == 0:
            self.kill_machine(0, 0)
            for _ in range(how // 3 % 6):
                self.go_well()

    def untell(self, pick: int, how: int) -> None:
        """As for single pods; or of a gang's claim that none of its members was bound with."""
        if how % 2:
            super().untell(pick, how)
            return
        groups = {group_uid(pod.record.group.key) for pod in self.pods.values()}
        lived_in = {
            dict(pod.record.annotations).get(keys.CLAIM, "").partition("/")[0]
            for pod in self.pods.values()
        }
        claims = [
            job
            for job in self.slurm.jobs.values()
            if job.state == "RUNNING" and job.uid in groups and str(job.id) not in lived_in
        ]
        if claims:
            claims[pick % len(claims)].untold = True

    def move_node(self, pick: int, how: int) -> None:
        """A node stands elsewhere: another generation of the topology is built meanwhile."""
        node = NODES[pick % 2]
        self.zones[node] = f"z{how % 3}"
        self.watch.append(ev.NodeChanged(self._kube_node(node)))

    def _kube_node(self, name: str) -> KubeNode:
        labels = {"topology.kubernetes.io/zone": zone} if (zone := self.zones.get(name)) else {}
        return msgspec.structs.replace(super()._kube_node(name), labels=labels)

    def cancel_places(self, pick: int, how: int) -> None:
        """Somebody cancels what waits in Slurm's queue, all at once or only some of it."""
        for job in list(self.slurm.jobs.values()):
            if job.state == "PENDING" and (how % 2 or (job.id + pick) % 2):
                self.slurm.cancel(job)
        for _ in range(how // 2 % 3):
            self.go_well()

    def _gang_of(self, pod: ModelPod) -> str:
        """Key of the gang that it was let go with."""
        return pod.record.group.key

    def _evicts(self, pod: ModelPod) -> None:
        """So many losses a minute, and gangs without a person's word, as the settings say."""
        uid, key, state = pod.record.uid, self._gang_of(pod), self.machine.state
        again = {u for term, _, u, _ in self.evicted if term == self.terms}
        if uid not in again:
            self.evicted.append((self.terms, self.now, uid, key))
        recent = [e for e in self.evicted if e[0] == self.terms and self.now - e[1] < 60]
        budget = state.settings.eviction
        losses = {key for *_, key in recent}
        self._demand(len(losses) <= budget.per_minute, "too_many_evictions", f"{recent}")
        gangs = {key for *_, key in recent} - self.confirmed
        self._demand(len(gangs) <= budget.at_least, "no_breaker", f"{gangs} go")

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.BreakerAnswered) and event.confirm:
            state = self.machine.state  # what is known by now may go
            lost = {uid for uid, entry in state.book.items() if entry.phase == "lost"}
            self.confirmed |= {self._gang_of(self.pods[uid]) for uid in lost}
            self.confirmed |= {key for key, gang in state.waiting.gangs.items() if gang.cancelled}
        if isinstance(event, ev.ClaimAsked):
            self.wanted.add((event.uid, event.kube_node))
        super()._handle(event)

    def _start_machine(self) -> None:
        self.confirmed = set()
        self.wanted.clear()
        super()._start_machine()

    def cannot_use(self, pick: int, how: int) -> None:
        """kube-scheduler finds that it cannot use the node of a claim for its pod."""
        state = self.machine.state
        pods = [
            pod
            for uid, pod in self.pods.items()
            if not pod.is_gone and not pod.node and not pod.record.gates and uid in state.book
        ]
        if pods:
            pod = pods[pick % len(pods)]
            node = state.book[pod.record.uid].kube_node
            self.useless[pod.record.uid, node] = self.now + 20 * (how % 5)
            self._change(pod, waiting_on_us=True, claim_unseen=how % 4 == 0)

    def other_gate_off(self, pick: int, how: int) -> None:
        """Somebody else takes his gate off a pod."""
        pods = [p for p in self.pods.values() if not p.is_gone and OTHER in p.record.gates]
        if pods:
            pod = pods[pick % len(pods)]
            self._change(pod, gates=tuple(g for g in pod.record.gates if g != OTHER))

    def settle(self, seconds: int = 260) -> None:
        for _ in self.pods:
            self.other_gate_off(0, 0)
        super().settle(seconds)

    def _can_use(self, uid: str, node: str) -> bool:
        return self.now >= self.useless.get((uid, node), 0.0)

    def _take_reply(self, reply: act.Reply) -> None:
        uid = self.asks.get(reply.op, "")
        super()._take_reply(reply)
        if reply.reason or not uid:
            return
        state, key = self.machine.state, self.pods[uid].record.group.key
        mates = [p for p in self.pods.values() if p.record.group.key == key]
        book = {m.record.uid: state.book.get(m.record.uid) for m in mates}
        is_begun = key in self.let_in or any(m.node for m in mates)
        is_begun |= any(e is not None and e.promised >= UNKNOWN_PROMISES for e in book.values())
        self.let_in.add(key)
        may = 0
        for mate in mates:
            known = state.pods.get(mate.record.uid)
            if known is None or known.is_over or known.deleting_since is not None:
                continue
            entry = book[known.uid]
            ok = entry is not None and entry.phase == "held"
            may += ok and (known.uid, entry.kube_node) in self.wanted
        size = self.pods[uid].record.group.size
        self._demand(is_begun or may >= size, "partial_gang", f"{uid} may be bound, {may} may")

    def _watch_action(self, action: act.Action) -> None:
        super()._watch_action(action)
        if isinstance(action, act.Evict):
            self._evicts(self.pods[action.uid])
        if not isinstance(action, act.Lift) or not action.gate:
            return
        state = self.machine.state
        key = self.pods[action.uid].record.group.key
        known = [p for p in state.pods.values() if p.group is not None and p.group.key == key]
        begun = [p for p in known if keys.GATE not in p.gates]
        begun += [p for p in self.pods.values() if p.record.group.key == key and not p.record.gates]
        claimed = 0
        for pod in known:
            if pod.deleting_since is not None or pod.is_over:
                continue
            entry = state.book.get(pod.uid)
            claimed += bool(pod.node) or (entry is not None and entry.phase == "held")
        enough = claimed >= known[0].group.size
        self._demand(enough or bool(begun), "partial_gang", f"{action.uid}: {claimed} have theirs")

    def _check_nobody_waits_beside_room(self) -> None:
        """No gang that is complete waits for ever while the nodes would take all of it."""
        super()._check_nobody_waits_beside_room()
        state = self.machine.state
        free = [v.free_total for v in state.views.values() if v.agent and not v.blocked]
        for gang in state.waiting.gangs.values():
            pods = [state.pods[uid] for uid in gang.members if uid in state.pods]
            if len(pods) < (gang.size or 99) or gang.cancelled or gang.uid in state.waiting.tickets:
                continue
            is_idle = all(keys.GATE in pod.gates and pod.uid not in state.book for pod in pods)
            # What is found under its name comes first.
            if is_idle and not any(f.uid == gang.uid for f in state.waiting.adopted.values()):
                room = sum(count // pods[0].gpu.count for count in free)
                self._demand(room < gang.size, "stuck", f"{gang.key} waits, free are {free}")

    def _check_settled(self) -> None:
        super()._check_settled()
        for pod in self.pods.values():
            group = pod.record.group
            if pod.is_gone or not pod.record.gates:
                continue
            held = self.machine.state.book.get(pod.record.uid)
            self._demand(held is None, "leaked_claims", f"{group.key} waits and holds {held}")


class RestlessGangWorld(GangWorld):
    """Gangs are made again, and Slurm tells no GPUs of their claims, far more often."""

    more_weights: ClassVar[Mapping[str, int]] = {
        **GangWorld.more_weights,
        "make_again": 6,
        "untell": 12,
    }
