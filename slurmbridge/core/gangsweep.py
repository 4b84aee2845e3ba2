"""Claims and places of gangs in a reading of slurmctld: compared with what is known of them.

A place that an earlier leader has asked for is taken over; in a claim that runs the members are
found in their shares; what has no gang any more is ended after proof.
"""

from __future__ import annotations

from slurmbridge.core import agents, release, split
from slurmbridge.core import ticket as places
from slurmbridge.core.action import LookJob
from slurmbridge.core.evidence import uid_of_group
from slurmbridge.core.state import State, is_running
from slurmbridge.core.waiting import Adopted, Ticket
from slurmbridge.pool.record import PodRecord, SlurmJob


def after_reading(state: State) -> None:
    """Compare the claims of gangs in the reading with what is known of them."""
    if state.snapshot is None:
        return
    _check_tickets(state)
    if not state.live_groups:
        state.waiting.adopted.clear()
        return
    members: dict[str, list[PodRecord]] = {uid: [] for uid in state.live_groups}
    for pod in state.pods.values():
        if pod.group is not None and (uid := uid_of_group(pod)) in members and not pod.is_over:
            members[uid].append(pod)
    for uid in members.keys() | state.waiting.adopted.keys():
        if uid not in members:
            state.waiting.adopted.pop(uid, None)
    for uid, jobs in list(state.live_groups.items()):
        job = _the_one(state, uid, [j for j in jobs if j.id not in state.ending])
        if job is not None:
            _compare(state, uid, job, members[uid])


def _check_tickets(state: State) -> None:
    """Look at places that the reading does not show.

    One that was only asked for, and that no reading shows for long enough, was not made.
    """
    if state.snapshot is None:
        return
    for ticket in list(state.waiting.tickets.values()):
        waited = state.snapshot.began - ticket.since
        live = [j.id for j in state.live_groups.get(ticket.uid, ()) if j.id not in state.ending]
        if ticket.job_id and waited > 0 and ticket.job_id not in live:
            if state.once("look", ticket.uid, state.settings.look_retry_s):
                state.out.append(LookJob(ticket.uid, ticket.job_id))
        elif not ticket.job_id and waited > state.settings.answer_s and not live:
            places.drop(state, ticket.uid)
            places.wake_gang(state, ticket.uid)


def _the_one(state: State, uid: str, jobs: list[SlurmJob]) -> SlurmJob | None:
    """Which of a gang's jobs counts: the one that its members live in, else the first to run."""
    lived_in = {entry.job_id for entry in state.entries_of(uid)}
    ticket = state.waiting.tickets.get(uid)
    if ticket is not None:
        if not ticket.job_id and state.snapshot and state.snapshot.began <= ticket.since:
            return None  # it is being asked for: what this reading shows is older
        lived_in.add(ticket.job_id)
    ranked = sorted(jobs, key=lambda j: (j.id not in lived_in, not is_running(j), j.id))
    for extra in ranked[1:]:
        if extra.id not in lived_in:
            places.end(state, uid, extra.id, "its gang has another claim")
    return ranked[0] if ranked else None


def _compare(state: State, uid: str, job: SlurmJob, pods: list[PodRecord]) -> None:
    ticket = state.waiting.tickets.get(uid)
    sharers = state.entries_of(uid)
    if sharers and all(entry.job_id != job.id for entry in sharers):
        return  # theirs is not shown: `audit` looks into that first
    if ticket is not None and ticket.job_id in (0, job.id):
        ticket.job_id = job.id
        places.see(state, ticket, job)
        return
    if not pods and not sharers:
        _orphan(state, uid, job)
        return
    if job.state.base == "PENDING":
        if ticket is None:
            _take_ticket(state, uid, job, pods)
        return
    if not sharers:
        state.waiting.adopted.setdefault(uid, Adopted(state.now, state.moment))
    split.adopt(state, uid, job, pods)
    if not is_running(job):
        return
    found = state.waiting.adopted.get(uid)
    is_new = found is None or state.now - found.since <= 2 * places.LEFT_S
    if state.entries_of(uid) or (
        is_new and any(p.uid not in state.book and not p.node for p in pods)
    ):
        places.wake_gang(state, uid)
    elif not any(split.says_its_in(pod, job) for pod in pods):
        places.end(state, uid, job.id, "its gang does not live in it")


def _take_ticket(state: State, uid: str, job: SlurmJob, pods: list[PodRecord]) -> None:
    """The place that an earlier leader has asked for; not wanted if the gang has begun since."""
    if any(p.node or p.uid in state.book for p in pods):
        places.end(state, uid, job.id, "its gang has other claims")
        return
    ref = job.comment.partition(" ref=")[2]
    ticket = Ticket(uid, ref, since=state.now, job_id=job.id, boot=state.boot)
    state.waiting.tickets[uid] = ticket
    places.see(state, ticket, job)


def _orphan(state: State, uid: str, job: SlurmJob) -> None:
    """A claim of a gang of which no pod is known: ended once that has held for long enough.

    A waiting one holds nothing. In a running one there may be processes of pods that were deleted
    by force; on a node that cannot tell, for as long as it is silent.
    """
    found = state.waiting.adopted.setdefault(uid, Adopted(state.now, state.moment))
    wait = state.settings.orphan_s
    if job.state.base != "PENDING":
        wait += state.settings.linger_s
        if any(release.is_silent_on(state, name) for name in job.nodes):
            state.waiting.adopted[uid] = Adopted(state.now, state.moment)
            return
        if agents.are_clear(state, job, found.moment) is False:
            return
    if state.now - found.since > wait:
        places.end(state, uid, job.id, "there is no pod for it")
