"""After each reading of slurmctld: does every pod have its claim, and every claim its pod?

A reading shows things as they were between `began` and `ended`. Only what began after our own
last word on a claim can contradict it, and no contradiction is acted upon before a second,
targeted look (`LookJob`, `LookPod`) has confirmed it.
"""

from __future__ import annotations

from slurmbridge.core import evict, release
from slurmbridge.core.action import AnnotatePod, Cover, Extend, LookJob, LookPod, Tell
from slurmbridge.core.event import Covered, CoverRefused, Extended, JobLooked, PodLooked
from slurmbridge.core.state import Entry, Phase, State, asked_gpus
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Claim, ClaimId, ClaimRequest
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import format_indices, parse_indices
from slurmbridge.pool.policy import Refusal, resolve
from slurmbridge.pool.record import GpuUse, PodRecord, SlurmJob

FORGET_S = 15.0
"""A claim granted this long before a slurmctld start may have been forgotten: state is saved
every few seconds (measured: up to 5 s under load)."""


def after_reading(state: State) -> None:
    """Compare the book with the reading, both ways."""
    if not state.is_synced or state.snapshot is None:
        return
    for entry in list(state.book.values()):
        _check(state, entry)
    _sweep(state)
    _find_strays(state)


def _check(state: State, entry: Entry) -> None:
    snapshot = state.snapshot
    if snapshot is None:
        return
    if entry.phase is Phase.ENDING:
        release.settle_ending(state, entry)
        return
    if entry.phase is Phase.DOUBT:
        is_shown = any(owner.uid == entry.uid for owner in state.ours.values())
        if snapshot.began > entry.since + state.settings.doubt_s and not is_shown:
            state.drop(entry)
        return
    if entry.phase in (Phase.ASKING, Phase.COVERING, Phase.LOST):
        return
    job = snapshot.jobs.get(entry.job_id)
    mine = job is not None and (owner := state.owner_of(job)) and owner.uid == entry.uid
    if mine and job is not None and job.state.base == "RUNNING" and not job.state.flags:
        _still_running(state, entry, job)
        return
    if entry.phase is Phase.QUEUED and mine and job is not None and job.state.base == "PENDING":
        return
    granted = entry.claim.granted if entry.claim is not None else entry.since
    if snapshot.began <= granted:
        return
    _look_again(state, entry)


def _still_running(state: State, entry: Entry, job: SlurmJob) -> None:
    entry.looking = None
    use = job.gpus.get(entry.slurm_node) if job.gpus is not None else None
    if entry.claim is None or entry.phase is Phase.QUEUED:
        if use is None:
            return
        claim = _claim_from(state, entry, job, use)
        entry.claim, entry.gpus = claim, use
        entry.move(Phase.HELD, state.now)
        state.held_changed = True
        state.touch(entry.slurm_node)
        return
    _renew(state, entry, job)


def _renew(state: State, entry: Entry, job: SlurmJob) -> None:
    """Rolling claims get their full time again when the rest runs short."""
    request = entry.request
    if job.end is None or entry.phase is not Phase.BOUND:
        return
    pod = state.pods.get(entry.uid)
    if request is None or pod is None or not request.ask.rolling:
        return
    left_s = job.end - state.now
    if left_s < request.ask.minutes * 60 * state.settings.renew_share and _once(
        state, ("renew", entry.uid), 30
    ):
        claim_id = ClaimId(state.settings.policy.cluster, entry.uid)
        state.out.append(Extend(claim_id, entry.job_id, request.ask.minutes))


def _once(state: State, key: tuple[str, str], every_s: float) -> bool:
    """True at most once in `every_s` for a key."""
    if state.now - state.told.get(key, -1e9) < every_s:
        return False
    state.told[key] = state.now
    return True


def on_extended(state: State, event: Extended) -> None:
    """Slurm gave the claim more time."""
    entry = state.book.get(event.uid)
    if entry is not None and entry.claim is not None:
        entry.claim = Claim(
            id=entry.claim.id,
            job_id=entry.claim.job_id,
            slurm_node=entry.claim.slurm_node,
            gpus=entry.claim.gpus,
            state=entry.claim.state,
            granted=entry.claim.granted,
            ends=event.ends,
            started=entry.claim.started,
        )


def _look_again(state: State, entry: Entry) -> None:
    if entry.looking is None or state.now - entry.looking > state.settings.look_retry_s:
        entry.looking = state.now
        state.out.append(LookJob(entry.uid, entry.job_id))


def on_job_looked(state: State, event: JobLooked) -> None:
    """The second look at a claim that a reading did not show as running."""
    entry = state.book.get(event.uid)
    if entry is None or entry.job_id != event.job_id or entry.looking is None:
        return
    entry.looking = None
    job = event.job
    owner = state.owner_of(job) if job is not None else None
    if job is not None and owner is not None and owner.uid == entry.uid:
        if job.state.base == "RUNNING" and not job.state.flags:
            _still_running(state, entry, job)
        elif job.state.base != "PENDING" or entry.phase is not Phase.QUEUED:
            _lose(state, entry, f"Slurm has ended the claim (job {job.id}: {job.state.base})")
        return
    granted = entry.claim.granted if entry.claim is not None else entry.since
    booted = state.snapshot.config.boot_time if state.snapshot is not None else 0.0
    entry.job_id = 0
    if booted > granted - FORGET_S or job is not None:
        _forgotten(state, entry)
    else:
        _lose(state, entry, "the claim is gone from Slurm")


def _lose(state: State, entry: Entry, why: str) -> None:
    """Slurm has ended a claim. Its pod has to go; until then its GPUs stay charged to it."""
    pod = state.pods.get(entry.uid)
    if entry.phase is Phase.LINGERING:
        entry.job_id = 0  # nothing is left to end; the GPUs stay charged until the time is over
        return
    if pod is None or not pod.node or pod.is_over:
        release.finish_lost(state, entry)
        return
    entry.why = why
    entry.move(Phase.LOST, state.now)
    state.held_changed = True
    state.touch(entry.slurm_node)
    evict.tell_lost(state, entry, pod)


def _forgotten(state: State, entry: Entry) -> None:
    """Slurmctld forgot the claim in a crash: cover the pod again before anything else."""
    pod = state.pods.get(entry.uid)
    if entry.phase is Phase.LINGERING:
        return
    if pod is None or not pod.node or pod.is_over or entry.request is None:
        state.drop(entry)
        return
    indices = entry.gpus.indices
    cover(state, entry, pod, indices)


def cover(state: State, entry: Entry, pod: PodRecord, indices: tuple[int, ...] | None) -> None:
    """Ask for a new claim for a pod that is already on its node."""
    request = entry.request
    if request is None:
        return
    entry.move(Phase.COVERING, state.now)
    entry.why = "its claim was missing in Slurm"
    state.held_changed = True
    state.touch(entry.slurm_node)
    state.out.append(Cover(entry.uid, request, indices, entry.cause or pod.uid[:8]))


def on_covered(state: State, event: Covered) -> None:
    """The pod has a claim again: write it down on the pod."""
    entry = state.book.get(event.uid)
    if entry is None:
        release.end(state, event.claim.id, event.claim.job_id, "its pod is gone")
        return
    pod = state.pods.get(event.uid)
    entry.claim, entry.job_id, entry.gpus = event.claim, event.claim.job_id, event.claim.gpus
    entry.stray = False
    entry.move(Phase.BOUND, state.now)
    state.held_changed = True
    state.touch(entry.slurm_node)
    if pod is None or pod.is_over:
        release.end_entry(state, entry, "its pod is over")
        return
    _write_down(state, entry, pod)
    text = f"covered again by Slurm job {entry.job_id}: {entry.why}"
    state.out.append(Tell(pod.namespace, pod.name, pod.uid, "Covered", text))


def _write_down(state: State, entry: Entry, pod: PodRecord) -> None:
    indices = entry.gpus.indices
    values = {
        keys.CLAIM: f"{entry.job_id}/{pod.uid}",
        keys.GPUS: "" if indices is None else format_indices(indices),
    }
    if any(pod.annotations.get(k) != v for k, v in values.items()):
        state.out.append(AnnotatePod(pod.uid, pod.namespace, pod.name, values))


def on_cover_refused(state: State, event: CoverRefused) -> None:
    """Someone else has the pod's GPUs, or its node: it has to stop at once."""
    entry = state.book.get(event.uid)
    if entry is None or entry.phase is not Phase.COVERING:
        return
    pod = state.pods.get(event.uid)
    entry.job_id = 0
    entry.claim = None
    if pod is None or pod.is_over:
        state.drop(entry)
        return
    entry.why = f"no claim could be made for it: {event.text}"
    entry.move(Phase.LOST, state.now)
    state.touch(entry.slurm_node)
    if entry.stray and state.settings.policy.stray != "evict":
        # A pod that we never let in: by policy it is reported and its GPUs stay charged to it.
        text = f"holds GPUs without a Slurm allocation: {event.text}"
        if _once(state, ("stray", pod.uid), 300):
            state.out.append(Tell(pod.namespace, pod.name, pod.uid, "Stray", text, warning=True))
        return
    evict.tell_lost(state, entry, pod)


def _sweep(state: State) -> None:
    """Claims in Slurm that the book does not know: adopt, or end after proof."""
    snapshot = state.snapshot
    if snapshot is None:
        return
    by_uid: dict[str, list[SlurmJob]] = {}
    for job_id, owner in state.ours.items():
        job = snapshot.jobs[job_id]
        if job.state.base in ("RUNNING", "PENDING") and "COMPLETING" not in job.state.flags:
            by_uid.setdefault(owner.uid, []).append(job)
    seen = set()
    for uid, jobs in by_uid.items():
        entry = state.book.get(uid)
        if entry is not None and entry.phase in (Phase.ASKING, Phase.COVERING):
            continue
        for job in sorted(jobs, key=lambda j: j.id):
            if entry is not None and entry.job_id == job.id:
                continue
            seen.add(job.id)
            if entry is None or (entry.phase is Phase.DOUBT and not entry.job_id):
                entry = _adopt(state, uid, job, jobs) or entry
            elif snapshot.began > entry.since:
                _end_extra(state, uid, job, "the pod has another claim")
    for job_id in [j for j in state.orphans if j not in seen]:
        del state.orphans[job_id]


def _adopt(state: State, uid: str, job: SlurmJob, jobs: list[SlurmJob]) -> Entry | None:
    """Take a claim that slurmctld has and the book has not, if its pod is there for it."""
    pod = state.pods.get(uid)
    kube_node = state.kube_of.get(job.nodes[0], "") if job.nodes else ""
    if pod is None:
        _doubt_orphan(state, uid, job)
        return None
    written = pod.annotations.get(keys.CLAIM, "").partition("/")[0]
    if written and written != str(job.id) and any(str(j.id) == written for j in jobs):
        return None  # another of them is the one that the pod was bound with
    if pod.is_over or (pod.node and kube_node and pod.node != kube_node):
        _end_extra(state, uid, job, "its pod is over or elsewhere")
        return None
    ask = resolve(pod, state.settings.policy)
    use = job.gpus.get(job.nodes[0]) if job.gpus is not None and job.nodes else None
    is_running = job.state.base == "RUNNING"
    if is_running and use is None:
        return None  # not read yet: the next reading tells
    slurm_node = job.nodes[0] if job.nodes else ""
    claim_id = ClaimId(state.settings.policy.cluster, uid)
    request = None if isinstance(ask, Refusal) else ClaimRequest(claim_id, pod.ref, slurm_node, ask)
    entry = Entry(
        uid=uid,
        ref=pod.ref,
        kube_node=kube_node,
        slurm_node=slurm_node,
        phase=Phase.QUEUED,
        since=state.now,
        request=request,
        job_id=job.id,
    )
    if is_running and use is not None:
        entry.claim = _claim_from(state, entry, job, use)
        entry.gpus = use
        entry.phase = Phase.BOUND if pod.node else Phase.HELD
        if pod.node:
            _write_down(state, entry, pod)
    state.book[uid] = entry
    state.orphans.pop(job.id, None)
    state.held_changed = True
    state.touch(entry.slurm_node)
    return entry


def _claim_from(state: State, entry: Entry, job: SlurmJob, use: GpuUse) -> Claim:
    return Claim(
        id=ClaimId(state.settings.policy.cluster, entry.uid),
        job_id=job.id,
        slurm_node=entry.slurm_node,
        gpus=use,
        state=job.state,
        granted=job.start if job.start is not None else state.now,
        ends=job.end,
        started=job.start,
    )


def _doubt_orphan(state: State, uid: str, job: SlurmJob) -> None:
    """A claim without a pod that we know: ask the API server before it is ended."""
    since = state.orphans.setdefault(job.id, state.now)
    if state.now - since < state.settings.orphan_s:
        return
    state.orphans[job.id] = state.now
    ref = job.comment.partition(" ref=")[2]
    namespace, _, name = ref.partition("/")
    state.out.append(LookPod(uid, namespace, name))


def on_pod_looked_for_orphan(state: State, event: PodLooked) -> None:
    """The API server has told about the pod of a claim that the book does not know."""
    if event.pod is not None:
        state.pods[event.uid] = event.pod
        return
    for job_id, owner in state.ours.items():
        if owner.uid == event.uid and job_id in state.orphans:
            release.end(state, owner, job_id, "there is no pod for it")


def _end_extra(state: State, uid: str, job: SlurmJob, why: str) -> None:
    if _once(state, ("extra", str(job.id)), state.settings.end_retry_s):
        release.end(state, ClaimId(state.settings.policy.cluster, uid), job.id, why)


def _find_strays(state: State) -> None:
    """Pods that are on a pool node with GPUs and have no entry in the book."""
    snapshot = state.snapshot
    if snapshot is None:
        return
    owned = {owner.uid for owner in state.ours.values()}
    for uid, since in state.bound_since.items():
        pod = state.pods.get(uid)
        if pod is None or pod.is_over or uid in state.book or uid in owned:
            continue
        slurm_node = state.slurm_of.get(pod.node, "")
        if not slurm_node or snapshot.began <= since:
            continue
        ask = resolve(pod, state.settings.policy)
        if isinstance(ask, Refusal) and pod.gpu is None:
            continue
        _take_in(state, pod, slurm_node)


def _take_in(state: State, pod: PodRecord, slurm_node: str) -> None:
    """Cover a pod without a claim, exactly if it says which GPUs it was bound with."""
    policy = state.settings.policy
    job_id, _, owner = pod.annotations.get(keys.CLAIM, "").partition("/")
    was_ours = owner == pod.uid and job_id.isdigit()
    indices: tuple[int, ...] | None = None
    if was_ours:
        try:
            indices = parse_indices(pod.annotations.get(keys.GPUS, "")) or None
        except ParseError:
            indices = None
    ask = resolve(pod, policy)
    entry = Entry(
        uid=pod.uid,
        ref=pod.ref,
        kube_node=pod.node,
        slurm_node=slurm_node,
        phase=Phase.COVERING,
        since=state.now,
        gpus=GpuUse(asked_gpus(pod).counts, indices),
        stray=not was_ours,
        why="its claim was missing in Slurm" if was_ours else "it was bound without a claim",
    )
    state.book[pod.uid] = entry
    state.touch(slurm_node)
    refused = ask.text if isinstance(ask, Refusal) else ""
    if not refused and entry.stray and policy.stray != "cover":
        refused = "strays are not covered by policy"
    if isinstance(ask, Refusal) or refused:
        on_cover_refused(state, CoverRefused(pod.uid, "stray", refused))
        return
    entry.request = ClaimRequest(ClaimId(policy.cluster, pod.uid), pod.ref, slurm_node, ask)
    cover(state, entry, pod, indices)
