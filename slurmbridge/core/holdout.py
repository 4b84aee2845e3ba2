"""What is set aside is kept out of the core, and nothing of it is taken for free.

The core never sees its pods. Each has an entry in the book, in phase aside: while Slurm holds a
claim for it on its node, that is left alone, and renewed; while it does not, nothing is offered on
the node, since Slurm may give the pod's GPUs to the next claim. Once the pod is gone what is left
of it goes the usual way, by proof.
"""

from __future__ import annotations

import msgspec

from slurmbridge.core import agents, answer, audit, release
from slurmbridge.core import event as ev
from slurmbridge.core.action import Tell
from slurmbridge.core.aside import Aside
from slurmbridge.core.evidence import uid_of_group, use_of
from slurmbridge.core.state import NO_GPUS, Entry, Gone, Phase, State, asked_gpus, is_running
from slurmbridge.pool.record import PodRecord

TELL_AGAIN_S = 3600.0


def without(state: State, event: ev.Event) -> ev.Event | None:
    """An event without what is set aside; None: nothing is left of it."""
    if not state.aside.found:
        return event
    match event:
        case ev.PodsListed(pods=pods):
            return ev.PodsListed(_listed(state, pods))
        case ev.PodChanged(pod=pod):
            return None if _is_held(state, pod) else event
        case ev.PodGone(pod=pod):
            if state.aside.of_pod(pod) is None:
                return event
            _let_go(state, pod, may_run=bool(pod.node))
            return None
        case ev.PodLooked(uid=uid, pod=pod):
            is_held = pod is not None and pod.uid == uid and _is_held(state, pod)
            return None if is_held or state.aside.of_uid(uid) is not None else event
        case ev.ClaimAsked(op=op, uid=uid):
            if state.aside.of_uid(uid) is None:
                return event
            answer.later(state, op, "it is set aside, since the bridge has failed over it")
            return None
        case ev.AgentReported(node=node):
            return None if ("agent", node) in state.aside.found else event
        case ev.Polled():
            return _without_jobs(state, event)
        case _:
            return None if state.aside.of_uid(getattr(event, "uid", "")) is not None else event


def hold_all(state: State) -> None:
    """After a reading, or once other nodes are known: charge what is set aside."""
    for pod in list(state.aside.pods.values()):
        _hold(state, pod)


def _is_held(state: State, pod: PodRecord) -> bool:
    if state.aside.of_pod(pod) is None:
        return False
    _hold(state, pod)
    return True


def _listed(state: State, pods: tuple[PodRecord, ...]) -> tuple[PodRecord, ...]:
    held = {pod.uid for pod in pods if _is_held(state, pod)}
    for pod in list(state.aside.pods.values()):
        if pod.uid not in held:
            _let_go(state, pod, may_run=True)
    for aside in list(state.aside.found.values()):
        _forget_if_gone(state, aside)
    return tuple(pod for pod in pods if pod.uid not in held)


def _hold(state: State, pod: PodRecord) -> None:
    """Charge a pod with its GPUs, as well as can be without looking into it."""
    aside, entry = state.aside.of_pod(pod), state.book.get(pod.uid)
    slurm_node = state.slurm_of.get(pod.node, "")
    if not slurm_node and entry is not None and entry.kube_node == pod.node:
        slurm_node = entry.slurm_node  # as long as nobody says which node that is
    state.aside.pods[pod.uid] = pod
    if aside is not None and state.once("aside", pod.uid, TELL_AGAIN_S):
        text = f"set aside, since the bridge has failed over it: {aside.error}"
        state.out.append(Tell(pod.namespace, pod.name, pod.uid, "SetAside", text, warning=True))
    if pod.gpu is None and not pod.fault:
        return
    if entry is None or entry.phase is not Phase.ASIDE or entry.slurm_node != slurm_node:
        entry = Entry(pod.uid, pod.ref, pod.node, slurm_node, Phase.ASIDE, state.now)
        entry.why = "set aside"
        state.put(entry)
    if pod.is_over and not entry.left_at:
        entry.left_at, entry.boot_id = state.moment, agents.boot_id(state.kube_nodes.get(pod.node))
    suspect = bool(slurm_node) and not _is_covered(state, pod, slurm_node)
    if suspect and pod.is_over:
        is_left = agents.is_left(state, pod.node, pod.uid, entry.left_at, entry.boot_id)
        suspect = is_left is False
    if suspect != entry.suspect:
        entry.suspect, entry.gpus = suspect, asked_gpus(pod) if suspect else NO_GPUS
        state.settle_view(entry)


def _is_covered(state: State, pod: PodRecord, slurm_node: str) -> bool:
    """Whether Slurm holds a claim for a pod on its node; it goes on doing so."""
    for uid in (pod.uid, uid_of_group(pod)):
        for job in (*state.live.get(uid, ()), *state.live_groups.get(uid, ())):
            if is_running(job) and use_of(job, slurm_node) is not None:
                minutes = state.settings.policy.default_minutes
                enough_s = minutes * 60 * state.settings.renew_share
                audit.renew(state, state.ours[job.id], job, minutes, enough_s)
                return True
    return False


def _let_go(state: State, pod: PodRecord, *, may_run: bool) -> None:
    """A pod that was set aside is gone: the end of its claim needs the same proof as any other."""
    aside, entry = state.aside.of_pod(pod), state.book.get(pod.uid)
    state.aside.pods.pop(pod.uid, None)
    state.gone[pod.uid] = Gone(state.now, may_run)
    if entry is not None and entry.phase is Phase.ASIDE:
        if may_run and entry.slurm_node:
            entry.gpus = asked_gpus(pod)
            release.linger(state, entry, pod.grace_s)
        else:
            state.drop(entry)
    if aside is not None:
        _forget_if_gone(state, aside)


def _forget_if_gone(state: State, aside: Aside) -> None:
    """An object that is gone is set aside no more; what failed without its pods stays so."""
    is_pods = aside.kind in ("pod", "gang") and not aside.alone
    if is_pods and all(state.aside.of_pod(p) != aside for p in state.aside.pods.values()):
        state.aside.found.pop((aside.kind, aside.key), None)


def _without_jobs(state: State, event: ev.Polled) -> ev.Polled:
    """A reading in which nothing is known of the native jobs that are set aside."""
    jobs = None
    for kind, key in list(state.aside.found):
        if kind != "job":
            continue
        job = event.snapshot.jobs.get(int(key))
        if job is None:
            del state.aside.found[kind, key]
            continue
        jobs = dict(event.snapshot.jobs) if jobs is None else jobs
        jobs[job.id] = msgspec.structs.replace(
            job, name="", comment="", account="", gpus=None, planned_nodes=()
        )
    if jobs is None:
        return event
    snapshot = msgspec.structs.replace(event.snapshot, jobs=jobs)
    return msgspec.structs.replace(event, snapshot=snapshot)
