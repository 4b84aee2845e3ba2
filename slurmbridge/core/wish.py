"""What a gang asks of Slurm as a whole: one job for all members, on nodes that all of them may use.

Slurm chooses the nodes, when it comes to that: what it must know is said here. Nodes that
Kubernetes cannot use are left out; a required level is one domain of the tree, the one that is
likely to have room first; a preferred one is asked for by the number of leaf switches, where it is
a level of Slurm's own tree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import msgspec
import numpy as np

from slurmbridge.core import publish, shares
from slurmbridge.core.places import switch_heights, topology
from slurmbridge.core.room import Room, Wishes, look, useless_nodes, wishes_of
from slurmbridge.core.state import State
from slurmbridge.core.waiting import GangState
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Ask, ClaimId, GroupRequest, group_ref
from slurmbridge.pool.hostlist import fold
from slurmbridge.pool.index import ViewIndex
from slurmbridge.pool.policy import Policy, resolve
from slurmbridge.pool.reason import CODES, Reason
from slurmbridge.pool.record import PodRecord
from slurmbridge.pool.tasks import as_tasks
from slurmbridge.topology.gang import Gang, Placement, Wish
from slurmbridge.topology.index import Bools
from slurmbridge.topology.pack import pack

_FEATURE_RE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
EACH_AFTER = 3
"""After two claims for all that were refused, one attempt with a claim for each member: that tells
which node Slurm does not give, and that node is left out for a while."""


def must_queue(state: State, members: list[PodRecord]) -> bool:
    """Whether a gang is to wait in Slurm's queue even if there is room for it now."""
    return state.defers or any(p.annotations.get(keys.MODE) == "queued" for p in members)


def request_of(state: State, gang: GangState, members: list[PodRecord]) -> GroupRequest | None:
    """One claim for all members.

    None: they want it now or not at all; it cannot be said in one job (`pool.tasks`, segments); it
    would never be granted; or it has room elsewhere and waits for a while for a better place.

    Args:
        state: the state.
        gang: the gang.
        members: all of them, in rank order; none has a claim.

    """
    wishes = wishes_of(members)
    asks = {p.uid: ask for p in members if isinstance(ask := resolve(p, _policy(state)), Ask)}
    first = asks.get(members[0].uid)
    if (
        isinstance(wishes, str)
        or wishes.segment.pods
        or first is None
        or len(asks) < len(members)
        or any(p.annotations.get(keys.MODE) == "immediate" for p in members)
        or state.snapshot is None
    ):
        return None
    index, wish = publish.index(state), wishes.topology
    places = topology(state, index)
    limit = state.settings.climb_s if wish.climb_s is None else wish.climb_s
    climb = state.now - (gang.complete_at or state.now) > limit
    total = index.of_type(index.total, first.gpu.type)
    if total is None or not len(total):
        return None
    tasks = as_tasks([asks[p.uid] for p in members], int(total.max()))
    if tasks is None:
        return None
    if wish.mode == "preferred" and not climb:
        useless, _ = useless_nodes(state, members)
        anywhere = Room(state, index, members, asks, useless).pack(places, members, Wishes(), True)
        if isinstance(anywhere, Placement):
            return None
    if CODES[Reason.RESERVATION_DENIED] in look(state, first):
        return None
    usable = _usable(state, index, members, tasks.ask.gpu.count * tasks.number)
    inside = usable & _inside(index, first)
    rooms = np.where(inside, total, 0).astype(np.int64)
    sizes = Gang((tasks.ask.gpu.count,) * tasks.number)
    empty = pack(places, rooms, sizes, wish, climb=climb, candidates=inside)
    if not isinstance(empty, Placement):
        return None
    switches = constraint = ""
    if wish.mode == "required":
        domains = _domains(state, index, rooms // tasks.ask.gpu.count, tasks.number, wish)
        constraint = _constraint(state, index, [d & usable for d in domains])
        usable &= np.logical_or.reduce(domains) if constraint else domains[0]
    elif wish.mode == "preferred" and not climb and (count := _leaves(state, index, wish, empty)):
        switches = f"{count}@{int(limit) // 60}:{int(limit) % 60:02d}"
    open_nodes = {state.slurm_of.get(index.names[row], "") for row in np.flatnonzero(usable)}
    partition = state.snapshot.partitions.get(first.partition)
    offered = state.snapshot.nodes if partition is None else partition.nodes
    closed = [name for name in offered if name not in open_nodes]
    if closed and not state.snapshot.config.may_exclude:
        return None  # Slurm might choose one of them
    return msgspec.structs.replace(
        _request(state, gang, members, _enduring(state, gang, tasks.ask), tasks.number),
        exclude=fold(closed) if closed else "",
        switches=switches,
        least=len(np.unique(empty.rows)),
        constraint=constraint,
    )


def _inside(index: ViewIndex, ask: Ask) -> Bools:
    """Nodes of the reservation that an ask names; all where it names none that is known."""
    numbers = [n for (name, _), n in index.reservations.items() if name == ask.reservation]
    found = np.zeros(len(index), np.bool_)
    found[index.windows.row[np.isin(index.windows.reservation, numbers)]] = True
    return found if found.any() else ~found


def claim_of(
    state: State, gang: GangState, members: list[PodRecord], plan: Mapping[str, tuple[str, Ask]]
) -> tuple[GroupRequest, dict[str, int]] | None:
    """One immediate claim for all members, and its GPUs by Slurm node.

    None: it cannot be said in one job (the same number on each node), and every member gets a claim
    of its own.

    Args:
        state: the state.
        gang: the gang.
        members: all of them, in rank order; none has a claim.
        plan: node and ask of each, by UID.

    """
    wishes = wishes_of(members)
    first = plan[members[0].uid][1]
    if (
        not state.settings.gangs_as_one
        or gang.refusals % EACH_AFTER == EACH_AFTER - 1
        or isinstance(wishes, str)
        or wishes.segment.pods
        or any(ask != first for _, ask in plan.values())
    ):
        return None
    now: Counter[str] = Counter()
    for kube_node, ask in plan.values():
        now[state.slurm_of[kube_node]] += ask.gpu.count
    if len(set(now.values())) > 1:
        return None
    request = _request(state, gang, members, first, len(members))
    return msgspec.structs.replace(request, nodes=tuple(sorted(now))), dict(now)


def _request(
    state: State, gang: GangState, members: list[PodRecord], ask: Ask, count: int
) -> GroupRequest:
    """One claim for all members; where it is to be is not said yet."""
    group = members[0].group
    return GroupRequest(
        id=ClaimId(_policy(state).cluster, gang.uid, "group"),
        ref=group_ref(members[0].namespace, gang.key if group is None else group.name),
        ask=ask,
        members=count,
    )


def is_fixed(state: State, gang: GangState, members: list[PodRecord]) -> bool:
    """Whether a gang can wait in Slurm's queue for one domain only, of those that would do."""
    wishes = wishes_of(members)
    if isinstance(wishes, str) or wishes.topology.mode != "required":
        return False
    request = request_of(state, gang, members)
    return request is not None and not request.constraint


def _enduring(state: State, gang: GangState, ask: Ask) -> Ask:
    """A claim that is renewed while its pods live is asked for as the long one that it is.

    For an hour backfill would put it before a larger job, whose start its renewal then puts off. As
    long as plans are heeded of claims that are had at once, or as the site allows.
    """
    if not ask.rolling or gang.is_short or state.snapshot is None:
        return ask
    found = state.snapshot.partitions
    mine = [found[ask.partition]] if ask.partition in found else list(found.values())
    most = min((p.max_time_min for p in mine if p.max_time_min), default=_policy(state).max_minutes)
    most = min(most, _policy(state).max_minutes, _policy(state).plan_horizon_minutes)
    return msgspec.structs.replace(ask, minutes=max(ask.minutes, most))


def _policy(state: State) -> Policy:
    return state.settings.policy


def _usable(state: State, index: ViewIndex, members: list[PodRecord], gpus: int) -> Bools:
    """Nodes that Kubernetes would let every member run on, whatever runs there now.

    Not those where a pod runs that is set aside and has no claim: Slurm would give them to the gang
    again and again, and each time they would be given back. Of a node group those only that has
    all GPUs of the gang left for Kubernetes: Slurm knows no ceiling of ours.
    """
    fits = {pod.fit for pod in members}
    excluded = {
        name
        for pod in members
        for name, until in state.waiting.excluded.get(pod.uid, {}).items()
        if until > state.now
    }
    usable = np.zeros(len(index), np.bool_)
    aside = state.aside.pods.keys()
    for row, name in enumerate(index.names):
        node, view = state.kube_nodes.get(name), state.views[name]
        room, ledger = shares.room(state, view.slurm_node), state.ledgers.get(view.slurm_node)
        usable[row] = (
            node is not None
            and not (ledger is not None and aside and aside & set(ledger.uncovered))
            and view.agent
            and (room is None or room >= gpus)
            and name not in state.problems
            and name not in excluded
            and all(node.takes(fit) for fit in fits)
        )
    return usable


def _leaves(state: State, index: ViewIndex, wish: Wish, empty: Placement) -> int:
    """How many leaf switches the gang needs in the empty pool: what `--switches` counts.

    0: Slurm cannot be asked for the level (it is none of its own tree), or need not be (the whole
    pool is one domain of it).
    """
    places, heights = topology(state, index), switch_heights(state, index)
    height = places.height_of.get(wish.level)
    if height not in heights or len(places.names[height]) < 2:
        return 0
    return len(np.unique(places.domain[heights[0]][places.place[list(empty.rows)]]))


def _domains(
    state: State, index: ViewIndex, holds: np.ndarray, count: int, wish: Wish
) -> list[Bools]:
    """Nodes of each domain of the level that can hold the gang; that with most free GPUs first."""
    places = topology(state, index)
    if wish.level not in places.height_of and places.side is not None:
        places = places.side
    height = places.height_of[wish.level]
    free = index.free[0] if len(index.free) else np.zeros(len(index), np.int64)
    room = places.sums(holds.astype(np.int64)[places.row], height)
    spare = places.sums(free.astype(np.int64)[places.row], height)
    order = np.argsort(-spare, kind="stable")
    found = []
    for domain in order[room[order] >= count]:
        chosen = np.zeros(len(index), np.bool_)
        chosen[places.row[places.domain[height] == domain]] = True
        found.append(chosen)
    return found


def _constraint(state: State, index: ViewIndex, domains: list[Bools]) -> str:
    """`[rackA|rackB]`: one node feature for each domain, which all of its nodes have and none else.

    "" where there is no such feature for every domain, or only one domain.
    """
    if len(domains) < 2 or state.snapshot is None:
        return ""
    where: dict[str, set[int]] = {}
    for row, name in enumerate(index.names):
        node = state.snapshot.nodes.get(state.slurm_of.get(name, ""))
        for feature in () if node is None else node.features:
            if _FEATURE_RE.fullmatch(feature):
                where.setdefault(feature, set()).add(row)
    by_rows = {frozenset(rows): feature for feature, rows in sorted(where.items())}
    inside = np.logical_or.reduce(domains)
    found = []
    for domain in domains:
        wanted = set(np.flatnonzero(domain).tolist())
        feature = next(
            (
                feature
                for rows, feature in by_rows.items()
                if {row for row in rows if inside[row]} == wanted
            ),
            "",
        )
        found.append(feature)
    return f"[{'|'.join(sorted(found))}]" if all(found) else ""
