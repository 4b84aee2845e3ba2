"""Gangs: pods that start together are placed together, claimed together, and let go together.

A group is planned once all its members wait behind the gate: `topology.pack` lays them in the
smallest domain, every member gets its claim, and only when all claims are held do the gates come
off. One refusal, and everything that the attempt holds is given back: a gang never holds part of
its nodes while it waits.

`settle` looks at one gang and does the next thing; it is called whenever something about the gang
may have changed and says the same again if nothing has, so a restart goes on where the last leader
stopped: its claims are found in Slurm, the members behind their gates.
"""

from __future__ import annotations

from collections import Counter

from slurmbridge.core import (
    adopted,
    layout,
    lift,
    publish,
    release,
    room,
    running,
    shares,
    split,
    ticket,
    together,
    turn,
    wish,
)
from slurmbridge.core.action import Allocate, AnnotatePod, LogGang, LookGroup, Tell
from slurmbridge.core.event import GroupLooked
from slurmbridge.core.settle import drawn, request_for
from slurmbridge.core.state import Entry, Phase, State, asked_gpus
from slurmbridge.core.waiting import GangState, pause_after
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Ask, group_uid
from slurmbridge.pool.hostlist import natural
from slurmbridge.pool.policy import Refusal, resolve
from slurmbridge.pool.reason import Reason
from slurmbridge.pool.record import PodRecord, SlurmJob

LOOK_SIZE_S, LONGEST_LOOK_S = 5.0, 60.0
MOST_LOOKS = 50
"""Sizes of groups that are asked for in a second."""
LOOK_AGAIN_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
EXCLUDE_S = 120.0
ELSEWHERE_S = 4.0
"""Room that is there for so long is not what Slurm is about to give to others."""


def join(state: State, pod: PodRecord) -> None:
    """A member waits behind the gate."""
    if pod.group is None:
        return
    key = pod.group.key
    gang = state.waiting.gangs.get(key)
    if gang is None:
        gang = GangState(key, since=state.now, uid=group_uid(key))
        state.waiting.add_gang(gang)
    begun = any((p := state.pods.get(uid)) is not None and p.node for uid in gang.members)
    if pod.group.size_from is not None and begun and pod.uid not in gang.members:
        # A member that is replaced, or one of a second group whose object has the same name.
        gang.size, gang.asked_at, gang.looks = None, float("-inf"), 0
    _add(state, gang, pod)
    state.waiting.gangs_due.add(key)


def _add(state: State, gang: GangState, pod: PodRecord) -> None:
    if pod.uid not in state.waiting.gang_of and pod.nominated and not pod.gates:
        together.note(state, pod.uid)  # let go by an earlier leader
    before = state.waiting.gang_of.get(pod.uid, gang.key)
    if before != gang.key:
        state.waiting.gangs_due.add(before)  # its key is another by now
    gang.members.add(pod.uid)
    state.waiting.gang_of[pod.uid] = gang.key


def see_other(state: State, pod: PodRecord, *, is_gone: bool = False) -> None:
    """A member that asks for no pool GPU (a launcher): nothing is claimed for it, but it counts."""
    if pod.group is None:
        return
    key, others = pod.group.key, state.waiting.others
    if is_gone or pod.is_over or pod.deleting_since is not None:
        mates = others.get(key, set())
        mates.discard(pod.uid)
        if not mates:
            others.pop(key, None)
    elif pod.uid not in others.get(key, ()):
        others.setdefault(key, set()).add(pod.uid)
        if key in state.waiting.gangs:
            state.waiting.gangs_due.add(key)


def run(state: State) -> None:
    """Do the next thing for every gang that something has happened to, oldest first."""
    if state.is_synced and not state.is_stale:
        for gang in turn.next_ones(state):
            settle(state, gang)


def tick(state: State) -> None:
    """What time alone does."""
    waiting = state.waiting
    for gang in waiting.gangs.values():
        full = (gang.complete_at or float("inf")) + state.settings.group_queue_s
        over = _is_over(state, gang, full)
        over = over or (gang.pause is not None and _is_over(state, gang, gang.pause.until))
        useless = _is_over(state, gang, gang.useless_at + together.WAIT_S)
        over = over or (gang.useless_at > 0 and useless)
        if over or (gang.text and state.now - gang.text_since > LOOK_AGAIN_S):
            waiting.gangs_due.add(gang.key)
        if waiting.topology is None and state.now - gang.since > LOOK_AGAIN_S:
            _wait(state, gang, "topology: where the nodes stand is not known yet")
        _tell(state, gang)
    together.tick(state)
    ticket.tick(state)
    turn.tick(state)


def _is_over(state: State, gang: GangState, until: float) -> bool:
    """Whether a gang is to be looked at since a time is over, however late: once."""
    return gang.settled_at < until <= state.now


def on_looked(state: State, event: GroupLooked) -> None:
    """The size of a group.

    Only the last look counts: one before it may have seen an earlier group's object of the name.
    """
    gang = state.waiting.gangs.get(event.key)
    is_last = gang is not None and event.asked in (None, gang.asked_at)
    if gang is not None and is_last and event.found is not None:
        gang.size, gang.made = event.found.size, event.found.made
        gang.in_order = event.found.in_order
        state.waiting.gangs_due.add(event.key)


def on_refused(state: State, entry: Entry, reason: str, text: str) -> None:
    """Slurm refused a member's claim: the whole attempt is given up."""
    gang = together.gang_of(state, entry.uid)
    if gang is not None and not gang.rolling:
        ticket.count_refusal(gang, reason, text)
        _fail(state, gang)


def cannot_use(state: State, entry: Entry) -> None:
    """kube-scheduler cannot use a member's node: the gang goes elsewhere as a whole.

    Once the others are bound, that member alone, near them.
    """
    gang = together.gang_of(state, entry.uid)
    if gang is None:
        return
    excluded = state.waiting.excluded.setdefault(entry.uid, {})
    excluded[entry.kube_node] = state.now + EXCLUDE_S
    state.waiting.gangs_due.add(gang.key)
    if together.has_started(state, gang, _members(state, gang)):
        release.end_entry(state, entry, f"kube-scheduler cannot use {entry.kube_node} for the pod")
    elif not entry.is_useless:
        held = [e for uid in gang.members if (e := state.book.get(uid)) is not None]
        if not any(e.is_useless for e in held):
            gang.useless_at = state.now
        entry.is_useless, entry.is_wanted = True, False


def settle(state: State, gang: GangState) -> None:
    """Look at a gang as it is, and do what comes next."""
    gang.settled_at = state.now
    members = _members(state, gang)
    if not members:
        ticket.give_up(state, gang.uid, "its pods are gone")
        return
    waits = [p for p in members if not p.node]
    entries = [e for p in waits if (e := state.book.get(p.uid)) is not None]
    if any(e.phase is not Phase.HELD for e in entries):
        return  # asked for, in doubt, or to be covered again: their answers come first
    started = together.has_started(state, gang, members)
    held = _held(state, waits)
    if gang.rolling:
        gang.rolling = False
        if not started:
            _give_back(state, held)
            return
    if not started and any(e.is_useless for e in held):
        if together.is_decided(gang, held, state.now):
            _give_back(state, held)
            state.waiting.gangs_due.add(gang.key)
        return
    complete = _is_complete(state, gang, members)
    if not started and any(together.may_come(state, p) for p in members):
        _wait(state, gang, "group: one of its pods may be bound just now")
        return
    started = together.has_started(state, gang, members)
    if not complete:
        if not started:
            # A new leader does not know the size yet: what it has found stays for a while.
            if gang.size is not None or state.now - gang.since > state.settings.answer_s:
                _give_back(state, held)
            ticket.incomplete(state, gang)
        return
    missing = [p for p in members if not p.node and p.uid not in state.book]
    wanted = _wanted(state, gang)
    if missing and not started and _lets_go_of_enough(state, gang, held, wanted):
        return
    if not started and not held and _has_room_elsewhere(state, gang, members, missing):
        ticket.give_up(state, gang.uid, "there is room in another domain by now")
    if missing and not _has_turn(state, gang, missing, begun=started):
        return
    missing = [p for p in missing if p.uid not in state.book]
    if missing and not started:
        now_held = _held(state, waits)
        if len(now_held) > len(held) and _lets_go_of_enough(state, gang, now_held, wanted):
            return
    if not missing:
        ticket.give_up(state, gang.uid, "its gang has other claims")
        _let_go(state, gang, _held(state, waits))
        return
    if gang.pause is not None and state.now < gang.pause.until:
        return
    if not turn.may_look(state, gang):
        return
    may_queue = not started and not held and not ticket.is_anothers(state, gang)
    if (
        may_queue
        and wish.must_queue(state, missing)
        and _queue(state, gang, missing[:wanted], "mode: it is to wait in Slurm's queue")
    ):
        return
    if may_queue and gang.denied:
        _wait(state, gang, gang.denied)
        if _queue(state, gang, missing[:wanted], gang.denied):
            return
    plan = _plan(state, gang, members, missing)
    if isinstance(plan, str) and not started and not held and wanted < len(missing):
        missing = missing[:wanted]  # by rank; those that do not fit follow when they do
        plan = _plan(state, gang, missing, missing)
    if isinstance(plan, str):
        _wait(state, gang, plan)
        if not started:
            _give_back(state, held)
        waited = 0.0 if gang.complete_at is None else state.now - gang.complete_at
        if may_queue and waited >= state.settings.group_queue_s:
            _queue(state, gang, missing[:wanted], plan)
        return
    if may_queue and (now := wish.claim_of(state, gang, missing, plan)) is not None:
        seats = {uid: state.slurm_of[node] for uid, (node, _) in plan.items()}
        ticket.claim_now(state, gang, *now, seats)
        return
    gang.attempts += 1
    for pod, (kube_node, ask) in plan.items():
        _start(state, state.pods[pod], kube_node, ask)


def _lets_go_of_enough(state: State, gang: GangState, held: list[Entry], wanted: int) -> bool:
    """Let those go that have their claims, if as many as have to start together have.

    More may have come than that: they follow when there is room for them.
    """
    if not held or len(held) < wanted:
        return False
    _let_go(state, gang, held)
    return True


def _has_room_elsewhere(
    state: State, gang: GangState, members: list[PodRecord], missing: list[PodRecord]
) -> bool:
    """Whether a gang that waits in Slurm's queue for one domain has had room in another for long.

    Outside of what Slurm has planned for others, as any gang that is claimed at once.
    """
    place = state.waiting.tickets.get(gang.uid)
    if place is None or not place.job_id or place.running or place.now or gang.denied:
        return False
    if wish.must_queue(state, missing) or not wish.is_fixed(state, gang, missing):
        return False
    if not state.once("elsewhere", gang.key, ELSEWHERE_S) or not turn.may_look(state, gang):
        return False
    if isinstance(_plan(state, gang, members, missing), str):
        gang.room_since = None
        return False
    if gang.room_since is None:
        gang.room_since = state.now
    return state.now > gang.room_since


def _held(state: State, pods: list[PodRecord]) -> list[Entry]:
    entries = (state.book.get(pod.uid) for pod in pods)
    return [e for e in entries if e is not None and e.phase is Phase.HELD]


def _has_turn(state: State, gang: GangState, missing: list[PodRecord], *, begun: bool) -> bool:
    """Whether members without a claim may be looked at now.

    Those that can be given a share of the gang's claim are given it here.
    """
    if gang.cancelled:
        _wait(state, gang, f"slurm: {gang.cancelled.why}")
        return False
    if not begun and ticket.is_anothers(state, gang):
        return True
    place = ticket.complete(state, gang)
    job = ticket.claim_of_gang(state, gang)
    if job is None and begun:
        ticket.give_up(state, gang.uid, "its gang has begun")
        return True
    if job is None:
        if place is not None:
            _wait(state, gang, ticket.text(place))
        return place is None
    if not begun and _has_other_claims(state, gang, job):
        ticket.drop(state, gang.uid)
        gang.seats.clear()  # of a plan that is not carried out
        release.end_group(state, gang.uid, job.id, "its gang has other claims")
        return True
    if not begun and (closed := adopted.unclear(state, job)):
        _wait_for_word(state, gang, job, closed)
        return False
    publish.refresh(state)
    if not begun and (over := shares.too_many(state, _gpus_of(job), gang.uid)):
        ticket.refuse(state, gang, job, f"{Reason.CEILING}: {over}")
        return False
    if not begun:
        missing = missing[: _seats(state, gang, job, missing)]
    left, closed = split.lay(state, gang.uid, job, missing, {} if place is None else place.seats)
    if left and not begun:
        for uid in gang.members:
            entry = state.book.get(uid)
            if entry is not None and entry.group:
                state.drop(entry)
            elif entry is not None:
                release.end_entry(state, entry, "the gang cannot start as a whole")
        ticket.refuse(state, gang, job, f"{left[0].name} cannot use what Slurm has given")
        return False
    if left and closed and adopted.is_young(state, job):
        mates = (mate for uid in gang.members if (mate := state.pods.get(uid)) is not None)
        _let_go(state, gang, _held(state, list(mates)))
        _wait_for_word(state, gang, job, closed)
        return False
    ticket.settled(state, gang)
    return True


def _has_other_claims(state: State, gang: GangState, job: SlurmJob) -> bool:
    """Whether members have claims of their own, and nobody lives in the one for all.

    An earlier leader has asked for these, and this one for that, or the other way round: with both
    a share of it would be nobody's for as long as the gang runs.
    """
    entries = (state.book.get(uid) for uid in gang.members)
    own = any(entry is not None and not entry.group for entry in entries)
    return own and not state.lives_in(gang.uid, job.id)


def _seats(state: State, gang: GangState, job: SlurmJob, missing: list[PodRecord]) -> int:
    """For how many more members a claim was made: perhaps for those only that have to start."""
    sharers = state.entries_of(gang.uid)
    left = sum(_gpus_of(job).values()) - sum(e.gpus.total for e in sharers)
    count = 0
    for pod in missing:
        left -= asked_gpus(pod).total
        count += left >= 0
    held = sum(e.phase is Phase.HELD for e in sharers)
    return max(count, _wanted(state, gang) - held)


def _wait_for_word(state: State, gang: GangState, job: SlurmJob, nodes: list[str]) -> None:
    _wait(state, gang, f"slurm: something may be left in its claim, job {job.id}, on {nodes[0]}")


def _gpus_of(job: SlurmJob) -> dict[str, int]:
    return {name: use.total for name, use in (job.gpus or {}).items()}


def _queue(state: State, gang: GangState, members: list[PodRecord], why: str) -> bool:
    """Ask for a place in Slurm's queue, where the gang can be said in one job and may have one."""
    request = wish.request_of(state, gang, members)
    if request is not None:
        gang.short = why
        ticket.submit(state, gang, request)
    return request is not None


def _members(state: State, gang: GangState) -> list[PodRecord]:
    """Its pods that are there and not over, in rank order; forgets the gang with the last one."""
    for uid in list(gang.members):
        pod = state.pods.get(uid)
        if pod is None or not _is_of(gang, pod):
            gang.members.discard(uid)
            if state.waiting.gang_of.get(uid) == gang.key:
                del state.waiting.gang_of[uid]
    if not gang.members:
        state.waiting.drop_gang(gang)
        return []
    if gang.cancelled is not None and not gang.cancelled.pods & gang.members:
        gang.cancelled = None  # those that were meant have gone, others have come
    return _there(state, gang)


def _there(state: State, gang: GangState) -> list[PodRecord]:
    """As `_members`; changes nothing."""
    pods = (state.pods.get(uid) for uid in gang.members)
    return sorted((p for p in pods if p is not None and _is_of(gang, p)), key=_rank)


def _is_of(gang: GangState, pod: PodRecord) -> bool:
    """Whether a pod with the gang's key is there still, and not of an earlier group of the name."""
    if pod.is_over or pod.deleting_since is not None:
        return False
    if pod.group is not None and pod.group.key != gang.key:
        return False
    return pod.bound_at is None or gang.made is None or pod.bound_at >= gang.made


def _rank(pod: PodRecord) -> tuple[tuple[int, ...], tuple[tuple[int, str], ...], float, str]:
    """By rank where there is one, else by name, numbers in it as numbers."""
    rank = pod.group.rank if pod.group is not None else ()
    return rank, natural(pod.name), pod.created, pod.uid


def _is_complete(state: State, gang: GangState, members: list[PodRecord]) -> bool:
    """Whether all have come; if not, the reason is kept."""
    group = members[0].group
    if group is None:
        return False
    fault = next((p.group.fault for p in members if p.group is not None and p.group.fault), "")
    if fault:
        _wait(state, gang, f"group: {fault}")
        return False
    sizes = {p.group.size for p in members if p.group is not None}
    if len(sizes) > 1:
        _wait(state, gang, "group: its members name different sizes")
        return False
    gang.size = group.size if group.size is not None else gang.size
    if gang.size is None:
        if group.size_from is not None and _may_look(state, gang):
            gang.asked_at, gang.looks = state.now, gang.looks + 1
            paths, part = group.size_from.paths, group.size_from.part
            state.out.append(LookGroup(gang.key, paths, part, state.now))
        _wait(state, gang, "group: its size is not known yet")
        return False
    if gang.in_order and group.size_from is not None and not group.size_from.part:
        _divide(state, gang, members)
        return False
    wanted = _wanted(state, gang)
    gang.ended = 0
    if len(members) < wanted:
        _find_others(state, gang, members)
        gang.ended = _ended(state, gang, members)
    if len(members) < wanted - gang.ended:
        gang.complete_at = None
        text = f"group: waits for all of its {gang.size} pods"
        if state.now - gang.since > state.settings.group_s:
            text = f"group: given up, not all of its {gang.size} pods have come"
        _wait(state, gang, text)
        return False
    waits = next((p for p in members if not p.node and not _is_ready(p)), None)
    if waits is not None:
        gang.complete_at = None
        gates = ", ".join(gate for gate in waits.gates if gate != keys.GATE)
        _wait(state, gang, f"group: {waits.name} is behind the gate {gates}")
        return False
    if gang.complete_at is None:
        gang.complete_at = state.now
    return True


def _wanted(state: State, gang: GangState) -> int:
    """How many of its members that ask for GPUs have to start together."""
    return (gang.size or 0) - len(state.waiting.others.get(gang.key, ()))


def _divide(state: State, gang: GangState, members: list[PodRecord]) -> None:
    """Each replicated Job of a JobSet that starts them in order is a gang: written on its pods.

    So every later leader knows it from the pod alone, and a claim keeps its name.
    """
    _wait(state, gang, "group: its JobSet starts one replicated Job after another")
    for pod in members:
        if keys.PART not in pod.annotations and state.once("part", pod.uid, 5):
            note: dict[str, str | None] = {keys.PART: "replicated-job"}
            state.out.append(AnnotatePod(pod.uid, pod.namespace, pod.name, note))


def _ended(state: State, gang: GangState, members: list[PodRecord]) -> int:
    """How many were placed together with these members, and have run to their end already.

    A member whose claim was lost before kube-scheduler had bound it may come that late. Pods of an
    earlier group of the same name were bound before these here were made; of one Job, the pod that
    replaces a member has the rank that is not there.
    """
    groups = [pod.group for pod in members if pod.group is not None]
    ranks, made = {group.rank for group in groups}, max(pod.created for pod in members)
    count, others = 0, set()
    for pod in state.pods_of_group(gang.key):
        bound_at = pod.bound_at or 0.0
        if pod.phase == "Succeeded" and pod.group is not None and bound_at >= (gang.made or 0.0):
            count += bound_at >= made
            if pod.group.owner:
                others.add(pod.group.rank)
    is_whole = len(ranks) == len(members) and len(ranks | others) == _wanted(state, gang)
    return len(others - ranks) if is_whole and others else count


def _is_ready(pod: PodRecord) -> bool:
    """Whether no gate of others keeps a pod back."""
    return not pod.gates or lift.is_gated(pod)


def _may_look(state: State, gang: GangState) -> bool:
    """Whether the size of a group is asked for now: less and less often, so many a second in all.

    Anybody can name groups whose objects there are not.
    """
    pause = min(LOOK_SIZE_S * 2.0 ** min(gang.looks - 1, 10), LONGEST_LOOK_S) if gang.looks else 0.0
    if state.now - gang.asked_at < pause:
        return False
    since, count = state.waiting.size_looks
    if state.now - since >= 1.0:
        since, count = state.now, 0
    state.waiting.size_looks = (since, min(count + 1, MOST_LOOKS))
    if count >= MOST_LOOKS:
        state.waiting.gangs_later.add(gang.key)
        gang.round = state.waiting.round  # it keeps nobody from his turn
    return count < MOST_LOOKS


def _find_others(state: State, gang: GangState, members: list[PodRecord]) -> None:
    """Members that had their gates taken off by an earlier leader."""
    for pod in state.pods_of_group(gang.key):
        if pod.uid not in gang.members and _is_of(gang, pod):
            _add(state, gang, pod)
            members.append(pod)
    members.sort(key=_rank)


def _plan(
    state: State, gang: GangState, members: list[PodRecord], missing: list[PodRecord]
) -> dict[str, tuple[str, Ask]] | str:
    """Node and ask of each missing member by UID, or why there is no place."""
    asks: dict[str, Ask] = {}
    for pod in missing:
        ask = resolve(pod, state.settings.policy)
        if isinstance(ask, Refusal):
            return f"{ask.reason}: {ask.text}"
        asks[pod.uid] = ask
    laid = layout.lay_out(state, gang, members, missing, asks)
    if isinstance(laid, str):
        return laid + layout.why_kept(state, asks.values())
    gpus_on: Counter[str] = Counter()
    for uid, node in laid.node_of.items():
        gpus_on[state.slurm_of.get(node, "")] += asks[uid].gpu.count
    if text := shares.too_many(state, gpus_on):
        return f"{Reason.CEILING}: {text}"
    if laid.found is not None:
        split.note_place(gang, laid.found)
    return {uid: (node, drawn(state, asks[uid], node)) for uid, node in laid.node_of.items()}


def _start(state: State, pod: PodRecord, kube_node: str, ask: Ask) -> None:
    slurm_node = state.slurm_of[kube_node]
    request = request_for(state, pod, slurm_node, ask)
    entry = Entry(
        uid=pod.uid,
        ref=pod.ref,
        kube_node=kube_node,
        slurm_node=slurm_node,
        phase=Phase.ASKING,
        since=state.now,
        request=request,
        gpus=asked_gpus(pod),
        boot=state.boot,
        cause=pod.uid[:8],
        planned=True,
    )
    state.put(entry)
    state.out.append(Allocate(pod.uid, request, entry.cause))


def _let_go(state: State, gang: GangState, held: list[Entry]) -> None:
    """All claims are held: all gates come off."""
    gang.text, gang.pause, gang.denied, gang.refusals = "", None, "", 0
    seats = []
    for entry in held:
        pod = state.pods.get(entry.uid)
        if pod is None or pod.node or entry.lift_at is not None:
            continue
        if lift.is_gated(pod) or not entry.is_let_go:
            where = f" in {gang.level} {gang.domain}" if gang.level else ""
            text = f"{gang.size} pods are claimed together{where}"
            if state.once("gang", pod.uid, 60):
                state.out.append(Tell(pod.namespace, pod.name, pod.uid, "GangPlaced", text))
            lift.lift(state, entry, pod)
            seats.append((pod.ref, entry.kube_node, entry.job_id))
    if seats:
        placed = [p for p in _there(state, gang) if p.node or p.uid in state.book]
        level, domain, _ = running.place(state, placed)
        state.out.append(LogGang(gang.key, level, domain, tuple(seats)))


def _give_back(state: State, held: list[Entry]) -> None:
    for entry in held:
        release.end_entry(state, entry, "the gang cannot start as a whole")


def _fail(state: State, gang: GangState) -> None:
    """An attempt failed: wait a while, each time longer."""
    gang.rolling = True
    gang.pause = pause_after(gang.pause, state.now, FIRST_PAUSE_S, LONGEST_PAUSE_S)
    state.waiting.gangs_due.add(gang.key)


def _wait(state: State, gang: GangState, text: str) -> None:
    gang.text, gang.text_since = text, state.now


def _tell(state: State, gang: GangState) -> None:
    """Write the reason on the members, once for each reason."""
    if not gang.text or gang.told == gang.text or not state.once("gangtext", gang.key, 10):
        return
    gang.told = gang.text
    for uid in gang.members:
        pod = state.pods.get(uid)
        if pod is not None and not pod.node and pod.annotations.get(keys.REASON) != gang.text:
            note = {keys.REASON: gang.text}
            state.out.append(AnnotatePod(pod.uid, pod.namespace, pod.name, note))


def explain(state: State, pod: PodRecord) -> dict[str, object] | None:
    """What there is to say of a pod's group; None: a single pod."""
    if pod.group is None:
        return None
    gang = state.waiting.gangs.get(pod.group.key) or running.found(state, pod.group)
    if gang is None:
        return {"name": pod.group.name, "kind": pod.group.kind, "planned": False}
    rows = []
    members = _there(state, gang)
    level, domain, spread = gang.level, gang.domain, gang.spread
    if not level:  # of an earlier leader's plan
        level, domain, spread = running.place(state, members)
    for rank, member in enumerate(members):
        entry = state.book.get(member.uid)
        rows.append(
            {
                "rank": rank,
                "pod": member.ref,
                "node": member.node or (None if entry is None else entry.kube_node),
                "claim": None if entry is None else str(entry.phase),
                "jobId": None if entry is None else entry.job_id or None,
            }
        )
    return {
        "name": pod.group.name,
        "kind": pod.group.kind,
        "planned": True,
        "size": gang.size,
        "withoutGpus": len(state.waiting.others.get(gang.key, ())),
        "waits": gang.text or None,
        "slurmJob": ticket.explain(state, gang),
        "whyNotNow": gang.short if gang.uid in state.waiting.tickets else None,
        "attempts": gang.attempts,
        "level": level or None,
        "domain": domain or None,
        "whyNotLower": list(gang.shorts),
        "spread": spread,
        "topology": room.said(members, keys.TOPOLOGY) or None,
        "segment": room.said(members, keys.SEGMENT) or None,
        "members": rows,
    }
