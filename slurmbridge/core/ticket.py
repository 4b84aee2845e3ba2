"""A gang's place in Slurm's own queue: one placeholder job for all of its members.

A gang that cannot be placed now, or is to be queued, waits there with its account, QOS and time
limit, so that Slurm's priority, fairshare, limits and backfill order it with native jobs. When the
job starts, it is the claim of the whole gang: `split` lays the members on its nodes.

The place is Slurm's alone: after a restart of the bridge it is found by the job's comment, which
names the gang.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurmbridge.core import adopted, evict, release
from slurmbridge.core.action import AllocateGroup, QueueGroup
from slurmbridge.core.event import GroupAllocated, GroupQueued, GroupRefused, JobLooked
from slurmbridge.core.evidence import has_ended, is_old
from slurmbridge.core.state import State, is_live, is_running
from slurmbridge.core.waiting import ABOUT_ASK, Cancel, GangState, Ticket, pause_after
from slurmbridge.pool.claim import GROUP_UID_PREFIX, GroupRequest
from slurmbridge.pool.record import SlurmJob
from slurmbridge.pool.slurmtime import iso

LEFT_S = 15.0
"""A gang that is not complete any more keeps its place for so long: its controller may replace the
pod that is missing."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 4.0, 60.0
MOST_REFUSALS = 3
"""Attempts in a row that Slurm may refuse, for whatever reason, before the gang is queued."""
FIRST_NOW_S = 1.0
"""After a refusal of a claim that was to be had at once: a native job was faster, as a rule."""
TOO_LONG = frozenset(
    {
        "PartitionTimeLimit",
        "QOSMaxWallDurationPerJobLimit",
        "AssocMaxWallDurationPerJobLimit",
    }
)
"""Why a job waits for ever: it is asked for again with the shortest time that is renewed."""
UNTOLD_S = 10.0
"""A claim that runs and of which Slurm tells no GPUs for so long is given back."""


def submit(state: State, gang: GangState, request: GroupRequest) -> None:
    """Ask for a place."""
    ticket = Ticket(gang.uid, request.ref, since=state.now, boot=state.boot)
    state.waiting.tickets[gang.uid] = ticket
    gang.attempts += 1
    state.out.append(QueueGroup(gang.uid, request, gang.uid[:10]))


def claim_now(
    state: State,
    gang: GangState,
    request: GroupRequest,
    now: Mapping[str, int],
    seats: Mapping[str, str],
) -> None:
    """Ask for a claim at once.

    Args:
        state: the state.
        gang: the gang.
        request: what to ask for.
        now: its GPUs by Slurm node, charged until the answer is in.
        seats: Slurm node of each member, by UID.

    """
    ticket = Ticket(gang.uid, request.ref, state.now, boot=state.boot, now=now, seats=seats)
    ticket.asked_until = state.now + state.settings.answer_s
    state.waiting.tickets[gang.uid] = ticket
    gang.attempts += 1
    _touch(state, ticket)
    state.out.append(AllocateGroup(gang.uid, request, gang.uid[:10]))


def on_allocated(state: State, event: GroupAllocated) -> None:
    """The gang's claim is there; `gang` lays the members on it."""
    job = event.job
    if state.lives_in(event.uid, job.id) or _is_ending(state, event.uid, job.id):
        return
    ticket = state.waiting.tickets.get(event.uid)
    on_answer(state, event.uid)
    if ticket is None or (ticket.job_id and ticket.job_id != job.id):
        release.end_group(state, event.uid, job.id, "its gang needs it no more")
        return
    if state.snapshot is not None and state.snapshot.config.boot_time != ticket.boot:
        wake_gang(state, event.uid)  # slurmctld may have forgotten it: the next reading tells
        return
    if has_ended(state, event.uid, job.id):
        drop(state, event.uid)
        if (gang := state.waiting.gang_with(event.uid)) is not None:
            pause(state, gang)
        return
    ticket.job_id, ticket.since = job.id, state.now
    state.ending.pop(job.id, None)
    see(state, ticket, job)


def on_answer(state: State, uid: str) -> None:
    """What was asked for is answered, or never will be: readings tell what has become of it."""
    if (ticket := state.waiting.tickets.get(uid)) is not None:
        ticket.asked_until = 0.0


def _is_ending(state: State, uid: str, job_id: int) -> bool:
    """Whether an answer comes late: a reading has shown the job, and it was ended since.

    It is no answer to what has been asked for after that.
    """
    ending = state.ending.get(job_id)
    return ending is not None and ending.claim_id.uid == uid


def _touch(state: State, ticket: Ticket) -> None:
    for name in ticket.now:
        state.touch(name)


def drop(state: State, uid: str) -> Ticket | None:
    """Forget a gang's place; its job is left as it is."""
    ticket = state.waiting.tickets.pop(uid, None)
    if ticket is not None:
        _touch(state, ticket)
    return ticket


def text(ticket: Ticket) -> str:
    """What its members wait for, for people; "" for a claim that is being made at once."""
    if ticket.now:
        return ""
    if not ticket.job_id:
        return "slurm: a place in Slurm's queue is being asked for"
    reason = f" ({ticket.reason})" if ticket.reason and ticket.reason != "None" else ""
    # To the minute: backfill moves it by seconds at each look.
    starts = "" if ticket.starts is None else f", expected to start at {iso(ticket.starts)[:16]}Z"
    return f"slurm: waits in Slurm's queue as job {ticket.job_id}{reason}{starts}"


def give_up(state: State, uid: str, why: str) -> None:
    """Give a gang's place back, if it has one. An answer that is still to come ends it then."""
    ticket = drop(state, uid)
    if ticket is not None and ticket.job_id:
        release.end_group(state, uid, ticket.job_id, why)


def incomplete(state: State, gang: GangState) -> None:
    """A member is missing: the place is kept for a while."""
    ticket = state.waiting.tickets.get(gang.uid)
    if ticket is None:
        return
    if ticket.now:
        give_up(state, gang.uid, "its gang is not complete any more")
    elif ticket.left_at is None:
        ticket.left_at = state.now
    elif state.now - ticket.left_at > LEFT_S:
        give_up(state, gang.uid, "its gang is not complete any more")


def complete(state: State, gang: GangState) -> Ticket | None:
    """The place of a gang whose members are all there."""
    ticket = state.waiting.tickets.get(gang.uid)
    if ticket is not None:
        ticket.left_at = None
    return ticket


def is_anothers(state: State, gang: GangState) -> bool:
    """Whether pods of an earlier gang of the same name still live in the claim of that name.

    It is theirs to the end; this gang's members get claims of their own.
    """
    sharers = state.sharing.get(gang.uid, set())
    return not sharers <= gang.members or adopted.keeps_away(state, gang.uid)


def settled(state: State, gang: GangState) -> None:
    """The members live in the job now: it is no place any more."""
    gang.refusals, gang.denied = 0, ""
    drop(state, gang.uid)


def claim_of_gang(state: State, gang: GangState) -> SlurmJob | None:
    """The gang's claim, where it runs and has its GPUs: the one that members live in comes first.

    Of one that was found running, not all may be given away yet (`adopted.unclear`). One that is
    neither may be what was refused a moment ago.
    """
    ticket = state.waiting.tickets.get(gang.uid)
    if ticket is not None:
        return ticket.running
    found = [
        job
        for job in state.live_groups.get(gang.uid, ())
        if (job.id in state.waiting.adopted or state.lives_in(gang.uid, job.id))
        and (job.id not in state.ending and is_running(job) and job.gpus and not job.preempted_at)
    ]
    return min(found, key=lambda j: (not state.lives_in(gang.uid, j.id), j.id), default=None)


def refuse(state: State, gang: GangState, job: SlurmJob, why: str) -> None:
    """The gang cannot use what Slurm has given it: given back, and asked for again later."""
    drop(state, gang.uid)
    if not state.lives_in(gang.uid, job.id):
        release.end_group(state, gang.uid, job.id, why)
    pause(state, gang)
    gang.text, gang.text_since = f"slurm: {why}", state.now


def explain(state: State, gang: GangState) -> dict[str, object] | None:
    """The gang's job in Slurm: its place in the queue, or its claim."""
    ticket = state.waiting.tickets.get(gang.uid)
    if ticket is not None and ticket.job_id:
        return {
            "jobId": ticket.job_id,
            "state": "PENDING" if ticket.running is None else "RUNNING",
            "reason": ticket.reason or None,
            "expectedStart": None if ticket.starts is None else iso(ticket.starts),
        }
    sharers = state.entries_of(gang.uid)
    if not sharers:
        return None
    return {"jobId": sharers[0].job_id, "state": "RUNNING", "members": len(sharers)}


def on_queued(state: State, event: GroupQueued) -> None:
    """The gang has its place. An answer that comes late may be of one that it lives in by now."""
    if state.lives_in(event.uid, event.job_id) or _is_ending(state, event.uid, event.job_id):
        return
    ticket = state.waiting.tickets.get(event.uid)
    if ticket is None or ticket.job_id:
        if ticket is None or ticket.job_id != event.job_id:
            release.end_group(state, event.uid, event.job_id, "its gang needs it no more")
        return
    ticket.job_id, ticket.since = event.job_id, state.now
    state.ending.pop(event.job_id, None)  # of a claim that slurmctld forgot, under the same id
    wake_gang(state, event.uid)


def on_refused(state: State, event: GroupRefused) -> None:
    """Slurm takes no such job: told, and tried again later and later."""
    ticket = state.waiting.tickets.get(event.uid)
    gang = state.waiting.gang_with(event.uid)
    if ticket is None or (ticket.job_id and not ticket.now):
        return
    drop(state, event.uid)
    if gang is None:
        return
    pause(state, gang, FIRST_NOW_S if ticket.now else FIRST_PAUSE_S)
    if ticket.now:
        count_refusal(gang, event.reason, event.text)
        return
    gang.text = f"slurm: Slurm does not queue the gang: {event.text[:300]}"
    gang.text_since = state.now


def count_refusal(gang: GangState, reason: str, text: str) -> None:
    """Slurm gave no claim though there seemed to be room.

    Where another node does not cure it, or nothing has for a while, the gang is to wait in Slurm's
    queue: there its limits and its priority count, and Slurm says what it waits for.
    """
    gang.refusals += 1
    if reason in ABOUT_ASK or gang.refusals > MOST_REFUSALS:
        gang.denied = f"slurm: Slurm refuses the claim: {text[:300]}"


def pause(state: State, gang: GangState, first: float = FIRST_PAUSE_S) -> None:
    """Not the same again at once."""
    gang.pause = pause_after(gang.pause, state.now, first, LONGEST_PAUSE_S)
    state.waiting.gangs_due.add(gang.key)


def on_looked(state: State, event: JobLooked) -> bool:
    """A look at a place, or at the job that it has become; False: at no such thing."""
    ticket = state.waiting.tickets.get(event.uid)
    if ticket is None:
        return event.uid.startswith(GROUP_UID_PREFIX)
    # After an old look the next reading asks for another.
    if ticket.job_id == event.job_id and not is_old(state, event.uid, event.job):
        see(state, ticket, event.job)
    return True


def see(state: State, ticket: Ticket, job: SlurmJob | None) -> None:
    """What Slurm says of the job of a place; None: it knows no such job."""
    ticket.suspect = False
    gang = state.waiting.gang_with(ticket.uid)
    if job is None or not state.is_claim_of(job, ticket.uid):
        # Forgotten by slurmctld, and perhaps its id used again; or it was not saved before a
        # restart that the next reading tells of.
        if job is not None or ticket.boot != state.boot or ticket.missing_at is not None:
            drop(state, ticket.uid)
            wake_gang(state, ticket.uid)
        else:
            ticket.missing_at = state.now
        return
    ticket.missing_at, ticket.boot, ticket.running = None, state.boot, None
    if job.state.base == "PENDING" and job.reason in TOO_LONG and gang and not gang.is_short:
        gang.is_short = True
        give_up(state, ticket.uid, "Slurm allows no claim of this length")
    elif job.state.base == "PENDING":
        ticket.reason, ticket.starts = job.reason, job.start
    elif is_running(job) and job.preempted_at is not None and gang is not None:
        refuse(state, gang, job, f"Slurm preempts the gang's claim, job {job.id}")
    elif is_running(job):
        if job.gpus is not None and "CONFIGURING" not in job.state.flags:
            is_asked = bool(ticket.now) and state.now < ticket.asked_until
            ticket.running = None if is_asked else job
        elif ticket.untold_at is None:
            ticket.untold_at = state.now
        elif state.now - ticket.untold_at > UNTOLD_S and gang is not None:
            refuse(state, gang, job, "Slurm does not tell the GPUs that it has given")
    elif not is_live(job):
        # A reading that began before that may still be to come.
        give_up(state, ticket.uid, f"Slurm has ended it ({job.state.base})")
        # A claim asked for at once is ended by ourselves where it is not what was asked for; and a
        # place that was found, perhaps by a scancel of an earlier leader that was slow.
        by_us = bool(ticket.now) or state.now < ticket.asked_until
        if gang is not None and job.state.base == "CANCELLED" and not by_us:
            why = f"job {job.id} of the gang was cancelled in Slurm"
            gang.cancelled = Cancel(why, state.now, frozenset(gang.members))
        elif gang is not None:
            pause(state, gang)
    wake_gang(state, ticket.uid)


def tick(state: State) -> None:
    """Pods of cancelled gangs are told (`evict` sees to the rest); places are not kept for ever."""
    for gang in state.waiting.gangs.values():
        for uid in () if gang.cancelled is None else gang.cancelled.pods:
            pod = state.pods.get(uid)
            if gang.cancelled and pod and not pod.node:
                evict.tell_cancelled(state, pod, gang.cancelled.why)
    for ticket in state.waiting.tickets.values():
        if ticket.left_at is not None:
            wake_gang(state, ticket.uid)


def queued_jobs(state: State) -> dict[int, str]:
    """Jobs that wait in Slurm's queue, with the UID to tell of a look at each."""
    tickets = state.waiting.tickets.values()
    found = {t.job_id: t.uid for t in tickets if t.job_id and not t.running}
    found |= {e.job_id: e.uid for e in state.book.values() if e.phase == "queued" and e.job_id}
    return found


def wake_gang(state: State, uid: str) -> None:
    """Something has happened to a gang: `gang.settle` looks at it."""
    if (gang := state.waiting.gang_with(uid)) is not None:
        state.waiting.gangs_due.add(gang.key)
