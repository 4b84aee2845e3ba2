"""After each reading of slurmctld: does every pod have its claim, and every claim its pod?

A reading shows things as they were between `began` and `ended`. Only what began after our own
last word on a claim can contradict it, and no contradiction is acted upon before a second,
targeted look (`LookJob`, `LookPod`) has confirmed it.
"""

from __future__ import annotations

import math

import msgspec

from slurmbridge.core import cover, evict, release, settle, sweep
from slurmbridge.core.action import Extend, LookJob, Tell
from slurmbridge.core.event import Extended, JobLooked
from slurmbridge.core.evidence import fits, is_elsewhere, is_old
from slurmbridge.core.settle import write_down
from slurmbridge.core.state import Entry, Phase, State, is_running
from slurmbridge.pool import keys
from slurmbridge.pool.claim import ClaimId
from slurmbridge.pool.record import SlurmJob
from slurmbridge.pool.slurmtime import iso

MOST_LOOKS = 200
"""Targeted looks that one reading may cause: however many claims are missing from it, slurmctld
is not asked about each at once."""
RENEW_AGAIN_S = 30.0
WRITE_AGAIN_S = 10.0
ITS_TIME_IS_OVER = "the time that the pod has named is over"
END_SPARE_S = 5.0
"""A pod whose time is over is stopped so much earlier than its grace period needs."""
LAST_MINUTES = 10
"""A claim whose pod is gone, and perhaps not its processes, is renewed for so long at a time."""
TELL_DELAY_S = 3600.0


def after_reading(state: State) -> None:
    """Compare the book with the reading, both ways."""
    if state.snapshot is None or not (state.pods_listed and state.nodes_listed):
        return
    release.settle_endings(state)
    looks = MOST_LOOKS
    for entry in list(state.book.values()):
        if state.book.get(entry.uid) is entry:
            looks -= _check(state, entry, may_look=looks > 0)
    sweep.run(state)
    state.audited = True


def _check(state: State, entry: Entry, *, may_look: bool) -> bool:
    """Compare one entry; True if a look was asked for."""
    if entry.phase is Phase.COVERING:
        cover.check(state, entry)
    if entry.phase in (Phase.ASKING, Phase.DOUBT, Phase.COVERING):
        return False
    if not entry.job_id or state.snapshot is None:
        return False
    job = state.snapshot.jobs.get(entry.job_id)
    if job is not None and state.is_claim_of(job, entry.claim_uid):
        if is_running(job) and not _has_moved(entry, job):
            _still_running(state, entry, job)
            return False
        if entry.phase is Phase.QUEUED and job.state.base == "PENDING":
            return False
    if entry.phase is Phase.LOST or state.snapshot.began <= entry.sure_at:
        return False
    entry.suspect = True
    return may_look and _look_again(state, entry)


def _has_moved(entry: Entry, job: SlurmJob) -> bool:
    """Whether the claim runs, and does not hold what its pod was given any more."""
    return entry.phase in (Phase.HELD, Phase.BOUND) and is_elsewhere(entry, job)


def _still_running(state: State, entry: Entry, job: SlurmJob) -> None:
    if entry.phase is Phase.LOST:
        # It goes for another's sake, or the breaker holds it back: what it has is still its own.
        _renew(state, entry, job)
        if evict.goes_with_gang(state, entry):
            return
        is_kept = job.preempted_at is None and not _runs_out(state, entry, job)
        if is_kept and fits(entry, job) and not evict.is_on_its_way(state, entry):
            settle.take_job(state, entry, job)
        return
    entry.suspect, entry.looking, entry.missing_at = False, None, None
    entry.sure_at, entry.boot = state.now, state.boot
    if entry.claim is None or entry.phase is Phase.QUEUED:
        settle.take_job(state, entry, job)
        return
    if entry.phase is Phase.HELD and job.preempted_at is not None and not entry.promised:
        # Nobody may be bound with it yet: let go now, its pod would be evicted at once.
        release.end_entry(state, entry, "Slurm preempts it")
        return
    if entry.phase is Phase.LINGERING:
        _renew(state, entry, job)
    pod = state.pods.get(entry.uid)
    if entry.phase is not Phase.BOUND or pod is None:
        return
    if job.preempted_at is not None:
        # Slurm gives notice before it takes the GPUs: the pod's grace runs while they are held.
        evict.lose(state, entry, pod, f"Slurm preempts the claim (job {job.id})")
        return
    if _runs_out(state, entry, job):
        evict.lose(state, entry, pod, f"{ITS_TIME_IS_OVER} (job {job.id})", is_own_end=True)
        return
    if entry.why:
        evict.unlose(state, entry, pod)
    if state.once("write", entry.uid, WRITE_AGAIN_S):
        write_down(state, entry, pod)
    _renew(state, entry, job)


def _runs_out(state: State, entry: Entry, job: SlurmJob) -> bool:
    """Whether a claim with an end of its own has left what its pod's grace takes, and no more."""
    request, pod = entry.request, state.pods.get(entry.uid)
    if request is None or request.ask.rolling or job.end is None or pod is None:
        return False
    is_leaving = pod.is_over or pod.deleting_since is not None
    return not is_leaving and job.end - state.slurm_wall <= pod.grace_s + END_SPARE_S


def _renew(state: State, entry: Entry, job: SlurmJob) -> None:
    """Rolling claims get their full time again when the rest runs short.

    A claim with an end of its own has what its pod needs to that end. Where the pod is stopped
    shortly before, or nobody can tell when its last process ends, that is later.
    """
    request, pod = entry.request, state.pods.get(entry.uid)
    if job.end is None or request is None:
        return
    minutes = request.ask.minutes
    enough_s = minutes * 60 * state.settings.renew_share
    if not request.ask.rolling:
        if entry.phase is Phase.LINGERING:
            minutes, enough_s = LAST_MINUTES, 60.0 * LAST_MINUTES / 2
        elif pod is not None and pod.deleting_since is not None:
            minutes = math.ceil(pod.grace_s / 60) + 1  # one to spare for the end
            # The API server's time by our clock, and either may be wrong: its grace is the most
            # that is left, and while it is there its claim never runs out.
            left_s = pod.deleting_since + pod.grace_s + RENEW_AGAIN_S - state.wall
            enough_s = min(max(left_s, 2 * RENEW_AGAIN_S), pod.grace_s + RENEW_AGAIN_S)
        else:
            return
    if renew(state, state.claim_id_of(entry), job, minutes, enough_s) and request.ask.rolling:
        _tell_delay(state, entry, job, state.slurm_wall + 60 * minutes)


def renew(state: State, claim_id: ClaimId, job: SlurmJob, minutes: int, enough_s: float) -> bool:
    """Give a claim so many minutes from now when less than `enough_s` are left of it.

    Slurm ends it by its own clock: that one decides, and says when the minutes are over.
    """
    is_short = job.end is not None and job.end - state.slurm_wall < enough_s
    if is_short and state.once("renew", claim_id.uid, RENEW_AGAIN_S):
        state.out.append(Extend(claim_id, job.id, state.slurm_wall + 60.0 * minutes))
        return True
    return False


def _tell_delay(state: State, entry: Entry, job: SlurmJob, end: float) -> None:
    """A claim that says no duration is renewed for as long as its pods live, whoever waits."""
    pod, own = state.pods.get(entry.uid), entry.request and entry.request.ask.reservation
    for name in job.nodes:
        starts = [w.start for w in state.windows.get(name, ()) if w.reservation != own]
        starts += [state.starts[name]] if name in state.starts else []
        if pod is None or all(start >= end for start in starts):
            continue
        if state.once("delays", entry.claim_uid, TELL_DELAY_S):
            text = f"the claim on {name} is renewed though Slurm has planned the node for others"
            text += f" from {iso(min(starts))} on; annotation {keys.DURATION} would say an end"
            state.out.append(
                Tell(pod.namespace, pod.name, pod.uid, "PlanDelayed", text, warning=True)
            )
        return


def on_extended(state: State, event: Extended) -> None:
    """Slurm gave the claim more time."""
    for entry in state.entries_of(event.uid):
        if entry.claim is not None and entry.job_id == event.job_id:
            entry.claim = msgspec.structs.replace(entry.claim, ends=event.ends)


def _look_again(state: State, entry: Entry) -> bool:
    if entry.looking is not None and state.now - entry.looking <= state.settings.look_retry_s:
        return False
    entry.looking = state.now
    state.out.append(LookJob(entry.uid, entry.job_id))
    return True


def on_job_looked(state: State, event: JobLooked) -> None:
    """The second look at a claim that a reading did not show as running."""
    entry = state.book.get(event.uid)
    if entry is None or entry.job_id != event.job_id:
        return
    if entry.looking is None and entry.phase is not Phase.QUEUED:
        return
    entry.looking = None
    job = event.job
    if job is not None and state.is_claim_of(job, entry.claim_uid):
        if is_old(state, entry.claim_uid, job):
            return  # the next reading asks for another look
        if is_running(job) and _has_moved(entry, job):
            _lose(state, entry, f"Slurm holds other GPUs for the claim by now (job {job.id})")
        elif is_running(job):
            _still_running(state, entry, job)
        elif job.state.base != "PENDING" or entry.phase is not Phase.QUEUED:
            is_rolling = entry.request is None or entry.request.ask.rolling
            done = "suspended" if job.state.base == "SUSPENDED" else "ended"
            why = f"Slurm has {done} the claim (job {job.id}: {job.state.base})"
            is_own_end = job.state.base == "TIMEOUT" and not is_rolling
            _lose(state, entry, why, is_own_end=is_own_end)
        return
    if job is not None or entry.boot != state.boot:
        # A stranger's job under its id, or another slurmctld than the one that held it.
        cover.forget(state, entry)
    elif entry.missing_at is None:
        # Its record should have stayed for MinJobAge. Perhaps slurmctld has restarted, and the
        # next reading says so.
        entry.missing_at = state.now
    elif state.snapshot is not None and state.snapshot.began > entry.missing_at:
        _lose(state, entry, "the claim is gone from Slurm")


def _lose(state: State, entry: Entry, why: str, *, is_own_end: bool = False) -> None:
    """Slurm has ended a claim. Its pod has to go; until then its GPUs stay charged to it."""
    pod = state.pods.get(entry.uid)
    if entry.phase is Phase.LINGERING:
        state.set_job(entry, 0)  # nothing is left to end; the GPUs stay charged for a while
    elif pod is None or not pod.node or pod.is_over:
        release.end_entry(state, entry, why)
    else:
        evict.lose(state, entry, pod, why, is_own_end=is_own_end)
