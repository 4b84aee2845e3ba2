"""Wake-ups: a refused pod sleeps in kube-scheduler until something about it changes.

Slurm's changes are no Kubernetes events, so a pod that now fits is woken by a changed annotation
of its own. Only as many are woken as fit, best first, and one that is woken in vain is woken less
and less often.
"""

from __future__ import annotations

import numpy as np

from slurmbridge.core import publish
from slurmbridge.core.action import AnnotatePod
from slurmbridge.core.state import State, Woken
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Ask
from slurmbridge.pool.policy import Refusal, resolve
from slurmbridge.pool.record import PodRecord
from slurmbridge.pool.verdict import PASSES, judge

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
MOST_AT_ONCE = 200


def run(state: State) -> None:
    """Wake the waiting pods that fit into what is free now."""
    waiting = [
        pod
        for pod in state.pods.values()
        if pod.waiting_on_us
        and not pod.node
        and not pod.gates
        and pod.deleting_since is None
        and pod.uid not in state.waiting.lifted
        and pod.uid not in state.waiting.gang_of
    ]
    if state.is_stale or all(_rests(state, pod.uid) for pod in waiting):
        return  # laying pods in costs a walk over all nodes
    publish.refresh(state)
    room = _Room(state)
    woken = 0
    for pod in sorted(waiting, key=lambda p: (-p.priority, p.created, p.uid)):
        if woken >= MOST_AT_ONCE or room.is_full:
            return
        last = state.woken.get(pod.uid)
        is_under_way = last is not None and state.now - last.at < FIRST_PAUSE_S
        if pod.uid in state.book or (_rests(state, pod.uid) and not is_under_way):
            continue
        ask = resolve(pod, state.settings.policy)
        # One that was woken a moment ago is on its way to the room it was woken for.
        if isinstance(ask, Refusal) or not room.take(ask) or is_under_way:
            continue
        pause = FIRST_PAUSE_S if last is None else min(2 * last.pause, LONGEST_PAUSE_S)
        state.woken[pod.uid] = Woken(state.now, pause)
        state.out.append(_wake(state, pod))
        woken += 1


def _rests(state: State, uid: str) -> bool:
    """Whether a pod has a claim, or was woken not long ago."""
    last = state.woken.get(uid)
    return uid in state.book or (last is not None and state.now - last.at < last.pause)


def one(state: State, uid: str) -> None:
    """Wake a pod that has a claim by now and nobody who waits to bind it."""
    pod = state.pods.get(uid)
    if pod is not None and not pod.node and not pod.gates and pod.deleting_since is None:
        state.out.append(_wake(state, pod))


def _wake(state: State, pod: PodRecord) -> AnnotatePod:
    return AnnotatePod(pod.uid, pod.namespace, pod.name, {keys.WAKE: mark(state)})


def mark(state: State) -> str:
    """A value that no pod has yet."""
    return f"{state.term}-{state.generation}-{int(state.now * 1000)}"


class _Room:
    """What is free, while pods are laid into it one by one.

    Equal asks share one list of nodes; a node leaves it when it cannot hold that ask any more, so
    that 1,000 equal pods cost one walk over the nodes and not 1,000.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._free = {
            name: [view.free_total, view.cpus_free, view.memory_free_mib]
            for name, view in state.views.items()
            if view.free_total > 0 and not view.blocked
        }
        self._nodes: dict[Ask, list[str]] = {}

    @property
    def is_full(self) -> bool:
        """Whether no node has a free GPU."""
        return not self._free

    def take(self, ask: Ask) -> bool:
        """Lay one pod in; False when no node holds it."""
        nodes = self._nodes.get(ask)
        if nodes is None:
            nodes = self._nodes[ask] = self._places(ask)
        while nodes:
            left = self._free.get(nodes[-1])
            need = (ask.gpu.count, ask.cpus, ask.memory_mib)
            if left is None or any(have < want for have, want in zip(left, need, strict=True)):
                nodes.pop()
                continue
            for i, want in enumerate(need):
                left[i] -= want
            if left[0] <= 0:
                del self._free[nodes[-1]]
            return True
        return False

    def _places(self, ask: Ask) -> list[str]:
        index = publish.index(self._state)
        codes = judge(
            ask,
            "",
            index,
            np.arange(len(index), dtype=np.int32),
            self._state.wall,
            horizon_minutes=self._state.settings.policy.plan_horizon_minutes,
        )
        return [index.names[row] for row in np.flatnonzero(codes == PASSES)]
