"""The exact world of core_world.py in which the API server is set back to an older state.

Somebody restores its etcd from a backup: pods that were bound since are unbound again, pods that were
deleted since are there again, pods that were made since have never been. What runs on the nodes runs
on until each kubelet has seen that, and the watches begin anew with a list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool.ledger import GpuState
from slurmbridge.pool.record import PodRecord
from tests.support.core_world import KILL_S, LONG_S, ModelJob, ModelPod, World
from tests.support.gang_world import GangWorld

OLDEST_S = 120.0
"""A backup that is older is not used."""
STOPS_S = (KILL_S, LONG_S, 100.0)
"""How long what was bound since the backup may run on; longer than a while where agents tell."""


@dataclass
class Left:
    """What runs on of a pod that is unbound again.

    made: `ModelJob.made` of the claim that it lives in, its gang's or its own; 0: none.
    """

    pod: ModelPod
    node: str
    gpus: tuple[int, ...]
    until: float
    made: int = 0


class RestoredWorld(World):
    """A world of single pods whose API server is set back.

    backup: the pods as they were then, by UID, and when that was. left: what runs on.
    """

    more_weights: ClassVar[Mapping[str, int]] = {"back_up": 5, "set_back": 3}

    def __post_init__(self) -> None:
        self.backup: dict[str, PodRecord] = {}
        self.backed_up = self.now
        self.left: list[Left] = []
        super().__post_init__()

    # The operations.

    def back_up(self, pick: int, how: int) -> None:
        self.backup = {u: p.record for u, p in self.pods.items() if not p.is_gone}
        self.backed_up = self.now

    def set_back(self, pick: int, how: int) -> None:
        """With it the bridge may begin anew, as it does when it could not renew its Lease."""
        if how % 3 or self.now - self.backed_up > OLDEST_S:
            return
        for uid, pod in self.pods.items():
            was = self.backup.get(uid)
            if was is not None:
                self._restore(pod, was, how)
            elif not pod.is_gone:
                self._vanish(pod)  # as if it had been deleted by force, and nobody is told
        if how // 3 % 2:
            self.kill_machine(0, how)
            return
        nodes = [e for e in self.watch if isinstance(e, (ev.NodeChanged, ev.NodeGone))]
        self.watch = deque([*nodes, ev.PodsListed(self._listing())])

    def _restore(self, pod: ModelPod, was: PodRecord, how: int) -> None:
        now = pod.record
        if now.is_over and was.node:
            # Its kubelet knows better, and writes it again.
            was = msgspec.structs.replace(was, phase=now.phase)
        if now.node and not was.node and pod.runs(self.now):
            stops_s = KILL_S if self.agents is None else STOPS_S[how // 7 % 3]
            silent = now.node in self.not_ready
            until = float("inf") if silent else self.now + stops_s
            if now.is_over:
                until = pod.stays_until
            elif pod.is_gone and pod.runs_until is not None:
                until = pod.runs_until
            job = self._said(pod)
            made = pod.left_in if now.is_over or pod.is_gone else 0 if job is None else job.made
            self.left.append(Left(pod, now.node, pod.uses, until, made))
        if not was.node:
            pod.uses, pod.covered_polls, pod.runs_until = (), 0, None
        elif pod.is_gone and not pod.runs(self.now) and not was.is_over:
            # Its kubelet starts it once more, where an agent does not keep it from that.
            its = [j for j in self.slurm.jobs.values() if j.uid == pod.record.uid]
            its += [] if (said := self._said(pod)) is None or said in its else [said]
            covered = any(self._covers(j, pod) for j in its)
            if self.agents is not None and not covered:
                was = msgspec.structs.replace(was, phase="Failed")
            pod.fault = pod.ended = pod.fault or not covered
            pod.taken, pod.covered_polls, pod.evicted = not covered, 0, False
        pod.is_gone, pod.record = False, was
        if was.node:
            pod.runs_until = None
        pod.dies_at = self.now + 2 if was.deleting_since is not None else None

    def breaker(self, pick: int, how: int) -> None:
        """A person looks before he says that all pods are where they were."""
        state = self.machine.state
        moved = [
            uid
            for uid in state.missed
            if self.pods[uid].is_gone or self.pods[uid].node != state.pods[uid].node
        ]
        super().breaker(pick, 0 if moved else how)

    # What follows from them.

    def _still_left(self) -> list[Left]:
        self.left = [left for left in self.left if self.now < left.until]
        return self.left

    def _has_left(self, pod: ModelPod) -> bool:
        return any(left.pod is pod for left in self._still_left())

    def _running_on(self, node: str) -> Iterator[tuple[PodRecord, tuple[int, ...]]]:
        yield from super()._running_on(node)
        for left in self._still_left():
            if left.node == node:
                yield left.pod.record, left.gpus

    def _over(self, pod: ModelPod, phase: str, how: int) -> None:
        """A kubelet lets nothing of a pod begin before all of it from before has ended."""
        if all(left.pod is not pod or left.node != pod.node for left in self._still_left()):
            super()._over(pod, phase, how)

    def node_silent(self, pick: int, how: int) -> None:
        super().node_silent(pick, how)
        for left in self._still_left():
            if left.node in self.not_ready:
                left.until = float("inf")
            elif left.until == float("inf"):
                left.until = self.now + KILL_S

    def _watch_action(self, action: act.Action) -> None:
        super()._watch_action(action)
        if not isinstance(action, act.End):
            return
        job = self.slurm.jobs.get(action.job_id)
        if job is None or job.state != "RUNNING" or job.uid != action.claim_id.uid:
            return
        for left in self._still_left():
            if self._holds_for(job, left) and not left.pod.fault:
                others = [j for j in self.slurm.jobs.values() if j is not job]
                ok = any(self._holds_for(other, left) for other in others)
                self._demand(ok, "ended_in_use", f"End of {job.id}: {left.pod.record.uid} is left")

    def _holds_for(self, job: ModelJob, left: Left) -> bool:
        is_its = job.state == "RUNNING" and self._is_its(job, left)
        return is_its and set(left.gpus) <= set(job.on(left.node))

    def _is_its(self, job: ModelJob, left: Left) -> bool:
        """Whether a job is the claim of what is left; another one of its gang's name is not."""
        uid = left.pod.record.uid
        return job.uid == uid or (job.uid in self._uids(left.pod) and job.made == left.made)

    def check(self) -> None:
        super().check()
        for left in self._still_left():
            for gpu in left.gpus:
                owner = self.slurm.owner(left.node, gpu)
                mine = owner is not None and self._is_its(owner, left)
                text = f"GPU {gpu} of {left.node} is used by what is left of {left.pod.record.uid}"
                self._demand(mine or left.pod.fault, "double_owned", f"{text}, owner: {owner}")
            for pod in self.pods.values():
                shared = set(left.gpus) & set(pod.uses)
                # Of a pod that is bound again nothing begins before all of it has ended.
                ok = pod is left.pod or pod.node != left.node or not pod.runs(self.now)
                ok = ok or left.pod.fault or pod.fault or not shared
                text = f"{pod.record.uid}, and what is left of {left.pod.record.uid}: {shared}"
                self._demand(ok, "double_owned", text)

    def _check_view(self) -> None:
        super()._check_view()
        state = self.machine.state
        for left in self._still_left():
            ledger = state.ledgers.get(left.node)
            if state.is_synced and ledger is not None and not left.pod.fault:
                shared = set(ledger.in_state(GpuState.FREE)) & set(left.gpus)
                text = f"what is left of {left.pod.record.uid} uses {shared} of {left.node}"
                self._demand(not shared, "freed_in_view", text)


class RestoredGangWorld(RestoredWorld, GangWorld):
    """The same with gangs: a member that is unbound again has its share of a claim with others."""

    more_weights: ClassVar[Mapping[str, int]] = {
        **GangWorld.more_weights,
        **RestoredWorld.more_weights,
    }

    def set_back(self, pick: int, how: int) -> None:
        """Every second backup is from just before gangs were let go that are bound by now."""
        if how % 3 == 0 and pick % 2:
            self.back_up(pick, how)
            for _ in range(2 + pick // 2 % 6):
                self.go_well()
        super().set_back(pick, how)
