"""Claims in Slurm that the book does not know: adopted, or ended after proof.

They come from askers that got no clear answer, from the leader before this one, and from a
slurmctld that has restarted with an older state.
"""

from __future__ import annotations

from slurmbridge.core import agents, cover, gangsweep, release, settle
from slurmbridge.core.action import LookPod
from slurmbridge.core.evidence import (
    is_bound_with,
    live_claims,
    others_on,
    place_of,
    use_of,
    written_claim,
)
from slurmbridge.core.settle import ask_of, request_for
from slurmbridge.core.state import (
    UNKNOWN_PROMISES,
    Entry,
    Found,
    Orphan,
    Phase,
    State,
    asked_gpus,
    is_running,
)
from slurmbridge.pool.record import GpuUse, PodRecord, SlurmJob


def run(state: State) -> None:
    """Look at every claim of the last reading: first those of pods that are on their nodes.

    Once all of these are charged, with or without a claim, it can be told whether the GPUs of a
    claim that nobody uses yet are really free.
    """
    if not state.audited:
        for uid, jobs in state.live.items():
            state.found |= {(job.id, uid): Found(state.now, state.moment) for job in jobs}
    elif state.found:
        there = {(job.id, uid) for uid, jobs in state.live.items() for job in jobs}
        state.found = {key: found for key, found in state.found.items() if key in there}
    later = []
    for uid in list(state.live):
        pod = state.pods.get(uid)
        if pod is not None and pod.node:
            _look_at(state, uid)
        else:
            later.append(uid)
    gangsweep.after_reading(state)
    cover.take_in_all(state)
    for uid in later:
        _look_at(state, uid)
    state.orphans = {k: o for k, o in state.orphans.items() if o.seen_at == state.now}
    _settle_doubts(state)


def _look_at(state: State, uid: str) -> None:
    if state.aside.of_uid(uid) is not None:
        return  # `holdout` keeps it
    entry, pod = state.book.get(uid), state.pods.get(uid)
    jobs = _without_let_go(state, uid, entry)
    if not jobs or (entry is not None and entry.phase in (Phase.ASKING, Phase.COVERING)):
        return
    if entry is not None and entry.phase is not Phase.DOUBT:
        _end_extras(state, entry, jobs)
    elif pod is None:
        for job in jobs:
            _watch_orphan(state, uid, job)
    else:
        _adopt(state, pod, entry, jobs)


def _without_let_go(state: State, uid: str, entry: Entry | None) -> list[SlurmJob]:
    """A pod's claims, without those that it is to have no more; they end when that is safe."""
    jobs = []
    for job in live_claims(state, uid):
        found, is_its = state.found.get((job.id, uid)), entry and entry.job_id == job.id
        if found is None or not found.let_go or is_its:
            jobs.append(job)
        else:
            release.end_job(state, uid, job, found.let_go)
    return jobs


def _settle_doubts(state: State) -> None:
    """A claim that no reading shows for long enough was not made."""
    for entry in list(state.book.values()):
        if (
            entry.phase is Phase.DOUBT
            and state.snapshot is not None
            and state.snapshot.began > entry.since + state.settings.doubt_s
            and not live_claims(state, entry.uid)
        ):
            state.drop(entry)


def _end_extras(state: State, entry: Entry, jobs: list[SlurmJob]) -> None:
    """One claim per pod: the others go, once it is certain which is the one."""
    if entry.group:
        if entry.phase in (Phase.HELD, Phase.BOUND) and not entry.suspect:
            for job in jobs:
                release.end_job(state, entry.uid, job, "the pod lives in its gang's claim")
        return
    if entry.phase is not Phase.LOST and all(job.id != entry.job_id for job in jobs):
        return  # its own is not shown: `audit` looks into that first
    for job in jobs:
        if job.id == entry.job_id:
            continue
        use = use_of(job, entry.slurm_node)
        if entry.phase is Phase.LOST and use is not None and use.indices == entry.gpus.indices:
            if not entry.job_id:
                settle.take_job(state, entry, job)
            continue  # it holds what the pod still uses
        release.end_job(state, entry.uid, job, "the pod has another claim")


def _adopt(state: State, pod: PodRecord, doubted: Entry | None, jobs: list[SlurmJob]) -> None:
    """Take over claims of a pod that has none in the book."""
    is_over = pod.is_over or (not pod.node and pod.deleting_since is not None)
    if is_over and not release.may_be_left(state, pod):
        if doubted is not None:
            state.drop(doubted)
        for each in jobs:
            release.end_job(state, pod.uid, each, "its pod is over")
        return
    if any(j.state.base != "PENDING" and (j.gpus is None or not j.nodes) for j in jobs):
        if not pod.node:
            _wait_for_gpus(state, pod, doubted, jobs)
        return  # not read in full yet: the next reading tells
    job: SlurmJob | None
    if pod.node:
        job = _bound_with(state, pod, jobs)
    elif not any(_kube_node(state, j) for j in jobs) and _may_be_on(state, "", jobs):
        return  # it may be bound with one of them: nobody says yet which node that is
    else:
        job = next((j for j in jobs if _kube_node(state, j) or not is_running(j)), None)
    is_unmapped = bool(pod.node) and pod.node not in state.slurm_of
    is_one_its = any(is_bound_with(pod, j) for j in jobs) or _may_be_on(state, pod.node, jobs)
    if job is None and is_unmapped and is_one_its:
        return  # nobody says yet which node that is
    if job is None:
        for other in jobs:
            if pod.node or _has_waited(state, pod.uid, other):
                release.end_job(state, pod.uid, other, "its pod is elsewhere")
        return
    _take_over(state, pod, doubted, job)


def _has_waited(state: State, uid: str, job: SlurmJob) -> bool:
    """Whether nobody binds any more with a claim of an earlier leader: by its age here."""
    orphan = state.orphans.setdefault((job.id, uid), Orphan(looked=state.now))
    orphan.seen_at = state.now
    return state.now - orphan.looked >= state.settings.hold_s


def _wait_for_gpus(
    state: State, pod: PodRecord, doubted: Entry | None, jobs: list[SlurmJob]
) -> None:
    """A claim of which Slurm does not tell the GPUs; in the end the pod is better off without.

    Seen on 22.05: granted while slurmctld had just started and the node's slurmd had not, it runs
    with `GRES=gpu:0(IDX:)` for good.
    """
    if doubted is None:
        slurm_node = next((j.nodes[0] for j in jobs if j.nodes), "")
        state.put(
            Entry(
                uid=pod.uid,
                ref=pod.ref,
                kube_node=state.kube_of.get(slurm_node, ""),
                slurm_node=slurm_node,
                phase=Phase.DOUBT,
                since=state.now,
                gpus=asked_gpus(pod),
                boot=state.boot,
                promised=UNKNOWN_PROMISES,
            )
        )
    elif state.now - doubted.since > state.settings.hold_s:
        state.drop(doubted)
        for job in jobs:
            release.end_job(state, pod.uid, job, "Slurm does not tell its GPUs")


def _kube_node(state: State, job: SlurmJob) -> str:
    return state.kube_of.get(job.nodes[0], "") if job.nodes else ""


def _may_be_on(state: State, kube_node: str, jobs: list[SlurmJob]) -> bool:
    """Whether a Kubernetes node may be one of those of some jobs; one that is deleted may be any.

    kube_node "": whether there is any at all for them.
    """
    if kube_node and kube_node not in state.kube_nodes:
        return True
    hosts = [name for job in jobs for node in job.nodes for name in state.hosts.get(node, ())]
    return kube_node in hosts or (not kube_node and bool(hosts))


def _bound_with(state: State, pod: PodRecord, jobs: list[SlurmJob]) -> SlurmJob | None:
    """Which of its claims a pod on a node was bound with; None: with none of them."""
    here = [j for j in jobs if j.state.base != "PENDING" and place_of(state, pod, j)]
    written = written_claim(pod)
    if written is not None:
        for job in here:
            if job.id == written.job_id:
                return job
        for job in here:
            use = use_of(job, place_of(state, pod, job))
            if use is not None and use.indices == written.indices:
                return job
    return here[0] if here else None


def _take_over(state: State, pod: PodRecord, doubted: Entry | None, job: SlurmJob) -> None:
    slurm_node = job.nodes[0] if job.nodes else ""
    if pod.node:
        slurm_node = place_of(state, pod, job) or slurm_node
    use = use_of(job, slurm_node)
    entry = Entry(
        uid=pod.uid,
        ref=pod.ref,
        kube_node=pod.node or state.kube_of.get(slurm_node, ""),
        slurm_node=slurm_node,
        phase=Phase.QUEUED,
        since=state.now,
        request=request_for(state, pod, slurm_node, ask_of(state, pod, job)),
        job_id=job.id,
        gpus=use or GpuUse(),
        sure_at=state.now,
        boot=state.boot,
        promised=doubted.promised if doubted is not None else UNKNOWN_PROMISES,
        cause="" if doubted is None else doubted.cause,
    )
    if not is_running(job):
        if pod.node:
            entry.phase = Phase.BOUND  # suspended: `audit` looks into it
        elif use is None:
            entry.gpus = asked_gpus(pod)
        state.put(entry)
        if pod.is_over:
            release.leave(state, entry, pod, "its pod is over")
        return
    if not pod.node and use is not None and others_on(state, entry, use):
        if doubted is None and not _has_waited(state, pod.uid, job):
            return  # an earlier leader may have had it bound
        if doubted is not None:
            state.drop(doubted)
        release.end_job(state, pod.uid, job, "another pod may still use its GPUs")
        return
    state.put(entry)
    settle.take_job(state, entry, job)


def _watch_orphan(state: State, uid: str, job: SlurmJob) -> None:
    """A claim without a pod that we know: ask the API server, then wait for its processes."""
    gone = state.gone.get(uid)
    if gone is not None and not gone.may_run:
        release.end_job(state, uid, job, "its pod is gone")
        return
    orphan = state.orphans.setdefault((job.id, uid), Orphan(looked=state.now))
    orphan.seen_at = state.now
    if gone is not None and orphan.gone_at is None:
        orphan.gone_at, orphan.left_at = gone.at, state.moment
    if orphan.gone_at is None:
        if state.now - orphan.looked >= state.settings.orphan_s:
            orphan.looked = state.now
            namespace, _, name = job.comment.partition(" ref=")[2].partition("/")
            state.out.append(LookPod(uid, namespace, name))
        return
    slurm_node = job.nodes[0] if job.nodes else ""
    is_left = agents.is_left_on(state, slurm_node, uid, orphan.left_at)
    # What waits in the queue has never run a pod; what is suspended may have.
    if is_left or job.state.base == "PENDING" or (is_left is None and not is_running(job)):
        release.end_job(state, uid, job, "there is no pod for it", is_proven=True)
    elif is_left is False:
        if state.now - orphan.gone_at > state.settings.linger_s and not orphan.told_kept:
            orphan.told_kept = True
            _tell_kept(state, slurm_node, job)
    elif release.is_silent_on(state, slurm_node):
        orphan.gone_at = state.now
        if not orphan.told_kept:
            orphan.told_kept = True
            _tell_kept(state, slurm_node, job)
    elif state.now - orphan.gone_at >= state.settings.linger_s:
        release.end_job(state, uid, job, "there is no pod for it", is_proven=True)


def _tell_kept(state: State, slurm_node: str, job: SlurmJob) -> None:
    for kube_node in state.hosts.get(slurm_node, ()):
        release.tell_kept(state, kube_node, job.comment.partition(" ref=")[2])


def on_no_pod(state: State, uid: str) -> None:
    """The API server has said that there is no pod with this UID."""
    if uid in state.pods:
        return  # the watch will tell
    entry = state.book.get(uid)
    if entry is not None and entry.phase is Phase.DOUBT:
        state.drop(entry)
    for job in state.live.get(uid, ()):
        orphan = state.orphans.get((job.id, uid))
        if orphan is not None and orphan.gone_at is None:
            orphan.gone_at, orphan.left_at = state.now, state.moment
