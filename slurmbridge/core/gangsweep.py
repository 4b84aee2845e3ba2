"""Claims and places of gangs in a reading of slurmctld: compared with what is known of them.

A place that an earlier leader has asked for is taken over; in a claim that runs the members are
found in their shares; what has no gang any more is ended after proof.
"""

from __future__ import annotations

from slurmbridge.core import adopted, release, split
from slurmbridge.core import ticket as places
from slurmbridge.core.action import LookJob
from slurmbridge.core.evidence import is_bound_with, may_live_in, uid_of_group, written_claim
from slurmbridge.core.state import State, is_running
from slurmbridge.core.waiting import Ticket
from slurmbridge.pool.record import PodRecord, SlurmJob

GONE_S = 30.0
"""A claim that was found is kept so long for its gang, once it can be given away."""


def after_reading(state: State) -> None:
    """Compare the claims of gangs in the reading with what is known of them."""
    if state.snapshot is None:
        return
    _check_tickets(state)
    adopted.find(state)
    _note_clear(state)
    if not state.live_groups:
        return
    members: dict[str, list[PodRecord]] = {uid: [] for uid in state.live_groups}
    owners = {job.id: (uid, job) for uid, jobs in state.live_groups.items() for job in jobs}
    for pod in state.pods.values():
        if pod.is_over:
            continue
        if pod.group is not None and (uid := uid_of_group(pod)) in members:
            members[uid].append(pod)
        # Its group may have been another when it was given its share.
        written = written_claim(pod) if pod.node else None
        uid, job = owners.get(0 if written is None else written.job_id, ("", None))
        if job is not None and uid != uid_of_group(pod) and may_live_in(pod, job):
            members[uid].append(pod)
    for uid, jobs in list(state.live_groups.items()):
        if state.aside.of_uid(uid) is not None:
            continue  # `holdout` keeps it
        _settle(state, uid, [j for j in jobs if j.id not in state.ending], members[uid])


def _note_clear(state: State) -> None:
    """Since when nothing can be left in the claims that were found.

    On a node that cannot tell, kubelet stops nothing: time alone counts from its return.
    """
    for uid, jobs in state.live_groups.items():
        for job in jobs:
            found = state.waiting.adopted.get(job.id)
            if found is None:
                continue
            if any(release.is_silent_on(state, name) for name in job.nodes):
                found.quiet_since = state.now
            if state.lives_in(uid, job.id):
                continue
            if adopted.unclear(state, job):
                found.clear_at = None
            elif found.clear_at is None:
                found.clear_at = state.now


def _check_tickets(state: State) -> None:
    """Look at places that the reading does not show.

    One that was only asked for, and that no reading shows for long enough, was not made.
    """
    if state.snapshot is None:
        return
    for ticket in list(state.waiting.tickets.values()):
        waited = state.snapshot.began - ticket.since
        if state.waiting.gang_with(ticket.uid) is None and waited > state.settings.orphan_s:
            places.give_up(state, ticket.uid, "its gang does not wait any more")
            continue
        live = [j.id for j in state.live_groups.get(ticket.uid, ()) if j.id not in state.ending]
        if ticket.job_id and waited > 0 and ticket.job_id not in live:
            ticket.suspect = True
            if state.once("look", ticket.uid, state.settings.look_retry_s):
                state.out.append(LookJob(ticket.uid, ticket.job_id))
        elif not ticket.job_id and waited > state.settings.answer_s and not live:
            places.drop(state, ticket.uid)
            places.wake_gang(state, ticket.uid)


def _settle(state: State, uid: str, jobs: list[SlurmJob], pods: list[PodRecord]) -> None:
    """One of a gang's jobs counts: the one that its members live in, else the first to run.

    Others are ended, but not where members say that they have their shares in them: Slurm may have
    kept the gang's first claim from it (its GPUs were not told), and after a restart of the bridge
    both are found.
    """
    lived_in = {entry.job_id for entry in state.entries_of(uid)}
    ticket = state.waiting.tickets.get(uid)
    if ticket is not None:
        if not ticket.job_id and state.snapshot and state.snapshot.began <= ticket.since:
            return  # it is being asked for: what this reading shows is older
        lived_in.add(ticket.job_id)
    said = split.said(state, pods) if len(jobs) > 1 else set()

    def rank(job: SlurmJob) -> tuple[bool, bool, bool, int]:
        return job.id not in lived_in, job.id not in said, not is_running(job), job.id

    for index, job in enumerate(sorted(jobs, key=rank)):
        if not index:
            _compare(state, uid, job, pods)
        elif job.id in said:
            split.adopt(state, uid, job, pods)
        elif job.id not in lived_in:
            release.end_group(state, uid, job.id, "its gang has another claim")


def _compare(state: State, uid: str, job: SlurmJob, pods: list[PodRecord]) -> None:
    ticket = state.waiting.tickets.get(uid)
    sharers = state.entries_of(uid)
    if sharers and all(entry.job_id != job.id for entry in sharers):
        return  # theirs is not shown: `audit` looks into that first
    is_asked = ticket is not None and not ticket.job_id and job.id not in state.waiting.adopted
    if ticket is not None and ticket.now and job.state.base == "PENDING":
        is_asked = False  # what is had at once never waits: an earlier leader has queued this one
    if ticket is not None and (is_asked or ticket.job_id == job.id):
        ticket.job_id = job.id
        places.see(state, ticket, job)
        return
    if not pods and not sharers:
        _orphan(state, uid, job)
        return
    if job.state.base == "PENDING":
        # Members that live in it by now were laid after this reading was taken, or `audit` looks
        # into what has become of it.
        if ticket is None and not sharers:
            _take_ticket(state, uid, job, pods)
        return
    split.adopt(state, uid, job, pods)
    if not is_running(job):
        return
    found = state.waiting.adopted.get(job.id)
    # One that has become clear is its gang's, if that comes for it.
    is_its = found is None or found.clear_at is None or state.now - found.clear_at <= GONE_S
    if state.sharing.get(uid) or (
        is_its and any(p.uid not in state.book and not p.node for p in pods)
    ):
        places.wake_gang(state, uid)
    elif not any(is_bound_with(pod, job) for pod in pods):
        release.end_group(state, uid, job.id, "its gang does not live in it")


def _take_ticket(state: State, uid: str, job: SlurmJob, pods: list[PodRecord]) -> None:
    """The place that an earlier leader has asked for; not wanted if the gang has begun since."""
    if any(p.node or p.uid in state.book for p in pods):
        release.end_group(state, uid, job.id, "its gang has other claims")
        return
    state.waiting.adopted.pop(job.id, None)  # nobody lives in what waits
    ref = job.comment.partition(" ref=")[2]
    ticket = Ticket(uid, ref, since=state.now, job_id=job.id, boot=state.boot)
    ticket.asked_until = state.now + state.settings.answer_s
    state.waiting.tickets[uid] = ticket
    places.see(state, ticket, job)


def _orphan(state: State, uid: str, job: SlurmJob) -> None:
    """A claim of a gang of which no pod is known: ended once that has held for long enough.

    A waiting one holds nothing. In a running one there may be processes of pods that were deleted
    by force; on a node that cannot tell, for as long as it is silent.
    """
    found = state.waiting.adopted.get(job.id)
    wait = state.settings.orphan_s
    if job.state.base != "PENDING":
        wait += state.settings.linger_s
    if found is None or state.now - found.quiet_since > wait:
        release.end_group(state, uid, job.id, "there is no pod for it")
