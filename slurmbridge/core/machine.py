"""The machine: one mutator, `handle`, from events to actions.

The way of a pod: `ClaimAsked` (grant.py) -> `Allocated` -> bound (pods below) -> over or gone
(release.py) -> `Ended`. After every reading of slurmctld audit.py compares the book with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from slurmbridge.core import audit, evict, grant, publish, release, wake
from slurmbridge.core import event as ev
from slurmbridge.core.action import Action
from slurmbridge.core.mapping import map_names
from slurmbridge.core.settings import Settings
from slurmbridge.core.state import Entry, Phase, State, index_jobs
from slurmbridge.pool.plan import planned_alone, planned_starts, windows_by_node
from slurmbridge.pool.record import KubeNode, PodRecord
from slurmbridge.pool.view import View

STORY_LENGTH = 200


class Machine:
    """State and story of one bridge leader.

    Attributes:
        state: read it freely, change it only through `handle`.
        story: the last events, for bug reports.

    """

    def __init__(self, settings: Settings, term: str) -> None:
        self.state = State(settings=settings, term=term)
        self.story: deque[str] = deque(maxlen=STORY_LENGTH)

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Take one event; returns what is to be done, in order.

        Args:
            event: what happened.
            now: Unix seconds; may not run backwards by more than the clock's corrections.

        """
        state = self.state
        state.now = max(state.now, now)
        if not isinstance(event, (ev.Ticked, ev.Polled)):
            self.story.append(f"{now:.3f} {type(event).__name__} {getattr(event, 'uid', '')}")
        _HANDLERS[type(event)](state, event)
        out, state.out = state.out, []
        return out

    @property
    def view_is_due(self) -> bool:
        """Whether others should be given a new view."""
        return publish.refresh(self.state) or self.state.held_changed

    def view(self) -> View:
        """A new view of the pool as it is now."""
        return publish.view(self.state)

    def reload(self, settings: Settings) -> None:
        """Take a new configuration; every node is looked at again."""
        self.state.settings = settings
        _map(self.state)
        _touch_all(self.state)


def _on_polled(state: State, event: ev.Polled) -> None:
    old, new = state.snapshot, event.snapshot
    if old is not None and new.began < old.began:
        return
    state.snapshot, state.poll_failed, state.interval_s = new, "", event.interval_s
    old_jobs, old_starts, old_windows = state.jobs_on, state.starts, state.windows
    old_alone = state.alone
    state.jobs_on = index_jobs(new.jobs.values())
    state.ours = {j.id: owner for j in new.jobs.values() if (owner := state.owner_of(j))}
    state.starts = planned_starts(new.jobs.values())
    state.alone = planned_alone(new.nodes.values(), state.starts, state.alone, state.now)
    state.windows = windows_by_node(new.reservations)
    if old is None or old.nodes.keys() != new.nodes.keys():
        _map(state)
        _touch_all(state)
    else:
        for name, node in new.nodes.items():
            if (
                node != old.nodes[name]
                or old_jobs.get(name) != state.jobs_on.get(name)
                or old_starts.get(name) != state.starts.get(name)
                or old_windows.get(name) != state.windows.get(name)
                or name in state.alone
                or name in old_alone
            ):
                state.dirty.add(name)
    audit.after_reading(state)
    evict.run(state)
    wake.run(state)


def _on_poll_failed(state: State, event: ev.PollFailed) -> None:
    state.poll_failed = event.text


def _on_pods_listed(state: State, event: ev.PodsListed) -> None:
    listed = {pod.uid for pod in event.pods}
    for uid in [u for u in state.pods if u not in listed]:
        release.on_pod_gone(state, ev.PodGone(state.pods[uid]))
    for pod in event.pods:
        _see_pod(state, pod)
    state.pods_listed = True
    audit.after_reading(state)


def _on_pod_changed(state: State, event: ev.PodChanged) -> None:
    _see_pod(state, event.pod)


def _see_pod(state: State, pod: PodRecord) -> None:
    """Only pods that ask for pool GPUs, or wrongly so, are ours to know."""
    if pod.gpu is None and not pod.fault:
        state.pods.pop(pod.uid, None)
        return
    state.pods[pod.uid] = pod
    if pod.node:
        state.bound_since.setdefault(pod.uid, state.now)
        state.wake_after.pop(pod.uid, None)
    entry = state.book.get(pod.uid)
    if pod.is_over:
        release.on_pod_over(state, pod)
    elif entry is not None and entry.phase is Phase.HELD and pod.node:
        if pod.node == entry.kube_node:
            entry.move(Phase.BOUND, state.now)
            state.held_changed = True
        else:
            release.end_entry(state, entry, f"the pod was bound to {pod.node}")
    elif (
        entry is not None
        and entry.phase in (Phase.HELD, Phase.QUEUED)
        and not pod.node
        and pod.deleting_since is not None
    ):
        release.end_entry(state, entry, "the pod is being deleted")


def _on_nodes_listed(state: State, event: ev.NodesListed) -> None:
    state.kube_nodes = {node.name: node for node in event.nodes}
    state.nodes_listed = True
    _map(state)
    _touch_all(state)


def _on_node_changed(state: State, event: ev.NodeChanged) -> None:
    old = state.kube_nodes.get(event.node.name)
    state.kube_nodes[event.node.name] = event.node
    if old is None or _matters(old) != _matters(event.node):
        _map(state)
        state.touch(state.slurm_of.get(event.node.name, ""))


def _matters(node: KubeNode) -> tuple[object, ...]:
    return (node.gpus, node.labels, node.ready, node.uid)


def _on_node_gone(state: State, event: ev.NodeGone) -> None:
    name = event.node.name
    state.kube_nodes.pop(name, None)
    state.annotated.pop(name, None)
    slurm_node = state.slurm_of.pop(name, "")
    state.kube_of.pop(slurm_node, None)
    state.problems.pop(name, None)
    if state.views.pop(name, None) is not None:
        state.held_changed = True


def _map(state: State) -> None:
    """Match the names of both sides again."""
    if state.snapshot is None:
        return
    settings = state.settings
    names = map_names(
        state.kube_nodes,
        state.snapshot.nodes.keys(),
        dict(settings.names),
        settings.slurm_node_label,
        dict(settings.selector),
        settings.policy.resources.keys(),
        state.slurm_of,
    )
    before = set(state.slurm_of.values())
    state.slurm_of, state.problems = dict(names.slurm_of), dict(names.problems)
    state.kube_of = {slurm: kube for kube, slurm in state.slurm_of.items()}
    state.dirty |= set(state.kube_of) ^ before
    for kube, text in state.problems.items():
        if kube not in state.slurm_of:
            state.views[kube] = publish.blocked_view(kube, text)
    for gone in set(state.views) - set(state.slurm_of) - set(state.problems):
        del state.views[gone]
        state.held_changed = True


def _touch_all(state: State) -> None:
    state.dirty.update(state.kube_of)
    if state.snapshot is not None:
        state.dirty.update(state.snapshot.nodes)


def _on_pod_looked(state: State, event: ev.PodLooked) -> None:
    entry = state.book.get(event.uid)
    if entry is None:
        audit.on_pod_looked_for_orphan(state, event)
    elif entry.phase is Phase.ASKING and entry.pod_looking is not None:
        grant.on_pod_looked_for_claim(state, entry, event)
    elif entry.phase in (Phase.HELD, Phase.QUEUED) and entry.pod_looking is not None:
        release.on_pod_looked_for_hold(state, entry, event)


def _on_action_failed(state: State, event: ev.ActionFailed) -> None:
    """No clear answer: the next tick or reading asks again. Only waiting askers need a word."""
    entry = state.book.get(event.uid)
    if entry is None:
        return
    if event.what == "LookPod" and entry.phase is Phase.ASKING:
        grant.on_pod_look_failed(state, entry, event.text)
    elif event.what == "LookPod":
        entry.pod_looking = None
    elif event.what == "Cover" and entry.phase is Phase.COVERING:
        _cover_again(state, entry)


def _cover_again(state: State, entry: Entry) -> None:
    pod = state.pods.get(entry.uid)
    if pod is not None and not pod.is_over:
        audit.cover(state, entry, pod, entry.gpus.indices)
    elif pod is None:
        state.drop(entry)


def _on_ticked(state: State, _event: ev.Ticked) -> None:
    if not state.is_synced:
        return
    release.tick(state)
    evict.run(state)
    wake.run(state)
    publish.annotate_nodes(state)
    if len(state.told) > 10_000:
        state.told = {k: t for k, t in state.told.items() if state.now - t < 600}


_HANDLERS: dict[type[ev.Event], Callable[[State, Any], None]] = {
    ev.Polled: _on_polled,
    ev.PollFailed: _on_poll_failed,
    ev.PodsListed: _on_pods_listed,
    ev.PodChanged: _on_pod_changed,
    ev.PodGone: release.on_pod_gone,
    ev.NodesListed: _on_nodes_listed,
    ev.NodeChanged: _on_node_changed,
    ev.NodeGone: _on_node_gone,
    ev.ClaimAsked: grant.on_claim_asked,
    ev.UnboundReleased: grant.on_unbound_released,
    ev.PodLooked: _on_pod_looked,
    ev.Allocated: grant.on_allocated,
    ev.AllocateRefused: grant.on_allocate_refused,
    ev.AllocateUnknown: grant.on_allocate_unknown,
    ev.Queued: grant.on_queued,
    ev.JobLooked: audit.on_job_looked,
    ev.Covered: audit.on_covered,
    ev.CoverRefused: audit.on_cover_refused,
    ev.Ended: release.on_ended,
    ev.Extended: audit.on_extended,
    ev.Evicted: evict.on_evicted,
    ev.ActionFailed: _on_action_failed,
    ev.BreakerAnswered: evict.on_breaker_answered,
    ev.Ticked: _on_ticked,
}
