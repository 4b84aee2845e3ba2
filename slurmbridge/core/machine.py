"""The machine: one mutator, `handle`, from events to actions.

The way of a pod: `ClaimAsked` (grant.py) -> `Allocated` (settle.py) -> bound (pods.py) -> over or
gone (release.py) -> `Ended`. After every reading of slurmctld audit.py compares the book with it,
sweep.py the claims with the book; cover.py and evict.py see to the pods that have none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from slurmbridge.core import (
    agents,
    audit,
    cover,
    evict,
    gang,
    grant,
    holdout,
    lift,
    nodes,
    places,
    planned,
    pods,
    publish,
    release,
    shares,
    ticket,
    wake,
)
from slurmbridge.core import event as ev
from slurmbridge.core.action import Action
from slurmbridge.core.aside import Aside
from slurmbridge.core.blame import blame
from slurmbridge.core.mapping import hold_back, map_names
from slurmbridge.core.settings import Settings
from slurmbridge.core.state import Phase, State, index_jobs, is_live
from slurmbridge.pool.claim import ClaimId
from slurmbridge.pool.plan import planned_alone, planned_starts, windows_by_node
from slurmbridge.pool.record import KubeNode, SlurmConfig, SlurmJob, SlurmSnapshot
from slurmbridge.pool.view import View

STORY_LENGTH = 200
STEP_S = 0.25
"""Two looks at the host's clocks differ by less; more is a step, or much drift."""


class Machine:
    """State and story of one bridge leader.

    Args:
        settings: the configuration.
        term: name of this leadership.
        moment: of the last machine of this process, so that `State.moment` goes on growing.
        aside: what that one had set aside.

    Attributes:
        state: read it freely, change it only through `handle`.
        story: the last events, for bug reports.

    """

    def __init__(
        self, settings: Settings, term: str, moment: int = 0, aside: Iterable[Aside] = ()
    ) -> None:
        self.state = State(settings=settings, term=term, moment=moment)
        self.state.aside.found = {(a.kind, a.key): a for a in aside}
        self.story: deque[str] = deque(maxlen=STORY_LENGTH)

    def handle(self, event: ev.Event, now: float, ahead_s: float | None = None) -> list[Action]:
        """Take one event; returns what is to be done, in order.

        Args:
            event: what happened.
            now: Unix seconds by a clock that does not step (`Clock.steady`): every timer of ours
                runs by it.
            ahead_s: how far the host's clock is ahead of it by now; what Slurm says of its own
                times is compared with that one. None: as before.

        """
        state = self.state
        state.now = max(state.now, now)
        state.moment += 1
        if ahead_s is not None and abs(ahead_s - state.ahead_s) > STEP_S:
            state.ahead_s = ahead_s
        if not isinstance(event, (ev.Ticked, ev.Polled, ev.AgentReported)):
            self.story.append(f"{now:.3f} {type(event).__name__} {getattr(event, 'uid', '')}")
        left = holdout.without(state, event)
        if left is not None:
            _HANDLERS[type(left)](state, left)
        if state.audited:
            cover.after_event(state)
            publish.follow_topology(state)
            planned.after_event(state)
            if state.robbed:
                cover.after_event(state)
        out, state.out = state.out, []
        return out

    @property
    def aside(self) -> tuple[Aside, ...]:
        """What is set aside."""
        return tuple(self.state.aside.found.values())

    def blame(self, error: Exception) -> Aside | None:
        """What to set aside after an exception; None: it is about no single object.

        The exception may have left the state half-changed: this machine is of no use any more. A
        new one is given `aside` and this one, and what both sides tell.
        """
        return blame(self.state, error)

    @property
    def queued_jobs(self) -> dict[int, str]:
        """Jobs that wait in Slurm's queue: a look at one is a `JobLooked` with the UID given."""
        return ticket.queued_jobs(self.state)

    @property
    def view_is_due(self) -> bool:
        """Whether others should be given a new view."""
        publish.refresh(self.state)
        return self.state.view_changed

    def view(self) -> View:
        """A new view of the pool as it is now."""
        return publish.view(self.state)

    def reload(self, settings: Settings) -> None:
        """Take a new configuration; every node is looked at again."""
        self.state.settings = settings
        self.state.waiting.topology_due = True
        self.state.waiting.consider |= {*self.state.waiting.of, *self.state.waiting.faults}
        _map(self.state)
        _touch_all(self.state)


def _on_polled(state: State, event: ev.Polled) -> None:
    old, new = state.snapshot, event.snapshot
    if old is not None and new.began < old.began:
        return
    cluster = state.settings.slurm_cluster or (new if old is None else old).config.cluster
    if new.config.cluster != cluster:
        # What another Slurm does not know of is no loss of ours.
        state.poll_failed = f"another cluster answers: {new.config.cluster}, not {cluster}"
        return
    state.snapshot, state.poll_failed, state.interval_s = new, "", event.interval_s
    old_jobs, old_starts, old_windows = state.jobs_on, state.starts, state.windows
    old_alone = state.alone
    state.jobs_on = index_jobs(new.jobs.values())
    state.ours = {j.id: owner for j in new.jobs.values() if (owner := state.owner_of(j))}
    state.live = _live(new.jobs.values(), state.ours, "pod")
    state.live_groups = _live(new.jobs.values(), state.ours, "group")
    state.starts = planned_starts(new.jobs.values())
    state.alone = planned_alone(new.nodes.values(), state.starts, state.alone, state.now)
    state.windows = windows_by_node(
        new.reservations, new.nodes, _user(state, new.config), exact=not new.config.associations
    )
    if old is None or old.partitions != new.partitions:
        _sort_into_partitions(state, new)
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
    if old is not None and _groups_differ(state, old, new):
        shares.build(state)
    holdout.hold_all(state)
    audit.after_reading(state)
    evict.run(state)
    wake.run(state)


def _sort_into_partitions(state: State, new: SlurmSnapshot) -> None:
    found: dict[str, list[str]] = {}
    for name in sorted(new.partitions):
        for node in new.partitions[name].nodes:
            found.setdefault(node, []).append(name)
    before = state.partitions_on
    state.partitions_on = {node: tuple(names) for node, names in found.items()}
    state.dirty |= {node for node, _ in before.items() ^ state.partitions_on.items()}


def _groups_differ(state: State, old: SlurmSnapshot, new: SlurmSnapshot) -> bool:
    """Whether nodes of groups may be others, or have other GPUs."""
    if not state.settings.groups:
        return False
    return old.partitions != new.partitions or any(
        node.gpus != old.nodes[name].gpus for name, node in new.nodes.items() if name in old.nodes
    )


def _user(state: State, config: SlurmConfig) -> str:
    """The Slurm user of our claims, "" when its name is not known."""
    owner = state.settings.owner_uid
    if owner == 0:
        return "root"
    return config.slurm_user if config.slurm_uid == owner else ""


def _live(
    jobs: Iterable[SlurmJob], ours: dict[int, ClaimId], kind: str
) -> dict[str, list[SlurmJob]]:
    """The claims of pods, or of gangs, that have not ended."""
    found: dict[str, list[SlurmJob]] = {}
    for job in jobs:
        owner = ours.get(job.id)
        if owner is not None and owner.kind == kind and is_live(job):
            found.setdefault(owner.uid, []).append(job)
    return found


def _on_poll_failed(state: State, event: ev.PollFailed) -> None:
    state.poll_failed = event.text


def _on_allocate_refused(state: State, event: ev.AllocateRefused) -> None:
    entry = state.book.get(event.uid)
    if entry is not None and entry.phase in (Phase.ASKING, Phase.DOUBT):
        planned.on_refused(state, entry, event.reason, event.text)
    grant.on_allocate_refused(state, event)


def _on_job_looked(state: State, event: ev.JobLooked) -> None:
    if not ticket.on_looked(state, event):
        audit.on_job_looked(state, event)


def _on_pods_listed(state: State, event: ev.PodsListed) -> None:
    pods.listed(state, event.pods)
    audit.after_reading(state)
    if state.is_synced:
        evict.run(state)


def _on_pod_changed(state: State, event: ev.PodChanged) -> None:
    pods.see(state, event.pod)


def _on_nodes_listed(state: State, event: ev.NodesListed) -> None:
    silent = {name for name, node in state.kube_nodes.items() if not node.ready}
    state.waiting.topology_due = True
    there = {node.name: node for node in event.nodes}
    state.deleted |= dict.fromkeys(state.kube_nodes.keys() - there.keys(), state.now)
    state.kube_nodes, state.nodes_listed = there, True
    state.nodes_since = min(state.nodes_since, state.now)
    _map(state)
    _touch_all(state)
    for name in silent:
        if name in state.kube_nodes and state.kube_nodes[name].ready:
            release.on_node_back(state, name)
    audit.after_reading(state)


def _on_node_changed(state: State, event: ev.NodeChanged) -> None:
    old = state.kube_nodes.get(event.node.name)
    state.kube_nodes[event.node.name] = event.node
    places.on_labels(state, old, event.node)
    if old is None or _matters(old) != _matters(event.node):
        state.waiting.grew = state.nodes.is_due = True
        if old is None or (old.labels, old.gpus) != (event.node.labels, event.node.gpus):
            _map(state)
        state.touch(state.slurm_of.get(event.node.name, ""))
        if event.node.ready and (old is None or not old.ready):
            release.on_node_back(state, event.node.name)


def _matters(node: KubeNode) -> tuple[object, ...]:
    return (
        node.gpus,
        node.labels,
        node.ready,
        node.uid,
        node.unschedulable,
        node.fenced,
        node.taints,
    )


def _on_node_gone(state: State, event: ev.NodeGone) -> None:
    state.kube_nodes.pop(event.node.name, None)
    state.annotated.pop(event.node.name, None)
    state.deleted[event.node.name] = state.now
    _map(state)  # another may have been kept out by it


def _on_agent_reported(state: State, event: ev.AgentReported) -> None:
    agents.on_reported(state, event)
    if state.is_synced:
        release.on_agent_spoke(state, event.node)


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
        {name for name, node in state.snapshot.nodes.items() if node.gpu_total > 0},
    )
    names = hold_back(names, state.lived())
    state.held_back = names.held_back
    changed = names.slurm_of.items() ^ state.slurm_of.items()
    changed |= names.problems.items() ^ state.problems.items()
    state.slurm_of, state.problems = dict(names.slurm_of), dict(names.problems)
    state.several, state.may_be = dict(names.several), dict(names.may_be)
    state.kube_of = {slurm: kube for kube, slurm in state.slurm_of.items()}
    state.hosts = {}
    for kube, may_be in state.may_be.items():
        for slurm in may_be:
            state.hosts[slurm] = (*state.hosts.get(slurm, ()), kube)
    if changed:
        places.on_mapped(state)
    for kube, _ in changed:
        state.touch(state.slurm_of.get(kube, ""))
        if kube not in state.slurm_of:
            state.view_changed = True
            if kube in state.problems:
                state.views[kube] = publish.blocked_view(kube, state.problems[kube])
            else:
                state.views.pop(kube, None)
    if state.audited and (new := {kube for kube, _ in changed if kube in state.slurm_of}):
        cover.take_in_on(state, new)
    holdout.hold_all(state)
    shares.build(state)


def _touch_all(state: State) -> None:
    state.dirty.update(state.kube_of)
    if state.snapshot is not None:
        state.dirty.update(state.snapshot.nodes)


def _on_action_failed(state: State, event: ev.ActionFailed) -> None:
    """No clear answer: the next tick or reading asks again. Only waiting askers need a word."""
    if event.what == "AllocateGroup":
        ticket.on_answer(state, event.uid)
    entry = state.book.get(event.uid)
    if entry is None:
        return
    asking = entry.phase is Phase.ASKING
    if event.what == "LookPod":
        if asking and entry.pod_looking is not None:
            grant.on_pod_look_failed(state, entry, event.text)
        entry.pod_looking = None
    elif event.what in ("Allocate", "Queue"):
        grant.on_allocate_unknown(state, ev.AllocateUnknown(event.uid, 0, event.text))
    elif event.what == "Lift":
        lift.on_lift_failed(state, entry)
    elif event.what == "Cover":
        cover.on_cover_failed(state, entry)


def _on_ticked(state: State, _event: ev.Ticked) -> None:
    if not state.is_synced:
        return
    if state.held_back:
        _map(state)
    pods.tick(state)
    grant.tick(state)
    agents.tick(state)
    release.tick(state)
    planned.tick(state)
    cover.tick(state)
    evict.run(state)
    wake.run(state)
    nodes.run(state)
    publish.annotate_nodes(state)
    pods.prune(state)


_HANDLERS: dict[type[ev.Event], Callable[[State, Any], None]] = {
    ev.Polled: _on_polled,
    ev.PollFailed: _on_poll_failed,
    ev.PodsListed: _on_pods_listed,
    ev.PodChanged: _on_pod_changed,
    ev.PodGone: pods.on_gone,
    ev.NodesListed: _on_nodes_listed,
    ev.NodeChanged: _on_node_changed,
    ev.NodeGone: _on_node_gone,
    ev.AgentReported: _on_agent_reported,
    ev.AgentLost: agents.on_lost,
    ev.ClaimAsked: grant.on_claim_asked,
    ev.UnboundReleased: grant.on_unbound_released,
    ev.PodLooked: pods.on_looked,
    ev.Allocated: grant.on_allocated,
    ev.AllocateRefused: _on_allocate_refused,
    ev.AllocateUnknown: grant.on_allocate_unknown,
    ev.Queued: grant.on_queued,
    ev.JobLooked: _on_job_looked,
    ev.GroupQueued: ticket.on_queued,
    ev.GroupRefused: ticket.on_refused,
    ev.GroupAllocated: ticket.on_allocated,
    ev.Covered: cover.on_covered,
    ev.CoverRefused: cover.on_cover_refused,
    ev.Ended: release.on_ended,
    ev.Extended: audit.on_extended,
    ev.Evicted: evict.on_evicted,
    ev.Lifted: lift.on_lifted,
    ev.GroupLooked: gang.on_looked,
    ev.TopologyRead: places.on_read,
    ev.TopologyBuilt: places.on_built,
    ev.ActionFailed: _on_action_failed,
    ev.BreakerAnswered: cover.on_breaker_answered,
    ev.Ticked: _on_ticked,
}
