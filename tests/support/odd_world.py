"""The exact world of core_world.py in which names, lists and time limits go wrong besides.

Labels of nodes change, Node objects are deleted while their machines run on, a list of the API
server lacks pods or nodes that are there, and Slurm ends what is at its time limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core.audit import END_SPARE_S
from slurmbridge.core.settings import Settings
from slurmbridge.pool import keys
from slurmbridge.pool.claim import group_uid
from slurmbridge.pool.group import Group
from slurmbridge.pool.record import KubeNode
from tests.support.core_world import KILL_S, NODES, ModelPod, World
from tests.support.gang_world import GangWorld

LABEL = "example.com/slurm"
MINUTES = 4
DURATION = "3m"


class Odd:
    """What goes wrong besides: mixed into a world.

    labels: Slurm name by node, as its label says. deleted: nodes without an object. settles: no
    more bad luck, so that no claim in use may run out.
    """

    more_weights: ClassVar[Mapping[str, int]] = {
        "relabel": 2,
        "node_object": 2,
        "list_lies": 2,
        "node_list_lies": 1,
    }

    def __post_init__(self: Any) -> None:
        self.labels: dict[str, str] = {}
        self.deleted: set[str] = set()
        self.settles = False
        super().__post_init__()

    def settings(self: Any) -> Settings:
        settings = super().settings()
        policy = msgspec.structs.replace(settings.policy, default_minutes=MINUTES)
        return msgspec.structs.replace(settings, policy=policy, slurm_node_label=LABEL)

    # The operations.

    def make_pod(self: Any, pick: int, how: int) -> None:
        """Some pods say when they end."""
        before = set(self.pods)
        super().make_pod(pick, how)
        for uid in self.pods.keys() - before:
            if how % 7 == 3:
                self._annotate(self.pods[uid], {keys.DURATION: DURATION})

    def relabel(self: Any, pick: int, how: int) -> None:
        """A node's label says that it is no node of Slurm, or another one; or it is taken off."""
        if self.deleted or self.twin or not set(NODES) <= self.machine.state.kube_nodes.keys():
            return  # what is called n2, and is the only one, is n2
        node, other = NODES[pick % 2], NODES[1 - pick % 2]
        name = ("", "elsewhere", other)[how % 3]
        self.labels.pop(node, None)
        if name and not self.labels:
            self.labels[node] = name
        self.watch.append(ev.NodeChanged(self._kube_node(node)))

    def node_twin(self: Any, pick: int, how: int) -> None:
        if self.twin or not (self.labels or self.deleted):
            super().node_twin(pick, how)

    def node_object(self: Any, pick: int, how: int) -> None:
        """The object of a node is deleted, its kubelet stops what is deleted; or it is back."""
        node = NODES[pick % 2]
        if node in self.deleted:
            self.deleted.discard(node)
            self.watch.append(ev.NodeChanged(self._kube_node(node)))
        elif how % 2 and not self.labels and not self.twin:
            self.watch.append(ev.NodeGone(self._kube_node(node)))
            self.deleted.add(node)
            for pod in self.pods.values():
                if pod.node == node:
                    self._hurry(pod)

    def list_lies(self: Any, pick: int, how: int) -> None:
        """A list without some pods, or without any."""
        lacks = {uid for i, uid in enumerate(self.pods) if how % 4 == 0 or (how >> (i % 8)) & 1}
        self.watch = deque(e for e in self.watch if isinstance(e, (ev.NodeChanged, ev.NodeGone)))
        self._handle(ev.PodsListed(tuple(p for p in self._listing() if p.uid not in lacks)))

    def node_list_lies(self: Any, pick: int, how: int) -> None:
        """A list without a node, or without any; or a true one."""
        if self.labels:
            return
        names = () if how % 3 == 0 else (NODES[pick % 2],) if how % 3 == 1 else NODES
        names = tuple(n for n in names if n not in self.deleted)
        self._handle(ev.NodesListed(tuple(self._kube_node(n) for n in (*names, *self._twins()))))

    # What follows from them.

    def _hurry(self: Any, pod: ModelPod) -> None:
        """What is left of a pod is stopped soon."""
        if pod.runs_until is not None:
            pod.runs_until = min(pod.runs_until, self.now + KILL_S)
        pod.stays_until = min(pod.stays_until, self.now + KILL_S)

    def _node_names(self: Any) -> tuple[str, ...]:
        return tuple(n for n in NODES if n not in self.deleted) + self._twins()

    def _kube_node(self: Any, name: str) -> KubeNode:
        labels = {LABEL: self.labels[name]} if name in self.labels else {}
        return msgspec.structs.replace(super()._kube_node(name), labels=labels)

    def node_silent(self: Any, pick: int, how: int) -> None:
        if NODES[pick % 2] not in self.deleted:
            super().node_silent(pick, how)

    def _vanish(self: Any, pod: ModelPod) -> None:
        super()._vanish(pod)
        if pod.node in self.deleted:
            self._hurry(pod)

    def _over(self: Any, pod: ModelPod, phase: str, how: int) -> None:
        super()._over(pod, phase, how)
        if pod.node in self.deleted:
            self._hurry(pod)

    def _advance(self: Any, seconds: float) -> None:
        """Slurm ends what is at its time limit."""
        super()._advance(seconds)
        for job in self.slurm.jobs.values():
            if job.state == "RUNNING" and job.uid and job.end <= self.now:
                used = [p.record.uid for p in self._pods_of(job.uid) if self._uses(p, job)]
                self._demand(not (self.settles and used), "ran_out", f"{job}, used by {used}")
                job.state, job.ended_at = "TIMEOUT", self.now
                self._fault(job.uid, ended=True)

    def _uses(self: Any, pod: ModelPod, job: Any) -> bool:
        return pod.runs(self.now) and not pod.fault and self._covers(job, pod)

    def _watch_action(self: Any, action: act.Action) -> None:
        if isinstance(action, act.Evict):
            pod = self.pods[action.uid]
            pod.evicted |= any(self._is_at_its_end(mate) for mate in self._mates(pod))
        super()._watch_action(action)

    def _is_at_its_end(self: Any, pod: ModelPod) -> bool:
        if keys.DURATION not in pod.record.annotations:
            return False
        last_s = pod.record.grace_s + END_SPARE_S + 60.0
        return any(
            job.uid in self._uids(pod) and job.end - self.now <= last_s
            for job in self.slurm.jobs.values()
        )

    def settle(self: Any, seconds: int = 260) -> None:
        self.labels.clear()
        self.deleted.clear()
        self.twin = ""
        self._handle(ev.NodesListed(tuple(self._kube_node(n) for n in NODES)))
        self.relist(0, 0)
        for job in self.slurm.jobs.values():
            # Whatever was missed until now, from here on there is time, and all ends come in it.
            job.end = min(max(job.end, self.now + 60), self.now + 120)
        self.settles = True
        super().settle(seconds)


class OddWorld(Odd, World):
    """With single pods."""


class OddGangWorld(Odd, GangWorld):
    """With gangs, whose members' group may be another while they run."""

    more_weights: ClassVar[Mapping[str, int]] = {
        **GangWorld.more_weights,
        **Odd.more_weights,
        "regroup": 2,
    }

    def __post_init__(self) -> None:
        self.were: dict[str, str] = {}
        super().__post_init__()

    def regroup(self, pick: int, how: int) -> None:
        """Somebody changes the group's label on a running pod."""
        pods = [
            p for p in self.pods.values() if p.node and not p.is_gone and p.record.group is not None
        ]
        if not pods:
            return
        pod = pods[pick % len(pods)]
        self.were.setdefault(pod.record.uid, pod.record.group.key)
        self._change(pod, group=Group("own", "d", f"other{how % 2}", size=2))

    def _evicts(self, pod: ModelPod) -> None:
        """Their own ends are as good as a person's word."""
        if any(self._is_at_its_end(mate) for mate in self._mates(pod)):
            self.confirmed = {*self.confirmed, self._gang_of(pod)}
        super()._evicts(pod)

    def _gang_of(self, pod: ModelPod) -> str:
        """Whatever its labels say since."""
        return self.were.get(pod.record.uid) or super()._gang_of(pod)

    def _uids(self, pod: ModelPod) -> tuple[str, ...]:
        """The claim that it was given stays its claim."""
        was = self.were.get(pod.record.uid)
        return super()._uids(pod) if was is None else (pod.record.uid, group_uid(was))
